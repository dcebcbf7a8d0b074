"""All searches of a run, in as many processes as there are cores; the longest begin first."""

from __future__ import annotations

import multiprocessing
import queue
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from bench.overhead.machine import machine
from bench.plan_tables import report
from bench.plan_tables.cluster import LONG_CHUNKS, NOTHING_SHARED, Constants, Row, rows
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


def jobs() -> list[Job]:
    """Those of a run. What serves most has most to simulate, and goes first."""
    found = [
        *(Job("main", row) for row in rows(Constants())),
        *(Job("chunks of 2,048", row) for row in rows(LONG_CHUNKS) if row.key == "chunked"),
        # Colocated workers that cache nothing do not see whether prompts share anything.
        *(Job("nothing shared", row) for row in rows(NOTHING_SHARED) if row.key != "colocated"),
    ]
    return sorted(found, key=lambda job: (job.group != "main", -job.row.guess_per_s))


def run(*, seed: int, quick: bool, processes: int, say: Say) -> Results:
    """Raises PlanError."""
    stretch = _QUICK if quick else FULL
    todo = jobs()
    say(f"{len(todo)} searches in {processes} processes, seed {seed}, {stretch.counted_s:g} s of each run counted")
    done: dict[tuple[str, str], Measured] = {}
    context = multiprocessing.get_context("forkserver")
    with context.Manager() as manager, ProcessPoolExecutor(processes, mp_context=context) as pool:
        lines = manager.Queue()
        resolution = _QUICK_RESOLUTION if quick else _RESOLUTION
        waiting = {pool.submit(_search, job, stretch, seed, resolution, lines): job for job in todo}
        try:
            while waiting:
                _pass_on(lines, say)
                for future in [each for each in waiting if each.done()]:
                    job, measured = waiting.pop(future), future.result()
                    done[job.group, job.row.key] = measured
                    say(f"{job.group}, {report.summary(measured)}; {len(waiting)} searches left")
                time.sleep(_LOOK_S)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
            raise
    done["nothing shared", "colocated"] = done["main", "colocated"]
    keys = [row.key for row in rows(Constants())]
    return Results(
        seed=seed,
        quick=quick,
        machine=machine(),
        main=[done["main", key] for key in keys],
        long_chunks=done["chunks of 2,048", "chunked"],
        nothing_shared=[done["nothing shared", key] for key in keys],
    )


def _search(job: Job, stretch: Stretch, seed: int, resolution: float, lines: queue.Queue[str]) -> Measured:
    return measure(job.row, stretch, seed=seed, resolution=resolution, say=lambda text: lines.put(f"  {job.group}, {text}"))


def _pass_on(lines: queue.Queue[str], say: Say) -> None:
    while not lines.empty():
        say(lines.get())
