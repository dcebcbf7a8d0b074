"""A supervised child: its end is noticed, and it never leaves anything behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from workers.process import Child, describe_exit, stop_all

# A server with an engine process below it, as vLLM has, and one that has made itself a session of its own.
FAMILY = """
import os, signal, subprocess, sys, time
if {stubborn}:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleep = [sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"]
engine = subprocess.Popen(sleep)
detached = subprocess.Popen(sleep, start_new_session=True)
print("pids", os.getpid(), engine.pid, detached.pid, flush=True)
if {dies}:
    time.sleep(0.3)
    os._exit(3)
time.sleep(600)
"""


def family(*, stubborn: bool = False, dies: bool = False) -> list[str]:
    return [sys.executable, "-c", FAMILY.format(stubborn=stubborn, dies=dies)]


def wait_for(condition: Callable[[], bool], timeout_s: float = 15.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def members(log: Path) -> list[psutil.Process]:
    """The processes of a family, once all of them are there."""
    wait_for(lambda: log.exists() and "pids" in log.read_text() and log.read_text().endswith("\n"))
    return [psutil.Process(int(pid)) for pid in log.read_text().split("pids")[1].split()[:3]]


def assert_gone(processes: list[psutil.Process], timeout_s: float = 15.0) -> None:
    assert psutil.wait_procs(processes, timeout=timeout_s)[1] == []


def test_stop_ends_the_command_and_all_that_it_started(tmp_path: Path) -> None:
    child = Child("family", family(), log=tmp_path / "log")
    processes = members(tmp_path / "log")
    assert child.poll() is None
    assert {process.pid for process in processes} == set(child.pids())

    start = time.monotonic()
    assert child.stop() == 128 + signal.SIGTERM
    assert time.monotonic() - start < 5
    assert_gone(processes, 0.5)


def test_a_command_that_ignores_sigterm_is_killed_after_its_grace_period(tmp_path: Path) -> None:
    child = Child("stubborn", family(stubborn=True), log=tmp_path / "log", grace_s=0.5)
    processes = members(tmp_path / "log")
    assert child.stop() == 128 + signal.SIGKILL
    assert_gone(processes, 0.5)


def test_a_command_that_dies_is_reported_and_leaves_nothing_behind(tmp_path: Path) -> None:
    child = Child("dies", family(dies=True), log=tmp_path / "log")
    processes = members(tmp_path / "log")
    wait_for(lambda: child.poll() is not None)
    assert child.poll() == 3
    assert_gone(processes, 0.5)
    assert child.stop() == 3


def test_a_killed_launcher_takes_everything_with_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = (
        "import sys, time; from pathlib import Path; from workers.process import Child; "
        "child = Child('family', sys.argv[2:], log=Path(sys.argv[1])); time.sleep(600)"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code, str(log), *family()])
    processes = members(log)
    guard = psutil.Process(launcher.pid).children()
    launcher.kill()
    launcher.wait()
    assert_gone(processes + guard)


def test_a_killed_guard_takes_the_command_with_it(tmp_path: Path) -> None:
    child = Child(
        "orphan", [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"], log=tmp_path / "log"
    )
    wait_for(lambda: "up" in child.tail())
    command = psutil.Process(child.pids()[0])
    os.kill(command.ppid(), signal.SIGKILL)
    assert_gone([command], 5)
    assert child.stop() == 128 + signal.SIGKILL


def test_a_command_that_does_not_exist_says_so(tmp_path: Path) -> None:
    with Child("nothing", ["/nonexistent/program"], log=tmp_path / "log") as child:
        wait_for(lambda: child.poll() is not None)
        assert child.poll() == 127
        assert "cannot start /nonexistent/program" in child.tail()


def test_environment_is_added_and_the_end_of_the_log_is_shown(tmp_path: Path) -> None:
    code = "import os; [print('line', number) for number in range(100)]; print(os.environ['ADDED'], 'PATH' in os.environ)"
    with Child("talks", [sys.executable, "-c", code], log=tmp_path / "log", env={"ADDED": "yes"}) as child:
        wait_for(lambda: child.poll() is not None)
        assert child.poll() == 0
        assert child.tail(2) == "line 99\nyes True"


def test_grace_periods_run_side_by_side(tmp_path: Path) -> None:
    children = [
        Child(f"stubborn-{number}", family(stubborn=True), log=tmp_path / f"{number}", grace_s=1.0) for number in range(3)
    ]
    processes = [process for number in range(3) for process in members(tmp_path / f"{number}")]
    start = time.monotonic()
    stop_all(children)
    assert time.monotonic() - start < 5.5  # one after the other: 3 x (1 s grace + 1 s for what is left) at least
    assert_gone(processes, 0.5)


@pytest.mark.parametrize(
    ("status", "words"),
    [(0, "ended with exit status 0"), (137, "was ended by SIGKILL"), (127, "could not be started"), (200, "status 200")],
)
def test_an_exit_status_is_put_into_words(status: int, words: str) -> None:
    assert words in describe_exit(status)
