"""Structured logs: one line an event, JSON or text. Never a prompt, never a secret: callers pass names, counts and ids only.

Whatever a value is, its text is bounded, and what a terminal would obey is escaped. Of an exception the log says its kind and
where it came from, not its message, which may hold what a client sent.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, Protocol, TextIO

import msgspec
import structlog

from extproc.observe.log_writer import LogWriter
from extproc.observe.shown import shown

Logger = structlog.typing.FilteringBoundLogger

Format = Literal["json", "text"]

_MOST_FRAMES = 20


class Sink(Protocol):
    """What takes whole lines."""

    def write(self, line: bytes, /) -> object:
        """Take one."""
        ...

    def flush(self) -> object:
        """Have it written."""
        ...


def make_logger(
    level: str = "info", stream: TextIO | None = None, *, log_format: Format = "json", sink: Sink | None = None
) -> Logger:
    """A logger that writes to ``sink``, else to ``stream`` (default: standard error), from ``level`` on.

    Text is coloured if ``stream`` is a terminal.
    """
    out = stream or sys.stderr
    return structlog.wrap_logger(  # type: ignore[no-any-return]
        structlog.BytesLogger(sink or _Encoded(out)),  # type: ignore[arg-type]  # it needs no more than these two methods
        processors=[_with_level, _with_exception, _renderer(log_format, colour=out.isatty())],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
    )


def make_writer(descriptor: int, log_format: Format = "json", *, colour: bool = False) -> LogWriter:
    """A buffer with a thread in front of an open file, for a logger of the same format."""
    render = _renderer(log_format, colour=colour)

    def dropped_line(count: int) -> bytes:
        return render(None, "warning", {"event": "log_lines_dropped", "level": "warning", "lines": count}) + b"\n"

    return LogWriter(descriptor, dropped_line=dropped_line)


class _Encoded:
    """A text stream, for lines of bytes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, line: bytes, /) -> None:
        self._stream.write(line.decode())

    def flush(self) -> None:
        self._stream.flush()


def _with_level(_logger: Any, method: str, event: Any) -> Any:
    event["level"] = "error" if method == "exception" else method
    return event


def _with_exception(_logger: Any, _method: str, event: Any) -> Any:
    if "exc_info" in event and (told := event.pop("exc_info")):
        error = told if isinstance(told, BaseException) else sys.exc_info()[1]
        if error is not None:
            event["exception"] = list(_frames(error))
    return event


def _frames(error: BaseException) -> list[str]:
    """Where it came from, the cause first: kinds of errors and lines of code, without what they say."""
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    found = [] if before is None else _frames(before)
    frames = traceback.extract_tb(error.__traceback__)[-_MOST_FRAMES:]
    found += [f"{os.path.relpath(frame.filename, _ROOT)}:{frame.lineno} {frame.name}" for frame in frames]
    return [*found, type(error).__qualname__][-2 * _MOST_FRAMES :]


_ROOT: Final = Path(__file__).resolve().parents[2]


def _renderer(log_format: Format, *, colour: bool) -> Callable[[Any, str, Any], bytes]:
    return partial(_text, colour=colour) if log_format == "text" else _json


# --- JSON -------------------------------------------------------------------------------------------------------------


def _json(_logger: Any, _method: str, event: Any) -> bytes:
    line = {"time": _now(), "level": event.pop("level"), "event": event.pop("event")}
    for key, value in event.items():
        line[key] = shown(value) if type(value) is str else value
    return _ENCODER.encode(line)


def _other(value: Any) -> str:
    return shown(str(value))


_ENCODER = msgspec.json.Encoder(enc_hook=_other)


# --- text -------------------------------------------------------------------------------------------------------------

_COLOURS: Final = {"debug": "\x1b[2m", "info": "\x1b[32m", "warning": "\x1b[33m", "error": "\x1b[31m", "critical": "\x1b[31;1m"}
_BOLD, _DIM, _PLAIN = "\x1b[1m", "\x1b[2m", "\x1b[0m"
_EVENT_CHARS: Final = 16


def _text(_logger: Any, _method: str, event: Any, *, colour: bool) -> bytes:
    level, name, now = event.pop("level"), event.pop("event"), _now()
    frames = event.pop("exception", ())
    before, equals = (_DIM, f"{_PLAIN}=") if colour else ("", "=")
    if colour:
        parts = [f"{_DIM}{now}{_PLAIN} {_COLOURS.get(level, '')}{level:<7}{_PLAIN} {_BOLD}{name:<{_EVENT_CHARS}}{_PLAIN}"]
    else:
        parts = [f"{now} {level:<7} {name:<{_EVENT_CHARS}}"]
    for key, value in event.items():
        kind = type(value)
        if kind not in _NUMBERS:
            value = value if kind is str else str(value)
            if not _WORD(value):
                value = json.dumps(shown(value), ensure_ascii=False)
        parts.append(f"{before}{key}{equals}{value}")
    text = " ".join(parts) if len(parts) > 1 else parts[0].rstrip()
    return "\n".join((text, *(f"    {shown(frame)}" for frame in frames))).encode() if frames else text.encode()


_NUMBERS: Final = frozenset((int, float, bool, type(None)))

_WORD: Final = re.compile(r"[!#-<>-~]{1,200}").fullmatch
"""Of printable ASCII, without a space, a quote or an equals sign: what needs no quotes."""


# --- the time ---------------------------------------------------------------------------------------------------------


def _now() -> str:
    return f"{datetime.now(UTC).isoformat(timespec='milliseconds')[:-6]}Z"


# --- what libraries say -----------------------------------------------------------------------------------------------


class _FromLibraries(logging.Handler):
    def __init__(self, log: Logger) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        """One line, in our form."""
        say = self._log.error if record.levelno >= logging.ERROR else self._log.warning
        # The format, not what was put into it, which may be anything; asyncio shows its objects in the lines after the first.
        message = str(record.msg).partition("\n")[0]
        told = record.exc_info[1] if record.exc_info else None
        say("library", logger=record.name, message=shown(message, 300), **({"exc_info": told} if told else {}))


def take_over(log: Logger) -> None:
    """Have the warnings of libraries, and of asyncio, go where ours go: they would block on a full pipe."""
    logging.basicConfig(handlers=[_FromLibraries(log)], level=logging.WARNING, force=True)
