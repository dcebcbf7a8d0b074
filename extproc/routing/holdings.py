"""Which endpoint holds which blocks in which tier, by its own word: its KV cache events. Pure, for one thread.

What a lookup says follows from how vLLM finds a cached prefix (v1/core/kv_cache_coordinator.py):

* Full-attention groups (also MLA and sinks) must all hold a block: the least of them counts. Sliding-window, chunked-local and
  Mamba groups need only what lies before the end of a hit, so what full attention holds is the most that can be hit; their
  events are not kept. A model without any full-attention group is never in step.
* The GPU's leading blocks come first; then what the slower tiers hold from there on without a hole.
* Blocks behind a hole cannot be used. They stay known, and count again when the hole is filled.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from extproc.routing.block_store import OLD_BLOCKS, Store
from extproc.routing.engine_holdings import GroupHolder, Source, Tier
from extproc.routing.leading import leading
from extproc.routing.stored_blocks import Seen
from extproc.routing.token_chain import TokenChain, seed_of

__all__ = ["BLOCK_BYTES", "Held", "Holdings", "Source", "Tier"]

BLOCK_BYTES = 190
"""What a block takes with its name: measured with bench.kv_events. Half of that is the name, of which each holder has one."""

_KEYS_A_TOKEN = 1 / 4
"""All block sizes together may take so many keys of every token of a prompt, or another size is not followed: for each, 0.25 µs
of every prompt. That is room for all powers of two from 8 on."""

_KEYS_A_TOKEN_OF_ONE = 1 / 8
"""Likewise, the sizes of one endpoint."""

_MOST_SEEDS = 1_000
_LONGEST_NAME = 256
"""Characters of an adapter's name; one that is longer is not remembered."""

_LOOKED = 4_000
"""Entries that are looked at, for some that nobody holds any more, before somebody loses his: half a millisecond."""

_ROUNDS = 16
"""Who loses its oldest blocks loses at most the 16th part of them, before it is looked who has most."""


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


class Holdings:
    """What all endpoints hold. Lookups and changes are from one thread, and neither waits for anything."""

    def __init__(self, max_blocks: int) -> None:
        """``max_blocks``: so many different blocks are kept, at 190 bytes each; the endpoint with most of them then loses those
        that it stored least recently. One that several hold takes half as much again for each, and so does one that an engine
        stored several times. Raises ValueError below 1.
        """
        if max_blocks < 1:
            raise ValueError(f"max_blocks must be at least 1, not {max_blocks}")
        self.max_blocks = max_blocks
        self.evictions = 0
        """Entries (one for each block, holder and tier) that had to go for newer ones, ever."""
        self.seen = Seen()
        self._stores: dict[int, Store] = {}
        self._sources: dict[str, dict[int, Source]] = {}
        self._by_number: dict[tuple[int, int], GroupHolder] = {}
        self._capacity: dict[str, int] = {}
        self._seeds: dict[str | None, int] = {}
        self._loser: GroupHolder | None = None
        self._rounds = 0
        """So many more times it is that one."""

    # -- questions ---------------------------------------------------------------------------------------------------------

    def lookup(self, chain: TokenChain) -> dict[str, Held]:
        """Address -> leading tokens that it holds, for all that hold some. One that is not in step may hold more."""
        per_source: dict[Source, list[Held]] = {}
        for store in self._stores.values():
            if not store.alive:
                continue
            size = store.block_tokens
            for number, (gpu, cpu, disk, lmcache) in leading(store, chain.keys(size)).items():
                source = self._by_number[size, number].source
                if not source.suspect:
                    held = Held(gpu * size, cpu * size, disk * size, lmcache * size, source.rank)
                    per_source.setdefault(source, []).append(held)
        found: dict[str, Held] = {}
        for source, several in per_source.items():
            if len(several) < len(source.groups):
                continue
            held = min(several, key=_total)
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
            each.store.block_tokens == block_tokens and any(each.store.holds(key, each.number, tier.number) for tier in Tier)
            for source in self.sources(address)
            for each in source.groups.values()
        )

    def in_step(self, address: str) -> bool:
        """Whether all that an endpoint holds is known."""
        sources = self._sources.get(address)
        return sources is not None and bool(sources) and all(each.in_step for each in sources.values())

    def block_sizes(self) -> tuple[int, ...]:
        """Tokens of a block, of all endpoints: what a chain will be asked for."""
        return tuple([size for size, store in self._stores.items() if store.alive])

    def block_tokens(self, address: str) -> int | None:
        """Tokens of an endpoint's block; None: not known. The largest, if it has groups of several sizes."""
        sizes = [each.store.block_tokens for source in self.sources(address) for each in source.groups.values()]
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

    def tidy(self) -> int:
        """A piece of that work, of less than a millisecond. How many entries were looked at."""
        for size, store in self._stores.items():
            if store.untidy:
                looked = store.tidy()
                if not store.untidy and not store.alive and not store.blocks:
                    del self._stores[size]
                return looked
        return 0

    # -- for Source --------------------------------------------------------------------------------------------------------

    def seed(self, lora: str | None) -> int:
        """:func:`seed_of`, remembered."""
        found = self._seeds.get(lora)
        if found is None:
            found = seed_of(lora)
            if lora is None or len(lora) <= _LONGEST_NAME:
                if len(self._seeds) >= _MOST_SEEDS:
                    self._seeds.clear()
                self._seeds[lora] = found
        return found

    def enter(self, source: Source, group: int, block_tokens: int) -> GroupHolder | None:
        """A group of an engine gets its place. None: with blocks of that size every prompt would cost too much."""
        store = self._stores.get(block_tokens)
        if store is None or not store.alive:
            own = {each.store.block_tokens for rank in self.sources(source.address) for each in rank.groups.values()}
            if _keys_a_token(block_tokens, *own) > _KEYS_A_TOKEN_OF_ONE:
                return None
            if _keys_a_token(block_tokens, *self.block_sizes()) > _KEYS_A_TOKEN:
                return None
        if store is None:
            store = self._stores[block_tokens] = Store(block_tokens)
        holder = GroupHolder(source, group, store)
        self._by_number[block_tokens, holder.number] = holder
        return holder

    def leave(self, holder: GroupHolder) -> None:
        """A group of an engine has no place any more."""
        del self._by_number[holder.store.block_tokens, holder.number]
        holder.store.leave(holder)

    def room(self) -> int:
        """For so many new blocks there is room, at least one: if there was none, the endpoint with most loses its oldest. What
        nobody holds any more goes first.
        """
        room = self.max_blocks - (self._entries() + 1) // 2
        if room > 0:
            return room
        looked = 0
        while room < 1 and looked < _LOOKED and self.untidy:
            looked += self.tidy() + 1
            room = self.max_blocks - (self._entries() + 1) // 2
        if room < 1:
            self.evictions += self._make_room()
            room = max(1, self.max_blocks - (self._entries() + 1) // 2)
        return room

    def _make_room(self) -> int:
        """How many entries went. Endpoints are compared, not engines or groups, of which a worker may have many."""
        loser = self._loser
        self._rounds -= 1
        if loser is None or self._rounds < 0 or loser.source.groups.get(loser.group) is not loser:
            most = max(self._sources.values(), key=_names_of_endpoint, default={})
            loser = max((each for rank in most.values() for each in rank.groups.values()), key=_names, default=None)
            if loser is None:
                return 0
            self._loser, self._rounds = loser, len(loser.names) // (OLD_BLOCKS * _ROUNDS)
        return loser.store.make_room(loser)

    def _entries(self) -> int:
        """Blocks, names of blocks, and what is held more than once: about as large as each other."""
        entries = 0
        for store in self._stores.values():  # asked for every batch, and there is mostly but one
            entries += store.blocks + store.names + store.repeated
        return entries


def _keys_a_token(*sizes: int) -> float:
    return sum([1 / size for size in set(sizes)])


def _names(holder: GroupHolder) -> int:
    return len(holder.names)


def _names_of_endpoint(ranks: dict[int, Source]) -> int:
    return sum([each.names for each in ranks.values()])


def _total(held: Held) -> tuple[int, int, int]:
    return held.tokens, held.gpu, -held.rank
