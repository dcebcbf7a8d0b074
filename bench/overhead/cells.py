"""One cell of the table: one arrangement, one size of body, one number of connections, measured for a few seconds."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.overhead import wrk
from bench.overhead.arrangements import Way
from bench.overhead.cpu import Meter, spent
from bench.overhead.workers import Workers

CLIENT, WORKERS = "client", "workers"
_PROBES_PER_S = 60
"""Requests that are none of the load's and may reach the workers of a role in a second: probes of all arrangements."""


@dataclass(frozen=True, order=True)
class Spot:
    """Which cell."""

    body_kb: int
    connections: int

    def __str__(self) -> str:
        return f"{self.body_kb} KB, {self.connections} conn."


@dataclass(frozen=True)
class Sample:
    """One round of one cell."""

    per_s: float
    p50_s: float
    p99_s: float
    cpu_s: dict[str, float]
    """Of a request, by process."""
    memory_mb: dict[str, float]
    faults: tuple[str, ...] = ()
    """Why this is not a measurement of what it should be."""


@dataclass(frozen=True)
class Cell:
    """The medians of the rounds."""

    name: str
    spot: Spot
    rounds: int
    per_s: float
    p50_s: float
    p99_s: float
    cpu_s: dict[str, float]
    memory_mb: dict[str, float]
    per_s_rounds: tuple[float, ...] = ()
    """Of each round, in the order in which they were measured."""
    faults: tuple[str, ...] = field(default=())

    @property
    def between_cpu_s(self) -> float:
        """Of a request, in all that stands between client and workers."""
        return sum(seconds for part, seconds in self.cpu_s.items() if part not in (CLIENT, WORKERS))


def median_cell(name: str, spot: Spot, samples: Sequence[Sample]) -> Cell:
    """The rounds' medians, each number by itself. ``samples``: at least one."""
    parts = {part for each in samples for part in each.cpu_s}
    held = sorted({part for each in samples for part in each.memory_mb})
    return Cell(
        name=name,
        spot=spot,
        rounds=len(samples),
        per_s=statistics.median(each.per_s for each in samples),
        p50_s=statistics.median(each.p50_s for each in samples),
        p99_s=statistics.median(each.p99_s for each in samples),
        cpu_s={part: statistics.median(each.cpu_s.get(part, 0.0) for each in samples) for part in sorted(parts)},
        memory_mb={part: max(each.memory_mb.get(part, 0.0) for each in samples) for part in held},
        per_s_rounds=tuple(each.per_s for each in samples),
        faults=tuple(dict.fromkeys(fault for each in samples for fault in each.faults)),
    )


def measure(way: Way, spot: Spot, workers: Workers, *, program: str, bodies: Path, seconds: float) -> Sample:
    """Load it for ``seconds``. Raises LoadError, OSError."""
    meter = Meter([*way.parts, (WORKERS, workers.child)])
    served, used = workers.served(), meter.cpu_s()
    load = wrk.run(
        program,
        way.port,
        bodies,
        connections=spot.connections,
        seconds=seconds,
        first_number=wrk.numbers_from(),
        headers=way.headers,
    )
    used = spent(used, meter.cpu_s())
    after = workers.served()
    requests = max(1, load.requests)
    return Sample(
        per_s=load.per_s,
        p50_s=load.p50_s,
        p99_s=load.p99_s,
        cpu_s={CLIENT: load.cpu_s / requests, **{part: seconds_used / requests for part, seconds_used in used.items()}},
        memory_mb=meter.memory_mb(),
        faults=tuple(
            faults(
                load,
                prefilled=after[0] - served[0],
                decoded=after[1] - served[1],
                apart=way.arrangement.apart,
            )
        ),
    )


def faults(load: wrk.Load, *, prefilled: int, decoded: int, apart: bool) -> Iterable[str]:
    """What shows that this was no measurement of good answers, each with both halves of the work where there should be two."""
    if not load.requests:
        yield "no request was answered"
    for kind, number in load.errors.items():
        yield f"{number} errors ({kind})"
    if decoded < load.requests or (apart and prefilled < load.requests):
        yield f"{prefilled} requests reached prefill workers and {decoded} decode workers, and {load.requests} were answered"
    if not apart and prefilled > _PROBES_PER_S * (load.seconds + 1):
        yield f"{prefilled} requests reached prefill workers, which had nothing to do"
