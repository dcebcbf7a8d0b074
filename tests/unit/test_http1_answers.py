"""Answers over real sockets: each way to frame one, each way to break one, and whether the connection may be used again."""

from __future__ import annotations

import asyncio
import socket
import struct

import pytest

from extproc.errors import ApiError, RelayedError
from tests.unit.http1_peer import Peer, Script, Talk, always, client, idle, ok, on_both_loops, once

PATH = "/v1/completions"


async def fetch(peer: Peer, body: bytes = b"{}", **settings: object) -> tuple[bytes | ApiError | RelayedError, int]:
    """The answer to one call, or its error; and how many connections are idle afterwards."""
    async with client(**settings) as calls:
        try:
            outcome: bytes | ApiError | RelayedError = await calls.run(peer.address, PATH, body, {"x-request-id": "a"})
        except (ApiError, RelayedError) as error:
            outcome = error
        return outcome, await idle(calls)


def code_of(outcome: bytes | ApiError | RelayedError) -> str:
    assert isinstance(outcome, ApiError), outcome
    return outcome.code


HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "body", "kept"),
    [
        (ok(b"abc"), b"abc", 1),
        (ok(b""), b"", 1),
        (HEAD + b"Content-Length:3\r\n\r\nabc", b"abc", 1),
        (CHUNKED + b"3\r\nabc\r\n0\r\n\r\n", b"abc", 1),
        (CHUNKED + b"1\r\na\r\n2;ext=1\r\nbc\r\n0\r\n\r\n", b"abc", 1),
        (CHUNKED + b"3\r\nabc\r\n0\r\nx-trailer: 1\r\nx-baton-origin: envoy\r\n\r\n", b"abc", 1),
        (HEAD + b"Transfer-Encoding: Chunked\r\n\r\n0\r\n\r\n", b"", 1),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + ok(b"abc"), b"abc", 1),
        (b"HTTP/1.1 103 Early Hints\r\ncontent-length: 9\r\nlink: x\r\n\r\nHTTP/1.1 102 P\r\n\r\n" + ok(b"abc"), b"abc", 1),
        (b"HTTP/1.1 200\r\ncontent-length: 1\r\n\r\nx", b"x", 1),
        (ok(b"abc", head=b"connection: close\r\n"), b"abc", 0),
        (ok(b"abc").replace(b"1.1", b"1.0"), b"abc", 0),
        (ok(b"abc", head=b"connection: keep-alive\r\n").replace(b"1.1", b"1.0"), b"abc", 0),
        (ok(b"abc") + ok(b"def"), b"abc", 0),
        (ok(b"abc") + b"garbage", b"abc", 0),
        (ok(b"abc", head=b"connection: close\r\n") + b"more", b"abc", 0),
        (ok(b"abc", head=b"connection: upgrade\r\nupgrade: h2c\r\n"), b"abc", 1),
    ],
)
@pytest.mark.parametrize("bytewise", [False, True], ids=["at once", "byte by byte"])
@on_both_loops
async def test_an_answer_is_read_and_its_connection_kept_if_may_be(
    answer: bytes, body: bytes, kept: int, bytewise: bool
) -> None:
    pieces = [answer[at : at + 1] for at in range(len(answer))] if bytewise else [answer]
    async with Peer(once(*pieces, stay=True)) as peer:
        assert await fetch(peer) == (body, kept)


@pytest.mark.parametrize("head", [HEAD + b"\r\n", b"HTTP/1.0 200 OK\r\n\r\n", HEAD + b"connection: keep-alive\r\n\r\n"])
@on_both_loops
async def test_a_body_without_a_length_ends_with_its_connection(head: bytes) -> None:
    async with Peer(once(head, b"abc", b"def")) as peer:
        assert await fetch(peer) == (b"abcdef", 0)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HT",
        b"HTTP/1.1 200 OK\r\ncontent-le",
        ok(b"abc")[:-1],
        CHUNKED + b"3\r\nab",
        CHUNKED + b"3\r\nabc\r\n",
        CHUNKED + b"3\r\nabc\r\n0\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n",
    ],
)
@on_both_loops
async def test_a_connection_that_ends_too_early_gives_no_answer(answer: bytes) -> None:
    async with Peer(once(answer)) as peer:
        outcome, kept = await fetch(peer)
        assert (code_of(outcome), kept) == ("prefill_unreachable", 0)
        assert len(peer.talks) == 1  # and nothing was sent again


@pytest.mark.parametrize(
    "answer",
    [
        b"\x16\x03\x01\x02\x00 this is TLS",
        b"PRI * HTTP/2.0\r\n\r\n",
        b"HTTP/2.0 200 OK\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/0.9 200 OK\r\ncontent-length: 0\r\n\r\n",
        b"RTSP/1.0 200 OK\r\ncontent-length: 0\r\n\r\n",
        b"\r\n" + ok(),
        b"HTTP/1.1 OK\r\n\r\n",
        b"HTTP/1.1 99 Low\r\ncontent-length: 0\r\n\r\n",
        HEAD + b"content-length: 1\r\ncontent-length: 2\r\n\r\nab",
        HEAD + b"content-length: 1, 2\r\n\r\nab",
        HEAD + b"content-length: -1\r\n\r\nab",
        HEAD + b"content-length: 99999999999999999999999\r\n\r\nab",
        HEAD + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n",
        HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n",
        HEAD + b"transfer-encoding: chunked, gzip\r\n\r\n2\r\nab\r\n0\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n",
        HEAD + b"bad header: 1\r\n\r\n",
        HEAD + b"a: b\r\n folded\r\ncontent-length: 0\r\n\r\n",
        CHUNKED + b"zz\r\nab\r\n0\r\n\r\n",
        CHUNKED + b"1\r\nabc\r\n0\r\n\r\n",
        CHUNKED + b"fffffffffffffffff\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n" + ok(),
    ],
)
@on_both_loops
async def test_what_is_no_answer_ends_the_call_at_once(answer: bytes) -> None:
    # The peer stays: were it not for the client, nobody would end it.
    async with Peer(once(answer, stay=True)) as peer:
        outcome, kept = await fetch(peer)
        assert (code_of(outcome), kept) == ("prefill_unreachable", 0)
        await peer.talks[0].ended.wait()


async def drip(talk: Talk, line: bytes) -> None:
    while not talk.writer.is_closing():
        await talk.say(line)


def endless(start: bytes, line: bytes) -> Script:
    async def script(talk: Talk) -> None:
        await talk.request()
        await talk.say(start)
        await drip(talk, line)

    return script


@pytest.mark.parametrize(
    ("start", "line"),
    [
        (HEAD, b"x" * 1000),
        (HEAD + b"a: ", b"x" * 1000),
        (HEAD, b"a: b\r\n"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (b"", b"HTTP/1.1 103 Hints\r\nlink: x\r\n\r\n"),
        (b"HTTP/1.1 200 ", b"x" * 1000),
        (CHUNKED + b"1\r\na\r\n0\r\n", b"a: b\r\n"),
        (CHUNKED + b"1\r\na\r\n0\r\na: ", b"x" * 1000),
        (CHUNKED + b"1;", b"x" * 1000),
        (CHUNKED + b"1\r\na\r\n", b"0" * 1000),
    ],
)
@on_both_loops
async def test_headers_without_end_are_cut_off(start: bytes, line: bytes) -> None:
    async with Peer(endless(start, line)) as peer:
        outcome, kept = await fetch(peer)
        assert (code_of(outcome), kept) == ("prefill_unreachable", 0)


@pytest.mark.parametrize(("start", "line"), [(CHUNKED, b"40\r\n" + b"x" * 64 + b"\r\n"), (HEAD + b"\r\n", b"x" * 64)])
@on_both_loops
async def test_a_body_without_end_is_cut_off(start: bytes, line: bytes) -> None:
    async with Peer(endless(start, line)) as peer:
        outcome, kept = await fetch(peer, max_reply_bytes=10_000)
        assert (code_of(outcome), kept) == ("prefill_failed", 0)
        assert "over 10000 bytes" in str(outcome)


@pytest.mark.parametrize(("size", "fits"), [(10_000, True), (10_001, False)])
@on_both_loops
async def test_a_body_may_be_as_large_as_the_limit_and_no_larger(size: int, fits: bool) -> None:
    async with Peer(once(ok(b"x" * size), stay=True)) as peer:
        outcome, kept = await fetch(peer, max_reply_bytes=10_000)
        assert outcome == b"x" * size if fits else code_of(outcome) == "prefill_failed"
        assert kept == fits


@pytest.mark.parametrize(("fields", "fits"), [(127, True), (128, False)])
@on_both_loops
async def test_the_number_of_headers_is_limited(fields: int, fits: bool) -> None:
    async with Peer(once(ok(b"abc", head=b"a: b\r\n" * fields), stay=True)) as peer:
        outcome, _ = await fetch(peer)
        assert outcome == b"abc" if fits else code_of(outcome) == "prefill_unreachable"


@pytest.mark.parametrize(("size", "fits"), [(30_000, True), (33_000, False), (200_000, False)])
@on_both_loops
async def test_the_size_of_the_headers_is_limited(size: int, fits: bool) -> None:
    async with Peer(once(ok(b"x" * 300_000, head=b"a: %s\r\n" % (b"b" * size)), stay=True)) as peer:
        outcome, _ = await fetch(peer)
        assert outcome == b"x" * 300_000 if fits else code_of(outcome) == "prefill_unreachable"


@on_both_loops
async def test_a_large_body_of_many_small_chunks_is_within_the_limits() -> None:
    async with Peer(once(CHUNKED, b"1\r\nx\r\n" * 100_000, b"0\r\n\r\n", stay=True)) as peer:
        assert await fetch(peer) == (b"x" * 100_000, 1)


# -- requests ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 32 << 10, (32 << 10) + 1, 256 << 10, (256 << 10) + 1, 5_000_000])
@on_both_loops
async def test_a_body_of_any_size_arrives_as_it_is(size: int) -> None:
    body = bytes(range(256)) * (size // 256 + 1)
    async with Peer(always(ok(b"done"))) as peer:
        assert await fetch(peer, body[:size]) == (b"done", 1)
        assert [request.body for request in peer.requests] == [body[:size]]


@on_both_loops
async def test_a_large_body_to_a_slow_reader_does_not_hold_up_the_event_loop() -> None:
    body = b"x" * (64 << 20)
    turns = 0

    async def slow(talk: Talk) -> None:
        await talk.request()
        await talk.say(ok(b"%d" % turns))

    async with Peer(slow) as peer, client() as calls:
        call = calls.call(peer.address, PATH, body, {})
        while not call.done():
            turns += 1
            await asyncio.sleep(0)
        # At most four pieces of 256 KiB a turn, so others had their turn 64 times at least.
        assert int(await call) >= 64


@pytest.mark.parametrize("size", [10, 100_000, 30 << 20])
@on_both_loops
async def test_an_answer_before_the_request_was_read_is_taken_and_the_connection_given_up(size: int) -> None:
    async def early(talk: Talk) -> None:
        await talk.reader.readuntil(b"\r\n\r\n")
        await talk.say(ok(b"too large").replace(b"200 OK", b"413 No"))
        await asyncio.Event().wait()

    async with Peer(early) as peer:
        outcome, kept = await fetch(peer, b"x" * size)
        assert isinstance(outcome, RelayedError) and (outcome.status, outcome.body) == (413, b"too large")
        assert kept == (size < 1 << 20)  # a small one was written, whether it was read or not


@on_both_loops
async def test_a_reset_is_an_error() -> None:
    async def reset(talk: Talk) -> None:
        await talk.request()
        talk.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        talk.writer.transport.abort()

    async with Peer(reset) as peer:
        assert code_of((await fetch(peer))[0]) == "prefill_unreachable"


@on_both_loops
async def test_a_peer_that_closes_while_the_body_is_written_is_an_error() -> None:
    async def close(talk: Talk) -> None:
        await talk.reader.readexactly(10_000)

    async with Peer(close) as peer:
        assert code_of((await fetch(peer, b"x" * (30 << 20)))[0]) == "prefill_unreachable"
