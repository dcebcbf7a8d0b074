"""A real worker with vLLM's tier in host memory, and what its events let us know of it: what the GPU has dropped is there, a
hit from there is counted as a hit, what is dropped from there is gone, and what is known of a prompt is what the engine finds.

The worker is a CPU's, so its "GPU cache" is host memory too, and who copies between the two is ours (``offload_on_cpu``); the
scheduler, the tier's manager, its events, the usage and the metrics are vLLM's.
"""

from __future__ import annotations

import asyncio
import dataclasses
import io
import random
import urllib.request
from array import array
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from extproc.observe.kv_events.settings import EventPorts, KvEvents
from extproc.observe.kv_events.subscriber import Subscriber
from extproc.observe.logs import make_logger
from extproc.observe.metrics import Metrics
from extproc.routing.endpoint_spec import EndpointSet, EndpointSpec
from extproc.routing.holdings import Held, Holdings, Tier
from extproc.routing.pool import Pool
from extproc.routing.token_chain import TokenChain
from tests.engine.kv_proof import BLOCK_SIZE_TOKENS, block_bytes
from tests.engine.metrics import scrape
from tests.engine.openai_api import MODEL, Answer, ask
from tests.engine.system import UP_TIMEOUT_S
from workers import cores, vllm
from workers.process import Child
from workers.ready import free_ports, wait_ready

GPU_BLOCKS = 40
HOST_BLOCKS = 100
MAX_MODEL_LEN = 1024
LEASE_S = 5
LONG_TOKENS = 900
"""Of a prompt that drives others out: two of them fill the GPU's part, and four host memory."""


@dataclass(frozen=True)
class Worker:
    """A running one."""

    url: str
    address: str
    ports: EventPorts


class Known:
    """What is known of a worker, from its events alone."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.holdings = Holdings(100_000)
        pool = Pool(EndpointSet(prefill=(EndpointSpec(address=worker.address),)))
        pool.set_live(pool.endpoints[0], True)
        settings = KvEvents(enabled=True, find="ports", ports={"prefill": worker.ports}, check_interval_s=0.5)
        log = make_logger(stream=io.StringIO())
        self.subscriber = Subscriber(settings, pool, self.holdings, metrics=Metrics(), log=log, own_headers={})

    @property
    def in_step(self) -> bool:
        return self.holdings.in_step(self.worker.address)

    @property
    def following(self) -> bool:
        return bool(self.subscriber.status()["workers"].get(self.worker.address, {}).get("state") == "following")

    def held(self, prompt: list[int]) -> Held:
        return self.holdings.held(TokenChain(array("I", prompt)), self.worker.address) or Held(0)

    def settled(self, prompt: list[int], tiers: Sequence[Tier]) -> bool:
        """The last block of a prompt is in these tiers: all that came of it was told before that."""
        (source,) = self.holdings.sources(self.worker.address)
        key = TokenChain(array("I", prompt)).keys(BLOCK_SIZE_TOKENS)[-1]
        return any(all(each.store.holds(key, each.number, tier.number) for tier in tiers) for each in source.groups.values())

    def findable(self, prompt: list[int]) -> int:
        """Tokens of a prompt that the engine should find. The GPU cache always leaves one token to compute, so that of a
        prompt whose last block is full it gives all blocks but that; host memory gives that one, too."""
        tokens = self.held(prompt).tokens
        if tokens < len(prompt) or self.settled(prompt, [Tier.CPU]):
            return tokens
        return tokens - BLOCK_SIZE_TOKENS

    async def ask(self, prompt: list[int], tiers: Sequence[Tier] = (Tier.GPU, Tier.CPU), **more: Any) -> Answer:
        """The answer, when its events have come, which are about these tiers."""
        answer = await asyncio.to_thread(ask, self.worker.url, "completions", prompt, max_tokens=1, **more)
        await until(lambda: self.settled(prompt, tiers), "the prompt is known to be where it is now")
        return answer

    async def others(self, first_seed: int, prompts: int) -> None:
        """So many long prompts that have nothing in common."""
        for seed in range(first_seed, first_seed + prompts):
            await self.ask(ids(seed, LONG_TOKENS))

    def total(self, name: str, **labels: str) -> int:
        return int(scrape(self.worker.url).total(name, **labels))


def ids(seed: int, tokens: int) -> list[int]:
    """Token ids of the tiny model; no other prompt begins with these."""
    draw = random.Random(seed)
    return [draw.randrange(10, 250) for _ in range(tokens)]


def full(tokens: int) -> int:
    return tokens // BLOCK_SIZE_TOKENS * BLOCK_SIZE_TOKENS


async def until(condition: Callable[[], object], what: str) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)
    assert condition(), what


@pytest.fixture(scope="module")
def worker(tiny_model: Path) -> Iterator[Worker]:
    """As `baton worker` makes it for a GPU, but that it runs on a CPU and a copier of ours is named. Ended before the shared
    system starts: two cores do not carry both."""
    port, side_channel_port, events_port, replay_port = free_ports(4)
    made = vllm.WorkerSpec(
        role="prefill",
        model=str(tiny_model),
        local_model=True,
        served_model_name=MODEL,
        device="gpu",
        port=port,
        side_channel_port=side_channel_port,
        kv_events_port=events_port,
        kv_events_replay_port=replay_port,
        kv_lease_s=LEASE_S,
        block_size_tokens=BLOCK_SIZE_TOKENS,
        max_model_len_tokens=MAX_MODEL_LEN,
        host_cache_gib=HOST_BLOCKS * block_bytes(tiny_model) / 2**30,
        dev_endpoints=True,
        env=(("PYTHONPATH", str(Path(__file__).parents[2])),),
        extra_args=("--num-gpu-blocks-override", str(GPU_BLOCKS)),
    )
    transfer: Any = vllm.transfer_config(made)
    extra = transfer["kv_connector_extra_config"]["connectors"][1]["kv_connector_extra_config"]
    extra |= {"spec_name": "OnCpu", "spec_module_path": "tests.engine.offload_on_cpu"}
    command = vllm.command(dataclasses.replace(made, device="cpu", host_cache_gib=None, transfer_config=transfer))
    with ExitStack() as parts:
        folder = Path(parts.enter_context(TemporaryDirectory(prefix="baton-")))
        child = parts.enter_context(Child("worker", command.argv, log=folder / "worker.log", env=command.env))
        wait_ready(child, f"http://127.0.0.1:{port}/health", UP_TIMEOUT_S)
        cores.pin(child.pids(), cores.usable()[:1])
        ports = EventPorts(port=events_port, replay_port=replay_port)
        yield Worker(f"http://127.0.0.1:{port}", f"127.0.0.1:{port}", ports)


@asynccontextmanager
async def following(worker: Worker) -> AsyncIterator[Known]:
    """Subscribed: all that it ever published is replayed first."""
    known = Known(worker)
    task = asyncio.create_task(known.subscriber.run())
    try:
        await until(lambda: known.following, "all that it published has been replayed")
        assert known.in_step, "from its first batch on"
        yield known
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_what_the_gpu_drops_is_known_to_be_in_host_memory_and_what_that_drops_to_be_gone(worker: Worker) -> None:
    prompt = ids(1, 400)
    async with following(worker) as known:
        assert (await known.ask(prompt)).cached_tokens == 0
        assert known.held(prompt) == Held(full(400)), "each block counts where it is fastest"

        await known.others(100, 2)
        await until(lambda: known.held(prompt) == Held(0, cpu=full(400)), "the GPU has dropped it, host memory has not")
        host = known.total("vllm:prompt_tokens_cached_by_source_total", source="host")
        again = await known.ask(prompt)
        assert again.cached_tokens == full(400), "a hit from host memory is a hit"
        await until(
            lambda: known.total("vllm:prompt_tokens_cached_by_source_total", source="host") == host + full(400),
            "and is counted as one of host memory",
        )
        assert known.held(prompt) == Held(full(400)), "it is on the GPU again"

        await known.others(200, 4)
        await until(lambda: known.held(prompt) == Held(0), "host memory has dropped it, too")
        assert (await known.ask(prompt)).cached_tokens == 0, "so it has"
        assert known.in_step
        assert known.holdings.seen.orphans == 0
        assert known.holdings.seen.unknown_removed == 0


async def test_a_late_filter_knows_the_same_from_the_replay(worker: Worker) -> None:
    prompt = ids(2, 400)
    async with following(worker) as known:
        await known.ask(prompt)
        await known.others(300, 2)
        await until(lambda: known.held(prompt) == Held(0, cpu=full(400)), "it is in host memory only")
        at_first = {tier: known.holdings.sources(known.worker.address)[0].blocks(tier) for tier in Tier}
    async with following(worker) as late:
        assert late.held(prompt) == Held(0, cpu=full(400))
        assert {tier: late.holdings.sources(late.worker.address)[0].blocks(tier) for tier in Tier} == at_first
        assert at_first[Tier.CPU] == HOST_BLOCKS, "the tier is full, and every block of it is known"


async def test_what_is_known_of_a_prompt_is_what_the_engine_then_finds(worker: Worker) -> None:
    draw = random.Random(7)
    # Twenty prompts of five tenants, 180 blocks: more than host memory holds, and much more than the GPU.
    heads = [ids(1000 + tenant, draw.randrange(60, 260)) for tenant in range(5)]
    prompts = [[*heads[number % 5], *ids(2000 + number, draw.randrange(100, 300))] for number in range(20)]
    # And some whose last block is full.
    prompts += [prompt[: full(len(prompt))] for prompt in prompts[:4]]
    seen = dict.fromkeys(("gpu only", "both", "host only", "nothing"), 0)
    async with following(worker) as known:
        for number in range(80):
            asked = draw.choice(prompts)
            held, findable = known.held(asked), known.findable(asked)
            seen["both" if held.gpu and held.cpu else "gpu only" if held.gpu else "host only" if held.cpu else "nothing"] += 1
            found = (await known.ask(asked)).cached_tokens
            assert found == findable, (number, held, len(asked))
        print(f"found as known: {seen}")
        assert min(seen.values()) > 2, f"one of the cases was hardly tried: {seen}"
        assert known.in_step


async def test_a_prefill_for_another_worker_says_what_came_from_host_memory(worker: Worker) -> None:
    prompt = ids(3, 400)
    async with following(worker) as known:
        await known.ask(prompt)
        await known.others(400, 2)
        await until(lambda: known.held(prompt) == Held(0, cpu=full(400)), "it is in host memory only")
        handed = await known.ask(prompt, kv_transfer_params={"do_remote_decode": True, "do_remote_prefill": False})
        assert handed.kv_transfer_params is not None
        assert handed.kv_transfer_params["remote_prefill_cached_tokens"] == handed.cached_tokens == full(400)


async def test_host_memory_outlives_the_emptied_gpu_cache_and_what_is_emptied_with_it_is_found_out_by_answers(
    worker: Worker,
) -> None:
    def reset_at(query: str = "") -> Callable[[], bool]:
        """Blocks of a handoff hold it up until their lease ends."""

        def done() -> bool:
            request = urllib.request.Request(f"{worker.url}/reset_prefix_cache{query}", method="POST")
            with urllib.request.urlopen(request, timeout=60) as reply:
                return b"true" in reply.read().lower()

        return done

    prompt, another = ids(4, 400), ids(7, 400)
    async with following(worker) as known:
        await known.ask(prompt)
        await known.ask(another)
        await until(reset_at(), "the GPU cache is emptied")
        await known.ask(ids(5, 100))  # vLLM publishes with its next step
        assert known.held(prompt) == known.held(another) == Held(0, cpu=full(400)), "host memory is as it was"
        assert (await known.ask(prompt)).cached_tokens == full(400)
        await until(reset_at("?reset_external=true"), "all is emptied")
        await known.ask(ids(6, 100))
        assert (await known.ask(prompt)).cached_tokens == 0, "and vLLM says nothing else than before"
        assert known.held(another) == Held(0, cpu=full(400)), "so this is thought to be there"
        known.subscriber.distrusted(worker.address)  # as the router does, after answers that show it
        await until(lambda: known.in_step and known.held(another) == Held(0), "what is asked anew claims no such thing")
