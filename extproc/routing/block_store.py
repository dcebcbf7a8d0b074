"""Blocks of one size, and who holds each in which tier, as bit masks; found by the engine's hash and by our own key. Pure.

All tables are cut into shards by the low bits of what they are looked up by: a dict that grows is copied in one go, and one
with millions of entries would stop the process for a tenth of a second. What must go over everything (:meth:`Store.tidy`) goes
shard by shard for the same reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice

from extproc.routing.token_chain import KEY_MASK

SHARDS = 4096
LOW = SHARDS - 1
TIERS = 4

_OLD_SHARE = 16
"""Where there is no room left, the oldest of so many parts of a shard goes."""

_Shards = list[dict[int, int]]


class Store:
    """Blocks of ``block_tokens`` tokens. A holder is a number, whose bit is set in the mask of what it holds."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.names: _Shards = [{} for _ in range(SHARDS)]
        """Engine hash -> own key, what was stored last at the end."""
        self.masks: list[_Shards] = [[{} for _ in range(SHARDS)] for _ in range(TIERS)]
        """For each tier: own key -> who holds it there. May have bits of numbers that are given back, see :attr:`alive`."""
        self.alive = 0
        """Numbers that belong to somebody."""
        self.counts: list[Counter[int]] = [Counter() for _ in range(TIERS)]
        """For each tier: number -> how many blocks it holds there."""
        self.totals = [0] * TIERS
        """For each tier: the sum of these. A tier that nobody uses need not be looked at."""
        self.repeats: dict[int, dict[int, int]] = {}
        """Number -> own key and tier -> how many more blocks of equal content it has there than one: each goes by itself."""
        self.blocks = 0
        """Blocks that have a name."""
        self._dead = 0
        self._sweeping = 0
        self._cursor = 0

    # -- holders -----------------------------------------------------------------------------------------------------------

    def new_number(self) -> int:
        """A number for a new holder, the lowest that is free."""
        taken = self.alive | self._dead
        number = (~taken & (taken + 1)).bit_length() - 1
        self.alive |= 1 << number
        return number

    def give_back(self, number: int) -> None:
        """The holder holds nothing any more, and its number is nobody's. What it held is taken out by :meth:`tidy`."""
        bit = 1 << number
        self.alive &= ~bit
        self._dead |= bit
        for tier, counts in enumerate(self.counts):
            self.totals[tier] -= counts.pop(number, 0)
        self.repeats.pop(number, None)

    @property
    def untidy(self) -> bool:
        """Whether :meth:`tidy` has work."""
        return bool(self._dead)

    def tidy(self) -> None:
        """Take what nobody holds any more out of one shard: below a millisecond. Call it until nothing is :attr:`untidy`."""
        if not self._dead:
            return
        if not self._cursor:
            self._sweeping = self._dead
        place = self._cursor % SHARDS
        if self._cursor < SHARDS:
            keep = ~self._sweeping
            for masks in self.masks:
                shard = masks[place]
                for key, mask in list(shard.items()):
                    if mask & self._sweeping:
                        if mask & keep:
                            shard[key] = mask & keep
                        else:
                            del shard[key]
        else:
            names, used = self.names[place], [each for tier, each in enumerate(self.masks) if self.totals[tier]]
            for name, key in list(names.items()):
                at = key & LOW
                for masks in used:
                    if key in masks[at]:
                        break
                else:
                    del names[name]
                    self.blocks -= 1
        self._cursor += 1
        if self._cursor == 2 * SHARDS:
            self._cursor = 0
            self._dead &= ~self._sweeping

    # -- blocks ------------------------------------------------------------------------------------------------------------

    def name(self, engine_hash: int, key: int) -> None:
        """The engine calls the block so."""
        shard = self.names[engine_hash & LOW]
        if engine_hash not in shard:
            self.blocks += 1
        shard[engine_hash] = key

    def add(self, engine_hash: int, key: int, number: int, bit: int, tier: int) -> None:
        """The holder has stored the block: it counts as stored last. ``bit`` is that of ``number``, and always the same object:
        most masks are no more than that.
        """
        shard = self.masks[tier][key & LOW]
        mask = shard.get(key)
        if mask is None:
            shard[key] = bit
        elif mask & bit:
            repeats = self.repeats.setdefault(number, {})
            again = key * TIERS + tier
            repeats[again] = repeats.get(again, 0) + 1
            return
        else:
            shard[key] = mask | bit
            names = self.names[engine_hash & LOW]
            if names.pop(engine_hash, None) is not None:
                names[engine_hash] = key
        self.counts[tier][number] += 1
        self.totals[tier] += 1

    def remove(self, hashes: Iterable[int | bytes], number: int, tier: int) -> int:
        """The holder has one block less of each of these contents. How many it was not known to hold."""
        names, masks, bit = self.names, self.masks[tier], 1 << number
        repeats, alive, totals = self.repeats.get(number), self.alive, self.totals
        elsewhere = [each for other, each in enumerate(self.masks) if other != tier and totals[other]]
        unknown = gone = 0
        for told in hashes:
            name = (told if type(told) is int else engine_hash(told)) & KEY_MASK
            shard = names[name & LOW]
            key = shard.get(name)
            if key is None:
                unknown += 1
                continue
            if repeats and self._one_less(repeats, key * TIERS + tier):
                continue
            place = key & LOW
            holders = masks[place]
            mask = holders.get(key, 0)
            if not mask & bit:
                unknown += 1
                continue
            mask = (mask ^ bit) & alive
            gone += 1
            if mask:
                holders[key] = mask
                continue
            del holders[key]
            if elsewhere and any(key in each[place] for each in elsewhere):
                continue
            del shard[name]
            self.blocks -= 1
        if gone:
            self.counts[tier][number] -= gone
            totals[tier] -= gone
        return unknown

    @staticmethod
    def _one_less(repeats: dict[int, int], again: int) -> bool:
        more = repeats.get(again, 0)
        if more > 1:
            repeats[again] = more - 1
        elif more:
            del repeats[again]
        return more > 0

    def forget(self, key: int, number: int) -> int:
        """The holder does not hold the block in any tier, however often it was stored. How many tiers it was in."""
        found = 0
        for tier, counts in enumerate(self.counts):
            if counts[number] and self._unset(key, number, tier):
                self._once(key, number, tier)
                found += 1
        return found

    def holds(self, key: int, number: int, tier: int) -> bool:
        """Whether it does."""
        return bool(self.masks[tier][key & LOW].get(key, 0) & 1 << number)

    def make_room(self, engine_hash: int) -> int:
        """Forget the oldest blocks of the shard that this one belongs to, or the next one that has any, whoever holds them: how
        many entries went.
        """
        gone, start = 0, engine_hash & LOW
        names = next((each for at in range(SHARDS) if (each := self.names[(start + at) & LOW])), {})
        for name in list(islice(names, max(1, len(names) // _OLD_SHARE))):
            key = names.pop(name)
            self.blocks -= 1
            for tier, masks in enumerate(self.masks):
                mask = masks[key & LOW].pop(key, 0) & self.alive
                for number in bits(mask):
                    self._once(key, number, tier)
                    self._count_down(number, tier)
                    gone += 1
        return gone

    def _unset(self, key: int, number: int, tier: int) -> bool:
        shard, bit = self.masks[tier][key & LOW], 1 << number
        mask = shard.get(key, 0)
        if not mask & bit:
            return False
        mask &= self.alive & ~bit
        if mask:
            shard[key] = mask
        else:
            del shard[key]
        self._count_down(number, tier)
        return True

    def _count_down(self, number: int, tier: int) -> None:
        self.counts[tier][number] -= 1
        self.totals[tier] -= 1

    def _once(self, key: int, number: int, tier: int) -> None:
        repeats = self.repeats.get(number)
        if repeats:
            repeats.pop(key * TIERS + tier, None)


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
