"""Prefill replies teach the filter the token ids of prompts: through the real Envoy, with simulated engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from tests.stack.harness import READY_S, Stack, beside
from workers.sim.local import running
from workers.sim.options import SimOptions

MODEL = "sim-llama-70b"
RULES = "You are the keeper of a long list of rules, and you follow all of them. " * 20


@asynccontextmanager
async def taught(**tokens: Any) -> AsyncIterator[Stack]:
    """One worker of each kind, and every prompt goes to both."""
    async with AsyncExitStack() as parts:
        options = SimOptions(port=0, workers=2, speed=50, mean_answer_tokens=8, handshake_s=0.0)
        prefill, decode = await parts.enter_async_context(running(options))
        stack = beside(
            {"prefill": [prefill.address], "decode": [decode.address]},
            tokens={"timeout_ms": 5_000, **tokens},
            policies=[{"name": "default", "mode": "disaggregate"}],
        )
        yield await parts.enter_async_context(stack)


async def ask(stack: Stack, path: str, **body: Any) -> None:
    async with stack.http.post(path, json={"model": MODEL, "max_tokens": 4, **body}) as response:
        assert response.status == 200, await response.text()


async def counted(stack: Stack, wanted: dict[str, float]) -> None:
    """Wait until the metrics say so: what a reply teaches is taken in beside the requests."""
    seen: dict[str, float | None] = {}
    async with asyncio.timeout(READY_S):
        while seen != wanted:
            metrics = await stack.metrics()
            seen = {name: metrics.get(f"baton_token_{name}") for name in wanted}
            await asyncio.sleep(0.05)


async def test_a_prompt_that_was_prefilled_is_known_when_it_comes_again() -> None:
    async with taught(learn_prefixes=False) as stack:
        question = [{"role": "user", "content": RULES + "Why?"}]
        await ask(stack, "/v1/chat/completions", messages=question)
        await counted(stack, {'lessons_total{outcome="kept"}': 1.0, 'chains_total{source="none"}': 1.0})
        await ask(stack, "/v1/chat/completions", messages=question, temperature=0.3)
        await ask(stack, "/v1/completions", prompt=[7, 8, 9] * 50)
        await ask(stack, "/v1/completions", prompt=RULES)
        await ask(stack, "/v1/messages", messages=question)
        await counted(
            stack,
            {
                'chains_total{source="learned"}': 1.0,
                'chains_total{source="ids"}': 1.0,
                'chains_total{source="none"}': 3.0,
                'chain_missing_total{reason="no_source"}': 3.0,
                'chains_compared_total{result="same",source="learned"}': 1.0,
                'lessons_total{outcome="kept"}': 3.0,
            },
        )


async def test_a_conversation_that_goes_on_is_known_by_its_beginning() -> None:
    async with taught() as stack:
        said: list[dict[str, str]] = [{"role": "system", "content": RULES}]
        for turn in range(7):
            said.append({"role": "user", "content": f"{turn}. " + "Which of the rules is the oldest one? " * 8})
            await ask(stack, "/v1/chat/completions", messages=said)
            await counted(stack, {'lessons_total{outcome="kept"}': turn + 1.0})
            said.append({"role": "assistant", "content": f"It is rule {turn}."})
        metrics = await stack.metrics()
        told = metrics['baton_token_chains_total{source="learned_prefix"}']
        assert told >= 3
        assert metrics['baton_token_chains_compared_total{result="same",source="learned_prefix"}'] == told
