"""Which endpoint holds which blocks in which tier, by its own word: its KV cache events. Pure, for one thread.

What a lookup says follows from how vLLM finds a cached prefix (v1/core/kv_cache_coordinator.py):

* Full-attention groups (also MLA and sinks) must all hold a block: the least of them counts. Sliding-window, chunked-local and
  Mamba groups need only what lies before the end of a hit, so what full attention holds is the most that can be hit; their
  events are not kept. A model without any full-attention group is never in step.
* The GPU's leading blocks come first; then what the slower tiers hold from there on without a hole.
* Blocks behind a hole cannot be used. They stay known, and count again when the hole is filled.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from extproc.routing.block_store import LOW, TIERS, Holder, Store, bits
from extproc.routing.stored_blocks import Seen, Stored, StoredBlocks, entering
from extproc.routing.token_chain import TokenChain, seed_of

BLOCK_BYTES = 190
"""What a block takes, whoever holds it: measured with bench.kv_events."""

_DECIDING = frozenset({None, "full_attention", "mla_attention", "sink_full_attention", "unknown"})
"""`kv_cache_spec_kind` of groups whose blocks must all be there."""

_KNOWN_SHARE = 0.95
"""An engine whose cache is known to such a share counts as known: late starts end so, see docs/kv-events.md."""

_FALLEN_BLOCKS = 200
"""Of the blocks that left an engine's host memory, so many of the last tell how well it is known. An assumption: enough that a
few that were not known do not matter."""

_NOTED = -1
"""In place of a group: what others say of an endpoint."""


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
_TIERS = tuple(Tier)
_HOST = Tier.CPU.number


class Held(NamedTuple):
    """Leading tokens of a prompt that an endpoint holds, each in its fastest tier."""

    gpu: int
    cpu: int = 0
    disk: int = 0
    lmcache: int = 0
    rank: int = 0
    """The data-parallel rank that holds them: the one that holds most."""
    others: tuple[Held, ...] = ()
    """What other ranks behind the same address hold, those that hold some."""

    @property
    def tokens(self) -> int:
        """In all tiers."""
        return self.gpu + self.cpu + self.disk + self.lmcache


class _Holder(Holder):
    """One cache group of one engine, in the store of its block size."""

    __slots__ = ("group", "source")

    def __init__(self, source: Source, group: int, store: Store) -> None:
        super().__init__(store)
        self.source, self.group = source, group


class Source:
    """One engine that tells what it holds: a data-parallel rank of an endpoint. Only :meth:`Holdings.source` makes it."""

    def __init__(self, owner: Holdings, address: str, rank: int) -> None:
        self._owner = owner
        self.address, self.rank = address, rank
        self.complete = False
        """All that it holds is known: every event since it was started or cleared has been seen."""
        self.suspect = False
        """It may have been started anew: until that is settled, nothing is known of it."""
        self._holders: dict[int, _Holder] = {}
        self._others: set[int] = set()
        self._fallen = 0
        self._fallen_known = 1.0

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

    def removed(self, hashes: Collection[int | bytes], tier: int = 0, group: int = 0) -> None:
        """Blocks left a tier."""
        holder = self._holders.get(group)
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
        """It holds nothing: it was started anew or its cache was emptied. From now on all that it holds is known.

        vLLM says so too where only the GPU cache was emptied and its host memory was not (``/reset_prefix_cache`` without
        ``reset_external``). What is left there is not known then, which :attr:`in_step` finds out when it goes.
        """
        self._forget()
        self.complete, self.suspect = True, False

    def lost(self) -> int:
        """Events were missed: nothing of what was known can be relied on. How many entries went."""
        self.complete = self.suspect = False
        return self._forget()

    def _forget(self) -> int:
        self._fallen, self._fallen_known = 0, 1.0
        return self._owner.empty(self)

    @property
    def known_share(self) -> float:
        """Of its GPU cache, how much is known; 0 where the size of the cache is not known."""
        capacity = self._owner.capacity(self.address)
        return self.gpu_tokens / capacity if capacity else 0.0

    @property
    def gpu_tokens(self) -> int:
        """Tokens of the blocks that it holds on the GPU, the least of its deciding groups."""
        return min((each.store.counts[0][each.number] * each.store.block_tokens for each in self.holders()), default=0)

    @property
    def in_step(self) -> bool:
        """Whether what is known of it can be relied on to be all."""
        if self.suspect or (self._others and not self._holders) or self._fallen_known < _KNOWN_SHARE:
            return False
        if self.complete:
            return True
        # What its host memory holds since before we listened shows only when it goes, which is in the order of last use.
        if self._fallen < _FALLEN_BLOCKS and any(each.store.counts[_HOST][each.number] for each in self.holders()):
            return False
        return self.known_share >= _KNOWN_SHARE

    def holders(self) -> list[_Holder]:
        """Its deciding groups."""
        return [each for group, each in self._holders.items() if group != _NOTED]

    def blocks(self, tier: Tier) -> int:
        """How many it holds there, of its deciding groups and of what others say."""
        return sum(each.store.counts[tier.number][each.number] for each in self._holders.values())

    def _holder_for(self, group: int, kind: str | None, block_tokens: int) -> _Holder | None:
        """None: what is said of the group does not count."""
        holder = self._holders.get(group)
        if holder is None or (block_tokens != holder.store.block_tokens and block_tokens):
            return self._decide(group, kind, block_tokens)
        return holder if kind in _DECIDING else None

    def _decide(self, group: int, kind: str | None, block_tokens: int) -> _Holder | None:
        """The holder of a group that was not heard of before; None: it does not count."""
        if kind not in _DECIDING:
            self._others.add(group)
            return None
        if group in self._others or group in self._holders or block_tokens < 1 or len(self._holders) >= _MOST_GROUPS:
            return None
        return self._owner.enter(self, self._holders, group, block_tokens)


_MOST_GROUPS = 16
"""Deciding groups of one engine; vLLM has one, or a few of equal size."""


class Holdings:
    """What all endpoints hold. Lookups and changes are from one thread, and neither waits for anything."""

    def __init__(self, max_blocks: int) -> None:
        """``max_blocks``: so many different blocks are kept, at 190 bytes each; who has most of them then loses those that it
        stored least recently. One that several hold takes half as much again for each. Raises ValueError below 1.
        """
        if max_blocks < 1:
            raise ValueError(f"max_blocks must be at least 1, not {max_blocks}")
        self.max_blocks = max_blocks
        self.evictions = 0
        """Entries (one for each block, holder and tier) that had to go for newer ones, ever."""
        self.seen = Seen()
        self._stores: dict[int, Store] = {}
        self._sources: dict[str, dict[int, Source]] = {}
        self._by_number: dict[tuple[int, int], _Holder] = {}
        self._capacity: dict[str, int] = {}
        self._seeds: dict[str | None, int] = {}

    # -- questions ---------------------------------------------------------------------------------------------------------

    def lookup(self, chain: TokenChain) -> dict[str, Held]:
        """Address -> leading tokens that it holds, for all that hold some. One that is not in step may hold more."""
        per_source: dict[Source, list[Held]] = {}
        noted: list[tuple[Source, Held]] = []
        for store in self._stores.values():
            if not store.alive:
                continue
            size = store.block_tokens
            for number, counts in _walk(store, chain.keys(size)).items():
                holder = self._by_number[size, number]
                gpu, cpu, disk, lmcache = counts
                held = Held(gpu * size, cpu * size, disk * size, lmcache * size, holder.source.rank)
                if holder.group == _NOTED:
                    noted.append((holder.source, held))
                elif not holder.source.suspect:
                    per_source.setdefault(holder.source, []).append(held)
        found: dict[str, Held] = {}
        best: dict[Source, Held] = {}
        for source, several in per_source.items():
            if len(several) == len(source.holders()):
                best[source] = min(several, key=_total)
        for source, held in noted:
            own = best.get(source)
            if own is None:
                best[source] = held
            elif held.tokens > own.tokens:
                more = held.tokens - own.tokens
                best[source] = own._replace(lmcache=own.lmcache + more)
        for source, held in best.items():
            other = found.get(source.address)
            if other is not None:
                held, other = (held, other) if _total(held) > _total(other) else (other, held)
                held = held._replace(others=(*held.others, *other.others, other._replace(others=())))
            found[source.address] = held
        return found

    def held(self, chain: TokenChain, address: str) -> Held | None:
        """The same for one endpoint."""
        return self.lookup(chain).get(address) if address in self._sources else None

    def holds(self, address: str, key: int, block_tokens: int) -> bool:
        """Whether an engine of an endpoint says that it holds this block, in any tier."""
        return any(
            each.store.block_tokens == block_tokens and any(each.store.holds(key, each.number, tier.number) for tier in _TIERS)
            for source in self.sources(address)
            for each in source.holders()
        )

    def in_step(self, address: str) -> bool:
        """Whether all that an endpoint holds is known."""
        sources = self._sources.get(address)
        return sources is not None and bool(sources) and all(each.in_step for each in sources.values())

    def block_sizes(self) -> tuple[int, ...]:
        """Tokens of a block, of all endpoints: what a chain will be asked for."""
        return tuple(self._stores)

    def block_tokens(self, address: str) -> int | None:
        """Tokens of an endpoint's block; None: not known. The largest, if it has groups of several sizes."""
        sizes = [each.store.block_tokens for source in self.sources(address) for each in source.holders()]
        return max(sizes, default=None)

    @property
    def blocks(self) -> int:
        """Different blocks; one that many hold counts once."""
        return sum([store.blocks for store in self._stores.values()])

    @property
    def bytes(self) -> int:
        """What all of it takes, by measurement of a block."""
        return self._entries() * BLOCK_BYTES // 2

    @property
    def max_bytes(self) -> int:
        """What all of it can take."""
        return self.max_blocks * BLOCK_BYTES

    def sources(self, address: str) -> list[Source]:
        """The engines of an endpoint."""
        return list(self._sources.get(address, {}).values())

    def ranks(self, address: str) -> list[int]:
        """The data-parallel ranks of an endpoint, in their order."""
        return sorted(self._sources.get(address, ()))

    def addresses(self) -> list[str]:
        """Endpoints that were heard of."""
        return list(self._sources)

    def status(self) -> dict[str, Any]:
        """For people."""
        return {
            "blocks": self.blocks,
            "max_blocks": self.max_blocks,
            "bytes": self.bytes,
            "evictions": self.evictions,
            "orphans": self.seen.orphans,
            "unknown_removed": self.seen.unknown_removed,
            "other_groups": self.seen.other_groups,
        }

    # -- who tells ---------------------------------------------------------------------------------------------------------

    def source(self, address: str, rank: int = 0) -> Source:
        """The engine of an endpoint, for whoever hears its events. Not in step until something says so."""
        ranks = self._sources.setdefault(address, {})
        found = ranks.get(rank)
        if found is None:
            found = ranks[rank] = Source(self, address, rank)
        return found

    def note(self, address: str, tier: Tier, chain: TokenChain, tokens: int, block_tokens: int = 256) -> None:
        """Somebody else, e.g. a directory of LMCache, says that an endpoint gets the first ``tokens`` of a chain from a tier,
        in chunks of ``block_tokens``. It stands until :meth:`correct`, :meth:`drop`, or newer blocks take its place.
        """
        source = self.source(address)
        if block_tokens < 1:
            raise ValueError(f"block_tokens must be at least 1, not {block_tokens}")
        holder = source._holders.get(_NOTED)
        if holder is not None and holder.store.block_tokens != block_tokens:
            self._leave(holder)
            holder = None
        if holder is None:
            holder = self.enter(source, source._holders, _NOTED, block_tokens)
        store = holder.store
        for key in chain.keys(block_tokens)[: max(0, tokens) // block_tokens]:
            if store.holds(key, holder.number, tier.number):
                continue
            self.room()
            store.add(holder, key, key, tier.number)

    def correct(self, address: str, chain: TokenChain, tokens: int) -> int:
        """The engine found only the first ``tokens`` of a chain: forget the rest of it there. How many blocks went."""
        gone = 0
        for source in self.sources(address):
            for holder in source._holders.values():
                size = holder.store.block_tokens
                for key in chain.keys(size)[max(0, tokens) // size :]:
                    gone += holder.store.forget(key, holder.number)
        self.seen.corrected += gone
        return gone

    def set_capacity(self, address: str, tokens: int) -> None:
        """Tokens that the GPU cache of each engine of an endpoint holds; see ``in_step``."""
        self._capacity[address] = tokens

    def capacity(self, address: str) -> int | None:
        """The same, if it is known."""
        return self._capacity.get(address)

    def restarted(self, address: str) -> None:
        """Nothing is left of what its caches held. Whether all of what comes is seen, its events must show."""
        for source in self.sources(address):
            source.lost()

    def drop(self, address: str) -> None:
        """The endpoint is gone."""
        self.restarted(address)
        self._sources.pop(address, None)
        self._capacity.pop(address, None)

    @property
    def untidy(self) -> bool:
        """Whether :meth:`tidy` has work: after an endpoint's holdings went, for the memory that they took."""
        return any(store.untidy for store in self._stores.values())

    def tidy(self) -> None:
        """A piece of that work, of less than a millisecond."""
        for size, store in self._stores.items():
            if store.untidy:
                store.tidy()
                if not store.untidy and not store.alive and not store.blocks:
                    del self._stores[size]
                return

    # -- for Source --------------------------------------------------------------------------------------------------------

    def seed(self, lora: str | None) -> int:
        """:func:`seed_of`, remembered."""
        found = self._seeds.get(lora)
        if found is None:
            if len(self._seeds) > _MOST_SEEDS:
                self._seeds.clear()
            found = self._seeds[lora] = seed_of(lora)
        return found

    def enter(self, source: Source, holders: dict[int, _Holder], group: int, block_tokens: int) -> _Holder:
        """A group of an engine gets its place."""
        store = self._stores.get(block_tokens)
        if store is None:
            store = self._stores[block_tokens] = Store(block_tokens)
        holder = holders[group] = _Holder(source, group, store)
        self._by_number[block_tokens, holder.number] = holder
        return holder

    def empty(self, source: Source) -> int:
        """The engine holds nothing; how many entries that were."""
        gone = sum(source.blocks(tier) for tier in Tier)
        for holder in list(source._holders.values()):
            self._leave(holder)
        source._holders.clear()
        source._others.clear()
        return gone

    def room(self) -> int:
        """For so many new blocks there is room, at least one: of the size of which there are most, the oldest go if there was
        none.
        """
        room = self.max_blocks - (self._entries() + 1) // 2
        if room < 1:
            self.evictions += max(self._stores.values(), key=_entries_of).make_room()
            room = max(1, self.max_blocks - (self._entries() + 1) // 2)
        return room

    def _entries(self) -> int:
        """Blocks and names of blocks: about as large as each other."""
        return sum([store.blocks + store.names for store in self._stores.values()])

    def _leave(self, holder: _Holder) -> None:
        del self._by_number[holder.store.block_tokens, holder.number]
        holder.store.leave(holder)


_MOST_SEEDS = 10_000


def _entries_of(store: Store) -> int:
    return store.blocks + store.names


def _total(held: Held) -> tuple[int, int, int]:
    return held.tokens, held.gpu, -held.rank


def _walk(store: Store, keys: array[int]) -> dict[int, list[int]]:
    """Number of a holder -> leading blocks by tier, for all that hold the first block somewhere."""
    found: dict[int, list[int]] = {}
    slower = [tier for tier in range(1, TIERS) if store.totals[tier]]
    gpu, masks = store.alive, store.masks[0]
    at = 0
    if not slower:
        for key in keys:
            now = masks[key & LOW].get(key, 0) & gpu
            if now != gpu:
                if at:
                    for number in bits(gpu ^ now):
                        found[number] = [at, 0, 0, 0]
                if not now:
                    return found
                gpu = now
            at += 1
        if at:
            for number in bits(gpu):
                found[number] = [at, 0, 0, 0]
        return found
    tiers = [(tier, store.masks[tier]) for tier in slower]
    # Who has left the GPU's part, and where it stands in the slower ones: each block counts in the fastest.
    behind = 0
    since: dict[int, int] = {}
    before: list[int] = [0] * TIERS
    for key in keys:
        place = key & LOW
        now = masks[place].get(key, 0) & gpu
        if now != gpu:
            left = gpu ^ now
            behind |= left
            gpu = now
            if at:
                for number in bits(left):
                    found[number] = [at, 0, 0, 0]
        if behind:
            rest = behind
            for tier, shards in tiers:
                here = shards[place].get(key, 0) & rest
                rest ^= here
                if here != before[tier]:
                    for number in bits(before[tier] & ~here):
                        found[number][tier] += at - since.pop(number * TIERS + tier)
                    for number in bits(here & ~before[tier]):
                        found.setdefault(number, [0, 0, 0, 0])
                        since[number * TIERS + tier] = at
                    before[tier] = here
            behind ^= rest
        if not gpu and not behind:
            break
        at += 1
    for number in bits(gpu):
        if at:
            found[number] = [at, 0, 0, 0]
    for tier in slower:
        for number in bits(before[tier]):
            found[number][tier] += at - since.pop(number * TIERS + tier)
    return found
