"""What happened in the last seconds, for the live page: counts in slots of one second, told by one cheap call an event.

The metrics hold the same events since the start of the process; this is for people who look now.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import msgspec

WINDOW_S = 10
"""What rates and counts are taken over."""

_PAIRS_A_SLOT = 20_000
"""More pairs than this within a second are counted, but not one by one."""


class Counts(msgspec.Struct):
    """Events of one second, or of several."""

    requests: int = 0
    """That came."""
    handoffs: int = 0
    """Given to a decode worker."""
    whole: int = 0
    """Prompts that one worker serves alone."""
    refused: int = 0
    """Answered 429."""
    errors: int = 0
    """Answered 500 or more, by us or by a decode worker."""


class _Slot:
    __slots__ = ("counts", "pairs", "second")

    def __init__(self, second: int) -> None:
        self.second = second
        self.counts = Counts()
        self.pairs: dict[tuple[str, str], int] = {}


class Recent:
    """One for a process. It keeps :data:`WINDOW_S` whole seconds and the one that runs."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started_s = clock()
        self._slots: deque[_Slot] = deque(maxlen=WINDOW_S + 1)

    # -- what happens ------------------------------------------------------------------------------------------------------

    def came(self) -> None:
        """A request."""
        self._now().counts.requests += 1

    def handed_over(self, prefill: str, decode: str) -> None:
        """A decode worker was given the handoff of a prefill worker."""
        slot = self._now()
        slot.counts.handoffs += 1
        key = (prefill, decode)
        if key in slot.pairs or len(slot.pairs) < _PAIRS_A_SLOT:
            slot.pairs[key] = slot.pairs.get(key, 0) + 1

    def whole(self) -> None:
        """A prompt went to one worker that does all of it."""
        self._now().counts.whole += 1

    def answered(self, status: int) -> None:
        """With this status: by a decode worker, or by the filter in its place."""
        if status == 429:
            self._now().counts.refused += 1
        elif status >= 500:
            self._now().counts.errors += 1

    def _now(self) -> _Slot:
        second = int(self._clock())
        slots = self._slots
        if not slots or slots[-1].second != second:
            slots.append(_Slot(second))
        return slots[-1]

    # -- what is asked -----------------------------------------------------------------------------------------------------

    def window_s(self) -> float:
        """How many seconds :meth:`counts` and :meth:`pairs` cover: fewer just after the start."""
        return min(float(WINDOW_S), max(1.0, self._clock() - self._started_s))

    def counts(self) -> Counts:
        """Of the last whole seconds, the running one left out: it would make rates jump."""
        total = Counts()
        for slot in self._whole_slots():
            for name in Counts.__struct_fields__:
                setattr(total, name, getattr(total, name) + getattr(slot.counts, name))
        return total

    def pairs(self) -> dict[tuple[str, str], int]:
        """Handoffs by (prefill, decode), of the same seconds."""
        found: dict[tuple[str, str], int] = {}
        for slot in self._whole_slots():
            for pair, count in slot.pairs.items():
                found[pair] = found.get(pair, 0) + count
        return found

    def _whole_slots(self) -> list[_Slot]:
        second = int(self._clock())
        return [slot for slot in self._slots if second - WINDOW_S <= slot.second < second]
