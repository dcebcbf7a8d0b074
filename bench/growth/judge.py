"""Whether a cost grows faster than what causes it. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from enum import Enum

import msgspec


class Growth(Enum):
    """What is expected of a cost as its input grows."""

    LINEAR = "linear"
    """In step with it, or slower."""
    FLAT = "flat"
    """Hardly at all."""


LIMITS: Mapping[Growth, float] = {Growth.LINEAR: 1.25, Growth.FLAT: 0.35}
"""Largest exponent from one size to the next. More than 1 and 0: a processor's caches hold all of a small case and little of a
large one, so that a million blocks, or the 280 MB of 5,000 held requests, are cold; and the garbage collector has nothing to do
below some thousand objects. What is quadratic has 2."""


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """One column of a table."""

    name: str
    unit: str
    expected: Growth | None
    """None: shown, not judged."""
    floor: float = 0.0
    """Smaller values are noise: a step is judged as if it began here, and not at all if it also ends here."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """From one size to the next."""

    cost: str
    smaller: float
    larger: float
    exponent: float
    limit: float

    @property
    def too_steep(self) -> bool:
        """The cost grows faster than its input, or than it should."""
        return self.exponent > self.limit


def steps(cost: Cost, values: Mapping[float, float]) -> Iterator[Step]:
    """``values``: size of the input -> cost. The exponent between two sizes is log(cost ratio) / log(size ratio)."""
    if cost.expected is None:
        return
    sizes = sorted(values)
    for smaller, larger in itertools.pairwise(sizes):
        before, after = max(values[smaller], cost.floor), values[larger]
        if after <= cost.floor or before <= 0:
            continue
        exponent = math.log(after / before) / math.log(larger / smaller)
        yield Step(cost=cost.name, smaller=smaller, larger=larger, exponent=exponent, limit=LIMITS[cost.expected])
