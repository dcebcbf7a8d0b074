"""The run: every request is sent when it is due, whatever became of those before it (an open loop); all ends are awaited."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from extproc.loadgen.own import Own, Watch, now_s
from extproc.loadgen.sample import Kind, Sample
from extproc.loadgen.send import send
from workers.traces import Request

_AHEAD_BYTES = 256 << 20
"""So much of the bodies is made before the first is sent: making a long one takes milliseconds, in which no token is seen."""
_LEAD_S = 0.1
_PROGRESS_S = 1.0
_SPARE_FILES = 64


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to send."""

    url: str
    requests: Sequence[Request]
    body: Callable[[Request], bytes]
    headers: Mapping[str, str]
    """Of all requests."""
    drawn: Sequence[Mapping[str, str]]
    """Of each request, beside those."""
    max_in_flight: int | None = None
    """More are not sent, and count as failed; None: as many as come."""
    answer_header: str | None = None
    """Of the answers, that the report is broken down by."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run is."""

    at_s: float
    sent: int
    in_flight: int
    served: int
    failed: int
    of: int


@dataclass(frozen=True, kw_only=True)
class Run:
    """What came of it."""

    samples: list[Sample]
    own: Own
    wall_s: float
    """From the first request's start to the last end."""
    interrupted: bool
    peak_in_flight: int
    notes: list[str] = field(default_factory=list)


class Runner:
    """One run. :meth:`interrupt` ends it early; what there is by then is reported."""

    def __init__(self, plan: Plan, progress: Callable[[Progress], None] = lambda _: None) -> None:
        self._plan = plan
        self._progress = progress
        self._stop = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._counts: Counter[Kind] = Counter()
        self._samples: list[Sample] = []
        self._peak = 0
        self._bug: BaseException | None = None

    def interrupt(self) -> None:
        """Send no more, and let go of what is under way."""
        self._stop.set()

    async def run(self, http: aiohttp.ClientSession) -> Run:
        """Send all of them, and wait for all ends."""
        plan = self._plan
        notes = []
        ready, short = _ahead(plan)
        if short:
            notes.append("the bodies are too many to make beforehand: some are made while requests are under way")
        if fault := _few_files(plan):
            notes.append(fault)
        start_s = now_s() + _LEAD_S
        telling = asyncio.create_task(self._tell(start_s))
        try:
            async with Watch() as watch:
                for number, request in enumerate(plan.requests):
                    body = next(ready)
                    if not await self._until(start_s + request.at_s):
                        break
                    self._start(http, number, request, body, start_s)
                stopped = asyncio.create_task(self._stop.wait())
                ended = asyncio.gather(*self._tasks, return_exceptions=True)
                waited: set[asyncio.Future[Any]] = {ended, stopped}
                await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                stopped.cancel()
                for task in tuple(self._tasks):
                    task.cancel()
                await ended
        finally:
            telling.cancel()
        if self._bug is not None:
            raise self._bug
        late_s = [sample.sent_s - sample.due_s for sample in self._samples if sample.sent_s is not None]
        return Run(
            samples=self._samples,
            own=watch.own(late_s),
            wall_s=now_s() - start_s,
            interrupted=self._stop.is_set(),
            peak_in_flight=self._peak,
            notes=notes,
        )

    async def _until(self, due_at_s: float) -> bool:
        """Wait; False: the run has been interrupted."""
        left_s = due_at_s - now_s()
        if left_s > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), left_s)
        elif len(self._samples) % 16 == 15:
            await asyncio.sleep(0)  # behind time: answers must be read all the same
        return not self._stop.is_set()

    def _start(self, http: aiohttp.ClientSession, number: int, request: Request, body: bytes, start_s: float) -> None:
        plan = self._plan
        drawn = plan.drawn[number]
        sample = Sample(
            due_s=request.at_s,
            asked_input_tokens=request.input_tokens,
            asked_output_tokens=request.output_tokens,
            groups=dict(drawn),
        )
        self._samples.append(sample)
        if plan.max_in_flight is not None and len(self._tasks) >= plan.max_in_flight:
            sample.kind, sample.code = Kind.UNSENT, "max-in-flight"
            sample.message = f"{plan.max_in_flight} requests were in flight"
            self._counts[sample.kind] += 1
            return
        task = asyncio.create_task(
            send(
                http,
                plan.url,
                body,
                {"content-type": "application/json", **plan.headers, **drawn},
                sample,
                start_s + request.at_s,
                answer_header=plan.answer_header,
            )
        )
        self._tasks.add(task)
        self._peak = max(self._peak, len(self._tasks))

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            self._counts[sample.kind] += 1
            if not task.cancelled() and (error := task.exception()) is not None:
                self._bug = error  # whatever a server does has a name; this is none of it
                self._stop.set()

        task.add_done_callback(ended)

    async def _tell(self, start_s: float) -> None:
        while True:
            await asyncio.sleep(_PROGRESS_S)
            served = self._counts[Kind.SERVED]
            self._progress(
                Progress(
                    at_s=max(0.0, now_s() - start_s),
                    sent=len(self._samples) - self._counts[Kind.UNSENT],
                    in_flight=len(self._tasks),
                    served=served,
                    failed=self._counts.total() - served,
                    of=len(self._plan.requests),
                )
            )


def _ahead(plan: Plan) -> tuple[Iterator[bytes], bool]:
    """All bodies, in order: those that fit made now, the others when they are due; and whether there are such others."""
    made: list[bytes] = []
    size = 0
    for request in plan.requests:
        if size > _AHEAD_BYTES:
            break
        made.append(plan.body(request))
        size += len(made[-1])
    rest = plan.requests[len(made) :]

    def bodies() -> Iterator[bytes]:
        made.reverse()
        while made:
            yield made.pop()  # and so its memory goes when it has been sent
        yield from map(plan.body, rest)

    return bodies(), bool(rest)


def _few_files(plan: Plan) -> str | None:
    """Raise the limit of open files as far as it goes; what to say where that may not be enough."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    most = min(len(plan.requests), plan.max_in_flight or len(plan.requests))
    if hard != resource.RLIM_INFINITY and most + _SPARE_FILES > hard:
        return f"this process may open {hard} files: with more requests in flight than that, some fail as connections"
    return None
