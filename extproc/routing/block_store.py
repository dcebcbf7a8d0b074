"""Blocks of one size, and who holds each in which tier, as bit masks. Pure.

Each holder finds a block by what its engine calls it, in a table of its own: engines store and remove blocks in about the same
order, so what is looked for next lies beside what was looked for last, and is in the processor's cache. Who holds a block is
found by our own key of it, in tables that all share. These are cut into shards: a dict that grows is copied in one go, and one
with millions of entries would stop the process for a tenth of a second. It is the high bits of a key that say which shard, for
a dict begins to look by the low ones, and if these were equal in all of a shard, it would look several times. What must go over
everything (:meth:`Store.tidy`) goes piece by piece for the same reason as shards are there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from itertools import islice

from extproc.routing.token_chain import KEY_MASK

SHARDS = 256
PLACE = KEY_MASK.bit_length() - 8
"""A key without so many low bits is the number of its shard."""
TIERS = 4

OLD_BLOCKS = 64
"""Where there is no room left, so many of the oldest go."""

_TIDIED = 2000
"""So many names are taken out, or blocks looked at, at a time."""

_Shards = list[dict[int, int]]


class Holder:
    """One that holds blocks. Its number is the lowest that is free."""

    __slots__ = ("beside", "bit", "names", "number", "repeats", "store")

    def __init__(self, store: Store) -> None:
        self.beside = False
        """Some of its blocks had more in their hashes than tokens and an adapter: a salt, an image."""
        self.store = store
        self.number = store.join(self)
        self.bit = 1 << self.number
        """Its bit in the masks. It is always this object: most masks are no more than that."""
        self.names: dict[int, int] = {}
        """What its engine calls a block -> own key, what was stored last at the end."""
        self.repeats: tuple[dict[int, int], ...] = tuple([{} for _ in range(TIERS)])
        """For each tier: own key -> how many more blocks of that content it has there than one: each goes by itself."""


class Store:
    """Blocks of ``block_tokens`` tokens."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.masks: list[_Shards] = [[{} for _ in range(SHARDS)] for _ in range(TIERS)]
        """For each tier: own key -> who holds it there. May have bits of numbers that are given back, see :attr:`alive`."""
        self.alive = 0
        """Numbers that belong to somebody."""
        self.counts: list[Counter[int]] = [Counter() for _ in range(TIERS)]
        """For each tier: number -> how many blocks it holds there."""
        self.totals = [0] * TIERS
        """For each tier: the sum of these. A tier that nobody uses need not be looked at."""
        self.repeated = 0
        """How many contents somebody holds more than once in a tier, see :attr:`Holder.repeats`."""
        self.blocks = 0
        """Different blocks in the masks, in whatever tiers."""
        self.names = 0
        """Names of blocks: each holder has its own."""
        self._used: set[int] = set()
        """Tiers that anything was ever stored in."""
        self._others: list[list[_Shards]] = [[] for _ in range(TIERS)]
        self._holders: dict[int, Holder] = {}
        self._left: list[dict[int, int]] = []
        """Names of holders that are gone."""
        self._left_repeats: list[dict[int, int]] = []
        """And what they held more than once."""
        self._dead = 0
        """Numbers that are given back, and whose bits may still be in the masks."""
        self._sweeping = 0
        """Those of them that are being taken out."""
        self._cursor = 0
        """The shard that is at, of all tiers."""
        self._rest: list[int] = []
        """Keys of it that are still to be looked at."""

    # -- holders -----------------------------------------------------------------------------------------------------------

    def join(self, holder: Holder) -> int:
        """A number for a new holder."""
        taken = self.alive | self._dead
        number = (~taken & (taken + 1)).bit_length() - 1
        self.alive |= 1 << number
        self._holders[number] = holder
        return number

    def leave(self, holder: Holder) -> None:
        """It holds nothing any more, and its number is nobody's. What it held is taken out by :meth:`tidy`."""
        number = holder.number
        self.alive &= ~holder.bit
        self._dead |= holder.bit
        del self._holders[number]
        for tier, counts in enumerate(self.counts):
            self.totals[tier] -= counts.pop(number, 0)
        self._left_repeats += [repeats for repeats in holder.repeats if repeats]
        self._left.append(holder.names)

    @property
    def untidy(self) -> bool:
        """Whether :meth:`tidy` has work."""
        return bool(self._dead or self._left or self._left_repeats)

    def tidy(self) -> int:
        """Take some of what nobody holds any more out: below a millisecond. Call it until nothing is :attr:`untidy`. How many
        entries were looked at.
        """
        looked = 0
        if self._left:
            looked = _emptied(self._left)
            self.names -= looked
        elif self._left_repeats:
            looked = _emptied(self._left_repeats)
            self.repeated -= looked
        elif self._dead:
            looked = self._tidy_masks()
        return looked

    def _tidy_masks(self) -> int:
        rest = self._rest
        if not self._cursor and not rest:
            self._sweeping = self._dead
        tier, place = divmod(self._cursor, SHARDS)
        dead, shard = self._sweeping, self.masks[tier][place]
        if not rest:
            rest += shard
        some = rest[-_TIDIED:]
        for key in some:
            mask = shard.get(key, 0)
            if mask & dead:
                self._set(shard, key, mask & ~dead, tier)
        del rest[-_TIDIED:]
        if not rest:
            self._cursor += 1
        if self._cursor == TIERS * SHARDS:
            self._cursor = 0
            self._dead &= ~dead
        return len(some)

    # -- blocks ------------------------------------------------------------------------------------------------------------

    def key_of(self, name: int) -> int | None:
        """Our own key of a block by the name that some holder has for it; None: nobody has. All of them are asked."""
        return next((key for each in self._holders.values() if (key := each.names.get(name)) is not None), None)

    def others(self, tier: int) -> list[_Shards]:
        """The masks of other tiers, as far as they may have any."""
        if tier not in self._used:
            self._used.add(tier)
            self._others = [[self.masks[other] for other in self._used if other != each] for each in range(TIERS)]
        return self._others[tier]

    def add(self, holder: Holder, name: int, key: int, tier: int) -> None:
        """The holder has stored a block, and calls it so: it counts as stored last."""
        names = holder.names
        known = name in names
        if self.hold(holder, key, tier) and known:
            del names[name]
        self.names += not known
        names[name] = key

    def hold(self, holder: Holder, key: int, tier: int) -> bool:
        """The holder has stored a block, and has a name for it. Whether it did not hold one of that content there."""
        shard, bit = self.masks[tier][key >> PLACE], holder.bit
        mask = shard.get(key)
        if mask is None:
            shard[key] = bit
            self.blocks += not any(key in each[key >> PLACE] for each in self.others(tier))
        elif mask & bit:
            repeats = holder.repeats[tier]
            before = repeats.get(key, 0)
            repeats[key] = before + 1
            self.repeated += not before
            return False
        else:
            shard[key] = mask | bit
        self.counts[tier][holder.number] += 1
        self.totals[tier] += 1
        return True

    def remove(self, holder: Holder, hashes: Collection[int | bytes], tier: int) -> int:
        """The holder has one block less of each of these contents. How many it was not known to hold."""
        others = self.others(tier)
        if others:
            return self._remove_from_one(holder, hashes, tier, others)
        names, masks, bit, mask_, low = holder.names, self.masks[tier], holder.bit, KEY_MASK, PLACE
        repeats = holder.repeats[tier]
        find = names.get if repeats else names.pop
        nameless = unheld = again = shared = 0
        for told in hashes:
            name = (told if type(told) is int else engine_hash(told)) & mask_
            key = find(name, None)
            if key is None:
                nameless += 1
                continue
            if repeats:
                if key in repeats:
                    self._one_less(repeats, key)
                    again += 1
                    continue
                del names[name]
            shard = masks[key >> low]
            mask = shard.pop(key, 0)
            if mask is bit or mask == bit:  # mostly nobody else holds it
                continue
            if not mask & bit:
                unheld += 1
                if mask:
                    shard[key] = mask
                continue
            rest = (mask ^ bit) & self.alive
            if rest:
                shard[key] = rest
                shared += 1
        named = len(hashes) - nameless - again
        gone = named - unheld
        self.names -= named
        self.blocks -= gone - shared
        self.counts[tier][holder.number] -= gone
        self.totals[tier] -= gone
        return nameless + unheld

    def _remove_from_one(self, holder: Holder, hashes: Iterable[int | bytes], tier: int, others: list[_Shards]) -> int:
        """The same where it may hold them in other tiers too."""
        names, masks, bit, alive, mask_, low = holder.names, self.masks[tier], holder.bit, self.alive, KEY_MASK, PLACE
        repeats = holder.repeats[tier]
        unknown = gone = nameless = forgotten = 0
        for told in hashes:
            name = (told if type(told) is int else engine_hash(told)) & mask_
            key = names.get(name)
            if key is None:
                unknown += 1
                continue
            if repeats and key in repeats:
                self._one_less(repeats, key)
                continue
            place = key >> low
            shard = masks[place]
            mask = shard.pop(key, 0)
            elsewhere = [each[place][key] for each in others if key in each[place]]
            if mask == bit:
                gone += 1
                forgotten += not elsewhere
            elif not mask & bit:
                unknown += 1
                if mask:
                    shard[key] = mask
            else:
                gone += 1
                rest = (mask ^ bit) & alive
                if rest:
                    shard[key] = rest
                else:
                    forgotten += not elsewhere
            if elsewhere and any(each & bit for each in elsewhere):
                continue
            del names[name]
            nameless += 1
        self.names -= nameless
        self.blocks -= forgotten
        self.counts[tier][holder.number] -= gone
        self.totals[tier] -= gone
        return unknown

    def _one_less(self, repeats: dict[int, int], key: int) -> None:
        more = repeats[key]
        if more > 1:
            repeats[key] = more - 1
        else:
            del repeats[key]
            self.repeated -= 1

    def _forget(self, key: int, holder: Holder) -> int:
        """The holder does not hold the block in any tier, however often it was stored. How many tiers it was in."""
        found = 0
        for tier, counts in enumerate(self.counts):
            if counts[holder.number] and self._unset(key, holder, tier):
                found += 1
        return found

    def holds(self, key: int, number: int, tier: int) -> bool:
        """Whether it does."""
        return bool(self.masks[tier][key >> PLACE].get(key, 0) & 1 << number)

    def make_room(self, holder: Holder) -> int:
        """A holder loses the oldest of its blocks: how many entries went."""
        gone, names = 0, holder.names
        for name in list(islice(names, OLD_BLOCKS)):
            gone += self._forget(names.pop(name), holder)
            self.names -= 1
        return gone

    def emptying(self, holder: Holder, tier: int) -> Iterator[None]:
        """A holder holds nothing in a tier any more; with stops for breath. It must not leave before the next piece is asked
        for.
        """
        names, number = holder.names, holder.number
        rest = list(names)
        while rest:
            for name in rest[-OLD_BLOCKS:]:
                key = names.get(name)
                if key is None:
                    continue
                self._unset(key, holder, tier)
                if not any(self.holds(key, number, other) for other in range(TIERS)):
                    del names[name]
                    self.names -= 1
            del rest[-OLD_BLOCKS:]
            yield

    def _unset(self, key: int, holder: Holder, tier: int) -> bool:
        shard, bit = self.masks[tier][key >> PLACE], holder.bit
        mask = shard.get(key, 0)
        if not mask & bit:
            return False
        self._set(shard, key, mask & self.alive & ~bit, tier)
        self.counts[tier][holder.number] -= 1
        self.totals[tier] -= 1
        if holder.repeats[tier].pop(key, 0):
            self.repeated -= 1
        return True

    def _set(self, shard: dict[int, int], key: int, mask: int, tier: int) -> None:
        """Who holds a block that somebody held, in the shard of a tier."""
        if mask:
            shard[key] = mask
            return
        del shard[key]
        self.blocks -= not any(key in each[key >> PLACE] for each in self.others(tier))


def _emptied(left: list[dict[int, int]]) -> int:
    """Take a piece out of the last; how many entries."""
    entries = left[-1]
    count = min(_TIDIED, len(entries))
    for _ in range(count):
        entries.popitem()
    if not entries:
        left.pop()
    return count


def bits(mask: int) -> Iterator[int]:
    """The numbers of the bits that are set, lowest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def engine_hash(told: int | bytes) -> int:
    """What the engine calls a block, as we keep it. vLLM sends the low 64 bits of its hash, or all bytes of it
    (VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0); both become the low 60 bits. For the length of ours see ``KEY_MASK``.
    """
    return (told if isinstance(told, int) else int.from_bytes(told[-8:], "big")) & KEY_MASK
