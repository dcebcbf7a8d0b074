"""Prompt -> chain of block hashes; which endpoint holds which prefix."""

from __future__ import annotations

import heapq
from array import array
from collections import OrderedDict

import msgspec
import xxhash

_STRIDE = 8
"""Every so many blocks of a prompt, the first one included, it is noted who holds that block: where many do, those that hold
most are found by that."""

_BLOCK_BYTES, _RUN_BYTES = 30, 680
"""What a block in a long run takes, and a run by itself: measured with bench.prefix_index."""

_BYTES_A_BLOCK = 250
_LEAST_BYTES = 160 << 20
"""An index may take so many bytes for each block of its limit, but always so many: a limit of few blocks costs little."""

_FEW = 64
"""So many that hold the first block are all asked how much they hold."""


class Chain(msgspec.Struct, frozen=True):
    """A prompt as the hashes of its blocks, each over the block and all before it."""

    hashes: array[int]
    """64-bit unsigned, one a full block."""
    block_tokens: float
    """Tokens of a block, estimated or exact."""


def chain_of(data: bytes | memoryview, seed: bytes, block_bytes: int, block_tokens: float) -> Chain:
    """The chain of ``data`` in blocks of ``block_bytes``; a last block that is not full does not count.

    ``seed`` is what must be equal, beside the text, for two prompts to share KV blocks. Each hash is seeded by the one before.
    The hash is fast, not cryptographic: who forges a collision gets a request placed badly, never a wrong answer, because
    the engine has hashes of its own. Raises ValueError for a block of no bytes.
    """
    if block_bytes < 1:
        raise ValueError(f"block_bytes must be at least 1, not {block_bytes}")
    return Chain(hashes_of(data, xxhash.xxh3_64_intdigest(seed), block_bytes), block_tokens)


def hashes_of(data: bytes | memoryview, before: int, block_bytes: int) -> array[int]:
    """The hashes of the full blocks of ``data``; ``before`` is that of the block which stands before it, or of the seed."""
    digest = xxhash.xxh3_64_intdigest
    starts = range(0, len(data) - block_bytes + 1, block_bytes)
    return array("Q", [before := digest(data[start : start + block_bytes], before) for start in starts])


class _Run:
    """Blocks that follow each other, and were used together last."""

    __slots__ = ("hashes", "start")

    def __init__(self, hashes: array[int], start: int) -> None:
        self.hashes = hashes
        """Never changed in place: it may be a prompt's own."""
        self.start = start
        """Blocks of its prompts that stand before the first of these."""


class _Holder:
    """One endpoint's blocks.

    Whoever holds a block holds all before it, because its engine frees the tail of a prompt first. So what a prompt found here
    is a few runs in a row, and the next use of it makes one of them.
    """

    __slots__ = ("address", "bit", "blocks", "capacity", "runs", "slot", "starts", "torn")

    def __init__(self, address: str, slot: int) -> None:
        self.address = address
        self.slot = slot
        self.bit = 1 << slot
        self.capacity: int | None = None
        """Blocks that it can hold; None: not known, and only the total limit holds."""
        self.runs: OrderedDict[_Run, None] = OrderedDict()
        """Oldest use first. Of a run, the tail counts as used before the head."""
        self.starts: dict[int, _Run] = {}
        """First hash of a run -> the run."""
        self.blocks = 0
        self.torn = 0
        """Blocks that may stand behind one that was found missing, at the most: these must be looked for."""

    def matched(self, hashes: array[int]) -> int:
        """How many leading blocks of a prompt it holds."""
        starts, count, at = self.starts, len(hashes), 0
        while at < count:
            run = starts.get(hashes[at])
            if run is None:
                break
            own = run.hashes
            end = at + len(own)
            if end <= count and own[-1] == hashes[end - 1]:  # mostly the whole run
                at = end
            else:
                at += _common(own, hashes, at)
        return at


class PrefixIndex:
    """Which endpoint holds which block, as far as we know: every endpoint's least recently used blocks go first.

    An endpoint's blocks are kept as runs, so the time that a prompt takes grows with the number of prompts that it shares its
    beginning with, not with its length, and a block takes the eight bytes of its hash. A dict has the holders of a prompt's
    first block, and of every eighth, as a bit mask.
    """

    def __init__(self, max_blocks: int) -> None:
        """``max_blocks`` limits the entries, one for each block and endpoint, and by that the memory: 250 bytes for each, or
        160 MiB if that is more. Blocks of prompts that have but one or two take more than that, so fewer of them are kept.
        Raises ValueError below 1.
        """
        if max_blocks < 1:
            raise ValueError(f"max_blocks must be at least 1, not {max_blocks}")
        self._max_blocks = max_blocks
        self._max_bytes = max(max_blocks * _BYTES_A_BLOCK, _LEAST_BYTES)
        self._runs = 0
        self._masks: dict[int, int] = {}
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
        return holder.blocks if holder else 0

    def addresses(self) -> list[str]:
        """Endpoints that were heard of."""
        return list(self._holders)

    def recent(self, address: str, most: int) -> array[int]:
        """The blocks that the endpoint used last, at most so many: the last prompt from its head on, then the one before."""
        found = array("Q")
        holder = self._holders.get(address)
        for run in reversed(holder.runs) if holder else ():
            if len(found) >= most:
                break
            found += run.hashes[: most - len(found)]
        return found

    def runs(self, address: str) -> list[array[int]]:
        """An endpoint's blocks as they follow each other in prompts, what was used last at the end. Not to be changed."""
        holder = self._holders.get(address)
        return [run.hashes for run in holder.runs] if holder else []

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
            for run in holder.runs:
                self._unmask(holder, run, 0)
            self._runs -= len(holder.runs)
            holder.runs, holder.starts = OrderedDict(), {}  # emptied ones keep their tables
            self._blocks -= holder.blocks
            holder.blocks = holder.torn = 0

    def set_capacity(self, address: str, blocks: int) -> None:
        """What fits into the endpoint's KV cache, in blocks of a chain. Raises ValueError below 1."""
        if blocks < 1:
            raise ValueError(f"the capacity of {address} must be at least 1 block, not {blocks}")
        holder = self._holder(address)
        holder.capacity = blocks
        self._evict(holder, holder.blocks - blocks)

    def lookup(self, chain: Chain, most: int | None = None) -> dict[str, int]:
        """Address -> how many leading blocks it holds, for all that hold the first one, those that hold most of them first.

        At least ``most`` of them, if there are so many: a thousand may hold the same beginning. Which of them are the ``most``
        may be wrong by seven blocks.
        """
        hashes = chain.hashes
        first = self._masks.get(hashes[0], 0) if len(hashes) else 0
        if not first:
            return {}
        found: list[tuple[int, int, str]] = []
        if most is None or first.bit_count() <= max(most, _FEW):
            self._measure(found, first, hashes)
        else:
            self._measure_most(found, first, hashes, most)
        found.sort()
        return {address: -length for length, _, address in found}

    def matched(self, chain: Chain, address: str) -> int:
        """How many leading blocks of the chain the endpoint holds."""
        holder = self._holders.get(address)
        return holder.matched(chain.hashes) if holder else 0

    def insert(self, address: str, chain: Chain, blocks: int | None = None) -> None:
        """The endpoint holds, or has just used, the first ``blocks`` blocks of the chain; None: all of them.

        The tail counts as used before the head, because the engine frees the tail first.
        """
        holder = self._holder(address)
        limit = min(self._max_blocks, holder.capacity or self._max_blocks)
        hashes, count = chain.hashes, len(chain.hashes)
        wanted = min(count, limit if blocks is None else max(0, min(blocks, limit)))
        if wanted < count:
            hashes, count = hashes[:wanted], wanted
        if not count:
            return
        starts, runs, masks, bit = holder.starts, holder.runs, self._masks, holder.bit
        new = at = 0
        while at < count:
            run = starts.get(hashes[at])
            if run is not None:
                own = run.hashes
                last = at + len(own)
                if last <= count and own[-1] == hashes[last - 1]:  # mostly the whole run
                    del starts[own[0]], runs[run]
                    self._runs -= 1
                    at = last
                    continue
                common = _common(own, hashes, at)
                self._cut(holder, run, common)
                at += common
                continue
            end = count
            if holder.torn:
                end = next((place for place in range(at + 1, count) if hashes[place] in starts), count)
            for place in range(-(-at // _STRIDE) * _STRIDE, end, _STRIDE):
                block = hashes[place]
                masks[block] = masks.get(block, 0) | bit
            new += end - at
            at = end
        self._start(holder, _Run(hashes, 0))
        holder.blocks += new
        self._blocks += new
        if holder.capacity is not None and holder.blocks > holder.capacity:
            self._evict(holder, holder.blocks - holder.capacity)
        while self._blocks > self._max_blocks:
            fullest = max(self._holders.values(), key=_size)
            self._evict(fullest, min(self._blocks - self._max_blocks, fullest.blocks))
        while self._blocks * _BLOCK_BYTES + self._runs * _RUN_BYTES > self._max_bytes:
            fullest = max(self._holders.values(), key=_bytes)
            self._evict(fullest, len(next(iter(fullest.runs)).hashes))
        if len(masks) > 2 * self._max_blocks:
            self._mask_again()

    def correct(self, address: str, chain: Chain, held_blocks: int) -> None:
        """The engine found only the first ``held_blocks`` blocks of the chain in its cache: forget the others.

        Call it before :meth:`insert` says that the prompt has been computed. Other endpoints keep theirs. Blocks of another
        prompt that follow a forgotten one cannot be found until it is back, and age like any other.
        """
        holder = self._holders.get(address)
        if not holder:
            return
        hashes, before = chain.hashes, holder.blocks
        keep, at, count = max(0, held_blocks), 0, len(chain.hashes)
        while at < count:
            run = holder.starts.get(hashes[at])
            if run is None:
                if not holder.torn:
                    break
                at += 1
                continue
            common = _common(run.hashes, hashes, at)
            kept = min(max(keep - at, 0), common)
            if kept < common:
                self._cut_out(holder, run, kept, common)
            at += common
        if holder.blocks < before:
            holder.torn = holder.blocks

    # -- parts of the above ------------------------------------------------------------------------------------------------

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

    def _measure(self, found: list[tuple[int, int, str]], mask: int, hashes: array[int]) -> None:
        """Enter all of ``mask`` that hold something: how much (below zero, to be sorted by), slot, address."""
        bits = bin(mask)[:1:-1]  # one pass, whatever the number of endpoints; shifting a long mask is quadratic
        slot = bits.find("1")
        while slot >= 0:
            holder = self._by_slot[slot]
            length = holder.matched(hashes) if holder else 0
            if holder and length:
                found.append((-length, slot, holder.address))
            slot = bits.find("1", slot + 1)

    def _measure_most(self, found: list[tuple[int, int, str]], first: int, hashes: array[int], most: int) -> None:
        """Those of ``first`` that hold most, until there are ``most``."""
        masks, seen = self._masks, 0
        for place in reversed(range(0, len(hashes), _STRIDE)):
            mask = masks.get(hashes[place], 0) & first & ~seen
            if not mask:
                continue
            seen |= mask
            missing = most - len(found)
            if mask.bit_count() > missing:
                bits = bin(mask)[:1:-1]
                slot = -1
                for _ in range(missing):
                    slot = bits.find("1", slot + 1)
                mask &= (1 << (slot + 1)) - 1
            self._measure(found, mask, hashes)
            if len(found) >= most:
                break

    def _start(self, holder: _Holder, run: _Run) -> None:
        """A run begins to be; it is the last used, unless it is one of those already."""
        block = run.hashes[0]
        other = holder.starts.get(block)
        if other is not None and other is not run:  # two prompts whose hashes collide: the older one has to go
            self._unmask(holder, other, 0)
            holder.blocks -= len(other.hashes)
            self._blocks -= len(other.hashes)
            del holder.runs[other]
            self._runs -= 1
        holder.starts[block] = run
        if run not in holder.runs:
            self._runs += 1
            holder.runs[run] = None

    def _cut(self, holder: _Holder, run: _Run, count: int) -> None:
        """Take the first ``count`` blocks out of a run, without a word about who holds them."""
        hashes = run.hashes
        del holder.starts[hashes[0]]
        if count == len(hashes):
            del holder.runs[run]
            self._runs -= 1
            return
        run.hashes, run.start = hashes[count:], run.start + count
        self._start(holder, run)

    def _cut_out(self, holder: _Holder, run: _Run, first: int, end: int) -> None:
        """Forget the blocks from ``first`` to ``end`` of a run; what stands before and behind them keeps its age."""
        hashes = run.hashes
        self._unmask(holder, _Run(hashes[first:end], run.start + first), 0)
        holder.blocks -= end - first
        self._blocks -= end - first
        if not first:
            self._cut(holder, run, end)
            return
        run.hashes = hashes[:first]
        if end < len(hashes):
            # Older than the run, and younger than the one before it.
            rest, order = _Run(hashes[end:], run.start + end), list(holder.runs)
            order.insert(order.index(run), rest)
            self._start(holder, rest)
            holder.runs = OrderedDict.fromkeys(each for each in order if each in holder.runs)

    def _evict(self, holder: _Holder, count: int) -> None:
        """The oldest ``count`` blocks."""
        if count <= 0:
            return
        self._evictions += count
        self._blocks -= count
        holder.blocks -= count
        holder.torn = max(0, holder.torn - count)
        runs = holder.runs
        while count:
            run = next(iter(runs))
            size = len(run.hashes)
            keep = max(size - count, 0)
            self._unmask(holder, run, keep)
            count -= size - keep
            if keep:
                run.hashes = run.hashes[:keep]
            else:
                del runs[run], holder.starts[run.hashes[0]]
                self._runs -= 1

    def _unmask(self, holder: _Holder, run: _Run, first: int) -> None:
        """The endpoint does not hold the blocks of a run any more from the one numbered ``first`` on."""
        masks, hashes, start, bit = self._masks, run.hashes, run.start, holder.bit
        for place in range(-(-(start + first) // _STRIDE) * _STRIDE, start + len(hashes), _STRIDE):
            block = hashes[place - start]
            mask = masks.get(block, 0) & ~bit
            if mask:
                masks[block] = mask
            else:
                masks.pop(block, None)

    def _mask_again(self) -> None:
        """Masks that are left of prompts whose hashes collided."""
        self._masks.clear()
        for holder in self._holders.values():
            for run in holder.runs:
                for place in range(-(-run.start // _STRIDE) * _STRIDE, run.start + len(run.hashes), _STRIDE):
                    block = run.hashes[place - run.start]
                    self._masks[block] = self._masks.get(block, 0) | holder.bit


def _common(run: array[int], hashes: array[int], at: int) -> int:
    """How many blocks of ``run`` are those of ``hashes`` from ``at`` on; the first is.

    A hash covers all blocks before its own: from the first that differs on, none is common.
    """
    most = min(len(run), len(hashes) - at)
    if run[most - 1] == hashes[at + most - 1]:
        return most
    common, differs = 1, most
    while common < differs:
        middle = (common + differs) // 2
        if run[middle] == hashes[at + middle]:
            common = middle + 1
        else:
            differs = middle
    return common


def _size(holder: _Holder) -> int:
    return holder.blocks


def _bytes(holder: _Holder) -> int:
    return holder.blocks * _BLOCK_BYTES + len(holder.runs) * _RUN_BYTES
