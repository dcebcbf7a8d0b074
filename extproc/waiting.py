"""Wait for the first of some futures: asyncio.wait without its sets, for which a request would pay many times."""

from __future__ import annotations

import asyncio
from typing import Any


async def first_of(*futures: asyncio.Future[Any], timeout_s: float | None = None) -> None:
    """Return when one of ``futures`` is done, or after ``timeout_s`` seconds. None of them is cancelled or read."""
    for future in futures:
        if future.done():
            return
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[None] = loop.create_future()

    def wake(_: object = None) -> None:
        if not waiter.done():
            waiter.set_result(None)

    timer = None if timeout_s is None else loop.call_later(timeout_s, wake)
    for future in futures:
        future.add_done_callback(wake)
    try:
        await waiter
    finally:
        if timer is not None:
            timer.cancel()
        for future in futures:
            future.remove_done_callback(wake)
