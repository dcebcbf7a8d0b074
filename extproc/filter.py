"""The filter: every request that Envoy shows us, from its headers to the end of its answer.

Theory of operation. Envoy opens one gRPC stream a request and sends its parts; the request waits in Envoy until each is
answered. The journey has four phases, and the table :data:`extproc.journey.PHASES` says which events may come in which:

    HEADERS ──> BODY ──> QUEUE ──> PREFILL ──> ANSWER
        └─ no body: straight to ANSWER ──────────┘

* HEADERS: the path says how the request is treated; routing headers that the client sent go.
* BODY: the body is read and cleaned; its policy says what it aims at.
* QUEUE: it waits for its workers, if it must: the stream is watched, and if it ends, the place in the queue is given up.
* PREFILL: a prefill worker is called, while the stream is watched: if it ends, the client has left, and the call with it.
* ANSWER: the request is with the decode worker; nothing is left to do but to notice the end.

State belongs to the stream: nothing is kept under an id that a client could choose. What a request holds (its place in the
counts of a worker, KV blocks that wait for it) hangs on one exit stack, so that success, error and cancellation give it back
the same way.
"""

from __future__ import annotations

import asyncio
import math
import random
import uuid
from functools import partial
from typing import Any, Final

import msgspec

from extproc import apart, wire
from extproc.attempts import Ask
from extproc.epp import conformance
from extproc.errors import ApiError, RelayedError
from extproc.forms import refuse_transfer_fields
from extproc.headers import CREDENTIAL_HEADERS, DECISION_HEADER, MODEL_HEADER, POOL_HEADER, ROUTING_HEADERS
from extproc.inference import InferenceRequest, parse
from extproc.intake import Other
from extproc.journey import AT_ONCE, Journey, OverError, Parts, Phase, ProtocolError
from extproc.next_turn.store import Turn
from extproc.observe.own_line import line_of
from extproc.observe.own_time import ANSWER, PARSE, PHASES, REPLY
from extproc.observe.reasons import reason_of
from extproc.observe.request_log import RequestLine, RequestLog
from extproc.observe.request_span import finish
from extproc.observe.shown import shown
from extproc.paths import Treatment, treatment
from extproc.policy import override_headers
from extproc.routing.job import Job
from extproc.routing.pool import Role
from extproc.tokens.source import Wanted

_FORWARDED = ("authorization", "x-api-key", "traceparent", "tracestate", "x-vllm-priority", "x-session-id")
"""Client headers that the prefill leg carries as well: who asks, how urgent it is, and the trace it belongs to."""

# Failures of the prefill pool, after which a decode worker may do it all, where the configuration says so.
_AGGREGATE_AFTER = frozenset(
    ("prefill_failed", "prefill_unreachable", "prefill_timeout", "handoff_invalid", "handoff_stale", "no_prefill_worker")
)

_DEADLINE_HEADERS = ("x-request-timeout-ms", "x-envoy-upstream-rq-timeout-ms", "x-envoy-expected-rq-timeout-ms")
"""How long the client will wait; the first that is there counts. Envoy strips its own ones from what comes from outside."""


_WENT_WELL = frozenset(("handoff", "whole", "models", "routed"))
_OF_ROUTES = frozenset((MODEL_HEADER, POOL_HEADER))
"""Headers that a filter before this one may have set to have a route chosen by them: no sign of a client that tries it."""
_SENT_ON = frozenset(("handoff", "whole", "routed"))

_ID_CHARS: Final = 128
_METHOD_CHARS: Final = 16
_PATH_CHARS: Final = 128
"""What a log line shows of what a client chose."""

READ_AT_ONCE_BYTES = 512 << 10
"""The chain of a larger prompt is made in a thread."""


class Filter:
    """Serves ext_proc streams. One instance a process; it keeps no state of any single request."""

    is_last = True
    """Nobody between this filter and the engines reads what a client wishes for by ``x-baton-…``."""
    watches_answers = True
    """Whether the start of the answer to a prompt is of use."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._request_log = parts.request_log or RequestLog(parts.log)
        self._phases = [parts.metrics.filter_phase_seconds.child(phase) for phase in PHASES]
        self._own = parts.metrics.filter_seconds.child()
        # What stands in their place is on every request already.
        replaced = () if parts.credentials is None else CREDENTIAL_HEADERS
        self._forwarded = tuple(name for name in _FORWARDED if name not in replaced)
        self.open_streams = 0
        self.held_bytes = 0

    async def handle(self, stream: wire.Stream) -> None:
        """Serve one stream to its end."""
        started = self._parts.clock()
        self.open_streams += 1
        self._parts.recent.came()
        journey = Journey(self._parts, stream)
        try:
            await journey.own.of(self._serve(journey))
        finally:
            self.open_streams -= 1
            try:
                ended = self._parts.clock()
                self._note(journey, ended - started)
                if self._parts.config.epp.enabled:
                    self._tell(journey, started, ended)
            finally:
                journey.held.release()
                # It refers to the journey: a cycle, which would stay in memory until the garbage collector looks for it.
                journey.on_answer = None

    async def _serve(self, journey: Journey) -> None:
        """All of it, with an answer to whatever goes wrong."""
        stream, record = journey.stream, journey.record
        try:
            await self._travel(journey)
        except OverError as over:
            record.outcome = "cancelled"
            if over.event is not None:
                await stream.send(wire.go_on(over.event))
                await journey.to_the_end()
        except ApiError as error:
            record.outcome, record.status = error.code, error.status
            await stream.send(_error_reply(error, journey))
        except RelayedError as error:
            record.outcome, record.status = "prefill_refused", error.status
            tags = journey.marks("none")
            answer = wire.Immediate(error.status, error.body, "prefill_refused", error.content_type, tags=tags)
            await stream.send(wire.immediate_reply(answer))
        except wire.GoneError:
            record.outcome = "cancelled"
        except asyncio.CancelledError:
            # Envoy resets the stream both when a client leaves and after a finished answer.
            record.outcome = record.outcome or "cancelled"
            raise
        except (ProtocolError, wire.UnsupportedModeError):
            record.outcome = "protocol_error"
            raise
        except Exception:
            record.outcome, record.status = "internal_error", 500
            self._parts.log.exception("internal_error", request_id=record.request_id)
            fault = ApiError("internal_error", f"Baton failed; request id {record.request_id}")
            await stream.send(_error_reply(fault, journey))

    async def _travel(self, journey: Journey) -> None:
        """From the headers to the end of the answer."""
        parts, stream, record = self._parts, journey.stream, journey.record
        head = await journey.expect(Phase.HEADERS, wire.RequestHeaders)
        headers = head.headers
        journey.only = self._allowed(head)
        record.request_id = shown(headers.get("x-request-id", ""), _ID_CHARS) or uuid.uuid4().hex
        record.method = headers.get(":method", "")
        record.path = headers.get(":path", "").partition("?")[0]
        if parts.tracing is not None:
            journey.trace, unsampled = parts.tracing.begin(headers, stream.called_with("traceparent"))
            journey.onward["traceparent"] = unsampled if journey.trace is None else journey.trace.decode_context
        record.treatment = how = treatment(record.method, headers.get(":path", "/"))
        limits = parts.config.limits
        if self.open_streams > limits.max_streams:
            raise ApiError("too_many_requests", f"{limits.max_streams} requests are open already")
        if how is Treatment.REFUSED:
            raise ApiError("not_found", f"{record.method} {record.path} is not served here")
        forbidden = tuple(name for name in ROUTING_HEADERS if name in headers)
        if forbidden and not _OF_ROUTES.issuperset(forbidden):
            parts.metrics.removed_headers.inc()
        if self.is_last:
            forbidden += tuple(override_headers(headers))
        if (own := parts.credentials) is not None:
            forbidden += tuple(name for name in CREDENTIAL_HEADERS if name in headers and name not in own)
            journey.onward.update(own)
        if how is Treatment.MODELS and (models := parts.pool.models()):
            record.outcome, record.status = "models", 200
            cards = parts.intake.names.cards(models)
            answer = wire.Immediate(200, _model_list(cards), "models", tags=journey.marks("none"))
            await stream.send(wire.immediate_reply(answer))
            return
        if head.end_of_stream:
            if how.apart:
                raise ApiError("empty_body", "the request needs a JSON body")
            await self._serve_bodiless(journey, headers, forbidden)
        else:
            watch = how.apart and self.watches_answers
            change = wire.Mutation(remove_headers=forbidden, watch_answer=watch, tags=journey.marks("none"))
            await stream.pass_headers(change)
            journey.enter(PARSE)
            try:
                body = await self._read_body(journey, head)
                await self._serve_body(journey, headers, body)
            finally:
                self.held_bytes -= record.body_bytes
        journey.enter(ANSWER)
        await journey.to_the_end()

    async def _serve_bodiless(self, journey: Journey, headers: dict[str, str], forbidden: tuple[str, ...]) -> None:
        """All of it is in its headers."""
        record = journey.record
        other = self._read_other(journey, headers, None)
        decode = journey.place_other(aims=other.aims)
        record.outcome = "whole"
        route = journey.route(decode)
        change = wire.Mutation(
            set_headers={**journey.onward, **route} if route else journey.onward,
            remove_headers=forbidden,
            destination=journey.destination(decode),
            tags=journey.marks("none"),
            clear_route_cache=bool(route),
        )
        await journey.stream.send(wire.headers_reply(change))

    def _read_other(self, journey: Journey, headers: dict[str, str], request: InferenceRequest | None) -> Other:
        """What is no prompt. ``request``: its JSON body, if it has one."""
        record = journey.record
        return self._parts.intake.read_other(
            request, headers=headers, path=record.path, request_id=record.request_id, aims=AT_ONCE
        )

    async def _read_body(self, journey: Journey, head: wire.RequestHeaders) -> bytes:
        """The whole body, which counts as held from its first piece on. Raises ApiError, OverError, ProtocolError."""
        record, limits = journey.record, self._parts.config.limits
        pieces: list[bytes] = []
        while True:
            event = await journey.receive(Phase.BODY)
            if isinstance(event, wire.RequestTrailers) and head.full_duplex:
                return b"".join(pieces)
            if not isinstance(event, wire.RequestBody):
                raise OverError(event)
            piece = event.body
            if record.body_bytes + len(piece) > limits.max_body_bytes:
                raise ApiError("request_too_large", f"the body is over {limits.max_body_bytes} bytes")
            if self.held_bytes + len(piece) > limits.max_held_bytes:
                raise ApiError("too_many_requests", f"bodies of {self.held_bytes} bytes are held already")
            record.body_bytes += len(piece)
            self.held_bytes += len(piece)
            if not head.full_duplex:
                return piece
            pieces.append(piece)
            if event.end_of_stream:
                return b"".join(pieces)

    async def _serve_body(self, journey: Journey, headers: dict[str, str], body: bytes) -> None:
        """From the body to the reply that lets Envoy send it on."""
        parts, stream, record = self._parts, journey.stream, journey.record
        assert record.treatment is not None
        request = read_body(body, headers.get("content-type", ""), record.treatment)
        for key in request.removed if request else ():
            parts.metrics.removed_keys.labels(key).inc()
        if request is not None and record.treatment.apart:
            await self._serve_prompt(journey, headers, request, body)
        else:
            other = self._read_other(journey, headers, request)
            decode = journey.place_other(len(body), model=other.model, aims=other.aims)
            record.outcome = "whole"
            route = journey.route(decode)
            change = wire.Mutation(
                set_headers={**journey.onward, **route} if route else journey.onward,
                body=other.request.clean_body() if other.request else None,
                destination=journey.destination(decode),
                tags=journey.marks("none"),
                clear_route_cache=bool(route),
            )
            await stream.pass_body(change, body)

    async def _serve_prompt(self, journey: Journey, headers: dict[str, str], request: InferenceRequest, body: bytes) -> None:
        """Send the prompt to its workers, with a handoff where that is worth it and nothing is against it."""
        parts, record = self._parts, journey.record
        arrived_s = parts.clock()
        deadline_s = arrived_s + self._timeout_s(headers)
        read = partial(
            parts.intake.read,
            request,
            headers=headers,
            path=record.path,
            size_bytes=record.body_bytes,
            request_id=record.request_id,
            arrived_s=arrived_s,
            deadline_s=deadline_s,
        )
        asked = read() if record.body_bytes <= READ_AT_ONCE_BYTES else await asyncio.to_thread(read)
        for name in asked.resolved.ignored_overrides:
            parts.metrics.ignored_overrides.labels(name).inc()
        request, job, record.whole_reason = asked.request, asked.job, asked.whole_reason
        job.only = journey.only
        journey.job = job
        if request.streamed():
            journey.observed.states_usage = request.states_usage()
            sample = asked.resolved.sample
            share = parts.config.observe.sample if sample is None else sample
            parts.observer.draw(journey.observed, share, record.request_id)
        tokens = None
        if parts.tokens is not None:
            tokens = await parts.tokens.find(request, job.model or "", job.chain.hashes)
            job.token_chain, job.token_chain_whole = tokens.chain, tokens.whole
            if parts.directory is not None and tokens.chain is not None:
                job.stored_tokens = await parts.directory.lookup(tokens.chain, job.model or "")
        turn = self._turn(request, job, tokens)
        journey.tenant = parts.metrics.accounts.tenant(job.tenant, asked.resolved.policy.tenant_header)
        try:
            ticket = await journey.place(job)
        except ApiError as error:
            if not asked.fallback or error.code != "no_prefill_worker":
                raise
            parts.metrics.fallbacks.labels("aggregate").inc()
            record.whole_reason, job.handoff = error.code, False
            ticket = await journey.place(job, instead_of=error.code)
        assert ticket.decision is not None and ticket.decode is not None
        if asked.resolved.explain:
            journey.answer_headers[DECISION_HEADER] = ticket.decision.header()
        decode = ticket.decode
        if ticket.prefill is not None:
            ask = Ask(
                request=request,
                body=body,
                path=record.path,
                headers={**{name: headers[name] for name in self._forwarded if name in headers}, **journey.onward},
                model=job.model or "",
                decode=decode.address,
                request_id=record.request_id,
                deadline_s=deadline_s,
                retries=asked.retries,
                text_bytes=asked.prompt.text_bytes,
                trace=journey.trace,
                tokens=tokens,
                turn=turn,
            )
            try:
                await apart.serve(journey, ask, ticket)
                return
            except ApiError as error:
                dispatched = record.outcome == "handoff"  # too late for anything else
                if dispatched or not asked.fallback or error.code not in _AGGREGATE_AFTER:
                    raise
                parts.metrics.fallbacks.labels("aggregate").inc()
                record.whole_reason = error.code
                decode = apart.still_live(journey, ticket)
        if turn is not None and parts.next_turns is not None:
            parts.next_turns.unused(turn, "went_back" if decode is turn.endpoint else "elsewhere")
        journey.enter(REPLY)
        record.whole_reason = record.whole_reason or reason_of(ticket.decision)
        parts.metrics.whole.inc(record.whole_reason)
        journey.whole_to(decode.address)
        parts.recent.whole()
        record.outcome = "whole"
        route = journey.route(decode)
        change = wire.Mutation(
            set_headers={**journey.onward, **journey.rank(), **route},
            body=request.clean_body(),
            destination=journey.destination(decode),
            tags=journey.marks("aggregate"),
            clear_route_cache=bool(route),
        )
        await journey.stream.pass_body(change, body)

    def _turn(self, request: InferenceRequest, job: Job, tokens: Wanted | None) -> Turn | None:
        """The turn that the prompt continues, where a decode worker keeps its blocks."""
        turns = self._parts.next_turns
        if turns is None or tokens is None or not job.handoff or not request.tells_token_ids:
            return None
        known = tokens.chain is not None and tokens.whole and not tokens.media
        turn = turns.find(tokens.chain if known else None, job.model or "")
        if turn is not None:
            job.next_turn = turns.offer(turn)
        return turn

    def _allowed(self, head: wire.RequestHeaders) -> frozenset[str] | None:
        """Decode workers among which one may be chosen; None: among all."""
        wanted = head.headers.get(conformance.SELECTION_HEADER)
        if wanted is None or not self._parts.config.epp.conformance_headers:
            return head.subset
        known = (each.address for each in self._parts.pool.live(Role.DECODE))
        found = conformance.selection(wanted, known)
        return found if head.subset is None else found & head.subset

    def _timeout_s(self, headers: dict[str, str]) -> float:
        configured_s = self._parts.config.prefill.timeout_s
        name = next((name for name in _DEADLINE_HEADERS if name in headers), None)
        if name is None:
            return configured_s
        try:
            wanted_ms = float(headers[name])
        except ValueError:
            wanted_ms = 0.0
        if not 0 < wanted_ms < float("inf"):
            raise ApiError("bad_timeout", f"{name} must be a positive number of milliseconds")
        return min(configured_s, wanted_ms / 1e3)

    def _note(self, journey: Journey, seconds: float) -> None:
        record, metrics = journey.record, self._parts.metrics
        how = record.treatment.value if record.treatment else "unknown"
        if record.status is not None:
            self._parts.recent.answered(record.status)
        labels = journey.labels or journey.tags("none")
        metrics.requests.inc(how, labels.model, labels.policy, labels.mode, record.outcome or "cancelled")
        own_s = 0.0
        for observe, spent_s in zip(self._phases, journey.own.spent_s, strict=True):
            if spent_s:
                own_s += spent_s
                observe(spent_s)
        self._own(own_s)
        if journey.computed and journey.job is not None and not journey.estimated:
            tokens = journey.job.tokens if record.tokens is None else record.tokens
            metrics.accounts.note_prompt(labels.model, labels.tenant, tokens, record.reported_cached_tokens)
        if record.pool is not None and record.outcome in _SENT_ON:
            metrics.pool_requests.inc(record.pool)
        if journey.trace is not None:
            finish(journey.trace, journey)
        self._log_line(journey, how, seconds)

    def _tell(self, journey: Journey, started_s: float, ended_s: float) -> None:
        """No Envoy reports the request."""
        line = line_of(journey, started_s, ended_s)
        if line is not None:
            self._parts.observer.ended(line, journey.observed.note)

    def _log_line(self, journey: Journey, how: str, seconds: float) -> None:
        """The request's line, unless it went well and is not drawn."""
        record, config = journey.record, self._parts.config
        failed = record.outcome not in _WENT_WELL or (journey.answer_status or 0) >= 400
        unusual = failed or seconds >= config.log_slow_s
        if not unusual and config.log_sample < 1 and random.random() >= config.log_sample:  # noqa: S311  # draws a sample
            self._parts.metrics.log_lines.inc("left_out")
            return
        self._parts.metrics.log_lines.inc("logged")
        self._request_log.write(
            RequestLine(
                request_id=record.request_id,
                method=shown(record.method, _METHOD_CHARS),
                path=shown(record.path, _PATH_CHARS),
                treatment=how,
                outcome=record.outcome,
                status=record.status,
                whole_reason=record.whole_reason,
                prefill=record.prefill,
                decode=record.decode,
                policy=record.policy,
                pool=record.pool,
                queued_ms=record.queued_ms,
                prefill_ms=record.prefill_ms,
                blocks=record.blocks,
                tokens=record.tokens,
                cached_tokens=record.cached_tokens,
                reported_cached_tokens=record.reported_cached_tokens,
                body_bytes=record.body_bytes,
                answer_status=journey.answer_status,
                trace_id=None if journey.trace is None else journey.trace.trace_id,
                total_ms=round(seconds * 1e3, 1),
            )
        )


def _error_reply(error: ApiError, journey: Journey) -> Any:
    body = error.anthropic_body() if journey.record.treatment is Treatment.MESSAGES else error.openai_body()
    headers = {} if error.retry_after_s is None else {"retry-after": str(math.ceil(error.retry_after_s))}
    tags = journey.marks("none")
    return wire.immediate_reply(wire.Immediate(error.status, body, error.code, headers=headers, tags=tags))


def _model_list(models: dict[str, bytes]) -> bytes:
    return msgspec.json.encode({"object": "list", "data": [msgspec.Raw(card) for card in models.values()]})


def read_body(body: bytes, content_type: str, how: Treatment) -> InferenceRequest | None:
    """The body as a request; None for what is not JSON and goes on as it is. Raises ApiError."""
    kind = content_type.partition(";")[0].lower()
    if how.apart:
        # What vLLM refuses before its handler must not come as far as a handoff, which would be left to its lease.
        if kind != "application/json":
            raise ApiError("unsupported_media_type", "the body must be application/json")
    elif kind and "json" not in kind:
        refuse_transfer_fields(body, content_type)
        return None  # whoever reads a body without a content type may take it for JSON
    try:
        return parse(body, how)
    except ApiError as error:
        if not how.apart and error.code in ("empty_body", "not_an_object"):
            return None
        raise
