"""Envoy's access log service: what became of every request, in the eyes of who spoke with the client.

Envoy sends its lines in batches, and forgets them where they cannot be sent. So the filter keeps a note of every request until
its line has come, and counts the ones that do not come in time. Nothing waits for a line, and nothing breaks without one.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final

import grpc.aio
import msgspec
from envoy.service.accesslog.v3 import als_pb2

from extproc.observe.log_lines import SERVICE, Line, lines
from extproc.observe.logs import Logger
from extproc.observe.promises import Promise
from extproc.observe.tags import OTHER, UNKNOWN, Tags

LATE_S: Final = 10.0
"""A line that has not come so long after its request's end is lost."""

_MAX_NOTES = 200_000
"""Requests of which a line is awaited; of others nobody would notice that it is missing."""
_TELL_S = 60.0
"""At least so long from one word about lost lines to the next."""
_LATELY_S = 3.0
"""A few times as long as Envoy keeps a batch."""
_QUIET_S = 1.5
"""Longer than Envoy keeps a batch."""


class Note(msgspec.Struct, kw_only=True):
    """One request, from its headers to its line in the log."""

    key: str
    """Its name between the filter and Envoy; no client knows or chooses it."""
    tags: Tags = UNKNOWN
    estimated_tokens: int | None = None
    """Of a prompt whose length only an estimate tells, until the line does."""
    promise: Promise | None = None
    """Of a prompt: what its policy and its decision promise."""
    reported: bool = False
    """The line has come."""
    on_line: Callable[[Line], None] | None = None
    """Told of the line, whenever it comes."""


class AccessLog:
    """Receives the lines of any number of Envoys. ``told`` gets each one, with the labels that hold for it."""

    def __init__(
        self,
        *,
        expected: bool,
        told: Callable[[Line, Note], None],
        on_lost: Callable[[Note], None] = lambda _note: None,
        log: Logger,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``expected``: Envoy is configured to send lines, so that a missing one is a loss: ``on_lost`` is told of it."""
        self.expected = expected
        self._told = told
        self._on_lost = on_lost
        self._log = log
        self._clock = clock
        self._names = names(os.urandom(4).hex())
        self.pass_on: Callable[[Line], bool] = lambda _line: False
        """Gets lines of requests that are not known here; True: they are another process's, which has them now."""
        self.elsewhere: Callable[[], bool] | None = None
        """Whether another process waits for lines that may come here. None: there is no other process."""
        self._notes: dict[str, Note] = {}
        self._ended: deque[tuple[float, str]] = deque()
        self._unnamed: deque[float] = deque()
        """When lines came of clients that left before Envoy had read what the filter noted: one each for a request of ours."""
        self._untold, self._told_again_s = 0, clock()
        self._heard_s = -math.inf
        self._closing = asyncio.Event()
        self.streams = 0
        """Envoys (or rather their threads) that are connected."""
        self.received = 0
        """Lines that came."""
        self.foreign = 0
        """Of these, lines of requests that another filter served, or none."""
        self.lost = 0
        """Lines that did not come in time."""

    def name_by(self, prefix: str) -> None:
        """From now on names of requests begin so, and a hyphen: by which processes know their own lines."""
        self._names = names(prefix)

    # -- a request ---------------------------------------------------------------------------------------------------------

    def begin(self) -> Note:
        """A request is there."""
        note = Note(key=next(self._names))
        if self.expected and len(self._notes) < _MAX_NOTES:
            self._notes[note.key] = note
        return note

    def estimate(self, note: Note, prompt_tokens: int) -> bool:
        """Keep an estimate of its prompt, for whom the line is told, or its loss; False if no line is awaited."""
        if note.key not in self._notes:
            return False
        note.estimated_tokens = prompt_tokens
        return True

    def end(self, note: Note) -> None:
        """The filter has done with it: its line is due."""
        if note.key in self._notes:
            self._ended.append((self._clock() + LATE_S, note.key))

    # -- Envoy -------------------------------------------------------------------------------------------------------------

    def register(self, server: Any) -> None:
        """Serve on a grpc.aio server."""
        handler = grpc.stream_unary_rpc_method_handler(
            self._serve,
            request_deserializer=als_pb2.StreamAccessLogsMessage.FromString,
            response_serializer=als_pb2.StreamAccessLogsResponse.SerializeToString,
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"StreamAccessLogs": handler}),))

    async def _serve(self, _: Any, context: Any) -> Any:
        self.streams += 1
        if self.streams == 1:
            self._log.info("access_log_connected", expected=self.expected)
        closing = asyncio.ensure_future(self._closing.wait())
        try:
            while not self._closing.is_set():
                read = asyncio.ensure_future(context.read())
                try:
                    await asyncio.wait((read, closing), return_when=asyncio.FIRST_COMPLETED)
                    if not read.done():
                        break
                    message = read.result()
                finally:
                    read.cancel()
                if message is grpc.aio.EOF:
                    break
                self.take(message)
        except grpc.aio.BaseError:
            pass  # Envoy is gone; it connects again when it has something to say
        finally:
            closing.cancel()
            self.streams -= 1
            if not self.streams and not self._closing.is_set():
                self._log.warning("access_log_disconnected", lines=self.received, lost=self.lost)
        return als_pb2.StreamAccessLogsResponse()

    def take(self, message: als_pb2.StreamAccessLogsMessage) -> None:
        """One batch."""
        for line in lines(message):
            if line.key in self._notes or not self.pass_on(line):
                self.hear(line)

    def hear(self, line: Line) -> None:
        """One line."""
        self.received += 1
        self._heard_s = self._clock()
        note = self._notes.pop(line.key, None)
        if note is None:
            self.foreign += 1
            if not line.key and line.outcome == "client_gone":
                self._unnamed.append(self._clock())
            note = Note(key=line.key, tags=_foreign(line))
        note.reported = True
        if note.on_line is not None:
            note.on_line(line)
            note.on_line = None
        self._told(line, note)

    @property
    def reliable(self) -> bool:
        """A line of a request that begins now will surely come: they have come until a moment ago."""
        return self.expected and self._clock() - self._heard_s < _LATELY_S and len(self._notes) < _MAX_NOTES

    @property
    def awaited(self) -> int:
        """Requests whose line has not come."""
        return len(self._notes)

    # -- time --------------------------------------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Count what is overdue."""
        now_s, lost = self._clock(), 0
        while self._ended and self._ended[0][0] <= now_s:
            note = self._notes.pop(self._ended.popleft()[1], None)
            if note is not None:
                lost += 1
                self._on_lost(note)
        while self._unnamed and (lost or self._unnamed[0] <= now_s - 2 * LATE_S):
            lost -= bool(lost)
            self._unnamed.popleft()
        if lost:
            self.lost += lost
            self._untold += lost
        if self._untold and now_s >= self._told_again_s:
            self._told_again_s = now_s + _TELL_S
            self._log.warning("access_log_lines_lost", lines=self._untold, connected=self.streams)
            self._untold = 0

    async def close(self, quiet: Callable[[], bool]) -> None:
        """End the streams once no request is open (``quiet``) and the last lines are here, or have had their time."""
        last_s: float | None = None
        while True:
            if last_s is None and quiet():
                last_s = self._clock() + _QUIET_S
            if last_s is not None and (self._complete() or self._clock() >= last_s):
                break
            await asyncio.sleep(0.05)
        self._closing.set()
        self._log.info("access_log_closed", lines=self.received, lost=self.lost + len(self._notes) if self.expected else 0)

    def _complete(self) -> bool:
        if self.elsewhere is None:
            return not self._notes or not self.streams
        return not self._notes and not self.elsewhere()

    def status(self) -> dict[str, Any]:
        """For `/healthz`: whether Envoy reports, and what is missing without it."""
        state = "connected" if self.streams else "awaited" if self.expected else "off"
        return {
            "state": state,
            "lines": self.received,
            "awaited": self.awaited,
            "lost": self.lost,
            **({} if self.streams else {"without_it": "no TTFT, no ITL, no client that left during an answer"}),
        }


def names(prefix: str) -> Iterator[str]:
    """Names of requests without end."""
    return (f"{prefix}-{number}" for number in itertools.count())


def _foreign(line: Line) -> Tags:
    """Labels of a request that this process does not know: names from outside, so only those of a fixed set are kept."""
    mode = line.mode
    return Tags(OTHER, OTHER, mode if mode in ("disaggregate", "aggregate") else "none")  # type: ignore[arg-type]
