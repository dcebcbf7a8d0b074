"""The KV cache of the twin: which blocks are held, which are remembered, and which go first. Counts and keys, no contents.

It does what :class:`workers.sim.blocks.BlockPool` does, in the same order of eviction: blocks that hold nothing are handed out
first, then the least recently used of the cache, the end of a prompt before its start.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

Block = int | None
"""A block that somebody holds: by the key it is cached under, or without one."""


class Entered(NamedTuple):
    """Consecutive blocks are in the cache now."""

    keys: Sequence[int]
    before: int | None
    """The block before the first of them; None: they begin a prompt."""
    below: bool = False
    """In the tier behind the cache (:mod:`workers.sim.twin_tier`)."""


class Left(NamedTuple):
    """These blocks are not in the cache any more."""

    keys: Sequence[int]
    below: bool = False
    """The tier behind the cache."""


Change = Entered | Left


def entered(keys: Sequence[int], new: Sequence[int], before: int | None, *, below: bool = False) -> Iterator[Entered]:
    """One for each run of consecutive keys of which the places are ``new``: what was there before is not told again, for it
    goes but once. ``before``: the block before the first of all keys."""
    for _, run in groupby(enumerate(new), key=lambda each: each[1] - each[0]):
        places = [place for _, place in run]
        yield Entered(keys[places[0] : places[-1] + 1], keys[places[0] - 1] if places[0] else before, below)


class TwinCache:
    """The blocks of one worker. A key stands for a block and all before it."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._users: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._nameless = 0
        self._unique = -1
        self.changes: list[Change] | None = None
        """What has changed, for whoever sets a list here and empties it: what an engine's KV events say."""

    @property
    def held_blocks(self) -> int:
        """Blocks in use."""
        return len(self._users) + self._nameless

    @property
    def usage(self) -> float:
        """Share of the blocks in use, 0 to 1."""
        return self.held_blocks / self.num_blocks

    def match(self, keys: Sequence[int]) -> int:
        """How many of the keys, from the first on, are cached."""
        users, idle = self._users, self._idle
        for count, key in enumerate(keys):
            if key not in users and key not in idle:
                return count
        return len(keys)

    def hold(self, keys: Sequence[int]) -> None:
        """One more user for each of these cached keys."""
        for key in keys:
            if key in self._users:
                self._users[key] += 1
            else:
                del self._idle[key]
                self._users[key] = 1

    def take(self, count: int) -> bool:
        """Hold so many new blocks; False, and nothing done, if there are not enough."""
        empty = self.num_blocks - self.held_blocks - len(self._idle)
        if count > empty + len(self._idle):
            return False
        gone = [self._idle.popitem(last=False)[0] for _ in range(count - empty)]
        if gone and self.changes is not None:
            self.changes.append(Left(gone))
        self._nameless += count
        return True

    def register(self, blocks: list[Block], first: int, keys: Sequence[int], before: int | None = None) -> None:
        """The new blocks from ``first`` on are full now: they enter the cache, but for keys that are in it already. ``before``:
        the key of the block before them; None: they begin a prompt."""
        new = []
        for index, key in enumerate(keys):
            if blocks[first + index] is None and key not in self._users and key not in self._idle:
                blocks[first + index] = key
                self._nameless -= 1
                self._users[key] = 1
                new.append(index)
        if self.changes is not None:
            self.changes += entered(keys, new, before)

    def unique_keys(self, count: int) -> list[int]:
        """Keys for blocks that no other prompt has, such as those of an answer. They are negative."""
        keys = list(range(self._unique, self._unique - count, -1))
        self._unique -= count
        return keys

    def drop(self, blocks: Sequence[Block]) -> None:
        """One user less for each; those of the end of a prompt are forgotten before those of its start."""
        for key in reversed(blocks):
            if key is None:
                self._nameless -= 1
            elif self._users[key] > 1:
                self._users[key] -= 1
            else:
                del self._users[key]
                self._idle[key] = None
