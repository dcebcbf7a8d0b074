"""What a request leaves behind is freed when it is over, and does not wait for the garbage collector."""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter

from bench.phases_world import Sent, World, prompts
from extproc.errors import ApiError
from extproc.observe.own_time import OwnTime
from tests.unit import test_cardinality as cardinality


def garbage(kinds: set[str]) -> Counter[str]:
    """What only a collection frees, by kind."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        return Counter(type(each).__name__ for each in gc.garbage if type(each).__name__ in kinds)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


def test_a_request_with_a_handoff_leaves_no_cycle() -> None:
    world, bodies = World(), prompts(4 << 10, random.Random(1))
    world.serve(Sent(0, next(bodies)), lambda _phase, work: work())
    gc.collect()
    gc.disable()
    try:
        for number in range(1, 30):
            world.serve(Sent(number, next(bodies)), lambda _phase, work: work())
        assert not garbage({"Journey", "Record", "Ticket", "Job", "Chain", "Claim", "Note"})
    finally:
        gc.enable()


async def test_a_request_whose_prefills_fail_leaves_no_cycle() -> None:
    world = cardinality.World()
    world.workers(prefill=["10.0.0.1:1", "10.0.0.3:1"], decode=["10.0.0.2:1"])
    world.client.fault = lambda: ApiError("prefill_unreachable", "no")
    gc.collect()
    gc.disable()
    try:
        for _ in range(5):
            await world.ask()
        assert world.value("baton_fallbacks_total{") > 0  # it was tried again
        assert not garbage({"ApiError", "Journey", "Ticket", "_asyncio.Future", "Future"})
    finally:
        gc.enable()


def test_a_request_that_is_cancelled_leaves_no_cycle() -> None:
    async def serve() -> None:
        own = OwnTime()

        async def work() -> None:
            await own.of(asyncio.sleep(60))

        task = asyncio.ensure_future(work())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait((task,))

    gc.collect()
    gc.disable()
    try:
        for _ in range(5):
            asyncio.run(serve())
        assert not garbage({"OwnTime"})
    finally:
        gc.enable()
