"""A histogram: counts in buckets. No I/O here."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """Counts in buckets."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """``count`` times the same value."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def cumulated(self) -> tuple[list[tuple[str, float]], float]:
        """As Prometheus wants them: the counts up to each bound, and the sum."""
        total = 0
        result: list[tuple[str, float]] = []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            result.append(("+Inf" if bound == float("inf") else repr(float(bound)), float(total)))
        return result, self._sum
