"""Streams: one arrangement, so many streams at once; from token to token, and what each token costs."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from bench.overhead.arrangements import Way
from bench.overhead.cells import CLIENT, WORKERS
from bench.overhead.cpu import Meter, spent
from bench.overhead.stream_client import Report
from bench.overhead.talk import Talk, TalkError
from bench.overhead.wrk import numbers_from
from workers.process import Child

SPREAD_S = 1.0
"""Over which the streams begin."""
_GRACE_S = 60.0


@dataclass(frozen=True, order=True)
class StreamSpot:
    """Which cell."""

    streams: int
    body_kb: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.streams} streams of {self.tokens} tokens, prompts of {self.body_kb} KB"


WHOLE = StreamSpot(60, 48, 340)
"""Real requests: some 12,000 tokens in, 340 out."""


@dataclass(frozen=True)
class StreamSample:
    """One round of one cell."""

    report: Report
    cpu_s: dict[str, float]
    """In all, by process."""
    memory_mb: dict[str, float]


@dataclass(frozen=True)
class StreamCell:
    """The medians of the rounds. Seconds, and processor time by process."""

    name: str
    spot: StreamSpot
    rounds: int
    itl_p50_s: float
    itl_p99_s: float
    itl_p99_rounds_s: tuple[float, ...]
    delay_p50_s: float
    delay_p99_s: float
    ttft_p50_s: float
    cpu_a_token_s: dict[str, float]
    cpu_a_request_s: dict[str, float]
    memory_mb: dict[str, float]
    faults: tuple[str, ...]

    @property
    def between_a_token_s(self) -> float:
        """Of all that stands between client and workers; what the request itself costs is in it."""
        return _between(self.cpu_a_token_s)

    @property
    def between_a_request_s(self) -> float:
        """The same for a whole request."""
        return _between(self.cpu_a_request_s)


def _between(cpu_s: dict[str, float]) -> float:
    return sum(seconds for part, seconds in cpu_s.items() if part not in (CLIENT, WORKERS))


def median_stream_cell(name: str, spot: StreamSpot, samples: Sequence[StreamSample]) -> StreamCell:
    """The rounds' medians, each number by itself. ``samples``: at least one."""
    reports = [each.report for each in samples]
    parts = sorted({part for each in samples for part in each.cpu_s})

    def cpu_s(of: str) -> dict[str, float]:
        return {
            part: statistics.median(each.cpu_s[part] / max(1, getattr(each.report, of)) for each in samples) for part in parts
        }

    return StreamCell(
        name=name,
        spot=spot,
        rounds=len(samples),
        itl_p50_s=statistics.median(each.itl_p50_s for each in reports),
        itl_p99_s=statistics.median(each.itl_p99_s for each in reports),
        itl_p99_rounds_s=tuple(each.itl_p99_s for each in reports),
        delay_p50_s=statistics.median(each.delay_p50_s for each in reports),
        delay_p99_s=statistics.median(each.delay_p99_s for each in reports),
        ttft_p50_s=statistics.median(each.ttft_p50_s for each in reports),
        cpu_a_token_s=cpu_s("tokens"),
        cpu_a_request_s=cpu_s("streams"),
        memory_mb={part: max(each.memory_mb.get(part, 0.0) for each in samples) for part in samples[0].memory_mb},
        faults=tuple(dict.fromkeys(fault for each in reports for fault in each.faults)),
    )


def measure(way: Way, spot: StreamSpot, workers: Sequence[Child], *, bodies: Path, token_s: float, log: Path) -> StreamSample:
    """All streams of the spot, once, to their ends. Raises TalkError, OSError."""
    argv = [
        *(sys.executable, "-m", "bench.overhead.stream_client", str(way.port), str(bodies), str(numbers_from())),
        *(str(spot.streams), str(spot.tokens), str(SPREAD_S)),
        *(f"{name}: {value}" for name, value in way.headers.items()),
    ]
    patience_s = SPREAD_S + spot.tokens * token_s + _GRACE_S
    with Talk(argv, log=log, patience_s=patience_s) as client:
        client.expect("ready")
        meter = Meter([*way.parts, *((WORKERS, child) for child in workers)])
        used = meter.cpu_s()
        client_s = client.cpu_s
        client.say("go")
        client.expect("done")
        used = spent(used, meter.cpu_s())
        memory_mb = meter.memory_mb()
        client_s = client.cpu_s - client_s
        line = client.line()
    try:
        report = msgspec.json.decode(line, type=Report)
    except msgspec.DecodeError as error:
        raise TalkError(f"the client of streams said {line[:200]!r}: {error}") from None
    return StreamSample(report=report, cpu_s={CLIENT: client_s, **used}, memory_mb=memory_mb)
