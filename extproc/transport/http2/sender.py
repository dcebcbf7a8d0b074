"""What goes to the peer, within its windows: RFC 9113 section 5.2.

A frame is a few pieces in ``out``, which the owner of the socket joins and writes.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from extproc.transport.http2 import frames, hpack
from extproc.transport.http2.errors import FLOW_CONTROL_ERROR, ConnectionFault, StreamFault
from extproc.transport.http2.frames import HEAD
from extproc.transport.http2.stream import Stream

_MAX_FRAME_WE_SEND_BYTES: Final = 256 * 1024
"""However large the peer allows them: other streams wait for the end of a frame."""


class Sender:
    """The sending half of a connection."""

    __slots__ = ("_frame_bytes", "_initial_window", "_paused", "_table_told", "_waiting", "_window", "out")

    def __init__(self) -> None:
        self.out: list[bytes | memoryview] = []
        """Pieces to be written, in order; whoever writes them clears it."""
        self._frame_bytes = frames.MIN_FRAME_BYTES
        self._initial_window = frames.DEFAULT_WINDOW_BYTES
        self._window = frames.DEFAULT_WINDOW_BYTES
        self._paused = False
        self._table_told = False
        self._waiting: dict[Stream, None] = {}
        """Streams that have room in their own window, but wait for the connection's or for the socket; in turn."""

    @property
    def initial_window(self) -> int:
        """What the peer takes on a new stream, in bytes."""
        return self._initial_window

    # -- to send -----------------------------------------------------------------------------------------------------------

    def headers(self, stream: Stream, block: bytes) -> None:
        """Headers of an answer, in front of its data."""
        self._block(stream.id, block, 0)

    def data(self, stream: Stream, prefix: bytes, body: bytes) -> bool:
        """Both, one behind the other. False: not all of it could go yet; ``sink.drained`` is called when it has."""
        length = len(prefix) + len(body)
        if (
            length <= self._frame_bytes
            and length <= stream.send_window
            and length <= self._window
            and stream.queue is None
            and not self._paused
        ):
            stream.send_window -= length
            self._window -= length
            self.out += (HEAD.pack(length >> 16, length & 0xFFFF, frames.DATA, 0, stream.id), prefix, body)
            return True
        if stream.queue is None:
            stream.queue = deque()
        stream.queue += (memoryview(prefix), memoryview(body))
        while self._can_send(stream):
            self._send_frame(stream)
        return self._settle(stream)

    def end(self, stream: Stream, trailers: bytes) -> bool:
        """The end of the stream, behind all that still waits. False: it does wait."""
        if stream.queue is None:
            self._block(stream.id, trailers, frames.END_STREAM)
            stream.local_open = False
            return True
        stream.trailers = trailers
        return False

    def forget(self, stream: Stream) -> None:
        """The stream is no more: nothing of it is sent any more."""
        stream.local_open = False
        stream.queue = stream.trailers = None
        self._waiting.pop(stream, None)

    # -- what the peer and the socket allow --------------------------------------------------------------------------------

    def grow(self, by_bytes: int) -> list[Stream]:
        """The peer takes more on the connection (section 6.9). Returns the streams that are done by it.

        Raises ConnectionFault for more than 2**31-1.
        """
        self._window += by_bytes
        if self._window > frames.MAX_WINDOW_BYTES:
            raise ConnectionFault(FLOW_CONTROL_ERROR, "the connection's window is too large")
        return self._pump()

    def grow_stream(self, stream: Stream, by_bytes: int) -> bool:
        """The peer takes more on a stream. True: nothing of it waits any more. Raises StreamFault for more than 2**31-1."""
        stream.send_window += by_bytes
        if stream.send_window > frames.MAX_WINDOW_BYTES:
            raise StreamFault(FLOW_CONTROL_ERROR, "the stream's window is too large")
        if stream.queue is None:
            return False
        while self._can_send(stream):
            self._send_frame(stream)
        return self._settle(stream)

    def resize(self, initial_window: int, streams: list[Stream]) -> list[Stream]:
        """The peer changes the window of every stream (section 6.9.2). Returns the streams that are done by it.

        Raises ConnectionFault where a window becomes larger than 2**31-1.
        """
        by_bytes, self._initial_window = initial_window - self._initial_window, initial_window
        try:
            return [stream for stream in streams if self.grow_stream(stream, by_bytes)]
        except StreamFault as fault:
            raise ConnectionFault(fault.code, str(fault)) from None

    def set_frame_bytes(self, most_bytes: int) -> None:
        """The peer takes frames of so many bytes."""
        self._frame_bytes = min(most_bytes, _MAX_FRAME_WE_SEND_BYTES)

    def pause(self) -> None:
        """The socket takes no more: data waits; what is not data is small, and goes on."""
        self._paused = True

    def resume(self) -> list[Stream]:
        """The socket takes more again. Returns the streams that are done by it."""
        self._paused = False
        return self._pump()

    # -- inside ------------------------------------------------------------------------------------------------------------

    def _can_send(self, stream: Stream) -> bool:
        return bool(stream.queue) and stream.send_window > 0 and self._window > 0 and not self._paused

    def _send_frame(self, stream: Stream) -> None:
        """One frame from the queue, as large as it may be."""
        queue = stream.queue
        assert queue
        room = min(self._frame_bytes, stream.send_window, self._window)
        pieces: list[memoryview] = []
        length = 0
        while queue and length < room:
            piece = queue[0]
            if len(piece) <= room - length:
                queue.popleft()
            else:
                queue[0], piece = piece[room - length :], piece[: room - length]
            pieces.append(piece)
            length += len(piece)
        stream.send_window -= length
        self._window -= length
        self.out.append(HEAD.pack(length >> 16, length & 0xFFFF, frames.DATA, 0, stream.id))
        self.out += pieces

    def _settle(self, stream: Stream) -> bool:
        """After a stream has sent what it could: is it through, or in line, or waiting for its own window?"""
        if stream.queue:
            if stream.send_window > 0:
                self._waiting[stream] = None
            return False
        stream.queue = None
        if stream.trailers is not None:
            trailers, stream.trailers = stream.trailers, None
            self.end(stream, trailers)
        return True

    def _pump(self) -> list[Stream]:
        """A frame from each stream in line, in turn, while there is room."""
        done: list[Stream] = []
        while self._waiting and self._window > 0 and not self._paused:
            stream = next(iter(self._waiting))
            del self._waiting[stream]
            if self._can_send(stream):
                self._send_frame(stream)
            if self._settle(stream):
                done.append(stream)
        return done

    def _block(self, number: int, block: bytes, flags: int) -> None:
        if not self._table_told:
            # A decoder whose table we never fill need not hear of any other size (RFC 7541 section 4.2).
            self._table_told = True
            block = hpack.EMPTY_TABLE + block
        if len(block) <= self._frame_bytes:
            self.out += (HEAD.pack(0, len(block), frames.HEADERS, flags | frames.END_HEADERS, number), block)
            return
        kind = frames.HEADERS
        for start in range(0, len(block), frames.MIN_FRAME_BYTES):
            piece = block[start : start + frames.MIN_FRAME_BYTES]
            last = frames.END_HEADERS if start + len(piece) == len(block) else 0
            self.out += (HEAD.pack(0, len(piece), kind, flags | last, number), piece)
            kind, flags = frames.CONTINUATION, 0
