"""What workers say they hold decides: the real Envoy, the filter, and simulated engines that publish their KV events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp

from tests.stack.harness import READY_S, Stack, beside
from workers.ready import free_ports
from workers.sim.options import SimOptions, worker_options
from workers.sim.worker import Worker

MODEL = "sim-llama-70b"
SYSTEM = "You are the keeper of a very long list of rules, and you follow all of them. " * 60


@asynccontextmanager
async def precise() -> AsyncIterator[tuple[Stack, list[Worker]]]:
    """Two prefill and two decode workers."""
    ports = free_ports(12)
    options = SimOptions(speed=20, enable_prompt_tokens_details=True, mean_answer_tokens=64, handshake_s=0.0)
    engines = []
    for port, events_port, replay_port in zip(ports[:4], ports[4:8], ports[8:], strict=True):
        (made,) = worker_options(replace(options, port=port, kv_events_port=events_port, kv_events_replay_port=replay_port))
        engines.append(Worker(made))
    addresses = [f"127.0.0.1:{port}" for port in ports[:4]]
    async with AsyncExitStack() as parts:
        for engine in engines:
            await engine.start()
            parts.push_async_callback(engine.stop)
        stack = beside(
            {"prefill": addresses[:2], "decode": addresses[2:]},
            kv_events={"enabled": True},
            tokens={"ask_workers": "tokenize", "timeout_ms": 5_000},
            policies=[{"name": "default", "mode": "auto"}],
        )
        await parts.enter_async_context(stack)
        await until(stack, all_in_step, "/healthz")
        yield stack, engines


async def until(stack: Stack, good: Callable[[Any], bool], path: str, question: Any = None) -> Any:
    """What the admin port answers, once it is good."""
    async with asyncio.timeout(READY_S), aiohttp.ClientSession() as session:
        while True:
            how = session.get(stack.admin + path) if question is None else session.post(stack.admin + path, json=question)
            async with how as response:
                if response.status == 200:
                    found = await response.json()
                    if good(found):
                        return found
            await asyncio.sleep(0.05)


def all_in_step(status: Any) -> bool:
    workers = status["kv_events"]["workers"]
    return len(workers) == 4 and all(each.get("in_step") for each in workers.values())


def body(*turns: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[number % 2], "content": turn} for number, turn in enumerate(turns)]
    return {"model": MODEL, "messages": [{"role": "system", "content": SYSTEM}, *messages], "max_tokens": 64}


async def ask(stack: Stack, *turns: str) -> str:
    async with stack.http.post("/v1/chat/completions", json=body(*turns)) as response:
        assert response.status == 200, await response.text()
        return str((await response.json())["choices"][0]["message"]["content"])


def candidates(report: Any) -> list[Any]:
    return list(report["decision"]["candidates"])


def held(report: Any, address: str) -> int:
    """Tokens of the prompt that a worker is said to hold."""
    found = 0
    for each in candidates(report):
        if each["prefill"] == address:
            found = each["cached_prefill_tokens"]
        if each["decode"] == address:
            found = each["cached_decode_tokens"]
    return found


async def test_what_workers_say_decides_and_what_they_forget_does_not() -> None:
    async with precise() as (stack, engines):
        answer = await ask(stack, "What is the first rule?")
        question = {"path": "/v1/chat/completions", "body": body("What is the first rule?", answer, "And the second?")}
        addresses = [engine.address for engine in engines]

        def conversation_known(report: Any) -> bool:
            found = [held(report, address) for address in addresses[2:]]
            return candidates(report)[0]["cached_by"] == "events" and max(found) >= report["prompt"]["tokens"] - 64

        report = await until(stack, conversation_known, "/debug/explain", question)
        assert report["prompt"]["token_ids"] == "whole" and report["prompt"]["exact"]
        first = candidates(report)[0]
        assert first["prefill"] is None, "the decode worker holds the conversation, its own answer included: it goes back there"

        for engine in engines:
            await engine.reset()
        report = await until(stack, lambda each: not held(each, first["decode"]), "/debug/explain", question)
        assert all(not held(report, address) for address in addresses), "they have said that it is gone"
        assert candidates(report)[0]["cached_by"] == "events"

        await ask(stack, "What is the first rule?", answer, "And the second?")
        metrics = await stack.metrics()
        assert metrics['baton_cache_lookups_total{by="no_tokens"}'] == 0
        assert metrics['baton_cache_lookups_total{by="events"}'] == 2
        assert [engine.violations.report()["count"] for engine in engines] == [0] * 4
