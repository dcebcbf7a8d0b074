"""A cache behind the caches of several workers, for the twin: memory of hosts or of a server that all of them read and write.

What a worker has computed is there as soon as its step is over: writing goes on beside the next step and is taken to cost
nothing. Reading takes time, which is the caller's to count (:mod:`workers.sim.twin_link`). Counts and keys, no contents.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TierConfig:
    """What the tier is."""

    num_blocks: int
    bytes_a_s: float
    """At which one worker reads from it."""
    total_bytes_a_s: float
    """At which all of them do."""
    overhead_s: float = 0.002
    """Of each read, before its bytes flow."""


class TwinTier:
    """The blocks of the tier. A key stands for a block and all before it; the least recently used goes first."""

    def __init__(self, config: TierConfig) -> None:
        self.config = config
        self._keys: OrderedDict[int, None] = OrderedDict()

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

    def store(self, keys: Sequence[int]) -> None:
        """These are full now."""
        for key in reversed(keys):
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self.config.num_blocks:
            self._keys.popitem(last=False)
