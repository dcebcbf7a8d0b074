"""The guard of one child process: a program that runs a command and sees to it that nothing of it is left behind.

    python -I -S guard.py GRACE_S COMMAND [ARGUMENT ...]

It stands between a launcher and the command, and holds the read end of a pipe (its standard input) that only the
launcher can write to. The pipe closes when the launcher wants the command to end, and just as well when the launcher is
killed: one way for both. Then the command gets SIGTERM, ``GRACE_S`` seconds, SIGKILL; and whenever it has ended, by
itself or not, all that it started is ended too.

On Linux the guard adopts orphans (``PR_SET_CHILD_SUBREAPER``), so that an engine process whose server has died, or one
that has made itself a session of its own, is still found. Should the guard itself be killed, the kernel kills the
command (``PR_SET_PDEATHSIG``). Elsewhere only the command's process group is ended.

Only the standard library, and nothing of ours: the file runs by itself and starts in a few milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LEFTOVER_GRACE_S = 1.0
"""For what outlives the command itself: it had its time while the command ended."""
_KILL_TIMEOUT_S = 10.0
"""A process in an uninterruptible sleep does not even die of SIGKILL; the guard does not wait for it for ever."""

NOT_STARTED = 127
"""Exit status of the guard when the command could not be started, as a shell has it."""


def descendants(pid: int) -> list[int]:
    """The live descendants of a process, from /proc; empty where there is no /proc."""
    children: dict[int, list[int]] = {}
    try:
        names = os.listdir("/proc")  # noqa: PTH208  (pathlib would double the start-up time of a guard)
    except OSError:
        return []
    for name in names:
        if name.isdecimal() and (parent := _parent_of(int(name))) is not None:
            children.setdefault(parent, []).append(int(name))
    found, todo = [], [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def _parent_of(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123
            stat = file.read()
    except OSError:
        return None
    # "pid (comm) state ppid ...": comm may itself hold spaces and parentheses. A zombie is no live process.
    state, parent = stat.rpartition(b")")[2].split()[:2]
    return None if state in (b"Z", b"X") else int(parent)


def main(arguments: list[str]) -> int:
    """Run the command to its end or to that of the pipe. Returns its exit status, 128 + N if signal N ended it."""
    grace_s, argv = float(arguments[0]), arguments[1:]
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    # Signals wake the select below through this pipe; without handlers there would be nothing to wake for.
    read_fd, write_fd = os.pipe()
    os.set_blocking(read_fd, False)
    os.set_blocking(write_fd, False)
    signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    asked_to_stop: list[int] = []
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: asked_to_stop.append(number))
    try:
        command = subprocess.Popen(argv, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=_die_with_guard)
    except OSError as error:
        print(f"cannot start {argv[0]}: {error}", file=sys.stderr)  # noqa: T201
        return NOT_STARTED

    lifeline = sys.stdin.fileno()
    kill_at: float | None = None
    while command.poll() is None:
        timeout_s = None if kill_at is None else max(0.0, kill_at - time.monotonic())
        # After the pipe has closed it is readable for ever.
        watched = [read_fd] if kill_at is not None else [read_fd, lifeline]
        readable, _, _ = select.select(watched, [], [], timeout_s)
        if read_fd in readable:
            with contextlib.suppress(BlockingIOError):
                os.read(read_fd, 4096)
        if kill_at is None:
            if asked_to_stop or (lifeline in readable and not os.read(lifeline, 4096)):
                kill_at = time.monotonic() + grace_s
                command.terminate()
        elif time.monotonic() >= kill_at:
            command.kill()
            command.wait()
        _reap_adopted(command.pid)
    _end_leftovers(command.pid)
    status = command.returncode
    return status if status >= 0 else 128 - status


def _end_leftovers(group: int) -> None:
    start = time.monotonic()
    last_signal = None
    while time.monotonic() - start < _KILL_TIMEOUT_S:
        number = signal.SIGTERM if time.monotonic() - start < _LEFTOVER_GRACE_S else signal.SIGKILL
        left = descendants(os.getpid())
        # SIGTERM goes out once; SIGKILL until nothing is left, as what is being killed may still fork.
        if number is signal.SIGKILL or last_signal is None:
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, number)
            with contextlib.suppress(OSError):
                os.killpg(group, number)
        last_signal = number
        _reap_adopted(None)
        if not left and not _group_lives(group):
            return
        time.sleep(0.02)


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except OSError:
        return False
    return True


def _reap_adopted(command: int | None) -> None:
    """Collect adopted children that have ended, but never the command: its status belongs to its Popen."""
    if sys.platform != "linux":
        return  # nothing is adopted there
    with contextlib.suppress(ChildProcessError):
        while True:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None or ended.si_pid == command:
                return
            os.waitpid(ended.si_pid, 0)


def _die_with_guard() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
