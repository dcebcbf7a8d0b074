"""Experiments with the whole gateway: requests held in their prefill, long prompts, a burst."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence

from bench.growth.clients import request, statuses
from bench.growth.gateway import gateway
from bench.growth.judge import Cost, Growth
from bench.growth.series import Series, Tell
from bench.growth.worker import HELD

_BODY_BYTES = 4096
_PROBES = 30
_SETTLE_S = 1.0
_WARM_UP = 20


async def held(sizes: Sequence[int], rounds: int, tell: Tell, *, transport: str) -> Series:
    """Many requests that wait for their prefill at once."""
    series = Series(
        title=f"Requests held in prefill at once, bodies of {_BODY_BYTES // 1024} KB, real Envoy",
        input="held",
        costs=(
            Cost(name="filter CPU", unit="ms", expected=Growth.LINEAR, floor=40.0),
            Cost(name="filter memory", unit="MB", expected=Growth.LINEAR, floor=8.0),
            Cost(name="Envoy memory", unit="MB", expected=Growth.LINEAR, floor=8.0),
            Cost(name="CPU while they wait", unit="ms/s", expected=Growth.LINEAR, floor=30.0),
            Cost(name="another request, p25", unit="ms", expected=Growth.FLAT, floor=4.0),
            Cost(name="until all are held", unit="s", expected=None),
            Cost(name="until all are answered", unit="s", expected=None),
        ),
    )
    for turn in range(rounds):
        for many in sizes:
            tell(f"round {turn + 1} of {rounds}: {many:,} requests held")
            costs, wrong = await _held(many, transport)
            series.note(many, costs)
            series.faults += [f"{many:,} held: {fault}" for fault in wrong]
    return series


async def _held(many: int, transport: str) -> tuple[dict[str, float], list[str]]:
    draw = random.Random(many)  # noqa: S311 - a benchmark
    word = HELD.decode()
    async with gateway(transport=transport) as running:
        clients = running.clients
        await clients.one_by_one(lambda: request(_BODY_BYTES, draw), _WARM_UP)
        cpu_s, filter_mb, envoy_mb, began_s = running.filter_cpu_s(), running.filter_mb(), running.envoy_mb(), time.monotonic()
        tasks = clients.all_at_once(lambda: request(_BODY_BYTES, draw, start=word), many)
        await running.until_held(many)
        held_s = time.monotonic() - began_s
        in_s = running.filter_cpu_s() - cpu_s
        took = {"filter memory": running.filter_mb() - filter_mb, "Envoy memory": running.envoy_mb() - envoy_mb}
        cpu_s, idle_s = running.filter_cpu_s(), time.monotonic()
        await asyncio.sleep(_SETTLE_S)
        waiting_ms_per_s = (running.filter_cpu_s() - cpu_s) / (time.monotonic() - idle_s) * 1e3
        probes_s = await clients.one_by_one(lambda: request(_BODY_BYTES, draw), _PROBES)
        cpu_s, began_s = running.filter_cpu_s(), time.monotonic()
        await running.let_go()
        answered = await statuses(tasks)
        out_s = running.filter_cpu_s() - cpu_s
        answered_s = time.monotonic() - began_s
    wrong = [f"{count} answered {status}" for status, count in answered.items() if status != "200"]
    return {
        "filter CPU": (in_s + out_s) * 1e3,
        **took,
        "CPU while they wait": waiting_ms_per_s,
        "another request, p25": _quartile(probes_s) * 1e3,
        "until all are held": held_s,
        "until all are answered": answered_s,
    }, wrong


async def prompts(sizes: Sequence[int], rounds: int, tell: Tell, *, transport: str) -> Series:
    """Longer and longer ones, one after the other, each new to the prefix index."""
    series = Series(
        title="Length of the prompt, one request at a time, real Envoy",
        input="bytes",
        costs=(
            Cost(name="latency, p25", unit="ms", expected=Growth.LINEAR, floor=2.0),
            Cost(name="filter CPU", unit="ms", expected=Growth.LINEAR, floor=1.0),
            Cost(name="filter memory, peak", unit="MB", expected=Growth.LINEAR, floor=4.0),
        ),
    )
    draw = random.Random(3)  # noqa: S311
    for turn in range(rounds):
        async with gateway(transport=transport) as running:
            await running.clients.one_by_one(lambda: request(_BODY_BYTES, draw), _WARM_UP)
            for size in sizes:
                tell(f"round {turn + 1} of {rounds}: prompts of {size:,} bytes")
                times = max(min(40, (16 << 20) // size), 5)
                made = iter([request(size, draw) for _ in range(times)])
                running.forget_peak()
                before_mb, cpu_s = running.filter_mb(), running.filter_cpu_s()
                took_s = await running.clients.one_by_one(made.__next__, times)
                series.note(
                    size,
                    {
                        "latency, p25": _quartile(took_s) * 1e3,
                        "filter CPU": (running.filter_cpu_s() - cpu_s) / times * 1e3,
                        "filter memory, peak": running.filter_peak_mb() - before_mb,
                    },
                )
    return series


async def burst(sizes: Sequence[int], rounds: int, tell: Tell, *, transport: str) -> Series:
    """All come at once, and their prefills take 50 ms; the default queue decides who goes when."""
    series = Series(
        title=f"A burst, bodies of {_BODY_BYTES // 1024} KB, prefills of 50 ms, the default queue, real Envoy",
        input="requests",
        costs=(
            Cost(name="filter CPU", unit="ms", expected=Growth.LINEAR, floor=40.0),
            Cost(name="filter memory, peak", unit="MB", expected=Growth.LINEAR, floor=8.0),
            Cost(name="until all are answered", unit="s", expected=None),
            Cost(name="answered 429", unit="", expected=None),
        ),
    )
    draw = random.Random(4)  # noqa: S311
    for turn in range(rounds):
        for many in sizes:
            tell(f"round {turn + 1} of {rounds}: a burst of {many:,}")
            async with gateway(transport=transport, dispatch="queue", prefill_s=0.05) as running:
                await running.clients.one_by_one(lambda: request(_BODY_BYTES, draw), _WARM_UP)
                running.forget_peak()
                before_mb, cpu_s, began_s = running.filter_mb(), running.filter_cpu_s(), time.monotonic()
                made = iter([request(_BODY_BYTES, draw) for _ in range(many)])
                answered = await statuses(running.clients.all_at_once(made.__next__, many))
                series.note(
                    many,
                    {
                        "filter CPU": (running.filter_cpu_s() - cpu_s) * 1e3,
                        "filter memory, peak": running.filter_peak_mb() - before_mb,
                        "until all are answered": time.monotonic() - began_s,
                        "answered 429": float(answered["429"]),
                    },
                )
            wrong = {status: count for status, count in answered.items() if status not in ("200", "429")}
            series.faults += [f"burst of {many:,}: {count} answered {status}" for status, count in wrong.items()]
    return series


def _quartile(took_s: list[float]) -> float:
    """A quarter took no longer: the others met whatever else the machine does."""
    return statistics.quantiles(took_s, n=4)[0]
