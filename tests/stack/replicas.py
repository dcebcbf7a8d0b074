"""Two filters on "different hosts" behind one real Envoy: own ports, own processes, nothing shared but a network."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import msgspec
import psutil

from extproc.config import Config
from extproc.stack import filter_command
from tests.cases.sims import SimStack
from tests.stack.harness import READY_S
from workers.process import Child
from workers.ready import free_ports
from workers.sim.main import SimOptions

LEASE_S = 2.0
OPTIONS = SimOptions(
    served_model_name=("m",),
    speed=4.0,
    num_blocks=2000,
    max_model_len=8192,
    mean_answer_tokens=24,
    kv_lease_duration_s=LEASE_S,
    handshake_s=0.05,
    enable_prompt_tokens_details=True,
)
SETTINGS: dict[str, dict[str, Any]] = {
    "prefill": {"via": "direct", "timeout_s": 8.0, "connect_timeout_s": 0.5},
    "handoff": {"lease_s": LEASE_S, "release_timeout_s": 1.0, "release_delay_s": 0.7},
    "drain": {"delay_s": 1.5, "timeout_s": 15.0},
}


class Replica:
    """One filter."""

    def __init__(self, name: str, config: Config) -> None:
        self.name = name
        self.config = config
        self.admin = f"http://{config.admin}"
        self.child: Child | None = None
        self.lives = 0
        self.logs: list[str] = []
        """Of former lives."""

    async def get(self, path: str) -> Any:
        async with aiohttp.ClientSession() as session, session.get(f"{self.admin}{path}") as response:
            return await (response.json() if path == "/healthz" else response.text())

    async def metric(self, prefix: str) -> float:
        """The sum of all samples whose name begins so."""
        lines = (await self.get("/metrics")).splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(prefix) and not line.startswith("#"))

    def pid(self) -> int:
        """Of the filter itself, not of its guard."""
        assert self.child is not None
        [pid] = [pid for pid in self.child.pids() if "guard.py" not in " ".join(psutil.Process(pid).cmdline())]
        return pid

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid(), number)

    def log(self) -> list[dict[str, Any]]:
        """What it has written, in all of its lives."""
        now = "" if self.child is None else self.child.log.read_text()
        return [json.loads(line) for line in "".join([*self.logs, now]).splitlines() if line.startswith("{")]

    def served(self) -> dict[str, dict[str, Any]]:
        """Its line of each request, by the request's id."""
        return {line["request_id"]: line for line in self.log() if line["event"] == "request"}


class Pair(SimStack):
    """``first`` and ``second``, and an Envoy that has both as endpoints."""

    def __init__(
        self, *, settings: Mapping[str, Mapping[str, Any]] | None = None, replicas: Mapping[str, Any] | None = None, **more: Any
    ) -> None:
        """``replicas``: fields of that section; {"listen": None} for filters that know nothing of each other."""
        merged = {name: {**SETTINGS.get(name, {}), **(settings or {}).get(name, {})} for name in {*SETTINGS, *(settings or {})}}
        policies = merged.pop("policies", None) or [{"name": "default", "mode": "disaggregate"}]
        super().__init__(options=more.pop("options", OPTIONS), settings={**merged, "policies": policies}, **more)  # type: ignore[dict-item]
        listens = free_ports(5)
        secret = self.directory / "secret"
        secret.write_bytes(os.urandom(24).hex().encode())
        secret.chmod(0o600)
        shared = {
            "listen": f"127.0.0.1:{listens[2]}",
            "peers": [f"127.0.0.1:{port}" for port in listens[2:4]],
            "secret_file": str(secret),
            "plaintext": True,
            **(replicas or {}),
        }
        if shared["listen"] is None:
            shared = {}
        self.configure(
            listen=f"127.0.0.1:{listens[0]}",
            envoy={"filters": [f"127.0.0.1:{port}" for port in listens[:2]], "eds_dir": None},
            replicas=shared,
        )
        second = msgspec.to_builtins(self.config)
        second |= {"listen": f"127.0.0.1:{listens[1]}", "admin": f"127.0.0.1:{listens[4]}"}
        if shared:
            second["replicas"] |= {"listen": f"127.0.0.1:{listens[3]}"}
        self.first = Replica("first", self.config)
        self.second = Replica("second", msgspec.convert(second, Config))
        self._children = AsyncExitStack()

    @property
    def replicas(self) -> tuple[Replica, Replica]:
        return self.first, self.second

    def other(self, replica: Replica) -> Replica:
        return self.second if replica is self.first else self.first

    async def __aenter__(self) -> Pair:
        async with AsyncExitStack() as parts:
            await parts.enter_async_context(self._children)
            self._launch(self.second)
            await super().__aenter__()
            self.first.child = self.filter
            self._all = parts.pop_all()
        await self.together()
        return self

    async def __aexit__(self, *error: object) -> None:
        # The first one's child may be another one by now; all that were started are ended.
        await super().__aexit__(*error)
        await self._all.aclose()

    def _launch(self, replica: Replica) -> None:
        replica.lives += 1
        file = self.directory / f"{replica.name}.yaml"
        file.write_bytes(msgspec.json.encode(replica.config))
        log = self.directory / f"{replica.name}-{replica.lives}.log"
        replica.child = Child(replica.name, tuple(filter_command(file)), log=log, grace_s=25.0)
        self._children.push_async_callback(asyncio.to_thread, replica.child.stop)

    async def start(self, replica: Replica) -> None:
        """Another life of it, until it serves and Envoy knows."""
        assert replica.child is not None
        replica.logs.append(replica.child.log.read_text())
        self._launch(replica)
        await self._wait(replica.child, f"{replica.admin}/healthz", (200,))
        await self.together()
        await self.ext_proc_seen(again=True)

    async def kill(self, replica: Replica) -> None:
        """Without a chance to say anything."""
        assert replica.child is not None
        replica.signal(signal.SIGKILL)
        await self.gone(replica)

    async def gone(self, replica: Replica) -> None:
        """Until its process has ended."""
        child = replica.child
        assert child is not None
        async with asyncio.timeout(READY_S):
            while child.poll() is None:
                await asyncio.sleep(0.01)

    async def together(self) -> None:
        """Until each hears the other, if they are to."""
        if self.first.config.replicas.listen is None:
            return
        async with asyncio.timeout(READY_S):
            while [await each.metric("baton_siblings") for each in self.replicas] != [1, 1]:
                await asyncio.sleep(0.02)

    async def counts(self) -> dict[str, float]:
        """What a filter or an engine still holds; empty when nothing is asked for and nothing leaked."""
        held: dict[str, float] = {}
        for replica in self.replicas:
            if replica.child is not None and replica.child.poll() is None:
                for name in ("baton_endpoint_in_flight", "baton_endpoint_tokens", "baton_streams", "baton_prefills_in_flight"):
                    held[f"{replica.name} {name}"] = await replica.metric(name)
                shown = (await replica.get("/healthz")).get("replicas", {"connected": {}})
                held[f"{replica.name} claims of others"] = sum(each["claims"] for each in shown["connected"].values())
        for sim in self.sims:
            state = sim.worker.engine.state()
            for key in ("running", "waiting", "pulling", "pinned_blocks"):
                held[f"{sim.name} {key}"] = state[key]
        return {name: value for name, value in held.items() if value}

    async def empty(self, timeout_s: float) -> dict[str, float]:
        """What is held still after so long."""
        try:
            async with asyncio.timeout(timeout_s):
                while held := await self.counts():
                    await asyncio.sleep(0.05)
        except TimeoutError:
            return held
        return {}
