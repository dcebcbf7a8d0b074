"""All searches of a run, in as many processes as there are cores; the longest begin first."""

from __future__ import annotations

import multiprocessing
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from bench.overhead.machine import machine
from bench.plan_tables import report
from bench.plan_tables.cluster import NOTHING_SHARED, Constants, Row, rows, variants
from bench.plan_tables.measure import Measured, measure
from bench.plan_tables.results import Results
from extproc.plan.goodput_search import Stretch

Say = Callable[[str], None]

FULL = Stretch(warm_up_s=60, counted_s=60, cool_down_s=10)
"""Of each run; the shared prefixes come before it."""
_QUICK = Stretch(warm_up_s=5, counted_s=15, cool_down_s=5)
_RESOLUTION, _QUICK_RESOLUTION = 0.03, 0.15
_LOOK_S = 0.2
"""How often it is looked whether something is done."""


@dataclass(frozen=True)
class Job:
    """One search."""

    group: str
    row: Row
    seed: int


def jobs(seeds: Sequence[int]) -> list[Job]:
    """Those of a run: the five rows with every seed, the rest with the first. What serves most takes longest and goes first."""
    first = seeds[0]
    found = [
        *(Job("main", row, seed) for seed in seeds for row in rows(Constants())),
        *(Job(title, row, first) for title, row in variants().items()),
        # Colocated workers that cache nothing do not see whether prompts share anything.
        *(Job("nothing shared", row, first) for row in rows(NOTHING_SHARED) if row.key != "colocated"),
    ]
    return sorted(found, key=lambda job: (job.group != "main", -job.row.guess_per_s))


@contextmanager
def pool(processes: int) -> Iterator[tuple[Executor, queue.Queue[str]]]:
    """Processes to search in, and what they say meanwhile; they are ended if the block fails."""
    context = multiprocessing.get_context("forkserver")
    with context.Manager() as manager, ProcessPoolExecutor(processes, mp_context=context) as executor:
        try:
            yield executor, manager.Queue()
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
            raise


def run(*, seeds: Sequence[int], quick: bool, executor: Executor, lines: queue.Queue[str], say: Say) -> Results:
    """Raises PlanError."""
    stretch, resolution = (_QUICK, _QUICK_RESOLUTION) if quick else (FULL, _RESOLUTION)
    todo = jobs(seeds)
    say(f"{len(todo)} searches, seeds {_words(seeds)}, {stretch.counted_s:g} s of each run counted")
    done: dict[tuple[str, str, int], Measured] = {}
    waiting = {executor.submit(_search, job, stretch, resolution, lines): job for job in todo}
    while waiting:
        _pass_on(lines, say)
        for future in [each for each in waiting if each.done()]:
            job, measured = waiting.pop(future), future.result()
            done[job.group, job.row.key, job.seed] = measured
            say(f"{job.group}, seed {job.seed}, {report.summary(measured)}; {len(waiting)} searches left")
        time.sleep(_LOOK_S)
    first = seeds[0]
    done["nothing shared", "colocated", first] = done["main", "colocated", first]
    keys = [row.key for row in rows(Constants())]
    return Results(
        seeds=list(seeds),
        quick=quick,
        machine=machine(),
        cpu_s=round(sum(done[job.group, job.row.key, job.seed].cpu_s for job in todo)),
        main=[[done["main", key, seed] for seed in seeds] for key in keys],
        variants={title: done[title, row.key, first] for title, row in variants().items()},
        nothing_shared=[done["nothing shared", key, first] for key in keys],
    )


def _words(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds))


def _search(job: Job, stretch: Stretch, resolution: float, lines: queue.Queue[str]) -> Measured:
    return measure(
        job.row,
        stretch,
        seed=job.seed,
        resolution=resolution,
        say=lambda text: lines.put(f"  {job.group}, seed {job.seed}, {text}"),
    )


def _pass_on(lines: queue.Queue[str], say: Say) -> None:
    while not lines.empty():
        say(lines.get())
