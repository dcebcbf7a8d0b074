"""Waiting until a moment: not before it, not for ever, and nothing is left open."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time

from workers.sim.pacing import Pacer


async def test_the_moment_has_come_when_it_returns() -> None:
    pacer = Pacer()
    try:
        for wait_s in (0.003, 0.0101, 0.0):
            moment_s = time.monotonic() + wait_s
            await asyncio.wait_for(pacer.until(moment_s), 5)
            assert time.monotonic() >= moment_s
    finally:
        pacer.close()


async def test_a_moment_that_has_passed_lets_others_run() -> None:
    pacer, ran = Pacer(), asyncio.Event()
    try:
        asyncio.get_running_loop().call_soon(ran.set)
        await pacer.until(time.monotonic() - 1)
        assert ran.is_set()
    finally:
        pacer.close()


async def test_a_cancelled_wait_does_not_end_the_next_one() -> None:
    pacer = Pacer()
    try:
        first = asyncio.create_task(pacer.until(time.monotonic() + 0.01))
        await asyncio.sleep(0)
        first.cancel()
        moment_s = time.monotonic() + 0.05
        await asyncio.wait_for(pacer.until(moment_s), 5)
        assert time.monotonic() >= moment_s
    finally:
        pacer.close()


def open_descriptors() -> list[int]:
    found = []
    for number in range(1024):
        with contextlib.suppress(OSError):
            os.fstat(number)
            found.append(number)
    return found


async def test_closing_gives_the_descriptor_back_and_can_be_repeated() -> None:
    before = open_descriptors()
    pacer = Pacer()
    pacer.close()
    pacer.close()
    assert open_descriptors() == before
