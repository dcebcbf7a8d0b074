"""One supervised child process: its log file, how it is doing, and its end together with all it has started.

What may live here: processes and their logs. It knows nothing of vLLM, Envoy or the filter.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from workers import guard

_GUARD_MARGIN_S = 15.0
"""How much longer than the grace period the guard may take to end what the command left behind."""


class Child:
    """A command under its guard (:mod:`workers.guard`), in a session of its own: a terminal's Ctrl-C does not reach it.

    As a context manager it is stopped on the way out. When this process dies, however it dies, the child is ended too.
    """

    def __init__(
        self, name: str, argv: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None, grace_s: float = 10.0
    ) -> None:
        """Start it. ``env`` is set besides the environment of this process; the log starts empty."""
        self.name = name
        self.log = log
        self._grace_s = grace_s
        with log.open("wb") as output:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", guard.__file__, str(grace_s), *argv],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )

    def poll(self) -> int | None:
        """None while it runs; then its exit status, 128 + N if signal N ended it."""
        status = self._guard.poll()
        return status if status is None or status >= 0 else 128 - status

    def pids(self) -> list[int]:
        """All its live processes, those that it started included. Linux only, empty elsewhere."""
        return guard.descendants(self._guard.pid)

    def begin_stop(self) -> None:
        """Ask it to end, and do not wait. Asking again changes nothing."""
        if self._guard.stdin is not None:
            with contextlib.suppress(OSError):
                self._guard.stdin.close()

    def stop(self) -> int:
        """End it and everything it has started: SIGTERM, ``grace_s``, SIGKILL. Returns its exit status."""
        self.begin_stop()
        try:
            self._guard.wait(self._grace_s + _GUARD_MARGIN_S)
        except subprocess.TimeoutExpired:
            for pid in (*self.pids(), self._guard.pid):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            self._guard.wait()
        status = self.poll()
        assert status is not None
        return status

    def tail(self, lines: int = 20) -> str:
        """The end of its log."""
        try:
            with self.log.open("rb") as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(0, file.tell() - 64 * 1024))
                text = file.read().decode(errors="replace")
        except OSError as error:
            return f"({self.log}: {error})"
        return "\n".join(text.splitlines()[-lines:])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()


def stop_all(children: Iterable[Child]) -> None:
    """Stop several at once, so that their grace periods run side by side."""
    all_children = list(children)
    for child in all_children:
        child.begin_stop()
    for child in all_children:
        child.stop()


def describe_exit(status: int) -> str:
    """An exit status in words."""
    if status == guard.NOT_STARTED:
        return "could not be started (exit status 127)"
    if status > 128:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(status - 128).name}"
    return f"ended with exit status {status}"
