"""The only file that touches Envoy's protobuf messages: plain Python in, plain Python out.

Events are what Envoy tells us about one HTTP request, replies what we answer. What they mean is the business of filter.py.
The messages are the C-backed classes of xds-protos; reading one costs microseconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any

import msgspec
from envoy.config.core.v3 import base_pb2
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from envoy.type.v3 import http_status_pb2

from extproc.headers import (
    DESTINATION_HEADER,
    FILTER_REPLY_DETAILS,
    LB_NAMESPACE,
    SERVED_KEY,
    TAGS_NAMESPACE,
    UPSTREAM_ATTRIBUTE,
)
from extproc.transport.call import Call, CallGoneError, Server

SERVICE_NAME = "envoy.service.ext_proc.v3.ExternalProcessor"

_BUFFERED = processing_mode_pb2.ProcessingMode.BUFFERED
_FULL_DUPLEX = processing_mode_pb2.ProcessingMode.FULL_DUPLEX_STREAMED
# The mode of envoy.yaml, but for the headers of the answer.
_WATCHING = processing_mode_pb2.ProcessingMode(
    request_body_mode=_BUFFERED,
    request_trailer_mode=processing_mode_pb2.ProcessingMode.SKIP,
    response_header_mode=processing_mode_pb2.ProcessingMode.SEND,
    response_body_mode=processing_mode_pb2.ProcessingMode.NONE,
    response_trailer_mode=processing_mode_pb2.ProcessingMode.SEND,
)
_ATTRIBUTES = "envoy.filters.http.ext_proc"
"""Where Envoy puts the attributes it was asked for."""
_OVERWRITE = base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD


class RequestHeaders(msgspec.Struct, frozen=True):
    """The start of a request. ``headers`` has lower-case names; a repeated header is joined with a comma."""

    headers: dict[str, str]
    end_of_stream: bool
    """No body follows."""
    full_duplex: bool = False
    """The body comes in pieces, and goes on as we send it (FULL_DUPLEX_STREAMED); else in one (BUFFERED)."""
    answer_full_duplex: bool = False
    """The answer comes in pieces, too, and goes to the client as we send it."""


class RequestBody(msgspec.Struct, frozen=True):
    """The whole request body, or the next piece of it."""

    body: bytes
    end_of_stream: bool = True
    """Nothing follows, not even trailers."""


class RequestTrailers(msgspec.Struct, frozen=True):
    """The request's trailers; we need nothing of them."""


class ResponseHeaders(msgspec.Struct, frozen=True):
    """The start of the answer, whoever gives it: a worker, or Envoy itself. Sent where it was asked for, or the mesh does."""

    status: int
    served: str | None = None
    """``ip:port`` of the worker that Envoy sent the request to; None where it sent it to nobody, or does not say."""


class ResponseBody(msgspec.Struct, frozen=True):
    """A piece of the answer (only where the mesh sends it)."""

    body: bytes = b""
    end_of_stream: bool = False


class ResponseTrailers(msgspec.Struct, frozen=True):
    """The end of the answer."""


Event = RequestHeaders | RequestBody | RequestTrailers | ResponseHeaders | ResponseBody | ResponseTrailers


class Mutation(msgspec.Struct, frozen=True):
    """What changes in the request on its way to the worker."""

    set_headers: Mapping[str, str] = {}
    remove_headers: tuple[str, ...] = ()
    body: bytes | None = None
    """The new body; None leaves it as it is."""
    destination: str | None = None
    """``ip:port`` of the worker that gets the request: header and dynamic metadata alike."""
    tags: Mapping[str, str] = {}
    """How the request is served, for Envoy's statistics and logs: dynamic metadata, of which no peer sees anything."""
    watch_answer: bool = False
    """Ask Envoy for the start of the answer, which it does not show by default. Only with the request's headers."""


class Immediate(msgspec.Struct, frozen=True):
    """An answer to the client in the worker's place."""

    status: int
    body: bytes
    code: str
    """Ends up in Envoy's response code details."""
    content_type: str = "application/json"
    headers: Mapping[str, str] = {}
    """Others, such as ``retry-after``. Envoy's configuration says which ones the filter may set."""
    tags: Mapping[str, str] = {}
    """As those of a mutation."""


class GoneError(Exception):
    """The stream is no more; nobody is there to be answered."""


class UnsupportedModeError(Exception):
    """Envoy is configured in a way this filter does not speak."""


def read_event(request: Any) -> Event:
    """ProcessingRequest -> Event. Raises UnsupportedModeError for another body mode than BUFFERED and FULL_DUPLEX_STREAMED."""
    kind = request.WhichOneof("request")
    if kind == "request_headers":
        message = request.request_headers
        if not request.HasField("protocol_config"):
            return RequestHeaders(_headers(message.headers), message.end_of_stream)
        modes = request.protocol_config
        mode = modes.request_body_mode
        if mode not in (_BUFFERED, _FULL_DUPLEX) and not message.end_of_stream:
            name = processing_mode_pb2.ProcessingMode.BodySendMode.Name(mode)
            raise UnsupportedModeError(f"request_body_mode is {name}; Baton needs BUFFERED or FULL_DUPLEX_STREAMED")
        return RequestHeaders(
            _headers(message.headers),
            message.end_of_stream,
            full_duplex=mode == _FULL_DUPLEX,
            answer_full_duplex=modes.response_body_mode == _FULL_DUPLEX,
        )
    if kind == "request_body":
        return RequestBody(request.request_body.body, request.request_body.end_of_stream)
    if kind == "response_headers":
        return ResponseHeaders(_status(request.response_headers.headers), _served(request))
    if kind == "response_body":
        return ResponseBody(request.response_body.body, request.response_body.end_of_stream)
    simple = _SIMPLE_EVENTS.get(kind)
    if simple is None:
        raise UnsupportedModeError(f"a message of kind {kind!r}")
    return simple


_SIMPLE_EVENTS: dict[str | None, Event] = {
    "request_trailers": RequestTrailers(),
    "response_trailers": ResponseTrailers(),
}


def _headers(header_map: Any) -> dict[str, str]:
    # Newer Envoys fill raw_value, older ones value. A byte that is not UTF-8 must not end the request.
    pairs = [(header.key, header.raw_value or header.value.encode()) for header in header_map.headers]
    headers = {name.lower(): str(value, "utf-8", "replace") for name, value in pairs}
    if len(headers) == len(pairs):
        return headers
    headers = {}
    for key, raw in pairs:
        name, value = key.lower(), raw.decode("utf-8", "replace")
        headers[name] = f"{headers[name]},{value}" if name in headers else value
    return headers


def _status(header_map: Any) -> int:
    """The HTTP status of an answer; 0 where there is none to read."""
    text = _headers(header_map).get(":status", "")
    return int(text) if text.isascii() and text.isdigit() else 0


def _served(request: Any) -> str | None:
    """Who serves the request: Envoy's load balancer notes it in the metadata, and knows the address of any upstream."""
    if LB_NAMESPACE in request.metadata_context.filter_metadata:
        fields = request.metadata_context.filter_metadata[LB_NAMESPACE].fields
        if SERVED_KEY in fields:
            return fields[SERVED_KEY].string_value or None
    if _ATTRIBUTES in request.attributes:
        fields = request.attributes[_ATTRIBUTES].fields
        if UPSTREAM_ATTRIBUTE in fields:
            return fields[UPSTREAM_ATTRIBUTE].string_value or None
    return None


def headers_reply(mutation: Mutation) -> Any:
    """The answer to RequestHeaders: go on, with these changes."""
    reply = pb.ProcessingResponse()
    _fill(reply, reply.request_headers, mutation)
    if mutation.watch_answer:
        reply.mode_override.CopyFrom(_WATCHING)
    return reply


def body_reply(mutation: Mutation) -> Any:
    """The answer to RequestBody: go on, with these changes."""
    reply = pb.ProcessingResponse()
    _fill(reply, reply.request_body, mutation)
    return reply


def _fill(reply: Any, phase: Any, mutation: Mutation) -> None:
    # Without this an empty phase would not count as set, and Envoy would call the reply spurious.
    phase.SetInParent()
    common = phase.response
    headers = dict(mutation.set_headers)
    if mutation.body is not None:
        common.body_mutation.body = mutation.body
        # In BUFFERED mode Envoy refuses a body of another length than the header says.
        headers["content-length"] = str(len(mutation.body))
    if mutation.destination is not None:
        # The last header: if Envoy refuses one of the others, nothing says that this request was cleared.
        headers[DESTINATION_HEADER] = mutation.destination
        metadata = reply.dynamic_metadata.fields[LB_NAMESPACE].struct_value
        metadata.fields[DESTINATION_HEADER].string_value = mutation.destination
    _set_tags(reply, mutation.tags)
    _set_headers(common.header_mutation, headers)
    common.header_mutation.remove_headers.extend(mutation.remove_headers)


def immediate_reply(answer: Immediate) -> Any:
    """An answer to the client; the request ends here."""
    reply = pb.ProcessingResponse()
    immediate = reply.immediate_response
    immediate.status.CopyFrom(http_status_pb2.HttpStatus(code=answer.status))
    immediate.body = answer.body
    immediate.details = f"{FILTER_REPLY_DETAILS}_{answer.code}"
    _set_headers(immediate.headers, {"content-type": answer.content_type, **answer.headers})
    _set_tags(reply, answer.tags)
    return reply


def answer_reply(_: ResponseHeaders, set_headers: Mapping[str, str]) -> Any:
    """The answer to ResponseHeaders: go on, with these headers on the answer."""
    reply = pb.ProcessingResponse()
    reply.response_headers.SetInParent()
    _set_headers(reply.response_headers.response.header_mutation, set_headers)
    return reply


def _set_tags(reply: Any, tags: Mapping[str, str]) -> None:
    if tags:
        fields = reply.dynamic_metadata.fields[TAGS_NAMESPACE].struct_value.fields
        for name, value in tags.items():
            fields[name].string_value = value


def _set_headers(mutation: Any, headers: Mapping[str, str]) -> None:
    for name, value in headers.items():
        option = mutation.set_headers.add(append_action=_OVERWRITE)
        option.header.key = name
        option.header.raw_value = value.encode()


def go_on(event: Event) -> Any:
    """The answer to an event that changes nothing."""
    reply = pb.ProcessingResponse()
    getattr(reply, _REPLY_FIELDS[type(event)]).SetInParent()
    return reply


_REPLY_FIELDS: dict[type[Event], str] = {
    RequestHeaders: "request_headers",
    RequestBody: "request_body",
    RequestTrailers: "request_trailers",
    ResponseHeaders: "response_headers",
    ResponseBody: "response_body",
    ResponseTrailers: "response_trailers",
}


class Stream:
    """One ext_proc stream: Envoy's events in order, and our replies."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._full_duplex = self._answer_full_duplex = False
        self._headers_change: Mutation | None = None
        self._trailers = False

    def called_with(self, name: str) -> str | None:
        """A header of Envoy's call to us, which no client can set."""
        return self._call.header(name)

    def stirred(self) -> asyncio.Future[Any]:
        """Done when there is something to receive, which stays there. Neither to be cancelled nor to be read."""
        return self._call.stirred()

    async def receive(self) -> Event | None:
        """The next event; None when Envoy has closed its side, or the stream is no more."""
        message = await self._call.receive()
        if message is None:
            return None
        event = read_event(_parse(message))
        if isinstance(event, RequestHeaders):
            self._full_duplex, self._answer_full_duplex = event.full_duplex, event.answer_full_duplex
        elif isinstance(event, RequestTrailers):
            self._trailers = True
        return event

    async def send(self, reply: Any) -> None:
        """Send one reply, made by the functions of this module. Raises GoneError."""
        try:
            await self._call.send(reply.SerializeToString())
        except CallGoneError as error:
            raise GoneError(str(error)) from None

    async def pass_headers(self, change: Mutation) -> None:
        """The request's headers go on, with this change, and its body is to come. Raises GoneError."""
        if self._full_duplex:
            self._headers_change = change  # Envoy waits for nothing: one reply is less work for both
        else:
            await self.send(headers_reply(change))

    async def pass_body(self, change: Mutation, body: bytes) -> None:
        """The whole request goes on: ``body``, if the change has no other. Raises GoneError."""
        if not self._full_duplex:
            await self.send(body_reply(change))
            return
        before = self._headers_change or Mutation()
        headers = Mutation(
            set_headers={**before.set_headers, **change.set_headers},
            remove_headers=before.remove_headers + change.remove_headers,
            destination=change.destination,
            tags=change.tags,
        )
        await self.send(headers_reply(headers))
        for piece in _pieces(body if change.body is None else change.body, end_of_stream=not self._trailers):
            reply = pb.ProcessingResponse()
            reply.request_body.response.body_mutation.streamed_response.CopyFrom(piece)
            await self.send(reply)
        if self._trailers:
            await self.send(go_on(RequestTrailers()))

    async def pass_answer(self, event: Event) -> Event | None:
        """What Envoy shows of the answer goes on unchanged. Raises GoneError.

        Pieces that have piled up go together; the event behind them, if it was read with them, is returned.
        """
        if not isinstance(event, ResponseBody) or not self._answer_full_duplex:
            await self.send(go_on(event))
            return None
        pieces, following, ended = [event.body], None, event.end_of_stream
        while not ended and following is None and self._call.stirred().done():
            more = await self.receive()
            if isinstance(more, ResponseBody):
                pieces.append(more.body)
                ended = more.end_of_stream
            elif more is None:
                break  # the next one to ask will be told the same
            else:
                following = more
        for piece in _pieces(b"".join(pieces), end_of_stream=ended):
            reply = pb.ProcessingResponse()
            reply.response_body.response.body_mutation.streamed_response.CopyFrom(piece)
            await self.send(reply)
        return following


_PIECE_BYTES = 62_000
"""Of a body in one message of ours. The protocol advises less than 64 KiB, and some implementations insist."""


def _pieces(body: bytes, *, end_of_stream: bool) -> Iterator[Any]:
    """A body as messages; an empty one is one message."""
    for start in range(0, len(body) or 1, _PIECE_BYTES):
        end = start + _PIECE_BYTES
        yield pb.StreamedBodyResponse(body=body[start:end], end_of_stream=end_of_stream and end >= len(body))


_parse = pb.ProcessingRequest.FromString


def register(server: Server, handle: Callable[[Stream], Coroutine[Any, Any, None]]) -> None:
    """Let ``handle`` serve every ext_proc stream of ``server``."""

    async def process(call: Call) -> None:
        try:
            await handle(Stream(call))
        except UnsupportedModeError as error:
            await call.abort(_FAILED_PRECONDITION, str(error))

    server.serve(f"/{SERVICE_NAME}/Process", process)


_FAILED_PRECONDITION = 9
"""Status of gRPC: the system is not in the state that the call needs."""
