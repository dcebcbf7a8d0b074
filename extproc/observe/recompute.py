"""Silent recompute: prompts that were handed over, and that the decode worker computed itself all the same.

Clients notice nothing but the time. An engine counts the prompt tokens that it computed, and those whose KV it had or received,
but not for which request; so this matches sums. A handoff of n tokens is expected to arrive: n tokens that the worker has or
receives, between the dispatch and the end of the request. What has not come by then *and* was computed meanwhile, was computed
twice. Both are asked for, because each has innocent causes: a client that left early, and prompts that were never handed over
(of ours, or of another filter).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

_TAIL_TOKENS = 16
"""Of a handoff, that a worker may compute although all of it arrived: the last token or an unfinished block."""

_MOST_OPEN = 10_000
"""Requests on one worker that are followed; of more, the oldest are forgotten."""


class Sent(msgspec.Struct, gc=False):
    """A prompt on its way to a decode worker."""

    tokens: float
    """Of a handoff: still to arrive. Of a prompt without one: that the worker may compute."""
    handoff: bool
    computed: float
    """What the worker had computed when it was sent, and nobody had answered for."""
    ended_s: float | None = None
    """When the request ended; None while it runs."""

    def end(self, clock: Callable[[], float]) -> None:
        """The request has ended."""
        self.ended_s = clock()


class _Worker:
    __slots__ = ("open", "unclaimed")

    def __init__(self) -> None:
        self.open: deque[Sent] = deque(maxlen=_MOST_OPEN)
        self.unclaimed = 0.0
        """Tokens computed since the first page, less those that a request has answered for."""

    def claim(self, entry: Sent) -> float:
        """Let a request answer for its tokens, of those that were computed since it was sent; how many there were."""
        found = min(entry.tokens, max(self.unclaimed - entry.computed, 0.0))
        self.unclaimed -= found
        return found


class Recompute:
    """For all decode workers."""

    def __init__(self) -> None:
        self._workers: dict[str, _Worker] = {}

    def sent(self, decode: str, tokens: int, *, handoff: bool) -> Sent:
        """A prompt goes to a decode worker. Whoever holds the result calls its ``end``."""
        worker = self._workers.setdefault(decode, _Worker())
        entry = Sent(float(tokens), handoff, worker.unclaimed)
        worker.open.append(entry)
        return entry

    def gone(self, address: str) -> None:
        """The worker is no more."""
        self._workers.pop(address, None)

    def on_scrape(self, address: str, *, computed: float, arrived: float, asked_s: float) -> float:
        """What the worker counted since its last page, which was asked for at ``asked_s``; the tokens computed twice."""
        worker = self._workers.get(address)
        if worker is None:
            return 0.0
        worker.unclaimed += computed
        ended: list[Sent] = []
        running: deque[Sent] = deque(maxlen=_MOST_OPEN)
        for entry in worker.open:
            if entry.handoff:
                taken = min(entry.tokens, arrived)
                entry.tokens -= taken
                arrived -= taken
            over = entry.ended_s is not None and entry.ended_s < asked_s
            (ended if over else running).append(entry)
        worker.open = running
        # Prompts without a handoff first: what they may have computed is nobody's fault.
        for entry in ended:
            if not entry.handoff:
                worker.claim(entry)
        return sum(worker.claim(entry) for entry in ended if entry.handoff and entry.tokens > _TAIL_TOKENS)
