"""gRPC's messages out of the data of a stream: the same however it is cut, within the limits, and without a stall."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.transport.http2.connection import Connection, Limits, Stream
from extproc.transport.inbox import Inbox
from extproc.transport.status import Status
from tests.unit.transport_peer import Server

WINDOW = 1_000


class Box(Inbox):
    """Notes what it is asked to do."""

    def __init__(self, connection: Connection, stream: Stream, max_message_bytes: int = 5_000) -> None:
        super().__init__(connection, stream, max_message_bytes, WINDOW)
        self.wakes = 0
        self.refused: tuple[Status, str] | None = None

    def arrived(self) -> None:
        self.wakes += 1

    def refuse(self, status: Status, text: str) -> None:
        self.refused = status, text


def box(**more: int) -> Box:
    return Box(Server(Limits(stream_window_bytes=WINDOW)).connection, Stream(1, 65_535, WINDOW, -1), **more)


def framed(message: bytes, flag: int = 0) -> bytes:
    return bytes((flag,)) + len(message).to_bytes(4, "big") + message


def pour(inbox: Box, text: bytes, sizes: list[int]) -> None:
    position, turn = 0, 0
    while position < len(text):
        end = min(position + sizes[turn % len(sizes)], len(text))
        # Within something larger, as it comes from the socket.
        inbox.data(b"<" * 7 + text[position:end] + b">" * 9, 7, 7 + end - position)
        position, turn = end, turn + 1


@given(st.lists(st.binary(max_size=300), max_size=12), st.lists(st.integers(1, 200), min_size=1, max_size=20))
def test_messages_are_the_same_however_the_data_is_cut(messages: list[bytes], sizes: list[int]) -> None:
    inbox = box()
    pour(inbox, b"".join(map(framed, messages)), sizes)
    assert list(inbox.messages) == messages
    assert not inbox.cut_off


@given(st.binary(min_size=1, max_size=300), st.data())
def test_a_message_that_is_cut_off_is_none(message: bytes, draw: st.DataObject) -> None:
    inbox = box()
    text = framed(message)
    pour(inbox, text[: draw.draw(st.integers(1, len(text) - 1))], [100])
    assert inbox.cut_off and not inbox.messages


@pytest.mark.parametrize("sizes", [[10_000], [1], [3]])
def test_a_compressed_message_is_refused(sizes: list[int]) -> None:
    inbox = box()
    pour(inbox, framed(b"ok") + framed(b"x" * 10, flag=1)[:6], sizes)
    assert inbox.refused is not None and inbox.refused[0] is Status.UNIMPLEMENTED
    assert list(inbox.messages) == [b"ok"]


@pytest.mark.parametrize("sizes", [[10_000], [1]])
def test_a_message_above_the_limit_is_refused_before_it_is_there(sizes: list[int]) -> None:
    inbox = box(max_message_bytes=10)
    pour(inbox, framed(b"x" * 10) + b"\0\0\0\0\x0b", sizes)
    assert inbox.refused is not None and inbox.refused[0] is Status.RESOURCE_EXHAUSTED
    assert list(inbox.messages) == [b"x" * 10]


def test_whoever_waits_is_woken_for_the_first_message_only() -> None:
    inbox = box()
    pour(inbox, framed(b"a") + framed(b"b"), [1])
    assert inbox.wakes == 1
    inbox.take(), inbox.take()
    pour(inbox, framed(b"c"), [1])
    assert inbox.wakes == 2


def test_nothing_is_taken_in_after_the_end() -> None:
    inbox = box()
    pour(inbox, framed(b"a") + framed(b"b")[:3], [100])
    inbox.shut()
    pour(inbox, framed(b"c"), [100])
    assert not inbox.messages and not inbox.cut_off


def flow(messages: list[bytes], reads: list[int]) -> tuple[list[bytes], int]:
    """A peer that sends as much as it may, and a reader that takes ``reads`` messages after each frame, then all.

    The messages that came, and the most bytes that nobody had taken.
    """
    server = Server(Limits(stream_window_bytes=WINDOW))
    stream = Stream(1, 65_535, WINDOW, -1)
    inbox = Box(server.connection, stream)
    text, position, came, most, turn = b"".join(map(framed, messages)), 0, list[bytes](), 0, 0
    while position < len(text):
        room = min(stream.receive_window, len(text) - position, 400)
        if room:
            stream.receive_window -= room
            inbox.data(text, position, position + room)
            position += room
        most = max(most, position - sum(len(each) + 5 for each in came))
        take = reads[turn % len(reads)] if room else len(inbox.messages)
        assert room or take, "a stall: the peer may send nothing, and there is nothing to take"
        turn += 1
        for _ in range(min(take, len(inbox.messages))):
            came.append(inbox.take())
    return came + list(inbox.messages), most


@settings(deadline=None)
@given(st.lists(st.integers(0, 5_000).map(bytes), max_size=30), st.lists(st.integers(0, 4), min_size=1, max_size=10))
def test_whatever_is_sent_arrives_and_what_is_not_taken_is_bounded(messages: list[bytes], reads: list[int]) -> None:
    came, most = flow(messages, reads)
    assert came == messages
    assert most <= 2 * WINDOW + 5_000 + 2 * 5


@pytest.mark.parametrize("size", [100, 600, 1_500, 5_000])
def test_a_reader_that_does_not_read_stops_the_peer(size: int) -> None:
    server = Server(Limits(stream_window_bytes=WINDOW))
    stream = Stream(1, 65_535, WINDOW, -1)
    inbox = Box(server.connection, stream)
    server.sent()
    text, sent = framed(bytes(size)) * 100, 0
    while stream.receive_window:
        end = min(sent + stream.receive_window, sent + 300)
        stream.receive_window -= end - sent
        inbox.data(text, sent, end)
        sent = end
    assert sent <= 2 * WINDOW + size, "the peer may go on though nobody reads"
    while inbox.messages:
        inbox.take()
    assert stream.receive_window >= WINDOW // 2, "all is taken, and the peer is not told to go on"


def test_a_message_larger_than_the_window_costs_one_update() -> None:
    server = Server(Limits(stream_window_bytes=WINDOW))
    stream = Stream(1, 65_535, WINDOW, -1)
    inbox = Box(server.connection, stream)
    server.sent()
    text, position = framed(b"x" * 5_000), 0
    while position < len(text):
        end = min(position + 300, len(text))
        stream.receive_window -= end - position
        inbox.data(text, position, end)
        position = end
    assert inbox.take() == b"x" * 5_000
    assert len(server.sent()) == 1
    assert WINDOW // 2 <= stream.receive_window <= 2 * WINDOW
