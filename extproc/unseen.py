"""A handed-over request whose good answer Envoy does not show to the filter: its line in Envoy's log says what became of it.

That saves a message, a reply and a wait a request. An answer that is an error is shown all the same, at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from extproc.handoff import Handoff
from extproc.observe.log_lines import Line

if TYPE_CHECKING:
    from extproc.journey import Parts


class Unseen:
    """Waits for the line. It does not refer to the request itself, which may be over and gone by then."""

    __slots__ = ("_chosen", "_handoff", "_parts", "_put_off", "_request_id", "answered")

    def __init__(self, parts: Parts, handoff: Handoff, chosen: str, request_id: str) -> None:
        """``chosen``: ``ip:port`` of the decode worker."""
        self._parts = parts
        self._handoff = handoff
        self._chosen = chosen
        self._request_id = request_id
        self._put_off: object = None
        self.answered = False
        """An answer was shown, or told of."""

    def ended_early(self) -> None:
        """The request is over so soon that Envoy may never have sent it on: its line will say, or its blocks are given back."""
        if not self.answered:
            self._put_off = self._parts.releaser.release_later(self._handoff)

    def told(self, line: Line) -> None:
        """Its line."""
        if line.upstream and line.upstream != self._chosen:
            self._parts.served_elsewhere(self._request_id, self._chosen, line.upstream)
        if self.answered or not line.upstream or not 0 < line.status < 400:
            return
        # No word to the router: the line is late, and its worker may be a new one by now.
        self.answered = True
        self._parts.recent.answered(line.status)
        if self._put_off is not None:
            self._parts.releaser.never_mind(self._put_off)
