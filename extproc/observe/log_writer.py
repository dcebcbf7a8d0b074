"""Log lines on their way out: a buffer with a bound, and a thread that writes. Whoever logs never waits.

A full pipe, or a disk that stands still, stops the thread and nothing else; what no longer fits into the buffer is counted.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

_MOST_LINES = 10_000
_BATCH_BYTES = 1 << 16
_POLL_S = 0.5
_PAUSE_S = 0.05
"""Between two writes: a thread that is woken for every line costs the event loop more than the line itself."""


class LogWriter:
    """A file to log to (``write`` and ``flush``). Its lines go to a file descriptor, in order. Safe for any thread."""

    def __init__(
        self, descriptor: int, *, dropped_line: Callable[[int], bytes] | None = None, most_lines: int = _MOST_LINES
    ) -> None:
        """``dropped_line`` makes the line that says how many are missing, once there is room again."""
        self._descriptor = descriptor
        self._dropped_line = dropped_line
        self._most_lines = most_lines
        self._lines: SimpleQueue[bytes | None] = SimpleQueue()
        self.dropped = 0
        """Lines that found the buffer full, or nobody to read them."""
        self.on_drop: Callable[[], None] | None = None
        """Called for each of them, by whoever logged it."""
        self._told = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
        self._thread.start()

    def write(self, line: bytes) -> None:
        """Take one line, with its end. Never blocks."""
        if self._lines.qsize() >= self._most_lines or self._closing.is_set():
            self.dropped += 1
            if self.on_drop is not None:
                self.on_drop()
            return
        self._lines.put(line)

    @property
    def waiting(self) -> int:
        """Lines that are not written yet, about."""
        return self._lines.qsize()

    def flush(self) -> None:
        """Nothing: the thread writes within 50 ms."""

    def close(self, timeout_s: float = 1.0) -> None:
        """Write what is there, if that is possible within ``timeout_s``. Idempotent."""
        if not self._closing.is_set():
            self._closing.set()
            self._lines.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        over = False
        while not over:
            batch = [self._lines.get()]
            size = 0
            while batch[-1] is not None and size < _BATCH_BYTES:
                size += len(batch[-1])
                try:
                    batch.append(self._lines.get_nowait())
                except Empty:
                    break
            over = batch[-1] is None
            lines = [line for line in batch if line is not None]
            dropped = self.dropped
            if dropped > self._told and self._dropped_line is not None:
                lines.append(self._dropped_line(dropped - self._told))
            self._told = dropped
            try:
                self._write(b"".join(lines))
            except OSError:
                self.dropped += len(lines)  # nobody reads: a closed pipe must not end the filter
                self._told = self.dropped
            self._closing.wait(_PAUSE_S)

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            try:
                left = left[os.write(self._descriptor, left) :]
            except BlockingIOError:  # somebody who shares the pipe has set it so
                select.select((), (self._descriptor,), (), _POLL_S)
