"""Which cores a worker runs on.

vLLM's NIXL connector moves its worker to the highest core of the machine, every worker to the same one. There they and
their UCX progress threads (which poll without rest) starve each other: on two cores about one decode in five stalls for
30 to 45 s. So each worker's whole process tree gets cores of its own, once it is up. Linux only.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

log = logging.getLogger(__name__)


def usable() -> list[int]:
    """The cores that this process may use, in order; empty where that cannot be told (not Linux)."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    return sorted(os.sched_getaffinity(0))


def spread(workers: int, cores: Sequence[int]) -> list[tuple[int, ...]]:
    """Cores for each worker: an even contiguous share, or one each in turn where there are more workers than cores."""
    if workers < 1 or not cores:
        return [()] * max(workers, 0)
    if workers >= len(cores):
        return [(cores[worker % len(cores)],) for worker in range(workers)]
    share, rest = divmod(len(cores), workers)
    parts, start = [], 0
    for worker in range(workers):
        end = start + share + (worker < rest)
        parts.append(tuple(cores[start:end]))
        start = end
    return parts


def pin(pids: Iterable[int], cores: Sequence[int]) -> int:
    """Put every thread of these processes on ``cores``; returns how many threads. A no-op if not on Linux.

    Threads made later inherit the affinity of the thread that makes them, so once after start-up is enough.
    """
    if not hasattr(os, "sched_setaffinity"):
        log.warning("this system cannot pin processes to cores; workers may stall each other")
        return 0
    if not cores:
        return 0
    pinned = 0
    for pid in pids:
        for thread in _threads(pid):
            try:
                os.sched_setaffinity(thread, cores)
                pinned += 1
            except ProcessLookupError:
                continue  # it has ended since it was listed
            except OSError as error:
                log.warning("thread %d of process %d stays where it is: %s", thread, pid, error)
    return pinned


def _threads(pid: int) -> list[int]:
    try:
        return [int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []
