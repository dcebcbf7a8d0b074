"""The real Envoy with a mesh's configuration, the real filter, and fake workers."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Literal

import aiohttp
import msgspec

from extproc.config import Config
from extproc.stack import envoy_command, filter_command, find_envoy
from tests.stack.envoy_sees import until_answers, until_filters_seen
from tests.stack.fake_worker import FakeWorker, decode_answer, prefill_answer
from tests.stack.harness import TRANSPORT
from tests.stack.mesh.bootstrap import Ports, Services
from tests.stack.mesh.messages import content
from workers.process import Child
from workers.ready import free_ports

READY_S = 20.0

Build = Callable[[Services, Ports], Any]


class MeshStack:
    """Use as an async context manager. ``build`` makes Envoy's configuration, given where things are.

    ``outside`` is a worker that the mesh does not know, and the filter only with ``decode_from="outside"``; ``other`` is what
    runs behind the gateway already.
    """

    def __init__(
        self, build: Build, *, decode_from: Literal["pool", "outside"] = "pool", tls: Literal["none", "self_signed"] = "none"
    ) -> None:
        front, admin, grpc, health, metrics, filter_admin, *workers = free_ports(11)
        self.ports = Ports(front, admin)
        self.prefill = FakeWorker("prefill-0", workers[0], prefill_answer)
        self.decode = [FakeWorker(f"decode-{i}", port, decode_answer) for i, port in enumerate(workers[1:3])]
        self.outside = FakeWorker("outside", workers[3], decode_answer)
        self.other = FakeWorker("other", workers[4], decode_answer)
        self.base = f"http://127.0.0.1:{front}"
        self.envoy_admin = f"http://127.0.0.1:{admin}"
        self.metrics_url = f"http://127.0.0.1:{metrics}/metrics"
        self.filter_admin = f"http://127.0.0.1:{filter_admin}"
        self.directory = Path(tempfile.mkdtemp(prefix="baton-"))
        services: dict[str, dict[int, list[str]]] = {
            "baton-decode.inference": {8000: [worker.address for worker in self.decode]},
            "baton-filter.inference": {9002: [f"127.0.0.1:{grpc}"]},
            "other.apps": {80: [self.other.address]},
        }
        self.bootstrap = build(services, self.ports)
        known = self.decode if decode_from == "pool" else [self.outside]
        # As the chart configures the filter, with this machine's ports.
        tree: dict[str, Any] = {
            "listen": f"127.0.0.1:{grpc}",
            "admin": f"127.0.0.1:{filter_admin}",
            "transport": TRANSPORT,
            "tls": {"mode": tls},
            "epp": {"enabled": True, "health_listen": f"127.0.0.1:{health}", "metrics_listen": f"127.0.0.1:{metrics}"},
            "workers": {"prefill": [self.prefill.address], "decode": [worker.address for worker in known]},
            "policies": [{"name": "default", "mode": "disaggregate", "objective": "round-robin", "dispatch": "immediate"}],
            "health": {"interval_s": 0.1, "unhealthy_threshold": 2},
            "drain": {"delay_s": 0.1, "timeout_s": 5.0},
            "warm_up": {"enabled": False},  # tests count requests
            "observe": {"sample": 0},
            "envoy": {"access_log": False, "stats": False},
        }
        self.config = msgspec.convert(tree, Config)

    async def __aenter__(self) -> MeshStack:
        async with AsyncExitStack() as parts:
            parts.callback(shutil.rmtree, self.directory, ignore_errors=True)
            for worker in (self.prefill, *self.decode, self.outside, self.other):
                await parts.enter_async_context(worker)
            self._config_file = self.directory / "baton.yaml"
            self._config_file.write_bytes(msgspec.json.encode(self.config))  # JSON is YAML
            envoy_file = self.directory / "envoy.json"
            envoy_file.write_text(json.dumps(content(self.bootstrap)), encoding="utf-8")
            await self._start_filter(parts)
            self.envoy = Child("envoy", envoy_command(find_envoy(), envoy_file), log=self.directory / "envoy.log", grace_s=10.0)
            parts.push_async_callback(asyncio.to_thread, self.envoy.stop)
            self.http = await parts.enter_async_context(
                aiohttp.ClientSession(self.base, connector=aiohttp.TCPConnector(force_close=True, limit=0))
            )
            await until_answers(self.envoy, f"{self.envoy_admin}/ready", READY_S)
            await until_filters_seen(self.envoy_admin, _is_filter, READY_S)
            self._parts = parts.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._parts.aclose()

    async def start_filter(self) -> None:
        """Again, after :meth:`stop_filter`, and wait until Envoy has noticed."""
        await self._start_filter(self._parts)
        await until_filters_seen(self.envoy_admin, _is_filter, READY_S, again=True)
        # An Envoy Gateway has no word for `update_merge_window`: its Envoy may act on it a second later.
        async with asyncio.timeout(READY_S):
            while not await self._filter_answers():
                await asyncio.sleep(0.05)

    async def _filter_answers(self) -> bool:
        async with self.http.get("/v1/models") as response:
            return response.status == 200

    async def stop_filter(self) -> None:
        """Whether Envoy has noticed makes no difference to what it does: its connections are refused."""
        await asyncio.to_thread(self.filter.stop)

    async def kill_filter(self) -> None:
        """At once, with all that it has open."""
        for pid in self.filter.pids():
            os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(READY_S):
            while self.filter.poll() is None:
                await asyncio.sleep(0.02)

    def reset(self) -> None:
        """The workers forget what came before."""
        for worker in (self.prefill, *self.decode, self.outside, self.other):
            worker.reset()

    async def gauge(self, name: str) -> float:
        """Sum over the series of one metric of the filter."""
        async with aiohttp.ClientSession() as session, session.get(self.metrics_url) as response:
            lines = (await response.text()).splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))

    async def _start_filter(self, parts: AsyncExitStack) -> None:
        command = filter_command(self._config_file)
        self.filter = Child("filter", command, log=self.directory / "filter.log", grace_s=10.0)
        parts.push_async_callback(asyncio.to_thread, self.filter.stop)
        await until_answers(self.filter, f"{self.filter_admin}/healthz", READY_S)


def _is_filter(cluster: str) -> bool:
    return "baton-filter" in cluster or cluster.startswith("envoyextensionpolicy/")
