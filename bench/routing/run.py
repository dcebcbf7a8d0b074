"""One run: one router, one load, the engines emptied before; and its numbers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import aiohttp

from bench.routing.beliefs import Beliefs, beliefs, together
from bench.routing.client import Planned, Report, replay
from bench.routing.engines import MODEL, Counters, EngineError, Engines, prefill_spread
from bench.routing.policies import Contestant
from bench.routing.prompts import http_request
from bench.routing.routers import Router
from bench.routing.usage import Lateness, cpu_s
from workers.goodput import ITL_SLO_S, TTFT_SLO_S, Outcome, Status, Summary, percentile, summary
from workers.traces import Request

_TIMEOUT_S = 1200.0
_WARM_UP_REQUESTS = 10
_WARM_UP_TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What one run showed. Times are simulated seconds where the name does not say otherwise."""

    trace: str
    contestant: str
    load: float
    """Share of the capacity under round robin."""
    rate_per_s: float
    summary: Summary
    by_tenant: dict[str, Summary] = field(default_factory=dict)
    in_time: float
    """Share of all requests with a first token within the limit, whatever came then."""
    steady: float
    """Share of all requests with the gaps between tokens within the limit, whenever they began."""
    hit_ratio: float
    """Share of the prompt tokens that no worker computed: whoever was to prefill them had them in its cache."""
    spread: float
    """Prompt tokens computed by the busiest prefill worker over the mean."""
    pulled_tokens: int
    """KV that decode workers got from prefill workers."""
    decode_computed_tokens: int
    """Prompt tokens that decode workers computed themselves: prompts that were not handed over, or whose KV got lost."""
    longest_ttft_s: float
    whole: int
    """Requests that Baton had a decode worker do alone."""
    preemptions: int
    violations: dict[str, int]
    beliefs: Beliefs
    """What Baton expected prefill workers to hold, and what they held."""
    errors: list[str]
    real_s: float
    cores: dict[str, float]
    """Cores kept busy, by part."""
    late_ms: dict[str, float]
    """99th percentile of how late the load was sent, our loop was, the engines answered; real milliseconds."""


def plan(requests: Sequence[Request], *, tenant: str = "") -> list[Planned]:
    """What the load generator sends for the requests of a trace."""
    headers = {"x-tenant": tenant} if tenant else {}
    return [
        Planned(
            at_s=request.at_s,
            payload=partial(http_request, request, model=MODEL, host="bench", headers=headers),
            input_tokens=request.input_tokens,
            output_tokens=request.output_tokens,
            tenant=tenant,
        )
        for request in requests
    ]


async def run(
    planned: Sequence[Planned],
    contestant: Contestant,
    engines: Engines,
    *,
    trace: str,
    load: float,
    directory: Path,
    peers: Path,
    routers: int = 1,
    progress: Callable[[int, int, int], None],
) -> RunResult:
    """Start the router, send everything, look at the engines. Raises EngineError, PartError, MissingPeerError, OSError."""
    speed = engines.options.speed
    async with aiohttp.ClientSession() as http:
        await engines.empty(http)
        with ExitStack() as started:
            several: list[Router] = []
            for number in range(routers):
                own = directory / f"router-{number}"
                own.mkdir(exist_ok=True)
                several.append(await asyncio.to_thread(started.enter_context, Router(contestant, engines, own, peers)))
            for router in several:
                await _warm_up(http, router)
            before = await engines.counters(http)
            began_s, own_cpu_s = time.perf_counter(), time.process_time()
            children = [child for router in several for child in router.children]
            cpu = [cpu_s(engines.children), cpu_s(children)]
            async with Lateness(http, {"prefill": engines.prefill, "decode": engines.decode}) as late:
                ports = [router.port for router in several]
                report = await replay(planned, "127.0.0.1", ports, speed=speed, timeout_s=_TIMEOUT_S, progress=progress)
            real_s = time.perf_counter() - began_s
            used_s = {
                "engines": cpu_s(engines.children) - cpu[0],
                "router": cpu_s(children) - cpu[1],
                "load": time.process_time() - own_cpu_s,
            }
            believed = [await beliefs(http, router.admin) for router in several if router.admin is not None]
        counters = [after - earlier for after, earlier in zip(await engines.counters(http), before, strict=True)]
        violations = await engines.violations(http)
    return _result(
        report,
        counters,
        engines.options.prefill,
        trace=trace,
        contestant=contestant.name,
        load=load,
        violations=violations,
        beliefs=together(believed),
        real_s=real_s,
        cores={name: seconds / real_s for name, seconds in used_s.items()},
        late_ms={
            "sent": report.late_p99_s / speed * 1e3,
            "loop": percentile(late.loop_s, 0.99) * 1e3,
            **{kind: percentile(answers_s, 0.99) * 1e3 for kind, answers_s in late.engine_s.items()},
        },
    )


def _result(
    report: Report,
    counters: Sequence[Counters],
    prefill: int,
    *,
    trace: str,
    contestant: str,
    load: float,
    violations: dict[str, int],
    beliefs: Beliefs,
    real_s: float,
    cores: dict[str, float],
    late_ms: dict[str, float],
) -> RunResult:
    outcomes = report.outcomes
    prompts = counters[:prefill]
    computed = sum(each.computed_tokens for each in counters)
    served = sum(outcome.input_tokens for outcome in outcomes if outcome.status is Status.SERVED)
    arrivals_s = [outcome.arrived_s for outcome in outcomes]
    span_s = max(arrivals_s, default=0.0) - min(arrivals_s, default=0.0)
    tenants = sorted({outcome.tenant for outcome in outcomes if outcome.tenant})
    return RunResult(
        trace=trace,
        contestant=contestant,
        load=load,
        rate_per_s=len(outcomes) / span_s if span_s else float("nan"),
        summary=summary(outcomes),
        by_tenant={tenant: summary(_of(outcomes, tenant)) for tenant in tenants},
        in_time=_share(outcomes, lambda o: o.ttft_s is not None and o.ttft_s <= TTFT_SLO_S),
        steady=_share(outcomes, lambda o: o.ttft_s is not None and (o.itl_p99_s or 0.0) <= ITL_SLO_S),
        hit_ratio=1 - computed / served if served else float("nan"),
        spread=prefill_spread([each.computed_tokens for each in prompts]),
        pulled_tokens=sum(each.pulled_tokens for each in counters[prefill:]),
        decode_computed_tokens=sum(each.computed_tokens for each in counters[prefill:]),
        longest_ttft_s=max((o.ttft_s for o in outcomes if o.ttft_s is not None), default=float("nan")),
        whole=report.whole,
        preemptions=sum(each.preemptions for each in counters),
        violations=violations,
        beliefs=beliefs,
        errors=report.errors,
        real_s=real_s,
        cores=cores,
        late_ms=late_ms,
    )


def _share(outcomes: Sequence[Outcome], good: Callable[[Outcome], bool]) -> float:
    return sum(map(good, outcomes)) / len(outcomes) if outcomes else float("nan")


def _of(outcomes: Sequence[Outcome], tenant: str) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.tenant == tenant]


async def _warm_up(http: aiohttp.ClientSession, router: Router) -> None:
    """A few small requests, until all of the way works: health checks have to find their servers first. Raises EngineError."""
    body = {"model": MODEL, "prompt": "warm up", "max_tokens": 2}
    good, deadline_s = 0, time.monotonic() + _WARM_UP_TIMEOUT_S
    while good < _WARM_UP_REQUESTS:
        async with http.post(f"http://127.0.0.1:{router.port}/v1/completions", json=body) as response:
            text = await response.text()
            good = good + 1 if response.status == 200 else 0
        if time.monotonic() > deadline_s:
            raise EngineError(f"{router.contestant.name} still answers {response.status}: {text[:300]}")
        if not good:
            await asyncio.sleep(0.1)
