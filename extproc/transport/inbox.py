"""Messages out of the data of a stream: gRPC's length-prefixed messages, as in its PROTOCOL-HTTP2.md. No I/O.

What nobody has taken is bounded by the stream's window. The window is given back

* for a whole message when it is taken;
* for a message that is under way as it comes, and, where the message is larger than the window, for all of it at once, if
  less than a window of others waits to be taken.

So a stream holds at most two windows of what nobody took, and one message of the limit.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections import deque
from typing import Final

from extproc.transport.http2.connection import Connection, Stream
from extproc.transport.status import Status

PREFIX: Final = struct.Struct(">BI")
"""In front of each message: whether it is compressed, and its length."""


class Inbox(ABC):
    """What came on a stream."""

    __slots__ = (
        "_connection",
        "_have_bytes",
        "_max_message_bytes",
        "_need_bytes",
        "_parts",
        "_prefix",
        "_shut",
        "_stream",
        "_unread",
        "_window_bytes",
        "messages",
    )

    def __init__(self, connection: Connection, stream: Stream, max_message_bytes: int, window_bytes: int) -> None:
        self._connection = connection
        self._stream = stream
        self._max_message_bytes = max_message_bytes
        self._window_bytes = window_bytes
        self.messages: deque[bytes] = deque()
        """Whole ones, not yet taken."""
        self._unread = 0
        """Their bytes, with prefixes."""
        self._parts: list[bytes] | None = None
        """A message under way: ``_have_bytes`` of ``_need_bytes``."""
        self._have_bytes = self._need_bytes = 0
        self._prefix = b""
        """The beginning of a prefix."""
        self._shut = False
        """Nothing is taken in any more."""

    # -- for whoever is told -----------------------------------------------------------------------------------------------

    @abstractmethod
    def arrived(self) -> None:
        """There is a message, where there was none."""

    @abstractmethod
    def refuse(self, status: Status, text: str) -> None:
        """What came cannot be taken: the call is to end."""

    # -- from the stream ---------------------------------------------------------------------------------------------------

    def data(self, buffer: bytes, start: int, stop: int) -> None:
        """``buffer[start:stop]`` came."""
        if self._shut:
            return
        if self._parts is None and not self._prefix and stop - start >= PREFIX.size:
            # The plainest way is the most common one: one whole message.
            compressed, length = PREFIX.unpack_from(buffer, start)
            if start + PREFIX.size + length == stop and not compressed and length <= self._max_message_bytes:
                self._take_in(buffer[start + PREFIX.size : stop])
                return
        while start < stop:
            if self._parts is None:
                start = self._begin(buffer, start, stop)
                if start < 0:
                    return
            else:
                start = self._go_on(buffer, start, stop)
        self._let_in()

    def shut(self) -> None:
        """Drop what there is, and what comes: nobody will take it."""
        self._shut = True
        self.messages.clear()
        self._parts, self._prefix = None, b""

    @property
    def cut_off(self) -> bool:
        """A message has begun and not ended."""
        return self._parts is not None or bool(self._prefix)

    def take(self) -> bytes:
        """The oldest message. There must be one."""
        message = self.messages.popleft()
        self._unread -= len(message) + PREFIX.size
        if self._stream.receive_window < self._window_bytes // 2:
            self._let_in()
        return message

    # -- inside ------------------------------------------------------------------------------------------------------------

    def _begin(self, buffer: bytes, start: int, stop: int) -> int:
        """The prefix of a message. Where its text begins; -1 if it is refused."""
        missing = PREFIX.size - len(self._prefix)
        self._prefix += buffer[start : min(start + missing, stop)]
        if len(self._prefix) < PREFIX.size:
            return stop
        compressed, length = PREFIX.unpack(self._prefix)
        if compressed:
            self._prefix = b""
            self.refuse(Status.UNIMPLEMENTED, "compressed messages are not supported")
            return -1
        if length > self._max_message_bytes:
            self._prefix = b""
            self.refuse(Status.RESOURCE_EXHAUSTED, f"a message of {length} bytes, more than {self._max_message_bytes}")
            return -1
        self._prefix, self._parts, self._have_bytes, self._need_bytes = b"", [], 0, length
        if length == 0:
            self._complete()
        return start + missing

    def _go_on(self, buffer: bytes, start: int, stop: int) -> int:
        """More of a message. Where the next one begins."""
        parts = self._parts
        assert parts is not None
        end = min(stop, start + self._need_bytes - self._have_bytes)
        parts.append(buffer[start:end])
        self._have_bytes += end - start
        if self._have_bytes == self._need_bytes:
            self._complete()
        return end

    def _complete(self) -> None:
        parts, self._parts = self._parts, None
        assert parts is not None
        self._take_in(parts[0] if len(parts) == 1 else b"".join(parts))

    def _take_in(self, message: bytes) -> None:
        self._unread += len(message) + PREFIX.size
        self.messages.append(message)
        if len(self.messages) == 1:
            self.arrived()

    def _let_in(self) -> None:
        """Give the stream the window that it should have, unless that is too little to speak of."""
        window = self._window_bytes - self._unread
        if window <= 0:
            return  # what is there is to be taken first
        if self._parts is not None and self._need_bytes > self._window_bytes:
            window += self._need_bytes - self._have_bytes
        if window - self._stream.receive_window >= self._window_bytes // 2:
            self._connection.grant(self._stream, window)
