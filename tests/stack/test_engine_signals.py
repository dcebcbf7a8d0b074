"""What engines do in silence, the filter's metrics say: transfers that fail, prompts computed twice, leases that end unread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from tests.cases.sims import SimStack
from workers.sim.faults import Fault
from workers.sim.options import SimOptions

LEASE_S = 1.5
PROMPT = "a prompt of some length, so that it has a good number of blocks " * 30


@asynccontextmanager
async def system(policy: str = "fail", **handoff: Any) -> AsyncIterator[SimStack]:
    options = SimOptions(
        served_model_name=("m",),
        speed=4.0,
        num_blocks=2000,
        max_model_len=8192,
        kv_load_failure_policy=policy,
        kv_lease_duration_s=LEASE_S,
        side_channel_timeout_s=0.3,
    )
    settings: dict[str, Any] = {
        "scrape": {"interval_s": 0.1},
        "handoff": {"lease_s": LEASE_S, "release_delay_s": 0.5, **handoff},
    }
    async with SimStack(prefill=1, decode=1, options=options, settings=settings) as stack:
        await counted(stack, "baton_scrapes_total", 4)
        yield stack


async def ask(stack: SimStack, prompt: str = PROMPT, **body: Any) -> tuple[int, dict[str, Any]]:
    async with stack.http.post("/v1/completions", json={"model": "m", "prompt": prompt, "max_tokens": 4, **body}) as response:
        return response.status, await response.json(content_type=None)


async def value(stack: SimStack, start: str) -> float:
    return sum(value for name, value in (await stack.metrics()).items() if name.startswith(start))


async def counted(stack: SimStack, start: str, at_least: float) -> float:
    """The counter, once it has come so far."""
    async with asyncio.timeout(15):
        while (now := await value(stack, start)) < at_least:
            await asyncio.sleep(0.05)
    return now


async def looked_at_again(stack: SimStack) -> None:
    await counted(stack, "baton_scrapes_total", await value(stack, "baton_scrapes_total") + 8)


async def test_a_prompt_that_is_computed_twice_is_counted_although_the_client_sees_nothing() -> None:
    async with system("recompute") as stack:
        status, answer = await ask(stack)
        assert status == 200
        await looked_at_again(stack)
        assert await value(stack, "baton_engine_recomputed_tokens_total") == 0, "this one was handed over"
        stack.prefill[0].worker.inject(Fault(kind="side_channel_dead"))
        status, answer = await ask(stack, prompt="another one, " + PROMPT)
        assert status == 200, "the engine hides it"
        tokens = answer["usage"]["prompt_tokens"]
        found = await counted(stack, "baton_engine_recomputed_tokens_total", 1)
        assert tokens - 16 <= found <= tokens, "all of it, but for what the worker had"
        assert await value(stack, f'baton_engine_failed_transfers_total{{endpoint="{stack.decode[0].address}"') == 1
        await stack.prefill[0].worker.clear_faults()


async def test_prompts_that_one_worker_serves_alone_are_not_computed_twice() -> None:
    async with system("recompute") as stack:
        for number in range(4):
            assert (await ask(stack, prompt=f"{number} " + PROMPT, n=2))[0] == 200
            assert (await ask(stack, prompt=f"and {number} " + PROMPT))[0] == 200
        await looked_at_again(stack)
        local = f'baton_engine_prompt_tokens_total{{endpoint="{stack.decode[0].address}",role="decode",source="local_compute"}}'
        assert await value(stack, local) > 1000, "the decode worker did compute prompts"
        assert await value(stack, "baton_engine_recomputed_tokens_total") == 0


async def test_a_handoff_that_nobody_fetches_shows_as_an_expired_one() -> None:
    async with system(release=False) as stack:
        stack.decode[0].worker.inject(Fault(kind="reset", phase="decode", after_chunks=0, count=1))
        assert (await ask(stack))[0] >= 500, "the connection broke before the engine saw the request"
        name = f'baton_engine_expired_requests_total{{endpoint="{stack.prefill[0].address}",role="prefill"}}'
        assert await value(stack, name) == 0
        assert await counted(stack, name, 1) == 1


async def test_a_new_engine_at_the_address_of_an_old_one_goes_on_counting() -> None:
    async with system() as stack:
        name = f'baton_engine_generation_tokens_total{{endpoint="{stack.decode[0].address}"'
        assert (await ask(stack, ignore_eos=True))[0] == 200
        assert await counted(stack, name, 4) == 4
        await looked_at_again(stack)
        await stack.decode[0].worker.restart()
        async with asyncio.timeout(15):
            while True:
                async with aiohttp.ClientSession() as session, session.get(f"{stack.admin}/healthz") as response:
                    if response.status == 200:
                        break
                await asyncio.sleep(0.05)
        assert (await ask(stack, prompt="new " + PROMPT, ignore_eos=True))[0] == 200
        assert await counted(stack, name, 8) == 8, "what the old one did is kept, and the new one begins at 0"
