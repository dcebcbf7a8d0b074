"""ONE request's journey through the filter.

Theory of operation. Envoy opens one gRPC stream a request and sends its parts; the request waits in Envoy until each is
answered. The journey has four phases, and :data:`PHASES` says which events may come in which:

    HEADERS ──> BODY ──> PREFILL ──> ANSWER
        └─ no body: straight to ANSWER ─┘

* HEADERS: the path says how the request is treated; routing headers that the client sent go.
* BODY: the body is read, cleaned, and the decode worker is picked.
* PREFILL: a prefill worker is called, while the stream is watched: if it ends, the client has left, and the call with it.
* ANSWER: the request is with the decode worker; nothing is left to do but to notice the end.

State belongs to the stream: nothing is kept under an id that a client could choose. What a request holds (its place in the
counts of a worker, KV blocks that wait for it) hangs on one exit stack, so that success, error and cancellation give it back
the same way.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from enum import Enum
from typing import Any, TypeVar

import msgspec

from extproc import wire
from extproc.attempts import Ask, Prefilled, Prefiller
from extproc.config import Config
from extproc.errors import ApiError, RelayedError
from extproc.headers import KV_TRANSFER_HEADER, ROUTING_HEADERS
from extproc.inference import InferenceRequest, parse
from extproc.observe.logs import Logger
from extproc.observe.metrics import Metrics
from extproc.paths import Treatment, treatment
from extproc.release import Releaser
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

# Failures of the prefill pool, after which a decode worker may do it all, where the configuration says so.
_AGGREGATE_AFTER = frozenset(
    ("prefill_failed", "prefill_unreachable", "prefill_timeout", "handoff_invalid", "handoff_stale", "no_prefill_worker")
)

_DEADLINE_HEADER = "x-request-timeout-ms"

_STALE_AT_MOST = 3
"""Handoffs too old in a row, after which something is wrong with the clock, the lease or the machine."""

_STANDSTILL_S = 0.3
"""A handoff is read within a fraction of this, unless the whole process stood still."""

_LAST_CHANCE_S = 0.02
"""How long a prefill call may go on after the client has left: enough to read a reply that has come already, since the blocks
of a reply that is not read stay pinned until their lease ends."""


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
        config: Config,
        pool: Pool,
        picker: RoundRobin,
        prefiller: Prefiller,
        releaser: Releaser,
        metrics: Metrics,
        log: Logger,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._pool = pool
        self._picker = picker
        self._prefiller = prefiller
        self._releaser = releaser
        self._metrics = metrics
        self._log = log
        self._clock = clock
        self._max_age_s = config.handoff.lease_s * config.handoff.max_age_share
        self._abandoned: set[asyncio.Task[None]] = set()
        self.open_streams = 0

    async def handle(self, stream: wire.Stream) -> None:
        """Serve one stream to its end."""
        record = _Record()
        started = self._clock()
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
                await stream.send(_error_reply(error, record.treatment))
            except RelayedError as error:
                record.outcome, record.status = "prefill_refused", error.status
                answer = wire.Immediate(error.status, error.body, "prefill_refused", error.content_type)
                await stream.send(wire.immediate_reply(answer))
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
                await stream.send(_error_reply(fault, record.treatment))
            finally:
                self.open_streams -= 1
                self._finish(record, self._clock() - started)

    async def _journey(self, stream: wire.Stream, record: _Record, held: ExitStack) -> None:
        head = await self._expect(stream, Phase.HEADERS, wire.RequestHeaders)
        headers = head.headers
        record.request_id = headers.get("x-request-id") or uuid.uuid4().hex
        record.method = headers.get(":method", "")
        record.path = headers.get(":path", "").partition("?")[0]
        record.treatment = how = treatment(record.method, headers.get(":path", "/"))
        if self.open_streams > self._config.limits.max_streams:
            raise ApiError("too_many_requests", f"{self._config.limits.max_streams} requests are open already")
        if how is Treatment.REFUSED:
            raise ApiError("not_found", f"{record.method} {record.path} is not served here")
        forbidden = tuple(name for name in ROUTING_HEADERS if name in headers)
        if forbidden:
            self._metrics.removed_headers.inc()
        if how is Treatment.MODELS and (models := self._pool.models()):
            record.outcome, record.status = "models", 200
            await stream.send(wire.immediate_reply(wire.Immediate(200, _model_list(models), "models")))
            return
        if head.end_of_stream:
            if how.apart:
                raise ApiError("empty_body", "the request needs a JSON body")
            decode = self._pick(Role.DECODE, record, held, model=None)
            record.outcome = "whole"
            await stream.send(wire.headers_reply(wire.Mutation(remove_headers=forbidden, destination=decode.address)))
            await self._answer(stream)
            return
        await stream.send(wire.headers_reply(wire.Mutation(remove_headers=forbidden)))
        body = (await self._expect(stream, Phase.BODY, wire.RequestBody)).body
        record.body_bytes = len(body)
        if len(body) > self._config.limits.max_body_bytes:
            raise ApiError("request_too_large", f"the body is over {self._config.limits.max_body_bytes} bytes")
        request = _read(body, headers.get("content-type", ""), how)
        for key in request.removed if request else ():
            self._metrics.removed_keys.labels(key).inc()
        if request is not None and how.apart:
            await self._serve_prompt(stream, record, held, headers, request)
        else:
            decode = self._pick(Role.DECODE, record, held, model=None)
            record.outcome = "whole"
            clean = request.clean_body() if request else None
            await stream.send(wire.body_reply(wire.Mutation(body=clean, destination=decode.address)))
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

    async def _serve_prompt(
        self, stream: wire.Stream, record: _Record, held: ExitStack, headers: dict[str, str], request: InferenceRequest
    ) -> None:
        """Send the prompt to its decode worker, with a handoff unless there is a reason against it."""
        model = request.model()
        deadline_s = self._clock() + self._timeout_s(headers)
        # Picked before the prefill: without a decode worker that would be work for nothing.
        decode = self._pick(Role.DECODE, record, held, model=model)
        record.whole_reason = request.whole_reason()
        if record.whole_reason is None:
            ask = Ask(
                request=request,
                path=record.path,
                headers={name: headers[name] for name in _FORWARDED if name in headers},
                model=model,
                request_id=record.request_id,
                deadline_s=deadline_s,
            )
            try:
                await self._hand_over(stream, record, held, ask, decode)
                return
            except ApiError as error:
                if self._config.prefill.fallback != "aggregate" or error.code not in _AGGREGATE_AFTER:
                    raise
                self._metrics.fallbacks.labels("aggregate").inc()
                record.whole_reason = error.code
                decode = self._still_live(decode, record, held, model)
        self._metrics.whole.labels(record.whole_reason).inc()
        record.outcome = "whole"
        await stream.send(wire.body_reply(wire.Mutation(body=request.clean_body(), destination=decode.address)))

    async def _hand_over(self, stream: wire.Stream, record: _Record, held: ExitStack, ask: Ask, decode: Endpoint) -> None:
        prefilled = await self._fresh(stream, record, ask)
        handoff = prefilled.handoff
        # From here on the blocks are given back, unless Envoy has been told to fetch them.
        with ExitStack() as undelivered:
            undelivered.callback(self._releaser.release, handoff)
            if self._clock() - prefilled.since_s > _STANDSTILL_S:
                await self._settle(stream)
            decode = self._still_live(decode, record, held, ask.model)
            record.blocks, record.tokens = handoff.blocks, handoff.tokens
            mutation = wire.Mutation(
                set_headers={KV_TRANSFER_HEADER: handoff.header()},
                body=ask.request.decode_body(handoff.params, prefilled.prompt_token_ids),
                destination=decode.address,
            )
            await stream.send(wire.body_reply(mutation))
            undelivered.pop_all()
        record.outcome = "handoff"
        self._metrics.handoffs.labels(handoff.connector, handoff.prefill, decode.address).inc()
        self._metrics.handoff_blocks.observe(handoff.blocks)

    async def _fresh(self, stream: wire.Stream, record: _Record, ask: Ask) -> Prefilled:
        """A handoff young enough to be used: a decode worker that reads after the lease gets other prompts' blocks."""
        started = self._clock()

        def note(prefill: Endpoint) -> None:
            record.prefill = prefill.address

        try:
            for _ in range(_STALE_AT_MOST):
                try:
                    prefilled = await self._while_there(stream, self._prefiller.obtain(ask, note))
                except NoEndpointError as error:
                    raise _no_endpoint(error) from None
                age_s = self._clock() - prefilled.since_s
                self._metrics.handoff_age_seconds.observe(age_s)
                if age_s <= self._max_age_s:
                    return prefilled
                self._metrics.fallbacks.labels("stale").inc()
                self._log.warning("handoff_stale", request_id=record.request_id, age_s=round(age_s, 3))
                self._releaser.release(prefilled.handoff)
            raise ApiError("handoff_stale", f"{_STALE_AT_MOST} handoffs in a row were over {self._max_age_s:g} s old")
        finally:
            record.prefill_ms = round((self._clock() - started) * 1e3, 1)

    async def _settle(self, stream: wire.Stream) -> None:
        """After a standstill of the process: let it notice first whether the client has left in the meantime.

        The reply would go into a stream that is no more, and the blocks would wait for a worker that was never asked.
        """
        watch = asyncio.ensure_future(stream.stirs())
        try:
            await asyncio.wait((watch,), timeout=_LAST_CHANCE_S)
            if watch.done():
                raise _OverError(await self._receive(stream, Phase.PREFILL))
        finally:
            watch.cancel()

    def _still_live(self, decode: Endpoint, record: _Record, held: ExitStack, model: str) -> Endpoint:
        """The decode worker that was picked, or another one if that has gone in the meantime: any of them can fetch."""
        if decode.live:
            return decode
        self._metrics.fallbacks.labels("decode").inc()
        return self._pick(Role.DECODE, record, held, model=model)

    def _timeout_s(self, headers: dict[str, str]) -> float:
        configured_s = self._config.prefill.timeout_s
        text = headers.get(_DEADLINE_HEADER)
        if text is None:
            return configured_s
        try:
            wanted_ms = float(text)
        except ValueError:
            wanted_ms = 0.0
        if not 0 < wanted_ms < float("inf"):
            raise ApiError("bad_timeout", f"{_DEADLINE_HEADER} must be a positive number of milliseconds")
        return min(configured_s, wanted_ms / 1e3)

    async def _while_there(self, stream: wire.Stream, work: Coroutine[Any, Any, Prefilled]) -> Prefilled:
        """Run ``work``, and stop it the moment something stirs on the stream: the request is over then."""
        task = asyncio.ensure_future(work)
        watch = asyncio.ensure_future(stream.stirs())
        taken = False
        try:
            await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
            if watch.done():
                raise _OverError(await self._receive(stream, Phase.PREFILL))
            taken = True
            return task.result()
        finally:
            watch.cancel()
            if not taken:
                leftover = asyncio.ensure_future(self._abandon(task))
                self._abandoned.add(leftover)
                leftover.add_done_callback(self._abandoned.discard)

    async def _abandon(self, task: asyncio.Task[Prefilled]) -> None:
        """Cancel a prefill that nobody waits for. If its reply is here already, its blocks must be given back."""
        await asyncio.wait((task,), timeout=_LAST_CHANCE_S)
        task.cancel()
        await asyncio.wait((task,))
        if not task.cancelled() and task.exception() is None:
            self._releaser.release(task.result().handoff)

    def _pick(self, role: Role, record: _Record, held: ExitStack, *, model: str | None) -> Endpoint:
        try:
            endpoint = self._picker.pick(self._pool, role, model=model)
        except NoEndpointError as error:
            raise _no_endpoint(error) from None
        setattr(record, role.value, endpoint.address)
        held.enter_context(endpoint.busy())
        return endpoint

    def _finish(self, record: _Record, seconds: float) -> None:
        how = record.treatment.value if record.treatment else "unknown"
        self._metrics.requests.labels(how, record.outcome or "cancelled").inc()
        fields = {key: value for key, value in msgspec.structs.asdict(record).items() if value is not None}
        fields["treatment"] = how
        self._log.info("request", **fields, total_ms=round(seconds * 1e3, 1))


def _no_endpoint(error: NoEndpointError) -> ApiError:
    if error.model is not None:
        return ApiError("model_not_found", f"The model {error.model!r} does not exist.", param="model")
    return ApiError(f"no_{error.role.value}_worker", str(error))


def _error_reply(error: ApiError, how: Treatment | None) -> Any:
    body = error.anthropic_body() if how is Treatment.MESSAGES else error.openai_body()
    return wire.immediate_reply(wire.Immediate(error.status, body, error.code))


def _model_list(models: dict[str, bytes]) -> bytes:
    return msgspec.json.encode({"object": "list", "data": [msgspec.Raw(card) for card in models.values()]})


def _read(body: bytes, content_type: str, how: Treatment) -> InferenceRequest | None:
    """The body as a request; None for what is not JSON and goes on as it is. Raises ApiError."""
    # The engine reads a body without a content type as JSON.
    if content_type and "json" not in content_type.lower():
        if how.apart:
            raise ApiError("unsupported_media_type", "the body must be application/json")
        return None
    try:
        return parse(body, how)
    except ApiError as error:
        if not how.apart and error.code in ("empty_body", "not_an_object"):
            return None
        raise
