"""Spans to an OTLP collector, over gRPC or HTTP.

Why not the library's own exporter: it needs the modules ``opentelemetry.proto`` of its release, and xds-protos, which we need
for ext_proc, installs older ones under the same name; which of the two is there, is chance. The messages on the wire are the
same for both, so only those few fields are looked up by number whose names have changed.
"""

from __future__ import annotations

import http.client
import os
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from opentelemetry.proto.trace.v1 import trace_pb2
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from extproc.config import Collector

_METHOD: Final = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
_FIRST_PAUSE_S: Final = 0.2
_RETRYABLE_HTTP: Final = frozenset((429, 502, 503, 504))
_RETRYABLE_GRPC: Final = frozenset(
    (
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    )
)

# Once `instrumentation_library_spans`, now `scope_spans`; and in that, the scope.
_SCOPE_SPANS: Final = trace_pb2.ResourceSpans.DESCRIPTOR.fields_by_number[2]
assert _SCOPE_SPANS.message_type is not None
_SCOPE: Final = _SCOPE_SPANS.message_type.fields_by_number[1]


class ExportError(Exception):
    """The collector did not take the spans."""

    def __init__(self, message: str, *, again: bool) -> None:
        super().__init__(message)
        self.again = again
        """Another try may do."""


class Transport(Protocol):
    """A way to the collector. For one thread; ``close`` for any."""

    def send(self, message: bytes, timeout_s: float) -> None:
        """Raises ExportError."""
        ...

    def close(self) -> None:
        """Give up what is under way."""
        ...


class Exporter(SpanExporter):
    """Sends batches; one that is not taken is tried again until ``timeout_s`` have passed."""

    def __init__(self, transport: Transport, *, timeout_s: float) -> None:
        self._transport = transport
        self._timeout_s = timeout_s
        self._closing = threading.Event()
        self.last_error = ""
        """Why the last batch that was not taken was not."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Of one batch."""
        message = encode(spans)
        until_s = time.monotonic() + self._timeout_s
        pause_s = _FIRST_PAUSE_S
        while True:
            left_s = until_s - time.monotonic()
            try:
                if left_s <= 0 or self._closing.is_set():
                    return SpanExportResult.FAILURE
                self._transport.send(message, left_s)
                return SpanExportResult.SUCCESS
            except ExportError as error:
                self.last_error = str(error)
                if not error.again or self._closing.wait(min(pause_s, max(left_s, 0.0))):
                    return SpanExportResult.FAILURE
                pause_s *= 2

    def shutdown(self) -> None:
        """No more; what is under way fails."""
        self._closing.set()
        self._transport.close()


class GrpcTransport:
    """OTLP over gRPC."""

    def __init__(self, where: Collector, headers: Mapping[str, str]) -> None:
        """Raises OSError if a certificate cannot be read."""
        self._headers = headers
        if where.tls:
            self._channel = grpc.secure_channel(where.authority, grpc.ssl_channel_credentials(_authorities()))
        else:
            self._channel = grpc.insecure_channel(where.authority)
        self._call: Any = self._channel.unary_unary(_METHOD)

    def send(self, message: bytes, timeout_s: float) -> None:
        """One call. Raises ExportError."""
        try:
            self._call(message, timeout=timeout_s, metadata=tuple(self._headers.items()))
        except grpc.RpcError as error:
            code = error.code()
            raise ExportError(f"gRPC {code.name}", again=code in _RETRYABLE_GRPC) from None
        except ValueError:  # the channel is closed
            raise ExportError("closed", again=False) from None

    def close(self) -> None:
        """Cancels the call."""
        self._channel.close()


class HttpTransport:
    """OTLP over HTTP, as protobuf."""

    def __init__(self, where: Collector, headers: Mapping[str, str]) -> None:
        """Raises OSError if a certificate cannot be read."""
        self._where = where
        self._headers = headers
        self._tls = None
        if where.tls:
            authorities = _authorities()
            self._tls = ssl.create_default_context(cadata=None if authorities is None else authorities.decode("ascii"))

    def send(self, message: bytes, timeout_s: float) -> None:
        """One connection for each batch: there are few of them. Raises ExportError."""
        where = self._where
        if self._tls is None:
            connection = http.client.HTTPConnection(where.host, where.port, timeout=timeout_s)
        else:
            connection = http.client.HTTPSConnection(where.host, where.port, timeout=timeout_s, context=self._tls)
        try:
            headers = {**dict(self._headers.items()), "content-type": "application/x-protobuf"}
            connection.request("POST", where.path, message, headers)
            status = connection.getresponse().status
        except (OSError, http.client.HTTPException) as error:
            raise ExportError(type(error).__name__, again=True) from None
        finally:
            connection.close()
        if status >= 300:
            raise ExportError(f"HTTP {status}", again=status in _RETRYABLE_HTTP)

    def close(self) -> None:
        """Nothing: the thread that sends is not waited for."""


def _authorities() -> bytes | None:
    """Certificates that the collector's is checked against; None: those of the system. Raises OSError."""
    name = os.environ.get("OTEL_EXPORTER_OTLP_CERTIFICATE")
    return Path(name).read_bytes() if name else None


# --- the message ------------------------------------------------------------------------------------------------------


def encode(spans: Sequence[ReadableSpan]) -> bytes:
    """ExportTraceServiceRequest. All of them have the same resource and scope."""
    request = trace_service_pb2.ExportTraceServiceRequest()
    resource_spans = request.resource_spans.add()
    first = spans[0]
    resource: Resource = first.resource
    _put_all(resource_spans.resource.attributes, resource.attributes)
    scope_spans = getattr(resource_spans, _SCOPE_SPANS.name).add()
    if first.instrumentation_scope is not None:
        scope = getattr(scope_spans, _SCOPE.name)
        scope.name, scope.version = first.instrumentation_scope.name, first.instrumentation_scope.version or ""
    for span in spans:
        _put_span(scope_spans.spans.add(), span)
    return bytes(request.SerializeToString())


def _put_span(out: Any, span: ReadableSpan) -> None:
    context = span.context
    assert context is not None
    out.trace_id = context.trace_id.to_bytes(16)
    out.span_id = context.span_id.to_bytes(8)
    if span.parent is not None:
        out.parent_span_id = span.parent.span_id.to_bytes(8)
    out.name = span.name
    out.kind = span.kind.value + 1  # the library counts from 0, the protocol from 1: 0 is "unspecified" there
    out.start_time_unix_nano, out.end_time_unix_nano = span.start_time or 0, span.end_time or 0
    _put_all(out.attributes, span.attributes or {})
    for event in span.events:
        made = out.events.add()
        made.name, made.time_unix_nano = event.name, event.timestamp
        _put_all(made.attributes, event.attributes or {})
    out.status.code = span.status.status_code.value
    if span.status.description:
        out.status.message = span.status.description


def _put_all(out: Any, attributes: Mapping[str, Any]) -> None:
    for key, value in attributes.items():
        pair = out.add()
        pair.key = key
        _put(pair.value, value)


def _put(out: Any, value: Any) -> None:
    if isinstance(value, str):
        out.string_value = value
    elif isinstance(value, bool):  # before int, which it is too
        out.bool_value = value
    elif isinstance(value, int):
        out.int_value = value
    elif isinstance(value, float):
        out.double_value = value
    else:
        for each in value:
            _put(out.array_value.values.add(), each)
