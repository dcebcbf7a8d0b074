"""ONE request's journey through the filter.

Theory of operation. Envoy opens one gRPC stream a request and sends its parts; the request waits in Envoy until each is
answered. The journey has four phases, and :data:`PHASES` says which events may come in which:

    HEADERS ──> BODY ──> PREFILL ──> ANSWER
        └─ no body: straight to ANSWER ─┘

* HEADERS: the path says how the request is treated; routing headers that the client sent go.
* BODY: the body is read, cleaned, and the workers are picked.
* PREFILL: the prefill worker is called, while the stream is watched: if it ends, the client has left, and the call with it.
* ANSWER: the request is with the decode worker; nothing is left to do but to notice the end.

State belongs to the stream: nothing is kept under an id that a client could choose. What a request holds (its place in the
counts of a worker) hangs on one exit stack, so that success, error and cancellation give it back the same way.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Coroutine
from contextlib import ExitStack
from enum import Enum
from typing import Any, TypeVar

import msgspec

from extproc import wire
from extproc.config import Limits
from extproc.errors import ApiError, RelayedError
from extproc.handoff import Connector, Handoff, HandoffError
from extproc.headers import KV_TRANSFER_HEADER, ROUTING_HEADERS
from extproc.inference import InferenceRequest, parse
from extproc.observe.logs import Logger
from extproc.observe.metrics import Metrics
from extproc.paths import Treatment, treatment
from extproc.prefill import PrefillClient
from extproc.routing.picker import NoEndpointError, RoundRobin
from extproc.routing.pool import Endpoint, Pool, Role

T = TypeVar("T")


class Phase(Enum):
    """Where a request is."""

    HEADERS = "headers"
    BODY = "body"
    PREFILL = "prefill"
    ANSWER = "answer"


_RESPONSE = (wire.ResponseHeaders, wire.ResponseBody, wire.ResponseTrailers)

PHASES: dict[Phase, tuple[type[Any], ...]] = {
    Phase.HEADERS: (wire.RequestHeaders,),
    # A response before the request is through is an answer of Envoy's own (413, 504): the request is over.
    Phase.BODY: (wire.RequestBody, *_RESPONSE),
    Phase.PREFILL: _RESPONSE,
    Phase.ANSWER: (wire.RequestTrailers, *_RESPONSE),
}

_FORWARDED = ("authorization", "x-api-key", "traceparent", "tracestate", "x-vllm-priority", "x-session-id")
"""Client headers that the prefill leg carries as well: who asks, how urgent it is, and the trace it belongs to."""

_PD = (Treatment.CHAT, Treatment.COMPLETIONS)


class ProtocolError(Exception):
    """Envoy sent what may not come in this phase."""


class _OverError(Exception):
    """The request ended before its worker was chosen: the client left, or Envoy answered it."""

    def __init__(self, event: wire.Event | None) -> None:
        super().__init__("the request is over")
        self.event = event


class _Record(msgspec.Struct):
    """What the log line of a request says."""

    request_id: str = ""
    method: str = ""
    path: str = ""
    treatment: Treatment | None = None
    outcome: str = ""
    status: int | None = None
    """Of an answer that the filter gave itself."""
    whole_reason: str | None = None
    prefill: str | None = None
    decode: str | None = None
    prefill_ms: float | None = None
    blocks: int | None = None
    tokens: int | None = None
    body_bytes: int = 0


class Filter:
    """Serves ext_proc streams. One instance a process; it keeps no state of any single request."""

    def __init__(
        self,
        *,
        pool: Pool,
        picker: RoundRobin,
        connector: Connector,
        prefill: PrefillClient,
        limits: Limits,
        metrics: Metrics,
        log: Logger,
    ) -> None:
        self._pool = pool
        self._picker = picker
        self._connector = connector
        self._prefill = prefill
        self._limits = limits
        self._metrics = metrics
        self._log = log
        self.open_streams = 0

    async def handle(self, stream: wire.Stream) -> None:
        """Serve one stream to its end."""
        record = _Record()
        started = time.monotonic()
        self.open_streams += 1
        with ExitStack() as held:
            try:
                await self._journey(stream, record, held)
            except _OverError as over:
                record.outcome = "cancelled"
                if over.event is not None:
                    await stream.send(wire.go_on(over.event))
                    await self._answer(stream)
            except ApiError as error:
                record.outcome, record.status = error.code, error.status
                await stream.send(wire.immediate_reply(wire.Immediate(error.status, error.body(), error.code)))
            except RelayedError as error:
                record.outcome, record.status = "prefill_refused", error.status
                await stream.send(
                    wire.immediate_reply(wire.Immediate(error.status, error.body, "prefill_refused", error.content_type))
                )
            except asyncio.CancelledError:
                # Envoy resets the stream both when a client leaves and after a finished answer.
                record.outcome = record.outcome or "cancelled"
                raise
            except (ProtocolError, wire.UnsupportedModeError):
                record.outcome = "protocol_error"
                raise
            except Exception:
                record.outcome, record.status = "internal_error", 500
                self._log.exception("internal_error", request_id=record.request_id)
                fault = ApiError("internal_error", f"Baton failed; request id {record.request_id}")
                await stream.send(wire.immediate_reply(wire.Immediate(fault.status, fault.body(), fault.code)))
            finally:
                self.open_streams -= 1
                self._finish(record, time.monotonic() - started)

    async def _journey(self, stream: wire.Stream, record: _Record, held: ExitStack) -> None:
        head = await self._expect(stream, Phase.HEADERS, wire.RequestHeaders)
        headers = head.headers
        record.request_id = headers.get("x-request-id") or uuid.uuid4().hex
        record.method = headers.get(":method", "")
        record.path = headers.get(":path", "").partition("?")[0]
        record.treatment = how = treatment(record.method, headers.get(":path", "/"))
        if self.open_streams > self._limits.max_streams:
            raise ApiError("too_many_requests", f"{self._limits.max_streams} requests are open already")
        if how is Treatment.REFUSED:
            raise ApiError("not_found", f"{record.method} {record.path} is not served here")
        forbidden = tuple(name for name in ROUTING_HEADERS if name in headers)
        if forbidden:
            self._metrics.removed_headers.inc()
        if head.end_of_stream:
            if how in _PD:
                raise ApiError("empty_body", "the request needs a JSON body")
            decode = self._pick(Role.DECODE, record, held)
            record.outcome = "whole"
            await stream.send(wire.headers_reply(wire.Mutation(remove_headers=forbidden, destination=decode.address)))
        else:
            await stream.send(wire.headers_reply(wire.Mutation(remove_headers=forbidden)))
            body = (await self._expect(stream, Phase.BODY, wire.RequestBody)).body
            record.body_bytes = len(body)
            mutation = await self._route(stream, record, held, headers, body)
            await stream.send(wire.body_reply(mutation))
        await self._answer(stream)

    async def _expect(self, stream: wire.Stream, phase: Phase, wanted: type[T]) -> T:
        """The one event that carries the request on. Raises _OverError, ProtocolError."""
        event = await self._receive(stream, phase)
        if not isinstance(event, wanted):
            raise _OverError(event)
        return event

    async def _receive(self, stream: wire.Stream, phase: Phase) -> wire.Event | None:
        event = await stream.receive()
        if event is not None and not isinstance(event, PHASES[phase]):
            raise ProtocolError(f"{type(event).__name__} in phase {phase.value}")
        return event

    async def _answer(self, stream: wire.Stream) -> None:
        while (event := await self._receive(stream, Phase.ANSWER)) is not None:
            await stream.send(wire.go_on(event))

    async def _route(
        self, stream: wire.Stream, record: _Record, held: ExitStack, headers: dict[str, str], body: bytes
    ) -> wire.Mutation:
        """Body -> what Envoy shall send, and to which decode worker; the prefill is done by then."""
        if len(body) > self._limits.max_body_bytes:
            raise ApiError("request_too_large", f"the body is over {self._limits.max_body_bytes} bytes")
        assert record.treatment is not None
        request = _read(body, headers.get("content-type", ""), record.treatment)
        for key in request.removed if request else ():
            self._metrics.removed_keys.labels(key).inc()
        if record.treatment in _PD:
            assert request is not None
            record.whole_reason = request.whole_reason()
            if record.whole_reason is None:
                return await self._hand_over(stream, record, held, headers, request)
            self._metrics.whole.labels(record.whole_reason).inc()
        decode = self._pick(Role.DECODE, record, held)
        record.outcome = "whole"
        return wire.Mutation(body=request.clean_body() if request else None, destination=decode.address)

    async def _hand_over(
        self, stream: wire.Stream, record: _Record, held: ExitStack, headers: dict[str, str], request: InferenceRequest
    ) -> wire.Mutation:
        # Both are picked before the prefill: without a decode worker it would be work for nothing.
        decode = self._pick(Role.DECODE, record, held)
        with ExitStack() as prefilling:
            prefill = self._pick(Role.PREFILL, record, prefilling)
            started = time.monotonic()
            outcome = "cancelled"
            try:
                with self._metrics.prefills_in_flight.track_inprogress():
                    handoff = await self._while_there(stream, self._run_prefill(prefill, record.path, headers, request))
                outcome = "ok"
            except (ApiError, RelayedError) as error:
                outcome = "failed"
                if isinstance(error, ApiError):
                    self._log.warning(
                        "prefill_failed", request_id=record.request_id, prefill=prefill.address, code=error.code,
                        reason=error.message,
                    )  # fmt: skip
                raise
            finally:
                seconds = time.monotonic() - started
                record.prefill_ms = round(seconds * 1e3, 1)
                self._metrics.prefill_seconds.labels(outcome).observe(seconds)
        record.outcome = "handoff"
        record.blocks, record.tokens = handoff.blocks, handoff.tokens
        self._metrics.handoffs.labels(handoff.connector, handoff.prefill, decode.address).inc()
        self._metrics.handoff_blocks.observe(handoff.blocks)
        return wire.Mutation(
            set_headers={KV_TRANSFER_HEADER: handoff.header()},
            body=request.decode_body(handoff.params),
            destination=decode.address,
        )

    async def _run_prefill(self, prefill: Endpoint, path: str, headers: dict[str, str], request: InferenceRequest) -> Handoff:
        forwarded = {name: headers[name] for name in _FORWARDED if name in headers}
        # The engine makes its own id of this one, so it must be unique whatever the client sent.
        forwarded["x-request-id"] = uuid.uuid4().hex
        body = request.prefill_body(self._connector.prefill_params())
        reply = await self._prefill.run(prefill.address, path, body, forwarded)
        try:
            return self._connector.accept(reply, prefill=prefill.address)
        except HandoffError as error:
            raise ApiError("handoff_invalid", f"the prefill worker's answer cannot be handed over: {error}") from None

    async def _while_there(self, stream: wire.Stream, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work``, and stop it the moment something stirs on the stream: the request is over then."""
        task = asyncio.ensure_future(work)
        watch = asyncio.ensure_future(stream.stirs())
        try:
            await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
            if watch.done():
                raise _OverError(await self._receive(stream, Phase.PREFILL))
            return task.result()
        finally:
            watch.cancel()
            if not task.cancel() and not task.cancelled():
                task.exception()  # seen, even if the request was over first

    def _pick(self, role: Role, record: _Record, held: ExitStack) -> Endpoint:
        try:
            endpoint = self._picker.pick(self._pool, role)
        except NoEndpointError as error:
            raise ApiError(f"no_{error.role.value}_worker", str(error)) from None
        setattr(record, role.value, endpoint.address)
        held.enter_context(endpoint.busy())
        return endpoint

    def _finish(self, record: _Record, seconds: float) -> None:
        how = record.treatment.value if record.treatment else "unknown"
        self._metrics.requests.labels(how, record.outcome or "cancelled").inc()
        fields = {key: value for key, value in msgspec.structs.asdict(record).items() if value is not None}
        fields["treatment"] = how
        self._log.info("request", **fields, total_ms=round(seconds * 1e3, 1))


def _read(body: bytes, content_type: str, how: Treatment) -> InferenceRequest | None:
    """The body as a request; None for what is not JSON and goes on as it is. Raises ApiError."""
    # The engine reads a body without a content type as JSON.
    if content_type and "json" not in content_type.lower():
        if how in _PD:
            raise ApiError("unsupported_media_type", "the body must be application/json")
        return None
    try:
        return parse(body, how)
    except ApiError as error:
        if how not in _PD and error.code in ("empty_body", "not_an_object"):
            return None
        raise
