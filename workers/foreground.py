"""Run one worker in the foreground: pass signals on, wait for its drain, end with its status, and leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from workers import guard

_POLL_S = 0.2
_GUARD_MARGIN_S = 15.0
"""How much longer than the grace period the guard may take to end what the command left behind."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def run(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    grace_s: float,
    say: Callable[[str], None],
    each_poll: Callable[[int], bool] | None = None,
) -> int:
    """Run a command until it ends. Returns its exit status, 128 + N if signal N ended it.

    ``env`` is the whole environment. The first SIGTERM, SIGINT or SIGHUP is passed on as SIGTERM, after which the command has
    ``grace_s``; a second one kills it. ``each_poll`` is called with the id of a process below which the command's
    all are, five times a second, until it says True.
    """
    got: list[int] = []
    before = {number: signal.signal(number, lambda number, _: got.append(number)) for number in _SIGNALS}
    try:
        # A session of its own: a terminal's Ctrl-C reaches this process only, which then passes it on once.
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__, str(grace_s), *_found(argv, env)],
            stdin=subprocess.PIPE,
            env=dict(env),
            start_new_session=True,
        )
        assert child.stdin is not None
        kill_at: float | None = None
        while (status := child.poll()) is None:
            if each_poll is not None and not got and each_poll(child.pid):
                each_poll = None
            if got and kill_at is None:
                say(f"{signal.Signals(got[0]).name}: the engine has {grace_s:g} s to end; once more to kill it")
                kill_at = time.monotonic() + grace_s + _GUARD_MARGIN_S
                with contextlib.suppress(OSError):
                    child.stdin.close()  # the guard takes it as the order to end the command
            if kill_at is not None and (len(got) > 1 or time.monotonic() > kill_at):
                _kill(child)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_POLL_S)
        return status if status >= 0 else 128 - status
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _found(argv: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """The command with its program's path: of the folder of this Python first, where pip puts it, whatever PATH says."""
    path = os.pathsep.join((str(Path(sys.executable).parent), env.get("PATH", os.defpath)))
    return [shutil.which(argv[0], path=path) or argv[0], *argv[1:]]


def _kill(child: subprocess.Popen[bytes]) -> None:
    for pid in (*guard.descendants(child.pid), child.pid):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
