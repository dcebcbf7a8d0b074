"""The lean gRPC server behind the real Envoy: health check, keepalive, bodies of any size, held and abandoned streams, stop."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from extproc.stack import envoy_command, find_envoy
from workers.process import Child
from workers.ready import free_ports

MAX_BODY_BYTES = 8 << 20
TYPES = "type.googleapis.com/envoy."


def bootstrap(socket: Path, front: int, admin: int, upstream: int, window_bytes: int) -> dict[str, Any]:
    """Envoy's configuration. ``window_bytes``: what it takes on a stream of the server's before it has read it."""
    ext_proc = {
        "name": "ext_proc",
        "typed_config": {
            "@type": TYPES + "extensions.filters.http.ext_proc.v3.ExternalProcessor",
            "grpc_service": {"envoy_grpc": {"cluster_name": "extproc"}},
            "processing_mode": {"request_body_mode": "BUFFERED", "response_header_mode": "SEND"},
            "message_timeout": "60s",
        },
    }
    router = {"name": "router", "typed_config": {"@type": TYPES + "extensions.filters.http.router.v3.Router"}}
    manager = {
        "@type": TYPES + "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "front",
        "http_filters": [ext_proc, router],
        "route_config": {
            "virtual_hosts": [
                {"name": "all", "domains": ["*"], "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "upstream"}}]}
            ]
        },
    }
    http2 = {
        "initial_stream_window_size": window_bytes,
        "initial_connection_window_size": window_bytes,
        "connection_keepalive": {"interval": "0.1s", "timeout": "2s"},
    }

    def cluster(name: str, address: dict[str, Any], **more: Any) -> dict[str, Any]:
        load = {"cluster_name": name, "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address}}]}]}
        limits = {"thresholds": [{"max_requests": 10_000, "max_pending_requests": 10_000, "max_connections": 10_000}]}
        return {"name": name, "connect_timeout": "2s", "load_assignment": load, "circuit_breakers": limits, **more}

    def tcp(port: int) -> dict[str, Any]:
        return {"socket_address": {"address": "127.0.0.1", "port_value": port}}

    extproc = cluster(
        "extproc",
        {"pipe": {"path": str(socket)}},
        typed_extension_protocol_options={
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": TYPES + "extensions.upstreams.http.v3.HttpProtocolOptions",
                "explicit_http_config": {"http2_protocol_options": http2},
            }
        },
        health_checks=[
            {
                "timeout": "1s",
                "interval": "0.1s",
                "no_traffic_interval": "0.1s",
                "unhealthy_threshold": 2,
                "healthy_threshold": 1,
                "grpc_health_check": {},
            }
        ],
        common_lb_config={"healthy_panic_threshold": {"value": 0}},
    )
    return {
        "admin": {"address": tcp(admin)},
        "static_resources": {
            "listeners": [
                {
                    "name": "front",
                    "address": tcp(front),
                    "per_connection_buffer_limit_bytes": MAX_BODY_BYTES,
                    "filter_chains": [{"filters": [{"name": "hcm", "typed_config": manager}]}],
                }
            ],
            "clusters": [
                extproc,
                cluster("upstream", tcp(upstream), per_connection_buffer_limit_bytes=MAX_BODY_BYTES),
            ],
        },
    }


class Gateway:
    """Envoy, the server behind it, and a client in front."""

    server: Child
    envoy: Child
    http: aiohttp.ClientSession
    admin: str
    failed_before: int
    """Calls that failed before the server was there."""

    async def stats(self) -> dict[str, int]:
        async with aiohttp.ClientSession() as session, session.get(f"{self.admin}/stats?format=json") as response:
            found = json.loads(await response.read())["stats"]
        return {each["name"]: each["value"] for each in found if "value" in each}

    async def get(self, path: str) -> str:
        async with self.http.get(path) as response:
            assert response.status == 200, await response.text()
            return await response.text()

    async def held(self) -> tuple[int, int]:
        """Requests that the server holds, and that were abandoned."""
        held, left = (await self.get("/held")).split()
        return int(held), int(left)

    async def until(self, held: int, left: int) -> None:
        async with asyncio.timeout(30):
            while await self.held() != (held, left):
                await asyncio.sleep(0.02)


async def mirror(request: web.Request) -> web.Response:
    return web.Response(body=await request.read())


@asynccontextmanager
async def gateway(directory: Path, window_bytes: int = 1 << 20) -> AsyncIterator[Gateway]:
    front, admin, upstream = free_ports(3)
    made = Gateway()
    made.admin = f"http://127.0.0.1:{admin}"
    async with AsyncExitStack() as parts:
        runner = web.AppRunner(application := web.Application(client_max_size=MAX_BODY_BYTES))
        application.router.add_route("*", "/{path:.*}", mirror)
        await runner.setup()
        parts.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", upstream).start()
        config, socket = directory / "envoy.json", directory / "s.sock"
        config.write_text(json.dumps(bootstrap(socket, front, admin, upstream, window_bytes)))

        def child(name: str, *argv: str) -> Child:
            started = Child(name, argv, log=directory / f"{name}.log", grace_s=20.0)
            parts.push_async_callback(asyncio.to_thread, started.stop)
            return started

        made.server = child("server", sys.executable, "-m", "tests.stack.lean_echo", f"unix:{socket}")
        made.envoy = child("envoy", *envoy_command(find_envoy(), config))
        made.http = await parts.enter_async_context(
            aiohttp.ClientSession(
                f"http://127.0.0.1:{front}",
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=60),
            )
        )
        async with asyncio.timeout(20):
            while True:
                assert made.envoy.poll() is None and made.server.poll() is None, made.envoy.tail() + made.server.tail()
                try:
                    async with made.http.get("/held") as response:
                        if response.status == 200:
                            break
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.05)
        made.failed_before = (await made.stats())["http.front.ext_proc.streams_failed"]
        yield made
        assert "failed" not in made.server.log.read_text()
        assert "HTTP/2" not in made.server.log.read_text(), "Envoy is said to have broken the protocol"


@pytest.mark.parametrize("window_bytes", [65_535, 1 << 20, 1 << 28])
async def test_bodies_come_back_whole_whatever_the_windows_of_envoy(tmp_path: Path, window_bytes: int) -> None:
    async with gateway(tmp_path, window_bytes) as made:
        for size in (0, 1, 4_096, 128 << 10, 1 << 20, 5 << 20):
            body = os.urandom(size)
            for path, expected in (("/echo", body), ("/pass", body[::-1])):
                async with made.http.post(path, data=io.BytesIO(body)) as response:
                    assert response.status == 200, await response.text()
                    came = await response.read()
                    assert came == expected or size == 0, f"{path}, {size} bytes"


async def test_many_bodies_at_once(tmp_path: Path) -> None:
    async with gateway(tmp_path) as made:

        async def one(number: int) -> None:
            body = os.urandom(1_000 * number)
            async with made.http.post("/pass", data=io.BytesIO(body)) as response:
                assert await response.read() == body[::-1]

        for _ in range(3):
            await asyncio.gather(*map(one, range(1, 200)))


async def test_health_checks_and_keepalive_go_on_and_close_nothing(tmp_path: Path) -> None:
    async with gateway(tmp_path) as made:
        await made.get("/held")
        before = await made.stats()
        hold = asyncio.create_task(made.get("/hold"))
        await made.until(held=1, left=0)
        await asyncio.sleep(1.5)  # of some pings and checks
        after = await made.stats()
        checks = after["cluster.extproc.health_check.success"] - before["cluster.extproc.health_check.success"]
        assert checks >= 5
        for name in ("health_check.failure", "upstream_cx_destroy_local", "http2.keepalive_timeout"):
            assert after[f"cluster.extproc.{name}"] == before[f"cluster.extproc.{name}"], name
        await made.get("/release")
        assert await hold == "released"


async def test_five_hundred_held_streams_and_clients_that_leave(tmp_path: Path) -> None:
    async with gateway(tmp_path) as made:
        holds = [asyncio.create_task(made.get("/hold")) for _ in range(500)]
        await made.until(held=500, left=0)
        for hold in holds[::5]:
            hold.cancel()
        await asyncio.gather(*holds[::5], return_exceptions=True)
        await made.until(held=400, left=100)
        await made.get("/release")
        stayed = [hold for number, hold in enumerate(holds) if number % 5]
        assert set(await asyncio.gather(*stayed)) == {"released"}
        stats = await made.stats()
        assert stats["cluster.extproc.upstream_cx_protocol_error"] == 0
        assert stats["http.front.ext_proc.streams_failed"] == made.failed_before


async def test_stop_lets_what_is_in_flight_finish_and_envoy_sees_no_error(tmp_path: Path) -> None:
    async with gateway(tmp_path) as made:
        holds = [asyncio.create_task(made.get("/hold")) for _ in range(50)]
        await made.until(held=50, left=0)
        for pid in made.server.pids():
            os.kill(pid, signal.SIGTERM)
        assert set(await asyncio.gather(*holds)) == {"released"}
        async with asyncio.timeout(10):
            while made.server.poll() is None:
                await asyncio.sleep(0.02)
        assert made.server.poll() == 0
        assert made.server.log.read_text().endswith("stopped\n")
        assert (await made.stats())["http.front.ext_proc.streams_failed"] == made.failed_before
