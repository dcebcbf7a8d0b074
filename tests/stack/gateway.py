"""The real Envoy with a filter that lives in the test: it sends each request where the request says."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from extproc import wire
from extproc.config import Config
from extproc.envoy_config import DECODE_CLUSTER, PREFILL_CLUSTER
from extproc.envoy_yaml import render
from extproc.observe.logs import make_logger
from extproc.stack import envoy_command, find_envoy
from extproc.transport.choose import make_server
from extproc.xds import write_endpoints
from extproc.xds_server import EndpointServer
from tests.stack.fake_worker import FakeWorker, decode_answer
from tests.stack.harness import TRANSPORT
from workers.process import Child
from workers.ready import free_ports

TO = "x-test-to"
"""Header of a test's request: the address that the filter names."""


class Gateway:
    """Envoy, ``decode`` fake workers, and a filter that can be started and stopped.

    ``replace`` is done to the text of Envoy's configuration, as (old, new).
    """

    def __init__(self, *, decode: int = 2, replace: tuple[str, str] = ("", ""), **envoy: Any) -> None:
        front, admin, *workers = free_ports(2 + decode)
        self.workers = [FakeWorker(f"decode-{i}", port, decode_answer) for i, port in enumerate(workers)]
        self.directory = Path(tempfile.mkdtemp(prefix="baton-"))
        self.base = f"http://127.0.0.1:{front}"
        self.envoy_admin = f"http://127.0.0.1:{admin}"
        settings = {"listen": f"127.0.0.1:{front}", "admin": f"127.0.0.1:{admin}", **envoy}
        if envoy.get("eds") == "file":
            settings["eds_dir"] = str(self.eds)
        tree = {
            "workers": {"both": [worker.address for worker in self.workers]},
            "listen": f"unix:{self.directory}/extproc.sock",
            "transport": TRANSPORT,
            "envoy": settings,
        }
        self.config = msgspec.convert(tree, Config)
        self.answers: list[wire.ResponseHeaders] = []
        """What Envoy told the filter about answers."""
        self.answer_headers: dict[str, str] = {}
        """What the filter sets on answers."""
        self.instead: wire.Immediate | None = None
        """The filter's own answer, to every request."""
        self.nacks = 0
        self.hold = False
        """Keep requests, once their bodies are here."""
        self.holding = 0
        self.on_body: wire.Mutation | None = None
        """What the filter answers to a request's body; the worker is then named only there."""
        self._replace = replace
        self._published: Mapping[str, Sequence[str]] = {}

    @property
    def eds(self) -> Path:
        return self.directory / "eds"

    async def __aenter__(self) -> Gateway:
        async with AsyncExitStack() as parts:
            parts.callback(shutil.rmtree, self.directory, ignore_errors=True)
            for worker in self.workers:
                await parts.enter_async_context(worker)
            self.http = await parts.enter_async_context(
                aiohttp.ClientSession(
                    self.base, connector=aiohttp.TCPConnector(force_close=True), timeout=aiohttp.ClientTimeout(total=30)
                )
            )
            parts.push_async_callback(self.stop_filter)
            self._parts = parts.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._parts.aclose()

    async def start_envoy(self) -> None:
        file = self.directory / "envoy.yaml"
        file.write_text(render(self.config).replace(*self._replace))
        self.envoy = Child("envoy", envoy_command(find_envoy(), file), log=self.directory / "envoy.log")
        self._parts.push_async_callback(asyncio.to_thread, self.envoy.stop)
        async with asyncio.timeout(20):
            while not await self._ready():
                assert self.envoy.poll() is None, self.envoy.tail()
                await asyncio.sleep(0.05)

    async def _ready(self) -> bool:
        try:
            async with aiohttp.ClientSession() as session, session.get(f"{self.envoy_admin}/ready") as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False

    async def start_filter(self) -> None:
        self.endpoints = EndpointServer(make_logger("critical"), on_nack=self._count_nack)
        if self._published:
            self.endpoints.publish(self._published)
        self._server = make_server(self.config.transport, max_message_bytes=64 << 20, max_streams=1000)
        wire.register(self._server, self._handle)
        self.endpoints.register(self._server)
        healthy = health.aio.HealthServicer()
        await healthy.set(wire.SERVICE_NAME, health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(healthy, self._server)
        self._server.add_insecure_port(self.config.listen)
        await self._server.start()

    async def stop_filter(self) -> None:
        if hasattr(self, "_server"):
            self.endpoints.close()
            await self._server.stop(None)

    def publish(self, *addresses: str) -> None:
        """Tell Envoy which decode workers there are, in the way that it was configured for."""
        if self.config.envoy.eds_dir is not None:
            for cluster in (DECODE_CLUSTER, PREFILL_CLUSTER):
                write_endpoints(self.eds, cluster, addresses)
            return
        self._published = {DECODE_CLUSTER: list(addresses), PREFILL_CLUSTER: []}
        self.endpoints.publish(self._published)

    async def hosts(self, cluster: str = DECODE_CLUSTER) -> list[str]:
        """Which workers Envoy knows."""
        async with aiohttp.ClientSession() as session, session.get(f"{self.envoy_admin}/clusters?format=json") as response:
            clusters = {c["name"]: c for c in (await response.json(content_type=None))["cluster_statuses"]}
        sockets = [host["address"]["socket_address"] for host in clusters[cluster].get("host_statuses", [])]
        return sorted(f"{socket['address']}:{socket['port_value']}" for socket in sockets)

    async def until_hosts(self, *addresses: str, cluster: str = DECODE_CLUSTER) -> None:
        async with asyncio.timeout(15):
            while await self.hosts(cluster) != sorted(addresses):
                await asyncio.sleep(0.02)

    async def stat(self, name: str) -> int:
        async with aiohttp.ClientSession() as session, session.get(f"{self.envoy_admin}/stats?filter=^{name}$") as response:
            text = await response.text()
        return int(text.rpartition(":")[2])

    async def get(self, to: str = "", path: str = "/version") -> tuple[int, str, Mapping[str, str]]:
        async with self.http.get(path, headers={TO: to} if to else {}) as response:
            return response.status, await response.text(), response.headers

    async def until_served(self, to: str) -> None:
        """Until a request for ``to`` gets there: Envoy has found the filter, and knows the worker."""
        async with asyncio.timeout(20):
            while (await self.get(to))[0] != 200:
                await asyncio.sleep(0.05)

    def _count_nack(self) -> None:
        self.nacks += 1

    async def _handle(self, stream: wire.Stream) -> None:
        while (event := await stream.receive()) is not None:
            match event:
                case wire.RequestHeaders() if self.instead is not None:
                    await stream.send(wire.immediate_reply(self.instead))
                    return
                case wire.RequestHeaders():
                    to = event.headers.get(TO) if self.on_body is None else None
                    change = wire.Mutation(destination=to, watch_answer=True)
                    await stream.send(wire.headers_reply(change))
                case wire.ResponseHeaders():
                    self.answers.append(event)
                    await stream.send(wire.answer_reply(event, self.answer_headers))
                case wire.RequestBody() if self.hold:
                    self.holding += 1
                    await asyncio.Event().wait()
                case wire.RequestBody() if self.on_body is not None:
                    await stream.send(wire.body_reply(self.on_body))
                case _:
                    await stream.send(wire.go_on(event))
