"""A client of ready-made frames for the HTTP/2 core, and a server above it that notes what it is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from extproc.transport.http2 import frames
from extproc.transport.http2.connection import Connection, Head, Limits, Stream
from extproc.transport.http2.hpack import Field, encode

REQUEST: tuple[Field, ...] = (
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/x.Y/Z"),
    (b":authority", b"baton"),
    (b"te", b"trailers"),
    (b"content-type", b"application/grpc"),
)
GET: tuple[Field, ...] = ((b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/"), (b":authority", b"baton"))
OK = encode(((b":status", b"200"),))


@dataclass
class Sent:
    """A frame that the server has sent."""

    kind: int
    flags: int
    stream: int
    payload: bytes

    @property
    def code(self) -> int:
        start = {frames.RST_STREAM: 0, frames.GOAWAY: 4}[self.kind]
        return int.from_bytes(self.payload[start : start + 4], "big")


def split(data: bytes) -> list[Sent]:
    """Whole frames."""
    found, position = [], 0
    while position < len(data):
        high, low, kind, flags, stream = frames.HEAD.unpack_from(data, position)
        end = position + frames.HEAD_BYTES + (high << 16 | low)
        assert end <= len(data), "a frame is cut off"
        found.append(Sent(kind, flags, stream, data[position + frames.HEAD_BYTES : end]))
        position = end
    return found


@dataclass
class Listener:
    """A sink that notes everything as ``(stream, what, ...)``; data that came in pieces is one entry."""

    stream: Stream
    events: list[tuple[Any, ...]]

    def data(self, buffer: bytes, start: int, stop: int) -> None:
        assert start < stop
        self.note("data", buffer[start:stop])

    def ended(self) -> None:
        self.note("ended")

    def gone(self, code: int) -> None:
        self.note("gone", code)

    def drained(self) -> None:
        pass

    def note(self, what: str, *more: Any) -> None:
        last = next((event for event in reversed(self.events) if event[0] == self.stream.id), None)
        if what == "data" and last is not None and last[1] == "data":
            place = max(index for index, event in enumerate(self.events) if event is last)
            self.events[place] = (self.stream.id, "data", last[2] + more[0])
        else:
            self.events.append((self.stream.id, what, *more))


@dataclass
class Server:
    """Takes every request and answers none, unless it is told to."""

    limits: Limits = field(default_factory=Limits)
    refuses: bool = False
    answers: bool = False
    now_s: float = 0.0

    def __post_init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.opened_streams: dict[int, Stream] = {}
        self.connection = Connection(self, self.limits, lambda: self.now_s)

    def opened(self, stream: Stream, head: Head) -> Listener | None:
        if self.refuses:
            return None
        self.opened_streams[stream.id] = stream
        self.events.append((stream.id, "opened", head.method, head.path, head.fields))
        if self.answers:
            self.connection.end(stream, OK)
        return Listener(stream, self.events)

    def greet(self, settings: dict[int, int] | None = None) -> list[Sent]:
        """The beginning of every connection. What the server sent."""
        return self.take(frames.PREFACE + frames.settings(settings or {}))

    def take(self, data: bytes) -> list[Sent]:
        """Bytes for the server. What it sent."""
        self.connection.receive(data)
        return self.sent()

    def sent(self) -> list[Sent]:
        out = self.connection.sender.out
        data = b"".join(out)
        out.clear()
        return split(data)

    def told(self, stream: int) -> list[tuple[Any, ...]]:
        """What was told of a stream after it was opened."""
        return [event[1:] for event in self.events if event[0] == stream and event[1] != "opened"]


def headers(stream: int, fields: tuple[Field, ...] = REQUEST, *, end: bool = False, more: int = 0) -> bytes:
    """A HEADERS frame with END_HEADERS."""
    flags = frames.END_HEADERS | (frames.END_STREAM if end else 0) | more
    return frames.frame(frames.HEADERS, flags, stream, encode(fields))


def data(stream: int, payload: bytes = b"", *, end: bool = False) -> bytes:
    """A DATA frame."""
    return frames.frame(frames.DATA, frames.END_STREAM if end else 0, stream, payload)
