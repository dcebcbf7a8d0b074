"""Which cores workers get, and that every thread really runs there."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from workers import cores
from workers.process import Child


@pytest.mark.parametrize(
    ("workers", "available", "expected"),
    [
        (2, [0, 1], [(0,), (1,)]),
        (2, [0, 1, 2, 3], [(0, 1), (2, 3)]),
        (2, [0, 1, 2, 3, 4], [(0, 1, 2), (3, 4)]),
        (3, [4, 5, 6, 7], [(4, 5), (6,), (7,)]),
        (3, [0, 1], [(0,), (1,), (0,)]),
        (1, [2, 5], [(2, 5)]),
        (2, [], [(), ()]),
    ],
)
def test_workers_share_the_cores_evenly(workers: int, available: list[int], expected: list[tuple[int, ...]]) -> None:
    assert cores.spread(workers, available) == expected


def test_every_thread_of_every_process_is_pinned(tmp_path: Path) -> None:
    core = cores.usable()[-1]
    code = """
import subprocess, sys, threading, time
inner = "import threading, time; threading.Thread(target=time.sleep, args=(60,)).start(); print('up', flush=True)"
child = subprocess.Popen([sys.executable, "-c", inner])
threading.Thread(target=time.sleep, args=(60,)).start()
print("up", flush=True)
"""
    with Child("threads", [sys.executable, "-c", code], log=tmp_path / "log", grace_s=1) as child:
        _wait_for(lambda: child.tail().count("up") == 2)
        pinned = cores.pin(child.pids(), [core])
        threads = [int(thread.name) for pid in child.pids() for thread in Path(f"/proc/{pid}/task").iterdir()]
        assert pinned == len(threads) == 4
        assert [os.sched_getaffinity(thread) for thread in threads] == [{core}] * 4


def test_a_process_that_has_ended_is_passed_over() -> None:
    assert cores.pin([2**22 + 1], cores.usable()) == 0


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
