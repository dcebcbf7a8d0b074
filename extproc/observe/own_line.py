"""A request's line where no Envoy of ours writes one: what the filter itself saw of its answer.

A mesh shows an endpoint picker every piece of an answer. So the time to the first one is known here too, as Envoy showed it,
and whether the last one came. Not known: who broke an answer off, and the tokens that it states.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from extproc.observe.log_lines import Line, Outcome

if TYPE_CHECKING:
    from extproc.journey import Journey

_OF_GATEWAYS = (502, 503, 504)
"""What Envoy answers by itself where it reaches nobody."""


def line_of(journey: Journey, started_s: float, ended_s: float) -> Line | None:
    """Times are on the clock of the requests. None: nothing was shown that says how it ended."""
    record, stream = journey.record, journey.stream
    outcome = _outcome(journey)
    if outcome is None:
        return None
    first_s, last_s = stream.first_piece_s, stream.last_piece_s
    whole = stream.answer_ended and first_s is not None and last_s is not None
    return Line(
        key=journey.observed.note.key,
        request_id=record.request_id,
        mode=journey.observed.note.tags.mode,
        status=record.status or journey.answer_status or 0,
        flags=(),
        outcome=outcome,
        details="as the endpoint picker saw it",
        upstream=record.decode or "",
        streamed=journey.answer_streamed,
        duration_s=ended_s - started_s,
        ttft_s=None if first_s is None else first_s - started_s,
        generation_s=last_s - first_s if whole and last_s is not None and first_s is not None else None,
        prompt_tokens=None,
        completion_tokens=None,
        received_bytes=record.body_bytes,
        sent_bytes=stream.answer_bytes,
    )


def _outcome(journey: Journey) -> Outcome | None:
    status, own = journey.answer_status, journey.record.status
    if own is not None:
        return "ok" if own < 400 else "refused"
    if status is None:
        # Sent on and never answered, or given up before: the client did not wait for it, as far as can be seen here.
        return "client_gone"
    if not journey.stream.shows_answer:
        return None
    if status >= 400:
        if status in _OF_GATEWAYS and journey.served_by == "unknown":
            return "gateway_error"
        return "worker_error" if status >= 500 else "client_error"
    return "ok" if journey.stream.answer_ended else "cut"
