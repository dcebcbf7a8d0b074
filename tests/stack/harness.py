"""The real Envoy and the real filter, with fake workers around them, in a folder of their own."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from extproc.config import Config, Workers
from extproc.envoy_tls import write_secrets
from extproc.envoy_yaml import render
from extproc.stack import envoy_command, filter_command, find_envoy
from tests.stack.envoy_sees import until_answers, until_filters_seen
from tests.stack.fake_worker import FakeWorker, decode_answer, prefill_answer
from tests.stack.logged import lines, until_logged
from workers.process import Child
from workers.ready import free_ports

READY_S = 20.0
TRANSPORT = os.environ.get("BATON_TEST_TRANSPORT", "lean")
BODY_MODE = os.environ.get("BATON_TEST_BODY_MODE", "buffered")
"""`make stack` runs the suite in more than one way."""


class Stack:
    """Envoy, filter and fake workers. ``settings`` overrides fields of the configuration, by section.

    ``started``: its own workers run from the beginning. ``ready``: it is entered when requests can be served, and each own
    worker that the configuration names is live or at fault; by default if its own workers run.
    """

    def __init__(
        self,
        *,
        prefill: int = 1,
        decode: int = 2,
        started: bool = True,
        ready: bool | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        front, admin, filter_admin, *workers = free_ports(3 + prefill + decode)
        self.prefill = [FakeWorker(f"prefill-{i}", port, prefill_answer) for i, port in enumerate(workers[:prefill])]
        self.decode = [FakeWorker(f"decode-{i}", port, decode_answer) for i, port in enumerate(workers[prefill:])]
        self.directory = Path(tempfile.mkdtemp(prefix="baton-"))
        self.base = f"http://127.0.0.1:{front}"
        self.admin = f"http://127.0.0.1:{filter_admin}"
        self.envoy_admin = f"http://127.0.0.1:{admin}"
        self._started = started
        self._ready = started if ready is None else ready
        tree: dict[str, Any] = {
            "workers": {"prefill": [w.address for w in self.prefill], "decode": [w.address for w in self.decode]},
            "listen": f"unix:{self.directory}/extproc.sock",
            "transport": TRANSPORT,
            "admin": f"127.0.0.1:{filter_admin}",
            "prefill": {"via": f"unix:{self.directory}/prefill.sock", "timeout_s": 30.0},
            "policies": [{"name": "default", "mode": "disaggregate", "objective": "round-robin", "dispatch": "immediate"}],
            "health": {"interval_s": 0.1, "unhealthy_threshold": 2},
            "drain": {"delay_s": 0.5, "timeout_s": 20.0},
            "warm_up": {"enabled": False},  # tests count requests
            "observe": {"sample": 0},  # nor do they need one more process
            "envoy": {
                "listen": f"127.0.0.1:{front}",
                "admin": f"127.0.0.1:{admin}",
                "eds_dir": f"{self.directory}/eds",
                "debug_headers": True,
                "body_mode": BODY_MODE,
            },
        }
        self._tree = tree
        self.configure(**(settings or {}))

    def configure(self, **sections: Mapping[str, Any] | list[Any] | str | int) -> None:
        """Override fields of the configuration, by section; before the stack is entered. What is no section is replaced."""
        for section, values in sections.items():
            self._tree[section] = values if isinstance(values, (list, str, int)) else {**self._tree.get(section, {}), **values}
        self.config = msgspec.convert(self._tree, Config)
        assert isinstance(self.config.workers, Workers)

    async def __aenter__(self) -> Stack:
        async with AsyncExitStack() as parts:
            parts.callback(shutil.rmtree, self.directory, ignore_errors=True)
            if self._started:
                for worker in (*self.prefill, *self.decode):
                    await parts.enter_async_context(worker)
            config_file = self.directory / "baton.yaml"
            config_file.write_bytes(msgspec.json.encode(self.config))  # JSON is YAML
            envoy_file = self.directory / "envoy.yaml"
            envoy_file.write_text(render(self.config), encoding="utf-8")
            write_secrets(self.config)
            self.filter = self._child(parts, "filter", *filter_command(config_file))
            await self._wait(self.filter, f"{self.admin}/metrics", (200,))
            self.envoy = self._child(parts, "envoy", *envoy_command(find_envoy(), envoy_file))
            await self._wait(self.envoy, f"{self.envoy_admin}/ready", (200,))
            self.http = await parts.enter_async_context(
                aiohttp.ClientSession(
                    self.base,
                    connector=aiohttp.TCPConnector(force_close=True, limit=0),
                    timeout=aiohttp.ClientTimeout(total=60),
                )
            )
            if self._ready:
                await self._wait(self.filter, f"{self.admin}/healthz", (200,))
                await self._named_live()
            await self.ext_proc_seen()
            self._parts = parts.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._parts.aclose()

    def _child(self, parts: AsyncExitStack, name: str, *argv: str) -> Child:
        child = Child(name, argv, log=self.directory / f"{name}.log", grace_s=25.0)
        # Stopping waits for the process; the loop must go on meanwhile, because the workers live in it.
        parts.push_async_callback(asyncio.to_thread, child.stop)
        return child

    async def _wait(self, child: Child, url: str, statuses: tuple[int, ...]) -> None:
        await until_answers(child, url, READY_S, statuses)

    async def _named_live(self) -> None:
        """Readiness takes one worker of each kind; a test that counts requests has all in mind. Those at fault are not live."""
        workers = self.config.workers
        named = {each if isinstance(each, str) else each.address for each in (*workers.prefill, *workers.decode)}
        awaited = named & {worker.address for worker in (*self.prefill, *self.decode)}
        async with asyncio.timeout(READY_S), aiohttp.ClientSession() as session:
            while awaited:
                async with session.get(f"{self.admin}/healthz") as response:
                    status = await response.json()
                awaited -= {*status["live"]["prefill"], *status["live"]["decode"], *status["faults"]}
                await asyncio.sleep(0.02)

    async def ext_proc_seen(self, *, again: bool = False) -> None:
        """Until Envoy's health check has found the filter. ``again``: after it was away."""
        await until_filters_seen(self.envoy_admin, "extproc".__eq__, READY_S, again=again)

    def reset(self) -> None:
        for worker in (*self.prefill, *self.decode):
            worker.reset()

    @property
    def decode_received(self) -> list[Any]:
        return [received for worker in self.decode for received in worker.received]

    async def metrics(self) -> dict[str, float]:
        """Sample (name with labels, as Prometheus writes it) -> value."""
        async with aiohttp.ClientSession() as session, session.get(f"{self.admin}/metrics") as response:
            text = await response.text()
        return {
            name: float(value)
            for name, _, value in (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
        }

    def log_lines(self) -> list[dict[str, Any]]:
        """What the filter has written so far: a line comes up to 50 ms after the fact."""
        return lines(self.filter.log)

    async def logged(self, event: str, count: int = 1, **fields: Any) -> list[dict[str, Any]]:
        """See :func:`tests.stack.logged.until_logged`."""
        return await until_logged(self.filter.log, event, count, **fields)

    def signal_filter(self, number: signal.Signals) -> None:
        for pid in self.filter.pids():
            os.kill(pid, number)


def beside(workers: Mapping[str, Any], **sections: Any) -> Stack:
    """Envoy and filter for workers that the test runs itself: it has started them, and they are awaited."""
    return Stack(prefill=0, decode=0, started=False, ready=True, settings={"workers": workers, **sections})
