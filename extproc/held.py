"""What a request holds until it ends: calls that give it back, the last one first. An ExitStack that costs a tenth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Held:
    """Use :meth:`release` in a ``finally``."""

    __slots__ = ("_calls",)

    def __init__(self) -> None:
        self._calls: list[tuple[Callable[..., object], tuple[Any, ...]]] = []

    def callback(self, call: Callable[..., object], *arguments: Any) -> None:
        """Let ``call`` be made at the end."""
        self._calls.append((call, arguments))

    def release(self) -> None:
        """Make all calls, also after one that raises; the first error is raised in the end. Idempotent."""
        fault: BaseException | None = None
        while self._calls:
            call, arguments = self._calls.pop()
            try:
                call(*arguments)
            except Exception as error:  # the others must give back all the same
                fault = fault or error
        if fault is not None:
            raise fault
