"""One simulated worker: its listener, its engine, its side channel, its faults; how it starts, crashes and comes back."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import ssl
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiohttp import web

from workers.sim import (
    api_chat,
    api_completions,
    api_control,
    api_generate,
    api_messages,
    api_pooling,
    api_responses,
    api_server,
    api_tokens,
)
from workers.sim.blocks import CacheEvent
from workers.sim.core import Plan
from workers.sim.engine import Engine, EngineConfig
from workers.sim.errors import ApiError
from workers.sim.faults import Fault, Faults
from workers.sim.listening import ServerTls, close_listener
from workers.sim.metrics import Metrics
from workers.sim.prompts import Model
from workers.sim.serving import Serving
from workers.sim.violations import Violations

if TYPE_CHECKING:
    from workers.sim.events import Publisher

VERSION = "0.32.0"
_MAX_BODY_BYTES = 1 << 30
_KEEP_ALIVE_S = 5.0
"""vLLM closes an idle connection after five seconds, and a proxy has to live with that."""


@dataclass(frozen=True)
class WorkerOptions:
    """One worker."""

    name: str = "sim"
    host: str = "127.0.0.1"
    port: int = 0
    model: Model = field(default_factory=Model)
    engine: EngineConfig = field(default_factory=EngineConfig)
    enable_scale_out: bool = False
    enable_prompt_tokens_details: bool = False
    enable_request_id_headers: bool = False
    enable_server_load_tracking: bool = False
    max_queued_requests: int | None = None
    max_queued_tokens: int | None = None
    events_endpoint: str | None = None
    events_replay_endpoint: str | None = None
    events_topic: str = ""
    api_key: str | None = field(default=None, repr=False)
    tls: ServerTls | None = None


class _Refuser(asyncio.Protocol):
    """A connection that is closed as soon as it is there."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.abort()  # type: ignore[attr-defined]


class Worker:
    """Use as an async context manager."""

    def __init__(self, options: WorkerOptions) -> None:
        self.options = options
        self.model = options.model
        self.port = options.port
        self.faults = Faults()
        self.violations = Violations()
        self.metrics = Metrics(options.model.names[0], len(options.model.adapters))
        self.serving = Serving(self)
        self.fingerprint = f"vllm-{VERSION}-sim-{hashlib.sha256(options.model.names[0].encode()).hexdigest()[:8]}"
        self.publisher: Publisher | None = None
        self.up = False
        self._ids: tuple[str, ...] = ()
        self._side_channel_port: int | None = None
        self._server: asyncio.Server | None = None
        self._context: ssl.SSLContext | None = None
        self._refresh: asyncio.Task[None] | None = None
        self._runner: web.AppRunner | None = None
        self._last_step_s: float | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._restarts: set[asyncio.Task[None]] = set()
        self._life = asyncio.Lock()
        self.engine = self._new_engine()

    @property
    def address(self) -> str:
        """``host:port`` of the HTTP listener."""
        return f"{self.options.host}:{self.port}"

    @property
    def url(self) -> str:
        """Of the HTTP listener."""
        return f"{'http' if self.options.tls is None else 'https'}://{self.address}"

    # -- life --------------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Worker:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Serve."""
        options = self.options
        if options.events_endpoint and self.publisher is None:
            # Only here, so that ZMQ is needed by those only who want events.
            from workers.sim.events import Publisher

            self.publisher = Publisher(
                options.events_endpoint,
                options.events_replay_endpoint,
                topic=options.events_topic,
                block_size=options.engine.core.block_size,
                adapters=tuple(self.model.adapters),
            )
        await self._start_engine()
        middlewares = [api_server.closed_while_down(self), api_server.framework_errors]
        if options.api_key is not None:
            middlewares.append(api_server.authenticated(options.api_key))
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=middlewares)
        app.router.add_post("/v1/completions", api_completions.handler(self))
        app.router.add_post("/v1/chat/completions", api_chat.handler(self))
        app.router.add_post("/v1/chat/completions/batch", api_chat.handler(self, batch=True))
        app.router.add_post("/v1/responses", api_responses.handler(self))
        app.router.add_post("/v1/messages", api_messages.handler(self))
        app.router.add_post("/v1/messages/count_tokens", api_messages.count_tokens(self))
        api_generate.add_routes(app, self)
        api_tokens.add_routes(app, self)
        api_pooling.add_routes(app, self)
        api_server.add_routes(app, self)
        api_control.add_routes(app, self, "/sim")
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1, keepalive_timeout=_KEEP_ALIVE_S
        )
        await self._runner.setup()
        if options.tls is not None:
            self._context = options.tls.context()
            self._refresh = asyncio.create_task(options.tls.follow(self._context))
        await self._listen()

    async def stop(self) -> None:
        """End: what is under way is cut."""
        await self._cancel_tasks()
        if self._refresh is not None:
            self._refresh.cancel()
        async with self._life:
            await self._go_down()
        if self._runner is not None:
            await self._runner.cleanup()
        if self.publisher is not None:
            await self.publisher.close()

    async def restart(self) -> None:
        """A new engine id, all blocks lost, what was under way cut."""
        await self._uncancelled(self._come_up(anew=True))

    async def crash(self, duration_s: float | None) -> None:
        """Stop answering; come back after ``duration_s`` as a new engine, or not at all."""
        async with self._life:
            await self._go_down()
        if duration_s is not None:
            await asyncio.sleep(duration_s)
            await self._uncancelled(self._come_up())

    async def _come_up(self, *, anew: bool = False) -> None:
        """A new engine where there is none, or in any case."""
        async with self._life:
            if self.up and not anew:
                return
            await self._go_down()
            if self.publisher is not None:
                self.publisher.restart()
            self.engine = self._new_engine()
            await self._start_engine()
            await self._listen()

    async def _uncancelled(self, work: Coroutine[Any, Any, None]) -> None:
        """Half a restart is no state to be in: once begun it goes on, whoever stops waiting for it."""
        task = asyncio.create_task(work)
        self._restarts.add(task)
        task.add_done_callback(self._restarts.discard)
        await asyncio.shield(task)

    async def _listen(self) -> None:
        self.up = True
        self._server = await asyncio.get_running_loop().create_server(
            self._protocol, self.options.host, self.port, reuse_address=True, backlog=1024, ssl=self._context
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def _go_down(self) -> None:
        self.up = False
        server, self._server = self._server, None
        if server is not None:
            await close_listener(server)
        self._cut_connections()
        if not self.engine.stopped:
            await self.engine.stop()

    def _cut_connections(self, *, idle_only: bool = False) -> None:
        if self._runner is None or self._runner.server is None:
            return
        for connection in tuple(self._runner.server.connections):
            # aiohttp's own close() ends the handler and leaves the socket open: a client would send into it and wait for ever.
            busy = connection._current_request is not None
            if connection.transport is not None and not (idle_only and busy):
                connection.transport.abort()

    def _protocol(self) -> asyncio.BaseProtocol:
        assert self._runner is not None and self._runner.server is not None
        if not self.up or self.faults.take(("refuse",), "any", time.monotonic()) is not None:
            return _Refuser()
        return self._runner.server()

    def _new_engine(self) -> Engine:
        return Engine(
            self.options.engine,
            self.violations,
            former_ids=self._ids,
            on_cache_event=self._on_cache_event,
            on_step=self._on_step,
            slow_factor=lambda: self.faults.slow_factor(time.monotonic()),
            side_channel_port=self._side_channel_port,
        )

    async def _start_engine(self) -> None:
        await self.engine.start()
        self._ids += (self.engine.engine_id,)
        self._side_channel_port = self.engine.server.port

    # -- what its parts tell it --------------------------------------------------------------------------------------------

    def _on_cache_event(self, event: CacheEvent) -> None:
        if self.publisher is not None:
            self.publisher.add(event)

    def _on_step(self, plan: Plan) -> None:
        now_s = time.monotonic()
        gap_s = None if self._last_step_s is None else now_s - self._last_step_s
        self._last_step_s = now_s if self.engine.core.running else None
        self.metrics.step(plan.prefill_tokens + plan.decodes, plan.decodes, gap_s)
        if self.publisher is not None:
            self.publisher.flush()

    def check_admission(self) -> None:
        """Refuse what the queue limits do not allow. Raises ApiError (503)."""
        waiting = self.engine.core.waiting
        limit = self.options.max_queued_requests
        if limit is not None and len(waiting) >= limit:
            self.metrics.rejected["queued_reqs"] += 1
            message = f"Server is overloaded: {len(waiting)} queued requests, the limit is {limit}."
            raise ApiError(message, status=503, kind="ServiceUnavailableError")
        limit = self.options.max_queued_tokens
        if limit is not None and (queued := sum(len(s.prompt) - s.computed for s in waiting)) >= limit:
            self.metrics.rejected["queued_tokens"] += 1
            message = f"Server is overloaded: {queued} queued tokens, the limit is {limit}."
            raise ApiError(message, status=503, kind="ServiceUnavailableError")

    def load_header(self, wanted: str) -> dict[str, str]:
        """The load report that a request can ask for, in ORCA's text or JSON form."""
        values = {
            "kv_cache_usage_perc": self.engine.pool.usage,
            "num_requests_waiting": float(len(self.engine.core.waiting) + len(self.engine.core.pulling)),
        }
        if wanted.lower() == "text":
            shown = ", ".join(f"named_metrics.{name}={value}" for name, value in values.items())
            return {"endpoint-load-metrics": f"TEXT {shown}"}
        if wanted.lower() == "json":
            return {"endpoint-load-metrics": f"JSON {json.dumps({'named_metrics': values})}"}
        return {}

    # -- control -----------------------------------------------------------------------------------------------------------

    def inject(self, fault: Fault) -> None:
        """Switch a fault on."""
        if fault.kind == "exit":
            os._exit(137)
        if fault.kind == "restart":
            self._later(self.restart())
        elif fault.kind == "crash":
            self._later(self.crash(fault.duration_s))
        elif fault.kind == "side_channel_dead":
            self._later(self._side_channel_dead(fault.duration_s))
        else:
            self.faults.add(fault, time.monotonic())
            if fault.kind == "refuse":
                self._cut_connections(idle_only=True)

    async def _side_channel_dead(self, duration_s: float | None) -> None:
        engine = self.engine
        await engine.server.close()
        if duration_s is not None:
            await asyncio.sleep(duration_s)
            if not engine.stopped:
                await engine.server.open()

    async def clear_faults(self) -> None:
        """Switch all off; a worker that is down comes back."""
        self.faults.clear()
        await self._cancel_tasks()
        await self._uncancelled(self._come_up())
        if not self.engine.dead:
            await self.engine.server.open()

    async def _cancel_tasks(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def reset(self) -> None:
        """As new, but with the same engine id: no violations, faults or handoffs, an empty prefix cache if nothing runs."""
        await self.clear_faults()
        self.violations.clear()
        for request_id in tuple(self.engine.handoffs.pinned):
            self.engine.handoffs.release(request_id)
        if self.engine.pool.clear_cache() and self.engine.host is not None:
            self.engine.host.clear()
        if self.publisher is not None:
            self.publisher.flush()

    def state(self) -> dict[str, Any]:
        """What ``/sim/state`` answers."""
        return {
            "name": self.options.name,
            "address": self.address,
            "up": self.up,
            "in_flight": self.serving.in_flight,
            "former_engine_ids": [i for i in self._ids if i != self.engine.engine_id],
            "fault_hits": self.faults.hits,
            **self.engine.state(),
        }
