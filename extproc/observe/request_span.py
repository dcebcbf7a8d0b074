"""What the span of a whole request says: its name and attributes, of labels, counts and names of workers.

The names are those of OpenTelemetry's conventions, for HTTP and for generative AI, where they have one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from extproc.observe.tags import NONE
from extproc.paths import TABLE, Treatment

if TYPE_CHECKING:
    from extproc.journey import Journey
    from extproc.observe.tracing import RequestTrace

_OPERATIONS: Final = {
    Treatment.CHAT: "chat",
    Treatment.MESSAGES: "chat",
    Treatment.RESPONSES: "chat",
    Treatment.COMPLETIONS: "text_completion",
}

# An answer of the filter's own from here on is its fault, or that of the pool; below, the client's.
_FAULT_STATUS: Final = 500


def finish(trace: RequestTrace, journey: Journey) -> None:
    """End the trace of a request that is over."""
    record, job = journey.record, journey.job
    labels = journey.labels or journey.tags("none")
    operation = None if record.treatment is None else _OPERATIONS.get(record.treatment)
    status = journey.answer_status if record.status is None else record.status
    decision = trace.decision
    outcome = record.outcome or "cancelled"
    failed = outcome == "protocol_error" or (status or 0) >= _FAULT_STATUS
    tokens = record.tokens if record.tokens is not None or operation is None or job is None else job.tokens
    attributes: dict[str, Any] = {
        "http.request.method": record.method if record.method in _METHODS else "_OTHER",
        "http.route": record.path if record.path in TABLE else None,
        "http.response.status_code": status,
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": None if operation is None else "vllm",
        "gen_ai.request.model": None if labels.model == NONE else labels.model,
        "gen_ai.usage.input_tokens": tokens,
        "baton.request_id": record.request_id,
        "baton.treatment": None if record.treatment is None else record.treatment.value,
        "baton.outcome": outcome,
        "baton.policy": labels.policy,
        "baton.pool": record.pool,
        "baton.mode": labels.mode,
        "baton.tenant": None if labels.tenant == NONE else labels.tenant,
        "baton.reason": record.whole_reason or (None if decision is None else decision.reason),
        "baton.prefill": record.prefill,
        "baton.decode": record.decode,
        "baton.cached_tokens": record.cached_tokens,
        "baton.reported_cached_tokens": record.reported_cached_tokens,
        "baton.queued_ms": record.queued_ms,
        "baton.prefill_ms": record.prefill_ms,
        "baton.blocks": record.blocks,
        "baton.body_bytes": record.body_bytes,
    }
    name = "request" if operation is None else f"{operation} {labels.model}"
    error = None
    if failed:
        error = outcome if record.status is not None or outcome == "protocol_error" else str(status)
    trace.finish(name, attributes, error=error, queued=record.queued_ms is not None)


_METHODS: Final = frozenset(("GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH"))
