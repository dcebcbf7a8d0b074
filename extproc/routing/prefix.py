"""Prompt -> chain of block hashes; which endpoint holds which prefix."""

from __future__ import annotations

import heapq
from array import array
from itertools import islice

import msgspec
import xxhash

_PARTS = 64
"""Of the dict of holders: a dict that outgrows its table moves to another in one go, 40 ms for a million blocks."""
_PART = _PARTS - 1


class Chain(msgspec.Struct, frozen=True):
    """A prompt as the hashes of its blocks, each over the block and all before it."""

    hashes: array[int]
    """64-bit unsigned, one a full block."""
    block_tokens: float
    """Tokens of a block, estimated or exact."""


def chain_of(data: bytes, seed: bytes, block_bytes: int, block_tokens: float) -> Chain:
    """The chain of ``data`` in blocks of ``block_bytes``; a last block that is not full does not count.

    ``seed`` is what must be equal, beside the text, for two prompts to share KV blocks. Each hash is seeded by the one before.
    The hash is fast, not cryptographic: who forges a collision gets a request placed badly, never a wrong answer, because
    the engine has hashes of its own. Raises ValueError for a block of no bytes.
    """
    if block_bytes < 1:
        raise ValueError(f"block_bytes must be at least 1, not {block_bytes}")
    digest = xxhash.xxh3_64_intdigest
    before = digest(seed)
    hashes = []
    for start in range(0, len(data) - block_bytes + 1, block_bytes):
        before = digest(data[start : start + block_bytes], before)
        hashes.append(before)
    return Chain(array("Q", hashes), block_tokens)


class _Holder:
    """One endpoint's blocks."""

    __slots__ = ("address", "bit", "blocks", "capacity", "slot")

    def __init__(self, address: str, slot: int) -> None:
        self.address = address
        self.slot = slot
        self.bit = 1 << slot
        self.capacity: int | None = None
        """Blocks that it can hold; None: not known, and only the total limit holds."""
        self.blocks: dict[int, int] = {}
        """Hash -> the same object, oldest use first. A plain dict: an OrderedDict would take twice the memory."""


class PrefixIndex:
    """Which endpoint holds which block, as far as we know: every endpoint's least recently used blocks go first.

    A dict (in parts) has the holders of a block as a bit mask, so that a prompt is walked once for all endpoints. Every
    endpoint has a dict of its blocks in the order of their use. Neighbouring blocks mostly have the same holders and share
    one mask object, which saves memory and most of the arithmetic of a walk.
    """

    def __init__(self, max_blocks: int) -> None:
        """``max_blocks`` limits the entries, one for each block and endpoint. Raises ValueError below 1."""
        if max_blocks < 1:
            raise ValueError(f"max_blocks must be at least 1, not {max_blocks}")
        self._max_blocks = max_blocks
        self._parts: tuple[dict[int, int], ...] = tuple({} for _ in range(_PARTS))
        self._holders: dict[str, _Holder] = {}
        self._by_slot: list[_Holder | None] = []
        self._free_slots: list[int] = []
        self._blocks = 0
        self._evictions = 0

    @property
    def blocks(self) -> int:
        """Entries in total: a block that three endpoints hold counts three times."""
        return self._blocks

    @property
    def evictions(self) -> int:
        """Entries that had to go for newer ones, ever. What was dropped, cleared or corrected does not count."""
        return self._evictions

    def held(self, address: str) -> int:
        """Blocks that an endpoint holds, as far as we know."""
        holder = self._holders.get(address)
        return len(holder.blocks) if holder else 0

    def slot(self, address: str) -> int:
        """The number of an endpoint, from now on if it had none: small, and another's after :meth:`drop`."""
        return self._holder(address).slot

    def drop(self, address: str) -> None:
        """The endpoint is gone."""
        self.clear(address)
        holder = self._holders.pop(address, None)
        if holder:
            self._by_slot[holder.slot] = None
            heapq.heappush(self._free_slots, holder.slot)  # the lowest is used first, which keeps the masks short

    def clear(self, address: str) -> None:
        """The endpoint holds nothing any more: it was started again, or its cache was reset."""
        holder = self._holders.get(address)
        if holder:
            self._forget(holder, list(holder.blocks))
            holder.blocks = {}  # an emptied dict keeps its table

    def set_capacity(self, address: str, blocks: int) -> None:
        """What fits into the endpoint's KV cache, in blocks of a chain. Raises ValueError below 1."""
        if blocks < 1:
            raise ValueError(f"the capacity of {address} must be at least 1 block, not {blocks}")
        holder = self._holder(address)
        holder.capacity = blocks
        self._evict(holder, len(holder.blocks) - blocks)

    def lookup(self, chain: Chain, most: int | None = None) -> dict[str, int]:
        """Address -> how many leading blocks it holds, for all that hold the first one, those that hold most of them first.

        At least ``most`` of them, if there are so many: a thousand may hold the same beginning.
        """
        lengths: list[tuple[int, int]] = []
        """Who holds how much, as masks, the shortest first."""
        parts = self._parts
        holding = 0
        before: int | None = None
        for length, block in enumerate(chain.hashes):
            mask = parts[block & _PART].get(block, 0)
            if mask is before:
                continue
            before = mask
            still = mask & holding if length else mask
            if still != holding:
                lengths.append((holding & ~still, length))
                holding = still
            if not holding:
                break
        else:
            lengths.append((holding, len(chain.hashes)))
        found: dict[str, int] = {}
        for mask, length in reversed(lengths):
            if most is not None and len(found) >= most:
                break
            self._note(found, mask, length, most)
        return found

    def matched(self, chain: Chain, address: str) -> int:
        """How many leading blocks of the chain the endpoint holds."""
        holder = self._holders.get(address)
        if holder is None:
            return 0
        blocks = holder.blocks
        for length, block in enumerate(chain.hashes):
            if block not in blocks:
                return length
        return len(chain.hashes)

    def insert(self, address: str, chain: Chain, blocks: int | None = None) -> None:
        """The endpoint holds, or has just used, the first ``blocks`` blocks of the chain; None: all of them.

        The tail counts as used before the head, because the engine frees the tail first.
        """
        holder = self._holder(address)
        limit = min(self._max_blocks, holder.capacity or self._max_blocks)
        hashes = chain.hashes[: limit if blocks is None else max(0, min(blocks, limit))]
        own, parts, bit = holder.blocks, self._parts, holder.bit
        size = len(own)
        alone = mask_before = mask_after = bit
        for block in reversed(hashes):
            known = own.pop(block, None)
            if known is not None:
                own[known] = known  # not `block`: mostly the object that is the key in _parts, so that there is one
                continue
            own[block] = block
            masks = parts[block & _PART]
            mask = masks.get(block)
            if mask is None:
                masks[block] = alone
                continue
            if mask is not mask_before:
                mask_before, mask_after = mask, mask | bit
            masks[block] = mask_after
        self._blocks += len(own) - size
        if holder.capacity is not None:
            self._evict(holder, len(own) - holder.capacity)
        while self._blocks > self._max_blocks:
            fullest = max(self._holders.values(), key=_size)
            self._evict(fullest, min(self._blocks - self._max_blocks, len(fullest.blocks)))

    def correct(self, address: str, chain: Chain, held_blocks: int) -> None:
        """The engine found only the first ``held_blocks`` blocks of the chain in its cache: forget the others.

        Call it before :meth:`insert` says that the prompt has been computed. Other endpoints keep theirs. Blocks of another
        prompt that follow a forgotten one cannot be found until it is back, and age like any other.
        """
        holder = self._holders.get(address)
        if holder:
            wrong = [block for block in chain.hashes[max(0, held_blocks) :] if block in holder.blocks]
            self._forget(holder, wrong)

    def _holder(self, address: str) -> _Holder:
        holder = self._holders.get(address)
        if holder is None:
            if self._free_slots:
                holder = _Holder(address, heapq.heappop(self._free_slots))
                self._by_slot[holder.slot] = holder
            else:
                holder = _Holder(address, len(self._by_slot))
                self._by_slot.append(holder)
            self._holders[address] = holder
        return holder

    def _note(self, found: dict[str, int], mask: int, length: int, most: int | None) -> None:
        """Every endpoint of ``mask`` holds ``length`` blocks; enter them until there are ``most``."""
        bits = bin(mask)[:1:-1]  # one pass, whatever the number of endpoints; shifting a long mask is quadratic
        slot = bits.find("1")
        while slot >= 0:
            holder = self._by_slot[slot]
            if holder:
                found[holder.address] = length
                if len(found) == most:
                    return
            slot = bits.find("1", slot + 1)

    def _evict(self, holder: _Holder, count: int) -> None:
        """The oldest ``count`` blocks, all at once: a dict's first key is slow to find after the one before was deleted."""
        if count > 0:
            self._forget(holder, list(islice(holder.blocks, count)))
            self._evictions += count

    def _forget(self, holder: _Holder, blocks: list[int]) -> None:
        """Take out blocks that the endpoint holds."""
        own, parts, bit = holder.blocks, self._parts, holder.bit
        mask_before = mask_after = 0
        for block in blocks:
            del own[block]
            masks = parts[block & _PART]
            mask = masks[block]
            if mask is not mask_before:
                mask_before, mask_after = mask, mask & ~bit
            if mask_after:
                masks[block] = mask_after
            else:
                del masks[block]
        self._blocks -= len(blocks)


def _size(holder: _Holder) -> int:
    return len(holder.blocks)
