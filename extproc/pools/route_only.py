"""``routes.only``: the filter before a gateway's own endpoint pickers.

It reads what a request is for, says so in headers, and has Envoy match its routes again. Which worker serves it is decided
behind the route.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial

from extproc import wire
from extproc.filter import READ_AT_ONCE_BYTES, Filter, read_body
from extproc.inference import InferenceRequest
from extproc.journey import Journey
from extproc.observe.own_time import REPLY
from extproc.pools.choice import pool_of


class RouteFilter(Filter):
    """As its parent, up to the point where workers would be chosen."""

    is_last = False
    watches_answers = False

    async def _serve_bodiless(self, journey: Journey, headers: dict[str, str], forbidden: tuple[str, ...]) -> None:
        other = self._read_other(journey, headers, None)
        change = self._change(journey, other.model, other.aims.decode_labels, None, forbidden)
        await journey.stream.send(wire.headers_reply(change))

    async def _serve_body(self, journey: Journey, headers: dict[str, str], body: bytes) -> None:
        record, parts = journey.record, self._parts
        assert record.treatment is not None
        request = read_body(body, headers.get("content-type", ""), record.treatment)
        for key in request.removed if request else ():
            parts.metrics.removed_keys.labels(key).inc()
        model: str | None
        sent: InferenceRequest | None
        if request is not None and record.treatment.apart:
            read = partial(
                parts.intake.read,
                request,
                headers=headers,
                path=record.path,
                size_bytes=record.body_bytes,
                request_id=record.request_id,
                arrived_s=parts.clock(),
                deadline_s=parts.clock(),
            )
            asked = read() if record.body_bytes <= READ_AT_ONCE_BYTES else await asyncio.to_thread(read)
            record.policy = asked.job.aims.policy
            sent, model, labels = asked.request, asked.job.model, asked.job.aims.decode_labels
        else:
            other = self._read_other(journey, headers, request)
            sent, model, labels = other.request, other.model, other.aims.decode_labels
        journey.enter(REPLY)
        change = self._change(journey, model, labels, sent.clean_body() if sent else None, ())
        await journey.stream.pass_body(change, body)

    def _change(
        self, journey: Journey, model: str | None, labels: Mapping[str, str], body: bytes | None, forbidden: tuple[str, ...]
    ) -> wire.Mutation:
        """A request that goes on to the route that its headers now say."""
        journey.record.outcome, journey.record.pool = "routed", pool_of(labels)
        return wire.Mutation(
            set_headers={**journey.onward, **self._parts.routes.of(model, labels)},
            remove_headers=forbidden,
            body=body,
            tags=journey.marks("none"),
            clear_route_cache=True,
        )
