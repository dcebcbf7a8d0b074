"""Prompts that were sent to workers whose events tell what they hold, and have not told of these yet. Pure.

A prompt counts as held from the moment it is placed, or a burst of equal prompts would go to as many workers. That ends when
the worker has answered and its events tell of the prompt, mostly at once, and :data:`PATIENCE_S` after the answer in any case:
from then on only its own word counts, for it may have driven the prompt out since.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator
from itertools import islice

from extproc.routing.holdings import Holdings
from extproc.routing.prefix import Chain
from extproc.routing.token_chain import TokenChain

PATIENCE_S = 0.5
"""After a worker's answer its events have come, or will not."""

_ELSEWHERE_S = 10.0
"""What another router placed counts for so long: nobody says when the worker has answered."""

_LONGEST_S = 120.0
"""No record is kept for longer, whatever became of its request."""

_MOST = 10_000
"""Records of each kind, all workers together; of more the oldest go."""

_LOOKED_AT = 8
"""So many records of one worker are compared with a prompt, the newest first, of those that share about as much with it. Else
thousands of prompts with one system prompt would all be looked at for each that comes."""

_FACTOR = 4
"""From one length at which records are found to the next."""


class Sent:
    """One prompt on one worker."""

    __slots__ = ("address", "block_tokens", "keys", "rank", "until_s")

    def __init__(self, address: str, keys: array[int], block_tokens: int, until_s: float, rank: int | None = None) -> None:
        """``block_tokens``: of the keys of a token chain; 0: they are hashes of text. ``rank``: the place of the engine that
        the request names, among those behind the address; None: it names none."""
        self.address = address
        self.block_tokens = block_tokens
        self.keys = keys
        self.rank = rank
        self.until_s = until_s
        """From then on it counts no more."""


class UnderWay:
    """All of them."""

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings
        self._begin: dict[tuple[int, int], dict[str, dict[Sent, None]]] = {}
        """Tokens of a block, key of the 1st, 4th, 16th ... block -> by worker, what was sent there and begins with all blocks
        up to it. The oldest first."""
        self._named: Counter[tuple[str, int]] = Counter()
        """Worker and rank -> how many of the open ones name it."""
        self._open: dict[Sent, None] = {}
        """The worker has not answered. The oldest first."""
        self._answered: deque[Sent] = deque()
        """It has, the first answer first."""
        self._elsewhere: deque[Sent] = deque()
        """Sent by other routers, the oldest first."""

    def __len__(self) -> int:
        return len(self._open) + len(self._answered) + len(self._elsewhere)

    def send(self, address: str, chain: TokenChain, now_s: float, rank: int | None = None) -> Sent | None:
        """A prompt goes to ``address``, and names ``rank``. None where nothing has to be remembered: that worker does not tell,
        or not all."""
        size = self._holdings.block_tokens(address)
        if size is None or not self._holdings.in_step(address):
            return None
        sent = Sent(address, chain.keys(size), size, now_s + _LONGEST_S, rank)
        if not len(sent.keys):
            return None
        self._enter(sent)
        self._open[sent] = None
        if rank is not None:
            self._named[address, rank] += 1
        self._sweep(now_s)
        return sent

    def send_elsewhere(self, address: str, text: Chain, now_s: float) -> None:
        """Another router sent a prompt to ``address``, of which it tells the hashes of its text."""
        if self._holdings.in_step(address):
            sent = Sent(address, text.hashes, 0, now_s + _ELSEWHERE_S)
            self._enter(sent)
            self._elsewhere.append(sent)
            self._sweep(now_s)

    def answered(self, sent: Sent | None, now_s: float) -> None:
        """The worker is through with it: its events are on their way, or here."""
        if sent is not None and sent in self._open:
            self._close(sent)
            if self._holdings.holds(sent.address, sent.keys[-1], sent.block_tokens):
                self._drop(sent)
                return
            sent.until_s = min(sent.until_s, now_s + PATIENCE_S)
            self._answered.append(sent)

    def failed(self, sent: Sent | None) -> None:
        """The worker did not compute it."""
        if sent is not None and sent in self._open:
            self._close(sent)
            self._drop(sent)

    def forget(self, address: str) -> None:
        """The worker is gone, or its engine is a new one."""
        for each in [each for each in self._open if each.address == address]:
            self.failed(each)
        for each in (*self._answered, *self._elsewhere):
            if each.address == address:
                each.until_s = 0.0

    def lookup(self, chain: TokenChain, text: Chain, known: dict[str, int], now_s: float) -> Iterator[tuple[str, int]]:
        """Address, and how many leading tokens were sent there, where that is more than it is ``known`` to hold.

        ``text`` is the same prompt, for what other routers sent.
        """
        if not self._begin:
            return
        for size in self._holdings.block_sizes():
            yield from self._common(size, chain.keys(size), size, known, now_s)
        if self._elsewhere:
            yield from self._common(0, text.hashes, text.block_tokens, known, now_s)

    def by_rank(self, chain: TokenChain, address: str, now_s: float) -> dict[int | None, int]:
        """Rank -> how many leading tokens were sent to one worker for it; None: for that which its balancing chose."""
        size = self._holdings.block_tokens(address)
        found: dict[int | None, int] = {}
        if size is None or not self._begin:
            return found
        keys = chain.keys(size)
        for at in reversed(_places(len(keys))):
            records = self._begin.get((size, keys[at]), {}).get(address, {})
            for each in islice((each for each in reversed(records) if each.until_s > now_s), _LOOKED_AT):
                found[each.rank] = max(found.get(each.rank, 0), _shared(keys, each.keys, at + 1) * size)
        return found

    def named(self, address: str, rank: int) -> int:
        """How many requests name this rank, and have no answer yet."""
        return self._named[address, rank]

    def _close(self, sent: Sent) -> None:
        del self._open[sent]
        if sent.rank is not None:
            self._named[sent.address, sent.rank] -= 1
            if not self._named[sent.address, sent.rank]:
                del self._named[sent.address, sent.rank]

    def _common(
        self, kind: int, keys: array[int], size: float, known: dict[str, int], now_s: float
    ) -> Iterator[tuple[str, int]]:
        done: set[str] = set()
        for at in reversed(_places(len(keys))):  # whoever is found at the longest of these shares most
            for address, records in self._begin.get((kind, keys[at]), {}).items():
                if address in done:
                    continue
                counting = (each for each in reversed(records) if each.until_s > now_s)
                newest = list(islice(counting, _LOOKED_AT))
                if not newest:
                    continue
                done.add(address)
                held = math.ceil(known.get(address, 0) / size)
                most = max(_shared(keys, each.keys, max(held, at + 1)) for each in newest)
                if most > held:
                    yield address, int(most * size)

    def _enter(self, sent: Sent) -> None:
        for place in _places_of(sent):
            workers = self._begin.setdefault(place, {})
            workers.setdefault(sent.address, {})[sent] = None

    def _sweep(self, now_s: float) -> None:
        """Drop what counts no more."""
        for over in (self._answered, self._elsewhere):
            while over and (over[0].until_s <= now_s or len(over) > _MOST):
                self._drop(over.popleft())
        while self._open:
            oldest = next(iter(self._open))
            if oldest.until_s > now_s and len(self._open) <= _MOST:
                break
            self.failed(oldest)

    def _drop(self, sent: Sent) -> None:
        for place in _places_of(sent):
            workers = self._begin[place]
            records = workers[sent.address]
            del records[sent]
            if not records:
                del workers[sent.address]
                if not workers:
                    del self._begin[place]


def _places(blocks: int) -> list[int]:
    """Of so many blocks, those by which a record is found: the 1st, 4th, 16th ..., counted from 0."""
    found, count = [], 1
    while count <= blocks:
        found.append(count - 1)
        count *= _FACTOR
    return found


def _places_of(sent: Sent) -> set[tuple[int, int]]:
    """Where it is found. Each once, although another router may tell of hashes that are none, with one of them twice."""
    return {(sent.block_tokens, sent.keys[at]) for at in _places(len(sent.keys))}


def _shared(one: array[int], other: array[int], least: int) -> int:
    """How many leading blocks are the same, if it is at least so many; else 0."""
    most = min(len(one), len(other))
    if least > most or one[least - 1] != other[least - 1]:
        return 0
    # A key covers all blocks before its own: from the first that differs on, nothing is common.
    return bisect_left(range(most), True, lo=least, key=lambda at: one[at] != other[at])
