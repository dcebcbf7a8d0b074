"""The HTTP/2 core against RFC 9113, section by section: what h2spec asks of a server, with frames made by hand."""

from __future__ import annotations

import pytest

from extproc.transport.http2 import errors, frames
from extproc.transport.http2.connection import Limits
from extproc.transport.http2.frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PADDED,
    PING,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    WITH_PRIORITY,
    frame,
    rst_stream,
    settings,
    window_update,
)
from extproc.transport.http2.hpack import encode
from tests.unit.transport_peer import GET, OK, REQUEST, Sent, Server, data, headers

REQUEST_BLOCK = encode(REQUEST)
CALM = errors.ENHANCE_YOUR_CALM


def field(name: str, value: str) -> tuple[bytes, bytes]:
    return name.encode(), value.encode()


def without(name: str) -> tuple[tuple[bytes, bytes], ...]:
    return tuple(item for item in REQUEST if item[0] != name.encode())


def greeted(limits: Limits | None = None, **more: bool) -> Server:
    server = Server(limits or Limits(), **more)
    server.greet()
    return server


def connection_error(sent: list[Sent]) -> int | None:
    """The code of a GOAWAY."""
    return next((each.code for each in sent if each.kind == GOAWAY), None)


def stream_error(sent: list[Sent]) -> tuple[int, int] | None:
    """Stream and code of a RST_STREAM."""
    return next(((each.stream, each.code) for each in sent if each.kind == RST_STREAM), None)


# -- faults that end the connection -------------------------------------------------------------------------------------------

OPEN = headers(1)
HALF_CLOSED = headers(1, end=True)
OVER_GRANTED = window_update(1, 0x7FFFFFFF) * 2
CONNECTION_FAULTS = {
    # section and what is wrong: (what the client sends after its preface and SETTINGS, code)
    "4.2 DATA larger than SETTINGS_MAX_FRAME_SIZE": (OPEN + data(1, b"x" * 16_385), errors.FRAME_SIZE_ERROR),
    "4.2 HEADERS larger than SETTINGS_MAX_FRAME_SIZE": (
        frame(HEADERS, END_HEADERS, 1, b"x" * 16_385),
        errors.FRAME_SIZE_ERROR,
    ),
    "4.3 a block of headers that cannot be read": (frame(HEADERS, END_HEADERS, 1, b"\x40"), errors.COMPRESSION_ERROR),
    "4.3 PRIORITY within a block of headers": (
        frame(HEADERS, 0, 1, REQUEST_BLOCK) + frame(PRIORITY, 0, 1, bytes(5)),
        errors.PROTOCOL_ERROR,
    ),
    "4.3 HEADERS of another stream within a block of headers": (
        frame(HEADERS, 0, 1, REQUEST_BLOCK) + headers(3),
        errors.PROTOCOL_ERROR,
    ),
    "5.1 idle: DATA": (data(1, b"x"), errors.PROTOCOL_ERROR),
    "5.1 idle: RST_STREAM": (rst_stream(1, 0), errors.PROTOCOL_ERROR),
    "5.1 idle: WINDOW_UPDATE": (window_update(1, 1), errors.PROTOCOL_ERROR),
    "5.1 idle: CONTINUATION": (frame(CONTINUATION, END_HEADERS, 1, REQUEST_BLOCK), errors.PROTOCOL_ERROR),
    "5.1 half-closed: CONTINUATION": (
        HALF_CLOSED + frame(CONTINUATION, END_HEADERS, 1, REQUEST_BLOCK),
        errors.PROTOCOL_ERROR,
    ),
    "5.1 closed by RST_STREAM: HEADERS": (OPEN + rst_stream(1, 8) + headers(1), errors.STREAM_CLOSED),
    "5.1 closed by RST_STREAM: CONTINUATION": (
        OPEN + rst_stream(1, 8) + frame(CONTINUATION, END_HEADERS, 1, REQUEST_BLOCK),
        errors.PROTOCOL_ERROR,
    ),
    "5.1.1 an even stream": (headers(2), errors.PROTOCOL_ERROR),
    "5.1.1 a stream below one that was opened": (headers(5) + headers(3), errors.PROTOCOL_ERROR),
    "5.5 an unknown frame within a block of headers": (
        frame(HEADERS, 0, 1, REQUEST_BLOCK) + frame(0x16, 0, 0, bytes(8)),
        errors.PROTOCOL_ERROR,
    ),
    "6.1 DATA on stream 0": (OPEN + data(0, b"x"), errors.PROTOCOL_ERROR),
    "6.1 more padding than payload": (OPEN + frame(DATA, PADDED, 1, b"\x05xxxx"), errors.PROTOCOL_ERROR),
    "6.1 padding as long as the payload": (OPEN + frame(DATA, PADDED, 1, b"\x05xxxxx"[:5]), errors.PROTOCOL_ERROR),
    "6.1 padded, and empty": (OPEN + frame(DATA, PADDED, 1, b""), errors.FRAME_SIZE_ERROR),
    "6.2 HEADERS on stream 0": (headers(0), errors.PROTOCOL_ERROR),
    "6.2 HEADERS with more padding than payload": (
        frame(HEADERS, END_HEADERS | PADDED, 1, b"\xff" + REQUEST_BLOCK),
        errors.PROTOCOL_ERROR,
    ),
    "6.2 HEADERS without the priority they announce": (
        frame(HEADERS, END_HEADERS | WITH_PRIORITY, 1, bytes(4)),
        errors.FRAME_SIZE_ERROR,
    ),
    "6.3 PRIORITY on stream 0": (frame(PRIORITY, 0, 0, bytes(5)), errors.PROTOCOL_ERROR),
    "6.4 RST_STREAM on stream 0": (rst_stream(0, 8), errors.PROTOCOL_ERROR),
    "6.4 RST_STREAM of 3 bytes": (OPEN + frame(RST_STREAM, 0, 1, bytes(3)), errors.FRAME_SIZE_ERROR),
    "6.5 an acknowledgement with settings": (frame(SETTINGS, ACK, 0, bytes(6)), errors.FRAME_SIZE_ERROR),
    "6.5 SETTINGS on a stream": (frame(SETTINGS, 0, 1, b""), errors.PROTOCOL_ERROR),
    "6.5 SETTINGS of 3 bytes": (frame(SETTINGS, 0, 0, bytes(3)), errors.FRAME_SIZE_ERROR),
    "6.5.2 SETTINGS_ENABLE_PUSH is 2": (settings({frames.ENABLE_PUSH: 2}), errors.PROTOCOL_ERROR),
    "6.5.2 SETTINGS_INITIAL_WINDOW_SIZE above 2**31-1": (
        settings({frames.INITIAL_WINDOW_SIZE: 1 << 31}),
        errors.FLOW_CONTROL_ERROR,
    ),
    "6.5.2 SETTINGS_MAX_FRAME_SIZE below 2**14": (settings({frames.MAX_FRAME_SIZE: 16_383}), errors.PROTOCOL_ERROR),
    "6.5.2 SETTINGS_MAX_FRAME_SIZE above 2**24-1": (settings({frames.MAX_FRAME_SIZE: 1 << 24}), errors.PROTOCOL_ERROR),
    "6.6 and 8.4 PUSH_PROMISE from a client": (
        OPEN + frame(PUSH_PROMISE, END_HEADERS, 1, bytes(4) + REQUEST_BLOCK),
        errors.PROTOCOL_ERROR,
    ),
    "6.7 PING on a stream": (frame(PING, 0, 1, bytes(8)), errors.PROTOCOL_ERROR),
    "6.7 PING of 6 bytes": (frame(PING, 0, 0, bytes(6)), errors.FRAME_SIZE_ERROR),
    "6.8 GOAWAY on a stream": (frame(GOAWAY, 0, 1, bytes(8)), errors.PROTOCOL_ERROR),
    "6.8 GOAWAY of 7 bytes": (frame(GOAWAY, 0, 0, bytes(7)), errors.FRAME_SIZE_ERROR),
    "6.9 WINDOW_UPDATE by 0 on the connection": (window_update(0, 0), errors.PROTOCOL_ERROR),
    "6.9 WINDOW_UPDATE of 3 bytes": (frame(WINDOW_UPDATE, 0, 0, bytes(3)), errors.FRAME_SIZE_ERROR),
    "6.9.1 the connection's window above 2**31-1": (window_update(0, 0x7FFFFFFF) * 2, errors.FLOW_CONTROL_ERROR),
    "6.9.2 SETTINGS make a stream's window larger than 2**31-1": (
        OPEN + window_update(1, 0x7FFFFFFF - 65_535) + settings({frames.INITIAL_WINDOW_SIZE: 65_536}),
        errors.FLOW_CONTROL_ERROR,
    ),
    "6.10 CONTINUATION on stream 0": (
        frame(HEADERS, 0, 1, REQUEST_BLOCK) + frame(CONTINUATION, END_HEADERS, 0, b""),
        errors.PROTOCOL_ERROR,
    ),
    "6.10 CONTINUATION after END_HEADERS": (
        OPEN + frame(CONTINUATION, END_HEADERS, 1, REQUEST_BLOCK),
        errors.PROTOCOL_ERROR,
    ),
    "6.10 CONTINUATION after the last CONTINUATION": (
        frame(HEADERS, 0, 1, REQUEST_BLOCK) + frame(CONTINUATION, END_HEADERS, 1, b"") + frame(CONTINUATION, 4, 1, b""),
        errors.PROTOCOL_ERROR,
    ),
    "6.10 CONTINUATION after DATA": (
        OPEN + data(1, b"x") + frame(CONTINUATION, END_HEADERS, 1, REQUEST_BLOCK),
        errors.PROTOCOL_ERROR,
    ),
    "6.10 DATA within a block of headers": (
        frame(HEADERS, 0, 1, REQUEST_BLOCK) + data(1, b"x"),
        errors.PROTOCOL_ERROR,
    ),
}


@pytest.mark.parametrize("case", CONNECTION_FAULTS)
def test_a_fault_of_the_connection_ends_it_with_the_code_of_the_rfc(case: str) -> None:
    sends, code = CONNECTION_FAULTS[case]
    server = greeted()
    sent = server.take(sends)
    assert connection_error(sent) == code
    assert server.connection.closed, "the socket must be closed after GOAWAY"
    assert not server.connection.streams, "streams are left"
    assert server.take(headers(7)) == [], "nothing is read any more"


# -- faults that end a stream -------------------------------------------------------------------------------------------------

PROTOCOL = errors.PROTOCOL_ERROR
STREAM_FAULTS = {
    # section and what is wrong: (what the client sends, code); always on stream 1
    "5.1 half-closed: DATA": (HALF_CLOSED + data(1, b"x"), errors.STREAM_CLOSED),
    "5.1 half-closed: HEADERS": (HALF_CLOSED + headers(1, end=True), errors.STREAM_CLOSED),
    "5.1 closed by RST_STREAM: DATA": (OPEN + rst_stream(1, 8) + data(1, b"x"), errors.STREAM_CLOSED),
    "5.3 HEADERS of a stream that depends on itself": (
        frame(HEADERS, END_HEADERS | WITH_PRIORITY, 1, b"\x00\x00\x00\x01\x10" + REQUEST_BLOCK),
        PROTOCOL,
    ),
    "5.3 PRIORITY of a stream that depends on itself": (OPEN + frame(PRIORITY, 0, 1, b"\x00\x00\x00\x01\x10"), PROTOCOL),
    "6.3 PRIORITY of 4 bytes": (OPEN + frame(PRIORITY, 0, 1, bytes(4)), errors.FRAME_SIZE_ERROR),
    "6.9 WINDOW_UPDATE by 0": (OPEN + window_update(1, 0), PROTOCOL),
    "6.9.1 a stream's window above 2**31-1": (OPEN + window_update(1, 0x7FFFFFFF), errors.FLOW_CONTROL_ERROR),
    "8.1 a second HEADERS that does not end the stream": (OPEN + headers(1, (field("a", "b"),)), PROTOCOL),
    "8.1 a pseudo-header among the trailers": (OPEN + headers(1, (field(":path", "/"),), end=True), PROTOCOL),
    "8.1 an upper-case name among the trailers": (OPEN + headers(1, (field("A", "b"),), end=True), PROTOCOL),
    "8.1.1 less than content-length": (
        headers(1, (*REQUEST, field("content-length", "3"))) + data(1, b"xx", end=True),
        PROTOCOL,
    ),
    "8.1.1 more than content-length": (
        headers(1, (*REQUEST, field("content-length", "1"))) + data(1, b"x") + data(1, b"x"),
        PROTOCOL,
    ),
    "8.1.1 no data, but a content-length": (headers(1, (*REQUEST, field("content-length", "1")), end=True), PROTOCOL),
    "8.1.1 trailers before content-length is there": (
        headers(1, (*REQUEST, field("content-length", "2"))) + data(1, b"x") + headers(1, (field("a", "b"),), end=True),
        PROTOCOL,
    ),
    "8.1.1 two content-lengths": (
        headers(1, (*REQUEST, field("content-length", "1"), field("content-length", "2"))),
        PROTOCOL,
    ),
    "8.1.1 a content-length that is no number": (headers(1, (*REQUEST, field("content-length", "+1"))), PROTOCOL),
    "8.2.1 an upper-case name": (headers(1, (*REQUEST, field("X-Test", "ok"))), PROTOCOL),
    "8.2.1 a name with a space": (headers(1, (*REQUEST, field("x y", "ok"))), PROTOCOL),
    "8.2.1 an empty name": (headers(1, (*REQUEST, field("", "ok"))), PROTOCOL),
    "8.2.1 a value with a line break": (headers(1, (*REQUEST, field("x", "a\r\nb"))), PROTOCOL),
    "8.2.1 a value with NUL": (headers(1, (*REQUEST, field("x", "a\0b"))), PROTOCOL),
    "8.2.1 a value that begins with a space": (headers(1, (*REQUEST, field("x", " a"))), PROTOCOL),
    "8.2.1 a value that ends with a tab": (headers(1, (*REQUEST, field("x", "a\t"))), PROTOCOL),
    "8.2.2 connection": (headers(1, (*REQUEST, field("connection", "keep-alive"))), PROTOCOL),
    "8.2.2 transfer-encoding": (headers(1, (*REQUEST, field("transfer-encoding", "chunked"))), PROTOCOL),
    "8.2.2 te that is not trailers": (headers(1, (*without("te"), field("te", "trailers, deflate"))), PROTOCOL),
    "8.3 an unknown pseudo-header": (headers(1, (field(":test", "ok"), *REQUEST)), PROTOCOL),
    "8.3 a pseudo-header of answers": (headers(1, (field(":status", "200"), *REQUEST)), PROTOCOL),
    "8.3 a pseudo-header behind a regular one": (headers(1, (*without(":path"), field(":path", "/"))), PROTOCOL),
    "8.3.1 an empty :path": (headers(1, (field(":path", ""), *without(":path"))), PROTOCOL),
    "8.3.1 no :method": (headers(1, without(":method")), PROTOCOL),
    "8.3.1 no :scheme": (headers(1, without(":scheme")), PROTOCOL),
    "8.3.1 no :path": (headers(1, without(":path")), PROTOCOL),
    "8.3.1 two :method": (headers(1, (field(":method", "GET"), *REQUEST)), PROTOCOL),
    "8.3.1 two :scheme": (headers(1, (field(":scheme", "http"), *REQUEST)), PROTOCOL),
    "8.3.1 two :path": (headers(1, (field(":path", "/"), *REQUEST)), PROTOCOL),
    "8.5 CONNECT with a :path": (headers(1, (field(":method", "CONNECT"), *without(":method"))), PROTOCOL),
    "10.5.1 headers above SETTINGS_MAX_HEADER_LIST_SIZE": (
        b"".join(
            (
                frame(HEADERS, 0, 1, encode((*REQUEST, *[field("x", "y" * 2000)] * 8))),
                *(frame(CONTINUATION, 0, 1, encode([field("x", "y" * 2000)] * 8)) for _ in range(3)),
                frame(CONTINUATION, END_HEADERS, 1, b"\x90" * 1000),
            )
        ),
        CALM,
    ),
}


@pytest.mark.parametrize("case", STREAM_FAULTS)
def test_a_fault_of_a_stream_ends_that_stream_only(case: str) -> None:
    sends, code = STREAM_FAULTS[case]
    server = greeted()
    sent = server.take(sends)
    assert stream_error(sent) == (1, code)
    assert connection_error(sent) is None
    assert 1 not in server.connection.streams
    # The connection goes on, and its table of headers is as the client thinks.
    assert server.take(headers(9, end=True)) == []
    assert server.told(9) == [("ended",)]


def test_5_1_the_owner_of_a_stream_that_is_cut_hears_of_it_once() -> None:
    server = greeted()
    server.take(OPEN + data(1, b"x") + window_update(1, 0) + data(1, b"y") + rst_stream(1, 8))
    assert server.told(1) == [("data", b"x"), ("gone", PROTOCOL)]


# -- what is no fault ---------------------------------------------------------------------------------------------------------

NO_FAULTS = {
    "4.1 an unknown frame": frame(0xFF, 0xFF, 0, bytes(8)),
    "4.1 flags that are not defined": frame(PING, 0xFE, 0, bytes(8)),
    "4.1 the reserved bit": b"\x00\x00\x08\x06\x00\x80\x00\x00\x00" + bytes(8),
    "5.1 PRIORITY on an idle stream": frame(PRIORITY, 0, 3, bytes(5)),
    "5.1 WINDOW_UPDATE, PRIORITY and RST_STREAM on a half-closed stream": HALF_CLOSED
    + window_update(1, 1)
    + frame(PRIORITY, 0, 1, bytes(5))
    + rst_stream(1, 8),
    "5.1 WINDOW_UPDATE, RST_STREAM and PRIORITY on a closed stream": OPEN
    + rst_stream(1, 8)
    + window_update(1, 1)
    + rst_stream(1, 8)
    + frame(PRIORITY, 0, 1, bytes(5)),
    "5.3 PRIORITY, exclusive": frame(PRIORITY, 0, 5, b"\x80\x00\x00\x01\xff"),
    "6.5.2 an unknown setting": settings({0xFF: 1}),
    "6.5 an acknowledgement": frame(SETTINGS, ACK, 0),
    "6.8 GOAWAY with an unknown code and a text": frame(GOAWAY, 0, 0, bytes(4) + b"\x00\x00\x00\xff" + b"because"),
    "7 RST_STREAM with an unknown code": OPEN + rst_stream(1, 0xFF),
}


@pytest.mark.parametrize("case", NO_FAULTS)
def test_what_is_allowed_disturbs_nobody(case: str) -> None:
    server = greeted()
    sent = server.take(NO_FAULTS[case])
    assert connection_error(sent) is None and stream_error(sent) is None
    assert [each.payload for each in server.take(frame(PING, 0, 0, b"12345678"))] == [b"12345678"]
    server.take(headers(9, end=True))
    assert server.told(9) == [("ended",)]


REQUESTS = {
    "GET": (headers(1, GET, end=True), [("ended",)]),
    "DATA in one frame": (OPEN + data(1, b"abc", end=True), [("data", b"abc"), ("ended",)]),
    "DATA in several frames": (OPEN + data(1, b"a") + data(1, b"b") + data(1, end=True), [("data", b"ab"), ("ended",)]),
    "DATA of 2**14 bytes": (OPEN + data(1, b"x" * 16_384), [("data", b"x" * 16_384)]),
    "padded DATA": (OPEN + frame(DATA, PADDED | END_STREAM, 1, b"\x02abc\0\0"), [("data", b"abc"), ("ended",)]),
    "DATA of padding only": (OPEN + frame(DATA, PADDED | END_STREAM, 1, b"\x02\0\0"), [("ended",)]),
    "padded HEADERS with a priority": (
        frame(HEADERS, END_HEADERS | END_STREAM | PADDED | WITH_PRIORITY, 1, b"\x01" + bytes(5) + REQUEST_BLOCK + b"\0"),
        [("ended",)],
    ),
    "HEADERS and CONTINUATION": (
        frame(HEADERS, END_STREAM, 1, REQUEST_BLOCK[:5])
        + frame(CONTINUATION, 0, 1, REQUEST_BLOCK[5:9])
        + frame(CONTINUATION, END_HEADERS, 1, REQUEST_BLOCK[9:]),
        [("ended",)],
    ),
    "trailers": (OPEN + data(1, b"x") + headers(1, (field("a", "b"),), end=True), [("data", b"x"), ("ended",)]),
    "content-length that is kept": (
        headers(1, (*REQUEST, field("content-length", "2"))) + data(1, b"x") + data(1, b"y", end=True),
        [("data", b"xy"), ("ended",)],
    ),
    "RST_STREAM": (OPEN + data(1, b"x") + rst_stream(1, 8), [("data", b"x"), ("gone", 8)]),
}


@pytest.mark.parametrize("case", REQUESTS)
def test_a_request_is_told_as_it_was_sent(case: str) -> None:
    sends, told = REQUESTS[case]
    server = greeted()
    assert [each.kind for each in server.take(sends)] == []
    assert server.told(1) == told
    assert server.events[0][:2] == (1, "opened")


def test_8_3_the_headers_are_those_that_were_sent() -> None:
    server = greeted()
    server.take(headers(1, (*REQUEST, field("x", "1"), field("x", "2"))))
    _, _, method, path, fields = server.events[0]
    assert (method, path) == ("POST", "/x.Y/Z")
    assert fields == (("te", "trailers"), ("content-type", "application/grpc"), ("x", "1"), ("x", "2"))


# -- 3.4 the preface ----------------------------------------------------------------------------------------------------------


def test_3_4_the_server_speaks_first_with_settings_and_the_connection_window() -> None:
    first, second = Server().sent()
    assert (first.kind, first.stream, first.flags) == (SETTINGS, 0, 0)
    assert dict(frames.read_settings(first.payload)) == {
        frames.MAX_CONCURRENT_STREAMS: 1_000,
        frames.INITIAL_WINDOW_SIZE: 1 << 20,
        frames.MAX_FRAME_SIZE: 16_384,
        frames.MAX_HEADER_LIST_SIZE: 65_536,
    }
    assert (second.kind, second.stream) == (WINDOW_UPDATE, 0)


@pytest.mark.parametrize(
    "sends",
    [b"GET / HTTP/1.1\r\n", b"P", b"PRI * HTTP/2.0\r\n\r\nXX", frames.PREFACE + frame(PING, 0, 0, bytes(8))],
    ids=["HTTP/1.1", "P alone is none yet", "a wrong end", "PING before SETTINGS"],
)
def test_3_4_what_is_no_preface_ends_the_connection(sends: bytes) -> None:
    server = Server()
    server.sent()
    sent = server.take(sends)
    assert connection_error(sent) == (None if sends == b"P" else PROTOCOL)
    assert server.connection.closed == (sends != b"P")


def test_3_4_an_acknowledgement_is_not_the_first_settings() -> None:
    server = Server()
    server.sent()
    assert connection_error(server.take(frames.PREFACE + frames.SETTINGS_ACK)) == PROTOCOL


def test_6_5_3_settings_are_acknowledged() -> None:
    server = Server()
    server.sent()
    (answer,) = server.greet({frames.INITIAL_WINDOW_SIZE: 1})
    assert (answer.kind, answer.flags, answer.payload) == (SETTINGS, ACK, b"")


def test_6_7_a_ping_is_answered_and_an_answer_is_not() -> None:
    server = greeted()
    (answer,) = server.take(frame(PING, 0, 0, b"abcdefgh") + frame(PING, ACK, 0, b"ijklmnop"))
    assert (answer.kind, answer.flags, answer.payload) == (PING, ACK, b"abcdefgh")


# -- 5.1 streams --------------------------------------------------------------------------------------------------------------


def test_5_1_2_a_stream_above_the_limit_is_refused_and_may_be_tried_again() -> None:
    server = greeted(Limits(max_streams=2))
    assert stream_error(server.take(headers(1) + headers(3) + headers(5))) == (5, errors.REFUSED_STREAM)
    assert server.take(data(5, b"on its way", end=True)) == [], "what was sent before it heard of it is no fault"
    server.take(rst_stream(1, 8))
    assert server.take(headers(7)) == []
    assert set(server.connection.streams) == {3, 7}


def test_5_1_a_request_that_the_server_refuses() -> None:
    server = greeted(refuses=True)
    assert stream_error(server.take(headers(1) + data(1, b"x"))) == (1, errors.REFUSED_STREAM)
    assert not server.connection.streams


def test_5_1_frames_that_were_on_their_way_to_a_stream_that_we_reset_are_ignored() -> None:
    server = greeted()
    server.take(OPEN)
    server.connection.reset(server.opened_streams[1], errors.CANCEL)
    assert stream_error(server.sent()) == (1, errors.CANCEL)
    late = data(1, b"x") + window_update(1, 5) + headers(1, (field("a", "b"),), end=True) + rst_stream(1, 8)
    assert server.take(late) == []
    assert server.told(1) == []


def test_8_1_an_answer_before_the_end_of_the_request_asks_the_peer_to_stop() -> None:
    server = greeted(answers=True)
    answer, stop = server.take(OPEN)
    assert (answer.kind, answer.flags) == (HEADERS, END_HEADERS | END_STREAM)
    assert (stop.kind, stop.code) == (RST_STREAM, errors.NO_ERROR)
    assert server.take(data(1, b"late", end=True)) == []


def test_5_1_frames_on_a_stream_that_both_sides_have_ended() -> None:
    server = greeted(answers=True)
    server.take(HALF_CLOSED)
    assert stream_error(server.take(data(1, b"x"))) == (1, errors.STREAM_CLOSED)
    server.take(headers(3, end=True))
    assert connection_error(server.take(headers(3, end=True))) == errors.STREAM_CLOSED


def test_8_1_an_answer_to_a_whole_request_is_all_that_is_said() -> None:
    server = greeted(answers=True)
    (answer,) = server.take(HALF_CLOSED)
    assert (answer.kind, answer.flags) == (HEADERS, END_HEADERS | END_STREAM)
    assert not server.connection.streams


def test_rfc7541_4_2_the_first_block_says_that_our_table_is_empty_and_no_other_does() -> None:
    server = greeted(answers=True)
    (first,) = server.take(headers(1, end=True))
    (second,) = server.take(headers(3, end=True))
    assert first.payload == b"\x20" + OK
    assert second.payload == OK


def test_4_3_an_answer_with_headers_larger_than_a_frame_is_continued() -> None:
    server = greeted()
    server.take(OPEN)
    block = encode([field("x", "y" * 20_000), field("z", "y" * 20_000)])
    server.connection.sender.headers(server.opened_streams[1], block)
    sent = server.sent()
    assert [each.kind for each in sent] == [HEADERS, CONTINUATION, CONTINUATION]
    assert [each.flags for each in sent] == [0, 0, END_HEADERS]
    assert b"".join(each.payload for each in sent) == b"\x20" + block


LITERAL = b"\x40\x01k\x01v"
"""A header that goes into the table."""


def closed_by_us(server: Server) -> None:
    server.take(OPEN)
    server.connection.reset(server.opened_streams[1], errors.CANCEL)


def shut_down(server: Server) -> None:
    server.take(OPEN)
    server.connection.finish()


UNHEARD = {
    "refused": (None, 1, REQUEST_BLOCK),
    "malformed": (None, 1, b""),
    "of a stream that we reset": (closed_by_us, 1, b""),
    "after the end of a shutdown": (shut_down, 3, REQUEST_BLOCK),
}


@pytest.mark.parametrize("case", UNHEARD)
def test_4_3_headers_that_nobody_hears_change_the_table_all_the_same(case: str) -> None:
    before, stream, block = UNHEARD[case]
    server = greeted(refuses=case == "refused")
    if before is not None:
        before(server)
    server.take(frame(HEADERS, END_HEADERS | END_STREAM, stream, block + LITERAL))
    assert server.connection._decoder.decode(b"\xbe") == [(b"k", b"v")]


# -- 5.2 and 6.9 flow control -------------------------------------------------------------------------------------------------


def payload(sent: list[Sent]) -> bytes:
    return b"".join(each.payload for each in sent if each.kind == DATA)


def test_6_9_1_no_more_is_sent_than_the_stream_takes() -> None:
    server = Server()
    server.greet({frames.INITIAL_WINDOW_SIZE: 3})
    server.take(OPEN)
    assert not server.connection.sender.data(server.opened_streams[1], b"ab", b"cdefg")
    assert payload(server.sent()) == b"abc"
    assert payload(server.take(window_update(1, 1))) == b"d"
    assert payload(server.take(window_update(1, 100))) == b"efg"
    assert server.connection.sender.data(server.opened_streams[1], b"h", b"")


def test_6_9_2_a_window_may_become_negative_and_grow_again() -> None:
    server = Server()
    server.greet({frames.INITIAL_WINDOW_SIZE: 3})
    server.take(OPEN)
    server.connection.sender.data(server.opened_streams[1], b"", b"abcdef")
    assert payload(server.sent()) == b"abc"
    assert payload(server.take(settings({frames.INITIAL_WINDOW_SIZE: 1}))) == b""  # now -2
    assert payload(server.take(window_update(1, 2))) == b""
    assert payload(server.take(window_update(1, 1))) == b"d"
    assert payload(server.take(settings({frames.INITIAL_WINDOW_SIZE: 2}))) == b"e"
    assert payload(server.take(settings({frames.INITIAL_WINDOW_SIZE: 99}))) == b"f"


def test_6_9_1_the_connection_window_is_shared_in_turn() -> None:
    server = Server()
    server.greet({frames.INITIAL_WINDOW_SIZE: 1 << 20})
    server.take(headers(1) + headers(3))
    sender = server.connection.sender
    assert not sender.data(server.opened_streams[1], b"", b"a" * 100_000)
    assert not sender.data(server.opened_streams[3], b"", b"b" * 20_000)
    assert len(payload(server.sent())) == 65_535
    sent = server.take(window_update(0, 40_000))
    assert [(each.stream, len(each.payload)) for each in sent] == [(1, 16_384), (3, 16_384), (1, 7_232)]
    assert len(payload(server.take(window_update(0, 1 << 20)))) == 120_000 - 65_535 - 40_000


def test_a_stream_that_waits_in_line_and_is_reset_leaves_the_line() -> None:
    server = Server()
    server.greet({frames.INITIAL_WINDOW_SIZE: 1 << 20})
    server.take(headers(1) + headers(3))
    for stream in (1, 3):
        server.connection.sender.data(server.opened_streams[stream], b"", b"x" * 70_000)
    server.take(rst_stream(1, 8))
    assert list(server.connection.sender._waiting) == [server.opened_streams[3]]
    assert {each.stream for each in server.take(window_update(0, 1 << 20))} == {3}


def test_6_9_1_trailers_wait_behind_the_data() -> None:
    server = Server()
    server.greet({frames.INITIAL_WINDOW_SIZE: 1})
    server.take(HALF_CLOSED)
    stream = server.opened_streams[1]
    server.connection.sender.data(stream, b"", b"ab")
    server.connection.end(stream, OK)
    assert payload(server.sent()) == b"a"
    last, end = server.take(window_update(1, 1))
    assert (last.payload, end.kind, end.flags) == (b"b", HEADERS, END_HEADERS | END_STREAM)
    assert not server.connection.streams


def test_a_socket_that_takes_no_more_holds_data_back_and_nothing_else() -> None:
    server = greeted()
    server.take(OPEN)
    server.connection.pause()
    assert not server.connection.sender.data(server.opened_streams[1], b"", b"abc")
    assert [each.kind for each in server.take(frame(PING, 0, 0, bytes(8)))] == [PING]
    server.connection.resume()
    assert payload(server.sent()) == b"abc"


def test_4_2_frames_are_as_large_as_the_peer_takes() -> None:
    server = Server()
    server.greet({frames.INITIAL_WINDOW_SIZE: 1 << 20, frames.MAX_FRAME_SIZE: 20_000})
    server.take(OPEN + window_update(0, 1 << 20))
    server.connection.sender.data(server.opened_streams[1], b"12345", b"x" * 40_000)
    assert [len(each.payload) for each in server.sent()] == [20_000, 20_000, 5]


def test_6_9_1_a_peer_that_sends_more_than_the_stream_takes_is_stopped() -> None:
    server = greeted(Limits(stream_window_bytes=10))
    assert server.take(OPEN + data(1, b"x" * 10)) == []
    assert stream_error(server.take(data(1, b"x"))) == (1, errors.FLOW_CONTROL_ERROR)


def test_6_9_1_a_peer_that_sends_more_than_the_connection_takes_is_stopped() -> None:
    server = greeted(Limits(stream_window_bytes=200_000, connection_window_bytes=65_535))
    # One frame less than half is left, and the window is given back: only a frame larger than the whole window breaks it.
    sent = server.take(OPEN + b"".join(data(1, b"x" * 16_000) for _ in range(10)))
    assert connection_error(sent) is None
    given = sum(int.from_bytes(each.payload, "big") for each in sent if each.kind == WINDOW_UPDATE and not each.stream)
    assert 160_000 - 65_535 // 2 <= given <= 160_000


def test_6_9_1_padding_is_given_back() -> None:
    server = greeted(Limits(stream_window_bytes=1_000))
    server.take(OPEN)
    for _ in range(100):
        sent = server.take(frame(DATA, PADDED, 1, b"\xff" + b"x" + bytes(255)))
        assert stream_error(sent) is None
    assert server.told(1) == [("data", b"x" * 100)]


def test_6_9_data_for_closed_streams_counts_on_the_connection() -> None:
    server = greeted(Limits(connection_window_bytes=70_000))
    server.take(OPEN)
    server.connection.reset(server.opened_streams[1], errors.CANCEL)
    server.sent()
    sent = [each for _ in range(5) for each in server.take(data(1, b"x" * 16_000))]
    assert sum(int.from_bytes(each.payload, "big") for each in sent) >= 80_000 - 35_000


# -- 6.8 shutdown -------------------------------------------------------------------------------------------------------------


def test_6_8_a_shutdown_lets_streams_finish_and_serves_what_was_on_its_way() -> None:
    server = greeted()
    server.take(OPEN)
    server.connection.shut_down()
    goaway, ping = server.sent()
    assert (goaway.kind, goaway.code, goaway.payload[:4]) == (GOAWAY, errors.NO_ERROR, b"\x7f\xff\xff\xff")
    server.take(headers(3))  # it had not read it yet
    (last,) = server.take(frame(PING, ACK, 0, ping.payload))
    assert (last.kind, last.code, int.from_bytes(last.payload[:4], "big")) == (GOAWAY, errors.NO_ERROR, 3)
    assert server.take(headers(5) + data(5, b"x", end=True)) == [], "streams behind the last one are ignored"
    assert 5 not in server.opened_streams
    for stream in (1, 3):
        assert not server.connection.closed
        server.connection.end(server.opened_streams[stream], OK)
    assert server.connection.closed


def test_6_8_a_shutdown_without_streams_closes_after_the_ping() -> None:
    server = greeted()
    server.connection.shut_down()
    _, ping = server.sent()
    assert not server.connection.closed
    server.take(frame(PING, ACK, 0, ping.payload))
    assert server.connection.closed


def test_5_4_1_goaway_names_the_last_stream() -> None:
    server = greeted()
    (goaway,) = server.take(headers(1) + headers(5) + frame(PING, 0, 3, bytes(8)))
    assert int.from_bytes(goaway.payload[:4], "big") == 5
    assert server.told(1) == server.told(5) == [("gone", errors.NO_ERROR)]


# -- 10.5 denial of service ---------------------------------------------------------------------------------------------------

FLOODS = {
    "PING": frame(PING, 0, 0, bytes(8)),
    "SETTINGS": settings({}),
    "DATA without data": data(1),
    "PRIORITY": frame(PRIORITY, 0, 9, bytes(5)),
    "unknown frames": frame(0xFF, 0, 0),
    "RST_STREAM of closed streams": rst_stream(3, 8),
    "GOAWAY": frame(GOAWAY, 0, 0, bytes(8)),
    "padded DATA without data": frame(DATA, PADDED, 1, b"\0"),
}


@pytest.mark.parametrize("case", FLOODS)
def test_10_5_a_flood_of_frames_that_lead_to_nothing_ends_the_connection(case: str) -> None:
    server = greeted(Limits(idle_frames=50, idle_frames_per_s=10))
    server.take(headers(1) + headers(3) + rst_stream(3, 8))
    sent = server.take(FLOODS[case] * 45)
    assert connection_error(sent) is None, "a few are no flood"
    server.now_s += 2  # the bucket fills again with time
    assert connection_error(server.take(FLOODS[case] * 20)) is None
    assert connection_error(server.take(FLOODS[case] * 20)) == CALM


def test_10_5_refused_streams_are_a_flood_too() -> None:
    server = greeted(Limits(max_streams=1, idle_frames=10))
    server.take(headers(1))
    sent = server.take(b"".join(headers(stream) for stream in range(3, 103, 2)))
    assert connection_error(sent) == CALM


def test_resets_of_streams_that_were_served_are_no_flood() -> None:
    server = greeted(Limits(idle_frames=10))  # Envoy resets each stream after its last message
    for stream in range(1, 2001, 2):
        assert server.take(headers(stream) + data(stream, b"x") + rst_stream(stream, 0)) == []
    assert not server.connection.streams


def test_10_5_1_continuation_without_an_end_is_bounded() -> None:
    server = greeted(Limits(max_headers_bytes=1_000))
    server.take(frame(HEADERS, 0, 1, REQUEST_BLOCK))
    sent = [each for _ in range(10) for each in server.take(frame(CONTINUATION, 0, 1, b"\0\1a\1b" * 40))]
    assert connection_error(sent) == CALM


def test_10_5_1_empty_continuations_are_bounded() -> None:
    server = greeted(Limits(idle_frames=50))
    assert connection_error(server.take(frame(HEADERS, 0, 1, REQUEST_BLOCK) + frame(CONTINUATION, 0, 1) * 60)) == CALM


def test_closed_streams_are_not_remembered_for_ever() -> None:
    server = greeted()
    for stream in range(1, 40_001, 2):
        server.take(headers(stream) + rst_stream(stream, 8))
    connection = server.connection
    assert len(connection._closed_lately) + len(connection._closed_before) <= 2_048


def test_headers_that_come_again_are_read_once() -> None:
    server = greeted()
    indexed = b"\x83\x86\x41\x05baton\x44\x02/x"  # the last two go into the table
    server.take(frame(HEADERS, END_HEADERS, 1, indexed))
    again = frame(HEADERS, END_HEADERS, 3, b"\x83\x86\xbf\xbe")  # and stand there now
    server.take(again)
    heads = dict(server.connection._heads)
    assert len(heads) == 1
    server.take(again.replace(b"\x00\x00\x00\x03", b"\x00\x00\x00\x05", 1))
    assert server.connection._heads == heads
    assert server.events[1][2:] == server.events[2][2:] == ("POST", "/x", ())
    # Something new in the table: the same bytes mean other headers now.
    server.take(frame(HEADERS, END_HEADERS, 7, b"\x83\x86\x44\x02/y"))
    server.take(frame(HEADERS, END_HEADERS, 9, b"\x83\x86\xbe"))
    assert server.events[-1][2:4] == ("POST", "/y")
