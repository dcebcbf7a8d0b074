"""One process among its siblings on the same machine: who they are, and which of them leads."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

from extproc.dispatcher import Dispatcher
from extproc.observe.logs import Logger
from extproc.observe.metrics import Metrics
from extproc.processes.ledger import Poster, SharedLedger, new_epoch
from extproc.processes.member import Member

_START_S = 5.0
"""So long a process that has just started takes it that one before it, unheard so far, is starting too."""


class Socket(Poster, Protocol):
    """See :class:`extproc.processes.post.Post`."""

    def open(self, receive: Callable[[bytes], None]) -> None:
        """Begin to receive."""

    def close(self) -> None:
        """Receive no more."""


class Siblings(SharedLedger):
    """The others, as one process sees them. ``open`` comes first, then ``run`` must be running."""

    kind: ClassVar[str] = "sibling"
    shown_as: ClassVar[str] = "process"

    def __init__(
        self,
        member: Member,
        dispatcher: Dispatcher,
        post: Socket,
        *,
        metrics: Metrics,
        log: Logger,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``clock`` must be one that all processes share."""
        super().__init__(dispatcher, post, index=member.index, epoch=new_epoch(), metrics=metrics, log=log, clock=clock)
        self.member = member
        self._socket = post
        for index in member.siblings:
            self._meet(index, index)
        metrics.process_restarts.set(member.restarts)

    async def open(self) -> None:
        """Listen, and have the others tell what they know, where they are there already. Raises OSError."""
        self._socket.open(self.take)
        await self._join([each for each in self._siblings.values() if self._ask(each)])

    def close(self) -> None:
        """Say no more, and hear no more."""
        super().close()
        self._socket.close()

    def leads(self) -> bool:
        """Whether this process does what only one of them may: the lowest one that knows its workers."""
        if not self._settled and any(each.settled for each in self._alive()):
            return False
        first = self.index
        if self._clock() - self._started_s < _START_S:
            there = [each for each in self._siblings.values() if each.epoch is not None or each.heard_s < 0]
            return all(each.index > first for each in there)
        return all(each.index > first for each in self._alive() if each.settled or not self._settled)

    def status(self) -> dict[str, Any]:
        """For `/healthz`."""
        now_s = self._clock()
        return {
            "index": self.member.index,
            "count": self.member.count,
            "leads": self.leads(),
            "restarts": self.member.restarts,
            "siblings": {
                str(each.index): {
                    "state": "away" if each.epoch is None else "settled" if each.settled else "starting",
                    "heard_s_ago": None if math.isinf(each.heard_s) else round(now_s - each.heard_s, 3),
                    "claims": each.another.claims,
                    "open_streams": each.open_streams,
                }
                for each in self._siblings.values()
            },
        }
