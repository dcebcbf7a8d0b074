"""What one engine says that it holds: a data-parallel rank of an endpoint, and its cache groups. Pure."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Protocol

from extproc.routing.block_store import Holder, Store
from extproc.routing.stored_blocks import Owner, Stored, StoredBlocks, enter, entering, name_before

_DECIDING = frozenset({None, "full_attention", "mla_attention", "sink_full_attention", "unknown"})
"""`kv_cache_spec_kind` of groups whose blocks must all be there."""

_KNOWN_SHARE = 0.95
"""An engine whose cache is known to such a share counts as known: late starts end so, see docs/kv-events.md."""

_FALLEN_BLOCKS = 200
"""Of the blocks that left an engine's host memory, so many of the last tell how well it is known. An assumption: enough that a
few that were not known do not matter."""

_MOST_GROUPS = 16
"""Deciding groups of one engine; vLLM has one, or a few of equal size."""

_MOST_OTHERS = 64
"""Groups that do not decide, and are remembered. What leaves one that is not counts as not known."""


class Tier(enum.Enum):
    """Where blocks are, fastest first."""

    GPU = "gpu"
    CPU = "cpu"
    DISK = "disk"
    LMCACHE = "lmcache"

    @property
    def number(self) -> int:
        """From 0, fastest first."""
        return _NUMBER[self]


_NUMBER = {tier: number for number, tier in enumerate(Tier)}
_GPU, _HOST = Tier.GPU.number, Tier.CPU.number
_SLOWER = tuple(number for number in _NUMBER.values() if number != _GPU)


class GroupHolder(Holder):
    """One cache group of one engine, in the store of its block size."""

    __slots__ = ("group", "source")

    def __init__(self, source: Source, group: int, store: Store) -> None:
        super().__init__(store)
        self.source, self.group = source, group


class OwnerOfAll(Owner, Protocol):
    """Of all engines."""

    def enter(self, source: Source, group: int, block_tokens: int) -> GroupHolder | None:
        """A group of an engine gets its place; None: there is none for its block size."""

    def leave(self, holder: GroupHolder) -> None:
        """It has none any more."""

    def capacity(self, address: str) -> int | None:
        """Tokens that the GPU cache of an endpoint's engine holds."""


class Source:
    """One engine that tells what it holds. Only :meth:`Holdings.source` makes it."""

    def __init__(self, owner: OwnerOfAll, address: str, rank: int) -> None:
        self._owner = owner
        self.address, self.rank = address, rank
        self.complete = False
        """All that it holds is known: every event since it was started has been seen."""
        self.gpu_complete = False
        """The same of its GPU's cache alone."""
        self.suspect = False
        """It may have been started anew: until that is settled, nothing is known of it."""
        self.groups: dict[int, GroupHolder] = {}
        """Its deciding groups."""
        self._others: set[int] = set()
        self._fallen = 0
        self._fallen_known = 1.0

    # -- what it says ------------------------------------------------------------------------------------------------------

    def stored(
        self,
        hashes: Sequence[int | bytes],
        parent: int | bytes | None,
        token_ids: list[int],
        block_tokens: int,
        lora: str | None = None,
        extra_keys: Sequence[Sequence[Any] | None] | None = None,
        tier: int = 0,
        group: int = 0,
        kind: str | None = None,
    ) -> None:
        """Consecutive blocks entered a tier; ``parent`` is the engine's hash of the block before them, None: they begin a
        prompt. See :meth:`entering`.
        """
        for _ in self.entering((Stored(hashes, parent, token_ids, block_tokens, lora, extra_keys, group, kind),), tier):
            pass

    def entering(self, events: Iterable[StoredBlocks], tier: int) -> Iterator[int]:
        """Enter what events say into a tier, with stops for breath; see :func:`entering`."""
        return entering(self._owner, self._holder_for, events, tier)

    def enter_plain(
        self,
        group: int,
        kind: str | None,
        block_tokens: int,
        hashes: Sequence[int | bytes],
        parents: Sequence[int | None],
        tokens: array[int],
    ) -> bool:
        """Enter blocks of one group on the GPU that have their tokens and nothing beside them, see :func:`enter`. Whether they
        count.
        """
        holder = self._holder_for(group, kind, block_tokens)
        if holder is None:
            return False
        enter(self._owner, holder, _GPU, hashes, parents, tokens)
        return True

    def name_before(self, event: StoredBlocks) -> int:
        """See :func:`name_before`."""
        return name_before(self._owner, event)

    def removed(self, hashes: Collection[int | bytes], tier: int = 0, group: int = 0) -> None:
        """Blocks left a tier."""
        holder = self.groups.get(group)
        seen = self._owner.seen
        if holder is None and group in self._others:
            seen.other_groups += len(hashes)
            return
        unknown = len(hashes) if holder is None else holder.store.remove(holder, hashes, tier)
        seen.unknown_removed += unknown
        if tier == _HOST and hashes:
            self._fallen += len(hashes)
            weight = min(1.0, len(hashes) / _FALLEN_BLOCKS)
            self._fallen_known += weight * (1.0 - unknown / len(hashes) - self._fallen_known)

    def cleared(self) -> None:
        """It holds nothing in any tier: it was started anew. From now on all that it holds is known."""
        self._forget()
        self.complete = self.gpu_complete = True
        self.suspect = False

    def emptying(self, *, everywhere: bool = False) -> Iterator[None]:
        """Its GPU's cache was emptied, with stops for breath. From then on all is known that is on the GPU.

        Whether slower tiers were emptied too vLLM does not say: ``/reset_prefix_cache`` leaves host memory as it is,
        ``?reset_external=true`` empties it, and the event is the same (v1/core/block_pool.py). It is taken to be as it was.
        ``everywhere``: that has proved wrong before, so nothing is known of them either.
        """
        if everywhere:
            self._forget()
            self.complete = False
        for group, holder in list(self.groups.items()):
            if not any(holder.store.counts[tier][holder.number] for tier in _SLOWER):
                self._owner.leave(holder)
                del self.groups[group]
                continue
            for _ in holder.store.emptying(holder, _GPU):
                yield
                if self.groups.get(group) is not holder:
                    return  # all of it was forgotten meanwhile, and not by this event
        self.gpu_complete = True

    def lost(self) -> int:
        """Events were missed: nothing of what was known can be relied on. How many entries went."""
        self.complete = self.gpu_complete = self.suspect = False
        return self._forget()

    def _forget(self) -> int:
        self._fallen, self._fallen_known = 0, 1.0
        gone = sum(self.blocks(tier) for tier in Tier)
        for holder in self.groups.values():
            self._owner.leave(holder)
        self.groups.clear()
        self._others.clear()
        return gone

    # -- what is known of it -----------------------------------------------------------------------------------------------

    @property
    def known_share(self) -> float:
        """Of its GPU cache, how much is known; 0 where the size of the cache is not known."""
        capacity = self._owner.capacity(self.address)
        return self.gpu_tokens / capacity if capacity else 0.0

    @property
    def gpu_tokens(self) -> int:
        """Tokens of the blocks that it holds on the GPU, the least of its deciding groups."""
        return min((each.store.counts[_GPU][each.number] * each.store.block_tokens for each in self.groups.values()), default=0)

    @property
    def in_step(self) -> bool:
        """Whether what is known of it can be relied on to be all."""
        if self.suspect or (self._others and not self.groups) or self._fallen_known < _KNOWN_SHARE:
            return False
        if self.complete:
            return True
        # What its host memory holds since before we listened shows only when it goes, which is in the order of last use.
        if self._fallen < _FALLEN_BLOCKS and self.blocks(Tier.CPU):
            return False
        return self.gpu_complete or self.known_share >= _KNOWN_SHARE

    @property
    def names(self) -> int:
        """What it takes: names of blocks, of all its groups."""
        return sum([len(each.names) for each in self.groups.values()])

    def blocks(self, tier: Tier) -> int:
        """How many it holds there, of its deciding groups."""
        number = tier.number
        return sum(each.store.counts[number][each.number] for each in self.groups.values())

    # -- groups ------------------------------------------------------------------------------------------------------------

    def _holder_for(self, group: int, kind: str | None, block_tokens: int) -> GroupHolder | None:
        """None: what is said of the group does not count."""
        holder = self.groups.get(group)
        if holder is None or (block_tokens != holder.store.block_tokens and block_tokens):
            return self._decide(group, kind, block_tokens)
        return holder if kind in _DECIDING else None

    def _decide(self, group: int, kind: str | None, block_tokens: int) -> GroupHolder | None:
        """The holder of a group that was not heard of before; None: it does not count."""
        if kind in _DECIDING:
            if group in self._others or group in self.groups or block_tokens < 1 or len(self.groups) >= _MOST_GROUPS:
                return None
            holder = self._owner.enter(self, group, block_tokens)
            if holder is not None:
                self.groups[group] = holder
                return holder
        if len(self._others) < _MOST_OTHERS:
            self._others.add(group)
        return None
