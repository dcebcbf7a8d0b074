"""A cache behind the cache of a worker, for the twin: its host's memory, or a server that several of them read and write.

What a worker has computed is there as soon as its step is over: writing goes on beside the next step and is taken to cost
nothing. Reading takes time, which is the caller's to count (:mod:`workers.sim.twin_link`). Counts and keys, no contents.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from workers.sim.timing import Profile
from workers.sim.twin_cache import Change, Left, entered
from workers.traces import BLOCK_TOKENS


@dataclass(frozen=True)
class TierConfig:
    """What the tier is."""

    num_blocks: int
    bytes_a_s: float
    """At which one worker reads from it."""
    total_bytes_a_s: float = math.inf
    """At which all of them do, where several share it."""
    overhead_s: float = 0.002
    """Of each read, before its bytes flow."""


def host_tier(tokens: int, profile: Profile, block_tokens: int = BLOCK_TOKENS) -> TierConfig:
    """The memory of one worker's host."""
    return TierConfig(tokens // block_tokens, profile.host_bytes_a_s, overhead_s=profile.host_overhead_s)


class TwinTier:
    """The blocks of the tier. A key stands for a block and all before it; the least recently used goes first."""

    def __init__(self, config: TierConfig) -> None:
        self.config = config
        self._keys: OrderedDict[int, None] = OrderedDict()
        self.changes: list[Change] | None = None
        """What has changed, for whoever sets a list here and empties it."""

    def match(self, keys: Sequence[int]) -> int:
        """How many of the keys, from the first on, it holds."""
        for count, key in enumerate(keys):
            if key not in self._keys:
                return count
        return len(keys)

    def touch(self, keys: Sequence[int]) -> None:
        """These were asked for; the end of a prompt goes before its start. Those that it does not hold do not matter."""
        for key in reversed(keys):
            if key in self._keys:
                self._keys.move_to_end(key)

    def store(self, keys: Sequence[int], before: int | None = None) -> None:
        """These are full now. ``before``: the block before the first of them; None: they begin a prompt."""
        if self.changes is not None:
            self.changes += entered(keys, [at for at, key in enumerate(keys) if key not in self._keys], before, below=True)
        for key in reversed(keys):
            self._keys[key] = None
            self._keys.move_to_end(key)
        gone = []
        while len(self._keys) > self.config.num_blocks:
            gone.append(self._keys.popitem(last=False)[0])
        if gone and self.changes is not None:
            self.changes.append(Left(gone, below=True))
