"""What `/live` costs the event loop with 200 workers, 300 handoffs a second between pairs of all of them, and twenty new
decisions for every document; and what noting one handoff costs.

``python -m bench.live_page``. Milliseconds of processor time. A document is made at most twice a second, however many look.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time

import msgspec
from rich.console import Console

from extproc.recent import WINDOW_S
from tests.page.world import World

_DOCUMENTS = 200
_HANDOFFS_PER_S = 300
_NOTED = 100_000


async def main() -> None:
    """Print the numbers."""
    world = World(100, 100)
    dice = random.Random(1)  # noqa: S311
    for endpoint in world.pool.endpoints:
        world.report(endpoint)
    for _ in range(_HANDOFFS_PER_S * WINDOW_S):
        world.recent.handed_over(f"10.0.0.{dice.randrange(100) + 1}:8100", f"10.0.1.{dice.randrange(100) + 1}:8200")
    for _ in range(200):
        world.live.note()
    await asyncio.sleep(1.1)  # the second in which the handoffs were is over
    made_ms, encoded_ms = [], []
    for _ in range(_DOCUMENTS):
        for _ in range(20):
            world.dispatcher.finish(world.prompt(tokens=300))
        started_s = time.process_time()
        found = world.live.document()
        middle_s = time.process_time()
        size = len(msgspec.json.encode(found))
        made_ms.append((middle_s - started_s) * 1e3)
        encoded_ms.append((time.process_time() - middle_s) * 1e3)
    both_ms = sorted(one + other for one, other in zip(made_ms, encoded_ms, strict=True))
    started_s = time.process_time()
    for _ in range(_NOTED):
        world.recent.handed_over("10.0.0.1:8100", "10.0.1.1:8200")
    noted_us = (time.process_time() - started_s) * 1e6 / _NOTED
    console = Console(highlight=False)
    console.print(f"/live of 200 workers: {size:,} bytes, {len(found.pairs):,} pairs shown, {found.pairs_left_out:,} left out")
    console.print(f"made {statistics.median(made_ms):.2f} ms, encoded {statistics.median(encoded_ms):.2f} ms (medians)")
    console.print(f"both: median {statistics.median(both_ms):.2f} ms, p99 {both_ms[int(_DOCUMENTS * 0.99)]:.2f} ms")
    console.print(f"one handoff noted: {noted_us:.2f} us")


if __name__ == "__main__":
    asyncio.run(main())
