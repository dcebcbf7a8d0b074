"""Threads that poll without rest go behind those that compute. Linux only.

NIXL's agent has a thread that asks UCX for progress all the time (its delay between two questions is 0, and vLLM has no option
for it). On a machine with GPUs it has a core of the host to itself. Where one core is all that a worker has, it would have half
of what is to compute. So it comes after the others: a tenth of the core while these compute, and all of it while they wait.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

_BUSY = 0.2
"""A thread that computes nothing and still takes this share of a core polls."""
_LATER = 10
"""Nice value: a tenth of the weight of 0. At 19, transfers would wait for their turn beside an engine that computes."""


def polling(pids: Iterable[int], over_s: float) -> list[int]:
    """Ids of the threads, main threads aside, that are busy for ``over_s`` although nothing is asked of these processes."""
    found = list(pids)
    before = {thread: used_s for pid in found for thread, used_s in _used(pid).items()}
    time.sleep(over_s)
    after = {thread: used_s for pid in found for thread, used_s in _used(pid).items()}
    return sorted(thread for thread, used_s in after.items() if used_s - before.get(thread, used_s) > _BUSY * over_s)


def put_behind(threads: Iterable[int]) -> int:
    """Give them a lower priority; returns how many there were."""
    count = 0
    for thread in threads:
        try:
            if os.getpriority(os.PRIO_PROCESS, thread) < _LATER:
                os.setpriority(os.PRIO_PROCESS, thread, _LATER)
        except ProcessLookupError:
            continue
        count += 1
    return count


def _used(pid: int) -> dict[int, float]:
    """Thread -> processor time in seconds, without the main thread."""
    used: dict[int, float] = {}
    ticks_a_s = os.sysconf("SC_CLK_TCK")
    try:
        entries = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return {}
    for entry in entries:
        if entry.name == str(pid):
            continue
        try:
            fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            continue
        used[int(entry.name)] = (int(fields[11]) + int(fields[12])) / ticks_a_s
    return used
