"""One stream, and who listens to it."""

from __future__ import annotations

from collections import deque
from typing import Final, Protocol


class Sink(Protocol):
    """What a stream's owner is told. None of it may raise."""

    def data(self, buffer: bytes, start: int, stop: int) -> None:
        """``buffer[start:stop]`` came, which is never empty."""

    def ended(self) -> None:
        """The peer sends no more on this stream."""

    def gone(self, _code: int) -> None:
        """The stream is no more: the peer reset it, broke the protocol, or the connection is lost."""

    def drained(self) -> None:
        """Nothing that was sent is still held back."""


class _Nobody:
    """Whom a closed stream tells."""

    def data(self, buffer: bytes, start: int, stop: int) -> None:
        """Not told."""

    def ended(self) -> None:
        """Not told."""

    def gone(self, _code: int) -> None:
        """Not told."""

    def drained(self) -> None:
        """Not told."""


NOBODY: Final = _Nobody()
"""A stream lets go of its owner when it is closed, so that neither needs the garbage collector."""


class Stream:
    """One request and its answer (RFC 9113 section 5.1). It is open as long as one of its sides is."""

    __slots__ = (
        "content_left",
        "id",
        "local_open",
        "queue",
        "receive_window",
        "remote_open",
        "send_window",
        "sink",
        "trailers",
    )

    def __init__(self, number: int, send_window: int, receive_window: int, content_left: int) -> None:
        self.id = number
        self.sink: Sink = NOBODY
        self.remote_open = True
        """The peer may send."""
        self.local_open = True
        """We may send."""
        self.send_window = send_window
        """Bytes that the peer still takes; below zero after it has made its windows smaller (section 6.9.2)."""
        self.receive_window = receive_window
        """Bytes that the peer may still send."""
        self.content_left = content_left
        """Bytes that content-length still promises; -1 where it was not sent."""
        self.queue: deque[memoryview] | None = None
        """What waits for the peer's windows, or for the socket."""
        self.trailers: bytes | None = None
        """A block of headers that ends the stream behind the queue."""
