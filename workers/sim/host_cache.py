"""KV that the host's memory keeps behind the GPU's cache: what vLLM's OffloadingConnector does, in small. No I/O here.

Every full block that the engine computes, pulls or loads is copied there at once; the least recently used goes first, the end
of a prompt before its start (``v1/kv_offload/cpu``, policy ``lru``). A block is named by the hash it has in the prefix cache.
Events say what is in it with all its tokens, as the connector's own do with ``self_describing_kv_events``; where it has one for
each block, they have one for each run of consecutive blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from workers.sim.blocks import CacheEvent, Kv, Removed, Stored

MEDIUM = "CPU"


class HostCache:
    """The memory behind one engine's cache."""

    def __init__(self, num_blocks: int, block_size: int, *, on_event: Callable[[CacheEvent], None] | None = None) -> None:
        """``num_blocks``: 0 keeps nothing. ``block_size`` is in tokens."""
        self.num_blocks = num_blocks
        self._block_size = block_size
        self._on_event = on_event
        self._kv: OrderedDict[bytes, Kv] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kv)

    def match(self, hashes: Sequence[bytes]) -> int:
        """How many of them, from the first on, it holds."""
        return next((index for index, digest in enumerate(hashes) if digest not in self._kv), len(hashes))

    def read(self, hashes: Sequence[bytes]) -> list[Kv]:
        """What these blocks hold, which are all there."""
        return [self._kv[digest] for digest in hashes]

    def touch(self, hashes: Sequence[bytes]) -> None:
        """A prompt used these, as far as they are here."""
        for digest in reversed(hashes):
            if digest in self._kv:
                self._kv.move_to_end(digest)

    def store(self, stored: Stored, kv: Sequence[Kv]) -> None:
        """Blocks that entered the prefix cache, with what they hold."""
        new = [index for index, digest in enumerate(stored.hashes) if digest not in self._kv]
        for digest, held in zip(reversed(stored.hashes), reversed(kv), strict=True):
            self._kv[digest] = held
            self._kv.move_to_end(digest)
        untold = {stored.hashes[index] for index in new}
        gone = [self._kv.popitem(last=False)[0] for _ in range(len(self._kv) - self.num_blocks)]
        gone = [digest for digest in gone if digest not in untold]
        if self._on_event is None:
            return
        if gone:
            self._on_event(Removed(tuple(gone), MEDIUM))
        for first, end in _runs([index for index in new if stored.hashes[index] in self._kv]):
            self._on_event(self._part(stored, first, end))

    def clear(self) -> None:
        """Forget all, and say so. vLLM's ``/reset_prefix_cache?reset_external=true`` does not say it: its event is the one of a
        cache that alone was emptied."""
        gone = tuple(self._kv)
        self._kv.clear()
        if gone and self._on_event is not None:
            self._on_event(Removed(gone, MEDIUM))

    def _part(self, stored: Stored, first: int, end: int) -> Stored:
        size = self._block_size
        return replace(
            stored,
            hashes=stored.hashes[first:end],
            parent=stored.hashes[first - 1] if first else stored.parent,
            token_ids=stored.token_ids[first * size : end * size],
            extra_keys=stored.extra_keys[first:end],
            medium=MEDIUM,
        )


def _runs(indexes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First and end of each run of consecutive numbers."""
    first = 0
    for at in range(1, len(indexes) + 1):
        if at == len(indexes) or indexes[at] != indexes[at - 1] + 1:
            yield indexes[first], indexes[at - 1] + 1
            first = at
