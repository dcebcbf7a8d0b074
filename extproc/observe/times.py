"""What clients waited for in the last minute: quantiles of TTFT, generation and ITL, by model, policy and mode. Bounded."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Literal

import msgspec

from extproc.observe.quantiles import Counts, bucket_of, merged, quantiles
from extproc.observe.tags import OTHER, Tags

WINDOW_S: Final = 60.0
"""How far back the quantiles look."""

_SLOT_S = 5.0
_SLOTS = int(WINDOW_S / _SLOT_S)
_MAX_SERIES = 256
"""Combinations of model, policy and mode; those that come later are one."""

_REST = Tags(OTHER, OTHER)

Kind = Literal["ttft", "generation", "mean_itl", "gap"]
"""To the first token; from there to the last; of one answer, from token to token, on average; of a watched answer, each one."""
_KINDS: tuple[Kind, ...] = ("ttft", "generation", "mean_itl", "gap")


class Times:
    """Counts in slots of five seconds; the oldest one falls out."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._series: dict[Tags, deque[_Slot]] = {}

    def answered(
        self, tags: Tags, *, ttft_s: float | None, generation_s: float | None = None, mean_itl_s: float | None = None
    ) -> None:
        """A streamed answer is over. None: not known."""
        slot = self._slot(tags)
        slot.answers += 1
        counts = slot.counts
        if ttft_s is not None:
            _add(counts["ttft"], ttft_s)
        if generation_s is not None:
            _add(counts["generation"], generation_s)
        if mean_itl_s is not None:
            _add(counts["mean_itl"], mean_itl_s)

    def watched(self, tags: Tags, gaps: Mapping[int, int]) -> None:
        """The times between the tokens of one answer, as counts."""
        counts = self._slot(tags).counts["gap"]
        for bucket, count in gaps.items():
            counts[bucket] = counts.get(bucket, 0) + count

    def snapshot(self) -> dict[str, Any]:
        """The last minute, ready for JSON: all together, and ``by`` model, policy and mode.

        ``itl`` is that of watched answers, token by token, where there are any (``source``: ``stream watch``); else each answer
        counts with its mean (``source``: ``envoy access log``).
        """
        oldest = self._number() - _SLOTS
        live = {tags: [slot for slot in slots if slot.number > oldest] for tags, slots in self._series.items()}
        live = {tags: slots for tags, slots in live.items() if slots}
        every = [slot for slots in live.values() for slot in slots]
        by = [
            {"model": tags.model, "policy": tags.policy, "mode": tags.mode, **_summary(slots)} for tags, slots in live.items()
        ]
        return {"window_s": WINDOW_S, **_summary(every), "by": by}

    def _number(self) -> int:
        return int(self._clock() / _SLOT_S)

    def _slot(self, tags: Tags) -> _Slot:
        number = self._number()
        slots = self._series.get(tags)
        if slots is None:
            if len(self._series) >= _MAX_SERIES:
                self._forget(number)
            if len(self._series) >= _MAX_SERIES:
                tags = _REST
            slots = self._series.setdefault(tags, deque(maxlen=_SLOTS))
        if not slots or slots[-1].number != number:
            slots.append(_Slot(number))
        return slots[-1]

    def _forget(self, number: int) -> None:
        """Drop what has not been seen for a window."""
        for tags in [tags for tags, slots in self._series.items() if slots[-1].number <= number - _SLOTS]:
            del self._series[tags]


class _Slot(msgspec.Struct):
    number: int
    answers: int = 0
    counts: dict[str, Counts] = msgspec.field(default_factory=lambda: {kind: {} for kind in _KINDS})


def _add(counts: Counts, seconds: float) -> None:
    bucket = bucket_of(seconds)
    counts[bucket] = counts.get(bucket, 0) + 1


def _summary(slots: Iterable[_Slot]) -> dict[str, Any]:
    found = list(slots)
    ttft, generation, mean_itl, gap = (quantiles(merged(slot.counts[kind] for slot in found)) for kind in _KINDS)
    return {
        "source": "stream watch" if gap is not None else "envoy access log",
        "answers": sum(slot.answers for slot in found),
        "ttft": _plain(ttft),
        "generation": _plain(generation),
        "itl": _plain(gap if gap is not None else mean_itl),
        "mean_itl": _plain(mean_itl),
    }


def _plain(value: Any) -> Any:
    return None if value is None else msgspec.to_builtins(value)
