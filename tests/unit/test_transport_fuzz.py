"""The HTTP/2 core on what no test would think of: any bytes, any order of frames, any split of the stream."""

from __future__ import annotations

import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from extproc.transport.http2 import frames
from extproc.transport.http2.connection import Limits
from extproc.transport.http2.frames import frame
from extproc.transport.http2.hpack import encode
from tests.unit.transport_peer import GET, OK, REQUEST, Server, data, headers, split

LIMITS = Limits(max_streams=4, stream_window_bytes=2_000, connection_window_bytes=70_000, idle_frames=40, idle_frames_per_s=1)
streams = st.sampled_from([0, 1, 1, 3, 3, 5, 7, 9, 2])
payloads = st.one_of(st.binary(max_size=30), st.integers(0, 3000).map(bytes))
MORE = ((b"grpc-timeout", b"1S"), (b"x", b"y" * 50))

frame_bytes = st.one_of(
    st.builds(
        headers, streams, st.sampled_from([REQUEST, GET, MORE, (*REQUEST, *MORE), ((b"bad name", b""),)]), end=st.booleans()
    ),
    st.builds(data, streams, payloads, end=st.booleans()),
    st.builds(frames.rst_stream, streams, st.integers(0, 20)),
    st.builds(frames.window_update, streams, st.sampled_from([0, 1, 1000, 100_000, 0x7FFFFFFF])),
    st.builds(frames.settings, st.dictionaries(st.integers(0, 8), st.sampled_from([0, 1, 2, 100, 16_384, 70_000]), max_size=3)),
    st.builds(lambda flags, text: frame(frames.PING, flags, 0, text), st.integers(0, 1), st.binary(min_size=8, max_size=8)),
    st.builds(lambda stream: frame(frames.HEADERS, 0, stream, encode(REQUEST)), streams),
    st.builds(lambda stream, flags: frame(frames.CONTINUATION, flags, stream, encode(MORE)), streams, st.sampled_from([0, 4])),
    st.builds(frame, st.integers(0, 12), st.integers(0, 255), streams, payloads),
    st.binary(max_size=20),
)
sessions = st.lists(frame_bytes, max_size=40)
TOLERANT = settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=300)


def sane(server: Server) -> None:
    """What must hold after any bytes whatever."""
    connection = server.connection
    assert len(connection.streams) <= LIMITS.max_streams
    assert not (connection.closed and connection.streams), "streams outlive their connection"
    for number, stream in connection.streams.items():
        assert stream.id == number
        assert stream.remote_open or stream.local_open, "a stream that is closed on both sides is kept"
        assert stream.receive_window >= 0
    for number in server.opened_streams:
        told = [event[0] for event in server.told(number)]
        assert told.count("gone") + told.count("ended") <= 2 and told.count("gone") <= 1
        assert "gone" not in told or told[-1] == "gone", "told of a stream that is gone"
        if number not in connection.streams and not server.answers:
            assert "gone" in told, "a stream went without a word to its owner"
    assert sum(len(piece) for piece in connection._pieces) <= LIMITS.max_frame_bytes + 100 or connection.closed


@TOLERANT
@given(sessions, st.booleans(), st.randoms(use_true_random=False))
def test_nothing_raises_and_no_stream_is_left_behind(session: list[bytes], answers: bool, chance: random.Random) -> None:
    server = Server(LIMITS, answers=answers)
    server.greet()
    for piece in session:
        server.take(piece)
        sane(server)
        open_streams = [stream for stream in server.connection.streams.values() if stream.local_open]
        if open_streams and chance.random() < 0.5:
            stream = chance.choice(open_streams)
            action = chance.randrange(4)
            if action == 0:
                server.connection.reset(stream, 8)
                # Its owner is not told of what it did itself.
                server.events.append((stream.id, "gone", 8))
            elif action == 1:
                server.connection.grant(stream, LIMITS.stream_window_bytes)
            elif stream.trailers is None:
                server.connection.sender.data(stream, b"12345", b"x" * chance.randrange(50_000))
        server.sent()  # only whole frames
    server.connection.lost()
    sane(server)
    assert not server.connection.streams
    assert not server.connection.sender._waiting, "a stream that is gone is still in line"


@TOLERANT
@given(st.binary(max_size=300))
def test_any_bytes_after_the_greeting(junk: bytes) -> None:
    server = Server(LIMITS)
    server.greet()
    server.take(junk)
    sane(server)


@TOLERANT
@given(sessions, st.lists(st.tuples(st.integers(0, 5_000), st.integers(0, 255)), min_size=1, max_size=5))
def test_a_valid_session_with_a_few_bytes_changed(session: list[bytes], changes: list[tuple[int, int]]) -> None:
    text = bytearray(frames.PREFACE + frames.settings({}) + headers(1) + data(1, b"x" * 50) + b"".join(session))
    for place, byte in changes:
        text[place % len(text)] = byte
    server = Server(LIMITS)
    server.take(bytes(text))
    sane(server)


@TOLERANT
@given(sessions, st.lists(st.integers(1, 400), min_size=1, max_size=60))
def test_the_split_of_the_stream_changes_nothing(session: list[bytes], sizes: list[int]) -> None:
    text = frames.PREFACE + frames.settings({}) + b"".join(session)
    whole, parts = Server(LIMITS), Server(LIMITS)
    sent = whole.take(text)
    sent_in_parts, position, turn = parts.sent(), 0, 0
    while position < len(text):
        size = sizes[turn % len(sizes)]
        sent_in_parts += parts.take(text[position : position + size])
        position, turn = position + size, turn + 1
    assert parts.events == whole.events
    assert sent_in_parts == sent
    assert parts.connection.closed == whole.connection.closed


class Model:
    """The windows of a client, as RFC 9113 has them: raises when the server sends more than it may."""

    def __init__(self) -> None:
        self.connection, self.initial, self.streams = 65_535, 65_535, dict[int, int]()
        self.received: dict[int, int] = {}
        self.frame_bytes = 16_384

    def read(self, server: Server) -> None:
        out = b"".join(server.connection.sender.out)
        server.connection.sender.out.clear()
        for sent in split(out):
            if sent.kind == frames.DATA:
                size = len(sent.payload)
                assert size <= self.frame_bytes, "a frame larger than the client takes"
                if size:
                    assert size <= self.connection, "more than the connection's window"
                    assert size <= self.streams[sent.stream], "more than the stream's window"
                self.connection -= size
                self.streams[sent.stream] -= size
                self.received[sent.stream] = self.received.get(sent.stream, 0) + size


steps = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.sampled_from([1, 3, 5]), st.integers(0, 60_000)),
        st.tuples(st.just("stream"), st.sampled_from([1, 3, 5]), st.integers(1, 50_000)),
        st.tuples(st.just("connection"), st.just(0), st.integers(1, 50_000)),
        st.tuples(st.just("initial"), st.just(0), st.integers(0, 80_000)),
        st.tuples(st.just("frame"), st.just(0), st.integers(16_384, 40_000)),
        st.tuples(st.just("pause"), st.just(0), st.booleans()),
    ),
    max_size=60,
)


@TOLERANT
@given(steps)
def test_no_window_is_ever_exceeded_and_everything_arrives_in_the_end(plan: list[tuple[str, int, int]]) -> None:
    server, model = Server(), Model()
    server.greet()
    server.take(headers(1) + headers(3) + headers(5))
    model.streams = dict.fromkeys((1, 3, 5), model.initial)
    wanted = dict.fromkeys((1, 3, 5), 0)
    for what, number, amount in plan:
        if what == "send":
            server.connection.sender.data(server.opened_streams[number], b"12345", bytes(amount))
            wanted[number] += amount + 5
        elif what == "stream":
            model.streams[number] += amount
            server.connection.receive(frames.window_update(number, amount))
        elif what == "connection":
            model.connection += amount
            server.connection.receive(frames.window_update(0, amount))
        elif what == "initial":
            model.streams = {key: value + amount - model.initial for key, value in model.streams.items()}
            model.initial = amount
            server.connection.receive(frames.settings({frames.INITIAL_WINDOW_SIZE: amount}))
        elif what == "frame":
            model.frame_bytes = amount
            server.connection.receive(frames.settings({frames.MAX_FRAME_SIZE: amount}))
        elif amount:
            server.connection.pause()
        else:
            server.connection.resume()
        model.read(server)
    server.connection.resume()
    for number in (0, 1, 3, 5):
        grown = 1 << 29
        if number:
            model.streams[number] += grown
        else:
            model.connection += grown
        server.connection.receive(frames.window_update(number, grown))
    model.read(server)
    assert {number: model.received.get(number, 0) for number in wanted} == wanted
    assert not server.connection.sender._waiting
    for number in (1, 3, 5):
        server.connection.end(server.opened_streams[number], OK)
    assert not server.connection.streams
