"""Policies at the real Envoy: what the client may wish for, what it is told, and what never reaches an engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from tests.stack.fake_worker import when
from tests.stack.harness import Stack
from tests.stack.test_errors import error_of
from tests.stack.test_streams import until

PROMPT = {"model": "m", "prompt": "Once upon a time there was a queue. " * 20, "max_tokens": 20}

POLICIES: list[dict[str, Any]] = [
    {
        "name": "narrow",
        "match": {"headers": {"x-tier": {"exact": "narrow"}}},
        "mode": "disaggregate",
        "limits": {"max_in_flight": 1},
    },
    {
        "name": "impatient",
        "match": {"headers": {"x-tier": {"exact": "impatient"}}},
        "mode": "disaggregate",
        "limits": {"queue_wait_s": 0.2},
    },
    {
        "name": "strict",
        "match": {"headers": {"x-tier": {"exact": "strict"}}},
        "mode": "disaggregate",
        "slo": {"ttft_s": 0.001},
        "when_late": "reject",
    },
    {
        "name": "open",
        "match": {"headers": {"x-tier": {"prefix": "open"}}},
        "mode": "disaggregate",
        "explain": True,
        "priority": -3,
        "pass_priority": True,
        "session_header": "x-conversation",
        "allow_overrides": ["mode", "explain"],
    },
    {"name": "default", "mode": "disaggregate", "on_prefill_failure": "aggregate"},
]
MODELS = {"aliases": {"latest": "m", "canary": [{"model": "m", "weight": 1}, {"model": "m2", "weight": 0}]}}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shared() -> AsyncIterator[Stack]:
    settings = {"policies": POLICIES, "models": MODELS, "routing": {"step_tokens": 300}}
    async with Stack(prefill=1, decode=2, settings=settings) as stack:
        yield stack


@pytest.fixture
def stack(shared: Stack) -> Stack:
    shared.reset()
    return shared


async def ask(stack: Stack, *, body: dict[str, Any] | None = None, **headers: str) -> tuple[int, bytes, Any]:
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    async with stack.http.post("/v1/completions", json={**PROMPT, **(body or {})}, headers=sent) as response:
        return response.status, await response.read(), response.headers


def received(stack: Stack) -> list[Any]:
    return [each for worker in (*stack.prefill, *stack.decode) for each in worker.received]


async def test_no_header_for_baton_reaches_an_engine(stack: Stack) -> None:
    status, _, _ = await ask(stack, x_tier="open", x_baton_mode="disaggregate", x_baton_nonsense="1", x_baton_decision="mine")
    assert status == 200
    assert len(received(stack)) == 2
    assert not [name for each in received(stack) for name in each.headers if name.startswith("x-baton")]


async def test_a_client_may_choose_only_what_its_policy_allows(stack: Stack) -> None:
    status, _, headers = await ask(stack, x_tier="open", x_baton_mode="aggregate")
    assert status == 200 and not stack.prefill[0].received
    assert headers["x-baton-decision"].startswith("aggregate;")
    stack.reset()
    before = (await stack.metrics()).get('baton_ignored_overrides_total{name="mode"}', 0)
    status, _, _ = await ask(stack, x_baton_mode="aggregate")
    assert status == 200 and len(stack.prefill[0].received) == 1
    assert (await stack.metrics())['baton_ignored_overrides_total{name="mode"}'] == before + 1


async def test_a_wish_that_makes_no_sense_is_a_400_that_says_what_would(stack: Stack) -> None:
    status, answer, _ = await ask(stack, x_tier="open", x_baton_mode="sideways")
    assert status == 400 and error_of(answer)["code"] == "bad_override"
    assert "x-baton-mode" in error_of(answer)["message"] and "disaggregate" in error_of(answer)["message"]
    assert not received(stack)


async def test_the_answer_says_why_it_came_from_where_it_came(stack: Stack) -> None:
    for stream in (False, True):
        _, _, headers = await ask(stack, body={"stream": stream}, x_tier="open")
        decision = headers["x-baton-decision"]
        assert f'prefill="{stack.prefill[0].address}"' in decision and 'policy="open"' in decision
        assert f'decode="{headers["x-decode-endpoint"]}"' in decision
    _, _, headers = await ask(stack, x_tier="open", x_baton_explain="false")
    assert "x-baton-decision" not in headers


async def test_the_priority_of_a_policy_reaches_both_legs(stack: Stack) -> None:
    await ask(stack, x_tier="open")
    assert [each.json["priority"] for each in received(stack)] == [-3, -3]


async def test_a_conversation_stays_on_its_decode_worker(stack: Stack) -> None:
    served = set()
    for turn in range(6):
        _, _, headers = await ask(stack, body={"prompt": f"turn {turn} " * 50}, x_tier="open", x_conversation="c-1")
        served.add(headers["x-decode-endpoint"])
    assert len(served) == 1


async def test_one_request_too_many_of_a_policy_is_a_429_and_the_others_go_on(stack: Stack) -> None:
    gate = asyncio.Event()
    stack.prefill[0].answer = when(gate)
    first = asyncio.create_task(ask(stack, x_tier="narrow"))
    await until(lambda: len(stack.prefill[0].received) == 1)
    status, answer, headers = await ask(stack, x_tier="narrow")
    assert status == 429 and error_of(answer)["code"] == "policy_limit" and int(headers["retry-after"]) >= 1
    gate.set()
    assert (await first)[0] == 200
    assert (await ask(stack, x_tier="narrow"))[0] == 200


async def test_a_prompt_waits_for_room_and_goes_on_when_there_is_some(stack: Stack) -> None:
    gate = asyncio.Event()
    stack.prefill[0].answer = when(gate)
    tasks = [asyncio.create_task(ask(stack, body={"prompt": f"{number} " * 400})) for number in range(3)]
    await until(lambda: len(stack.prefill[0].received) == 1)
    await asyncio.sleep(0.3)
    assert len(stack.prefill[0].received) == 1  # the others would not fit into one step beside it
    assert (await stack.metrics())["baton_queue_requests"] == 2
    gate.set()
    assert [status for status, *_ in await asyncio.gather(*tasks)] == [200, 200, 200]
    metrics = await stack.metrics()
    assert metrics["baton_queue_requests"] == 0
    # One came when nobody waited, one when one did.
    assert (metrics["baton_queue_position_count"], metrics["baton_queue_position_sum"]) == (2, 1)
    assert metrics["baton_queue_wait_seconds_sum"] >= 0.6


async def test_who_waits_too_long_is_told_when_to_come_again(stack: Stack) -> None:
    gate = asyncio.Event()
    stack.prefill[0].answer = when(gate)
    first = asyncio.create_task(ask(stack, body={"prompt": "x " * 400}))
    await until(lambda: len(stack.prefill[0].received) == 1)
    status, answer, headers = await ask(stack, body={"prompt": "y " * 400}, x_tier="impatient")
    assert status == 429 and error_of(answer)["code"] == "queue_timeout" and int(headers["retry-after"]) >= 1
    assert headers["content-type"] == "application/json"
    gate.set()
    assert (await first)[0] == 200
    assert len(stack.prefill[0].received) == 1  # the other one was never sent


async def test_who_cannot_be_served_in_time_is_told_at_once(stack: Stack) -> None:
    status, answer, headers = await ask(stack, x_tier="strict")
    assert status == 429 and error_of(answer)["code"] == "slo_unreachable" and "retry-after" in headers
    assert not received(stack)


async def test_a_client_that_leaves_the_queue_is_not_served(stack: Stack) -> None:
    gate = asyncio.Event()
    stack.prefill[0].answer = when(gate)
    first = asyncio.create_task(ask(stack, body={"prompt": "x " * 400}))
    await until(lambda: len(stack.prefill[0].received) == 1)
    leaving = asyncio.create_task(ask(stack, body={"prompt": "y " * 400}))
    await asyncio.sleep(0.3)
    assert (await stack.metrics())["baton_queue_requests"] == 1
    leaving.cancel()
    async with asyncio.timeout(20):
        while (await stack.metrics())["baton_queue_requests"] != 0:
            await asyncio.sleep(0.02)
    gate.set()
    assert (await first)[0] == 200
    assert len(stack.prefill[0].received) == 1


async def test_an_alias_is_served_by_its_model_on_both_legs(stack: Stack) -> None:
    status, _, _ = await ask(stack, body={"model": "latest"})
    assert status == 200 and [each.json["model"] for each in received(stack)] == ["m", "m"]
    async with stack.http.get("/v1/models") as response:
        assert {card["id"] for card in (await response.json())["data"]} >= {"m", "latest", "canary"}


async def test_an_unknown_model_is_a_404_that_names_the_known_ones(stack: Stack) -> None:
    status, answer, _ = await ask(stack, body={"model": "lastest"})
    assert status == 404 and error_of(answer)["code"] == "model_not_found"
    assert "'latest'" in error_of(answer)["message"] and not received(stack)


async def test_the_ledger_is_empty_when_all_is_over(stack: Stack) -> None:
    await asyncio.gather(*(ask(stack, body={"prompt": f"{number} " * 60}) for number in range(12)))
    async with asyncio.timeout(20):
        while any(
            value
            for name, value in (await stack.metrics()).items()
            if name.startswith(("baton_endpoint_in_flight", "baton_endpoint_tokens", "baton_queue_"))
            and "_bucket" not in name
            and not name.startswith(("baton_queue_wait", "baton_queue_position"))
        ):
            await asyncio.sleep(0.05)


async def test_recent_decisions_can_be_looked_at_and_hold_no_prompt(stack: Stack) -> None:
    await ask(stack, body={"prompt": "a secret " * 50}, x_request_id="look-at-me")
    async with aiohttp.ClientSession() as session, session.get(f"{stack.admin}/debug/decisions") as response:
        text = await response.text()
    newest = json.loads(text)[0]
    assert newest["request_id"] == "look-at-me" and newest["decision"]["prefill"] == stack.prefill[0].address
    assert "secret" not in text
