"""Which batch of a publisher is next, and what one that is not means. Pure.

vLLM numbers its batches from 0 and begins again at 0 when it is started anew. A replay gives the last batches (10,000 unless
`buffer_steps` says otherwise) from a number on, then an end mark. We ask from the last batch that we have, not from the next
one: that it comes again, with the same time in it, proves that it is still the same engine.
"""

from __future__ import annotations

import enum


class Step(enum.Enum):
    """What follows from a batch, or from the end of a replay."""

    NEXT = "next"
    """It is the one that was expected: take it."""
    OLD = "old"
    """It was taken already: pass it over."""
    BEGIN = "begin"
    """It is the first of all: before it the engine held nothing. Take it."""
    LATE = "late"
    """It is the first that is seen, but there were others: take it; what was before is not known."""
    GAP = "gap"
    """Some are missing: ask for them."""
    LOST = "lost"
    """Some are missing and are not to be had: forget what is known, then take it."""
    RESTART = "restart"
    """The engine was started anew: forget what is known, and ask from 0."""
    EMPTY = "empty"
    """The engine has published nothing since its start: it holds nothing."""


class Sequence:
    """The batches of one publisher."""

    def __init__(self) -> None:
        self.next: int | None = None
        """The number expected; None: any."""
        self.last_time_s = 0.0
        """The time in the last batch taken, by the worker's clock."""

    def live(self, number: int, time_s: float) -> Step:
        """A batch as it was published."""
        if self.next is None:
            return Step.LATE if number else Step.BEGIN
        if number == self.next:
            return Step.NEXT
        if number > self.next:
            return Step.GAP
        # What came by a replay may come once more as published; an engine that was started anew publishes later than that.
        return Step.RESTART if time_s > self.last_time_s else Step.OLD

    def ask_from(self) -> int:
        """Where a replay has to begin."""
        return max(0, (self.next or 0) - 1)

    def replayed(self, number: int, time_s: float, *, first: bool) -> Step:
        """A batch of a replay; ``first``: none has come before that :meth:`shows` whose replay it is."""
        if self.next is None:
            return Step.LATE if number else Step.BEGIN
        if first and self.next > 0:
            if number > self.next - 1:
                return Step.LOST
            # One that sends more than it was asked for says nothing by that.
            return Step.OLD if number < self.next - 1 or time_s == self.last_time_s else Step.RESTART
        if number == self.next:
            return Step.NEXT
        return Step.LOST if number > self.next else Step.OLD

    def shows(self, number: int) -> bool:
        """Whether a batch of a replay that was asked for by :meth:`ask_from` shows whose it is."""
        return not self.next or number >= self.next - 1

    def ended(self, *, shown: bool) -> Step:
        """The end mark of a replay: ``NEXT`` is nothing of note. ``shown``: some batch of it did, see :meth:`shows`."""
        if shown or self.next == 0:
            return Step.NEXT
        return Step.EMPTY if self.next is None else Step.RESTART

    def took(self, number: int, time_s: float) -> None:
        """This one is the last that counts."""
        self.next, self.last_time_s = number + 1, time_s

    def forget(self) -> None:
        """Any may be next."""
        self.next, self.last_time_s = None, 0.0
