"""One prompt on its way through the router: where it is, what was decided for it, what it holds."""

from __future__ import annotations

from enum import Enum
from typing import Literal, NamedTuple

from extproc.routing.decision import Candidate, Decision
from extproc.routing.hits import Hits
from extproc.routing.job import Job
from extproc.routing.pool import Claim, Endpoint
from extproc.routing.queue import Fit, Waiting
from extproc.routing.truth import Check
from extproc.routing.under_way import Sent
from extproc.routing.weighing import Weighed


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
        "check",
        "decision",
        "decode",
        "decode_claim",
        "decode_holds",
        "decode_rank",
        "decode_sent",
        "error",
        "hits",
        "hits_s",
        "job",
        "prefill",
        "prefill_claim",
        "prefill_rank",
        "prefill_sent",
        "sent_s",
        "state",
        "stuck",
        "undecided",
        "waiting",
        "warmest",
        "weighed",
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
        self.decode_holds = False
        """Whether the index knows that its decode worker holds the prompt."""
        self.prefill_rank: int | None = None
        self.decode_rank: int | None = None
        """The engines that its legs have to name, of workers with several (:mod:`extproc.routing.ranks`); None: none."""
        self.sent_s = 0.0
        self.waiting: Waiting | None = None
        self.whole_reason: str | None = None
        """Why a decode worker does it all; None for a handoff."""
        self.undecided = False
        """Whether that is still open, because every decode worker was full."""
        self.candidates: list[Candidate] = []
        self.check: Check | None = None
        """What its prefill worker was expected to hold, and held; only where workers tell what they hold."""
        self.hits: Hits | None = None
        self.hits_s = 0.0
        """When they were looked up."""
        self.prefill_sent: Sent | None = None
        self.decode_sent: Sent | None = None
        """What counts as held before the workers' events say so."""
        self.warmest: Warmest | None = None
        self.stuck: Stuck | None = None
        """Why it could not go when it was last weighed; None if it is to be weighed."""
        self.weighed: Weighed | None = None
        """To decide whether it is handed over."""


class Stuck(NamedTuple):
    """A prompt was weighed, and could not go. While none of this changes it need not be weighed again."""

    until_s: float
    """From then on it is weighed again in any case: backlogs shrink with time, and it may be late."""
    version: int
    """Of the prefill workers that hold most of it, all together."""
    idlest_free_s: float
    """When the prefill worker with the least to do would have begun with it."""
    fit: Fit
    blocked_by: Literal["prefill", "decode", "lane"]
    """No room on the prefill worker where it is best off, none on any decode worker, or too many late ones go already."""


class Warmest(NamedTuple):
    """The prefill workers that hold most of a prompt, a few, and what the first of them would have to compute."""

    endpoints: list[Endpoint]
    uncached_tokens: int
    least_tokens: int
    """Held by the last of them; 0 where others would still be welcome. Who holds no more than this changes nothing."""
