"""The load, what is looked at while it lasts, and what must hold at its end."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import aiohttp
import psutil

from tests.soak.workers import Faults, SoakWorker, decoding, prefilling
from tests.stack.harness import Stack

LOOK_S = 5.0
_TENANTS = 400
_PROMPTS = 300
_CHURN_S = 20.0
_OPEN_MOST = 3_000
_QUIET_S = 30.0
_GROWTH_AFTER = 0.4
"""Of the run: memory that is taken before is the pool's own size: indices, caches, connections."""

LEDGER = (
    "baton_streams",
    "baton_endpoint_in_flight",
    "baton_endpoint_tokens",
    "baton_prefills_in_flight",
    "baton_queue_requests",
    "baton_queue_bytes",
    "baton_in_flight_requests",
)

WORDS = "the quick brown fox jumps over the lazy dog and runs away from all of it".split()


@dataclass
class Look:
    """One look at the system."""

    at_s: float
    """Since the beginning."""
    filter_mb: float
    envoy_mb: float
    series: int
    ledger: float
    queue: float
    sent: int
    outcomes: Counter[str]
    lost_lines: float
    lag_p99_ms: float


@dataclass
class Result:
    """What came of it."""

    looks: list[Look] = field(default_factory=list)
    growth_mb_per_min: float = 0.0
    growth_bytes_per_request: float = 0.0
    """The same by what was sent meanwhile: what tells a leak, whatever the rate."""
    problems: list[str] = field(default_factory=list)


class Load:
    """Clients that come at a steady rate, whatever becomes of the others."""

    def __init__(self, stack: Stack, rate: float, seed: int) -> None:
        self._stack = stack
        self._rate = rate
        self._random = random.Random(seed)
        self._tasks: set[asyncio.Task[None]] = set()
        self.sent = 0
        self.outcomes: Counter[str] = Counter()

    async def run(self) -> None:
        """Until cancelled."""
        due_s = time.monotonic()
        while True:
            due_s += self._random.expovariate(self._rate)
            await asyncio.sleep(max(due_s - time.monotonic(), 0))
            if len(self._tasks) >= _OPEN_MOST:
                self.outcomes["not sent: too many open"] += 1
                continue
            task = asyncio.create_task(self._one())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def finish(self) -> None:
        """Wait for those that are open."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=_QUIET_S)

    async def _one(self) -> None:
        self.sent += 1
        draw = self._random.random()
        leave_s = self._random.uniform(0.0, 0.35) if draw < 0.05 else None
        try:
            async with asyncio.timeout(leave_s):
                self.outcomes[await self._ask(draw)] += 1
        except TimeoutError:
            self.outcomes["left by the client"] += 1
        except aiohttp.ClientPayloadError:
            self.outcomes["broken off"] += 1  # by a decode worker's fault
        except (aiohttp.ClientError, OSError) as error:
            self.outcomes[f"broken: {type(error).__name__}"] += 1

    async def _ask(self, draw: float) -> str:
        number = self._random.randrange(_PROMPTS)
        headers = {"x-tenant": f"tenant-{self._random.randrange(_TENANTS)}", "x-case": self._case(draw)}
        body: dict[str, Any] = {
            "model": "m" if draw < 0.97 else f"model-{self._random.randrange(10_000)}",
            "prompt": f"{number} " + " ".join(WORDS[(number + i) % len(WORDS)] for i in range(120)),
            "max_tokens": 12,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        path = "/v1/completions" if draw < 0.985 else f"/no/such/{self._random.randrange(10_000)}"
        async with self._stack.http.post(path, json=body, headers=headers) as response:
            text = await response.read()
            whole = b"[DONE]" in text or response.status != 200 or path != "/v1/completions"
            return f"{response.status}" if whole else "broken off"

    def _case(self, draw: float) -> str:
        return "whole" if 0.80 < draw < 0.86 else "strict" if 0.86 < draw < 0.88 else "held"


async def run(
    *,
    minutes: float,
    rate: float,
    seed: int,
    growth_limit_mb_per_min: float,
    show: Callable[[Look], None],
    every_s: float,
    transport: str | None = None,
) -> Result:
    """Carry it out. ``show`` is told of a look every ``every_s``."""
    result, faults = Result(), Faults(seed)
    async with _system(faults, transport) as (stack, decode):
        load = Load(stack, rate, seed)
        began_s = time.monotonic()
        tasks = [asyncio.create_task(load.run()), asyncio.create_task(_churn(stack, decode))]
        try:
            shown_s = 0.0
            while (at_s := time.monotonic() - began_s) < minutes * 60:
                await asyncio.sleep(min(LOOK_S, minutes * 60 - at_s))
                _ended_early(tasks)
                result.looks.append(await _look(stack, load, time.monotonic() - began_s))
                if result.looks[-1].at_s - shown_s >= every_s - LOOK_S / 2:
                    shown_s = result.looks[-1].at_s
                    show(result.looks[-1])
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        faults.on = False
        await load.finish()
        _write(stack, decode)
        await _judge(stack, load, result, time.monotonic() - began_s, growth_limit_mb_per_min)
        show(result.looks[-1])
    return result


def _ended_early(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        if task.done():
            task.result()


@asynccontextmanager
async def _system(faults: Faults, transport: str | None) -> AsyncIterator[tuple[Stack, list[Any]]]:
    stack = Stack(prefill=2, decode=3)
    file = stack.directory / "workers.yaml"
    stack.prefill = [SoakWorker(each.name, each.port, prefilling(faults)) for each in stack.prefill]  # type: ignore[assignment]
    stack.decode = [SoakWorker(each.name, each.port, decoding(faults)) for each in stack.decode]  # type: ignore[assignment]
    common = {"tenant_header": "x-tenant", "mode": "disaggregate"}
    stack.configure(
        workers={"prefill": [], "decode": [], "file": str(file)},
        policies=[
            {"name": "whole", "match": {"headers": {"x-case": {"exact": "whole"}}}, "mode": "aggregate"},
            {
                "name": "strict",
                "match": {"headers": {"x-case": {"exact": "strict"}}},
                **common,
                "slo": {"ttft_s": 0.000001},
                "when_late": "reject",
            },
            {"name": "default", **common, "on_prefill_failure": "aggregate"},
        ],
        prefill={"retries": 1, "timeout_s": 10.0},
        handoff={"release_delay_s": 1.0},
        **({} if transport is None else {"transport": transport}),
    )
    _write(stack, stack.decode)
    async with stack:
        yield stack, stack.decode


def _write(stack: Stack, decode: list[Any]) -> None:
    file = stack.directory / "workers.yaml"
    new = file.with_suffix(".new")
    new.write_text(json.dumps({"prefill": [w.address for w in stack.prefill], "decode": [w.address for w in decode]}))
    new.replace(file)


async def _churn(stack: Stack, decode: list[Any]) -> None:
    """A decode worker is taken out, and put back."""
    while True:
        for which in ([*decode[1:]], decode):
            await asyncio.sleep(_CHURN_S / 2)
            _write(stack, which)


async def _look(stack: Stack, load: Load, at_s: float) -> Look:
    samples = await stack.metrics()
    return Look(
        at_s=at_s,
        filter_mb=_memory_mb(stack.filter.pids()),
        envoy_mb=_memory_mb(stack.envoy.pids()),
        series=len(samples),
        ledger=sum(value for name, value in samples.items() if name.startswith(LEDGER)),
        queue=samples["baton_queue_requests"],
        sent=load.sent,
        outcomes=load.outcomes.copy(),
        lost_lines=samples.get("baton_access_log_lost_total", 0.0),
        lag_p99_ms=_quantile(samples, "baton_event_loop_lag_seconds", 0.99) * 1e3,
    )


def _memory_mb(pids: list[int]) -> float:
    return sum(psutil.Process(pid).memory_info().rss for pid in pids) / 1e6


def _quantile(samples: dict[str, float], name: str, share: float) -> float:
    """Upper bound of the bucket that it falls into."""
    total = samples[f"{name}_count"]
    for sample, value in samples.items():
        if sample.startswith(f"{name}_bucket") and value >= share * total:
            return float(sample.partition('le="')[2].partition('"')[0])
    return 0.0


def growth_mb(looks: list[Look], measure: Callable[[Look], float]) -> float:
    """Growth of the filter for each ``measure``: the median of the slopes between all pairs of looks, after the system has
    taken what it needs."""
    late = [look for look in looks if look.at_s >= looks[-1].at_s * _GROWTH_AFTER]
    pairs = [(b.filter_mb - a.filter_mb, measure(b) - measure(a)) for a, b in combinations(late, 2)]
    slopes = [grown_mb / measured for grown_mb, measured in pairs if measured > 0]
    return statistics.median(slopes) if slopes else 0.0


async def _judge(stack: Stack, load: Load, result: Result, at_s: float, growth_limit_mb_per_min: float) -> None:
    """Everything is over: what is left?"""
    problems = result.problems
    quiet_s = time.monotonic() + _QUIET_S
    while True:
        samples = await stack.metrics()
        left = {name: value for name, value in samples.items() if name.startswith(LEDGER) and value}
        if not left or time.monotonic() > quiet_s:
            break
        await asyncio.sleep(0.2)
    if left:
        problems.append(f"the ledger is not empty: {left}")
    if samples["baton_ledger_leaks_total"]:
        problems.append(f"{samples['baton_ledger_leaks_total']:g} counts had to be given back by the guard against leaks")
    result.growth_mb_per_min = growth_mb(result.looks, lambda look: look.at_s / 60)
    result.growth_bytes_per_request = growth_mb(result.looks, lambda look: look.sent) * 1e6
    if result.growth_mb_per_min > growth_limit_mb_per_min:
        problems.append(
            f"the filter grows by {result.growth_mb_per_min:.2f} MB a minute; {growth_limit_mb_per_min:g} are allowed"
        )
    half = next(look for look in result.looks if look.at_s >= result.looks[-1].at_s / 2)
    most = max(look.series for look in result.looks)
    if most > half.series * 1.05:
        problems.append(f"the number of series grows: {half.series} after half of the time, then {most}")
    errors = [line for line in stack.log_lines() if line.get("level") in ("error", "critical") or "exception" in line]
    if errors:
        problems.append(f"{len(errors)} errors in the filter's log, such as {errors[0]}")
    counted = sum(value for name, value in samples.items() if name.startswith("baton_requests_total"))
    if counted > load.sent:
        problems.append(f"{counted:g} requests were counted, and {load.sent} were sent")
    unanswered = [name for name in load.outcomes if name.startswith(("broken: ", "not sent"))]
    if sum(load.outcomes[name] for name in unanswered) > load.sent * 0.001:
        problems.append(f"requests went wrong at the connection: { {name: load.outcomes[name] for name in unanswered} }")
    if stack.filter.poll() is not None:
        problems.append("the filter has ended")
    result.looks.append(await _look(stack, load, at_s))
