"""One trace of each request: what the filter did, in spans, and the context that both legs carry.

Imported only where tracing is on. While a request is under way only times are noted; its spans are made when it is over, and
sent by a thread (:mod:`extproc.observe.span_queue`). Of the client's data there is nothing in them but bounded labels.

The parent is, in this order: the span of Envoy's call to us, if Envoy traces; the ``traceparent`` of the request; none.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec
from opentelemetry import trace
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.sampling import Decision as Decided
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.re import parse_env_headers

from extproc import __version__
from extproc.config import ConfigError, collector
from extproc.config import Tracing as Settings
from extproc.observe.logs import Logger
from extproc.observe.otlp import Exporter, GrpcTransport, HttpTransport
from extproc.observe.own_time import ANSWER, DECIDE, PARSE, QUEUE
from extproc.observe.span_queue import SHUTDOWN_S, SpanQueue
from extproc.routing.decision import Decision
from extproc.tls.files import Followed
from extproc.tls.header_file import HeaderFile

TRACEPARENT: Final = "traceparent"

_ERROR, _UNSET = Status(StatusCode.ERROR), Status(StatusCode.UNSET)
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)

# Phases of own_time.py that are a span each, and its name.
_SPANS: Final = {PARSE: "parse", DECIDE: "decide", QUEUE: "queue", ANSWER: "decode"}

_COMPLAIN_S: Final = 60.0


class Span:
    """One part of a request's trace."""

    __slots__ = ("attributes", "end_ns", "error", "events", "id", "kind", "name", "start_ns")

    def __init__(self, name: str, start_ns: int, kind: SpanKind = SpanKind.INTERNAL) -> None:
        self.name = name
        self.kind = kind
        self.id = _random_id(64)
        self.start_ns = start_ns
        self.end_ns = 0
        self.error: str | None = None
        """A code, if it failed."""
        self.attributes: dict[str, Any] = {}
        self.events: list[tuple[str, int]] = []


class RequestTrace:
    """The spans of one request that is sampled."""

    def __init__(self, tracing: Tracing, trace_id: int, parent: SpanContext | None) -> None:
        self._tracing = tracing
        self._trace_id = trace_id
        self._parent = parent
        now_ns = time.time_ns()
        self.root = Span("request", now_ns, SpanKind.SERVER)
        self._spans: list[Span] = []
        self._phase: Span | None = None
        # Its id goes to the decode worker before it begins.
        self._decode = Span(_SPANS[ANSWER], 0, SpanKind.CLIENT)
        self._decide: Span | None = None
        """The last, if there was more than one."""
        self.decision: Decision | None = None
        """Once it is placed."""

    @property
    def trace_id(self) -> str:
        """For the log."""
        return f"{self._trace_id:032x}"

    @property
    def decode_context(self) -> str:
        """``traceparent`` of the request that goes on to the worker that answers."""
        return _header(self._trace_id, self._decode.id, sampled=True)

    def enter(self, phase: int) -> None:
        """A phase of :mod:`extproc.observe.own_time` begins, and the one before ends."""
        now_ns = time.time_ns()
        if self._phase is not None:
            self._phase.end_ns = now_ns
            self._phase = None
        name = _SPANS.get(phase)
        if name is not None:
            span = self._phase = self._decode if phase == ANSWER else Span(name, now_ns)
            span.start_ns = now_ns
            self._spans.append(span)
            if phase == DECIDE:
                self._decide = span

    def answered(self, status: int) -> None:
        """The decode worker's answer begins."""
        self._decode.events.append(("answer begins", time.time_ns()))
        self._decode.attributes["http.response.status_code"] = status
        if status >= 500:
            self._decode.error = str(status)

    def prefill(self, worker: str, request_id: str) -> tuple[Span, str]:
        """A call to a prefill worker begins: its span, and the ``traceparent`` that it carries."""
        span = Span("prefill", time.time_ns(), SpanKind.CLIENT)
        span.attributes["server.address"] = worker
        span.attributes["baton.worker_request_id"] = request_id
        self._spans.append(span)
        return span, _header(self._trace_id, span.id, sampled=True)

    def prefilled(self, span: Span, error: str | None, **attributes: Any) -> None:
        """It is over. ``error``: its code, if it failed."""
        span.end_ns = time.time_ns()
        span.error = error
        span.attributes.update((f"baton.{key}", value) for key, value in attributes.items() if value is not None)

    def finish(self, name: str, attributes: Mapping[str, Any], *, error: str | None, queued: bool) -> None:
        """The request is over. Attributes without a value are left out; ``queued``: whether it had to wait."""
        now_ns = time.time_ns()
        root = self.root
        root.name, root.error, root.end_ns = name, error, now_ns
        root.attributes = {key: value for key, value in attributes.items() if value is not None}
        parent = SpanContext(self._trace_id, root.id, is_remote=False, trace_flags=_SAMPLED)
        made = [self._made(root, self._parent)]
        for span in self._spans:
            span.end_ns = span.end_ns or now_ns
            if span.name == _SPANS[QUEUE] and not queued:
                continue
            if span is self._decide and self.decision is not None:
                span.attributes = _of_decision(self.decision)
            elif span is self._decode and "baton.decode" in root.attributes:
                span.attributes["server.address"] = root.attributes["baton.decode"]
            made.append(self._made(span, parent))
        self._tracing.queue.put(made)

    def _made(self, span: Span, parent: SpanContext | None) -> ReadableSpan:
        if span.error is not None:
            span.attributes["error.type"] = span.error
        return ReadableSpan(
            span.name,
            context=SpanContext(self._trace_id, span.id, is_remote=False, trace_flags=_SAMPLED),
            parent=parent,
            resource=self._tracing.resource,
            attributes=span.attributes,
            events=[Event(name, timestamp=at_ns) for name, at_ns in span.events],
            kind=span.kind,
            status=_UNSET if span.error is None else _ERROR,
            start_time=span.start_ns,
            end_time=span.end_ns,
            instrumentation_scope=_SCOPE,
        )


_SCOPE = InstrumentationScope("baton", __version__)


class Tracing:
    """Begins the traces of one process, and sends them."""

    def __init__(self, settings: Settings, queue: SpanQueue, resource: Resource, followed: Sequence[Followed] = ()) -> None:
        """``followed``: files that are to be read again when they change."""
        self.followed = tuple(followed)
        self.queue = queue
        self.resource = resource
        self._trusts_clients = settings.from_clients == "continue"
        self._sampler = ParentBased(TraceIdRatioBased(settings.sample_ratio))
        self._read = TraceContextTextMapPropagator().extract

    def begin(self, headers: Mapping[str, str], envoys: str | None) -> tuple[RequestTrace | None, str]:
        """A request is there. ``envoys``: the ``traceparent`` of Envoy's call to us.

        Its trace, if it is sampled, and else None; and the ``traceparent`` that the request carries on in that case.
        """
        given = envoys or (headers.get(TRACEPARENT) if self._trusts_clients else None)
        context = None if given is None else self._read({TRACEPARENT: given})
        span = None if context is None else trace.get_current_span(context).get_span_context()
        parent = span if span is not None and span.is_valid else None
        trace_id = _random_id(128) if parent is None else parent.trace_id
        drawn = self._sampler.should_sample(None if parent is None else context, trace_id, "request")
        if drawn.decision is Decided.RECORD_AND_SAMPLE:
            return RequestTrace(self, trace_id, parent), ""
        return None, _header(trace_id, _random_id(64) if parent is None else parent.span_id, sampled=False)

    async def close(self, log: Logger) -> None:
        """Send what is there, for no longer than two seconds."""
        left = await self.queue.close(SHUTDOWN_S)
        if left:
            log.warning("spans_left_behind", spans=left)


def open_tracing(settings: Settings, *, count: Callable[[str, int], None], log: Logger) -> Tracing:
    """Tracing to the collector of the configuration. Raises ConfigError, OSError."""
    assert settings.endpoint is not None
    where = collector(settings.endpoint, settings.protocol)
    headers = HeaderFile("tracing.headers_file", settings.headers_file, _headers)
    exporter = Exporter(
        (GrpcTransport if settings.protocol == "grpc" else HttpTransport)(where, headers), timeout_s=settings.timeout_s
    )
    complaint = _Complaint(exporter, count, log)
    queue = SpanQueue(exporter, interval_s=settings.interval_s, max_spans=settings.max_queued_spans, count=complaint.count)
    name = settings.service_name or os.environ.get("OTEL_SERVICE_NAME") or "baton"
    resource = Resource.create({SERVICE_NAME: name, SERVICE_VERSION: __version__})
    log.info("tracing", collector=where.authority, protocol=settings.protocol, sample_ratio=settings.sample_ratio)
    return Tracing(settings, queue, resource, headers.followed)


class _Complaint:
    """Counts spans, on the event loop; and says so, now and then, when some are lost."""

    def __init__(self, exporter: Exporter, count: Callable[[str, int], None], log: Logger) -> None:
        self._exporter = exporter
        self._count = count
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._next_s = 0.0

    def count(self, outcome: str, spans: int) -> None:
        """Of any thread."""
        with suppress(RuntimeError):  # the loop is closed: the process ends
            self._loop.call_soon_threadsafe(self._note, outcome, spans)

    def _note(self, outcome: str, spans: int) -> None:
        self._count(outcome, spans)
        now_s = time.monotonic()
        if outcome != "exported" and now_s >= self._next_s:
            self._next_s = now_s + _COMPLAIN_S
            self._log.warning("spans_lost", outcome=outcome, spans=spans, reason=self._exporter.last_error)


def _headers(file: str | None) -> dict[str, str]:
    """For the collector. Raises ConfigError, which does not show the file's text."""
    if file is None:
        return dict(parse_env_headers(os.environ.get("OTEL_EXPORTER_OTLP_HEADERS", ""), liberal=True))
    headers: dict[str, str] = {}
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"tracing.headers_file: {file}: {reason}") from None
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        name, colon, value = line.partition(":")
        name, value = name.strip().lower(), value.strip()
        if not colon or not name or not value.isascii() or not value.isprintable() or not set(name) <= _NAME_CHARS:
            raise ConfigError(f"tracing.headers_file: {file}:{number}: not `name: value`, or not in ASCII")
        headers[name] = value
    return headers


_NAME_CHARS: Final = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-_.")


def _of_decision(decision: Decision) -> dict[str, Any]:
    terms = msgspec.structs.asdict(decision.terms)
    return {
        "baton.objective": decision.objective,
        "baton.reason": decision.reason,
        "baton.prompt_tokens": decision.prompt_tokens,
        "baton.cached_tokens": decision.cached_tokens,
        "baton.position": decision.position,
        "baton.candidates": len(decision.candidates),
        **{f"baton.terms.{name}": round(value, 6) for name, value in terms.items() if value},
    }


def _header(trace_id: int, span_id: int, *, sampled: bool) -> str:
    return f"00-{trace_id:032x}-{span_id:016x}-0{int(sampled)}"


def _random_id(bits: int) -> int:
    while not (found := random.getrandbits(bits)):  # 0 is no id; nobody is to guess it
        pass
    return found
