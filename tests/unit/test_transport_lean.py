"""The lean server on real sockets: what a handler sees of its call, and what a peer sees of the server."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from extproc.transport import lean_server, link
from extproc.transport.call import CallGoneError
from extproc.transport.http2 import errors, frames
from extproc.transport.http2.stream import Stream
from extproc.transport.lean_call import LeanCall
from extproc.transport.lean_server import LeanServer
from extproc.transport.ports import bind
from tests.unit.transport_client import PATH, Client, framed
from tests.unit.transport_peer import data

Scenario = Callable[[], Coroutine[Any, Any, None]]
Runner = Callable[[Scenario], None]


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Runner:
    """Both loops: they differ in when a write goes out, and in what a closed transport does."""

    async def bounded(scenario: Scenario) -> None:
        async with asyncio.timeout(30):
            await scenario()

    return lambda scenario: request.param(bounded(scenario))


class Served:
    """A server with one method, and what it has reported."""

    def __init__(self, handler: Callable[[LeanCall], Coroutine[Any, Any, None]], path: Path, **options: Any) -> None:
        self.faults: list[tuple[str, BaseException | None]] = []
        self.calls: list[LeanCall] = []
        self.path = path / "s.sock"

        async def noted(call: LeanCall) -> None:
            self.calls.append(call)
            await handler(call)

        settings: dict[str, Any] = {"max_message_bytes": 1 << 20, "max_streams": 100, **options}
        self.server = LeanServer(on_fault=lambda *fault: self.faults.append(fault), **settings)
        self.server.serve(PATH, noted)  # type: ignore[arg-type]
        self.server.add_insecure_port(f"unix:{self.path}")

    @property
    def idle(self) -> bool:
        """No handler runs."""
        return not self.server._running


@asynccontextmanager
async def serving(handler: Any, path: Path, **options: Any) -> AsyncIterator[tuple[Served, Client]]:
    served = Served(handler, path, **options)
    await served.server.start()
    client = await Client.connect(served.path)
    try:
        yield served, client
    finally:
        await client.close()
        await served.server.stop(None)
        assert served.idle, "a handler is left"
        assert not served.path.exists(), "the socket's file is left"


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not true():
            await asyncio.sleep(0.001)


async def echo(call: LeanCall) -> None:
    while (message := await call.receive()) is not None:
        await call.send(message)


# -- what a handler sees ------------------------------------------------------------------------------------------------------


def test_messages_come_and_go_in_order_and_the_end_of_the_handler_is_ok(run: Runner, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(echo, tmp_path) as (served, client):
            stream = client.call(b"a", b"", b"c" * 9_000, end=True)
            messages, fields = await client.answer(stream)
            assert messages == [b"a", b"", b"c" * 9_000]
            assert fields == {":status": "200", "content-type": "application/grpc", "grpc-status": "0"}
            assert not served.faults

    run(scenario)


def test_a_handler_that_sends_nothing_ends_with_trailers_only(run: Runner, tmp_path: Path) -> None:
    async def silent(call: LeanCall) -> None:
        assert await call.receive() is None

    async def scenario() -> None:
        async with serving(silent, tmp_path) as (_, client):
            client.call(end=True)
            sent = await client.frame()
            assert sent.flags & frames.END_STREAM
            assert client.fields(sent)["grpc-status"] == "0"

    run(scenario)


def test_a_handler_that_raises_is_internal_and_tells_the_peer_nothing(run: Runner, tmp_path: Path) -> None:
    async def failing(call: LeanCall) -> None:
        await call.receive()
        raise ValueError("the secret")

    async def scenario() -> None:
        async with serving(failing, tmp_path) as (served, client):
            _, fields = await client.answer(client.call(b"x"))
            assert fields["grpc-status"] == "13"
            assert "secret" not in str(fields)
            ((what, error),) = served.faults
            assert what == f"{PATH} failed" and isinstance(error, ValueError)

    run(scenario)


def test_receive_does_not_wait_for_what_is_there(run: Runner, tmp_path: Path) -> None:
    seen: list[Any] = []

    async def reading(call: LeanCall) -> None:
        await call.stirred()
        while True:
            seen.append(call.pending())
            reads = call.receive()
            try:
                reads.send(None)
            except StopIteration as got:
                seen.append(got.value)
                if got.value is None:
                    return
            else:
                reads.close()
                seen.append("waits")
                await call.stirred()

    async def scenario() -> None:
        async with serving(reading, tmp_path) as (_, client):
            stream = client.call(b"1", b"2")
            await until(lambda: "waits" in seen)
            client.message(stream, b"3", end=True)
            await client.answer(stream)
            assert seen == [True, b"1", True, b"2", False, "waits", True, b"3", True, None]

    run(scenario)


def test_stirred_takes_nothing_and_may_be_given_up(run: Runner, tmp_path: Path) -> None:
    gate = asyncio.Event()
    found: dict[str, Any] = {}

    async def watching(call: LeanCall) -> None:
        first = call.stirred()
        found["same"] = call.stirred() is first
        first.cancel()  # as asyncio does for a task that is cancelled while it waits
        second = call.stirred()
        gate.set()
        await asyncio.wait((second,))
        found["again"] = call.stirred().done()
        found["message"] = await call.receive()
        third = call.stirred()
        found["new"] = not third.done()
        await third
        found["end"] = await call.receive()

    async def scenario() -> None:
        async with serving(watching, tmp_path) as (_, client):
            stream = client.call()
            await gate.wait()
            client.message(stream, b"m")
            await until(lambda: "new" in found)
            client.send(data(stream, end=True))
            await client.answer(stream)
            assert found == {"same": True, "again": True, "message": b"m", "new": True, "end": None}

    run(scenario)


def test_a_reader_that_is_cancelled_loses_nothing(run: Runner, tmp_path: Path) -> None:
    got: list[bytes | None] = []
    waiting = asyncio.Event()

    async def impatient(call: LeanCall) -> None:
        read = asyncio.ensure_future(call.receive())
        await asyncio.sleep(0)
        read.cancel()
        await asyncio.wait((read,))
        waiting.set()
        got.append(await call.receive())

    async def scenario() -> None:
        async with serving(impatient, tmp_path) as (_, client):
            stream = client.call()
            await waiting.wait()
            client.message(stream, b"m")
            await client.answer(stream)
            assert got == [b"m"]

    run(scenario)


@pytest.mark.parametrize("how", ["reset", "connection"])
def test_a_peer_that_leaves_does_not_cancel_the_handler(run: Runner, tmp_path: Path, how: str) -> None:
    seen: list[Any] = []
    came = asyncio.Event()

    async def watching(call: LeanCall) -> None:
        came.set()
        await call.stirred()
        seen.append(await call.receive())
        try:
            await call.send(b"too late")
        except CallGoneError:
            seen.append("gone")
        await call.abort(5, "not even this")
        await asyncio.sleep(0.01)
        seen.append("finished")

    async def scenario() -> None:
        async with serving(watching, tmp_path) as (served, client):
            stream = client.call()
            await came.wait()
            if how == "reset":
                client.reset(stream)
            else:
                await client.close()
            await until(lambda: served.idle)
            assert seen == [None, "gone", "finished"]
            assert not served.faults

    run(scenario)


def test_messages_before_a_reset_are_dropped(run: Runner, tmp_path: Path) -> None:
    gate, seen = asyncio.Event(), []

    async def late(call: LeanCall) -> None:
        await gate.wait()
        seen.append(await call.receive())

    async def scenario() -> None:
        async with serving(late, tmp_path) as (served, client):
            client.reset(client.call(b"a", b"b"))
            await until(lambda: bool(served.calls) and served.calls[0].over)
            gate.set()
            await until(lambda: served.idle)
            assert seen == [None]

    run(scenario)


def test_abort_gives_a_status_and_ends_both_sides(run: Runner, tmp_path: Path) -> None:
    seen: list[Any] = []

    async def aborting(call: LeanCall) -> None:
        await call.receive()
        await call.send(b"first")
        await call.abort(9, "naïve 100 %\n")
        seen.append(await call.receive())
        with pytest.raises(CallGoneError):
            await call.send(b"second")

    async def scenario() -> None:
        async with serving(aborting, tmp_path) as (served, client):
            messages, fields = await client.answer(client.call(b"x", b"y"))
            assert messages == [b"first"]
            assert (fields["grpc-status"], fields["grpc-message"]) == ("9", "na%C3%AFve 100 %25%0A")
            stop = await client.frame()
            assert (stop.kind, stop.code) == (frames.RST_STREAM, errors.NO_ERROR)
            await until(lambda: served.idle)
            assert seen == [None] and not served.faults

    run(scenario)


def test_headers_of_the_call(run: Runner, tmp_path: Path) -> None:
    seen: list[Any] = []

    async def looking(call: LeanCall) -> None:
        seen.extend((call.header("traceparent"), call.header("x"), call.header("nothing"), call.peer))

    async def scenario() -> None:
        async with serving(looking, tmp_path) as (_, client):
            await client.answer(client.call(end=True, more=((b"traceparent", b"00-1"), (b"x", b"1"), (b"x", b"2"))))
            assert seen == ["00-1", "1,2", None, "unix:"]

    run(scenario)


def test_a_deadline_ends_the_call_and_not_the_handler(run: Runner, tmp_path: Path) -> None:
    seen: list[Any] = []

    async def waiting(call: LeanCall) -> None:
        seen.append(await call.receive())

    async def scenario() -> None:
        async with serving(waiting, tmp_path) as (served, client):
            _, fields = await client.answer(client.call(more=((b"grpc-timeout", b"20m"),)))
            assert fields["grpc-status"] == "4"
            await until(lambda: served.idle)
            assert seen == [None]

    run(scenario)


REFUSED = {
    "compressed": ([framed(b"x", flag=1)], "12"),
    "too large": ([b"\0\0\x20\0\0"], "8"),
    "cut off": ([framed(b"xyz")[:6]], "13"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_messages_that_cannot_be_taken(run: Runner, tmp_path: Path, case: str) -> None:
    texts, code = REFUSED[case]
    seen: list[Any] = []

    async def reading(call: LeanCall) -> None:
        seen.append(await call.receive())

    async def scenario() -> None:
        async with serving(reading, tmp_path) as (served, client):
            stream = client.call()
            for text in texts:
                client.send(data(stream, text, end=case == "cut off"))
            _, fields = await client.answer(stream)
            assert fields["grpc-status"] == code
            await until(lambda: served.idle)
            assert seen == [None]

    run(scenario)


NO_HANDLER = {
    "another method": ({"path": "/x.Y/Other"}, {":status": "200", "grpc-status": "12"}),
    "a timeout that is none": ({"more": ((b"grpc-timeout", b"soon"),)}, {":status": "200", "grpc-status": "13"}),
}


@pytest.mark.parametrize("case", NO_HANDLER)
@pytest.mark.parametrize("end", [False, True])
def test_calls_that_nobody_serves(run: Runner, tmp_path: Path, case: str, end: bool) -> None:
    options, expected = NO_HANDLER[case]

    async def scenario() -> None:
        async with serving(echo, tmp_path) as (served, client):
            _, fields = await client.answer(client.call(end=end, **options))
            assert fields.items() >= expected.items()
            assert not served.calls
            link_ = next(iter(served.server._links))
            assert not link_.connection.streams

    run(scenario)


@pytest.mark.parametrize(("method", "kind", "status"), [("GET", "application/grpc", "405"), ("POST", "text/plain", "415")])
def test_what_is_not_grpc_is_told_so_in_http(run: Runner, tmp_path: Path, method: str, kind: str, status: str) -> None:
    from extproc.transport.http2.hpack import encode

    async def scenario() -> None:
        async with serving(echo, tmp_path) as (_, client):
            fields = encode(
                ((b":method", method.encode()), (b":scheme", b"http"), (b":path", b"/x.Y/Z"), (b"content-type", kind.encode()))
            )
            client.send(frames.frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, 1, fields))
            assert client.fields(await client.frame()) == {":status": status}

    run(scenario)


# -- flow and limits ----------------------------------------------------------------------------------------------------------


def test_a_peer_that_does_not_read_makes_send_wait_and_others_go_on(run: Runner, tmp_path: Path) -> None:
    sent: list[int] = []

    async def talking(call: LeanCall) -> None:
        if await call.receive() == b"echo":
            await call.send(b"echo")
            return
        for number in range(1000):
            await call.send(b"x" * 1_000)
            sent.append(number)

    async def scenario() -> None:
        async with serving(talking, tmp_path) as (_served, client):
            client.send(frames.settings({frames.INITIAL_WINDOW_SIZE: 5_000}))
            slow = client.call(b"talk")
            received = 0
            while received < 5_000:
                sent_frame = await client.frame()
                received += len(sent_frame.payload) if sent_frame.kind == frames.DATA else 0
            other = client.call(b"echo", end=True)
            messages, _ = await client.answer(other)
            assert messages == [b"echo"]
            assert len(sent) <= 5, "send returned though the peer takes nothing"
            client.send(frames.window_update(slow, 1 << 24))
            messages, fields = await client.answer(slow)
            assert len(sent) == 1000 and fields["grpc-status"] == "0"

    run(scenario)


def test_a_send_that_waits_ends_when_the_peer_leaves(run: Runner, tmp_path: Path) -> None:
    seen: list[str] = []

    async def talking(call: LeanCall) -> None:
        try:
            await call.send(b"x" * 100_000)
        except CallGoneError:
            seen.append("gone")

    async def scenario() -> None:
        async with serving(talking, tmp_path) as (served, client):
            client.send(frames.settings({frames.INITIAL_WINDOW_SIZE: 10}))
            stream = client.call()
            while (await client.frame()).kind != frames.DATA:
                pass
            client.reset(stream)
            await until(lambda: served.idle)
            assert seen == ["gone"]

    run(scenario)


def test_a_socket_that_nobody_reads_bounds_what_is_written(run: Runner, tmp_path: Path) -> None:
    sent = [0]

    async def talking(call: LeanCall) -> None:
        while True:
            await call.send(b"x" * 100_000)
            sent[0] += 100_000

    async def scenario() -> None:
        async with serving(talking, tmp_path) as (served, client):
            client.send(frames.settings({frames.INITIAL_WINDOW_SIZE: 1 << 30}) + frames.window_update(0, 1 << 30))
            client.call()
            transport = client.writer.transport
            transport.pause_reading()  # type: ignore[attr-defined]
            await until(lambda: bool(served.calls))
            before = -1
            while before != sent[0]:
                before = sent[0]
                await asyncio.sleep(0.05)
            assert 0 < sent[0] < 5_000_000
            transport.resume_reading()  # type: ignore[attr-defined]
            for _ in range(2_000):
                await client.frame()
            await until(lambda: sent[0] > 10_000_000)

    run(scenario)


def test_a_peer_that_takes_nothing_for_too_long_is_cut_off(
    run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "STALL_TIMEOUT_S", 0.05)

    async def talking(call: LeanCall) -> None:
        while True:
            await call.send(b"x" * 1_000_000)

    async def scenario() -> None:
        async with serving(talking, tmp_path) as (served, client):
            client.send(frames.settings({frames.INITIAL_WINDOW_SIZE: 1 << 30}) + frames.window_update(0, 1 << 30))
            client.call()
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            await until(lambda: bool(served.calls) and served.idle)
            assert [what for what, _ in served.faults] == ["unix: took nothing for 0.05 s"]

    run(scenario)


def test_a_peer_that_says_nothing_is_cut_off(run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "GREETING_TIMEOUT_S", 0.02)

    async def scenario() -> None:
        async with serving(echo, tmp_path) as (served, client):
            silent = Client(*await asyncio.open_unix_connection(str(served.path)))
            assert await silent.ended() == []
            await silent.close()
            messages, _ = await client.answer(client.call(b"hello", end=True))
            assert messages == [b"hello"], "one that has greeted may be silent as long as it likes"

    run(scenario)


def test_handlers_that_outlive_their_calls_are_bounded(run: Runner, tmp_path: Path) -> None:
    gate = asyncio.Event()

    async def stubborn(_call: LeanCall) -> None:
        await gate.wait()

    async def scenario() -> None:
        async with serving(stubborn, tmp_path, max_streams=3) as (served, client):
            for _ in range(6):
                client.reset(client.call())
            client.call()
            refused = await client.frame()
            assert (refused.stream, refused.code) == (13, errors.REFUSED_STREAM)
            assert len(served.calls) == 6
            gate.set()
            await until(lambda: served.idle)
            client.call(end=True)
            assert client.fields(await client.frame())["grpc-status"] == "0"

    run(scenario)


def test_too_many_connections_are_closed(run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lean_server, "MAX_CONNECTIONS", 2)

    async def scenario() -> None:
        async with serving(echo, tmp_path) as (served, _client):
            second, third = [await Client.connect(served.path) for _ in range(2)]
            await third.ended()
            messages, _ = await second.answer(second.call(b"m", end=True))
            assert messages == [b"m"]
            for each in (second, third):
                await each.close()

    run(scenario)


def test_a_peer_that_breaks_the_protocol_is_reported_and_cut_and_others_go_on(run: Runner, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(echo, tmp_path) as (served, client):
            bad = await Client.connect(served.path)
            bad.call()
            bad.send(data(0, b"x"))
            *_, goaway = await bad.ended()
            assert (goaway.kind, goaway.code) == (frames.GOAWAY, errors.PROTOCOL_ERROR)
            assert [what for what, _ in served.faults] == ["unix: broke HTTP/2: DATA on stream 0"]
            await bad.close()
            messages, _ = await client.answer(client.call(b"m", end=True))
            assert messages == [b"m"]
            await until(lambda: served.idle)

    run(scenario)


# -- stop ---------------------------------------------------------------------------------------------------------------------


def test_stop_lets_calls_finish_and_takes_no_new_ones(run: Runner, tmp_path: Path) -> None:
    async def scenario() -> None:
        served = Served(echo, tmp_path)
        await served.server.start()
        client = await Client.connect(served.path)
        stream = client.call(b"before")
        await until(lambda: bool(served.calls))
        stop = asyncio.create_task(served.server.stop(20))
        await asyncio.sleep(0.01)
        with pytest.raises((FileNotFoundError, ConnectionRefusedError)):
            await asyncio.open_unix_connection(str(served.path))
        client.message(stream, b"after", end=True)
        seen = []
        for sent in await client.ended():
            seen.append((sent.kind, sent.payload[5:] if sent.kind == frames.DATA else b""))
        assert [payload for kind, payload in seen if kind == frames.DATA] == [b"before", b"after"]
        assert [kind for kind, _ in seen].count(frames.GOAWAY) == 2
        await stop
        await client.close()

    run(scenario)


def test_stop_cuts_what_does_not_finish_and_a_second_stop_cuts_at_once(run: Runner, tmp_path: Path) -> None:
    cancelled = []

    async def stubborn(call: LeanCall) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(call.over)
            raise

    async def scenario() -> None:
        served = Served(stubborn, tmp_path)
        await served.server.start()
        client = await Client.connect(served.path)
        client.call()
        await until(lambda: bool(served.calls))
        patient = asyncio.create_task(served.server.stop(1_000))
        await asyncio.sleep(0.01)
        assert not cancelled and not patient.done()
        await served.server.stop(None)
        await patient
        assert cancelled == [False]
        statuses = [client.fields(sent).get("grpc-status") for sent in await client.ended() if sent.kind == frames.HEADERS]
        assert statuses == ["14"]
        await client.close()

    run(scenario)


def test_stop_waits_for_a_handler_whose_peer_is_gone(run: Runner, tmp_path: Path) -> None:
    gate, finished = asyncio.Event(), []

    async def slow(_call: LeanCall) -> None:
        await gate.wait()
        finished.append(True)

    async def scenario() -> None:
        served = Served(slow, tmp_path)
        await served.server.start()
        client = await Client.connect(served.path)
        client.call()
        await until(lambda: bool(served.calls))
        await client.close()
        stop = asyncio.create_task(served.server.stop(1_000))
        await asyncio.sleep(0.02)
        assert not stop.done()
        gate.set()
        await stop
        assert finished == [True]

    run(scenario)


def test_stop_of_an_idle_server_is_quick_even_with_peers_that_do_not_answer(run: Runner, tmp_path: Path) -> None:
    async def scenario() -> None:
        served = Served(echo, tmp_path)
        await served.server.start()
        greeted, silent = await Client.connect(served.path), Client(*await asyncio.open_unix_connection(str(served.path)))
        await until(lambda: len(served.server._links) == 2)
        await served.server.stop(1_000)
        await served.server.stop(None)
        for each in (greeted, silent):
            await each.close()

    run(scenario)


def test_stop_before_start(run: Runner, tmp_path: Path) -> None:
    async def scenario() -> None:
        served = Served(echo, tmp_path)
        await served.server.stop(None)
        assert not served.path.exists()

    run(scenario)


# -- ports --------------------------------------------------------------------------------------------------------------------


def test_a_unix_socket_in_use_is_an_error_and_a_stale_one_is_replaced(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/a.sock"
    first = bind(address)
    with pytest.raises(RuntimeError, match="somebody listens there"):
        bind(address)
    first.socket.close()  # as a process that was killed
    second = bind(address)
    first.remove_file()
    assert (tmp_path / "a.sock").exists(), "another process's file is not ours to remove"
    second.socket.close()
    second.remove_file()
    assert not (tmp_path / "a.sock").exists()


def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "a.sock").write_text("precious")
    with pytest.raises(RuntimeError):
        bind(f"unix:{tmp_path}/a.sock")
    assert (tmp_path / "a.sock").read_text() == "precious"


@pytest.mark.parametrize("address", ["127.0.0.1:0", "localhost:0", "[::1]:0"])
def test_a_tcp_port_in_use_is_an_error(address: str) -> None:
    first = bind(address)
    with pytest.raises(RuntimeError, match="cannot listen at"):
        bind(address.replace(":0", f":{first.number}"))
    first.socket.close()


@pytest.mark.parametrize("address", ["unix:", "8080", "127.0.0.1:http", "127.0.0.1:70000", "unix:/" + "x" * 200, ":"])
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(RuntimeError, match="cannot listen at"):
        bind(address)


def test_calls_over_tcp(run: Runner, tmp_path: Path) -> None:
    async def scenario() -> None:
        server = LeanServer(max_message_bytes=100, max_streams=10)
        server.serve(PATH, echo)  # type: ignore[arg-type]
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        client = Client(*await asyncio.open_connection("127.0.0.1", port))
        client.send(frames.PREFACE + frames.settings({}))
        messages, _ = await client.answer(client.call(b"m", end=True))
        assert messages == [b"m"]
        nodelay = (
            next(iter(server._links))._transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        )
        assert nodelay, "small frames would wait for an acknowledgement"
        await client.close()
        await server.stop(None)

    run(scenario)


def test_nothing_is_registered_after_the_start(run: Runner, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(echo, tmp_path) as (served, _):
            with pytest.raises(RuntimeError):
                served.server.serve("/a/b", echo)  # type: ignore[arg-type]
            with pytest.raises(RuntimeError):
                served.server.add_insecure_port("127.0.0.1:0")

    run(scenario)


def test_what_a_call_leaves_behind_needs_no_garbage_collector(run: Runner, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(echo, tmp_path) as (served, client):
            gc.collect()
            gc.disable()
            try:
                for _ in range(20):
                    await client.answer(client.call(b"a", end=True))
                    client.reset(client.call(b"b", more=((b"grpc-timeout", b"1H"),)))
                await until(lambda: len(served.calls) == 40 and served.idle)
                served.calls.clear()
                await until(lambda: not any(type(each) in (LeanCall, Stream) for each in gc.get_objects()))
            finally:
                gc.enable()

    run(scenario)
