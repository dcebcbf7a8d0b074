"""Words that are said once, and not again for a while, whatever happens meanwhile."""

from __future__ import annotations

import math
import time
from collections.abc import Callable


class Seldom:
    """By kind: of a fixed set, since each is remembered."""

    def __init__(self, pause_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._pause_s = pause_s
        self._clock = clock
        self._said_s: dict[str, float] = {}

    def due(self, kind: str) -> bool:
        """Whether to say it now; then it counts as said."""
        now_s = self._clock()
        if now_s - self._said_s.get(kind, -math.inf) < self._pause_s:
            return False
        self._said_s[kind] = now_s
        return True
