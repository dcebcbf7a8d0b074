"""A known sequence of requests moves exactly the counters that it must, by exactly so much, and nothing else.

Real Envoy, real filter, simulated engines: what they computed is the truth that the token counts are held against.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from tests.cases.sims import RecordingSim, SimStack
from workers.sim.faults import Fault
from workers.sim.options import SimOptions

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL = "m"
OPTIONS = SimOptions(
    served_model_name=(MODEL,), speed=4.0, num_blocks=2000, max_model_len=8192, enable_prompt_tokens_details=True
)

_COMMON = {"tenant_header": "x-tenant", "objective": "round-robin", "dispatch": "immediate"}
POLICIES: list[dict[str, Any]] = [
    {
        "name": "fails",
        "match": {"headers": {"x-case": {"exact": "fails"}}},
        "mode": "disaggregate",
        "on_prefill_failure": "fail",
    },
    {
        "name": "falls-back",
        "match": {"headers": {"x-case": {"exact": "falls-back"}}},
        "mode": "disaggregate",
        "on_prefill_failure": "aggregate",
    },
    {"name": "whole", "match": {"headers": {"x-case": {"exact": "whole"}}}, "mode": "aggregate"},
    {"name": "weighs", "match": {"headers": {"x-case": {"exact": "weighs"}}}, "threshold_uncached_tokens": 5000},
    {
        "name": "strict",
        "match": {"headers": {"x-case": {"exact": "strict"}}},
        "mode": "disaggregate",
        "slo": {"ttft_s": 0.000001},
        "when_late": "reject",
    },
    {"name": "default", "mode": "disaggregate"},
]
_UNHELD = ("strict", "weighs")

OTHER_PROMPT = "what nobody has asked before comes here, in words that are new " * 20
PROMPT = "the quick brown fox jumps over the lazy dog and runs away " * 20

REQUESTS = 16

AT_REST = (
    *("baton_streams", "baton_endpoint_in_flight", "baton_endpoint_tokens", "baton_prefills_in_flight"),
    *("baton_queue_requests", "baton_queue_bytes", "baton_engine_running_requests", "baton_engine_waiting_requests"),
    *("baton_ledger_leaks_total", "baton_engine_recomputed_tokens_total", "baton_access_log_lost_total"),
)
"""What must be 0 when all is over."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[SimStack]:
    policies = [each if each["name"] in _UNHELD else {**each, **_COMMON} for each in POLICIES]
    settings: dict[str, Any] = {"policies": policies, "scrape": {"interval_s": 0.1}, "prefill": {"retries": 1}}
    async with SimStack(prefill=2, decode=1, options=OPTIONS, settings=settings) as made:
        yield made


def counters(samples: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in samples.items() if "_total" in name or name.partition("{")[0].endswith("_count")}


async def settled(stack: SimStack, requests: int) -> dict[str, float]:
    """All counters, once Envoy has reported every request and every worker has been looked at since."""
    async with asyncio.timeout(20):
        while (await stack.metrics())["baton_access_log_lines_total"] < requests:
            await asyncio.sleep(0.05)
        scrapes = (await stack.metrics())['baton_scrapes_total{outcome="ok"}'] + 3 * len(stack.sims)
        while (samples := await stack.metrics())['baton_scrapes_total{outcome="ok"}'] < scrapes:
            await asyncio.sleep(0.05)
    return samples


@dataclass
class Told:
    """What the client got."""

    status: int
    usage: dict[str, Any]


async def ask(stack: SimStack, case: str = "", path: str = "/v1/completions", **body: Any) -> Told:
    headers = {"x-tenant": "acme", **({"x-case": case} if case else {})}
    sent = {
        "model": MODEL,
        "prompt": PROMPT,
        "max_tokens": 8,
        "stream": True,
        "stream_options": {"include_usage": True},
        **body,
    }
    async with stack.http.post(path, json=sent, headers=headers) as response:
        text = await response.text()
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    usages = [usage for line in lines if (usage := json.loads(line).get("usage"))]
    return Told(response.status, usages[-1] if usages else {})


async def leave_in_the_answer(stack: SimStack) -> None:
    """A client that closes after the first tokens."""
    sent = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4000, "stream": True, "ignore_eos": True}
    async with stack.http.post("/v1/completions", json=sent, headers={"x-tenant": "acme"}) as response:
        assert response.status == 200
        await response.content.readany()
        response.close()


class Truth:
    """What the engines counted."""

    def __init__(self, stack: SimStack) -> None:
        self._counters = {sim.address: vars(sim.worker.engine.core.counters).copy() for sim in stack.sims}
        self.finished = sum(sum(sim.worker.metrics._finished.values()) for sim in stack.decode)
        self.itl = Counter[str]()
        for sim in stack.decode:
            buckets, _ = sim.worker.metrics._histograms["inter_token_latency_seconds"].cumulated()
            self.itl.update({bound: int(samples) for bound, samples in buckets})

    def since(self, began: Truth, address: str) -> dict[str, int]:
        return {name: value - began._counters[address][name] for name, value in self._counters[address].items()}


async def test_every_counter_moves_by_what_happened_and_no_other(stack: SimStack) -> None:
    before, began = await settled(stack, 0), Truth(stack)
    decode = stack.decode[0].address

    # Three that go well. The prefill workers take turns, so the third finds its prompt in the first one's cache.
    good = [await ask(stack) for _ in range(3)]
    assert [each.status for each in good] == [200] * 3
    first, second = stack.prefill if len(stack.prefill[0].received) == 2 else reversed(stack.prefill)
    # The client leaves in the middle of the answer. It is the second one's turn.
    await leave_in_the_answer(stack)
    # A prefill that fails, and is done by the other worker.
    first.worker.inject(Fault(kind="status", phase="prefill", count=1))
    retried = await ask(stack)
    # One that fails, and with it the request, because the policy says so.
    with failing(stack):
        failed = await ask(stack, "fails")
    # One that fails on both, and the decode worker does it all.
    with failing(stack):
        fell_back = await ask(stack, "falls-back", prompt=OTHER_PROMPT)
    late = await ask(stack, "strict")
    whole = await ask(stack, "whole")
    short = await ask(stack, "weighs", prompt="a short one, of a few words")
    two = await ask(stack, n=2)
    unknown = await ask(stack, model="no-such-model")
    bad = await ask(stack, model=None)
    refused = await ask(stack, path="/v1/load_lora_adapter")
    async with stack.http.get("/v1/models") as models, stack.http.get("/version") as version:
        assert (models.status, version.status) == (200, 200)
    statuses = [each.status for each in (retried, failed, fell_back, late, whole, short, two, unknown, bad, refused)]
    assert statuses == [200, 502, 200, 429, 200, 200, 200, 404, 400, 404]

    after, ended = await settled(stack, int(before["baton_access_log_lines_total"]) + REQUESTS), Truth(stack)
    handed_over = 5  # three that went well, the one that was left, the one that was tried again
    expected: dict[str, float] = {
        **requests("disaggregate", "m", "default", handoff=handed_over),
        **requests("none", "m", "fails", prefill_failed=1),
        **requests("aggregate", "m", "falls-back", whole=1),
        **requests("none", "m", "strict", slo_unreachable=1),
        **requests("aggregate", "m", "whole", whole=1),
        **requests("aggregate", "m", "weighs", whole=1),
        **requests("aggregate", "m", "default", whole=1),
        **requests("none", "other", "default", model_not_found=1),
        **requests("none", "-", "-", model_missing=1),
        **requests("none", "-", "-", treatment="refused", not_found=1),
        **requests("none", "-", "-", treatment="models", models=1),
        **requests("none", "-", "other", treatment="whole", whole=1),
        'baton_rejected_total{reason="late"}': 1,
        'baton_rejected_total{reason="no_endpoint"}': 1,
        'baton_fallbacks_total{kind="retry"}': 2,  # of the one that was tried again, and of the one that fell back
        'baton_fallbacks_total{kind="aggregate"}': 1,
        **decisions("disaggregate", "forced", default=handed_over, fails=1, **{"falls-back": 1}),
        **decisions("aggregate", "forced", whole=1),
        **decisions("aggregate", "too_short", weighs=1),
        **decisions("aggregate", "cannot_hand_over", default=1),
        **{f'baton_whole_requests_total{{reason="{r}"}}': 1 for r in ("prefill_failed", "forced", "too_short", "n")},
        'baton_prefill_seconds_count{outcome="ok"}': handed_over,
        'baton_prefill_seconds_count{outcome="failed"}': 4,
        f'baton_handoffs_total{{connector="nixl",decode="{decode}",prefill="{first.address}"}}': 2,
        f'baton_handoffs_total{{connector="nixl",decode="{decode}",prefill="{second.address}"}}': 3,
        "baton_handoff_blocks_count": handed_over,
        "baton_handoff_age_seconds_count": handed_over,
        # What clients saw, as Envoy tells it.
        **seen("disaggregate", "m", "default", ok=handed_over - 1, client_gone=1),
        **seen("none", "m", "fails", refused=1),
        **seen("aggregate", "m", "falls-back", ok=1),
        **seen("none", "m", "strict", refused=1),
        **seen("aggregate", "m", "whole", ok=1),
        **seen("aggregate", "m", "weighs", ok=1),
        **seen("aggregate", "m", "default", ok=1),
        **seen("none", "other", "default", refused=1),
        **seen("none", "-", "-", refused=2, ok=1),
        **seen("none", "-", "other", ok=1),
        'baton_client_slo_requests_total{mode="none",model="m",policy="strict",slo="failed"}': 1,
        'baton_ttft_actual_to_predicted_ratio_count{mode="disaggregate"}': handed_over,
        'baton_ttft_actual_to_predicted_ratio_count{mode="aggregate"}': 3,  # not of the one whose prefill had failed
        # Answers that the filter was shown: four prompts that one worker served, and two pairs that had yet to meet.
        'baton_answers_served_total{by="chosen"}': 6,
        "baton_access_log_lines_total": REQUESTS,
        'baton_log_lines_total{outcome="logged"}': REQUESTS,
        # The filter's own time: one sample for each phase that a request came to.
        "baton_filter_seconds_count": REQUESTS,
        **phases(headers=REQUESTS, parse=13, decide=12, queue=10, prefill_call=7, reply=9, answer=10),
    }

    # Tokens: the engines' own counts, and what the clients were told.
    told = [*good, retried, fell_back, whole, two]
    left = good[0].usage["prompt_tokens"]  # the client that left had asked for the same prompt
    computed = {sim.address: ended.since(began, sim.address) for sim in stack.sims}
    prefilled = [computed[sim.address] for sim in stack.prefill]
    prompt = sum(each["local_compute_tokens"] + each["local_hit_tokens"] for each in prefilled)
    cached = sum(each["local_hit_tokens"] for each in prefilled)
    assert prompt == left * handed_over
    assert cached == sum(each.usage["prompt_tokens_details"]["cached_tokens"] for each in (good[2], retried)) + left // 16 * 16
    expected |= {
        tokens("prompt", "acme"): sum(each.usage["prompt_tokens"] for each in told) + left,
        tokens("cached", "acme"): cached,
        tokens("completion", "acme"): sum(each.usage["completion_tokens"] for each in told),
        tokens("prompt", "-"): short.usage["prompt_tokens"],
        tokens("completion", "-"): short.usage["completion_tokens"],
        "baton_prefix_prompt_tokens_total": prompt,
        "baton_prefix_reported_tokens_total": cached,
    }
    for sim in stack.sims:
        expected |= engine(sim, computed[sim.address])
    expected |= {
        f'baton_engine_transfers_total{{endpoint="{decode}",role="decode"}}': handed_over,
        'baton_engine_itl_seconds_count{role="decode"}': ended.itl["+Inf"] - began.itl["+Inf"],
        'baton_engine_ttft_seconds_count{role="prefill"}': handed_over,
        'baton_engine_ttft_seconds_count{role="decode"}': ended.finished - began.finished,
    }
    moved = {name: after[name] - before.get(name, 0) for name in counters(after)}
    unknown_yet = (
        "baton_scrapes",
        "baton_event_loop_lag",
        "baton_prefix_predicted",
        "baton_engine_transfer_",
        "baton_ttft_predicted",
    )
    found = {name: value for name, value in moved.items() if value and not name.startswith(unknown_yet)}
    assert found == {name: value for name, value in expected.items() if value}

    buckets = {name: value - before.get(name, 0) for name, value in after.items() if "engine_itl_seconds_bucket" in name}
    said = {re.search(r'le="([^"]+)"', name)[1]: value for name, value in buckets.items()}  # type: ignore[index]
    assert said == {bound: ended.itl[bound] - began.itl[bound] for bound in said}, "the engine's own ITL, bucket for bucket"
    assert {name: value for name, value in after.items() if name.startswith(AT_REST) and value} == {}


@contextmanager
def failing(stack: SimStack) -> Iterator[None]:
    """Each prefill worker answers its next prompt with a 500."""
    for sim in stack.prefill:
        sim.worker.inject(Fault(kind="status", phase="prefill", count=1))
    yield
    for sim in stack.prefill:
        sim.worker.faults.clear()


def requests(mode: str, model: str, policy: str, treatment: str = "completions", **outcomes: int) -> dict[str, float]:
    rest = f'policy="{policy}",treatment="{treatment}"'
    return {
        f'baton_requests_total{{mode="{mode}",model="{model}",outcome="{outcome}",{rest}}}': n
        for outcome, n in outcomes.items()
    }


def decisions(mode: str, reason: str, **policies: int) -> dict[str, float]:
    return {f'baton_decisions_total{{mode="{mode}",policy="{policy}",reason="{reason}"}}': n for policy, n in policies.items()}


def seen(mode: str, model: str, policy: str, **outcomes: int) -> dict[str, float]:
    """Of Envoy: all streamed answers of these have their times; those that came whole, the time of their generation too."""
    labels = f'mode="{mode}",model="{model}"'
    found: dict[str, float] = {
        f'baton_client_requests_total{{{labels},outcome="{outcome}",policy="{policy}"}}': n for outcome, n in outcomes.items()
    }
    if mode != "none":
        labels += f',policy="{policy}"'
        found[f"baton_client_ttft_seconds_count{{{labels}}}"] = sum(outcomes.values())
        found[f"baton_client_generation_seconds_count{{{labels}}}"] = outcomes["ok"]
        found[f"baton_client_mean_itl_seconds_count{{{labels}}}"] = outcomes["ok"]
    return found


def phases(**counts: int) -> dict[str, float]:
    return {f'baton_filter_phase_seconds_count{{phase="{phase}"}}': n for phase, n in counts.items()}


def tokens(kind: str, tenant: str) -> str:
    return f'baton_tokens_total{{kind="{kind}",model="m",tenant="{tenant}"}}'


def engine(sim: RecordingSim, counted: dict[str, int]) -> dict[str, float]:
    """What the filter says of one engine."""
    role = sim.name.partition("-")[0]
    sources = {
        "local_compute": "local_compute_tokens",
        "local_cache_hit": "local_hit_tokens",
        "external_kv_transfer": "pulled_tokens",
    }
    return {
        f'baton_engine_generation_tokens_total{{endpoint="{sim.address}",model="m",role="{role}"}}': counted[
            "generated_tokens"
        ],
        **{
            f'baton_engine_prompt_tokens_total{{endpoint="{sim.address}",role="{role}",source="{source}"}}': counted[name]
            for source, name in sources.items()
        },
    }
