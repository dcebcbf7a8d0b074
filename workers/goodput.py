"""What became of the requests of a run, and how many of them were served as promised. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

TTFT_SLO_S = 2.5
ITL_SLO_S = 0.045


class Status(Enum):
    """How a request ended."""

    SERVED = "served"
    REFUSED = "refused"
    """Turned away by a limit (429)."""
    FAILED = "failed"
    """Any other error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one request."""

    arrived_s: float
    ttft_s: float | None
    """From arrival to the first token; None: there was none."""
    itl_p99_s: float | None
    """The 99th percentile of the gaps between its tokens; None: fewer than two tokens."""
    input_tokens: int
    cached_tokens: int = 0
    """Prompt tokens that the worker that prefilled it had in its cache."""
    output_tokens: int = 0
    status: Status = Status.SERVED
    tenant: str = ""
    wait_s: float = 0.0
    """Part of the time to the first token that it was held before any worker got it."""

    def good(self, ttft_slo_s: float, itl_slo_s: float) -> bool:
        """It was served within both limits."""
        return (
            self.status is Status.SERVED
            and self.ttft_s is not None
            and self.ttft_s <= ttft_slo_s
            and (self.itl_p99_s is None or self.itl_p99_s <= itl_slo_s)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A run in numbers. Times are over the served requests; NaN where there are none."""

    requests: int
    goodput: float
    """Share of all requests, refused and failed ones included, that were good."""
    goodput_per_s: float
    """Good requests a second of the time in which requests arrived."""
    ttft_p50_s: float
    ttft_p99_s: float
    itl_p99_s: float
    """99th percentile, over requests, of each request's own 99th percentile."""
    hit_ratio: float
    """Cached prompt tokens of all prompt tokens."""
    refused: int
    failed: int
    longest_wait_s: float


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least ``share`` of the values do not exceed; NaN of nothing."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def summary(outcomes: Sequence[Outcome], *, ttft_slo_s: float = TTFT_SLO_S, itl_slo_s: float = ITL_SLO_S) -> Summary:
    """The numbers of a run."""
    served = [outcome for outcome in outcomes if outcome.status is Status.SERVED]
    good = sum(outcome.good(ttft_slo_s, itl_slo_s) for outcome in outcomes)
    arrivals = [outcome.arrived_s for outcome in outcomes]
    span_s = max(arrivals) - min(arrivals) if arrivals else 0.0
    ttft_s = [outcome.ttft_s for outcome in served if outcome.ttft_s is not None]
    tokens = sum(outcome.input_tokens for outcome in served)
    return Summary(
        requests=len(outcomes),
        goodput=good / len(outcomes) if outcomes else math.nan,
        goodput_per_s=good / span_s if span_s > 0 else math.nan,
        ttft_p50_s=percentile(ttft_s, 0.5),
        ttft_p99_s=percentile(ttft_s, 0.99),
        itl_p99_s=percentile((outcome.itl_p99_s for outcome in served if outcome.itl_p99_s is not None), 0.99),
        hit_ratio=sum(outcome.cached_tokens for outcome in served) / tokens if tokens else math.nan,
        refused=sum(outcome.status is Status.REFUSED for outcome in outcomes),
        failed=sum(outcome.status is Status.FAILED for outcome in outcomes),
        longest_wait_s=max((outcome.wait_s for outcome in outcomes), default=0.0),
    )
