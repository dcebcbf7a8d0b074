"""The only file that touches Envoy's protobuf messages: plain Python in, plain Python out.

Events are what Envoy tells us about one HTTP request, replies what we answer. What they mean is the business of filter.py.
The messages are the C-backed classes of xds-protos; reading one costs microseconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from functools import lru_cache
from typing import Any

import msgspec
from envoy.config.core.v3 import base_pb2
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from envoy.type.v3 import http_status_pb2
from google.protobuf import struct_pb2

from extproc.headers import (
    DESTINATION_HEADER,
    FILTER_REPLY_DETAILS,
    LB_NAMESPACE,
    SERVED_KEY,
    SUBSET_KEY,
    SUBSET_NAMESPACE,
    TAGS_NAMESPACE,
    UPSTREAM_ATTRIBUTE,
)
from extproc.transport.call import Call, CallGoneError, Server

SERVICE_NAME = "envoy.service.ext_proc.v3.ExternalProcessor"

_BUFFERED = processing_mode_pb2.ProcessingMode.BUFFERED
_FULL_DUPLEX = processing_mode_pb2.ProcessingMode.FULL_DUPLEX_STREAMED
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
    subset: frozenset[str] | None = None
    """``ip:port`` of the workers among which the gateway lets one be chosen; None: among all."""


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
    answer_full_duplex: bool = False
    """As :class:`RequestHeaders` has it. Only where the stream begins with this: another filter has answered the request."""
    streamed: bool = False
    """It is a stream of events."""


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
    """``ip:port`` of the worker that gets the request: header and dynamic metadata alike. Others may follow after commas: for
    a gateway that takes the next one where it cannot reach the first."""
    tags: Mapping[str, str] = {}
    """How the request is served, for Envoy's statistics and logs: dynamic metadata, of which no peer sees anything."""
    clear_route_cache: bool = False
    """Have Envoy match its routes again, with the headers as they are then."""
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
            return RequestHeaders(_headers(message.headers), message.end_of_stream, subset=_subset(request))
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
            subset=_subset(request),
        )
    if kind == "request_body":
        return RequestBody(request.request_body.body, request.request_body.end_of_stream)
    if kind == "response_headers":
        first = request.HasField("protocol_config")
        headers = _headers(request.response_headers.headers)
        return ResponseHeaders(
            _status(headers),
            _served(request),
            answer_full_duplex=first and request.protocol_config.response_body_mode == _FULL_DUPLEX,
            streamed=headers.get("content-type", "").startswith("text/event-stream"),
        )
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


def _status(headers: Mapping[str, str]) -> int:
    """The HTTP status of an answer; 0 where there is none to read."""
    text = headers.get(":status", "")
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


def _subset(request: Any) -> frozenset[str] | None:
    """The gateway's subset hint. What cannot be read as a list allows nobody."""
    if not request.HasField("metadata_context"):
        return None
    metadata = request.metadata_context.filter_metadata
    if SUBSET_NAMESPACE not in metadata or SUBSET_KEY not in metadata[SUBSET_NAMESPACE].fields:
        return None
    value = metadata[SUBSET_NAMESPACE].fields[SUBSET_KEY]
    if value.WhichOneof("kind") == "list_value":
        return frozenset(each.string_value.strip() for each in value.list_value.values if each.string_value)
    return frozenset(each.strip() for each in value.string_value.split(",") if each)


def headers_reply(mutation: Mutation) -> bytes:
    """The answer to RequestHeaders: go on, with these changes."""
    common = _mutated(mutation, mutation.set_headers)
    if mutation.clear_route_cache:
        common += _CLEAR_ROUTE_CACHE
    parts = [_field(_REQUEST_HEADERS, _field(_COMMON, common) if common else b"")]
    _add_metadata(parts, mutation)
    if mutation.watch_answer:
        parts.append(_WATCHING)
    return b"".join(parts)


def body_reply(mutation: Mutation) -> bytes:
    """The answer to RequestBody in BUFFERED mode: go on, with these changes."""
    if mutation.body is None:
        common = [_mutated(mutation, mutation.set_headers)]
    else:
        # In this mode Envoy refuses a body of another length than the header says.
        headers = {**mutation.set_headers, "content-length": str(len(mutation.body))}
        # The body is copied once, when all is joined: only lengths are added up before.
        size = len(mutation.body)
        inner = _BODY + _varint(size)
        common = [_mutated(mutation, headers), _BODY_MUTATION, _varint(len(inner) + size), inner, mutation.body]
    if mutation.clear_route_cache:
        common.append(_CLEAR_ROUTE_CACHE)
    size = sum(map(len, common))
    outer = _COMMON + _varint(size)
    parts = [_REQUEST_BODY, _varint(len(outer) + size), outer, *common]
    _add_metadata(parts, mutation)
    return b"".join(parts)


def streamed_reply(piece: bytes, *, answer: bool, end_of_stream: bool) -> bytes:
    """In FULL_DUPLEX_STREAMED mode: a piece of the request's body goes on, or with ``answer`` one of the answer's."""
    streamed = _field(_BODY, piece) + (_END_OF_STREAM if end_of_stream else b"")
    common = _field(_COMMON, _field(_BODY_MUTATION, _field(_STREAMED, streamed)))
    return _field(_RESPONSE_BODY if answer else _REQUEST_BODY, common)


def answer_reply(_: ResponseHeaders, set_headers: Mapping[str, str], *, edited: bool = False) -> bytes:
    """The answer to ResponseHeaders: go on, with these headers on the answer. ``edited``: its body may get another length."""
    content = _set_headers(set_headers)
    if edited:
        content += _field(_REMOVE_HEADER, b"content-length")
    return _field(_RESPONSE_HEADERS, _field(_COMMON, _field(_HEADER_MUTATION, content)))


def answer_piece_reply(piece: bytes) -> bytes:
    """The answer to a ResponseBody that Envoy was asked for: this stands in its place."""
    mutation = _field(_BODY, piece) if piece else _CLEAR_BODY
    return _field(_RESPONSE_BODY, _field(_COMMON, _field(_BODY_MUTATION, mutation)))


def immediate_reply(answer: Immediate) -> bytes:
    """An answer to the client; the request ends here."""
    reply = pb.ProcessingResponse()
    immediate = reply.immediate_response
    immediate.status.CopyFrom(http_status_pb2.HttpStatus(code=answer.status))
    immediate.body = answer.body
    immediate.details = f"{FILTER_REPLY_DETAILS}_{answer.code}"
    for name, value in {"content-type": answer.content_type, **answer.headers}.items():
        option = immediate.headers.set_headers.add(append_action=_OVERWRITE)
        option.header.key, option.header.raw_value = name, value.encode()
    parts = [reply.SerializeToString()]
    _add_metadata(parts, Mutation(tags=answer.tags))
    return b"".join(parts)


def go_on(event: Event) -> bytes:
    """The answer to an event that changes nothing."""
    return _UNCHANGED[type(event)]


# The replies are written by hand: protobuf's classes take twice as long, and copy the body twice. A field of a message is a
# number and kind, a length, and bytes (https://protobuf.dev/programming-guides/encoding); the numbers are the classes' own.


def _key(message: Any, name: str) -> bytes:
    """What stands before the length of a field that has one."""
    number = message.DESCRIPTOR.fields_by_name[name].number
    assert number < 16, "it is more than one byte"
    return bytes((number << 3 | 2,))


def _varint(number: int) -> bytes:
    if number < 128:
        return _SHORT[number]
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


_SHORT = [bytes((number,)) for number in range(128)]


def _field(key: bytes, content: bytes) -> bytes:
    return key + _varint(len(content)) + content


_REQUEST_HEADERS = _key(pb.ProcessingResponse, "request_headers")
_REQUEST_BODY = _key(pb.ProcessingResponse, "request_body")
_RESPONSE_HEADERS = _key(pb.ProcessingResponse, "response_headers")
_RESPONSE_BODY = _key(pb.ProcessingResponse, "response_body")
_METADATA = _key(pb.ProcessingResponse, "dynamic_metadata")
_COMMON = _key(pb.HeadersResponse, "response")
assert _key(pb.BodyResponse, "response") == _COMMON
_HEADER_MUTATION = _key(pb.CommonResponse, "header_mutation")
_BODY_MUTATION = _key(pb.CommonResponse, "body_mutation")
_CLEAR_ROUTE_CACHE = pb.CommonResponse(clear_route_cache=True).SerializeToString()
_SET_HEADER = _key(pb.HeaderMutation, "set_headers")
_REMOVE_HEADER = _key(pb.HeaderMutation, "remove_headers")
_HEADER = _key(base_pb2.HeaderValueOption, "header")
_HEADER_KEY = _key(base_pb2.HeaderValue, "key")
_HEADER_VALUE = _key(base_pb2.HeaderValue, "raw_value")
_BODY = _key(pb.BodyMutation, "body")
assert _key(pb.StreamedBodyResponse, "body") == _BODY
_STREAMED = _key(pb.BodyMutation, "streamed_response")
_CLEAR_BODY = pb.BodyMutation(clear_body=True).SerializeToString()
_END_OF_STREAM = pb.StreamedBodyResponse(end_of_stream=True).SerializeToString()
_APPEND_ACTION = base_pb2.HeaderValueOption(append_action=_OVERWRITE).SerializeToString()
_ENTRY = _key(struct_pb2.Struct, "fields")
_ENTRY_KEY, _ENTRY_VALUE = b"\x0a", b"\x12"  # of any map: 1 and 2
_STRING = _key(struct_pb2.Value, "string_value")
_STRUCT = _key(struct_pb2.Value, "struct_value")
_WATCHING = pb.ProcessingResponse(
    # The mode of envoy.yaml, but for the headers of the answer.
    mode_override=processing_mode_pb2.ProcessingMode(
        request_body_mode=_BUFFERED,
        request_trailer_mode=processing_mode_pb2.ProcessingMode.SKIP,
        response_header_mode=processing_mode_pb2.ProcessingMode.SEND,
        response_body_mode=processing_mode_pb2.ProcessingMode.NONE,
        response_trailer_mode=processing_mode_pb2.ProcessingMode.SEND,
    )
).SerializeToString()
_SHOW_ANSWER = pb.ProcessingResponse(
    # The same, and the body of the answer, piece by piece: each waits for what we make of it, and no buffer limits them.
    mode_override=processing_mode_pb2.ProcessingMode(
        request_body_mode=_BUFFERED,
        request_trailer_mode=processing_mode_pb2.ProcessingMode.SKIP,
        response_header_mode=processing_mode_pb2.ProcessingMode.SEND,
        response_body_mode=processing_mode_pb2.ProcessingMode.STREAMED,
        response_trailer_mode=processing_mode_pb2.ProcessingMode.SEND,
    )
).SerializeToString()
# An empty phase must be there, or Envoy calls the reply spurious.
_UNCHANGED: dict[type[Event], bytes] = {
    RequestHeaders: _REQUEST_HEADERS + b"\0",
    RequestBody: _REQUEST_BODY + b"\0",
    RequestTrailers: _key(pb.ProcessingResponse, "request_trailers") + b"\0",
    ResponseHeaders: _RESPONSE_HEADERS + b"\0",
    ResponseBody: _RESPONSE_BODY + b"\0",
    ResponseTrailers: _key(pb.ProcessingResponse, "response_trailers") + b"\0",
}


def _mutated(mutation: Mutation, set_headers: Mapping[str, str]) -> bytes:
    """The header mutation of a CommonResponse; nothing if there is none."""
    if mutation.destination is not None:
        # The last header: if Envoy refuses one of the others, nothing says that this request was cleared.
        set_headers = {**set_headers, DESTINATION_HEADER: mutation.destination}
    content = _set_headers(set_headers)
    for name in mutation.remove_headers:
        content += _field(_REMOVE_HEADER, name.encode())
    return _field(_HEADER_MUTATION, content) if content else b""


def _set_headers(headers: Mapping[str, str]) -> bytes:
    return b"".join([_header(name, value) for name, value in headers.items()])


def _header(name: str, value: str) -> bytes:
    header = _header_key(name) + _field(_HEADER_VALUE, value.encode())
    return _field(_SET_HEADER, _field(_HEADER, header) + _APPEND_ACTION)


@lru_cache(256)
def _header_key(name: str) -> bytes:
    return _field(_HEADER_KEY, name.encode())


def _add_metadata(parts: list[bytes], mutation: Mutation) -> None:
    content = b""
    if mutation.tags:
        tags = b"".join([_text_entry(name, value) for name, value in mutation.tags.items()])
        content = _entry(TAGS_NAMESPACE, _field(_STRUCT, tags))
    if mutation.destination is not None:
        content += _pin(mutation.destination)
    if content:
        parts.append(_field(_METADATA, content))


@lru_cache(4096)
def _pin(destination: str) -> bytes:
    return _entry(LB_NAMESPACE, _field(_STRUCT, _text_entry(DESTINATION_HEADER, destination)))


@lru_cache(4096)
def _text_entry(name: str, value: str) -> bytes:
    # Most tags are labels, of which there are few; the one that is not costs little.
    return _entry(name, _field(_STRING, value.encode()))


def _entry(name: str, value: bytes) -> bytes:
    return _field(_ENTRY, _field(_ENTRY_KEY, name.encode()) + _field(_ENTRY_VALUE, value))


Edit = Callable[[bytes, bool], bytes]
"""A piece of an answer's body, and whether it is the last -> what goes on to the client in its place."""


class Stream:
    """One ext_proc stream: Envoy's events in order, and our replies."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._full_duplex = self._answer_full_duplex = False
        self._headers_change: Mutation | None = None
        self._edit: Edit | None = None
        self._trailers = False
        self.first_piece_s: float | None = None
        """When the first piece of the answer's body was shown, on the monotonic clock; None: none was."""
        self.last_piece_s: float | None = None
        self.answer_bytes = 0
        self.answer_ended = False
        """Its end was shown."""

    @property
    def shows_answer(self) -> bool:
        """Whether Envoy shows the answer's body."""
        return self._answer_full_duplex or self.first_piece_s is not None

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
        elif isinstance(event, ResponseHeaders) and event.answer_full_duplex:
            self._answer_full_duplex = True
        return event

    async def send(self, reply: bytes) -> None:
        """Send one reply, made by the functions of this module. Raises GoneError."""
        try:
            await self._call.send(reply)
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
            clear_route_cache=change.clear_route_cache,
        )
        await self.send(headers_reply(headers))
        for piece, last in _pieces(body if change.body is None else change.body):
            await self.send(streamed_reply(piece, answer=False, end_of_stream=last and not self._trailers))
        if self._trailers:
            await self.send(go_on(RequestTrailers()))

    @property
    def may_edit_answer(self) -> bool:
        """Whether the body of an answer can be seen and changed, which Envoy is asked for with the answer's headers."""
        return self._answer_full_duplex or not self._full_duplex

    async def edit_answer(self, event: ResponseHeaders, set_headers: Mapping[str, str], edit: Edit) -> None:
        """The answer's headers go on, and of every piece of its body what ``edit`` makes of it. Raises GoneError."""
        self._edit = edit
        reply = answer_reply(event, set_headers, edited=True)
        await self.send(reply if self._answer_full_duplex else reply + _SHOW_ANSWER)

    async def pass_answer(self, event: Event) -> Event | None:
        """What Envoy shows of the answer goes on, unchanged but for :meth:`edit_answer`. Raises GoneError.

        Pieces that have piled up go together; the event behind them, if it was read with them, is returned.
        """
        if not isinstance(event, ResponseBody):
            self.answer_ended |= isinstance(event, ResponseTrailers)
            if self._edit is not None and self.answer_ended:
                await self._end_edit(self._edit)
            await self.send(go_on(event))
            return None
        self.last_piece_s = time.monotonic()
        if self.first_piece_s is None:
            self.first_piece_s = self.last_piece_s
        if not self._answer_full_duplex:
            self._passed(len(event.body), ended=event.end_of_stream)
            if self._edit is None:
                await self.send(go_on(event))
            else:
                await self.send(answer_piece_reply(self._edit(event.body, event.end_of_stream)))
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
        body = b"".join(pieces)
        self._passed(len(body), ended=ended)
        if self._edit is not None:
            body = self._edit(body, ended)
            if not body and not ended:
                return following
        for piece, last in _pieces(body):
            await self.send(streamed_reply(piece, answer=True, end_of_stream=last and ended))
        return following

    async def _end_edit(self, edit: Edit) -> None:
        """Trailers end the body: what was held of it goes before them. Raises UnsupportedModeError where it cannot."""
        self._edit = None
        rest = edit(b"", True)
        if rest and not self._answer_full_duplex:
            raise UnsupportedModeError("an answer that was to be changed ends with trailers")
        if rest:
            for piece, _ in _pieces(rest):
                await self.send(streamed_reply(piece, answer=True, end_of_stream=False))

    def _passed(self, size_bytes: int, *, ended: bool) -> None:
        self.answer_bytes += size_bytes
        self.answer_ended |= ended


_PIECE_BYTES = 62_000
"""Of a body in one message of ours. The protocol advises less than 64 KiB, and some implementations insist."""


def _pieces(body: bytes) -> Iterator[tuple[bytes, bool]]:
    """A body cut up, each piece with whether it is the last; an empty one is one piece."""
    for start in range(0, len(body) or 1, _PIECE_BYTES):
        end = start + _PIECE_BYTES
        yield body[start:end], end >= len(body)


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
