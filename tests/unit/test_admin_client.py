"""What commands read from a filter's admin port has a limit, and what is wrong is said in one line."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from extproc import admin_client
from extproc.admin_client import CommandError, call
from workers.ready import free_ports


@asynccontextmanager
async def admin_port() -> AsyncIterator[str]:
    async def endless(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        with pytest.raises(ConnectionError):
            while True:
                await answer.write(bytes(100_000))
        return answer

    async def small(_: web.Request) -> web.Response:
        return web.Response(text="all of it")

    app = web.Application()
    app.add_routes([web.get("/endless", endless), web.get("/small", small)])
    runner = web.AppRunner(app)
    await runner.setup()
    (port,) = free_ports(1)
    await web.TCPSite(runner, "127.0.0.1", port).start()
    yield f"127.0.0.1:{port}"
    await runner.cleanup()


async def test_an_answer_without_end_is_refused_and_not_held_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert admin_client._ANSWER_MAX_BYTES == 256 << 20, "docs/security.md says so"
    monkeypatch.setattr(admin_client, "_ANSWER_MAX_BYTES", 1 << 20)
    async with admin_port() as admin:
        assert await call(admin, "GET", "/small", None) == b"all of it"
        with pytest.raises(CommandError, match="the answer is over 1048576 bytes"):
            await call(admin, "GET", "/endless", None)
        with pytest.raises(CommandError, match="it answered 404 to /nothing"):
            await call(admin, "GET", "/nothing", None)
