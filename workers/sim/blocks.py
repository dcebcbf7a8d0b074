"""The KV cache: a pool of blocks with reference counts, an LRU free list, a prefix cache, and what each block really holds.

A block holds the tokens whose KV was written into it and the state they were computed in (a token's KV depends on everything
before it). Reading a request's blocks back gives the state of its prompt if and only if they hold that prompt. No I/O here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from workers.sim import text

TOKEN_BYTES = 4


class Kv(NamedTuple):
    """What one block holds."""

    context: bytes
    """The state before its first token."""
    tokens: bytes
    """Its tokens (:func:`workers.sim.text.token_bytes`)."""


UNREADABLE = Kv(b"", b"")
"""What a block holds that nobody wrote since it was handed out."""


@dataclass(frozen=True)
class Stored:
    """Consecutive blocks entered the prefix cache."""

    hashes: tuple[bytes, ...]
    parent: bytes | None
    token_ids: tuple[int, ...]
    adapter: str
    extra_keys: tuple[tuple[str, ...] | None, ...]
    medium: str = "GPU"


@dataclass(frozen=True)
class Removed:
    """Blocks left the prefix cache."""

    hashes: tuple[bytes, ...]
    medium: str = "GPU"


@dataclass(frozen=True)
class Cleared:
    """The prefix cache was emptied."""


CacheEvent = Stored | Removed | Cleared


class BlockPool:
    """The blocks of one worker. Block 0 is vLLM's null block and never handed out."""

    def __init__(
        self, num_blocks: int, block_size: int, *, caching: bool = True, on_event: Callable[[CacheEvent], None] | None = None
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.caching = caching
        self._on_event = on_event
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._users = [0] * num_blocks
        self._hash: list[bytes | None] = [None] * num_blocks
        self._cached: dict[bytes, dict[int, None]] = {}
        """Hash -> the blocks that have it: vLLM does not join those of equal content, and finds the first."""
        self.kv: list[Kv] = [UNREADABLE] * num_blocks

    @property
    def free_blocks(self) -> int:
        """Blocks that can be handed out, cached ones included."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the blocks that somebody holds, 0 to 1."""
        return 1.0 - len(self._free) / (self.num_blocks - 1)

    def in_use(self, block: int) -> bool:
        """Whether somebody holds it."""
        return self._users[block] > 0

    def is_hashed(self, block: int) -> bool:
        """Whether it stands in the prefix cache."""
        return self._hash[block] is not None

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """The cached blocks of the longest known prefix. They are not held yet: see hold()."""
        found = []
        for digest in hashes:
            blocks = self._cached.get(digest)
            if blocks is None:
                break
            found.append(next(iter(blocks)))
        return found

    def cached(self) -> dict[bytes, int]:
        """What the prefix cache holds: hash -> in how many blocks."""
        return {digest: len(blocks) for digest, blocks in self._cached.items()}

    def hold(self, blocks: Iterable[int]) -> None:
        """One more user for each."""
        for block in blocks:
            if not self._users[block]:
                del self._free[block]
            self._users[block] += 1

    def take(self, count: int) -> list[int] | None:
        """New blocks, least recently used first, what they held forgotten; None if there are not enough."""
        if count > len(self._free):
            return None
        taken, removed = [], []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            digest = self._hash[block]
            if digest is not None:
                self._hash[block] = None
                others = self._cached[digest]
                del others[block]
                if not others:
                    del self._cached[digest]
                removed.append(digest)
            self._users[block] = 1
            self.kv[block] = UNREADABLE
            taken.append(block)
        for digest in removed:
            self._emit(Removed((digest,)))
        return taken

    def drop(self, blocks: Sequence[int]) -> None:
        """One user less for each; a block without users can be handed out again, the end of a prompt before its start."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if not self._users[block]:
                self._free[block] = None
                if self._hash[block] is None:
                    self._free.move_to_end(block, last=False)

    def register(self, blocks: Sequence[int], stored: Stored) -> None:
        """Full blocks of a request enter the prefix cache, also where their content is there in other blocks."""
        if not self.caching:
            return
        for block, digest in zip(blocks, stored.hashes, strict=True):
            if self._hash[block] is None:
                self._hash[block] = digest
                self._cached.setdefault(digest, {})[block] = None
        self._emit(stored)

    def state(self, blocks: Sequence[int], num_tokens: int, adapter: str = "") -> bytes:
        """The state that attention over these blocks sees: the prompt's own if they hold the prompt, another one if not."""
        state = text.start_state(adapter)
        left = num_tokens * TOKEN_BYTES
        for block in blocks:
            held = self.kv[block]
            if held.context != state.digest():
                state.update(b"context" + held.context)
            state.update(held.tokens[:left])
            left -= len(held.tokens)
            if left <= 0:
                break
        if left > 0:
            state.update(b"unwritten" + left.to_bytes(8, "big"))
        return state.digest()

    def clear_cache(self) -> bool:
        """Forget all prefixes; refused while a block is in use, as in vLLM."""
        if len(self._free) != self.num_blocks - 1:
            return False
        self._cached.clear()
        self._hash = [None] * self.num_blocks
        self._emit(Cleared())
        return True

    def _emit(self, event: CacheEvent) -> None:
        if self._on_event is not None:
            self._on_event(event)
