"""Prompts that were sent to workers whose events tell what they hold, and have not told of these yet. Pure.

A prompt counts as held from the moment it is placed, or a burst of equal prompts would go to as many workers. That ends when
the worker has answered and its events tell of the prompt, mostly at once, and :data:`PATIENCE_S` after the answer in any case:
from then on only its own word counts, for it may have driven the prompt out since.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator

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


class Sent:
    """One prompt on one worker."""

    __slots__ = ("address", "block_tokens", "keys", "until_s")

    def __init__(self, address: str, keys: array[int], block_tokens: int, until_s: float) -> None:
        """``block_tokens``: of the keys of a token chain; 0: they are hashes of text."""
        self.address = address
        self.block_tokens = block_tokens
        self.keys = keys
        self.until_s = until_s
        """From then on it counts no more."""


class UnderWay:
    """All of them."""

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings
        self._by_head: dict[tuple[int, int], list[Sent]] = {}
        """Tokens of a block, key of the first block -> who begins with it."""
        self._open: dict[Sent, None] = {}
        """The worker has not answered. The oldest first."""
        self._answered: deque[Sent] = deque()
        """It has, the first answer first."""
        self._elsewhere: deque[Sent] = deque()
        """Sent by other routers, the oldest first."""

    def __len__(self) -> int:
        return len(self._open) + len(self._answered) + len(self._elsewhere)

    def send(self, address: str, chain: TokenChain, now_s: float) -> Sent | None:
        """A prompt goes to ``address``. None where nothing has to be remembered: that worker does not tell, or not all."""
        size = self._holdings.block_tokens(address)
        if size is None or not self._holdings.in_step(address):
            return None
        sent = Sent(address, chain.keys(size), size, now_s + _LONGEST_S)
        if not len(sent.keys):
            return None
        self._by_head.setdefault((size, sent.keys[0]), []).append(sent)
        self._open[sent] = None
        self._sweep(now_s)
        return sent

    def send_elsewhere(self, address: str, text: Chain, now_s: float) -> None:
        """Another router sent a prompt to ``address``, of which it tells the hashes of its text."""
        if self._holdings.in_step(address):
            sent = Sent(address, text.hashes, 0, now_s + _ELSEWHERE_S)
            self._by_head.setdefault((0, sent.keys[0]), []).append(sent)
            self._elsewhere.append(sent)
            self._sweep(now_s)

    def answered(self, sent: Sent | None, now_s: float) -> None:
        """The worker is through with it: its events are on their way, or here."""
        if sent is not None and sent in self._open:
            del self._open[sent]
            if self._holdings.holds(sent.address, sent.keys[-1], sent.block_tokens):
                self._drop(sent)
                return
            sent.until_s = min(sent.until_s, now_s + PATIENCE_S)
            self._answered.append(sent)

    def failed(self, sent: Sent | None) -> None:
        """The worker did not compute it."""
        if sent is not None and sent in self._open:
            del self._open[sent]
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
        if not self._by_head:
            return
        for size in self._holdings.block_sizes():
            yield from self._common(size, chain.keys(size), size, known, now_s)
        if self._elsewhere:
            yield from self._common(0, text.hashes, text.block_tokens, known, now_s)

    def _common(
        self, kind: int, keys: array[int], size: float, known: dict[str, int], now_s: float
    ) -> Iterator[tuple[str, int]]:
        for each in self._by_head.get((kind, keys[0]), ()) if len(keys) else ():
            held, theirs = math.ceil(known.get(each.address, 0) / size), each.keys
            common = min(len(keys), len(theirs))
            if each.until_s <= now_s or held >= common or keys[held] != theirs[held]:
                continue
            # A key covers all blocks before its own: from the first that differs on, nothing is common.
            count = bisect_left(range(common), True, lo=held + 1, key=lambda at: keys[at] != theirs[at])
            yield each.address, int(count * size)

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
        head = sent.block_tokens, sent.keys[0]
        same = self._by_head[head]
        same.remove(sent)
        if not same:
            del self._by_head[head]
