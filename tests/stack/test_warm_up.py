"""Workers meet before a client needs them to, with the real Envoy and filter and strict engines whose first transfer is slow."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from tests.cases.sims import RecordingSim, SimStack
from tests.stack.test_legs import post
from tests.stack.test_workers_change import status
from workers.sim.faults import Fault
from workers.sim.main import SimOptions

HANDSHAKE_S = 1.0
LEASE_S = 10.0

OPTIONS = SimOptions(
    served_model_name=("m",),
    num_blocks=2000,
    max_model_len=8192,
    kv_lease_duration_s=LEASE_S,
    side_channel_timeout_s=0.3,
    handshake_s=HANDSHAKE_S,
    enable_prompt_tokens_details=True,
)
QUICK = replace(OPTIONS, handshake_s=0.05)

WARM_UP = {"enabled": True, "timeout_s": 5.0, "attempts": 2, "retry_s": 0.5}


def stack_of(
    prefill: int, decode: int, options: SimOptions = OPTIONS, *, started: bool = True, **sections: dict[str, Any]
) -> SimStack:
    warm_up = {**WARM_UP, **sections.pop("warm_up", {})}
    stack = SimStack(
        prefill=prefill,
        decode=decode,
        options=options,
        started=started,
        settings={"warm_up": warm_up, "handoff": {"lease_s": LEASE_S}, "scrape": {"interval_s": 0.2}, **sections},
    )
    stack.configure(policies=[{"name": "default", "mode": "disaggregate"}])
    return stack


def is_warm_up(body: bytes) -> bool:
    return b'"temperature":0,"stream":false' in body


def prompts(sim: RecordingSim) -> list[dict[str, Any]]:
    """Requests of clients, as they came to an engine."""
    bodies = [each.body for each in sim.received if each.method == "POST" and not is_warm_up(each.body)]
    return [json.loads(body) for body in bodies]


def meetings(sim: RecordingSim) -> list[dict[str, Any]]:
    bodies = [each.body for each in sim.received if each.method == "POST" and is_warm_up(each.body)]
    return [json.loads(body) for body in bodies]


async def ask(stack: SimStack, words: str = "what is it") -> tuple[int, bytes]:
    body = json.dumps({"model": "m", "prompt": f"{words} " * 40, "max_tokens": 4}).encode()
    code, answer, _ = await post(stack, "/v1/completions", body)
    return code, answer


async def health(stack: SimStack) -> tuple[int, dict[str, Any]]:
    async with aiohttp.ClientSession() as session, session.get(f"{stack.admin}/healthz") as response:
        return response.status, await response.json()


async def until_warm(stack: SimStack, pairs: int) -> dict[str, Any]:
    async with asyncio.timeout(20):
        while (shown := (await status(stack))["warm_up"])["pairs_warm"] != pairs:
            await asyncio.sleep(0.02)
    return shown


async def test_a_client_never_pays_for_a_first_transfer() -> None:
    async with stack_of(1, 2) as stack:
        await until_warm(stack, 2)
        assert [len(meetings(sim)) for sim in stack.sims] == [2, 1, 1]
        began = time.monotonic()
        answers = await asyncio.gather(*(ask(stack, f"question {number}") for number in range(8)))
        assert [code for code, _ in answers] == [200] * 8
        assert all(prompts(sim) for sim in stack.decode), "both decode workers were asked"
        assert time.monotonic() - began < HANDSHAKE_S, "a first transfer takes longer than all of it"
        assert stack.violations() == {}
        metrics = await stack.metrics()
        assert metrics['baton_warm_up_total{outcome="ok"}'] == 2
        assert (metrics["baton_pairs_warm"], metrics["baton_pairs_cold"]) == (2, 0)
        assert metrics["baton_warm_up_seconds_sum"] > 2 * HANDSHAKE_S * 0.9
