"""The parent of several filter processes: starts them, passes on what it is told by signals, and starts again what has died.

It serves no request and knows no worker. Each process holds one end of a socket to it, the lifeline: the parent says there when
to drain and when to make an end, the process says when it serves; and when the parent is gone, however it went, it drains.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import msgspec

from extproc.observe.log_writer import LogWriter
from extproc.observe.logs import Logger
from extproc.processes.lifeline import CUT, DRAIN, SERVING
from extproc.processes.member import Member
from workers.process import describe_exit

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 10.0
"""Between the end of a process and its next start; it doubles while the process does not come to serve."""
_STEADY_S = 60.0
"""A process that lived so long begins with the first pause again."""
MOST_FAILURES = 8
"""Starts in a row in vain, of one process while no other serves, after which the parent gives up."""
_CHUNK_BYTES = 1 << 16
_LONGEST_LINE_BYTES = 1 << 18
_LAST_WORDS_S = 1.0
"""For what a process has written before its end; something that it started may hold its log open for longer."""
_WRITER_LINES = 100
"""Pieces of log that wait to be written; then the processes wait, and drop lines of their own."""


class _Slot:
    """One of the processes, through all of its lives."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.process: asyncio.subprocess.Process | None = None
        self.lifeline: socket.socket | None = None
        self.serving = False
        self.ever_served = False
        self.restarts = 0
        self.failures = 0
        """Starts in a row after which it did not come to serve."""
        self.status: int | None = None
        """Of its last end."""

    def say(self, what: bytes) -> None:
        """To the process, if it is there."""
        if self.lifeline is not None:
            with contextlib.suppress(OSError):
                self.lifeline.send(what)


class Parent:
    """Runs ``count`` processes, each by ``argv`` and what it is told of itself."""

    def __init__(self, argv: Sequence[str], count: int, log: Logger, writer: LogWriter, *, colour: bool = False) -> None:
        """``argv`` starts one; ``--member`` and a :class:`Member` as JSON are added. Their logs go to ``writer``, in whole
        lines."""
        self._argv = tuple(argv)
        self._log = log
        self._writer = writer
        self._colour = colour
        self._slots = [_Slot(index) for index in range(count)]
        self._stopping = asyncio.Event()
        self._failed: int | None = None

    async def run(self) -> int:
        """Until it is told to stop and all have ended; the exit status: 0, or that of a process that could not start."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        directory = Path(tempfile.mkdtemp(prefix="baton-"))  # nobody else may enter it
        self._log.info("processes", count=len(self._slots), directory=str(directory))
        try:
            await asyncio.gather(*(self._keep(slot, directory) for slot in self._slots))
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
            shutil.rmtree(directory, ignore_errors=True)
        if self._failed is not None:
            return self._failed
        return max((1 if slot.status else 0) for slot in self._slots)

    def _on_signal(self) -> None:
        self._tell_all(CUT if self._stopping.is_set() else DRAIN)
        self._stopping.set()

    def _tell_all(self, what: bytes) -> None:
        for slot in self._slots:
            slot.say(what)

    def _give_up(self, slot: _Slot, why: str) -> None:
        if not self._stopping.is_set():
            self._failed = slot.status or 1
            self._log.error("processes_given_up", process=slot.index, why=why)
            self._stopping.set()
            self._tell_all(DRAIN)

    async def _keep(self, slot: _Slot, directory: Path) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._stopping.is_set():
            began_s = time.monotonic()
            slot.status = await self._live(slot, directory)
            if self._stopping.is_set():
                return
            lived_s = time.monotonic() - began_s
            how = describe_exit(slot.status)
            if not slot.ever_served:
                self._give_up(slot, f"the process {how} before it could serve")
                return
            if slot.failures >= MOST_FAILURES and not any(each.serving for each in self._slots):
                self._give_up(slot, f"no process serves, and this one {how} {slot.failures} times before it could")
                return
            if lived_s > _STEADY_S:
                pause_s = FIRST_PAUSE_S
            self._log.error("process_ended", process=slot.index, how=how, lived_s=round(lived_s, 1), again_in_s=pause_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stopping.wait()
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            slot.restarts += 1

    async def _live(self, slot: _Slot, directory: Path) -> int:
        """One life of a process; its exit status, 128 + N if signal N ended it."""
        ours, theirs = socket.socketpair()
        log_from, log_to = os.pipe()
        logs = os.fdopen(log_from, "rb", buffering=0)
        try:
            ours.setblocking(False)
            member = Member(
                index=slot.index,
                count=len(self._slots),
                directory=str(directory),
                lifeline=theirs.fileno(),
                restarts=slot.restarts,
                colour=self._colour,
            )
            slot.process = process = await asyncio.create_subprocess_exec(
                *self._argv,
                "--member",
                msgspec.json.encode(member).decode(),
                stdin=asyncio.subprocess.DEVNULL,
                stderr=log_to,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C is for the parent, which passes it on
            )
            slot.lifeline = ours
            theirs.close()
            os.close(log_to)
            log_to = -1
            self._log.info("process_started", process=slot.index, pid=process.pid, restarts=slot.restarts)
            if self._stopping.is_set():
                slot.say(DRAIN)
            listening = asyncio.create_task(self._listen(slot, ours))
            copying = asyncio.create_task(self._copy_log(logs))
            try:
                status = await process.wait()
                await asyncio.wait((copying,), timeout=_LAST_WORDS_S)
            finally:
                listening.cancel()
                copying.cancel()
                await asyncio.gather(listening, copying, return_exceptions=True)
            slot.failures = 0 if slot.serving else slot.failures + 1
        finally:
            slot.serving, slot.process, slot.lifeline = False, None, None
            ours.close()
            theirs.close()
            logs.close()
            if log_to >= 0:
                os.close(log_to)
        return status if status >= 0 else 128 - status

    async def _listen(self, slot: _Slot, ours: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while said := await loop.sock_recv(ours, 16):
                if SERVING in said:
                    slot.serving = slot.ever_served = True
                    self._log.info("process_serves", process=slot.index)

    async def _copy_log(self, logs: IO[bytes]) -> None:
        """Whole lines only: lines of several processes must not run into each other."""
        reader = asyncio.StreamReader(limit=_CHUNK_BYTES)
        pipe, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), logs)
        rest = b""
        try:
            while chunk := await reader.read(_CHUNK_BYTES):
                lines, newline, rest = (rest + chunk).rpartition(b"\n")
                if len(rest) > _LONGEST_LINE_BYTES:
                    lines, newline, rest = rest, b"\n", b""
                if newline:
                    self._writer.write(lines + newline)
                while self._writer.waiting > _WRITER_LINES:  # noqa: ASYNC110 (it is a thread that writes)
                    await asyncio.sleep(0.05)
        finally:
            if rest:
                self._writer.write(rest + b"\n")
            pipe.close()


def run(config_file: Path, count: int, log: Logger, writer: LogWriter, *, colour: bool = False) -> int:
    """Run ``count`` filters under the configuration file until told to stop. Returns the exit status."""
    argv = (sys.executable, "-m", "extproc", "serve", "--config", str(config_file), "--processes", str(count))

    async def main() -> int:
        return await Parent(argv, count, log, writer, colour=colour).run()

    return asyncio.run(main())
