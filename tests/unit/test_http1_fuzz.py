"""Whatever bytes come, in whatever pieces: one outcome, the same for any pieces, and never a body that was not sent."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import aiohttp
import h11
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.http1.connection import Answer, Connection, Limits, Target
from extproc.http1.errors import HttpError
from extproc.http1.pool import Pool, Settings
from tests.unit.http1_peer import Peer, Talk, Told

LIMITS = Limits(body_bytes=2000, head_bytes=1000, fields=20)
REQUEST = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n"
MARK = b"x-mark"
NOTHING_SAID = b"HTTP/1.1 200 OK\r\n\r\n"


class Wire:
    """A transport that goes nowhere."""

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair()
        self.closing = False

    def get_extra_info(self, _: str) -> socket.socket:
        return self.ours

    def set_write_buffer_limits(self, high: int) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.closing

    def write(self, data: bytes) -> None:
        assert not self.closing

    def abort(self) -> None:
        self.closing = True


class Keeper:
    def __init__(self) -> None:
        self.frees = self.losses = 0

    def free(self, _: Connection) -> None:
        self.frees += 1

    def lost(self, _: Connection) -> None:
        self.losses += 1


def outcome_of(pieces: list[bytes]) -> tuple[Answer | type[HttpError], bool]:
    """What a call makes of an answer that comes in these pieces, after which the peer closes; and whether its connection was
    free for another call in between. Everything that must hold for any bytes is held here.
    """
    keeper, wire, reply = Keeper(), Wire(), Told()
    connection = Connection(keeper, Target(), LIMITS, MARK)
    with wire.ours, wire.theirs:
        connection.connection_made(cast(Any, wire))
        connection.send(REQUEST, b"{}", reply)
        for piece in pieces:
            if wire.closing:
                break
            connection.data_received(piece)
        kept = keeper.frees == 1 and not wire.closing
        if not wire.closing:
            wire.closing = not connection.eof_received()
        connection.connection_lost(None)
    assert reply.times == 1 and keeper.losses == 1 and keeper.frees <= 1
    if reply.error is not None:
        assert wire.closing and not keeper.frees
        return type(reply.error), kept
    assert reply.answer is not None
    assert 200 <= reply.answer.status <= 999 and len(reply.answer.body) <= LIMITS.body_bytes
    return reply.answer, kept


def reference(sent: bytes) -> tuple[int, bytes] | None:
    """What h11, a parser of another make, reads: status and body of the first final answer, or None if it finds a fault."""
    parser = h11.Connection(h11.CLIENT, max_incomplete_event_size=100_000)
    parser.send(h11.Request(method="POST", target="/", headers=[("host", "x"), ("content-length", "0")]))
    parser.send(h11.EndOfMessage())
    parser.receive_data(sent)
    status, body, closed = 0, b"", False
    try:
        while True:
            event = parser.next_event()
            if event is h11.NEED_DATA:
                if closed:
                    return None
                closed = True
                parser.receive_data(b"")
            elif isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                return status, body
            elif isinstance(event, h11.ConnectionClosed):
                return None
    except h11.RemoteProtocolError:
        return None


# -- answers -----------------------------------------------------------------------------------------------------------------

_NAMES = st.sampled_from(["content-type", "Content-Type", "x-mark", "server", "date", "x-a", "set-cookie", "etag"])
_VALUES = st.text("abc/=; 0\t\"'", max_size=12).map(str.strip)
_BODIES = st.binary(max_size=400)


def _lines(fields: list[tuple[str, str]]) -> bytes:
    return b"".join(f"{name}: {value}\r\n".encode() for name, value in fields)


@st.composite
def chunked(draw: st.DrawFn, body: bytes) -> bytes:
    out, at = b"", 0
    while at < len(body):
        size = draw(st.integers(1, len(body) - at))
        extension = draw(st.sampled_from([b"", b";a=b", b';a="b c"']))
        out += b"%x%s\r\n%s\r\n" % (size, extension, body[at : at + size])
        at += size
    return out + b"0\r\n" + _lines(draw(st.lists(st.tuples(st.sampled_from(["x-t", "x-mark"]), _VALUES), max_size=2))) + b"\r\n"


class Sent(NamedTuple):
    """After it the connection is closed."""

    raw: bytes
    body: bytes
    framing: str
    """By what its body ends: ``length``, ``chunked``, or the ``end`` of the connection."""


@st.composite
def answers(draw: st.DrawFn) -> Sent:
    """A valid answer."""
    body = draw(_BODIES)
    fields = draw(st.lists(st.tuples(_NAMES, _VALUES), max_size=5))
    version = draw(st.sampled_from([b"1.1", b"1.1", b"1.0"]))
    status = draw(st.sampled_from([200, 200, 201, 400, 422, 429, 500, 503, 504]))
    out = b""
    for interim in draw(st.lists(st.sampled_from([100, 102, 103]), max_size=2)):
        out += b"HTTP/1.1 %d Wait\r\n%s\r\n" % (interim, _lines(draw(st.lists(st.tuples(_NAMES, _VALUES), max_size=2))))
    framing = draw(st.sampled_from(["length", "chunked", "end"]))
    if framing == "chunked" and version == b"1.0":
        framing = "end"
    out += b"HTTP/%s %d %s\r\n%s" % (version, status, draw(st.sampled_from([b"OK", b"", b"A B"])), _lines(fields))
    if draw(st.booleans()):
        out += b"connection: close\r\n"
    if framing == "length":
        return Sent(out + b"Content-Length: %d\r\n\r\n%s" % (len(body), body), body, framing)
    if framing == "chunked":
        return Sent(out + b"transfer-encoding: chunked\r\n\r\n" + draw(chunked(body)), body, framing)
    return Sent(out + b"\r\n" + body, body, framing)


@st.composite
def pieces_of(draw: st.DrawFn, sent: bytes) -> list[bytes]:
    cuts = sorted(draw(st.lists(st.integers(0, len(sent)), max_size=8)))
    ends = [*cuts, len(sent)]
    return [sent[start:end] for start, end in zip([0, *cuts], ends, strict=True) if end > start]


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    sent = bytearray(draw(answers()).raw)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(sent)))
        kind = draw(st.sampled_from(["put", "drop", "flip", "cut", "twice"]))
        if kind == "put":
            awkward = [b"\r\n", b"\n", b"\r", b"\0", b" ", b":", b"0", b"f", b"\xff", b"content-length: 1\r\n", NOTHING_SAID]
            sent[at:at] = draw(st.sampled_from(awkward))
        elif kind == "drop":
            del sent[at : at + draw(st.integers(1, 5))]
        elif kind == "flip" and at < len(sent):
            sent[at] = draw(st.integers(0, 255))
        elif kind == "cut":
            del sent[at:]
        elif kind == "twice":
            sent += sent[:at]
    return bytes(sent)


# -- properties --------------------------------------------------------------------------------------------------------------


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_a_valid_answer_is_read_as_it_was_sent_however_it_is_cut(data: st.DataObject) -> None:
    sent = data.draw(answers())
    answer, _ = outcome_of(data.draw(pieces_of(sent.raw)))
    assert isinstance(answer, Answer) and answer.body == sent.body


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_a_part_of_an_answer_that_states_its_end_is_no_answer(data: st.DataObject) -> None:
    sent = data.draw(answers().filter(lambda each: each.framing != "end"))
    part = sent.raw[: data.draw(st.integers(0, len(sent.raw) - 1))]
    outcome, kept = outcome_of(data.draw(pieces_of(part)))
    assert isinstance(outcome, type) and not kept


@settings(max_examples=600, deadline=None)
@given(st.data())
def test_a_damaged_answer_has_one_outcome_and_a_parser_of_another_make_reads_no_other_body(data: st.DataObject) -> None:
    sent = data.draw(mutated())
    outcome, _ = outcome_of([sent])
    cut, _ = outcome_of(data.draw(pieces_of(sent)) or [b""])
    if isinstance(outcome, Answer):
        expected = reference(sent)
        assert cut == outcome
        assert expected is None or expected == (outcome.status, outcome.body)
    else:
        assert isinstance(cut, type)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.binary(min_size=1, max_size=60), max_size=8),
    st.sampled_from([b"", b"HTTP/1.1 ", b"HTTP/1.1 200 OK\r\n", NOTHING_SAID]),
)
def test_any_bytes_have_one_outcome(pieces: list[bytes], start: bytes) -> None:
    outcome_of([start, *pieces] if start else pieces)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_what_follows_an_answer_does_not_change_it_and_its_connection_is_not_used_again(data: st.DataObject) -> None:
    sent = data.draw(answers().filter(lambda each: each.framing != "end"))
    more = data.draw(st.binary(min_size=1, max_size=30).filter(lambda each: each.strip(b"\r\n") != b""))
    outcome, kept = outcome_of(data.draw(pieces_of(sent.raw + more)))
    assert isinstance(outcome, Answer) and outcome.body == sent.body and not kept


class _Served:
    """What the peer of the next test says next."""

    pieces: list[bytes]

    async def __call__(self, talk: Talk) -> None:
        await talk.request()
        await talk.say(*self.pieces)


async def _of_aiohttp(session: aiohttp.ClientSession, address: str) -> Answer:
    async with session.post(f"http://{address}/", data=b"{}", allow_redirects=False) as response:
        body = await response.read()
        marked = any(response.headers.getall("x-mark", []))
        content_type = response.headers.get("content-type")
        return Answer(response.status, None if content_type is None else content_type.encode(), marked, body)


async def _of_ours(pool: Pool, address: str) -> Answer | HttpError | None:
    host, _, port = address.rpartition(":")
    reply = Told()
    pool.send(Target(host, int(port)), REQUEST, b"{}", reply)
    while not reply.times:
        await asyncio.sleep(0)
    return reply.answer or reply.error


def _differ(factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    with asyncio.Runner(loop_factory=factory) as runner:
        served = _Served()

        async def both() -> tuple[Answer, Answer | HttpError | None]:
            session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True), auto_decompress=False)
            async with Peer(served) as peer, session:
                theirs = await _of_aiohttp(session, peer.address)
                pool = Pool(Settings(2.0, 4.0), LIMITS, mark=MARK)
                ours = await _of_ours(pool, peer.address)
                await pool.close()
                return theirs, ours

        @settings(max_examples=100, deadline=None)
        @given(st.data())
        def compare(data: st.DataObject) -> None:
            served.pieces = data.draw(pieces_of(data.draw(answers()).raw))
            theirs, ours = runner.run(both())
            assert theirs == ours

        compare()


def test_a_valid_answer_means_to_aiohttp_what_it_means_to_us() -> None:
    _differ(uvloop.new_event_loop)
