"""How much a peer may make us do for nothing."""

from __future__ import annotations

from collections.abc import Callable


class Budget:
    """Frames that cost the peer less than us, or lead to nothing: a bucket of them, which fills again with time.

    PING and SETTINGS to be acknowledged, DATA without data, streams that are refused, faulty or gone before they were served.
    """

    __slots__ = ("_burst", "_clock", "_filled_s", "_left", "_per_s")

    def __init__(self, *, burst: int, per_s: float, clock: Callable[[], float]) -> None:
        """``burst``: frames at once; ``per_s``: frames a second in the long run; ``clock``: seconds, only forward."""
        self._burst, self._per_s, self._clock = float(burst), per_s, clock
        self._left, self._filled_s = float(burst), clock()

    def spend(self) -> bool:
        """One more; False: it is too much."""
        if self._left < 1:
            now_s = self._clock()
            self._left = min(self._burst, self._left + (now_s - self._filled_s) * self._per_s)
            self._filled_s = now_s
            if self._left < 1:
                return False
        self._left -= 1
        return True
