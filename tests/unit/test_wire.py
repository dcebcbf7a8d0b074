"""The replies that are written by hand are what protobuf's own classes read, and write."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from envoy.config.core.v3 import base_pb2
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from hypothesis import given
from hypothesis import strategies as st

from extproc import wire
from extproc.headers import DESTINATION_HEADER, LB_NAMESPACE, TAGS_NAMESPACE

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=200)
NAMES = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=40)
MUTATIONS = st.builds(
    wire.Mutation,
    set_headers=st.dictionaries(
        NAMES.filter(lambda name: name not in ("content-length", DESTINATION_HEADER)), TEXT, max_size=5
    ),
    remove_headers=st.lists(NAMES, max_size=5).map(tuple),
    body=st.none() | st.binary(max_size=300) | st.integers(0, 70_000).map(bytes),
    destination=st.none() | TEXT,
    tags=st.dictionaries(NAMES, TEXT, max_size=6),
    watch_answer=st.booleans(),
    clear_route_cache=st.booleans(),
)
Mode = processing_mode_pb2.ProcessingMode


def read(reply: bytes) -> Any:
    return pb.ProcessingResponse.FromString(reply)


def check_common(common: Any, mutation: wire.Mutation, more: dict[str, str]) -> None:
    headers = {**mutation.set_headers, **more}
    if mutation.destination is not None:
        headers[DESTINATION_HEADER] = mutation.destination
    found = common.header_mutation
    assert [(o.header.key, o.header.raw_value.decode()) for o in found.set_headers] == list(headers.items())
    assert all(o.append_action == base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD for o in found.set_headers)
    assert tuple(found.remove_headers) == mutation.remove_headers
    assert common.clear_route_cache == mutation.clear_route_cache


def check_metadata(reply: Any, mutation: wire.Mutation) -> None:
    found = {
        name: {k: v.string_value for k, v in each.struct_value.fields.items()}
        for name, each in reply.dynamic_metadata.fields.items()
    }
    expected: dict[str, dict[str, str]] = {}
    if mutation.tags:
        expected[TAGS_NAMESPACE] = dict(mutation.tags)
    if mutation.destination is not None:
        expected[LB_NAMESPACE] = {DESTINATION_HEADER: mutation.destination}
    assert found == expected


@given(MUTATIONS)
def test_the_reply_to_headers(mutation: wire.Mutation) -> None:
    reply = read(wire.headers_reply(mutation))
    assert reply.WhichOneof("response") == "request_headers"
    check_common(reply.request_headers.response, mutation, {})
    check_metadata(reply, mutation)
    assert reply.HasField("mode_override") == mutation.watch_answer
    if mutation.watch_answer:
        mode = reply.mode_override
        assert (mode.request_body_mode, mode.response_header_mode) == (Mode.BUFFERED, Mode.SEND)
        assert (mode.response_body_mode, mode.response_trailer_mode) == (Mode.NONE, Mode.SEND)


@given(MUTATIONS)
def test_the_reply_to_a_whole_body(mutation: wire.Mutation) -> None:
    reply = read(wire.body_reply(mutation))
    assert reply.WhichOneof("response") == "request_body"
    common = reply.request_body.response
    if mutation.body is None:
        assert not common.HasField("body_mutation")
        check_common(common, mutation, {})
    else:
        assert common.body_mutation.body == mutation.body and common.body_mutation.WhichOneof("mutation") == "body"
        check_common(common, mutation, {"content-length": str(len(mutation.body))})
    check_metadata(reply, mutation)


@given(st.binary(max_size=300) | st.integers(0, 70_000).map(bytes), st.booleans(), st.booleans())
def test_a_piece_of_a_body(piece: bytes, answer: bool, last: bool) -> None:
    reply = read(wire.streamed_reply(piece, answer=answer, end_of_stream=last))
    phase = reply.response_body if answer else reply.request_body
    assert reply.WhichOneof("response") == ("response_body" if answer else "request_body")
    streamed = phase.response.body_mutation.streamed_response
    assert phase.response.body_mutation.WhichOneof("mutation") == "streamed_response"
    assert (streamed.body, streamed.end_of_stream) == (piece, last)


@given(st.dictionaries(NAMES, TEXT, max_size=5), st.dictionaries(NAMES, TEXT, max_size=5), st.binary(max_size=300))
def test_headers_of_an_answer_and_an_answer_of_our_own(headers: dict[str, str], tags: dict[str, str], body: bytes) -> None:
    reply = read(wire.answer_reply(wire.ResponseHeaders(200), headers))
    assert reply.WhichOneof("response") == "response_headers"
    check_common(reply.response_headers.response, wire.Mutation(set_headers=headers), {})
    own = read(wire.immediate_reply(wire.Immediate(429, body, "too_many_requests", headers=headers, tags=tags)))
    assert (own.immediate_response.status.code, own.immediate_response.body) == (429, body)
    assert own.immediate_response.details.endswith("_too_many_requests")
    check_metadata(own, wire.Mutation(tags=tags))


@pytest.mark.parametrize(
    ("event", "field"),
    [
        (wire.RequestHeaders({}, True), "request_headers"),
        (wire.RequestBody(b""), "request_body"),
        (wire.RequestTrailers(), "request_trailers"),
        (wire.ResponseHeaders(200), "response_headers"),
        (wire.ResponseBody(), "response_body"),
        (wire.ResponseTrailers(), "response_trailers"),
    ],
)
def test_what_changes_nothing_still_says_which_phase_it_answers(event: wire.Event, field: str) -> None:
    assert read(wire.go_on(event)).WhichOneof("response") == field


class Call:
    """Envoy's messages, all there from the beginning."""

    def __init__(self, *messages: Any) -> None:
        self._messages = [message.SerializeToString() for message in messages]
        self.sent: list[Any] = []

    def header(self, _name: str) -> str | None:
        return None

    def stirred(self) -> asyncio.Future[None]:
        stirred = asyncio.get_running_loop().create_future()
        stirred.set_result(None)
        return stirred

    async def receive(self) -> bytes | None:
        return self._messages.pop(0) if self._messages else None

    async def send(self, message: bytes) -> None:
        self.sent.append(read(message))

    async def abort(self, code: int, text: str) -> None:
        raise AssertionError((code, text))


def start(*, answer: int = Mode.NONE) -> Any:
    message = pb.ProcessingRequest()
    message.request_headers.SetInParent()
    message.protocol_config.request_body_mode = Mode.FULL_DUPLEX_STREAMED
    message.protocol_config.response_body_mode = answer
    return message


def part(name: str, body: bytes = b"", *, last: bool = False) -> Any:
    message = pb.ProcessingRequest()
    getattr(message, name).SetInParent()
    if body or last:
        getattr(message, name).body, getattr(message, name).end_of_stream = body, last
    return message


@pytest.mark.parametrize("size", [0, 1, 61_999, 62_000, 62_001, 200_000])
@pytest.mark.parametrize("trailers", [False, True])
async def test_in_full_duplex_a_request_goes_on_as_headers_pieces_and_trailers_and_ends_once(size: int, trailers: bool) -> None:
    call = Call(start(), part("request_body", b"old", last=not trailers), *([part("request_trailers")] if trailers else []))
    stream = wire.Stream(call)
    await stream.receive()
    await stream.pass_headers(wire.Mutation(remove_headers=("x-bad",), watch_answer=True))
    assert call.sent == []  # Envoy waits for nothing
    while await stream.receive() is not None:
        pass
    body = bytes(size)
    change = wire.Mutation(body=body, destination="10.0.0.1:1", set_headers={"a": "b"}, clear_route_cache=bool(size % 2))
    await stream.pass_body(change, b"old")
    head, *pieces = call.sent
    assert head.WhichOneof("response") == "request_headers" and not head.HasField("mode_override")
    assert list(head.request_headers.response.header_mutation.remove_headers) == ["x-bad"]
    assert head.request_headers.response.clear_route_cache == bool(size % 2)
    assert [o.header.key for o in head.request_headers.response.header_mutation.set_headers] == ["a", DESTINATION_HEADER]
    if trailers:
        assert pieces.pop().WhichOneof("response") == "request_trailers"
    streamed = [piece.request_body.response.body_mutation.streamed_response for piece in pieces]
    assert b"".join(each.body for each in streamed) == body and max(len(each.body) for each in streamed) < 64 << 10
    assert [each.end_of_stream for each in streamed] == [False] * (len(streamed) - 1) + [not trailers]


async def test_pieces_of_an_answer_that_piled_up_go_on_together_and_in_order() -> None:
    pieces = [part("response_body", bytes((number,)) * 10_000) for number in range(10)]
    call = Call(start(answer=Mode.FULL_DUPLEX_STREAMED), part("response_headers"), *pieces, part("response_trailers"))
    stream = wire.Stream(call)
    await stream.receive()
    event = await stream.receive()
    while event is not None:
        event = await stream.pass_answer(event) or await stream.receive()
    head, first, second, trailers = call.sent
    assert head.WhichOneof("response") == "response_headers" and trailers.WhichOneof("response") == "response_trailers"
    streamed = [each.response_body.response.body_mutation.streamed_response for each in (first, second)]
    assert b"".join(each.body for each in streamed) == b"".join(bytes((number,)) * 10_000 for number in range(10))
    assert not any(each.end_of_stream for each in streamed)  # trailers follow


async def test_an_answer_in_pieces_ends_where_envoy_says_so() -> None:
    last = part("response_body", b"", last=True)
    call = Call(start(answer=Mode.FULL_DUPLEX_STREAMED), part("response_body", b"end"), last)
    stream = wire.Stream(call)
    await stream.receive()
    event = await stream.receive()
    assert event is not None and await stream.pass_answer(event) is None and await stream.receive() is None
    (only,) = call.sent
    streamed = only.response_body.response.body_mutation.streamed_response
    assert (streamed.body, streamed.end_of_stream) == (b"end", True)


async def test_a_stream_may_begin_with_the_answer_of_another_filter() -> None:
    begin = part("response_headers")
    begin.protocol_config.response_body_mode = Mode.FULL_DUPLEX_STREAMED
    call = Call(begin, part("response_body", b"no", last=True))
    stream = wire.Stream(call)
    event = await stream.receive()
    assert isinstance(event, wire.ResponseHeaders) and event.answer_full_duplex
    while event is not None:
        event = await stream.pass_answer(event) or await stream.receive()
    head, only = call.sent
    assert head.WhichOneof("response") == "response_headers"
    assert only.response_body.response.body_mutation.streamed_response.body == b"no"


async def test_a_body_mode_that_is_not_spoken_is_refused_by_its_name() -> None:
    message = start()
    message.protocol_config.request_body_mode = Mode.BUFFERED_PARTIAL
    with pytest.raises(wire.UnsupportedModeError, match="request_body_mode is BUFFERED_PARTIAL"):
        await wire.Stream(Call(message)).receive()
