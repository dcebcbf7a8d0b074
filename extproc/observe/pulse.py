"""How long ago the event loop was surely looking at its sockets.

What comes in over a socket while the process stands still (stopped, swapped out, a long garbage collection) is read late and
looks new. For a handoff that matters: its lease has been running all the while.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

_BEAT_S = 0.1


class Pulse:
    """Beats ten times a second while the loop runs."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, on_lag: Callable[[float], None] = lambda _lag_s: None
    ) -> None:
        """``on_lag`` is told by how many seconds each beat was late."""
        self._clock = clock
        self._on_lag = on_lag
        self._before = self._last = clock()

    async def run(self) -> None:
        """Beat until cancelled."""
        while True:
            due_s = self._clock() + _BEAT_S
            await asyncio.sleep(_BEAT_S)
            self._on_lag(max(self._clock() - due_s, 0.0))
            self.beat()

    def beat(self) -> None:
        """One beat."""
        self._before, self._last = self._last, self._clock()

    def not_before(self) -> float:
        """What is read now was not there yet at this time (clock seconds).

        The beat before the last one: after a standstill the loop runs its timers first, so the last beat says nothing.
        """
        return self._before
