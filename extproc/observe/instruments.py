"""Counters and histograms that cost a tenth of a microsecond or so, for what every request touches, in the same registry as the
library's.

The library's own take a lock for every sample, and a lookup for its labels: 3 µs each, measured. These live on the event loop
alone, which also renders them, so they need no lock.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from extproc.observe.tags import NONE, OTHER

_MOST_SERIES = 5_000
"""Label sets of one counter; what comes after them is counted under ``other``."""

_MOST_SPREADS = 500
"""The same for a histogram: each has a dozen series or two."""


class Bounded:
    """Names that others choose, as label values: the first ``limit`` of them, then ``other``."""

    def __init__(self, limit: int = 100) -> None:
        self._limit = limit
        self._known: dict[str, None] = {}

    def of(self, name: str) -> str:
        """The label value for ``name``."""
        if name in self._known:
            return name
        if not name:
            return NONE
        if len(self._known) >= self._limit:
            return OTHER
        self._known[name] = None
        return name

    def __contains__(self, name: str) -> bool:
        return name in self._known


class Tally:
    """A counter. Only for the event loop's thread."""

    def __init__(
        self,
        registry: CollectorRegistry,
        name: str,
        meaning: str,
        labels: Sequence[str] = (),
        *,
        known: Iterable[tuple[str, ...]] = (),
        limit: int = _MOST_SERIES,
    ) -> None:
        """``name`` without ``_total``. ``known`` label values are shown from the start, with 0."""
        self._name, self._meaning, self._labels, self._limit = name, meaning, tuple(labels), limit
        self._values: dict[tuple[str, ...], float] = dict.fromkeys(known if labels else ((),), 0.0)
        registry.register(self)

    def inc(self, *labels: str, by: float = 1.0) -> None:
        """Count ``by`` more under these label values, in the order of the names."""
        try:
            self._values[labels] += by
        except KeyError:
            self._new(labels, by)

    def _new(self, labels: tuple[str, ...], by: float) -> None:
        values = self._values
        if len(labels) != len(self._labels):
            raise ValueError(f"{self._name}: labels {labels} for {self._labels}")
        if len(values) >= self._limit:
            labels = (OTHER,) * len(labels)
        values[labels] = values.get(labels, 0.0) + by

    def value(self, *labels: str) -> float:
        """What was counted under them."""
        return self._values.get(labels, 0.0)

    def forget(self, label: str, value: str) -> None:
        """Remove the series that have this label value."""
        at = self._labels.index(label)
        for labels in [each for each in self._values if each[at] == value]:
            del self._values[labels]

    def collect(self) -> Iterator[Metric]:
        """For the registry."""
        family = CounterMetricFamily(self._name, self._meaning, labels=self._labels)
        for labels, value in self._values.items():
            family.add_metric(labels, value)
        yield family


class _Counts:
    __slots__ = ("buckets", "total")

    def __init__(self, buckets: int) -> None:
        self.buckets = [0.0] * buckets
        self.total = 0.0


class Spread:
    """A histogram. Only for the event loop's thread."""

    def __init__(
        self,
        registry: CollectorRegistry,
        name: str,
        meaning: str,
        labels: Sequence[str] = (),
        *,
        bounds: Sequence[float],
        known: Iterable[tuple[str, ...]] = (),
        limit: int = _MOST_SPREADS,
    ) -> None:
        """``bounds`` are the upper ones of the buckets, in order; the last bucket, without an end, comes of itself."""
        self._name, self._meaning, self._labels, self._limit = name, meaning, tuple(labels), limit
        self.bounds = tuple(bounds)
        self._written = [floatToGoString(bound) for bound in (*bounds, math.inf)]  # type: ignore[no-untyped-call]
        self._series = {each: _Counts(len(self._written)) for each in (known if labels else ((),))}
        registry.register(self)

    def observe(self, value: float, *labels: str) -> None:
        """One sample."""
        counts = self._series.get(labels) or self._new(labels)
        counts.buckets[bisect_left(self.bounds, value)] += 1
        counts.total += value

    def child(self, *labels: str) -> Callable[[float], None]:
        """``observe`` for these label values, without looking them up."""
        counts, bounds = self._series.get(labels) or self._new(labels), self.bounds
        buckets = counts.buckets

        def observe(value: float) -> None:
            buckets[bisect_left(bounds, value)] += 1
            counts.total += value

        return observe

    def add(self, buckets: Mapping[float, float], total: float, *labels: str) -> None:
        """Samples that somebody else put into buckets: upper bound -> how many are in that one alone; ``total`` is their sum.

        A bucket of theirs goes into the first of ours that holds all of it.
        """
        counts = self._series.get(labels) or self._new(labels)
        for bound, samples in buckets.items():
            counts.buckets[bisect_left(self.bounds, bound)] += samples
        counts.total += total

    def count(self, *labels: str) -> float:
        """Samples so far."""
        counts = self._series.get(labels)
        return sum(counts.buckets) if counts is not None else 0.0

    def _new(self, labels: tuple[str, ...]) -> _Counts:
        if len(labels) != len(self._labels):
            raise ValueError(f"{self._name}: labels {labels} for {self._labels}")
        if len(self._series) >= self._limit:
            labels = (OTHER,) * len(labels)
        return self._series.setdefault(labels, _Counts(len(self._written)))

    def collect(self) -> Iterator[Metric]:
        """For the registry."""
        family = HistogramMetricFamily(self._name, self._meaning, labels=self._labels)
        for labels, counts in self._series.items():
            below = 0.0
            buckets: list[tuple[str, float]] = []
            for bound, samples in zip(self._written, counts.buckets, strict=True):
                below += samples
                buckets.append((bound, below))
            family.add_metric(labels, buckets, counts.total)
        yield family


class Entry(msgspec.Struct, frozen=True):
    """One metric, for the reference."""

    topic: str
    name: str
    """As it stands in a query."""
    kind: str
    labels: tuple[str, ...]
    meaning: str
    watch: str
    """What to look out for; empty: nothing in particular."""


class Maker:
    """Makes the metrics of one registry, and keeps a list of them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._topic = ""
        self.entries: list[Entry] = []

    def topic(self, name: str) -> None:
        """What the next ones are about."""
        self._topic = name

    def tally(
        self,
        name: str,
        meaning: str,
        labels: Sequence[str] = (),
        *,
        watch: str = "",
        known: Iterable[tuple[str, ...]] = (),
        limit: int = _MOST_SERIES,
    ) -> Tally:
        """A cheap counter, for every request or for changing workers."""
        self.describe(f"{name}_total", "counter", labels, meaning, watch)
        return Tally(self._registry, name, meaning, labels, known=known, limit=limit)

    def spread(
        self,
        name: str,
        meaning: str,
        labels: Sequence[str] = (),
        *,
        bounds: Sequence[float],
        watch: str = "",
        known: Iterable[tuple[str, ...]] = (),
    ) -> Spread:
        """A cheap histogram, for every request."""
        self.describe(name, "histogram", labels, meaning, watch)
        return Spread(self._registry, name, meaning, labels, bounds=bounds, known=known)

    def counter(
        self, name: str, meaning: str, labels: Sequence[str] = (), *, watch: str = "", known: Iterable[str] = ()
    ) -> Counter:
        """A counter of the library, for what is rare. ``known`` values of its one label are shown from the start."""
        self.describe(f"{name}_total", "counter", labels, meaning, watch)
        counter = Counter(name, meaning, labels, registry=self._registry)
        for value in known:
            counter.labels(value)
        return counter

    def gauge(self, name: str, meaning: str, labels: Sequence[str] = (), *, watch: str = "") -> Gauge:
        """A gauge of the library."""
        self.describe(name, "gauge", labels, meaning, watch)
        return Gauge(name, meaning, labels, registry=self._registry)

    def histogram(self, name: str, meaning: str, labels: Sequence[str] = (), *, bounds: Sequence[float]) -> Histogram:
        """A histogram of the library, for what is rare."""
        self.describe(name, "histogram", labels, meaning, "")
        return Histogram(name, meaning, labels, buckets=tuple(bounds), registry=self._registry)

    def describe(self, name: str, kind: str, labels: Sequence[str], meaning: str, watch: str = "") -> None:
        """List a metric, also one that somebody else registers."""
        self.entries.append(Entry(self._topic, name, kind, tuple(labels), meaning, watch))
