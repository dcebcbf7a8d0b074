"""Whether a source of token ids is right about a model: compared with what the engine itself replied. Event loop only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

FIRST: Final = 20
"""So many prompts of a model are compared one after the other, and then one in `EVERY`."""

EVERY: Final = 16

_DISTRUST_S: Final = 600.0
_MOST: Final = 2000


class _Record:
    __slots__ = ("not_before_s", "same", "turn")

    def __init__(self) -> None:
        self.same = 0
        self.turn = 0
        self.not_before_s = 0.0


class Trust:
    """By source and model. One that was wrong is not asked for a while."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._records: dict[tuple[str, str], _Record] = {}

    def has(self, source: str, model: str) -> bool:
        """Whether it may be asked."""
        record = self._records.get((source, model))
        return record is None or record.not_before_s <= self._clock()

    def wants(self, source: str, model: str) -> bool:
        """Whether what it said now should be compared."""
        record = self._of(source, model)
        record.turn += 1
        return record.same < FIRST or record.turn % EVERY == 0

    def compared(self, source: str, model: str, *, same: bool) -> None:
        """It was."""
        record = self._of(source, model)
        if same:
            record.same += 1
        else:
            record.same, record.not_before_s = 0, self._clock() + _DISTRUST_S

    def distrusted(self) -> list[str]:
        """`source/model` of those that are not asked now."""
        now_s = self._clock()
        return [f"{source}/{model}" for (source, model), each in self._records.items() if each.not_before_s > now_s]

    def _of(self, source: str, model: str) -> _Record:
        record = self._records.get((source, model))
        if record is None:
            if len(self._records) >= _MOST:
                self._records.pop(next(iter(self._records)))
            record = self._records[source, model] = _Record()
        return record
