"""Ctrl-C and SIGTERM: raised where they come, and again where somebody asks.

Python drops what a signal raises within a finaliser, and what it raises in the event loop's own code may end in a log line. So
it is noted, too. From the first one on, others change nothing: what is cleaned up is cleaned up to its end.
"""

from __future__ import annotations

import signal
from typing import Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """A context manager; outside it the process has its handlers of before."""

    def __init__(self) -> None:
        self._asked = False
        self._before = {number: signal.getsignal(number) for number in _SIGNALS}

    def __enter__(self) -> Self:
        for number in _SIGNALS:
            signal.signal(number, self._come)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raises KeyboardInterrupt if one has come."""
        if self._asked:
            raise KeyboardInterrupt

    def _come(self, _number: int, _frame: object) -> None:
        if not self._asked:
            self._asked = True
            raise KeyboardInterrupt
