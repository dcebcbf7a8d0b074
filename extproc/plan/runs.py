"""One simulation of a candidate, or a search over several: what another process can do from its data alone."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from extproc.plan.candidates import Candidate
from extproc.plan.goodput_search import Highest, Stretch, highest_rate, share_at
from extproc.plan.question import Question
from extproc.plan.simulate import Quantiles, Simulated, simulate
from workers.goodput import Outcome, Status
from workers.traces import Request

_FEWEST = 20

_Task = TypeVar("_Task")
_Found = TypeVar("_Found")


@dataclass(frozen=True, kw_only=True)
class Search:
    """Find the highest good rate of a candidate."""

    question: Question
    candidate: Candidate
    stretch: Stretch
    seed: int
    guess_per_s: float
    resolution: float
    step: float


@dataclass(frozen=True, kw_only=True)
class Look:
    """See what a candidate does at a rate."""

    question: Question
    candidate: Candidate
    stretch: Stretch
    seed: int
    rate_per_s: float


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one run showed. Shares are of the counted requests."""

    rate_per_s: float
    requests: int
    good: float
    late: float
    """Over the TTFT SLO, whatever their ITL, refused ones included."""
    slow: float
    """Over the ITL SLO, whatever their TTFT."""
    good_tokens_per_s: float
    """Output tokens of good requests."""
    ttft_s: Quantiles
    itl_s: Quantiles
    """Of all gaps."""
    itl_p99_s: Quantiles
    """Over requests, of each one's own 99th percentile."""
    hit_ratio: float
    """Of prompt tokens, those found in a cache."""
    prefill_busy: float | None
    decode_busy: float
    link_busy: float | None
    kv_peak: float
    preemptions: int


def search(task: Search) -> Highest:
    """Raises PlanError."""
    question = task.question

    def run(requests: Sequence[Request]) -> Sequence[Outcome]:
        return simulate(task.candidate.arrangement, requests, question.slos, seed=task.seed).outcomes if requests else []

    at = share_at(
        run,
        question.workload,
        task.stretch,
        seed=task.seed,
        ttft_slo_s=question.slos.ttft_s,
        itl_slo_s=question.slos.itl_s,
    )
    # Of fewer requests there is no share to speak of.
    lowest_per_s = max(task.candidate.hard_bound_per_s / 100, _FEWEST / task.stretch.counted_s)
    return highest_rate(
        at,
        guess_per_s=max(task.guess_per_s, lowest_per_s),
        share=question.share,
        resolution=task.resolution,
        step=task.step,
        lowest_per_s=lowest_per_s,
    )


def look(task: Look) -> Seen:
    """Raises PlanError."""
    question, stretch, rate_per_s = task.question, task.stretch, task.rate_per_s
    requests = question.workload.requests(rate_per_s, stretch.duration_s, task.seed)
    part = question.workload.cut_to(stretch.duration_s, rate_per_s) / stretch.duration_s
    found = simulate(
        task.candidate.arrangement,
        requests,
        question.slos,
        seed=task.seed,
        counted=lambda outcomes: stretch.counted(outcomes, part),
    )
    return _seen(found, question, rate_per_s)


def _seen(found: Simulated, question: Question, rate_per_s: float) -> Seen:
    slos, outcomes = question.slos, found.outcomes
    count = max(1, len(outcomes))
    late = sum(each.status is not Status.SERVED or each.ttft_s is None or each.ttft_s > slos.ttft_s for each in outcomes)
    slow = sum(each.itl_p99_s is not None and each.itl_p99_s > slos.itl_s for each in outcomes)
    good_tokens = sum(each.output_tokens for each in outcomes if each.good(slos.ttft_s, slos.itl_s))
    return Seen(
        rate_per_s=rate_per_s,
        requests=len(outcomes),
        good=found.goodput,
        late=late / count,
        slow=slow / count,
        good_tokens_per_s=good_tokens / count * rate_per_s,
        ttft_s=found.ttft_s,
        itl_s=found.itl_s,
        itl_p99_s=found.itl_p99_s,
        hit_ratio=found.cached_tokens / found.prompt_tokens if found.prompt_tokens else 0.0,
        prefill_busy=found.prefill_busy,
        decode_busy=found.decode_busy,
        link_busy=found.link_busy,
        kv_peak=found.kv_peak,
        preemptions=found.preemptions,
    )


class Runner:
    """Does tasks, in this process or in several, in an order that the results do not depend on."""

    def __init__(self, executor: Executor | None) -> None:
        self._executor = executor

    def all(self, do: Callable[[_Task], _Found], tasks: Sequence[_Task], done: Callable[[], None]) -> list[_Found]:
        """The results, in the order of the tasks; ``done`` is called after each."""
        found: list[_Found] = []
        for each in map(do, tasks) if self._executor is None else self._executor.map(do, tasks):
            found.append(each)
            done()
        return found


@contextmanager
def runner(processes: int) -> Iterator[Runner]:
    """With as many processes; 1: this one."""
    if processes == 1:
        yield Runner(None)
        return
    # Forked from a clean server: this process may have threads, and a spawned one would import everything each time.
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("forkserver")) as executor:
        yield Runner(executor)
