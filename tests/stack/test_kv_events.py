"""What the filter knows of its workers' caches is what their block pools hold: after evictions, restarts and lost batches.

The real Envoy and filter between strict engines that publish KV events. The filter's counts are compared by `/healthz`; what
they stand for is compared block by block with a second follower of the same events, in the test's own process.
"""

from __future__ import annotations

import asyncio
import io
from array import array
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import aiohttp
import pytest_asyncio

from extproc.observe.kv_events.subscriber import Subscriber
from extproc.observe.logs import make_logger
from extproc.observe.metrics import Metrics
from extproc.routing.endpoint_spec import EndpointSet, EndpointSpec
from extproc.routing.holdings import Holdings
from extproc.routing.pool import Pool
from extproc.routing.token_chain import TokenChain
from tests.cases.sims import RecordingSim, SimStack
from workers.ready import free_ports
from workers.sim import hashing
from workers.sim.main import SimOptions
from workers.sim.worker import Worker

BLOCK = 16
OPTIONS = SimOptions(
    served_model_name=("m",), speed=0.0, block_size=BLOCK, num_blocks=130, max_model_len=2048, max_num_batched_tokens=512
)
SETTINGS = {"kv_events": {"enabled": True, "check_interval_s": 0.3, "replay_timeout_s": 2.0}}
SYSTEM = list(range(5_000, 5_000 + 6 * BLOCK))


class Publishing(SimStack):
    """Its engines publish; a follower of the test's own is beside the filter's."""

    def __init__(self) -> None:
        super().__init__(prefill=2, decode=1, options=OPTIONS, settings=SETTINGS)
        for sim in self.sims:
            events, again = free_ports(2)
            options = replace(
                sim.worker.options, events_endpoint=f"tcp://*:{events}", events_replay_endpoint=f"tcp://*:{again}"
            )
            sim.worker = Worker(options)
        self.own_pool = Pool(
            EndpointSet(
                prefill=tuple(EndpointSpec(address=sim.address) for sim in self.prefill),
                decode=tuple(EndpointSpec(address=sim.address) for sim in self.decode),
            )
        )
        for endpoint in self.own_pool.endpoints:
            self.own_pool.set_live(endpoint, True)
        self.holdings = Holdings(100_000)
        self.follower = Subscriber(
            self.config.kv_events, self.own_pool, self.holdings, metrics=Metrics(), log=make_logger("error", io.StringIO())
        )

    async def ask(self, prompt: list[int], max_tokens: int = 2) -> None:
        body = {"model": "m", "prompt": prompt, "max_tokens": max_tokens}
        async with self.http.post("/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()

    async def told(self) -> dict[str, Any]:
        """What the filter says of its followers."""
        async with aiohttp.ClientSession() as session, session.get(f"{self.admin}/healthz") as response:
            found: dict[str, Any] = (await response.json())["kv_events"]["workers"]
            return found

    async def agreed(self, prompts: list[list[int]]) -> None:
        """Until filter, follower and engines say the same; it must be soon."""
        said: object = None
        try:
            async with asyncio.timeout(20):
                while True:
                    said = self.differences(prompts, await self.told())
                    if not said:
                        return
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"still different: {said}") from None

    def differences(self, prompts: list[list[int]], told: dict[str, Any]) -> list[str]:
        found = []
        for sim in self.sims:
            cached = sim.worker.engine.core.pool.cached()
            filters = told.get(sim.address, {})
            if not filters.get("in_step"):
                found.append(f"{sim.name}: the filter is not in step: {filters}")
            elif filters["blocks"]["gpu"] != len(cached):
                found.append(f"{sim.name}: {len(cached)} blocks, the filter says {filters['blocks']}")
            for prompt in prompts:
                held = self.holdings.held(TokenChain(array("I", prompt)), sim.address)
                tokens = held.tokens if held else 0
                if tokens != leading(cached, prompt):
                    found.append(f"{sim.name}: {leading(cached, prompt)} tokens of a prompt, not {tokens}")
        return found


def leading(cached: dict[bytes, int], prompt: list[int]) -> int:
    """Tokens of a prompt that an engine's prefix cache holds."""
    parent, held = hashing.root_hash(), 0
    for start in range(0, len(prompt) - BLOCK + 1, BLOCK):
        parent = hashing.block_hash(parent, prompt[start : start + BLOCK])
        if parent not in cached:
            break
        held += BLOCK
    return held


def prompt_of(number: int, blocks: int = 30) -> list[int]:
    return SYSTEM + [10_000 * number + at for at in range(blocks * BLOCK + 5)]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stack() -> AsyncIterator[Publishing]:
    made = Publishing()
    async with made:
        task = asyncio.create_task(made.follower.run())
        yield made
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_caches_are_known_while_they_fill_and_evict(stack: Publishing) -> None:
    prompts = [prompt_of(number) for number in range(1, 13)]
    for prompt in prompts:
        await stack.ask(prompt)
    # Prefixes shared by requests that run at once are computed more than once.
    await asyncio.gather(*(stack.ask(prompt_of(number, 4)) for number in range(20, 32)))
    await stack.agreed(prompts)
    for sim in stack.sims:
        counts = stack.follower.counts(sim.address)
        assert counts is not None and counts.removed > 0, f"{sim.name} evicted nothing: the test shows too little"
        assert (counts.gaps_lost, counts.faulty, counts.restarts) == (0, 0, 0)


async def test_a_lost_batch_is_made_up_for(stack: Publishing) -> None:
    sim: RecordingSim
    for sim in stack.sims:
        assert sim.worker.publisher is not None
        sim.worker.publisher.lose(2)
    prompts = [prompt_of(number) for number in range(40, 46)]
    for prompt in prompts:
        await stack.ask(prompt)
    await stack.agreed(prompts)
    filled = [stack.follower.counts(sim.address).gaps_filled for sim in stack.sims]  # type: ignore[union-attr]
    assert sum(filled) > 0


async def test_a_restarted_engine_holds_nothing(stack: Publishing) -> None:
    prompts = [prompt_of(number) for number in range(50, 53)]
    for prompt in prompts:
        await stack.ask(prompt)
    await stack.agreed(prompts)
    for sim in stack.sims:
        await sim.worker.restart()
    await stack.agreed(prompts)
    for sim in stack.sims:
        assert (await stack.told())[sim.address]["blocks"]["gpu"] == 0

    async with asyncio.timeout(20):  # the filter has to find them live again
        while True:
            async with aiohttp.ClientSession() as session, session.get(f"{stack.admin}/healthz") as response:
                if response.status == 200:
                    break
            await asyncio.sleep(0.05)
    for prompt in prompts:
        await stack.ask(prompt)
    await stack.agreed(prompts)


async def test_batches_that_are_lost_for_good_leave_prediction_in_charge(stack: Publishing) -> None:
    sim = stack.decode[0]
    assert sim.worker.publisher is not None
    sim.worker.publisher.lose(1, forgotten=True)
    await stack.ask(prompt_of(60))
    await stack.ask(prompt_of(61))
    wanted = f'baton_kv_in_step{{endpoint="{sim.address}"}} 0.0'
    async with asyncio.timeout(20), aiohttp.ClientSession() as session:
        page = ""
        while wanted not in page:
            await asyncio.sleep(0.05)
            async with session.get(f"{stack.admin}/metrics") as response:
                page = await response.text()
    assert not (await stack.told())[sim.address]["in_step"]
    await stack.ask(prompt_of(62))
