"""The real Envoy and the real filter before fake workers, and what their processes take."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil

from bench.growth.clients import Clients, request
from bench.overhead.cpu import process_cpu_s
from extproc.config import Config
from extproc.envoy_yaml import render
from extproc.stack import envoy_command, filter_command, find_envoy
from workers.process import Child
from workers.ready import free_ports, wait_ready

_READY_S = 30.0
_PATIENCE_S = 300.0
_PREFILL_WORKERS, _DECODE_WORKERS = 2, 2


class Gateway:
    """A running one."""

    def __init__(self, port: int, filter_: Child, envoy: Child, workers: asyncio.subprocess.Process) -> None:
        self.clients = Clients(port)
        self._filter, self._envoy = _processes(filter_), _processes(envoy)
        self._workers = workers

    def filter_cpu_s(self) -> float:
        """Processor time of the filter so far."""
        return sum(process_cpu_s(process.pid) for process in self._filter)

    def filter_mb(self) -> float:
        """Memory of the filter."""
        return sum(process.memory_info().rss for process in self._filter) / 1e6

    def filter_peak_mb(self) -> float:
        """The most that it has had since :meth:`forget_peak`."""
        return sum(_peak_kb(process.pid) for process in self._filter) * 1024 / 1e6

    def forget_peak(self) -> None:
        """Begin anew."""
        for process in self._filter:
            Path(f"/proc/{process.pid}/clear_refs").write_text("5", encoding="ascii")

    def envoy_mb(self) -> float:
        """Memory of Envoy."""
        return sum(process.memory_info().rss for process in self._envoy) / 1e6

    async def until_held(self, many: int) -> None:
        """Wait until so many prefills wait in the workers. Raises TimeoutError."""
        await self._say(f"held {many}")
        assert self._workers.stdout is not None
        async with asyncio.timeout(_PATIENCE_S):
            await self._workers.stdout.readline()

    async def let_go(self) -> None:
        """Answer them."""
        await self._say("go")

    async def _say(self, line: str) -> None:
        assert self._workers.stdin is not None
        self._workers.stdin.write(line.encode() + b"\n")
        await self._workers.stdin.drain()


def _processes(child: Child) -> list[psutil.Process]:
    return [psutil.Process(pid) for pid in child.pids()]


def _peak_kb(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1])
    return 0


@asynccontextmanager
async def gateway(*, transport: str, dispatch: str = "immediate", prefill_s: float = 0.0) -> AsyncIterator[Gateway]:
    """Start everything. ``dispatch``: see the policies; ``prefill_s``: what a prefill takes that is not held."""
    front, envoy_admin, admin, *ports = free_ports(3 + _PREFILL_WORKERS + _DECODE_WORKERS)
    prefill, decode = ports[:_PREFILL_WORKERS], ports[_PREFILL_WORKERS:]
    folder = Path(tempfile.mkdtemp(prefix="baton-"))
    settings = _settings(folder, front, admin, envoy_admin, prefill, decode)
    settings["policies"] = [{"name": "default", "mode": "disaggregate", "dispatch": dispatch}]
    config = msgspec.convert({**settings, "transport": transport}, Config)
    (folder / "baton.yaml").write_bytes(msgspec.json.encode(config))
    (folder / "envoy.yaml").write_text(render(config), encoding="utf-8")
    async with AsyncExitStack() as parts:
        parts.callback(shutil.rmtree, folder, ignore_errors=True)
        workers = await _workers(prefill, decode, prefill_s)
        parts.push_async_callback(_end, workers)
        filter_ = Child("filter", filter_command(folder / "baton.yaml"), log=folder / "filter.log", grace_s=5.0)
        parts.push_async_callback(asyncio.to_thread, filter_.stop)
        await asyncio.to_thread(wait_ready, filter_, f"http://127.0.0.1:{admin}/healthz", _READY_S)
        envoy = Child("envoy", envoy_command(find_envoy(), folder / "envoy.yaml"), log=folder / "envoy.log", grace_s=5.0)
        parts.push_async_callback(asyncio.to_thread, envoy.stop)
        await asyncio.to_thread(wait_ready, envoy, f"http://127.0.0.1:{envoy_admin}/ready", _READY_S)
        running = Gateway(front, filter_, envoy, workers)
        await _until_served(running.clients)
        yield running


def _settings(folder: Path, front: int, admin: int, envoy_admin: int, prefill: list[int], decode: list[int]) -> dict[str, Any]:
    return {
        "workers": {name: [f"127.0.0.1:{port}" for port in each] for name, each in (("prefill", prefill), ("decode", decode))},
        "listen": f"unix:{folder}/extproc.sock",
        "admin": f"127.0.0.1:{admin}",
        "prefill": {"via": f"unix:{folder}/prefill.sock", "timeout_s": _PATIENCE_S},
        "warm_up": {"enabled": False},
        "observe": {"sample": 0},
        "drain": {"delay_s": 0, "timeout_s": 1},
        "log_level": "warning",
        "envoy": {"listen": f"127.0.0.1:{front}", "admin": f"127.0.0.1:{envoy_admin}", "eds_dir": f"{folder}/eds"},
    }


async def _workers(prefill: list[int], decode: list[int], prefill_s: float) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    ports = ("--prefill", *map(str, prefill), "--decode", *map(str, decode))
    argv = (sys.executable, "-m", "bench.growth.worker", *ports, "--prefill-s", str(prefill_s))
    workers = await asyncio.create_subprocess_exec(*argv, stdin=pipe, stdout=pipe)
    assert workers.stdout is not None
    async with asyncio.timeout(_READY_S):
        if await workers.stdout.readline() != b"ready\n":
            raise RuntimeError(f"the fake workers have not started: {json.dumps(argv)}")
    return workers


async def _end(workers: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        workers.kill()
    await workers.wait()


async def _until_served(clients: Clients) -> None:
    draw = random.Random(0)  # noqa: S311 - a benchmark
    until_s = time.monotonic() + _READY_S
    while (status := await clients.ask(request(512, draw))) != "200":
        if time.monotonic() > until_s:
            raise TimeoutError(f"the gateway is not ready: {status}")
        await asyncio.sleep(0.05)
