"""Prompts that were sent to workers whose events tell what they hold, and have not told of these yet. Pure.

A prompt counts as held from the moment it is placed, or a burst of equal prompts would go to as many workers. That ends
:data:`PATIENCE_S` after the worker has answered: by then its events have come, and only its own word counts. Where they come
before that, they say the same.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator

from extproc.routing.holdings import Holdings
from extproc.routing.token_chain import TokenChain

PATIENCE_S = 2.0
"""After a worker's answer its events have come, or will not."""

_LONGEST_S = 120.0
"""No record is kept for longer, whatever became of its request."""

_MOST = 10_000
"""Records of prompts that are not answered, all workers together; of more the oldest go."""


class Sent:
    """One prompt on one worker."""

    __slots__ = ("address", "block_tokens", "keys", "until_s")

    def __init__(self, address: str, chain: TokenChain, block_tokens: int, until_s: float) -> None:
        self.address = address
        self.block_tokens = block_tokens
        self.keys: array[int] = chain.keys(block_tokens)
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

    def __len__(self) -> int:
        return len(self._open) + len(self._answered)

    def send(self, address: str, chain: TokenChain, now_s: float) -> Sent | None:
        """A prompt goes to ``address``. None where nothing has to be remembered: that worker does not tell, or not all."""
        size = self._holdings.block_tokens(address)
        if size is None or not self._holdings.in_step(address):
            return None
        sent = Sent(address, chain, size, now_s + _LONGEST_S)
        if not len(sent.keys):
            return None
        self._by_head.setdefault((size, sent.keys[0]), []).append(sent)
        self._open[sent] = None
        self._sweep(now_s)
        return sent

    def answered(self, sent: Sent | None, now_s: float) -> None:
        """The worker is through with it: its events are on their way, or here."""
        if sent is not None and sent in self._open:
            del self._open[sent]
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
        for each in self._answered:
            if each.address == address:
                each.until_s = 0.0

    def lookup(self, chain: TokenChain, known: dict[str, int], now_s: float) -> Iterator[tuple[str, int]]:
        """Address, and how many leading tokens were sent there, where that is more than it is ``known`` to hold."""
        if not self._by_head:
            return
        for size in self._holdings.block_sizes():
            keys = chain.keys(size)
            for each in self._by_head.get((size, keys[0]), ()) if len(keys) else ():
                held = -(-known.get(each.address, 0) // size)
                common = min(len(keys), len(each.keys))
                if each.until_s <= now_s or held >= common or keys[held] != each.keys[held]:
                    continue
                theirs = each.keys
                # A key covers all blocks before its own: from the first that differs on, nothing is common.
                count = bisect_left(range(common), True, lo=held + 1, key=lambda at: keys[at] != theirs[at])
                yield each.address, count * size

    def _sweep(self, now_s: float) -> None:
        """Drop what counts no more."""
        while self._answered and self._answered[0].until_s <= now_s:
            self._drop(self._answered.popleft())
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
