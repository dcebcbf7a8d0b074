"""An OTLP collector of a few lines: it keeps the spans it gets, by gRPC and by HTTP, and can be made to hang."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
from aiohttp import web
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.trace.v1 import trace_pb2

from extproc.observe.otlp import _METHOD, _SCOPE_SPANS

_NOTHING = pb.ExportTraceServiceResponse().SerializeToString()


@dataclass
class Span:
    """One span, as it came in."""

    service: str
    name: str
    kind: str
    trace: str
    id: str
    parent: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: list[str]
    failed: bool


@dataclass
class Collector:
    """Use as an async context manager. ``grpc_port`` and ``http_port`` speak OTLP."""

    grpc_port: int
    http_port: int
    spans: list[Span] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    """Of each export."""
    hang: bool = False

    @property
    def grpc_endpoint(self) -> str:
        return f"http://127.0.0.1:{self.grpc_port}"

    @property
    def http_endpoint(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    async def __aenter__(self) -> Collector:
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        _, service, method = _METHOD.split("/")
        handler = grpc.unary_unary_rpc_method_handler(self._on_grpc)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
        self._server.add_insecure_port(f"127.0.0.1:{self.grpc_port}")
        await self._server.start()
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/v1/traces", self._on_http)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.2)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.http_port).start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(None)
        await self._runner.cleanup()

    async def _on_grpc(self, message: bytes, context: Any) -> bytes:
        self.headers.append({key: value for key, value in context.invocation_metadata() if isinstance(value, str)})
        await self._take(message)
        return _NOTHING

    async def _on_http(self, request: web.Request) -> web.Response:
        self.headers.append({key.lower(): value for key, value in request.headers.items()})
        await self._take(await request.read())
        return web.Response(body=_NOTHING, content_type="application/x-protobuf")

    async def _take(self, message: bytes) -> None:
        if self.hang:
            await asyncio.Event().wait()
        for of_resource in pb.ExportTraceServiceRequest.FromString(message).resource_spans:
            service = _read(of_resource.resource.attributes)["service.name"]
            for of_scope in getattr(of_resource, _SCOPE_SPANS.name):
                self.spans += [_span(service, span) for span in of_scope.spans]

    def of_trace(self, trace: str) -> list[Span]:
        return [span for span in self.spans if span.trace == trace]

    async def until(self, wanted: int, *, service: str = "baton", name: str | None = None) -> list[Span]:
        """The spans of a service, once there are so many."""
        async with asyncio.timeout(15):
            while True:
                found = [each for each in self.spans if each.service == service and name in (None, each.name)]
                if len(found) >= wanted:
                    return found
                await asyncio.sleep(0.02)


def _span(service: str, span: Any) -> Span:
    return Span(
        service=service,
        name=span.name,
        kind=trace_pb2.Span.SpanKind.Name(span.kind),
        trace=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_read(span.attributes),
        events=[event.name for event in span.events],
        failed=span.status.code == 2,
    )


def _read(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
