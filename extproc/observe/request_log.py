"""The log line of a request, as JSON: made in one go and written at once, because every request has one.

It says what :mod:`extproc.observe.logs` would say of the same fields, for a few microseconds instead of some ten. Text that a
client chose has to be fit to be shown (:mod:`extproc.observe.shown`) when it comes here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

from extproc.observe.logs import Logger, Sink


class RequestLine(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """What it says, in this order. See :class:`extproc.journey.Record`."""

    request_id: str
    method: str
    path: str
    treatment: str
    outcome: str
    status: int | None = None
    whole_reason: str | None = None
    prefill: str | None = None
    decode: str | None = None
    policy: str | None = None
    pool: str | None = None
    queued_ms: float | None = None
    prefill_ms: float | None = None
    blocks: int | None = None
    tokens: int | None = None
    cached_tokens: int | None = None
    reported_cached_tokens: int | None = None
    body_bytes: int
    answer_status: int | None = None
    """Of the decode worker."""
    trace_id: str | None = None
    total_ms: float


class RequestLog:
    """Writes them."""

    def __init__(self, log: Logger, sink: Sink | None = None, *, clock: Callable[[], float] = time.time) -> None:
        """``sink`` takes JSON lines as they are, where the log is one of JSON at the level ``info``; else ``log`` does it."""
        self._log = log
        self._sink = sink
        self._clock = clock
        self._second = -1
        self._start = b""

    def write(self, line: RequestLine) -> None:
        """One request is over."""
        if self._sink is None:
            fields: dict[str, Any] = msgspec.structs.asdict(line)
            self._log.info("request", **{key: value for key, value in fields.items() if value is not None})
            return
        now_s = self._clock()
        second = int(now_s)
        if second != self._second:
            written = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
            self._second, self._start = second, f'{{"time":"{written}.'.encode()
        self._sink.write(
            b'%b%03dZ","level":"info","event":"request",%b\n' % (self._start, int((now_s - second) * 1e3), _rest(line))
        )


_encode = msgspec.json.Encoder().encode


def _rest(line: RequestLine) -> bytes:
    """The object without its opening brace."""
    return _encode(line)[1:]
