"""Connections: which are used again, which never, and that none is left."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from contextlib import suppress
from pathlib import Path

import pytest

from extproc.errors import ApiError, RelayedError
from extproc.http1.connection import Limits, Target
from extproc.http1.errors import BrokenError, ConnectError
from extproc.http1.pool import Pool, Settings
from tests.unit.http1_peer import Peer, Script, Talk, Told, always, client, idle, ok, on_both_loops, once

PATH = "/v1/completions"
HEAD = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n"


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def target_of(peer: Peer) -> Target:
    host, _, port = peer.address.rpartition(":")
    return Target(host, int(port))


async def told(pool: Pool, target: Target) -> Told:
    reply = Told()
    pool.send(target, HEAD, b"{}", reply)
    while not reply.times:
        await asyncio.sleep(0)
    return reply


async def answered(server: socket.socket, answer: bytes) -> socket.socket:
    """The next connection, on which one request was answered."""
    loop = asyncio.get_running_loop()
    accepted, _ = await loop.sock_accept(server)
    accepted.setblocking(False)
    await loop.sock_recv(accepted, 4096)
    await loop.sock_sendall(accepted, answer)
    return accepted


def pool_of(clock: Clock, *, idle_connections: int = 10, connect_s: float = 2.0) -> Pool:
    settings = Settings(connect_s=connect_s, idle_s=4.0, idle_connections=idle_connections)
    return Pool(settings, Limits(1000), mark=b"x-mark", clock=clock)


@on_both_loops
async def test_one_connection_serves_calls_in_turn_and_the_last_used_is_used_next() -> None:
    gate = asyncio.Event()

    async def slow(talk: Talk) -> None:
        await talk.request()
        await gate.wait()
        await talk.say(ok(b"first"))
        await always(ok(b"first again"))(talk)

    async with Peer(slow, always(ok(b"second"))) as peer, client() as calls:
        first = calls.call(peer.address, PATH, b"", {})
        while not peer.requests:
            await asyncio.sleep(0)
        assert await calls.run(peer.address, PATH, b"", {}) == b"second"
        assert await calls.run(peer.address, PATH, b"", {}) == b"second"
        gate.set()
        assert await first == b"first"
        assert calls.pool.idle_connections == 2
        assert await calls.run(peer.address, PATH, b"", {}) == b"first again"
        assert len(peer.talks) == 2


@on_both_loops
async def test_a_call_on_an_idle_connection_is_written_before_call_returns() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    async with client() as calls:
        loop = asyncio.get_running_loop()
        server.setblocking(False)
        first = calls.call(f"127.0.0.1:{port}", PATH, b"one", {})
        with await answered(server, ok(b"1")) as accepted, server:
            assert await first == b"1"
            second = calls.call(f"127.0.0.1:{port}", PATH, b"two", {})
            assert accepted.recv(4096).endswith(b"two")  # the event loop had no turn in between
            await loop.sock_sendall(accepted, ok(b"2"))
            assert await second == b"2"


@on_both_loops
async def test_who_is_told_of_an_answer_may_use_its_connection_at_once() -> None:
    async with Peer(always(ok())) as peer, client() as calls:
        for _ in range(50):
            await calls.run(peer.address, PATH, b"", {})
        assert len(peer.talks) == 1


@on_both_loops
async def test_an_idle_connection_is_given_up_before_uvicorn_would_close_it() -> None:
    clock = Clock()
    pool = pool_of(clock)
    async with Peer(always(ok())) as peer:
        await told(pool, target_of(peer))
        clock.now_s += 3.9
        await told(pool, target_of(peer))
        assert len(peer.talks) == 1
        clock.now_s += 4.0
        await told(pool, target_of(peer))
        assert len(peer.talks) == 2
        await peer.talks[0].ended.wait()
        await pool.close()


@on_both_loops
async def test_connections_that_nobody_uses_are_closed_by_themselves() -> None:
    settings = Settings(connect_s=2.0, idle_s=0.05)
    pool = Pool(settings, Limits(1000), mark=b"x-mark")
    async with Peer(always(ok())) as peer, Peer(always(ok())) as other:
        replies = [Told() for _ in range(5)]
        for reply in replies:
            pool.send(target_of(peer), HEAD, b"{}", reply)
        await told(pool, target_of(other))
        while not all(reply.times for reply in replies):
            await asyncio.sleep(0)
        assert pool.open_connections == 6
        while pool.open_connections:
            await asyncio.sleep(0.01)
        assert pool.idle_connections == 0
        await pool.close()


@on_both_loops
async def test_no_more_than_the_limit_are_kept() -> None:
    pool = pool_of(Clock(), idle_connections=3)
    async with Peer(always(ok())) as peer:
        replies = [Told() for _ in range(8)]
        for reply in replies:
            pool.send(target_of(peer), HEAD, b"{}", reply)
        while not all(reply.times for reply in replies):
            await asyncio.sleep(0)
        assert pool.idle_connections == 3
        while pool.open_connections > 3:
            await asyncio.sleep(0)
        await pool.close()
        assert pool.open_connections == 0


@pytest.mark.parametrize("last_words", [b"", b"HTTP/1.1 408 Request Timeout\r\n\r\n", b"x"])
@pytest.mark.parametrize("seen", [True, False], ids=["the loop has seen it", "it has not yet"])
@on_both_loops
async def test_a_connection_on_which_anything_was_said_is_not_used(last_words: bytes, seen: bool) -> None:
    server = socket.create_server(("127.0.0.1", 0))
    server.setblocking(False)
    target = f"127.0.0.1:{server.getsockname()[1]}"
    async with client() as calls:
        first = calls.call(target, PATH, b"", {})
        old = await answered(server, ok(b"old"))
        assert await first == b"old"
        old.setblocking(True)
        if last_words:
            old.sendall(last_words)
        else:
            old.shutdown(socket.SHUT_WR)
        if seen:
            assert await idle(calls) == 0
        second = calls.call(target, PATH, b"two", {})
        new = await answered(server, ok(b"new"))
        assert await second == b"new"
        with suppress(ConnectionResetError):  # by which it was closed: there was something unread
            assert old.recv(4096) == b""
        for each in (old, new, server):
            each.close()


@on_both_loops
async def test_a_request_is_written_once_also_where_its_connection_closed_under_it() -> None:
    async def one_answer(talk: Talk) -> None:
        await talk.request()
        await talk.say(ok(b"first"))
        await talk.request()  # taken, and no answer

    async with Peer(one_answer, always(ok(b"never"))) as peer, client() as calls:
        assert await calls.run(peer.address, PATH, b"1", {}) == b"first"
        with pytest.raises(ApiError) as failed:
            await calls.run(peer.address, PATH, b"2", {})
        assert failed.value.code == "prefill_unreachable"
        assert [request.body for request in peer.requests] == [b"1", b"2"]
        assert len(peer.talks) == 1


@on_both_loops
async def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    pool = pool_of(Clock())
    assert isinstance((await told(pool, Target("127.0.0.1", port))).error, ConnectError)
    assert isinstance((await told(pool, Target(path="/nowhere/at.all"))).error, ConnectError)
    assert isinstance((await told(pool, Target("not.a.name.invalid", port))).error, ConnectError)
    assert isinstance((await told(pool, Target("a" * 300, port))).error, ConnectError)
    await pool.close()


@on_both_loops
async def test_a_peer_that_does_not_take_connections_is_waited_for_no_longer_than_allowed() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        address = server.getsockname()
        # Its queue is full now, and Linux leaves further ones without an answer.
        waiting = [socket.socket() for _ in range(4)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(address)
        pool = pool_of(Clock(), connect_s=0.1)
        error = (await told(pool, Target(*address))).error
        assert isinstance(error, ConnectError) and "within 0.1 s" in str(error)
        await pool.close()
        for each in waiting:
            each.close()


@on_both_loops
async def test_a_unix_socket_whose_queue_is_full_is_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen(0)
        server.setblocking(False)
        waiting = socket.socket(socket.AF_UNIX)
        waiting.connect(str(path))
        pool = pool_of(Clock())
        reply = Told()
        pool.send(Target(path=str(path)), HEAD, b"{}", reply)
        await asyncio.sleep(0.05)
        assert reply.times == 0
        (await asyncio.get_running_loop().sock_accept(server))[0].close()
        with await answered(server, ok(b"at last")), waiting:
            while not reply.times:
                await asyncio.sleep(0)
        assert reply.answer is not None and reply.answer.body == b"at last"
        await pool.close()


@on_both_loops
async def test_closing_ends_calls_that_wait_for_a_connection_or_an_answer() -> None:
    async def hang(talk: Talk) -> None:
        await talk.request()
        await talk.until_gone()

    async with Peer(hang) as peer:
        pool = pool_of(Clock())
        answered, connecting = Told(), Told()
        pool.send(target_of(peer), HEAD, b"{}", answered)
        while not peer.requests:
            await asyncio.sleep(0)
        pool.send(target_of(peer), HEAD, b"{}", connecting)
        await pool.close()
        for reply in (answered, connecting):
            assert isinstance(reply.error, BrokenError) and reply.times == 1
        assert pool.open_connections == 0
        with pytest.raises(BrokenError):
            pool.send(target_of(peer), HEAD, b"{}", Told())


# -- nothing is left ---------------------------------------------------------------------------------------------------------


def _open_sockets() -> int:
    found = 0
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the directory's own
            found += str(link.readlink()).startswith("socket:")
    return found


async def _hang(talk: Talk) -> None:
    await talk.request()
    await talk.until_gone()


async def _slam(_: Talk) -> None:
    return


_SCRIPTS: tuple[Script, ...] = (
    always(ok(b"x" * 1000)),
    once(ok(b"abc")[:-1]),
    once(b"garbage", stay=True),
    once(ok() + ok(), stay=True),
    once(ok(head=b"connection: close\r\n")),
    once(b"HTTP/1.1 200 OK\r\n\r\nbody"),
    once(b"HTTP/1.1 503 No\r\ncontent-length: 0\r\n\r\n"),
    once(b"HTTP/1.1 400 No\r\ncontent-length: 0\r\n\r\n"),
    once(b"HTTP/1.1 200 OK\r\ncontent-length: 99999\r\n\r\n" + b"x" * 99_999),
    _hang,
    _slam,
)


@on_both_loops
async def test_after_thousands_of_calls_of_every_outcome_no_socket_is_left_and_none_is_counted() -> None:
    chance = random.Random(7)
    before = _open_sockets()
    outcomes: dict[str, int] = {}

    async def one(address: str) -> None:
        body = b"x" * chance.choice((0, 100, 50_000, 600_000))
        call = calls.call(address, PATH, body, {})
        if chance.random() < 0.2 or address == hanging.address:
            for _ in range(chance.randrange(12)):
                await asyncio.sleep(0)
            call.cancel()
        try:
            await call
            outcome = "ok"
        except (ApiError, RelayedError) as error:
            outcome = str(getattr(error, "code", "relayed"))
        except asyncio.CancelledError:
            outcome = "cancelled"
        outcomes[outcome] = outcomes.get(outcome, 0) + 1

    with socket.create_server(("127.0.0.1", 0)) as gone:
        nobody = f"127.0.0.1:{gone.getsockname()[1]}"
    async with client(max_reply_bytes=50_000, max_concurrent=14) as calls:
        peers = [Peer(script) for script in _SCRIPTS]
        for peer in peers:
            await peer.__aenter__()
        hanging = peers[-2]
        addresses = [nobody, *(peer.address for peer in peers)]
        for _ in range(150):
            await asyncio.gather(*(one(chance.choice(addresses)) for _ in range(16)))
            assert calls.in_flight == 0
        for peer in peers:
            await peer.__aexit__()
    assert sum(outcomes.values()) == 2400
    assert set(outcomes) == {"ok", "relayed", "cancelled", "prefill_unreachable", "prefill_failed", "too_many_requests"}
    assert calls.pool.open_connections == calls.pool.idle_connections == 0
    deadline_s = time.monotonic() + 5
    while _open_sockets() > before and time.monotonic() < deadline_s:
        await asyncio.sleep(0.01)
    assert _open_sockets() == before
