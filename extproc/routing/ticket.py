"""One prompt on its way through the router: where it is, what was decided for it, what it holds."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from extproc.routing.decision import Candidate, Decision
from extproc.routing.job import Job
from extproc.routing.picker import Hits
from extproc.routing.pool import Claim, Endpoint
from extproc.routing.queue import Waiting


class RejectedError(Exception):
    """A prompt is turned away for now. ``reason`` is one of a fixed set: it labels a metric."""

    def __init__(self, reason: str, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_s = retry_after_s


class State(Enum):
    """Where a ticket is."""

    WAITING = "waiting"
    PLACED = "placed"
    REJECTED = "rejected"
    FINISHED = "finished"


class Ticket:
    """One prompt, and what it holds."""

    __slots__ = (
        "candidates",
        "decision",
        "decode",
        "decode_claim",
        "decodes_weighed",
        "error",
        "hits",
        "job",
        "prefill",
        "prefill_claim",
        "sent_s",
        "state",
        "undecided",
        "waiting",
        "warmest",
        "whole_reason",
    )

    def __init__(self, job: Job) -> None:
        self.job = job
        self.state = State.WAITING
        self.decision: Decision | None = None
        """Once it is placed."""
        self.error: Exception | None = None
        """Once it is rejected: RejectedError or NoEndpointError."""
        self.prefill: Endpoint | None = None
        self.decode: Endpoint | None = None
        self.prefill_claim: Claim | None = None
        self.decode_claim: Claim | None = None
        self.sent_s = 0.0
        self.waiting: Waiting | None = None
        self.whole_reason: str | None = None
        """Why a decode worker does it all; None for a handoff."""
        self.undecided = False
        """Whether that is still open, because every decode worker was full."""
        self.candidates: list[Candidate] = []
        self.hits: Hits | None = None
        self.warmest: Warmest | None = None
        self.decodes_weighed: tuple[float, list[Endpoint]] | None = None
        """When it was decided whether to hand it over, and the decode workers that were weighed for that."""


class Warmest(NamedTuple):
    """The prefill workers that hold most of a prompt, a few, and what the first of them would have to compute."""

    endpoints: list[Endpoint]
    uncached_tokens: int
    least_tokens: int
    """Held by the last of them; 0 where others would still be welcome. Who holds no more than this changes nothing."""
