"""Events that say which blocks were stored -> entries of a :class:`Store`. Pure.

This is most of what an event costs. Nearly all events are alike: they are about the same cache group, have all their tokens and
nothing beside them. So those are taken together, some hundred blocks at a time.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import islice
from struct import iter_unpack
from typing import Any, NamedTuple, Protocol

import xxhash

from extproc.routing.block_store import PLACE, Holder, engine_hash
from extproc.routing.token_chain import KEY_MASK, TOKEN_BYTES, extra_bytes

PIECE_BLOCKS = 256
"""So many blocks are entered at a time: half a millisecond."""

_BREATH = 1023
"""After so many events there is a stop."""

_NONE = -2
"""In holder of a group: whatever comes next is another one."""


class StoredBlocks(Protocol):
    """An event: consecutive blocks were stored. The fields are vLLM's (distributed/kv_events.py)."""

    @property
    def block_hashes(self) -> Sequence[int | bytes]:
        """The engine's hashes."""

    @property
    def parent_block_hash(self) -> int | bytes | None:
        """That of the block before them; None: they begin a prompt."""

    @property
    def token_ids(self) -> list[int]:
        """Of all of them, or none."""

    @property
    def block_size(self) -> int:
        """Tokens of a block; 0 where there are no token ids."""

    @property
    def lora_id(self) -> int | None:
        """The adapter's number."""

    @property
    def lora_name(self) -> str | None:
        """Its name, which old versions did not send."""

    @property
    def extra_keys(self) -> Sequence[Sequence[Any] | None] | None:
        """Of each block, what its hash covers beside its tokens."""

    @property
    def group_idx(self) -> int | None:
        """The cache group."""

    @property
    def kv_cache_spec_kind(self) -> str | None:
        """And its kind."""


class Stored(NamedTuple):
    """An event that somebody made of its parts."""

    block_hashes: Sequence[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_name: str | None
    extra_keys: Sequence[Sequence[Any] | None] | None
    group_idx: int | None
    kv_cache_spec_kind: str | None
    lora_id: int | None = None


class Seen:
    """What came in events and does not stand in the holdings, counted since the start."""

    __slots__ = ("orphans", "other_groups", "unknown_removed")

    def __init__(self) -> None:
        self.orphans = 0
        """Blocks stored behind one that is not known: nobody knows which prompt they belong to."""
        self.unknown_removed = 0
        """Blocks removed that were not known to be there."""
        self.other_groups = 0
        """Blocks of groups that do not decide, and of other sizes than their group's."""


def ordering(events: Sequence[StoredBlocks]) -> Generator[None, None, Sequence[StoredBlocks]]:
    """The same events, each behind the one that has its parent, if one of them has; with stops for breath.

    vLLM's tier in host memory tells of the blocks of one copy in any order (``offloading/scheduler.py`` keeps their keys in a
    set), and the GPU may have dropped its own by then, so that nothing else says what a parent is.
    """
    if len(events) < 2:
        return events
    where: dict[int | bytes, int] = {}
    awaited: set[int | bytes] = set()
    in_order = True
    for at, event in enumerate(events):
        if at & _BREATH == _BREATH:
            yield
        if event.parent_block_hash is not None and event.parent_block_hash not in where:
            awaited.add(event.parent_block_hash)
        for name in event.block_hashes:
            where[name] = at
            in_order = in_order and name not in awaited
    if in_order:
        return events
    placed = bytearray(len(events))
    ordered: list[StoredBlocks] = []
    for start in range(len(events)):
        if start & _BREATH == _BREATH:
            yield
        chain: list[StoredBlocks] = []
        found: int | None = start
        while found is not None and not placed[found]:
            placed[found] = 1
            chain.append(events[found])
            parent = events[found].parent_block_hash
            found = None if parent is None else where.get(parent)
        ordered += reversed(chain)
    return ordered


class Owner(Protocol):
    """Of all stores: it knows how much room there is."""

    seen: Seen

    def seed(self, lora: str | None) -> int:
        """What stands before the first block of a prompt for an adapter."""

    def room(self) -> int:
        """For so many new blocks there is room, at least one: the oldest go if there was none."""


def entering(
    owner: Owner,
    holder_of: Callable[[int, str | None, int], Holder | None],
    events: Iterable[StoredBlocks],
    tier: int,
) -> Iterator[int]:
    """Enter the blocks of ``events`` into a tier, and stop for breath after every piece: how many blocks were told since the
    last.

    ``holder_of``: cache group, its kind and its block size -> where its blocks go, None: nowhere. It is asked again after each
    stop, for the engine may have been forgotten meanwhile. A block whose hash is known needs no tokens. Raises OverflowError
    and TypeError for token ids that are none.
    """
    group: int | None = _NONE
    block_tokens = told = 0
    kind: str | None = None
    mask_ = KEY_MASK
    holder: Holder | None = None
    hashes: list[int | bytes] = []
    parents: list[int | None] = []
    tokens = array("I")
    pack = tokens.fromlist
    for event in events:
        if event.group_idx != group or event.block_size != block_tokens or event.kv_cache_spec_kind != kind:
            if holder is not None and hashes:
                enter(owner, holder, tier, hashes, parents, tokens)
                hashes, parents, tokens = [], [], array("I")
                pack = tokens.fromlist
            group, block_tokens, kind = event.group_idx, event.block_size, event.kv_cache_spec_kind
            holder = holder_of(group or 0, kind, block_tokens)
        names, ids, extras = event.block_hashes, event.token_ids, event.extra_keys
        count = len(names)
        told += count
        if holder is None:
            owner.seen.other_groups += count
            continue
        odd = len(ids) != count * block_tokens or not block_tokens or (extras and (any(extras) if count > 1 else extras[0]))
        if odd or (tier and holder.beside and extras is None):
            if hashes:
                enter(owner, holder, tier, hashes, parents, tokens)
                hashes, parents, tokens = [], [], array("I")
                pack = tokens.fromlist
            for start in range(0, count, PIECE_BLOCKS):
                holder = holder_of(group or 0, kind, block_tokens)
                if holder is not None:
                    _enter_odd(owner, holder, tier, event, range(start, min(start + PIECE_BLOCKS, count)))
                yield told
                told = 0
            group = _NONE
            continue
        parent = event.parent_block_hash
        hashes += names
        pack(ids)
        parents.append(parent & mask_ if type(parent) is int else name_before(owner, event))
        if count > 1:
            parents += [None] * (count - 1)
        if len(hashes) < PIECE_BLOCKS:
            continue
        for start in range(0, len(hashes), PIECE_BLOCKS):
            end = start + PIECE_BLOCKS
            if start:
                holder = holder_of(group or 0, kind, block_tokens)
                if parents[start] is None:
                    parents[start] = _name(hashes[start - 1])
            if holder is not None:
                some = tokens[start * block_tokens : end * block_tokens]
                enter(owner, holder, tier, hashes[start:end], parents[start:end], some)
            yield told
            told = 0
        hashes, parents, tokens = [], [], array("I")
        pack = tokens.fromlist
        group = _NONE  # whoever the holder belonged to may be gone by now
    if holder is not None and hashes:
        enter(owner, holder, tier, hashes, parents, tokens)
    if told:
        yield told


def enter(
    owner: Owner,
    holder: Holder,
    tier: int,
    hashes: Sequence[int | bytes],
    parents: Sequence[int | None],
    tokens: array[int],
) -> None:
    """Blocks that have their tokens and nothing beside them. ``parents``: for each the name of the block before it, ~ of a key:
    what stands before the first block of a prompt, None: it follows the one before.
    """
    store, names, bit, low = holder.store, holder.names, holder.bit, PLACE
    masks, others, repeats = store.masks[tier], store.others(tier), holder.repeats[tier]
    digest, mask_, known_as = xxhash.xxh3_64_intdigest, KEY_MASK, names.get
    before: int | None = None
    rest = zip(hashes, parents, iter_unpack(f"{store.block_tokens * TOKEN_BYTES}s", tokens), strict=True)
    left = len(hashes)
    while left > 0:
        room = owner.room()
        fresh = elsewhere = more = 0
        for told, parent, (block,) in islice(rest, room):
            name = (told if type(told) is int else engine_hash(told)) & mask_
            if parent is not None:
                before = known_as(parent) if parent >= 0 else ~parent
            key = known_as(name)
            if key is None:
                if before is None:
                    owner.seen.orphans += 1
                    continue
                before = names[name] = key = digest(block, before) & mask_
                shard = masks[key >> low]
                if key in shard:
                    more += 1
                    store.hold(holder, key, tier)
                    continue
                shard[key] = bit
                fresh += 1
                if others and any(key in each[key >> low] for each in others):
                    elsewhere += 1
                continue
            before = key
            if masks[key >> low].get(key) is bit:
                again = repeats.get(key)
                if again is None:
                    repeats[key] = 1
                    store.repeated += 1
                else:
                    repeats[key] = again + 1
            else:
                store.add(holder, name, key, tier)
        left -= room
        store.names += fresh + more
        store.blocks += fresh - elsewhere
        store.counts[tier][holder.number] += fresh
        store.totals[tier] += fresh


def name_before(owner: Owner, event: StoredBlocks) -> int:
    """What stands before the first block of an event: the name of a block, or ~ of a key."""
    parent = event.parent_block_hash
    return ~owner.seed(_adapter(event)) if parent is None else _name(parent)


def _enter_odd(owner: Owner, holder: Holder, tier: int, event: StoredBlocks, which: range) -> None:
    """Those blocks of an event that may have no tokens, or something beside them."""
    store, names, hashes, extras = holder.store, holder.names, event.block_hashes, event.extra_keys
    size = store.block_tokens
    data = b""
    # vLLM's tier in host memory says nothing of salts and images (offloading/events.py: extra_keys=None). Where the engine has
    # such prompts, tokens alone might be those of another one: then only hashes count that the GPU's events have explained.
    unsaid = tier and extras is None and holder.beside
    if len(event.token_ids) == len(hashes) * size and not unsaid:
        data = array("I", event.token_ids[which.start * size : which.stop * size]).tobytes()
    parent = hashes[which.start - 1] if which.start else event.parent_block_hash
    before = owner.seed(_adapter(event)) if parent is None else names.get(_name(parent))
    for offset, at in enumerate(which):
        name = _name(hashes[at])
        key = names.get(name)
        if key is None and data and before is not None:
            block = data[offset * size * TOKEN_BYTES : (offset + 1) * size * TOKEN_BYTES]
            beside = extras[at] if extras and at < len(extras) else None
            more = _extras_of(beside, _adapter(event)) if beside else b""
            if more:
                holder.beside = True
            key = xxhash.xxh3_64_intdigest(block + more, before) & KEY_MASK
        elif key is None:
            key = store.key_of(name)
        before = key
        if key is None:
            owner.seen.orphans += 1
            continue
        if name not in names:
            owner.room()
        store.add(holder, name, key, tier)


def _name(told: int | bytes) -> int:
    return (told if type(told) is int else engine_hash(told)) & KEY_MASK


def _adapter(event: StoredBlocks) -> str | None:
    """The adapter's name. Old versions of vLLM sent but its number, which no prompt of ours has."""
    if event.lora_name is not None:
        return event.lora_name or None
    return None if event.lora_id is None else f"\0{event.lora_id}"


def _extras_of(keys: Sequence[Any], lora: str | None) -> bytes:
    """What an event says that a block's hash covers beside its tokens, as our own keys cover it.

    vLLM publishes these without names (``to_event_extra_keys``): the adapter's name first, where there is one; pairs of
    multimodal identity and offset; the salt; digests of embeddings. What is none of these makes the block nobody's.
    """
    items: list[tuple[str, int]] = []
    salts: list[str] = []
    digests: list[bytes] = []
    for holder, key in enumerate(keys):
        if isinstance(key, str):
            if holder or key != lora:
                salts.append(key)
        elif isinstance(key, bytes):
            digests.append(key)
        elif isinstance(key, Sequence) and len(key) == 2 and isinstance(key[0], str) and type(key[1]) is int:
            items.append((key[0], max(-(1 << 62), min(key[1], 1 << 62))))
        else:
            digests.append(repr(key).encode())
    return extra_bytes(items, salts=salts, digests=digests)
