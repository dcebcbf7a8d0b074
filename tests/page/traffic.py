"""A little load for the live page: conversations that come back, some long prompts, all of it streamed.

python -m tests.page.traffic http://127.0.0.1:8000 --seconds 60
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time

import aiohttp

WORDS = "pool block cache token prefill decode handoff queue stream worker layer batch lease pair rate".split()


async def one(session: aiohttp.ClientSession, base: str, model: str, dice: random.Random) -> int:
    """One request; its status."""
    conversation = random.Random(dice.randrange(12))
    head = " ".join(conversation.choices(WORDS, k=conversation.choice((60, 200, 700, 1500))))
    tail = " ".join(dice.choices(WORDS, k=dice.randrange(10, 60)))
    body = {"model": model, "prompt": f"{head} {tail}", "max_tokens": dice.randrange(20, 120), "stream": True}
    async with session.post(f"{base}/v1/completions", json=body) as response:
        await response.read()
        return response.status


async def load(base: str, *, seconds: float, at_once: int = 8, model: str = "smollm2", seed: int = 1) -> dict[int, int]:
    """So many requests at once, for so long; how many had which status."""
    statuses: dict[int, int] = {}
    end_s = time.monotonic() + seconds

    async def client(number: int) -> None:
        dice = random.Random(seed * 1000 + number)
        while time.monotonic() < end_s:
            status = await one(session, base, model, dice)
            statuses[status] = statuses.get(status, 0) + 1
            await asyncio.sleep(dice.expovariate(4))

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        await asyncio.gather(*(client(number) for number in range(at_once)))
    return statuses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("base")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--model", default="smollm2")
    given = parser.parse_args()
    print(asyncio.run(load(given.base, seconds=given.seconds, at_once=given.at_once, model=given.model)))
