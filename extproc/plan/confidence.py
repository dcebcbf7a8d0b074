"""How sure a mean over seeds is, and whether two candidates can be told apart. Pure arithmetic.

Seeds are few, so the intervals are Student's. Two candidates that saw the same random numbers are compared pair by pair, on the
logarithm of their ratio: what a busy or a lucky draw does to both of them drops out.

An interval says how far the draw of the requests may have led us astray. It says nothing of whether the model of the engine is
right; that is what the assumptions beside each answer are for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from extproc.plan.errors import PlanError

LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean, and where the true one is with the stated confidence."""

    mean: float
    low: float
    high: float


def t_quantile(share: float, freedom: int) -> float:
    """Student's t that ``share`` (at least one half) of all values do not exceed.

    By halving, on the finite sums of Abramowitz and Stegun, 26.7.3 and 26.7.4. Raises PlanError.
    """
    if not 0.5 <= share < 1 or freedom < 1:
        raise PlanError(f"Student's t: a share from 0.5 to below 1 and at least 1 degree of freedom, not {share:g}, {freedom}")
    low, high = 0.0, 1.0
    while _t_share(high, freedom) < share:
        low, high = high, high * 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_share(middle, freedom) < share else (low, middle)
    return (low + high) / 2


def interval(values: Sequence[float], *, level: float = LEVEL, resolution: float = 0.0) -> Interval:
    """Of the mean of independent values. One value says nothing of its spread: its interval is all numbers of its sign.

    ``resolution``: each is the lower end of a range so wide, relatively, that a search ended in; the interval is wider by it.
    """
    mean = math.fsum(values) / len(values) if values else math.nan
    if math.isnan(mean):
        return Interval(mean, mean, mean)
    if len(values) == 1:
        return Interval(mean, 0.0, math.inf)
    half = _half(values, mean, level)
    return Interval(mean, max(0.0, mean - half), (mean + half) * (1 + resolution))


def ratio(ones: Sequence[float], others: Sequence[float], *, level: float = LEVEL, resolution: float = 0.0) -> Interval:
    """Of ``one / other``, pair by pair (the geometric mean). Where one of them is 0, the interval is everything.

    Raises PlanError where they are not pairs.
    """
    if len(ones) != len(others) or not ones:
        raise PlanError(f"{len(ones)} and {len(others)} values are not pairs")
    if min(others) <= 0 or min(ones) <= 0:
        total = math.fsum(others)
        return Interval(math.fsum(ones) / total if total else math.nan, 0.0, math.inf)
    logs = [math.log(one / other) for one, other in zip(ones, others, strict=True)]
    mean = math.fsum(logs) / len(logs)
    if len(logs) == 1:
        return Interval(math.exp(mean), 0.0, math.inf)
    half = _half(logs, mean, level) + math.log1p(resolution)
    return Interval(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def told_apart(compared: Interval) -> bool:
    """Whether a ratio of this interval is not 1."""
    return compared.low > 1 or compared.high < 1


def _half(values: Sequence[float], mean: float, level: float) -> float:
    count = len(values)
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    return t_quantile((1 + level) / 2, count - 1) * spread / math.sqrt(count)


def _t_share(value: float, freedom: int) -> float:
    """The share of all values that are at most ``value``, which is 0 or more."""
    angle = math.atan(value / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    if freedom % 2:
        term, total = cosine, 0.0
        for step in range(1, (freedom - 1) // 2 + 1):
            total += term
            term *= cosine * cosine * 2 * step / (2 * step + 1)
        between = 2 / math.pi * (angle + sine * total)
    else:
        term, total = 1.0, 0.0
        for step in range(1, freedom // 2 + 1):
            total += term
            term *= cosine * cosine * (2 * step - 1) / (2 * step)
        between = sine * total
    return (1 + between) / 2
