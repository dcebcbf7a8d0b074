"""A program that is talked to line by line, and never waited for in vain."""

from __future__ import annotations

import selectors
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from bench.overhead.cpu import process_cpu_s

_END_S = 5.0


class TalkError(RuntimeError):
    """It said nothing in time, or something else; the message has the end of its log."""


class Talk:
    """Context manager; the program is ended on the way out."""

    def __init__(self, argv: Sequence[str], *, log: Path, patience_s: float) -> None:
        """``log``: its standard error. ``patience_s``: for everything that it is to say."""
        self._log = log
        self._until_s = time.monotonic() + patience_s
        with log.open("wb") as errors:
            self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, bufsize=0)
        self._said = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def cpu_s(self) -> float:
        """Processor time that it has used so far."""
        return process_cpu_s(self._process.pid)

    def say(self, line: str) -> None:
        """To its standard input. Raises OSError when it has ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")

    def expect(self, line: str) -> None:
        """Wait for this line. Raises TalkError."""
        if (said := self.line()) != line:
            raise TalkError(f"{line!r} was to be said, not {said[:200]!r}; {self._tail()}")

    def line(self) -> str:
        """The next line that it says. Raises TalkError."""
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._said:
                if not selector.select(max(0.0, self._until_s - time.monotonic())):
                    raise TalkError(f"nothing was said in time; {self._tail()}")
                piece = self._process.stdout.read(1 << 16)
                if not piece:
                    raise TalkError(f"it has ended; {self._tail()}")
                self._said += piece
        line, _, self._said = self._said.partition(b"\n")
        return line.decode(errors="replace")

    def _tail(self) -> str:
        text = self._log.read_text(encoding="utf-8", errors="replace")
        return f"the end of {self._log}:\n{text[-1000:]}"
