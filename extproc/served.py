"""Who served a request, against who was chosen for it: the ledger and the prefix index follow the request.

A gateway may take another worker than it was told to: it knows fewer of them, it could not connect, or its routes retry. Envoy
does so without a word but this one, the address with the start of the answer. What it means for KV blocks that were handed
over is the business of :mod:`extproc.apart`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from extproc.epp import conformance
from extproc.observe.served_by import By

if TYPE_CHECKING:
    from extproc.journey import Journey


def note(journey: Journey, served: str | None) -> By:
    """The answer began. ``served``: ``ip:port`` of who gives it; None: Envoy itself, or it does not say."""
    ticket, parts = journey.ticket, journey.parts
    if ticket is None or ticket.decode is None:
        return "unknown"
    chosen = ticket.decode.address
    by = _compare(journey, chosen, served)
    parts.metrics.answers_served.inc(by)
    if parts.config.epp.conformance_headers:
        journey.answer_headers.update(conformance.answer_headers(chosen, served))
    return by


def _compare(journey: Journey, chosen: str, served: str | None) -> By:
    if served is None:
        return "unknown"
    if served == chosen:
        return "chosen"
    ticket, parts = journey.ticket, journey.parts
    assert ticket is not None
    found = parts.dispatcher.served_by(ticket, served)
    journey.moved_to(None if found is None else found.address)
    if found is not None and served in journey.alternatives:
        parts.metrics.fallbacks.labels("gateway").inc()
        parts.log.warning("served_by_alternative", request_id=journey.record.request_id, chosen=chosen, served=served)
        return "listed"
    parts.served_elsewhere(journey.record.request_id, chosen, served)
    return "stranger" if found is None else "pool"
