"""What is too much is refused, in words and at once, and costs nobody else anything."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import aiohttp
import h2.config
import h2.connection
import h2.events
import h2.settings
import pytest
import pytest_asyncio
from aiohttp import web

from extproc import envoy_config
from extproc.admin_site import AdminSite
from extproc.config import Address
from tests.stack.harness import BODY_MODE, Stack
from tests.stack.raw_http import http1
from workers.ready import free_ports

PATH = "/v1/completions"
BODY = json.dumps({"model": "m", "prompt": "a prompt that is long enough", "max_tokens": 3}).encode()


def request(fields: list[tuple[str, str]], path: str = PATH, body: bytes = BODY) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: x", "content-type: application/json", "connection: close"]
    lines += [f"{name}: {value}" for name, value in fields]
    return "\r\n".join([*lines, f"content-length: {len(body)}"]).encode() + b"\r\n\r\n" + body


def port_of(stack: Stack) -> int:
    return int(stack.base.rpartition(":")[2])


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ([("x-long", "y" * 70_000)], PATH),
        ([("x-many", "y" * 900)] * 70, PATH),
        ([(f"x-{number}", "1") for number in range(150)], PATH),
        ([], f"{PATH}?{'q' * 70_000}"),
    ],
)
async def test_headers_are_bounded_by_envoy(stack: Stack, fields: list[tuple[str, str]], path: str) -> None:
    """60 KiB and 100 of them, the path included: 431, before anybody else sees them.

    Where answers pass the filter (full duplex), Envoy 1.40 closes the connection before this one is back from there.
    """
    answer = await http1(port_of(stack), request(fields, path))
    assert answer.startswith(b"HTTP/1.1 431 ") if BODY_MODE == "buffered" else answer == b""
    assert not [record for worker in (*stack.prefill, *stack.decode) for record in worker.received]


async def test_headers_that_do_not_come_to_an_end_are_given_up_by_envoy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that says a header now and then, and a request that stops in the middle of one."""
    monkeypatch.setattr(envoy_config, "_HEADERS_TIMEOUT", timedelta(seconds=1))
    async with Stack(decode=1) as stack:
        for begun in (b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n", b"GET /v1/models HTTP/1.1\r\nhos"):
            answer = await http1(port_of(stack), begun)
            assert answer.startswith(b"HTTP/1.1 408 ") and b'"code":"timeout"' in answer.replace(b": ", b":"), answer
        assert (await http1(port_of(stack), request([])))[9:12] == b"200"


async def test_streams_of_one_http2_connection_are_bounded(stack: Stack) -> None:
    """What Envoy announces."""
    connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    connection.initiate_connection()
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(stack))
    writer.write(connection.data_to_send())
    async with asyncio.timeout(10):
        events: list[Any] = []
        while not any(isinstance(event, h2.events.RemoteSettingsChanged) for event in events):
            events += connection.receive_data(await reader.read(65536))
    writer.close()
    assert connection.remote_settings.max_concurrent_streams <= 1024
    assert connection.remote_settings.initial_window_size <= 1 << 20


async def test_lines_of_the_log_are_short_whatever_a_client_sends(stack: Stack) -> None:
    """A long path, a long id, a long method, a long model: each is cut in the filter's line and in Envoy's."""
    before = len(stack.filter.log.read_text()), len(stack.envoy.log.read_text())
    long = "z" * 8_000
    body = json.dumps({"model": long, "prompt": long, "user": long}).encode()
    sent = request([("x-request-id", long), ("user-agent", long), ("x-tenant", long)], f"/v1/{long}", body)
    await http1(port_of(stack), sent)
    await http1(port_of(stack), request([("x-request-id", long)], PATH, body))
    async with asyncio.timeout(10):
        while stack.filter.log.read_text()[before[0] :].count('"request"') < 2:
            await asyncio.sleep(0.05)
        while stack.envoy.log.read_text()[before[1] :].count("request_id") < 2:
            await asyncio.sleep(0.05)
    for log, start in ((stack.filter.log, before[0]), (stack.envoy.log, before[1])):
        lines = log.read_text()[start:].splitlines()
        assert max(map(len, lines)) < 3_000, max(lines, key=len)[:500]


async def test_names_that_clients_choose_make_no_endless_metrics(stack: Stack) -> None:
    """Models that nobody has, paths, methods, ids: the number of series stays."""
    await http1(port_of(stack), request([]))
    before = len(await stack.metrics())
    for number in range(60):
        body = json.dumps({"model": f"model-{number}", "prompt": "x", "user": f"user-{number}"}).encode()
        await http1(port_of(stack), request([("x-request-id", f"id-{number}")], PATH, body))
        await http1(port_of(stack), request([], f"/v1/path-{number}"))
    assert len(await stack.metrics()) - before < 60


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET /" + b"q" * 9_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nhost: localhost\r\nx: " + b"q" * 9_000 + b"\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nhost: localhost\r\n" + b"".join(b"x-%d: 1\r\n" % n for n in range(300)) + b"\r\n", b"400"),
        (b"POST /debug/explain HTTP/1.1\r\nhost: localhost\r\ncontent-length: 999999999\r\n\r\n" + b"x" * 100, b"413"),
        (b"GET /debug/decisions?last=99999999999 HTTP/1.1\r\nhost: localhost\r\n\r\n", b"400"),
        (b"nonsense\r\n\r\n", b"400"),
    ],
)
async def test_requests_to_the_admin_port_are_bounded(stack: Stack, data: bytes, status: bytes) -> None:
    answer = await http1(int(stack.admin.rpartition(":")[2]), data)
    assert answer[9:12] == status


@pytest_asyncio.fixture
async def small_site() -> AsyncIterator[int]:
    async def ok(_: web.Request) -> web.Response:
        return web.Response(text="ok")

    site = AdminSite(most=3, idle_s=0.2)
    app = web.Application()
    app.add_routes([web.get("/healthz", ok)])
    app.on_shutdown.append(site.close)
    runner = web.AppRunner(app)
    await runner.setup()
    (port,) = free_ports(1)
    assert runner.server is not None
    await site.open(runner.server, Address(host="127.0.0.1", port=port))
    yield port
    await runner.cleanup()


async def test_connections_to_the_admin_port_are_bounded_and_idle_ones_are_closed(small_site: int) -> None:
    """Who holds all of them without asking anything loses them, and the port is there again."""
    held = [await asyncio.open_connection("127.0.0.1", small_site) for _ in range(3)]
    held[0][1].write(b"GET /healthz HTTP/1.1\r\nhost: loc")  # a request that never comes
    reader, writer = await asyncio.open_connection("127.0.0.1", small_site)
    writer.write(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
    try:
        refused = await reader.read()
    except ConnectionResetError:
        refused = b""
    assert refused == b"", "one more is closed at once"
    async with asyncio.timeout(20):
        for quiet, _ in held:
            try:
                assert await quiet.read() == b""
            except ConnectionResetError:
                continue
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{small_site}/healthz") as response:
        assert response.status == 200
    for _, each in (*held, (reader, writer)):
        each.close()


async def test_models_of_a_worker_beyond_a_megabyte_are_not_taken() -> None:
    """A worker that lists too much is live all the same; its models are not known."""
    stack = Stack(decode=1)
    stack.decode[0].models = tuple(f"model-{number}-{'x' * 200}" for number in range(6_000))
    async with stack:
        async with stack.http.get("/v1/models") as response:
            listed = await response.json()
        assert len(listed["data"]) < 100
        assert (await http1(port_of(stack), request([])))[9:12] == b"200"
