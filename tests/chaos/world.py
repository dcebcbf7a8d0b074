"""The system under the faults: Envoy, the filter, six engines; what was done to them when; what reached which engine."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from aiohttp import web

from tests.cases.sims import RecordingSim, SimStack
from tests.chaos.plan import MODEL, FilterFault, WorkerFault
from workers.sim.main import SimOptions

LEASE_S = 2.0
HUNG_S = 25.0
"""Prefill deadline and Envoy's idle timeout are over by far then."""

OPTIONS = SimOptions(
    served_model_name=MODEL.names,
    lora_modules=tuple(f"{name}={path}" for name, path in MODEL.adapters.items()),
    speed=4.0,
    num_blocks=700,
    max_model_len=MODEL.max_model_len,
    mean_answer_tokens=MODEL.mean_answer_tokens,
    kv_lease_duration_s=LEASE_S,
    side_channel_timeout_s=1.0,
    handshake_s=0.2,
    enable_prompt_tokens_details=True,
)

SETTINGS: dict[str, dict[str, Any]] = {
    "prefill": {"timeout_s": 6.0, "attempt_timeout_s": 1.0, "connect_timeout_s": 0.5, "retries": 2},
    "handoff": {"lease_s": LEASE_S, "max_age_share": 0.5, "release_timeout_s": 1.0, "release_delay_s": 0.7},
    "health": {"interval_s": 0.2, "timeout_s": 1.0, "unhealthy_threshold": 2},
    "drain": {"delay_s": 0.5, "timeout_s": 2.0},
}

_PREFILL = b'"do_remote_decode":true'
_HANDOFF = re.compile(rb'"remote_request_id":"([^"]+)"')


@dataclass
class Arrival:
    """A request with a handoff, at a decode worker."""

    at_s: float
    worker: str
    release: bool
    end: str = "open"
    """The status of the answer, or how it ended without one."""


@dataclass(frozen=True)
class Pinning:
    """A prefill that was answered with a handoff."""

    at_s: float
    prompt: str


def prompt_of(body: bytes) -> str:
    """What tells one request of a run from all others, on every leg of it; "" if there is nothing."""
    try:
        value = json.loads(body)
        return json.dumps([value.get(key) for key in ("prompt", "messages", "input")])
    except (ValueError, AttributeError):
        return ""


@dataclass(frozen=True)
class Trouble:
    """Something was wrong with a worker, or with the filter, from then till then."""

    kind: str
    where: str
    from_s: float
    to_s: float

    def during(self, from_s: float, to_s: float) -> bool:
        return self.from_s <= to_s and from_s <= self.to_s


class ChaosSim(RecordingSim):
    """An engine that can be replaced by a new process's, and that notes which handoffs came to it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.arrivals: dict[str, list[Arrival]] = {}
        self.pinnings: dict[str, Pinning] = {}
        self.reports: list[dict[str, Any]] = []
        self.engine_ids: set[str] = set()

    async def again(self) -> None:
        """The process ends and another one starts at the same address, and knows nothing of this one."""
        self.collect()
        self.options = replace(self.options, side_channel_port=self.worker.engine.server.port)
        await self.worker.stop()
        super().__post_init__()
        await self.__aenter__()

    def collect(self) -> None:
        """Keep what the engine complains about, and its names."""
        self.reports.append(self.worker.violations.report())
        self.engine_ids |= set(self.worker._ids)

    def _recording(self, inner: Callable[[Any], Awaitable[web.StreamResponse]]) -> Callable[[Any], Awaitable[Any]]:
        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            body = await request.read() if request.method == "POST" else b""
            match = _HANDOFF.search(body)
            if match is None:
                response = await inner(request)
                reply = response.body if _PREFILL in body and isinstance(response, web.Response) else None
                if isinstance(reply, bytes) and (made := _HANDOFF.search(reply)):
                    self.pinnings[made[1].decode()] = Pinning(time.time(), prompt_of(body))
                return response
            arrival = Arrival(time.time(), self.name, b"baton-release-no-such-model" in body)
            self.arrivals.setdefault(match[1].decode(), []).append(arrival)
            arrival.end = "cut"
            response = await inner(request)
            arrival.end = str(response.status)
            return response

        return handle


@dataclass
class World:
    """Use as an async context manager."""

    prefill: int
    decode: int
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        merged = {
            section: {**SETTINGS.get(section, {}), **self.settings.get(section, {})} for section in {*SETTINGS, *self.settings}
        }
        policies = [{"name": "default", "mode": "disaggregate"}]  # held in the queue, the pair that costs least
        self.stack = SimStack(
            prefill=self.prefill, decode=self.decode, options=OPTIONS, settings={**merged, "policies": policies}
        )
        # An idle timeout is what ends a request whose decode worker hangs.
        envoy = self.stack.config.envoy
        self.stack.config = _with(self.stack.config, envoy=_with(envoy, idle_timeout_s=7.0))
        for role in ("prefill", "decode"):
            setattr(self.stack, role, [ChaosSim(s.name, s.port, s.options) for s in getattr(self.stack, role)])
        self.troubles: list[Trouble] = []
        self.past: list[Trouble] = []
        self.outcomes: dict[str, Any] = {}
        """prompt_of a request -> what came of it."""
        self.hits: dict[str, int] = {}
        self.counters: dict[str, float] = {}
        self.filter_logs: list[str] = []
        self._standing = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def sims(self) -> list[ChaosSim]:
        return self.stack.sims  # type: ignore[return-value]

    async def __aenter__(self) -> World:
        await self.stack.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._signal(signal.SIGCONT)
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.stack.__aexit__()

    def do(self, fault: WorkerFault | FilterFault) -> None:
        """Let it happen; returns at once."""
        task = asyncio.create_task(self._filter(fault) if isinstance(fault, FilterFault) else self._worker(fault))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def note(self, kind: str, where: str, seconds: float) -> None:
        now_s = time.time()
        self.troubles.append(Trouble(kind, where, now_s, now_s + seconds))
        self.hits[kind] = self.hits.get(kind, 0) + 1

    async def _worker(self, planned: WorkerFault) -> None:
        sim = self.sims[planned.worker]
        if not sim.worker.up:  # down already
            return
        # A worker that comes back is found live by the next probe only.
        self.note(planned.kind, sim.name, (planned.fault.duration_s or 0.0) + 0.5)
        if planned.again:
            await sim.again()
        else:
            sim.worker.inject(planned.fault)

    async def _filter(self, planned: FilterFault) -> None:
        if planned.kind == "stop":
            self.note("filter stands still", "filter", planned.duration_s)
            self._standing += 1
            self._signal(signal.SIGSTOP)
            try:
                await asyncio.sleep(planned.duration_s)
            finally:
                self._standing -= 1
                if not self._standing:
                    self._signal(signal.SIGCONT)
            return
        began_s = time.time()
        self.hits["filter restarted"] = self.hits.get("filter restarted", 0) + 1
        old = self.stack.filter
        # Until it is gone and Envoy has found the new one, requests may be turned away.
        index = len(self.troubles)
        self.troubles.append(Trouble("filter restarted", "filter", began_s, began_s + 60.0))
        await self.count()
        await asyncio.to_thread(old.stop)
        self.filter_logs.append(old.log.read_text(encoding="utf-8", errors="replace"))
        config = self.stack.directory / "baton.yaml"
        argv = (sys.executable, "-m", "extproc", "serve", "-c", str(config))
        self.stack.filter = self.stack._child(self.stack._parts, "filter", *argv)
        await self.stack._wait(self.stack.filter, f"{self.stack.admin}/healthz", (200,))
        await self.stack.ext_proc_seen(again=True)
        self.troubles[index] = Trouble("filter restarted", "filter", began_s, time.time() + 1.0)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self.stack.filter.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    async def heal(self) -> None:
        """Everything works again from here on."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=20.0)
        self._signal(signal.SIGCONT)
        for sim in self.sims:
            await sim.worker.clear_faults()
        await self.stack._wait(self.stack.filter, f"{self.stack.admin}/healthz", (200,))
        await self.stack.ext_proc_seen()
        async with asyncio.timeout(10.0):
            while not await self._all_live():
                await asyncio.sleep(0.05)

    async def _all_live(self) -> bool:
        live = {name: value for name, value in (await self.stack.metrics()).items() if name.startswith("baton_endpoint_live")}
        return sum(live.values()) == len(self.sims)

    async def count(self) -> None:
        """Keep the filter's counters, which end with it."""
        names = ("baton_fallbacks_total", "baton_releases_total", "baton_client_keys_removed_total")
        for name, value in (await self.stack.metrics()).items():
            if name.startswith(names) and value:
                self.counters[name] = self.counters.get(name, 0.0) + value

    def troubled(self, from_s: float, to_s: float, *, where: str | None = None, kinds: tuple[str, ...] = ()) -> bool:
        """Whether something was wrong then (there, of these kinds)."""
        return any(
            trouble.during(from_s, to_s)
            for trouble in self.troubles
            if (where is None or trouble.where == where) and (not kinds or trouble.kind in kinds)
        )

    def wrong(self, from_s: float, to_s: float) -> list[str]:
        """What was wrong then."""
        return [f"{t.kind} {t.where} {t.from_s:.2f}-{t.to_s:.2f}" for t in self.troubles if t.during(from_s, to_s)]

    def log(self) -> str:
        """All that the filter has written."""
        return "".join(self.filter_logs) + self.stack.filter.log.read_text(encoding="utf-8", errors="replace")


def _with(struct: Any, **changes: Any) -> Any:
    return msgspec.structs.replace(struct, **changes)
