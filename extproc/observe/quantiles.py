"""Quantiles of times from counts in logarithmic buckets: bounded memory, an error of two percent, and they add up."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec

_GROWTH = 1.04
"""From one bucket's bound to the next."""
_LEAST_S = 1e-5
"""Whatever is shorter counts as this."""
_MOST_S = 86_400.0
"""Whatever is longer counts as this."""
_LOG_GROWTH = math.log(_GROWTH)

Counts = dict[int, int]
"""Bucket -> how many."""


def bucket_of(seconds: float) -> int:
    """Which bucket a time falls into."""
    return int(math.log(min(max(seconds, _LEAST_S), _MOST_S) / _LEAST_S) / _LOG_GROWTH)


def middle_of(bucket: int) -> float:
    """The geometric middle of a bucket, in seconds."""
    return _LEAST_S * math.exp(_LOG_GROWTH * (bucket + 0.5))


def merged(parts: Iterable[Mapping[int, int]]) -> Counts:
    """All of them together."""
    total: Counts = {}
    for part in parts:
        for bucket, count in part.items():
            total[bucket] = total.get(bucket, 0) + count
    return total


class Quantiles(msgspec.Struct, frozen=True):
    """What people ask of a set of times, in seconds."""

    p50_s: float
    p90_s: float
    p99_s: float
    samples: int


def quantiles(counts: Mapping[int, int]) -> Quantiles | None:
    """The quantiles of a set of times; None of an empty one."""
    samples = sum(counts.values())
    if not samples:
        return None
    p50_s, p90_s, p99_s = at(counts, (0.5, 0.9, 0.99))
    return Quantiles(p50_s, p90_s, p99_s, samples)


def at(counts: Mapping[int, int], shares: Sequence[float]) -> list[float]:
    """The times, in seconds, below which these ascending shares of a set lie (nearest rank). The set must not be empty."""
    samples = sum(counts.values())
    found: list[float] = []
    seen, wanted = 0, iter(shares)
    share = next(wanted, None)
    for bucket in sorted(counts):
        seen += counts[bucket]
        while share is not None and seen >= share * samples - 1e-9:
            found.append(middle_of(bucket))
            share = next(wanted, None)
    return found
