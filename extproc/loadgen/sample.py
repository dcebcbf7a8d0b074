"""What became of one request, and how it is told apart: plain data, and what follows from it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from enum import Enum

from extproc.loadgen.answer import Answer
from workers.goodput import Outcome, Status, percentile

REFUSALS = (429, 503)
"""Statuses with which a request is turned away unserved: a limit, or nobody there."""


class Kind(Enum):
    """How a request ended."""

    SERVED = "served"
    REFUSED = "refused"
    """Status 429 or 503."""
    ERROR = "error"
    """Any other status that is not 200."""
    BROKEN = "broken"
    """The answer began well, and was an error, ended before its end, or was empty."""
    CONNECTION = "connection"
    """No connection, or it was lost before the answer began."""
    TIMEOUT = "timeout"
    UNSENT = "unsent"
    """As many as may be in flight were: it was not sent."""
    CANCELLED = "cancelled"
    """The run was interrupted."""


@dataclass(slots=True)
class Sample:
    """One request. Times are in seconds, due and sent since the start of the run."""

    due_s: float
    kind: Kind = Kind.CANCELLED
    sent_s: float | None = None
    """None: it was not sent."""
    ttft_s: float | None = None
    """From when it was due to the first piece of text: what the generator is late by is in it."""
    gaps_s: list[float] = field(default_factory=list)
    """Between pieces of the stream: how long whoever reads it waits. A piece is a token with most engines, most of the time."""
    end_s: float | None = None
    """From when it was due to the end of the answer."""
    tpot_s: float | None = None
    """Time from the first to the last piece, over the tokens that came after the first piece. None: one piece, or no count."""
    pieces: int = 0
    prompt_tokens: int | None = None
    """As the engine counts; None: it did not say. So below."""
    cached_tokens: int | None = None
    output_tokens: int | None = None
    asked_input_tokens: int = 0
    asked_output_tokens: int = 0
    status: int | None = None
    """Of the HTTP answer."""
    code: str = ""
    """Of the error, as the server calls it."""
    message: str = ""
    finish_reason: str | None = None
    groups: dict[str, str] = field(default_factory=dict)
    """Header -> value, of those that the report is broken down by."""

    def read(self, answer: Answer, due_at_s: float) -> None:
        """Take over what the answer says; ``due_at_s`` on the clock of its times."""
        times_s = answer.times_s
        self.finish_reason = answer.finish_reason
        self.pieces = len(times_s)
        # An answer of nothing but an end-of-text token has no text; its end is then the first that is heard of it.
        first_s = times_s[0] if times_s else answer.finish_s
        if first_s is not None:
            self.ttft_s = first_s - due_at_s
        if answer.usage is not None:
            self.prompt_tokens = answer.usage.prompt_tokens
            self.cached_tokens = answer.usage.cached_tokens
            self.output_tokens = answer.usage.completion_tokens
        self.gaps_s = [later - earlier for earlier, later in itertools.pairwise(times_s)]
        if len(times_s) > 1 and self.output_tokens is not None and self.output_tokens >= len(times_s):
            # How many of them were in the first piece nobody says: as many as in the average one.
            later_tokens = self.output_tokens * (1 - 1 / len(times_s))
            self.tpot_s = (times_s[-1] - times_s[0]) / later_tokens

    def outcome(self) -> Outcome:
        """For the arithmetic that all benchmarks share."""
        status = {Kind.SERVED: Status.SERVED, Kind.REFUSED: Status.REFUSED}.get(self.kind, Status.FAILED)
        return Outcome(
            arrived_s=self.due_s,
            ttft_s=self.ttft_s,
            itl_p99_s=percentile(self.gaps_s, 0.99) if self.gaps_s else None,
            input_tokens=self.prompt_tokens or 0,
            cached_tokens=self.cached_tokens or 0,
            output_tokens=self.output_tokens or 0,
            status=status,
        )
