"""The parts of a system that runs as processes on this machine: how they are doing, shown while they start; their common end.

What may live here: what `baton up` does the same way whatever it starts. Which parts there are is said elsewhere.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

from extproc.stack import UpError
from workers.process import Child, describe_exit
from workers.ready import PartError, check_alive

POLL_S = 0.2
_HEARTBEAT_S = 10.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class Part:
    """One process of the system, and when it was ready."""

    child: Child
    ready: Callable[[], bool]
    """Asked until it says yes. May raise PartError."""
    once: bool = False
    """It does its work and ends, which is when it is ready; ``ready`` is not asked."""
    when_ready: Callable[[], None] | None = None
    """Called once, when it is."""
    started_at: float = field(default_factory=time.monotonic)
    ready_after_s: float | None = None

    def look(self) -> None:
        """Note whether it is ready. Raises PartError if it has ended and should not have."""
        status = self.child.poll()
        if self.once and status == 0:
            ready = True
        else:
            check_alive(self.child)
            ready = not self.once and self.ready_after_s is None and self.ready()
        if ready and self.ready_after_s is None:
            self.ready_after_s = time.monotonic() - self.started_at
            if self.when_ready is not None:
                self.when_ready()


def check_all(parts: Sequence[Part]) -> None:
    """Raise PartError if one of them has ended and should not have."""
    for part in parts:
        if not part.once:
            check_alive(part.child)
        elif (status := part.child.poll()) is not None and status != 0:
            raise PartError(f"{part.child.name} {describe_exit(status)}; the end of {part.child.log}:\n{part.child.tail()}")


class Progress:
    """What is shown while parts start: a table that changes on a terminal, a line for each change elsewhere.

    ``parts`` may grow meanwhile.
    """

    def __init__(self, console: Console, parts: list[Part], timeout_s: float) -> None:
        self._console = console
        self._parts = parts
        self._timeout_s = timeout_s
        self._began_at = time.monotonic()
        self._next_heartbeat_s = _HEARTBEAT_S
        self._announced = 0
        self._live = Live(console=console, refresh_per_second=4, get_renderable=self._table) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def look(self) -> bool:
        """Look at every part once; whether all of them are ready. Raises PartError, and UpError when it takes too long."""
        for part in self._parts[self._announced :]:
            self._say(f"starting {part.child.name}, log {part.child.log}")
        self._announced = len(self._parts)
        waiting = [part for part in self._parts if part.ready_after_s is None]
        for part in self._parts:
            part.look()
            if part in waiting and part.ready_after_s is not None:
                self._say(f"{part.child.name} {'is done' if part.once else 'is ready'} after {part.ready_after_s:.0f} s")
        waiting = [part for part in waiting if part.ready_after_s is None]
        elapsed_s = time.monotonic() - self._began_at
        names = ", ".join(part.child.name for part in waiting)
        if waiting and elapsed_s > self._timeout_s:
            late = waiting[0].child
            raise UpError(f"not ready after {self._timeout_s:g} s: {names}; the end of {late.log}:\n{late.tail()}")
        if waiting and elapsed_s > self._next_heartbeat_s:
            self._next_heartbeat_s += _HEARTBEAT_S
            self._say(f"{elapsed_s:.0f} s: waiting for {names}")
        return not waiting

    def _say(self, line: str) -> None:
        if self._live is None:
            self._console.print(line, highlight=False, markup=False)

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        for heading in ("part", "state", "seconds", "log"):
            table.add_column(heading, justify="right" if heading == "seconds" else "left")
        for part in self._parts:
            ready = part.ready_after_s is not None
            passed_s = part.ready_after_s if part.ready_after_s is not None else time.monotonic() - part.started_at
            state = f"[green]{'done' if part.once else 'ready'}[/]" if ready else "[yellow]starting[/]"
            table.add_row(part.child.name, state, f"{passed_s:.0f}", str(part.child.log))
        return table


def stay(parts: Sequence[Part]) -> None:
    """Until a part ends (PartError) or the user has had enough (KeyboardInterrupt)."""
    while True:
        time.sleep(POLL_S)
        check_all(parts)


def complain(console: Console, message: str) -> None:
    """Say what went wrong."""
    console.print("[bold red]baton up:[/] ", end="")
    console.print(message, markup=False, highlight=False)


@contextmanager
def run_folder(wanted: Path | None) -> Iterator[Path]:
    """Where logs, sockets and generated configuration go: ``wanted``, made if it is not there, or a temporary folder."""
    if wanted is None:
        yield Path(tempfile.mkdtemp(prefix="baton-"))
        return
    wanted.mkdir(parents=True, exist_ok=True)
    yield wanted.resolve()


def leave_folder(console: Console, folder: Path, *, temporary: bool, failed: bool) -> None:
    """Say where it is if somebody will want to look, else remove it if it was a temporary one."""
    if failed:
        console.print(f"Logs and configuration are in {folder}", highlight=False)
    elif temporary:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def signals_raise() -> Iterator[None]:
    """Have SIGTERM and SIGHUP end this like Ctrl-C does, by an exception that passes every clean-up on its way."""

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def signals_ignored() -> None:
    """From here on: a second Ctrl-C must not leave a clean-up half done."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
