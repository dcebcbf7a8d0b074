"""What prefill replies taught: token ids of prompts that were seen, and of the beginnings of those that go on. Event loop only.

A prompt that was seen (:mod:`extproc.tokens.identity`) has the ids that it had. Of a longer one, the text that it shares with
an earlier one is known, in blocks (its chain), and so are the earlier one's ids; but not which id the shared text ends at. A
token is at least one byte of text. So as many ids are left out at the end as the earlier prompt has bytes that are not shared,
and some more: for tokens that merge across the end, and for what a template writes behind the last message.

Not every template only adds at the end: one drops the thoughts of earlier turns, another writes the tools before the last
question. So a beginning is not used before it has proved true for prompts of that shape, and no more after it has proved wrong.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, NamedTuple

import xxhash

from extproc.paths import Treatment
from extproc.prompt import Text
from extproc.routing.token_chain import TokenChain

PROOFS: Final = 3
"""Prompts of a shape whose beginning must have been what it was expected to be, before it is told."""

_SLACK_TOKENS: Final = 8
"""Left out beyond what had to be left out so far: the part of a template that stands behind the last message."""

_MERGE_BYTES: Final = 64
"""Where a text goes on in another way, tokens before that may be others: those of a word that began no farther back."""

_MOST_BEHIND_TOKENS: Final = 64
"""A template that needs more left out does not only add at the end."""

_DISTRUST_S: Final = 3600.0

_BLOCK_BYTES: Final = 120
"""What the dict of blocks takes for one."""

_ENTRY_BYTES: Final = 1200

_MOST_SHAPES: Final = 1000


class Shape(NamedTuple):
    """Prompts that a template treats alike, as far as it matters here."""

    treatment: Treatment
    model: str
    tools: bool


class Learned:
    """One prompt that was seen."""

    __slots__ = ("at_s", "blocks", "bytes", "chain", "key", "model", "rest_bytes", "rest_digest")

    def __init__(self, key: bytes, model: str, chain: TokenChain, blocks: array[int], rest: bytes, at_s: float) -> None:
        self.key = key
        self.model = model
        self.chain = chain
        self.blocks = blocks
        """Hashes of its text's blocks; none if it is of no use to others."""
        self.rest_bytes = len(rest)
        """What follows the last full block."""
        self.rest_digest = xxhash.xxh3_64_intdigest(rest)
        self.at_s = at_s
        self.bytes = _ENTRY_BYTES + 8 * chain.tokens + _BLOCK_BYTES * len(blocks)  # the ids, and as much again for keys


class Beginning(NamedTuple):
    """An earlier prompt that begins like the one that is asked about."""

    earlier: Learned
    left_out: int
    """Ids at its end that cannot be relied upon, beyond what its shape is known to need."""


class _Proof:
    __slots__ = ("behind", "count", "not_before_s")

    def __init__(self) -> None:
        self.count = 0
        self.behind = 0
        """Ids that had to be left out at the end, at the most."""
        self.not_before_s = 0.0


class Memory:
    """Bounded in bytes; the least recently used go first."""

    def __init__(self, max_bytes: int, *, keep_s: float, block_bytes: int, clock: Callable[[], float]) -> None:
        """``block_bytes`` of the chains over text that it is given."""
        self._max = max_bytes
        self._keep_s = keep_s
        self._block_bytes = block_bytes
        self._clock = clock
        self._seen: OrderedDict[bytes, Learned] = OrderedDict()
        self._ends: dict[int, Learned] = {}
        """Hash of a block -> of the prompts with it, the one with the fewest bytes behind it."""
        self._proofs: dict[Shape, _Proof] = {}
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._seen)

    # -- what is known -----------------------------------------------------------------------------------------------------

    def seen(self, key: bytes) -> TokenChain | None:
        """Of a prompt that was seen."""
        found = self._seen.get(key)
        if found is None:
            return None
        if self._clock() - found.at_s > self._keep_s:
            self._drop(found)
            return None
        self._seen.move_to_end(key)
        return found.chain

    def beginning(self, hashes: array[int], text: Text, *, goes_on_inside: bool, larger: bool) -> Beginning | None:
        """The earlier prompt that shares most with this one, whose text has these blocks.

        ``goes_on_inside``: a prompt may go on in the middle of a word, as with the completions API. ``larger``: what a template
        makes of the text may have more bytes than it, because it writes objects as JSON of its own: at most twice as many.
        """
        ends = self._ends
        for count in range(len(hashes), 0, -1):
            found = ends.get(hashes[count - 1])
            if found is None:
                continue
            if self._clock() - found.at_s > self._keep_s:
                self._drop(found)
                continue
            whole = count == len(found.blocks) and self._goes_on(found, text)
            behind = 0 if whole else (len(found.blocks) - count) * self._block_bytes + found.rest_bytes
            if larger:
                behind *= 2
            if not whole or goes_on_inside:
                behind += _MERGE_BYTES
            return Beginning(found, behind)
        return None

    def _goes_on(self, found: Learned, text: Text) -> bool:
        """The whole text of the earlier prompt is the beginning of this one: what is behind its last full block, too."""
        start = len(found.blocks) * self._block_bytes
        head = text[start : start + found.rest_bytes]
        return len(head) == found.rest_bytes and xxhash.xxh3_64_intdigest(head) == found.rest_digest

    def relied_upon(self, shape: Shape, beginning: Beginning) -> int:
        """How many ids of it are told; 0 where beginnings of that shape have yet to be proved."""
        proof = self._proofs.get(shape)
        if proof is None or proof.count < PROOFS or proof.not_before_s > self._clock():
            return 0
        return max(0, beginning.earlier.chain.tokens - beginning.left_out - proof.behind - _SLACK_TOKENS)

    # -- what is learned ---------------------------------------------------------------------------------------------------

    def learn(self, key: bytes, model: str, chain: TokenChain, blocks: array[int], rest: bytes) -> None:
        """The ids of a prompt. ``blocks`` of its text, and what is behind the last of them; none: they serve for no other."""
        before = self._seen.get(key)
        if before is not None:
            self._drop(before)
        learned = Learned(key, model, chain, blocks, rest, self._clock())
        if learned.bytes > self._max:
            return
        self._seen[key] = learned
        self.bytes += learned.bytes
        for block in blocks:
            there = self._ends.get(block)
            if there is None or len(there.blocks) >= len(blocks):  # they share it, so the longer one has more behind it
                self._ends[block] = learned
        while self.bytes > self._max:
            self._drop(next(iter(self._seen.values())))

    def proved(self, shape: Shape, beginning: Beginning, common_tokens: int) -> bool:
        """So many ids of the earlier prompt stand at the beginning of the later one. False: it was no beginning."""
        needed = max(0, beginning.earlier.chain.tokens - beginning.left_out - common_tokens)
        proof = self._proofs.get(shape)
        if proof is None:
            if len(self._proofs) >= _MOST_SHAPES:
                self._proofs.pop(next(iter(self._proofs)))
            proof = self._proofs[shape] = _Proof()
        if needed > _MOST_BEHIND_TOKENS or (proof.count >= PROOFS and needed > proof.behind + _SLACK_TOKENS):
            proof.count, proof.behind, proof.not_before_s = 0, 0, self._clock() + _DISTRUST_S
            return False
        proof.count += 1
        proof.behind = max(proof.behind, needed)
        return True

    def forget(self, model: str) -> int:
        """Everything of ``model``, whose prompts have other ids now; how many prompts that was."""
        gone = [each for each in self._seen.values() if each.model == model]
        for each in gone:
            self._drop(each)
        return len(gone)

    def _drop(self, learned: Learned) -> None:
        if self._seen.get(learned.key) is learned:
            del self._seen[learned.key]
            self.bytes -= learned.bytes
        ends = self._ends
        for block in learned.blocks:
            if ends.get(block) is learned:
                del ends[block]


def common(one: array[int], other: array[int]) -> int:
    """How many leading ids are the same."""
    size = one.itemsize
    left, right = one.tobytes(), other.tobytes()
    count = min(len(left), len(right))
    at = 0
    while at < count and left[at : at + 4096] == right[at : at + 4096]:
        at += 4096
    end = min(at + 4096, count)
    while at < end and left[at : at + size] == right[at : at + size]:
        at += size
    return min(at, count) // size
