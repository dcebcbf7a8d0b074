"""A prefill call: what the worker gets, what its answers mean, and that cancelling it ends it."""

from __future__ import annotations

import asyncio
import gc
from contextlib import suppress
from pathlib import Path

import pytest

from extproc.errors import ApiError, RelayedError
from tests.unit.http1_peer import Peer, Talk, always, client, ok, on_both_loops, once

PATH = "/v1/chat/completions"
ENVOYS = b"x-baton-origin: envoy\r\n"


async def _hang(talk: Talk) -> None:
    await talk.request()
    await talk.until_gone()


async def _never_read(talk: Talk) -> None:
    await talk.reader.readuntil(b"\r\n\r\n")
    await asyncio.Event().wait()


def status(line: str, body: bytes = b"", head: bytes = b"") -> bytes:
    return ok(body, head=head).replace(b"200 OK", line.encode())


@on_both_loops
async def test_what_a_worker_gets_directly() -> None:
    async with Peer(always(ok())) as peer, client() as calls:
        await calls.run(peer.address, PATH, b'{"a":1}', {"x-request-id": "r-1", "authorization": "Bearer s"})
        (request,) = peer.requests
        assert request.body == b'{"a":1}'
        assert request.lines == [
            b"POST /v1/chat/completions HTTP/1.1",
            b"host: " + peer.address.encode(),
            b"accept: */*",
            b"content-type: application/json",
            b"x-request-id: r-1",
            b"authorization: Bearer s",
            b"content-length: 7",
        ]


@pytest.mark.parametrize("unix", [True, False], ids=["unix socket", "tcp"])
@on_both_loops
async def test_what_envoy_gets_names_the_worker_whatever_a_client_sent(tmp_path: Path, unix: bool) -> None:
    path = tmp_path / "envoy.sock" if unix else None
    async with Peer(always(ok()), path=path) as envoy:
        via = f"unix:{path}" if unix else envoy.address
        sent = {"x-gateway-destination-endpoint": "10.9.9.9:1", "X-Gateway-Destination-Endpoint": "10.9.9.9:1"}
        async with client(via=via) as calls:
            for worker in ("10.0.0.1:8000", "[fd00::1]:8000"):
                await calls.run(worker, PATH, b"{}", sent)
        assert len(envoy.talks) == 1
        for worker, request in zip(("10.0.0.1:8000", "[fd00::1]:8000"), envoy.requests, strict=True):
            pins = [line for line in request.lines if line.lower().startswith(b"x-gateway")]
            assert pins == [b"x-gateway-destination-endpoint: " + worker.encode()]
            assert b"host: " + (worker if unix else via).encode() in request.lines


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (status("201 Created"), "prefill_failed"),
        (status("204 No Content").replace(b"content-length: 0\r\n", b""), "prefill_failed"),
        (status("302 Found", head=b"location: /\r\n"), "prefill_failed"),
        (status("429 Busy"), "prefill_failed"),
        (status("500 No"), "prefill_failed"),
        (status("503 No"), "prefill_failed"),
        (status("504 No"), "prefill_failed"),
        (status("999 No"), "prefill_failed"),
        (status("503 No", head=ENVOYS), "prefill_unreachable"),
        (status("404 No", head=ENVOYS), "prefill_unreachable"),
        (status("504 No", head=ENVOYS), "prefill_timeout"),
    ],
)
@on_both_loops
async def test_what_an_answer_means(answer: bytes, expected: str) -> None:
    async with Peer(always(answer)) as peer, client() as calls:
        with pytest.raises(ApiError) as failed:
            await calls.run(peer.address, PATH, b"{}", {})
        assert failed.value.code == expected


@pytest.mark.parametrize(
    ("head", "content_type"),
    [
        (b"content-type: application/problem+json\r\n", "application/problem+json"),
        (b"Content-Type: a\r\ncontent-type: b\r\n", "a"),
        (b"", "application/json"),
        (b"x-baton-origin:\r\ncontent-type: t\r\n", "t"),
    ],
)
@on_both_loops
async def test_what_a_worker_says_of_the_request_is_relayed(head: bytes, content_type: str) -> None:
    async with Peer(always(status("422 No", b"why", head))) as peer, client() as calls:
        with pytest.raises(RelayedError) as refused:
            await calls.run(peer.address, PATH, b"{}", {})
        assert (refused.value.status, refused.value.content_type, refused.value.body) == (422, content_type, b"why")


@on_both_loops
async def test_an_interim_answers_headers_say_nothing_of_the_final_one() -> None:
    answer = b"HTTP/1.1 103 Hints\r\n" + ENVOYS + b"content-type: x/y\r\n\r\n" + status("400 No", b"why")
    async with Peer(always(answer)) as peer, client() as calls:
        with pytest.raises(RelayedError) as refused:
            await calls.run(peer.address, PATH, b"{}", {})
        assert refused.value.content_type == "application/json"


@pytest.mark.parametrize("headers", [{"x-a": "secret\r\nx-b: 1"}, {"a b": "1"}, {"content-length": "1"}, {"x-a": "secret\0"}])
@on_both_loops
async def test_headers_that_cannot_be_sent_are_a_fault_of_ours_and_nothing_is_written(headers: dict[str, str]) -> None:
    async with Peer(always(ok())) as peer, client() as calls:
        with pytest.raises(ApiError) as failed:
            await calls.run(peer.address, PATH, b"{}", headers)
        assert failed.value.code == "internal_error" and "secret" not in failed.value.message
        assert calls.in_flight == 0 and not peer.talks


@pytest.mark.parametrize(("worker", "path"), [("nowhere", PATH), ("10.0.0.1:99999", PATH), ("10.0.0.1:1", "/a b")])
@on_both_loops
async def test_an_address_or_path_that_is_none_is_a_fault_of_ours(worker: str, path: str) -> None:
    async with client() as calls:
        with pytest.raises(ApiError) as failed:
            await calls.run(worker, path, b"{}", {})
        assert failed.value.code == "internal_error" and calls.in_flight == 0


@on_both_loops
async def test_a_fault_in_the_caller_leaves_nothing_counted() -> None:
    async with client() as calls:
        with pytest.raises(TypeError):
            calls.call("10.0.0.1:1", PATH, b"{}", {"x-a": None})  # type: ignore[dict-item]
        assert calls.in_flight == 0


@on_both_loops
async def test_calls_beyond_the_limit_are_refused_and_room_comes_back_however_a_call_ends() -> None:
    async with Peer(_hang, once(b"x"), always(ok())) as peer, client(max_concurrent=1) as calls:
        hanging = calls.call(peer.address, PATH, b"{}", {})
        for _ in range(3):
            with pytest.raises(ApiError) as refused:
                await calls.run(peer.address, PATH, b"{}", {})
            assert refused.value.code == "too_many_requests" and "1 prefill calls" in refused.value.message
        while not peer.requests:
            await asyncio.sleep(0)
        hanging.cancel()
        with pytest.raises(ApiError) as failed:
            await calls.run(peer.address, PATH, b"{}", {})
        assert failed.value.code == "prefill_unreachable"
        assert [await calls.run(peer.address, PATH, b"{}", {}) for _ in range(2)] == [b"{}", b"{}"]
        assert calls.in_flight == 0


@on_both_loops
async def test_cancelling_closes_the_connection_at_once() -> None:
    async with Peer(_hang) as peer, client() as calls:
        call = calls.call(peer.address, PATH, b"{}", {})
        while not peer.requests:
            await asyncio.sleep(0)
        assert call.cancel()
        assert calls.in_flight == 0 and call.cancelled()
        assert not call.cancel()
        await peer.talks[0].ended.wait()
        while calls.pool.open_connections:
            await asyncio.sleep(0)


@on_both_loops
async def test_cancelling_the_task_that_waits_closes_the_connection() -> None:
    async with Peer(_hang) as peer, client() as calls:
        task = asyncio.ensure_future(calls.run(peer.address, PATH, b"{}", {}))
        while not peer.requests:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await peer.talks[0].ended.wait()
        assert calls.in_flight == 0


@on_both_loops
async def test_cancelling_drops_what_is_not_written_yet() -> None:
    async with Peer(_never_read) as peer, client() as calls:
        call = calls.call(peer.address, PATH, b"x" * (64 << 20), {})
        while not peer.talks:
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        call.cancel()
        while calls.pool.open_connections:  # a peer that reads nothing would keep it for ever
            await asyncio.sleep(0)


@pytest.mark.parametrize("unix", [True, False], ids=["unix socket", "tcp"])
@pytest.mark.parametrize("turns", range(8))
@on_both_loops
async def test_cancelling_while_it_connects_leaves_nothing(turns: int, unix: bool, tmp_path: Path) -> None:
    path = tmp_path / "s" if unix else None
    async with Peer(_hang, path=path) as peer, client(via=f"unix:{path}" if unix else peer.address) as calls:
        call = calls.call("10.0.0.1:8000", PATH, b"{}", {})
        for _ in range(turns):
            await asyncio.sleep(0)
        call.cancel()
        assert calls.in_flight == 0
        for _ in range(20):
            await asyncio.sleep(0)
        assert calls.pool.open_connections == 0
        for talk in peer.talks:
            await talk.ended.wait()


@on_both_loops
async def test_cancelling_an_ended_call_does_not_touch_the_next_one_on_its_connection() -> None:
    gate = asyncio.Event()

    async def script(talk: Talk) -> None:
        await talk.request()
        await talk.say(ok(b"1"))
        await talk.request()
        await gate.wait()
        await talk.say(ok(b"2"))
        await talk.until_gone()

    async with Peer(script) as peer, client() as calls:
        first = calls.call(peer.address, PATH, b"{}", {})
        assert await first == b"1"
        second = calls.call(peer.address, PATH, b"{}", {})
        assert not first.cancel()
        gate.set()
        assert await second == b"2"
        assert len(peer.talks) == 1


@on_both_loops
async def test_leaving_the_client_ends_its_calls() -> None:
    async with Peer(_hang) as peer:
        async with client() as calls:
            call = calls.call(peer.address, PATH, b"{}", {})
            while not peer.requests:
                await asyncio.sleep(0)
        with pytest.raises(ApiError) as failed:
            await call
        assert failed.value.code == "prefill_unreachable"
        with pytest.raises(ApiError):
            await calls.run(peer.address, PATH, b"{}", {})
        assert calls.in_flight == 0


@pytest.mark.parametrize(
    "answer", [ok(), ok(head=b"connection: close\r\n"), status("503 No"), status("400 No"), b"garbage", b""]
)
@on_both_loops
async def test_a_call_leaves_nothing_for_the_garbage_collector(answer: bytes) -> None:
    async with Peer(once(answer)) as peer, client() as calls:
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            for _ in range(5):
                with suppress(ApiError, RelayedError):
                    await calls.run(peer.address, PATH, b"{}", {})
            calls.call(peer.address, PATH, b"{}", {}).cancel()
            while calls.pool.open_connections:
                await asyncio.sleep(0)
            gc.collect()
            ours = [type(each).__name__ for each in gc.garbage if type(each).__module__.startswith("extproc")]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
        assert ours == []
