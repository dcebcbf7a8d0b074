"""One bench from its options to its report: wires the parts together."""

from __future__ import annotations

import asyncio
import math
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from extproc.loadgen import prompts
from extproc.loadgen.account import Report, report
from extproc.loadgen.arrivals import Gaps, Stage
from extproc.loadgen.errors import BenchError
from extproc.loadgen.headers import Drawn, draw
from extproc.loadgen.prompts import PATHS, Api, Scale
from extproc.loadgen.run import Plan, Progress, Run, Runner
from extproc.loadgen.sample import Sample
from extproc.loadgen.target import Target, measured_scale, only_model
from extproc.plan.workload import Workload
from workers import goodput
from workers.traces import Request


@dataclass(frozen=True, kw_only=True)
class Load:
    """When requests come, and how long they are."""

    gaps: Gaps
    rate_per_s: float | None = None
    duration_s: float | None = None
    limit: int | None = None
    """Requests at most."""
    stages: Sequence[Stage] | None = None
    """In place of rate and duration."""
    trace: Path | None = None
    offset: int = 0
    workload: Workload | None = None
    """Lengths and prefixes, where there is no trace."""
    seed: int = 0

    def requests(self) -> tuple[list[Request], float]:
        """The requests, and the time in which they come, in seconds. Raises BenchError."""
        if self.stages is not None and (self.rate_per_s is not None or self.duration_s is not None):
            raise BenchError("stages have their own rates and durations: neither --rate nor --duration goes with them")
        if self.trace is not None:
            requests = prompts.of_trace(
                self.trace,
                limit=self.limit,
                offset=self.offset,
                rate_per_s=self.rate_per_s,
                duration_s=self.duration_s,
                stages=self.stages,
                gaps=self.gaps,
                seed=self.seed,
            )
            last_s = requests[-1].at_s
            # After the last one comes the gap in which the next would have come.
            return requests, last_s * len(requests) / (len(requests) - 1) if len(requests) > 1 else last_s
        if self.workload is None:
            raise BenchError("either a trace or the lengths of prompts and answers are needed")
        stages = self.stages
        if stages is None:
            stages = (Stage(self._rate_per_s, self._rate_per_s, self._long_enough_s),)
        requests = prompts.scheduled(self.workload, stages, self.gaps, seed=self.seed, limit=self.limit)
        span_s = math.fsum(stage.duration_s for stage in stages)
        if self.limit is not None and len(requests) == self.limit:
            span_s = min(span_s, requests[-1].at_s * (1 + 1 / self.limit))
        return requests, span_s

    @property
    def text(self) -> str:
        """In words."""
        if self.stages is not None:
            when = ", then ".join(
                f"{stage.first_per_s:g}"
                + (f" to {stage.last_per_s:g}" if stage.last_per_s != stage.first_per_s else "")
                + f"/s for {stage.duration_s:g} s"
                for stage in self.stages
            )
            when = f"{self.gaps.text}, {when}"
        elif self.trace is not None:
            when = "at its own times" if self.rate_per_s is None else f"scaled to {self.rate_per_s:g}/s"
        else:
            when = f"{self.gaps.text}, {self._rate_per_s:g}/s"
        if self.trace is not None:
            return f"{self.trace.name}, {when}"
        return f"{when}; {self.workload.text if self.workload is not None else ''}"

    @property
    def _rate_per_s(self) -> float:
        rate = 1.0 if self.rate_per_s is None else self.rate_per_s
        if rate <= 0:
            raise BenchError(f"rate: more than 0 requests/s, not {rate:g}")
        return rate

    @property
    def _long_enough_s(self) -> float:
        if self.duration_s is not None:
            return self.duration_s
        if self.limit is None:
            return 30.0
        # For that many requests, whatever the draw: six standard deviations and some.
        return (self.limit + 6 * max(1.0, self.gaps.variation) * math.sqrt(self.limit) + 20) / self._rate_per_s


@dataclass(frozen=True, kw_only=True)
class Options:
    """Everything that is asked for."""

    target: Target
    load: Load
    api: Api = "chat"
    model: str | None = None
    """None: the one that is there."""
    headers: Mapping[str, str] = field(default_factory=dict)
    drawn: Sequence[Drawn] = ()
    answer_header: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    ignore_eos: bool = True
    tokens_per_word: float | None = None
    """None: the engine is asked."""
    timeout_s: float = 600.0
    max_in_flight: int | None = None
    keep_alive: bool = True
    ttft_slo_s: float = goodput.TTFT_SLO_S
    itl_slo_s: float = goodput.ITL_SLO_S


def bench(
    options: Options, *, say: Callable[[str], None] = lambda _: None, progress: Callable[[Progress], None] = lambda _: None
) -> tuple[Report, list[Sample]]:
    """Run it, in an event loop of its own. Raises BenchError where it cannot begin; what goes wrong later is in the report."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        return loop.run(run(options, say=say, progress=progress))


async def run(
    options: Options, *, say: Callable[[str], None] = lambda _: None, progress: Callable[[Progress], None] = lambda _: None
) -> tuple[Report, list[Sample]]:
    """The same, in the loop that runs. The first SIGINT ends it with a report of what there is by then."""
    load = options.load
    requests, span_s = load.requests()
    drawn = draw(options.drawn, len(requests), load.seed)
    base = options.target.base
    async with options.target.session(timeout_s=options.timeout_s, keep_alive=options.keep_alive) as http:
        model = options.model or await only_model(http, base, options.headers)
        scale = await _scale(options, http, model, say)
        plan = Plan(
            url=base + PATHS[options.api],
            requests=requests,
            body=lambda request: prompts.body(
                request,
                api=options.api,
                model=model,
                seed=load.seed,
                scale=scale,
                ignore_eos=options.ignore_eos,
                extra=options.extra,
            ),
            headers=options.headers,
            drawn=drawn,
            max_in_flight=options.max_in_flight,
            answer_header=options.answer_header,
        )
        say(f"{len(requests)} requests in {span_s:.0f} s to {plan.url}: {load.text}")
        done = await _interruptible(Runner(plan, progress), http)
    found = report(
        done,
        target=base,
        model=model,
        api=options.api,
        load=load.text,
        seed=load.seed,
        span_s=span_s,
        ttft_slo_s=options.ttft_slo_s,
        itl_slo_s=options.itl_slo_s,
    )
    return found, done.samples


async def _scale(options: Options, http: aiohttp.ClientSession, model: str, say: Callable[[str], None]) -> Scale:
    if options.tokens_per_word is not None:
        return Scale(tokens_per_word=options.tokens_per_word)
    scale = await measured_scale(http, options.target.base, options.api, model, options.headers)
    say(
        f"two requests asked how {model} counts: {scale.tokens_per_word:.2f} tokens a word, "
        f"{scale.around_tokens} around a prompt"
    )
    return scale


async def _interruptible(runner: Runner, http: aiohttp.ClientSession) -> Run:
    loop = asyncio.get_running_loop()
    try:
        loop.add_signal_handler(signal.SIGINT, runner.interrupt)
        loop.add_signal_handler(signal.SIGTERM, runner.interrupt)
    except (RuntimeError, ValueError, NotImplementedError):
        return await runner.run(http)  # not in the main thread: nobody's keyboard ends it
    try:
        return await runner.run(http)
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        loop.remove_signal_handler(signal.SIGTERM)
