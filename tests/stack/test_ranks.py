"""Of several engines behind one address the one that holds the prompt gets it, through the real Envoy and filter."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp

from tests.stack.harness import Stack, beside
from tests.stack.ranked_worker import RANK, RankedWorker
from tests.stack.test_precise import body, until
from workers.ready import free_ports
from workers.sim.options import SimOptions, worker_options
from workers.sim.worker import Worker

OPTIONS = SimOptions(speed=20, enable_prompt_tokens_details=True, mean_answer_tokens=16, handshake_s=0.0)
QUESTION = "What is the first rule?"


@asynccontextmanager
async def ranked(
    mode: str, *, other: bool = False, **routing: Any
) -> AsyncIterator[tuple[Stack, RankedWorker, RankedWorker, Worker | None]]:
    """A prefill and a decode worker of two engines each, of which the second gets the first prompt. ``other``: a prefill worker
    beside it that has one engine."""
    async with AsyncExitStack() as parts:
        prefill = await parts.enter_async_context(RankedWorker(2, OPTIONS, first=1))
        decode = await parts.enter_async_context(RankedWorker(2, OPTIONS, first=1))
        single = None
        if other:
            port, events, replay = free_ports(3)
            (made,) = worker_options(replace(OPTIONS, port=port, kv_events_port=events, kv_events_replay_port=replay))
            single = await parts.enter_async_context(Worker(made))
        workers = [prefill.address, *([single.address] if single else [])]
        stack = beside(
            {"prefill": workers, "decode": [decode.address]},
            kv_events={"enabled": True},
            tokens={"ask_workers": "tokenize", "timeout_ms": 5_000},
            policies=[{"name": "default", "mode": mode}],
            routing={"rank_gain_s": 0.01, **routing},
        )
        await parts.enter_async_context(stack)
        await until(stack, lambda status: all_followed(status, len(workers) + 1), "/healthz")
        yield stack, prefill, decode, single


def all_followed(status: Any, count: int) -> bool:
    workers = status["kv_events"]["workers"].values()
    return len(workers) == count and all(each.get("in_step") for each in workers)


async def ask(stack: Stack, *turns: str) -> str:
    """The answer. The client tries to choose an engine itself: one that there is not, so it would be refused."""
    async with stack.http.post("/v1/chat/completions", json=body(*turns), headers={RANK: "7"}) as response:
        assert response.status == 200, await response.text()
        return str((await response.json())["choices"][0]["message"]["content"])


async def rank_known(stack: Stack, *turns: str) -> dict[str, Any]:
    """What would be decided, once it is for an engine that holds the beginning."""
    question = {"path": "/v1/chat/completions", "body": body(*turns)}
    report = await until(
        stack,
        lambda each: each["decision"]["candidates"][0]["cached_by"] == "events" and named(each),
        "/debug/explain",
        question,
    )
    return dict(report["decision"])


def named(report: Any) -> bool:
    return report["decision"]["candidates"][0]["rank"] is not None


async def test_both_legs_of_a_handoff_name_the_engines_that_hold_the_conversation() -> None:
    # A slow network: what the decode worker's engine holds is worth naming it.
    async with ranked("disaggregate", transfer_bytes_per_s=1e8) as (stack, prefill, decode, _):
        answer = await ask(stack, QUESTION)
        assert [(leg.named, leg.engine) for leg in (*prefill.legs, *decode.legs)] == [(None, 1)] * 2, "nobody held it"

        turns = (QUESTION, answer, "And the second?")
        would = await rank_known(stack, *turns)
        assert (would["decision"]["prefill_rank"], would["decision"]["decode_rank"]) == (1, 1)
        await ask(stack, *turns)
        (_, prefill_leg), (_, decode_leg) = prefill.legs, decode.legs
        assert (prefill_leg.named, prefill_leg.engine) == ("1", 1), "its own balancing would have taken the first engine now"
        assert (decode_leg.named, decode_leg.engine) == ("1", 1)
        assert prefill_leg.cached_tokens == would["decision"]["cached_tokens"], "what was expected was there"

        metrics = await stack.metrics()
        assert metrics['baton_ranks_named_total{role="prefill"}'] == 1
        assert metrics['baton_ranks_named_total{role="decode"}'] == 1
        assert not any(line["event"] == "worker_restarted" for line in stack.log_lines())
        assert prefill.violations == decode.violations == 0


async def test_a_decode_worker_that_does_it_all_gets_it_where_it_lies() -> None:
    async with ranked("aggregate") as (stack, _, decode, __):
        answer = await ask(stack, QUESTION)
        turns = (QUESTION, answer, "And the second?")
        would = await rank_known(stack, *turns)
        await ask(stack, *turns)
        first, second = decode.legs
        assert (first.named, second.named, second.engine) == (None, "1", 1)
        assert second.cached_tokens == would["decision"]["cached_tokens"]


async def test_replies_of_both_engines_are_no_restart_and_a_prompt_that_gains_little_names_none() -> None:
    async with ranked("disaggregate", rank_gain_s=1e9) as (stack, prefill, decode, _):
        for turn in range(4):
            await ask(stack, f"Rule {turn}?")
        assert [(leg.named, leg.engine) for leg in prefill.legs] == [(None, 1), (None, 0)] * 2
        assert {leg.named for leg in decode.legs} == {None}
        assert not any(line["event"] == "worker_restarted" for line in stack.log_lines())


async def test_another_prefill_worker_gets_the_retry_without_the_rank() -> None:
    async with ranked("disaggregate", other=True) as (stack, prefill, _, single):
        assert single is not None
        direct = f"http://{prefill.address}/v1/chat/completions"
        async with (
            aiohttp.ClientSession() as session,
            session.post(direct, json=body(QUESTION), headers={RANK: "1"}) as response,
        ):
            assert response.status == 200, "somebody else has left it there"
        await rank_known(stack, QUESTION)
        prefill.fails = True
        await ask(stack, QUESTION)
        direct_leg, leg = prefill.legs
        assert (direct_leg.named, leg.named, leg.engine) == ("1", "1", None)
        metrics = await stack.metrics()
        assert metrics['baton_fallbacks_total{kind="retry"}'] == 1, "and the other one, which has no rank 1, did it"
        assert single.violations.report()["count"] == 0
