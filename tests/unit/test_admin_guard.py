"""The admin port against pages of somebody else: DNS rebinding, and requests across origins."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from extproc.admin_guard import guard, host_fault
from workers.ready import free_ports


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.0.0.1:9003",
        "[::1]:9003",
        "10.0.3.4:9003",
        "localhost:9003",
        "LOCALHOST",
        "baton:9003",
        "filter.internal:9003",
        "baton.llm.svc:9003",
        "baton.llm.svc.cluster.local:9003",
        "baton.llm.svc.cluster.local.:9003",
        "metrics.example.com:9003",
        "METRICS.example.com",
    ],
)
def test_names_of_ours_are_let_in(host: str) -> None:
    assert host_fault(host, ("metrics.example.com",)) is None


@pytest.mark.parametrize(
    "host",
    [
        "",
        "evil.example.com",
        "evil.example.com:9003",
        "127.0.0.1.evil.example.com",
        "localhost.evil.example.com",
        "svc.example.com",
        "baton.svc.example.com",
        "notcluster.local.example",
        "evil.example.com#.svc",
        "evil.example.com/.svc",
        "evil.example.com?.svc",
        "user@evil.example.com",
        "baton.svc@evil.example.com",
        "[::1",
        "xmetrics.example.com",
        "1.2.3",
        "0x7f.1",
    ],
)
def test_names_that_others_may_own_are_not(host: str) -> None:
    assert host_fault(host, ("metrics.example.com",)) is not None


@pytest_asyncio.fixture
async def port() -> AsyncIterator[int]:
    async def ok(_: web.Request) -> web.Response:
        return web.Response(text="ok")

    app = web.Application(middlewares=[guard(["Metrics.Example.com"])])
    app.add_routes([web.get("/healthz", ok), web.post("/debug/explain", ok)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    (free,) = free_ports(1)
    await web.TCPSite(runner, "127.0.0.1", free).start()
    yield free
    await runner.cleanup()


@pytest.mark.parametrize(
    ("method", "headers", "status"),
    [
        ("GET", {}, 200),
        ("GET", {"Host": "metrics.example.com"}, 200),
        ("GET", {"Host": "evil.example.com"}, 421),
        ("POST", {}, 200),
        ("POST", {"Host": "evil.example.com", "Origin": "http://evil.example.com"}, 421),
        ("POST", {"Origin": "http://evil.example.com"}, 403),
        ("POST", {"Origin": "null"}, 403),
        ("POST", {"Origin": "https://localhost", "Host": "localhost:9003"}, 403),
        ("POST", {"Origin": "http://localhost:9003", "Host": "localhost:9003"}, 200),
        ("POST", {"Sec-Fetch-Site": "cross-site"}, 403),
        ("POST", {"Sec-Fetch-Site": "same-site"}, 403),
        ("POST", {"Sec-Fetch-Site": "same-origin"}, 200),
        ("POST", {"Sec-Fetch-Site": "none"}, 200),
        # A page may be looked at from anywhere: a browser gives its answer to nobody else (see extproc.pages).
        ("GET", {"Sec-Fetch-Site": "cross-site"}, 200),
    ],
)
async def test_what_a_foreign_page_would_send_is_refused(port: int, method: str, headers: dict[str, str], status: int) -> None:
    path = "/healthz" if method == "GET" else "/debug/explain"
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, f"http://127.0.0.1:{port}{path}", headers=headers) as response,
    ):
        assert response.status == status
