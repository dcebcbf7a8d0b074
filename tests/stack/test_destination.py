"""The destination is always one of the pool's own workers, whatever a request, a worker or a source of workers says.

An outsider listens beside the stack, and everything that could name a destination names it. It must never hear of anybody.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from extproc.headers import DESTINATION_HEADER, KV_TRANSFER_HEADER, ROUTING_HEADERS, SERVED_KEY
from tests.stack.fake_worker import PARAMS, FakeWorker, Received
from tests.stack.harness import Stack
from tests.stack.raw_http import http1, http2

BODY = json.dumps({"model": "m", "prompt": "a prompt that is long enough", "max_tokens": 3}).encode()
PATH = "/v1/completions"

STEERING = (
    *ROUTING_HEADERS,
    DESTINATION_HEADER,
    SERVED_KEY,
    "x-envoy-original-dst-host",
    "x-envoy-original-path",
    "x-envoy-force-trace",
    "x-forwarded-host",
    "x-forwarded-to",
    "x-host",
    "x-original-url",
    "x-rewrite-url",
    "x-gateway-destination",
    "x-llm-d-destination-endpoint",
    "target-pod",
    "endpoint",
    "forwarded",
    "x-real-ip",
    "x-test-to",
)
"""Headers with which some gateway, some picker or some sidecar lets a destination be chosen."""


class Outsider:
    """Listens, and remembers who came."""

    def __init__(self) -> None:
        self.visits: list[bytes] = []
        self.port = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Any connection at all is one too many."""
        self.visits.append(b"")
        self.visits[-1] = await reader.read(65536)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\nconnection: close\r\n\r\nstolen")
        await writer.drain()
        writer.close()


@asynccontextmanager
async def outside() -> AsyncIterator[Outsider]:
    outsider = Outsider()
    server = await asyncio.start_server(outsider.hear, "127.0.0.1", 0)
    outsider.port = server.sockets[0].getsockname()[1]
    try:
        yield outsider
    finally:
        server.close()


def spellings(name: str, value: str) -> Iterator[list[tuple[str, str]]]:
    """A header in every way that somebody might read as that header."""
    yield [(name, value)]
    yield [(name.upper(), value)]
    yield [(name.title(), value)]
    yield [(name.replace("-", "_"), value)]
    yield [(name, "127.0.0.1:1"), (name, value)]
    yield [(name, value), (name.title(), value)]
    yield [(name, f"{value},{value}")]
    yield [(name, f"\t {value} \t")]
    yield [(name, f"http://{value}/")]
    yield [(name, f'"{value}"')]
    yield [("connection", f"close, {name}"), (name, value)]
    yield [(name, value + "," + "x" * 7_000)]


def http1_requests(outsider: str) -> Iterator[bytes]:
    """Heads that name the outsider, each as a whole request."""
    for name in STEERING:
        for fields in spellings(name, outsider):
            yield request(fields)
    evil = DESTINATION_HEADER
    yield request([(evil, "127.0.0.1\r\n :1")], raw=True)  # folded
    yield request([(f"{evil} ", outsider)])  # white space before the colon
    yield request([(f" {evil}", outsider)])
    yield request([(f"{evil}\x00", outsider)])
    yield request([(f"a\r\n{evil}", outsider)])
    yield request([("x-long", "y" * 200_000), (evil, outsider)])
    yield request([(f"x-{number}", "1") for number in range(300)] + [(evil, outsider)])
    yield request([], host=outsider)
    yield request([("host", outsider)])
    yield request([], target=f"http://{outsider}{PATH}")
    yield request([], target=f"//{outsider}{PATH}")
    yield request([], target=f"{PATH}?{evil}={outsider}")
    yield request([], target=f"@{outsider}{PATH}")
    yield request([], target=f"{PATH}#@{outsider}")
    yield b"CONNECT " + outsider.encode() + b" HTTP/1.1\r\nhost: " + outsider.encode() + b"\r\n\r\n"
    yield chunked([(evil, outsider)], announced=True)
    yield chunked([(evil, outsider)], announced=False)
    yield request([("transfer-encoding", "chunked")])  # and a content-length
    yield request([("content-length", "5")])
    yield request([("upgrade", "websocket"), ("connection", "upgrade"), (evil, outsider)])
    yield request([("expect", "100-continue"), (evil, outsider)])


def request(fields: list[tuple[str, str]], *, host: str = "gateway.test", target: str = PATH, raw: bool = False) -> bytes:
    head = [f"POST {target} HTTP/1.1", f"host: {host}", "content-type: application/json"]
    if not any(name == "connection" for name, _ in fields):
        head.append("connection: close")
    head += [f"{name}: {value}" for name, value in fields]
    assert raw or all("\r\n " not in line for line in head)
    head.append(f"content-length: {len(BODY)}")
    return "\r\n".join(head).encode() + b"\r\n\r\n" + BODY


def chunked(trailers: list[tuple[str, str]], *, announced: bool) -> bytes:
    head = [f"POST {PATH} HTTP/1.1", "host: gateway.test", "content-type: application/json", "connection: close"]
    head += ["transfer-encoding: chunked", *([f"trailer: {name}" for name, _ in trailers] if announced else [])]
    body = f"{len(BODY):x}\r\n".encode() + BODY + b"\r\n0\r\n"
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body + b"".join(f"{n}: {v}\r\n".encode() for n, v in trailers) + b"\r\n"


def http2_requests(outsider: str) -> Iterator[tuple[list[tuple[str, str]], list[tuple[str, str]]]]:
    """Headers and trailers."""
    pseudo = [(":method", "POST"), (":scheme", "http"), (":path", PATH), (":authority", "gateway.test")]
    plain = [*pseudo, ("content-type", "application/json")]
    for name in STEERING:
        yield [*plain, (name, outsider)], []
        yield [*plain, (name.upper(), outsider)], []
        yield [*plain, (name, "127.0.0.1:1"), (name, outsider)], []
        yield [*plain, (f":{name}", outsider)], []
        yield plain, [(name, outsider)]
    yield [*plain[:3], (":authority", outsider), *plain[4:]], []
    yield [*plain, ("host", outsider)], []
    yield [*plain, (":authority", outsider)], []
    yield [*plain[:2], (":path", f"http://{outsider}{PATH}"), *plain[3:]], []
    yield [(":method", "CONNECT"), (":authority", outsider)], []
    yield [(":method", "CONNECT"), (":protocol", "websocket"), *pseudo[1:]], []
    yield [*plain[:1], (":scheme", f"http://{outsider}"), *plain[2:]], []


def told(record: Received, outsider: str) -> dict[str, str]:
    """What a worker was told of the outsider, but for what says who the client is and what it has called us."""
    ours = ("host", "x-forwarded-host", "x-real-ip", "forwarded", "x-forwarded-to", "x-host")
    harmless = (*ours, *(name for name in STEERING if name not in ROUTING_HEADERS))
    return {name: value for name, value in record.headers.items() if outsider in value and name not in harmless}


@pytest.mark.parametrize(
    ("pin", "body_mode", "via"),
    [
        ("exact", "buffered", "envoy"),
        ("exact", "full_duplex", "direct"),
        ("exact", "full_duplex_both", "envoy"),
        ("original_dst", "buffered", "direct"),
        ("original_dst", "full_duplex", "envoy"),
        ("original_dst", "full_duplex_both", "envoy"),
    ],
)
async def test_no_header_leads_outside(pin: str, body_mode: str, via: str) -> None:
    """Every steering header in every spelling, over HTTP/1.1 and HTTP/2, in trailers and in the request line."""
    settings: dict[str, Any] = {"envoy": {"pin": pin, "body_mode": body_mode, "debug_headers": False}}
    if via == "direct":
        settings["prefill"] = {"via": "direct"}
    async with outside() as outsider, Stack(settings=settings) as stack:
        port = int(stack.base.rpartition(":")[2])
        workers = {worker.address: worker for worker in (*stack.prefill, *stack.decode)}
        slots = asyncio.Semaphore(8)
        statuses: dict[str, int] = {}

        def count(status: str) -> None:
            statuses[status] = statuses.get(status, 0) + 1

        async def one(data: bytes) -> None:
            async with slots:
                answer = await http1(port, data)
                assert b"stolen" not in answer
                final = answer.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
                count(final[9:12].decode() or "closed")

        async def two(headers: list[tuple[str, str]], trailers: list[tuple[str, str]]) -> None:
            async with slots:
                count(str(await http2(port, headers, BODY, trailers) or "reset"))

        await asyncio.gather(*(one(data) for data in http1_requests(outsider.address)))
        await asyncio.gather(*(two(*parts) for parts in http2_requests(outsider.address)))

        assert outsider.visits == []
        assert statuses.keys() <= {"200", "400", "403", "404", "426", "431", "501", "closed", "reset"}, statuses
        assert statuses["200"] > 150, f"most of them are requests that are served: {statuses}"
        for worker in workers.values():
            for record in worker.received:
                assert told(record, outsider.address) == {}
                for name in ROUTING_HEADERS:
                    if name in (DESTINATION_HEADER, KV_TRANSFER_HEADER):
                        continue
                    assert name not in record.headers, f"{name} reached a worker"
                assert record.headers.get(DESTINATION_HEADER, worker.address) == worker.address
        async with stack.http.post(PATH, data=BODY, headers={"content-type": "application/json"}) as response:
            assert response.status == 200, "and the gateway still serves"


async def test_while_the_filter_is_away_no_header_leads_outside() -> None:
    """Envoy alone, with a pin that would connect anywhere: what a client says is gone before anybody reads it."""
    for pin in ("exact", "original_dst"):
        async with outside() as outsider, Stack(settings={"envoy": {"pin": pin}}) as stack:
            stack.filter.stop()
            port = int(stack.base.rpartition(":")[2])
            for data in http1_requests(outsider.address):
                if DESTINATION_HEADER.encode() in data.lower():
                    assert b" 200 " not in (await http1(port, data))[:20]
            assert outsider.visits == []


async def test_redirects_of_workers_are_not_followed() -> None:
    """Probes, scrapes, models, the prefill call, releases: a worker that points elsewhere is a faulty worker. What a decode
    worker answers goes to the client as it is, and it is the client's to follow or not."""
    async with outside() as outsider:
        for status in (301, 302, 307, 308):

            async def elsewhere(_: web.Request, __: bytes, status: int = status) -> web.StreamResponse:
                return web.Response(status=status, headers={"location": f"http://{outsider.address}/"})

            stack = Stack(decode=3, settings={"warm_up": {"enabled": False}, "scrape": {"interval_s": 0.2}})
            astray = stack.decode[2]
            everything_elsewhere(astray, outsider, status)
            async with stack:
                stack.prefill[0].answer = elsewhere
                async with stack.http.post(PATH, data=BODY, headers={"content-type": "application/json"}) as response:
                    assert response.status == 502
                stack.prefill[0].reset()
                for worker in stack.decode:
                    worker.answer = elsewhere
                async with stack.http.post(
                    PATH, data=BODY, headers={"content-type": "application/json"}, allow_redirects=False
                ) as response:
                    assert response.status == status
                async with aiohttp.ClientSession() as session, session.get(f"{stack.admin}/healthz") as response:
                    state = await response.json()
                assert astray.address not in state["live"]["decode"]
                assert state["faults"][astray.address] == f"status {status}"
        assert outsider.visits == []


def everything_elsewhere(worker: FakeWorker, outsider: Outsider, status: int) -> None:
    async def serve(_: web.Request) -> web.StreamResponse:
        return web.Response(status=status, headers={"location": f"http://{outsider.address}/"})

    worker._serve = serve  # type: ignore[method-assign]


NAMED: list[tuple[list[str], list[tuple[str, int, bool]]]] = [
    (
        [],
        [
            ("10.1.2.3", 5600, True),
            ("engine-7.gpu.internal", 5600, True),
            ("169.254.169.254/latest/meta-data", 5600, False),
            ("127.0.0.1;tcp://evil", 5600, False),
            ("", 5600, False),
            ("10.1.2.3", 0, False),
            ("10.1.2.3", 65536, False),
        ],
    ),
    (["worker"], [("127.0.0.1", 5600, True), ("10.1.2.3", 5600, False), ("localhost", 5600, False)]),
    (
        ["10.1.0.0/16", "fd00::/8", "engine-7.gpu.internal"],
        [("10.1.2.3", 5600, True), ("169.254.169.254", 80, False), ("ENGINE-7.gpu.internal", 5600, True)],
    ),
]


@pytest.mark.parametrize(("allowed", "replies"), NAMED)
async def test_where_blocks_are_is_checked(allowed: list[str], replies: list[tuple[str, int, bool]]) -> None:
    """A prefill worker's reply names where the decode worker connects: what is no host, or none that it may be, is not used."""
    async with Stack(settings={"handoff": {"remote_hosts": allowed}}) as stack:
        for host, port, handed_over in replies:
            reply = {"kv_transfer_params": {**PARAMS, "remote_host": host, "remote_port": port}}

            async def answer(_: web.Request, __: bytes, reply: dict[str, Any] = reply) -> web.StreamResponse:
                return web.json_response(reply)

            stack.reset()
            stack.prefill[0].answer = answer
            async with stack.http.post(PATH, data=BODY, headers={"content-type": "application/json"}) as response:
                text = await response.json()
            if handed_over:
                assert response.status == 200, host
                (record,) = stack.decode_received
                assert record.json["kv_transfer_params"]["remote_host"] == host  # type: ignore[index]
            else:
                assert (response.status, text["error"]["code"]) == (502, "handoff_invalid"), host
                assert stack.decode_received == []


async def test_sources_of_workers_cannot_name_just_any_address(tmp_path: Path) -> None:
    """A file that names an address where clouds keep credentials, and one outside of the networks: the others serve, these are
    asked nothing, and it is said."""
    listed = tmp_path / "workers.yaml"
    async with outside() as outsider:
        stack = Stack(settings={"workers": {"file": str(listed), "networks": ["127.0.0.1/32"]}})
        listed.write_text(
            json.dumps({"decode": ["169.254.169.254:80", "127.0.0.2:80", f"[::1]:{outsider.port}", "224.0.0.1:80"]})
        )
        async with stack:
            async with stack.http.post(PATH, data=BODY, headers={"content-type": "application/json"}) as response:
                assert response.status == 200
            refused = {line["endpoint"] for line in await stack.logged("endpoint_refused", 4)}
            assert refused == {"169.254.169.254:80", "127.0.0.2:80", f"[::1]:{outsider.port}", "224.0.0.1:80"}
            assert (await stack.metrics())['baton_endpoints_refused_total{source="file"}'] == 4
            eds = (stack.directory / "eds" / "decode.json").read_text()
            assert "169.254" not in eds and "127.0.0.2" not in eds
