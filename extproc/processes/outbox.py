"""What one sibling is still to be told: bounded, in order, cut into datagrams. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import msgspec

DATAGRAM_BYTES = 48 << 10
"""Facts of one datagram, but for a single larger one. The kernel takes 200 kB."""

_MOST_BYTES = 8 << 20
"""A sibling that has not read for so long is told everything again when it does."""


class Outbox:
    """Facts for one sibling."""

    def __init__(self) -> None:
        self._facts: deque[msgspec.Raw] = deque()
        self._bytes = 0
        self._more: Iterator[msgspec.Raw] | None = None
        self.number = 0
        """Of the last batch that was sent, or lost here."""
        self.overflows = 0

    def __bool__(self) -> bool:
        return bool(self._facts) or self._more is not None

    @property
    def complete(self) -> bool:
        """Nothing is left but what may take its time."""
        return not self._facts

    def add(self, fact: msgspec.Raw) -> bool:
        """One more. False: it was one too many, all are lost, and the sibling must be told its claims again."""
        size = len(memoryview(fact))
        if self._bytes + size > _MOST_BYTES:
            self.overflows += 1
            self.clear()
            self.number += 1  # so that the sibling sees that it missed something
            return False
        self._facts.append(fact)
        self._bytes += size
        return True

    def follow(self, more: Iterator[msgspec.Raw]) -> None:
        """Tell this too, a datagram at a time, whenever there is nothing else."""
        self._more = more

    def clear(self) -> None:
        """The sibling is away: it will ask when it is back."""
        self._facts.clear()
        self._bytes = 0
        self._more = None

    def take(self) -> list[msgspec.Raw]:
        """The facts of the next datagram; they go back with :meth:`put_back` if it cannot be sent."""
        taken: list[msgspec.Raw] = []
        size = 0
        while self._facts and (not taken or size + len(memoryview(self._facts[0])) <= DATAGRAM_BYTES):
            fact = self._facts.popleft()
            taken.append(fact)
            size += len(memoryview(fact))
        self._bytes -= size
        while not self._facts and self._more is not None and size < DATAGRAM_BYTES // 2:
            found = next(self._more, None)
            if found is None:
                self._more = None
            else:
                taken.append(found)
                size += len(memoryview(found))
        return taken

    def put_back(self, facts: list[msgspec.Raw]) -> None:
        """They could not be sent yet."""
        self._facts.extendleft(reversed(facts))
        self._bytes += sum(len(memoryview(fact)) for fact in facts)
