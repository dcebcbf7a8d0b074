"""One run: the plan carried out, and everything checked at its end."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field

import aiohttp

from tests.chaos import judge, plan
from tests.chaos.judge import Outcome, ProblemError
from tests.chaos.plan import Request
from tests.chaos.world import HUNG_S, LEASE_S, World, prompt_of
from tests.stack.harness import BODY_MODE

PREFILL, DECODE = 3, 3
_CALM = 60


@dataclass
class Report:
    """What came of a run."""

    seed: int
    seconds: float = 0.0
    slowest_s: float = 0.0
    """The longest request."""
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    excused: Counter[str] = field(default_factory=Counter)
    metrics: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    log: str = ""
    """The filter's."""


class Clients:
    """Sends requests and judges what comes of them."""

    def __init__(self, world: World, report: Report) -> None:
        self._world = world
        self._report = report
        self.open = 0
        self.sent = 0

    async def one(self, request: Request) -> None:
        """One client from its first byte to its end."""
        self.sent += 1
        self.open += 1
        outcome = Outcome(request, time.time(), 0.0)
        if prompt := prompt_of(request.body):
            self._world.outcomes[prompt] = outcome
        try:
            async with asyncio.timeout(HUNG_S):
                await self._send(request, outcome)
        except TimeoutError:
            outcome.hung = True
        except (aiohttp.ClientError, OSError) as error:
            outcome.broken = f"{type(error).__name__}: {error}"
        finally:
            self.open -= 1
        outcome.ended_s = time.time()
        self._report.slowest_s = max(self._report.slowest_s, outcome.ended_s - outcome.began_s)
        try:
            word = judge.verdict(outcome, self._world)
        except ProblemError as problem:
            word = "PROBLEM"
            took_s = outcome.ended_s - outcome.began_s
            what = f"at {outcome.began_s:.2f} for {took_s:.2f} s, {request.kind}, {request.path}, decode {outcome.decode}"
            self._report.problems.append(
                f"{what}: {problem}; wrong: {self._world.wrong(outcome.began_s - 2.0, outcome.ended_s)}"
            )
        self._report.outcomes[word] += 1

    async def _send(self, request: Request, outcome: Outcome) -> None:
        task = asyncio.create_task(self._exchange(request, outcome))
        done, _ = await asyncio.wait((task,), timeout=request.leave_after_s)
        try:
            if done:
                await task
            else:
                outcome.left = True
        finally:
            task.cancel()
            await asyncio.wait((task,))

    async def _exchange(self, request: Request, outcome: Outcome) -> None:
        http = self._world.stack.http
        async with http.post(request.path, data=request.body, headers=request.headers) as response:
            outcome.status = response.status
            outcome.content_type = response.headers.get("content-type", "")
            outcome.decode = response.headers.get("x-decode-endpoint", "")
            chunks = 0
            async for data in response.content.iter_any():
                outcome.body += data
                chunks += 1
                if request.leave_after_chunks is not None and chunks >= request.leave_after_chunks:
                    outcome.left = True
                    response.close()
                    return


async def run(seed: int, *, requests: int, seconds: float, quiet: bool = False, body_mode: str = BODY_MODE) -> Report:
    """Carry out the plan of a seed. ``body_mode``: how Envoy shows bodies to the filter (``envoy.body_mode``)."""
    report = Report(seed)
    made = plan.make(seed, requests=requests, duration_s=seconds, prefill=PREFILL, decode=DECODE)
    settings = {
        "prefill": {
            "fallback": ("fail", "aggregate")[seed % 2],
            "tokenise_once": seed % 4 < 2,
            # Without one, a handoff that is read after its lease is not cut short by a timeout of the call.
            "attempt_timeout_s": (1.0, 1.0, None)[seed % 3],
        },
        "envoy": {"body_mode": body_mode},
    }
    began = time.monotonic()
    async with World(PREFILL, DECODE, settings) as world:
        clients = Clients(world, report)
        progress = asyncio.create_task(_progress(world, clients, report, len(made.requests), quiet))
        try:
            await _storm(world, clients, made)
            await world.heal()
            await asyncio.sleep(1.0)
            # What was wrong is over: nothing excuses a failure from here on.
            world.past, world.troubles = world.troubles, []
            await asyncio.gather(*(clients.one(request) for request in plan.calm(seed, _CALM)))
            world.troubles = world.past
            await _leaks(world, report)
        finally:
            progress.cancel()
        for sim in world.sims:
            sim.collect()
        problems, excused = judge.complaints(world)
        report.problems += problems
        report.excused.update(excused)
        report.faults.update(world.hits)
        await world.count()
        report.metrics = world.counters
        report.log = log = world.log()
        if '"internal_error"' in log or "Traceback" in log:
            lines = [line for line in log.splitlines() if '"internal_error"' in line or "Traceback" in line]
            report.problems += [f"the filter's log has an exception: {line}" for line in lines]
    report.seconds = time.monotonic() - began
    return report


async def _storm(world: World, clients: Clients, made: plan.Plan) -> None:
    """Requests and faults, each at its time; returns when all clients are through."""
    start = time.monotonic()
    events = sorted([*made.requests, *made.faults], key=lambda event: event.at_s)
    async with asyncio.TaskGroup() as group:
        for event in events:
            wait_s = start + event.at_s - time.monotonic()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            if isinstance(event, Request):
                group.create_task(clients.one(event))
            else:
                world.do(event)


async def _leaks(world: World, report: Report) -> None:
    """Nothing may be held when nothing is asked for."""
    if not await world.stack.released(LEASE_S + 2.0):
        report.problems.append(f"{world.stack.pinned()} blocks are pinned still")
    deadline = time.monotonic() + 5.0
    while held := {**_held(world), **await _counted(world)}:
        if time.monotonic() > deadline:
            report.problems.append(f"still held: {held}")
            return
        await asyncio.sleep(0.1)


def _held(world: World) -> dict[str, int]:
    held = {}
    for sim in world.sims:
        state = sim.worker.engine.state()
        for key in ("running", "waiting", "pulling", "requests"):
            held[f"{sim.name} {key}"] = state[key]
        held[f"{sim.name} blocks"] = state["total_blocks"] - state["free_blocks"]
    return {key: value for key, value in held.items() if value}


async def _counted(world: World) -> dict[str, float]:
    names = ("baton_endpoint_in_flight", "baton_streams", "baton_prefills_in_flight")
    return {name: value for name, value in (await world.stack.metrics()).items() if name.startswith(names) and value}


async def _progress(world: World, clients: Clients, report: Report, total: int, quiet: bool) -> None:
    began = time.monotonic()
    while not quiet:
        await asyncio.sleep(2.0)
        now_s = time.time()
        wrong = sorted({f"{t.kind} {t.where}" for t in world.troubles if t.from_s <= now_s <= t.to_s})
        print(
            f"{time.monotonic() - began:5.0f} s  {clients.sent}/{total} sent, {clients.open} open, "
            f"{report.outcomes['right']} right, {len(report.problems)} problems; {', '.join(wrong) or 'all well'}",
            flush=True,
        )
