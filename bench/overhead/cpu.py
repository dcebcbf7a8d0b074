"""Processor time of processes, finer than the ticks of the system, and their memory. Linux only."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from workers.process import Child

WATCHER = "watcher"
"""Baton's second process, which looks at a sample of the streams."""


class Meter:
    """Adds up what the processes of some children use, under names of ours; several children can share a name."""

    def __init__(self, children: Iterable[tuple[str, Child]]) -> None:
        self._pids: dict[str, list[int]] = {}
        for name, child in children:
            for pid in child.pids():
                self._pids.setdefault(WATCHER if _is_watcher(pid) else name, []).append(pid)

    def cpu_s(self) -> dict[str, float]:
        """Seconds since they started, by name."""
        return {name: sum(map(process_cpu_s, pids)) for name, pids in self._pids.items()}

    def memory_mb(self) -> dict[str, float]:
        """What they hold of the machine's memory now, by name; pages that they share are counted once."""
        return {name: sum(map(_memory_mb, pids)) for name, pids in self._pids.items()}


def spent(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """``after`` less ``before``, by name."""
    return {name: after[name] - before[name] for name in before}


def _is_watcher(pid: int) -> bool:
    with suppress(OSError):
        return b"stream_watch" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def process_cpu_s(pid: int) -> float:
    """Of all threads that live now: to the nanosecond, where a process's own sum has steps of 10 ms."""
    total_ns = 0
    with suppress(OSError, ValueError, IndexError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):
                total_ns += int((task / "schedstat").read_text(encoding="ascii").split()[0])
    return total_ns / 1e9


def _memory_mb(pid: int) -> float:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    with suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)
    return 0.0
