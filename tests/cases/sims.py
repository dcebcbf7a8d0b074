"""Envoy and the filter between strict simulated engines that live in the test's own process and keep what they receive."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from aiohttp import web

from tests.stack.harness import Stack
from workers.sim.main import SimOptions, worker_options
from workers.sim.worker import Worker


@dataclass
class Received:
    """One request as it came in, and the body of its answer if that was not streamed."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    reply: bytes | None = None
    at_s: float = field(default_factory=time.monotonic)
    answered_s: float = math.inf
    """When the engine was done with it."""

    @property
    def proxied(self) -> bool:
        """Through Envoy or as a prefill call, not a probe or a release of the filter's."""
        return "x-request-id" in self.headers


@dataclass
class RecordingSim:
    """One engine. Use as an async context manager."""

    name: str
    port: int
    options: SimOptions
    keep: bool = True
    all_received: list[Received] = field(default_factory=list)

    def __post_init__(self) -> None:
        (made,) = worker_options(replace(self.options, port=self.port))
        self.worker = Worker(replace(made, name=self.name))

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def received(self) -> list[Received]:
        return [received for received in self.all_received if received.proxied]

    async def __aenter__(self) -> RecordingSim:
        await self.worker.start()
        if self.keep:
            assert self.worker._runner is not None and self.worker._runner.server is not None
            server = self.worker._runner.server
            server.request_handler = self._recording(server.request_handler)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.worker.stop()

    def reset(self) -> None:
        """For the harness; forget() is the one that waits for the engine."""
        self.all_received.clear()

    async def forget(self) -> None:
        self.reset()
        await self.worker.reset()

    def _recording(self, inner: Callable[[Any], Awaitable[web.StreamResponse]]) -> Callable[[Any], Awaitable[Any]]:
        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            headers = {name.lower(): value for name, value in request.headers.items()}
            received = Received(request.method, request.path_qs, headers, await request.read())
            self.all_received.append(received)
            response = await inner(request)
            received.answered_s = time.monotonic()
            if isinstance(response, web.Response) and isinstance(response.body, bytes):
                received.reply = response.body
            return response

        return handle


class SimStack(Stack):
    """The stack of the other tests, with strict engines in place of the fake workers."""

    def __init__(
        self,
        *,
        prefill: int,
        decode: int,
        options: SimOptions,
        settings: Mapping[str, Mapping[str, Any]] | None = None,
        keep: bool = True,
        started: bool = True,
    ) -> None:
        super().__init__(prefill=prefill, decode=decode, started=started, settings=settings)
        self.prefill: list[Any] = [RecordingSim(w.name, w.port, options, keep) for w in self.prefill]
        self.decode: list[Any] = [RecordingSim(w.name, w.port, options, keep) for w in self.decode]

    @property
    def sims(self) -> list[RecordingSim]:
        return [*self.prefill, *self.decode]

    async def forget(self) -> None:
        for sim in self.sims:
            await sim.forget()

    def pinned(self) -> int:
        return sum(sim.worker.engine.state()["pinned_blocks"] for sim in self.sims)

    def pulled(self) -> int:
        """Prompt tokens whose KV came from a prefill worker."""
        return sum(sim.worker.engine.core.counters.pulled_tokens for sim in self.sims)

    async def released(self, timeout_s: float) -> bool:
        """Whether no block is pinned any more, at the latest after ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.pinned():
                    await asyncio.sleep(0.005)
        except TimeoutError:
            return False
        return True

    def violations(self) -> dict[str, Any]:
        """Of all engines, those of the environment included; empty if nothing was wrong."""
        reports = {sim.name: sim.worker.violations.report() for sim in self.sims}
        return {name: report for name, report in reports.items() if report["count"] or report["environment"]["counts"]}
