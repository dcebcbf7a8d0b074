"""One engine at work: the loop that plans, waits and commits steps, and the traffic with the other engines.

What may live here: time, tasks, the side channel. What is decided is decided in :mod:`workers.sim.core`.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from workers.sim.blocks import BlockPool, CacheEvent, Kv
from workers.sim.core import Core, CoreConfig, Effect, Identity, Load, Plan, Pull, Stuck
from workers.sim.handoff import Handoffs
from workers.sim.histogram import Histogram
from workers.sim.host_cache import HostCache
from workers.sim.pacing import Pacer
from workers.sim.request import Sequence, Status
from workers.sim.side_channel import ChannelClient, ChannelError, ChannelServer
from workers.sim.text import Step
from workers.sim.timing import Profile
from workers.sim.violations import Violations

PULL_KEYS = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")
_log = logging.getLogger(__name__)

_TRANSFER_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)

DEATH_KEYS = ("remote_block_ids", *PULL_KEYS)
"""Without one of these vLLM's decode engine ends in a KeyError, or the request never ends."""
HEARTBEAT_KEYS = (*PULL_KEYS, "tp_size")
"""Without one of these vLLM sends no heartbeats, and says nothing."""


@dataclass(frozen=True)
class EngineConfig:
    """One engine and its surroundings."""

    core: CoreConfig = field(default_factory=CoreConfig)
    profile: Profile = field(default_factory=Profile)
    speed: float = 1.0
    """So many times faster than the profile; 0: no waiting at all."""
    side_channel_host: str = "127.0.0.1"
    side_channel_port: int = 0
    side_channel_timeout_s: float = 5.0
    strict_crash: bool = False
    engine_id: str | None = None


class Generation:
    """The tokens of one sequence as they come, for one consumer."""

    def __init__(self, sequence: Sequence, *, stream: bool) -> None:
        self.sequence = sequence
        self.steps: list[Step] = []
        self.end: str | None = None
        self._stream = stream
        self._waiter: asyncio.Future[None] | None = None
        sequence.on_steps = self._on_steps
        sequence.on_end = self._on_end

    def _on_steps(self, steps: list[Step]) -> None:
        self.steps += steps
        if self._stream:
            self._wake()

    def _on_end(self, reason: str) -> None:
        self.end = reason
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> list[Step]:
        """New tokens; an empty list only at the end. Without ``stream`` there is one wait, for all of them."""
        while self.end is None and not (self._stream and self.steps):
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        steps, self.steps = self.steps, []
        return steps


@dataclass
class TransferStats:
    """What the metrics endpoint shows of transfers, as a decode worker."""

    bytes: Histogram = field(default_factory=lambda: Histogram([2**i for i in range(11, 35, 2)]))
    seconds: Histogram = field(default_factory=lambda: Histogram(_TRANSFER_S))
    failed: int = 0
    failed_notifications: int = 0


class Engine:
    """One engine: a life from start() to stop() with one engine id."""

    def __init__(
        self,
        config: EngineConfig,
        violations: Violations,
        *,
        former_ids: tuple[str, ...] = (),
        on_cache_event: Callable[[CacheEvent], None] | None = None,
        on_step: Callable[[Plan], None] | None = None,
        slow_factor: Callable[[], float] = lambda: 1.0,
        side_channel_port: int | None = None,
    ) -> None:
        self.config = config
        self.violations = violations
        self.engine_id = config.engine_id if config.engine_id and not former_ids else str(uuid.uuid4())
        self.former_ids = former_ids
        self.pool = BlockPool(
            config.core.num_blocks, config.core.block_size, caching=config.core.prefix_caching, on_event=on_cache_event
        )
        core = config.core
        self.host = HostCache(core.host_blocks, core.block_size, on_event=on_cache_event) if core.host_blocks else None
        self._host_free = asyncio.Lock()
        """Loads from the host's memory come one after the other."""
        self.handoffs = Handoffs(self.pool, lease_s=config.core.lease_s)
        port = config.side_channel_port if side_channel_port is None else side_channel_port
        self.server = ChannelServer(self._on_channel, config.side_channel_host, port)
        self.client = ChannelClient(timeout_s=config.side_channel_timeout_s)
        self.transfers = TransferStats()
        self.dead = False
        self.stopped = True
        self._on_step = on_step
        self._slow_factor = slow_factor
        self._known: dict[tuple[str, int, str], asyncio.Task[None]] = {}
        self._work = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._generations: set[Generation] = set()
        self._last_heartbeat_s = 0.0

    # -- life --------------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open the side channel and run."""
        await self.server.open()
        self.stopped = False
        identity = Identity(self.engine_id, self.server.host, self.server.port)
        self.core = Core(self.config.core, self.pool, self.handoffs, identity, host=self.host, on_leak=self._on_leak)
        self._spawn(self._steps())
        self._spawn(self._leases())
        self._spawn(self._heartbeats())

    async def stop(self, end: str = "abort") -> None:
        """End everything at once; sequences under way end with ``end``."""
        self.stopped = True
        for generation in tuple(self._generations):
            if generation.end is None:
                generation._on_end(end)
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._known.values(), return_exceptions=True)
        await self.server.close()
        await self.client.close()

    async def die(self) -> None:
        """vLLM's EngineDeadError: what is under way fails, what comes is refused, health says so."""
        self._fail_all()
        await self.server.close()

    def _fail_all(self) -> None:
        self.dead = True
        for generation in tuple(self._generations):
            if generation.end is None:
                generation._on_end("dead")

    # -- requests ----------------------------------------------------------------------------------------------------------

    def submit(self, sequence: Sequence, *, stream: bool) -> Generation:
        """Queue a sequence. The caller closes it with finish() in any case."""
        generation = Generation(sequence, stream=stream)
        if self.dead:
            generation._on_end("dead")
            return generation
        self._generations.add(generation)
        now_s = time.monotonic()
        self.core.add(sequence, now_s)
        if sequence.wants_pull and now_s - self._last_heartbeat_s >= self._heartbeat_interval_s:
            self._spawn(self._heartbeat())
        self._work.set()
        return generation

    def finish(self, generation: Generation) -> None:
        """The consumer is done with it, or gone: an unfinished sequence is aborted."""
        self._generations.discard(generation)
        if generation.end is None and not self.dead and not self.stopped:
            self.core.abort(generation.sequence)
            self._effects()
            self._work.set()

    def reject(self, request_id: str, params: dict[str, Any]) -> None:
        """A request with a handoff failed before it came to the engine."""
        if not self.dead and not self.stopped:
            self.core.reject(request_id, params)
            self._effects()

    def violate(self, kind: str, request_id: str, detail: str) -> None:
        """Count something that was done wrong."""
        self.violations.add(kind, request_id, detail, time.time())

    # -- inside ------------------------------------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # A fault of ours must look like one: an engine that is dead, not one that is silent.
            _log.error("the simulated engine failed", exc_info=error)
            self._fail_all()

    async def _pause(self, seconds: float) -> None:
        if self.config.speed > 0 and seconds > 0:
            await asyncio.sleep(seconds * self._slow_factor() / self.config.speed)

    async def _steps(self) -> None:
        pacer = Pacer()
        try:
            await self._step_after_step(pacer)
        finally:
            pacer.close()

    async def _step_after_step(self, pacer: Pacer) -> None:
        profile, core = self.config.profile, self.core
        due_s = time.monotonic()
        while True:
            while not core.has_work():
                self._work.clear()
                await self._work.wait()
                due_s = max(due_s, time.monotonic())
            plan = core.plan(time.monotonic())
            self._effects()
            if not plan.work:
                # Only blocks that come free, or a pull that ends, can help.
                self._work.clear()
                await self._work.wait()
                continue
            if self.config.speed > 0:
                step_s = profile.step_s(
                    prefill_tokens=plan.prefill_tokens,
                    prefill_context_tokens=plan.prefill_context_tokens,
                    decodes=plan.decodes,
                    decode_context_tokens=plan.decode_context_tokens,
                )
                # From when the last step was due, so that the timer's coarseness does not add up.
                due_s = max(due_s, time.monotonic() - 0.05) + step_s * self._slow_factor() / self.config.speed
                await pacer.until(due_s)
            else:
                await asyncio.sleep(0)
            core.commit(plan, time.monotonic())
            self._effects()
            if self._on_step is not None:
                self._on_step(plan)

    def _effects(self) -> None:
        effects, self.core.effects = self.core.effects, []
        for effect in effects:
            self._spawn(self._do(effect))

    async def _do(self, effect: Effect) -> None:
        if isinstance(effect, Stuck):
            self.violate("turn_stuck", effect.request_id, "blocks of an answer, without bidirectional_kv_xfer")
            return
        if isinstance(effect, Load):
            async with self._host_free:
                await self._pause(self.config.profile.load_s(len(effect.kv) * self.config.core.block_size))
            self.core.loaded(effect.sequence, effect.kv)
            self._effects()
            self._work.set()
            return
        if isinstance(effect, Pull):
            kv = await self._pull(effect)
            self.core.pulled(effect.sequence, kv)
            self._effects()
            self._work.set()
            return
        params = effect.params
        if any(params.get(key) is None for key in DEATH_KEYS):
            self.violate("incomplete_params", effect.request_id, f"rejected with only {sorted(params)}")
            if self.config.strict_crash:
                await self.die()
            return
        try:
            host, port, engine_id = str(params["remote_host"]), int(params["remote_port"]), str(params["remote_engine_id"])
            answering, former = await self.client.call(host, port, "release", engine_id, str(params["remote_request_id"]))
            if answering != engine_id:
                kind = "engine_gone" if engine_id in former else "unknown_engine"
                self.violate(kind, effect.request_id, f"{engine_id} at {host}:{port}, where {answering} answers")
        except (ChannelError, TypeError, ValueError):
            self.transfers.failed_notifications += 1

    async def _pull(self, pull: Pull) -> list[Kv] | None:
        """What the remote blocks hold, or None."""
        sequence, params = pull.sequence, pull.sequence.kv_params or {}
        request_id = sequence.request_id
        missing = [key for key in DEATH_KEYS if params.get(key) is None]
        if not missing and not pull.remote_blocks:
            missing = ["blocks in remote_block_ids"]
        if missing:
            self.violate("incomplete_params", request_id, f"without {', '.join(missing)}")
            if self.config.strict_crash:
                await self.die()
            return None
        began_s = time.monotonic()
        host, engine_id = str(params["remote_host"]), str(params["remote_engine_id"])
        try:
            port = int(params["remote_port"])
            await self._handshake(host, port, engine_id)
            await self._pause(self.config.profile.transfer_s(pull.tokens))
            answering, former, kv, wrong = await self.client.call(
                host, port, "read", engine_id, str(params["remote_request_id"]), pull.remote_blocks
            )
            if answering != engine_id:
                kind = "engine_gone" if engine_id in former else "unknown_engine"
                self.violate(kind, request_id, f"{engine_id} at {host}:{port}, where {answering} answers")
                raise ChannelError(f"{host}:{port} is engine {answering}, not {engine_id}")
        except (ChannelError, TypeError, ValueError):
            self.transfers.failed += 1
            return None
        held = [Kv(context, data) for context, data in kv]
        expected = sequence.bytes_of(pull.until - pull.tokens, pull.until)
        if wrong is None and b"".join(block.tokens for block in held)[: len(expected)] != expected:
            wrong = "other_beginning" if pull.turn else "other_prompt"
        if wrong is None and pull.turn and not self._follows(pull, held):
            wrong = "other_beginning"
        if wrong is not None:
            self.violate(wrong, request_id, f"handoff {params['remote_request_id']} of engine {engine_id}")
        self.transfers.bytes.observe(pull.tokens * self.config.profile.kv_bytes_a_token)
        self.transfers.seconds.observe(time.monotonic() - began_s)
        return held

    def _follows(self, pull: Pull, held: list[Kv]) -> bool:
        """Whether each block was computed behind exactly the tokens that stand before it in the prompt."""
        size = self.config.core.block_size
        first = (pull.until - pull.tokens) // size
        return all(block.context == pull.sequence.context(first + index, size) for index, block in enumerate(held))

    async def _handshake(self, host: str, port: int, engine_id: str) -> None:
        key = (host, port, engine_id)
        task = self._known.get(key)
        if task is None:
            task = asyncio.create_task(self._pause(self.config.profile.handshake_s))
            self._known[key] = task
        await asyncio.shield(task)

    # -- the side channel --------------------------------------------------------------------------------------------------

    def _on_channel(self, operation: str, arguments: list[Any]) -> Any:
        if operation == "heartbeat":
            self.handoffs.heartbeat(arguments[0], time.monotonic())
            return None
        engine_id, request_id, *rest = arguments
        mine = engine_id == self.engine_id
        if operation == "release":
            if mine:
                self.handoffs.release(request_id)
                self._work.set()
            return [self.engine_id, list(self.former_ids)]
        if operation == "read":
            if not mine:
                return [self.engine_id, list(self.former_ids), [], None]
            read = self.handoffs.read(request_id, [int(block) for block in rest[0]])
            self.core.counters.late_notifications += read.late
            self._work.set()
            return [self.engine_id, [], [list(kv) for kv in read.kv], read.wrong]
        raise ChannelError(f"no operation {operation}")

    @property
    def _heartbeat_interval_s(self) -> float:
        return max(0.02, self.config.core.lease_s / 6)

    async def _heartbeats(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_interval_s)
            await self._heartbeat()

    async def _heartbeat(self) -> None:
        self._last_heartbeat_s = time.monotonic()
        peers: dict[tuple[str, int], list[str]] = {}
        for sequence in (*self.core.waiting, *self.core.pulling.values()):
            params = sequence.kv_params
            if not sequence.wants_pull or params is None or any(params.get(key) is None for key in HEARTBEAT_KEYS):
                continue
            try:
                peers.setdefault((str(params["remote_host"]), int(params["remote_port"])), []).append(
                    str(params["remote_request_id"])
                )
            except (TypeError, ValueError):
                continue
        for (host, port), request_ids in peers.items():
            self._spawn(self._send_heartbeat(host, port, request_ids))

    async def _send_heartbeat(self, host: str, port: int, request_ids: list[str]) -> None:
        try:
            await self.client.call(host, port, "heartbeat", request_ids)
        except ChannelError:
            self.transfers.failed_notifications += 1

    async def _leases(self) -> None:
        while True:
            await asyncio.sleep(min(0.25, max(0.01, self.config.core.lease_s / 20)))
            if self.handoffs.pinned:
                self.core.expire(time.monotonic())
                self._work.set()

    def _on_leak(self, kind: str, request_id: str, detail: str) -> None:
        self.violate(kind, request_id, detail)

    def state(self) -> dict[str, Any]:
        """What ``/sim/state`` shows."""
        core, pinned = self.core, self.handoffs.pinned
        return {
            "engine_id": self.engine_id,
            "dead": self.dead,
            "side_channel": [self.server.host, self.server.port],
            "total_blocks": self.pool.num_blocks - 1,
            "free_blocks": self.pool.free_blocks,
            "host_blocks": 0 if self.host is None else len(self.host),
            "pinned_blocks": len({block for handoff in pinned.values() for block in handoff.blocks}),
            "running": len(core.running),
            "waiting": len(core.waiting),
            "pulling": sum(s.status is Status.PULLING for s in core.pulling.values()),
            "requests": len(self._generations),
            "handoffs": [
                {"request_id": h.request_id, "blocks": len(h.blocks), "expires_in_s": h.expires_s - time.monotonic()}
                for h in pinned.values()
            ],
        }
