"""How a stream of the OpenAI kind opens, ends and fails: the same for chat and completions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workers.sim.errors import ApiError
from workers.sim.prompts import Prepared
from workers.sim.serving import DONE, Result, event, usage

if TYPE_CHECKING:
    from workers.sim.worker import Worker


class OpenAiStream:
    """The common part of two shapes; ``head`` is what every chunk begins with."""

    def __init__(self, worker: Worker, prepared: Prepared, head: dict[str, Any]) -> None:
        self._worker = worker
        self._prepared = prepared
        self._head = head

    def opening(self) -> bytes:
        """Nothing before the first token."""
        return b""

    def end(self, results: list[Result]) -> bytes:
        """Usage if asked for, and the end."""
        if not self._prepared.include_usage:
            return DONE
        counts = usage(self._worker, results, streamed=True)
        return event({**self._head, "choices": [], "usage": counts, "system_fingerprint": self._worker.fingerprint}) + DONE

    def failure(self, error: ApiError) -> bytes:
        """The error as an event, and the end."""
        return event(error.body()) + DONE
