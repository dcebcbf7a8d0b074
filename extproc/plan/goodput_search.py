"""The highest rate at which a stated share of the requests is served as promised: by bisection, over any way to run requests.

A run is three stretches of one arrival process. Requests that come in the first fill the workers up, requests in the last keep
them loaded until those in between have ended; only those in between are counted. Without the first, goodput is that of an empty
cluster; without the last, decodes get faster while they are watched.

With common random numbers (:mod:`extproc.plan.workload`) the share falls with the rate but for small dents, and the rate
that is found is one at which the share was reached, with a rate above it, closer than the resolution, at which it was not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from extproc.plan.errors import PlanError
from extproc.plan.workload import AnyWorkload
from workers.goodput import Outcome
from workers.traces import Request

SHARE = 0.9
"""Of the requests, what must be within both limits. An assumption that the literature on goodput shares (DistServe: 90 %)."""


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """How long requests come, and which of them count."""

    warm_up_s: float
    counted_s: float
    cool_down_s: float

    @property
    def duration_s(self) -> float:
        """All of it."""
        return self.warm_up_s + self.counted_s + self.cool_down_s

    def counted(self, outcomes: Sequence[Outcome], part: float = 1.0) -> list[Outcome]:
        """Those that came in the middle. ``part``: of a run of which only that much could be had, because a trace ended."""
        first_s, last_s = self.warm_up_s * part, (self.warm_up_s + self.counted_s) * part
        return [outcome for outcome in outcomes if first_s <= outcome.arrived_s < last_s]


@dataclass(frozen=True, kw_only=True)
class Highest:
    """What a search found."""

    rate_per_s: float
    """The highest rate tried at which the share was reached; 0: it was at none down to the lowest."""
    share: float
    """Reached at that rate; NaN for none."""
    above_per_s: float
    """The lowest rate tried at which it was not."""
    tried: tuple[tuple[float, float], ...]
    """Rate and share, in the order they were tried."""


def good_share(outcomes: Sequence[Outcome], *, ttft_slo_s: float, itl_slo_s: float) -> float:
    """Of all requests, those within both limits; refused and failed ones are not. NaN of nothing."""
    return sum(outcome.good(ttft_slo_s, itl_slo_s) for outcome in outcomes) / len(outcomes) if outcomes else math.nan


def share_at(
    run: Callable[[Sequence[Request]], Sequence[Outcome]],
    workload: AnyWorkload,
    stretch: Stretch,
    *,
    seed: int,
    ttft_slo_s: float,
    itl_slo_s: float,
) -> Callable[[float], float]:
    """What :func:`highest_rate` asks for: a rate -> the share of good requests.

    ``run`` sends the requests to something and says what became of them, in their order. Raises PlanError where too few
    requests come to speak of a share.
    """

    def share(rate_per_s: float) -> float:
        outcomes = run(workload.requests(rate_per_s, stretch.duration_s, seed))
        counted = stretch.counted(outcomes, workload.cut_to(stretch.duration_s, rate_per_s) / stretch.duration_s)
        if not counted:
            raise PlanError(f"at {rate_per_s:.3g} requests/s none comes in {stretch.counted_s:g} s; simulate longer")
        return good_share(counted, ttft_slo_s=ttft_slo_s, itl_slo_s=itl_slo_s)

    return share


def highest_rate(
    at: Callable[[float], float],
    *,
    guess_per_s: float,
    share: float = SHARE,
    resolution: float = 0.02,
    lowest_per_s: float | None = None,
    step: float = 1.5,
) -> Highest:
    """The highest rate at which ``at(rate)`` is at least ``share``, to a ``resolution`` (relative).

    It begins at ``guess_per_s`` and goes up by ``step``, or down by one that is squared each time (what is overloaded takes
    longest to run), until the answer is between two rates; then it halves what is between them (geometrically). Below
    ``lowest_per_s`` (default: a thousandth of the guess) it gives up and finds 0.

    Raises PlanError for a guess, a share or a resolution that makes no sense.
    """
    if not (math.isfinite(guess_per_s) and guess_per_s > 0):
        raise PlanError(f"the rate to begin with: more than 0 requests/s, not {guess_per_s:g}")
    if not 0 < share <= 1:
        raise PlanError(f"share of good requests: above 0 and up to 1, not {share:g}")
    if not 0 < resolution < 1 or step <= 1:
        raise PlanError(f"resolution between 0 and 1 and a step above 1, not {resolution:g} and {step:g}")
    lowest = guess_per_s / 1_000 if lowest_per_s is None else lowest_per_s
    tried: list[tuple[float, float]] = []

    def reached(rate_per_s: float) -> bool:
        tried.append((rate_per_s, at(rate_per_s)))
        return tried[-1][1] >= share

    good_per_s, bad_per_s, rate_per_s, down = 0.0, math.inf, guess_per_s, step
    while not good_per_s or math.isinf(bad_per_s):
        if reached(rate_per_s):
            good_per_s = rate_per_s
            rate_per_s *= step
        else:
            bad_per_s = rate_per_s
            if rate_per_s <= lowest:
                return Highest(rate_per_s=0.0, share=math.nan, above_per_s=bad_per_s, tried=tuple(tried))
            rate_per_s = max(lowest, rate_per_s / down)
            down *= down
    while bad_per_s > good_per_s * (1 + resolution):
        middle = math.sqrt(good_per_s * bad_per_s)
        if reached(middle):
            good_per_s = middle
        else:
            bad_per_s = middle
    return Highest(
        rate_per_s=good_per_s,
        share=next(each for rate, each in tried if rate == good_per_s),
        above_per_s=bad_per_s,
        tried=tuple(tried),
    )
