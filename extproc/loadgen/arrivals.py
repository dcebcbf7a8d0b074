"""When requests are sent: stages of a rate, steady or rising, and how evenly requests come within them. Pure arithmetic."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from extproc.loadgen.errors import BenchError

MOST_REQUESTS = 2_000_000
"""A run of more is a mistake in a rate or a duration."""

_STAGE = re.compile(r"(?P<first>[0-9.eE+]+)(?:-(?P<last>[0-9.eE+]+))?:(?P<seconds>[0-9.eE+]+)")


@dataclass(frozen=True, slots=True)
class Stage:
    """A rate for some time. It goes from the first to the last in a straight line."""

    first_per_s: float
    last_per_s: float
    duration_s: float

    def __post_init__(self) -> None:
        """Raises BenchError."""
        for rate in (self.first_per_s, self.last_per_s):
            if not (math.isfinite(rate) and rate >= 0):
                raise BenchError(f"rate: 0 requests/s or more, not {rate:g}")
        if not (math.isfinite(self.duration_s) and self.duration_s > 0):
            raise BenchError(f"duration: more than 0 s, not {self.duration_s:g}")

    @property
    def requests(self) -> float:
        """That are expected in it."""
        return (self.first_per_s + self.last_per_s) / 2 * self.duration_s

    def at_s(self, expected: float) -> float:
        """The time since its start by which ``expected`` requests are expected."""
        if not expected:
            return 0.0
        # Expected by t: a t + (b - a) t^2 / 2T. Solved for t in the form that also holds where a = b, or a = 0.
        slope = (self.last_per_s - self.first_per_s) / self.duration_s
        root = math.sqrt(max(0.0, self.first_per_s**2 + 2 * slope * expected))
        return min(self.duration_s, 2 * expected / (self.first_per_s + root))


@dataclass(frozen=True, slots=True)
class Gaps:
    """How evenly requests come: the coefficient of variation of the gaps between them, at a steady rate."""

    text: str
    variation: float
    """0: like a clock; 1: Poisson; more: in bursts (gaps of a gamma distribution)."""

    def of_mean_one(self, seed: int) -> Iterator[float]:
        """Gaps without end, 1 on average."""
        drawn = random.Random(f"{seed} arrivals")  # noqa: S311 (not a secret)
        if self.variation == 0:
            return itertools.repeat(1.0)
        if self.variation == 1:
            return iter(lambda: drawn.expovariate(1.0), None)
        shape = 1 / self.variation**2
        return iter(lambda: drawn.gammavariate(shape, 1 / shape), None)


def parse_gaps(text: str) -> Gaps:
    """``poisson``, ``constant`` or ``gamma:VARIATION``. Raises BenchError."""
    word, colon, number = text.partition(":")
    if word in ("poisson", "constant") and not colon:
        return Gaps(text, 1.0 if word == "poisson" else 0.0)
    if word == "gamma" and colon:
        variation = _number(number, "arrivals")
        if 0 < variation <= 20:
            return Gaps(text, variation)
    raise BenchError(f"arrivals: {text!r}: write poisson, constant or gamma:VARIATION (of the gaps, above 0, at most 20)")


def parse_stages(text: str) -> tuple[Stage, ...]:
    """``2:30,2-20:60``: 2 requests/s for 30 s, then rising to 20 in 60 s. Raises BenchError with the part that is wrong."""
    stages = []
    for part in text.split(","):
        found = _STAGE.fullmatch(part.strip())
        if found is None:
            raise BenchError(f"stages: {part.strip()!r}: write RATE:SECONDS or RATE-RATE:SECONDS, with commas between")
        first, seconds = _number(found["first"], "stages"), _number(found["seconds"], "stages")
        last = first if found["last"] is None else _number(found["last"], "stages")
        try:
            stages.append(Stage(first, last, seconds))
        except BenchError as error:
            raise BenchError(f"stages: {part.strip()!r}: {error}") from None
    return tuple(stages)


def arrivals(stages: Sequence[Stage], gaps: Gaps, *, seed: int, limit: int | None = None) -> list[float]:
    """Seconds since the start, in order; at most ``limit``. Raises BenchError where there are none, or far too many.

    Gaps of mean one are stretched by the rate, so that the same seed gives the same requests at every rate, but for the scale
    of time: of Poisson gaps that is a Poisson process with the rate of the stages, exactly. The first gap is before the first
    request, except where they come like a clock.
    """
    expected = math.fsum(stage.requests for stage in stages)
    if expected > MOST_REQUESTS and (limit is None or limit > MOST_REQUESTS):
        raise BenchError(f"the stages are {expected:,.0f} requests; at most {MOST_REQUESTS:,} are sent")
    times_s: list[float] = []
    drawn = gaps.of_mean_one(seed)
    passed = 0.0 if gaps.variation == 0 else next(drawn)
    begin_s = before = 0.0
    for stage in stages:
        while passed < before + stage.requests and (limit is None or len(times_s) < limit):
            times_s.append(begin_s + stage.at_s(passed - before))
            passed += next(drawn)
        before += stage.requests
        begin_s += stage.duration_s
    if not times_s:
        raise BenchError(f"no request comes: the stages are {expected:.2f} requests on average; make rate or duration larger")
    return times_s


def _number(text: str, where: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise BenchError(f"{where}: {text!r} is not a number") from None
