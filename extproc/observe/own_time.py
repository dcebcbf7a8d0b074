"""What the filter itself costs a request: the time in which it computes, by phase, without any time in which it waits.

A coroutine runs in steps, from one wait to the next. :meth:`OwnTime.of` takes the time of each step, so no code on the way has
to say where it waits.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Coroutine, Generator
from time import perf_counter
from typing import Any, TypeVar

T = TypeVar("T")

PHASES = ("headers", "parse", "decide", "queue", "prefill_call", "reply", "answer")
"""In the order in which a request goes through them."""

HEADERS, PARSE, DECIDE, QUEUE, PREFILL_CALL, REPLY, ANSWER = range(len(PHASES))


class OwnTime:
    """Of one request. Its tasks may take turns, but never run at the same moment."""

    __slots__ = ("_clock", "_phase", "_since_s", "spent_s")

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self.spent_s = [0.0] * len(PHASES)
        """By phase."""
        self._phase = HEADERS
        self._since_s = 0.0

    def enter(self, phase: int) -> None:
        """From here on it is the time of another phase."""
        now_s = self._clock()
        self.spent_s[self._phase] += now_s - self._since_s
        self._phase, self._since_s = phase, now_s

    def add(self, phase: int, seconds: float) -> None:
        """Time that was taken elsewhere."""
        self.spent_s[phase] += max(seconds, 0.0)

    @types.coroutine
    def of(self, work: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
        """Await ``work``, and take its time. What it awaits counts too, unless that is a task of its own."""
        clock, spent_s, send = self._clock, self.spent_s, work.send
        step, given = send, None
        while True:
            self._since_s = clock()
            try:
                waits_for = step(given)
            except StopIteration as end:
                spent_s[self._phase] += clock() - self._since_s
                given = None  # an exception would hold this frame, which would hold the exception
                return end.value  # type: ignore[no-any-return]
            except BaseException:
                spent_s[self._phase] += clock() - self._since_s
                given = None
                raise
            spent_s[self._phase] += clock() - self._since_s
            given = None
            try:
                given = yield waits_for
                step = send
            except BaseException as thrown:  # all of it is the work's business: cancellation too
                step, given = work.throw, thrown
