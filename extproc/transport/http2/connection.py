"""The server's side of an HTTP/2 connection: RFC 9113, without I/O and without a clock of its own.

Bytes go in with :meth:`Connection.receive`, and come out in ``sender.out``. Streams are told to a ``Receiver``, which gives
each one a ``Sink`` for what comes next. Whatever a peer sends, nothing is raised: a fault ends the stream or the connection
with the code that the RFC asks for.

Windows. A connection's own window is so large that it never holds anybody up, since one stream that nobody reads must not
stop the others. A stream's window is what bounds what nobody has read: its owner says with :meth:`Connection.grant` what the
peer may send.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from extproc.transport.http2 import frames
from extproc.transport.http2.budget import Budget
from extproc.transport.http2.errors import (
    COMPRESSION_ERROR,
    ENHANCE_YOUR_CALM,
    FLOW_CONTROL_ERROR,
    FRAME_SIZE_ERROR,
    INTERNAL_ERROR,
    NO_ERROR,
    PROTOCOL_ERROR,
    REFUSED_STREAM,
    STREAM_CLOSED,
    ConnectionFault,
    StreamFault,
)
from extproc.transport.http2.frames import DATA, END_HEADERS, END_STREAM, HEAD, HEAD_BYTES, HEADERS, PADDED, WITH_PRIORITY
from extproc.transport.http2.head import Head, MalformedError, check_trailers, read_head
from extproc.transport.http2.hpack import Decoder, Field, HeadersTooLargeError, HpackError
from extproc.transport.http2.sender import Sender
from extproc.transport.http2.stream import NOBODY, Sink, Stream

__all__ = ["Connection", "Head", "Limits", "Receiver", "Sink", "Stream"]

_SHUTDOWN_PING: Final = b"shutdown"
_KNOWN_HEADS: Final = 256
"""Blocks of headers that are remembered."""
_KNOWN_BLOCK_BYTES: Final = 1024
"""Of each of them, at most."""
_CLOSED_STREAMS: Final = 1024
"""Closed streams that are remembered, at least: a peer may have sent something before it heard of it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a peer may do."""

    max_streams: int = 1_000
    """Open at the same time."""
    max_headers_bytes: int = 64 * 1024
    """The headers of one request, each with 32 bytes more than its text; and, of their compressed form, as much again."""
    stream_window_bytes: int = 1 << 20
    """What a peer may send on a stream before anybody has read it."""
    connection_window_bytes: int = 1 << 30
    """Given back as it comes."""
    max_frame_bytes: int = frames.MIN_FRAME_BYTES
    """Payload of one frame."""
    idle_frames: int = 10_000
    """Frames that lead to nothing, at once; see :class:`~extproc.transport.http2.budget.Budget`."""
    idle_frames_per_s: float = 1_000.0
    """The same, in the long run."""


class Receiver(Protocol):
    """Who serves the streams of a connection."""

    def opened(self, stream: Stream, head: Head) -> Sink | None:
        """A request is there. None: it is refused, and the peer may try it elsewhere. Must not raise."""


class Connection:
    """One connection, from its first byte to its last."""

    __slots__ = (
        "_block",
        "_block_bytes",
        "_block_ends",
        "_block_fault",
        "_block_stream",
        "_budget",
        "_closed_before",
        "_closed_lately",
        "_decoder",
        "_final",
        "_greeted",
        "_have_bytes",
        "_heads",
        "_heads_changes",
        "_last",
        "_limits",
        "_need_bytes",
        "_pieces",
        "_receive_window",
        "_receiver",
        "_settled",
        "_shutting_down",
        "closed",
        "fault",
        "sender",
        "streams",
    )

    def __init__(self, receiver: Receiver, limits: Limits, clock: Callable[[], float]) -> None:
        """``clock``: seconds, only forward."""
        self._receiver = receiver
        self._limits = limits
        self.sender = Sender()
        self.streams: dict[int, Stream] = {}
        """The open ones."""
        self.closed = False
        """The socket is to be closed once ``sender.out`` is written."""
        self.fault: ConnectionFault | None = None
        """What the peer did that ended the connection."""
        self._decoder = Decoder(limits.max_headers_bytes)
        self._heads: dict[bytes, Head] = {}
        """Blocks that were read since the decoder's table was last changed."""
        self._heads_changes = 0
        self._budget = Budget(burst=limits.idle_frames, per_s=limits.idle_frames_per_s, clock=clock)
        self._last = 0
        """The highest stream that the peer has opened."""
        self._shutting_down = self._final = False
        self._greeted = self._settled = False
        self._pieces: list[bytes] = []
        """The beginning of a frame, until the rest of it is here: ``_need_bytes``, of which we have ``_have_bytes``."""
        self._have_bytes = self._need_bytes = 0
        self._block: list[bytes] | None = None
        """A block of headers whose end has not come yet, with what is known of it."""
        self._block_bytes = self._block_stream = 0
        self._block_ends = False
        self._block_fault: StreamFault | None = None
        self._closed_lately: dict[int, bool] = {}
        """Stream -> whether it was we who reset it, so that what is still on its way is no fault; and those before them."""
        self._closed_before: dict[int, bool] = {}
        self._receive_window = limits.connection_window_bytes
        self.sender.out += (
            frames.settings(
                {
                    frames.MAX_CONCURRENT_STREAMS: limits.max_streams,
                    frames.INITIAL_WINDOW_SIZE: limits.stream_window_bytes,
                    frames.MAX_FRAME_SIZE: limits.max_frame_bytes,
                    frames.MAX_HEADER_LIST_SIZE: limits.max_headers_bytes,
                }
            ),
            frames.window_update(0, limits.connection_window_bytes - frames.DEFAULT_WINDOW_BYTES),
        )

    # -- for the owner of the socket ---------------------------------------------------------------------------------------

    def receive(self, data: bytes) -> None:
        """Bytes from the peer."""
        if self.closed:
            return
        if self._pieces:
            self._pieces.append(data)
            self._have_bytes += len(data)
            if self._have_bytes < self._need_bytes:
                return
            data = b"".join(self._pieces)
            self._pieces.clear()
        try:
            position = self._read_frames(data)
        except ConnectionFault as fault:
            self._fail(fault)
            return
        if position < len(data) and not self.closed:
            self._pieces.append(data[position:])
            self._have_bytes = len(data) - position

    def lost(self) -> None:
        """The socket is closed."""
        self.closed = True
        streams = list(self.streams.values())
        self.streams.clear()
        for stream in streams:
            self._drop(stream, NO_ERROR)

    def abandon(self, why: str) -> None:
        """End the connection for a reason of our own."""
        self._fail(ConnectionFault(INTERNAL_ERROR, why))

    def shut_down(self) -> None:
        """Ask the peer for no more streams (section 6.8). Those it sends before it has heard of it are served."""
        if not self._shutting_down and not self.closed:
            self._shutting_down = True
            self.sender.out += (
                frames.goaway(frames.MAX_WINDOW_BYTES, NO_ERROR),
                frames.frame(frames.PING, 0, 0, _SHUTDOWN_PING),
            )

    @property
    def greeted(self) -> bool:
        """The peer speaks HTTP/2."""
        return self._settled

    def finish(self) -> None:
        """No stream is opened from here on; the connection is closed after the last one."""
        if not self._final and not self.closed:
            self._shutting_down = self._final = True
            self.sender.out.append(frames.goaway(self._last, NO_ERROR))
            self._close_if_done()

    def pause(self) -> None:
        """The socket takes no more for now."""
        self.sender.pause()

    def resume(self) -> None:
        """The socket takes more again."""
        self._drained(self.sender.resume())

    # -- for the owner of a stream -----------------------------------------------------------------------------------------

    def end(self, stream: Stream, trailers: bytes) -> None:
        """The last headers of a stream, behind what still waits."""
        if self.sender.end(stream, trailers):
            self._local_ended(stream)

    def reset(self, stream: Stream, code: int) -> None:
        """Cut a stream. Its sink hears no more."""
        if self.streams.pop(stream.id, None) is not None:
            self.sender.forget(stream)
            self.sender.out.append(frames.rst_stream(stream.id, code))
            self._remember(stream, by_us=True)
            stream.sink = NOBODY

    def grant(self, stream: Stream, window_bytes: int) -> None:
        """Let the peer send so many bytes more on a stream; it never gets less than it has."""
        by_bytes = min(window_bytes, frames.MAX_WINDOW_BYTES) - stream.receive_window
        if by_bytes > 0 and stream.remote_open:
            stream.receive_window += by_bytes
            self.sender.out.append(frames.window_update(stream.id, by_bytes))

    # -- frames ------------------------------------------------------------------------------------------------------------

    def _read_frames(self, data: bytes) -> int:
        """All whole frames; where the first one begins that is not whole. Raises ConnectionFault."""
        position, end = 0, len(data)
        if not self._greeted:
            greeting = data[: len(frames.PREFACE)]
            if not frames.PREFACE.startswith(greeting):
                raise ConnectionFault(PROTOCOL_ERROR, "this is not HTTP/2 with prior knowledge")
            if len(greeting) < len(frames.PREFACE):
                self._need_bytes = len(frames.PREFACE)
                return 0
            self._greeted, position = True, len(frames.PREFACE)
        max_frame_bytes, streams = self._limits.max_frame_bytes, self.streams
        while end - position >= HEAD_BYTES:
            high, low, kind, flags, number = HEAD.unpack_from(data, position)
            length = high << 16 | low
            if length > max_frame_bytes:
                raise ConnectionFault(FRAME_SIZE_ERROR, f"a frame of {length} bytes")
            start = position + HEAD_BYTES
            position = start + length
            if position > end:
                self._need_bytes = HEAD_BYTES + length
                return start - HEAD_BYTES
            if kind == DATA and self._block is None and self._settled:
                stream = streams.get(number)
                # The plainest way is the most common one: data for somebody, within the windows.
                if stream is not None and stream.remote_open and not flags & PADDED and length <= stream.receive_window:
                    self._count(length)
                    stream.receive_window -= length
                    if stream.content_left >= 0 and not self._promised(stream, length, flags):
                        continue
                    if length:
                        stream.sink.data(data, start, position)
                    elif not flags & END_STREAM:
                        self._spend()
                    if flags & END_STREAM and stream.remote_open:
                        self._remote_ended(stream)
                    continue
            self._frame(kind, flags, number & 0x7FFFFFFF, data, start, position)
            if self.closed:
                return end
        self._need_bytes = HEAD_BYTES
        return position

    def _frame(self, kind: int, flags: int, number: int, data: bytes, start: int, stop: int) -> None:
        """Any frame. Raises ConnectionFault."""
        if not self._settled and (kind != frames.SETTINGS or flags & frames.ACK):
            raise ConnectionFault(PROTOCOL_ERROR, "the first frame is not SETTINGS")
        if self._block is not None and (kind != frames.CONTINUATION or number != self._block_stream):
            raise ConnectionFault(PROTOCOL_ERROR, "a frame within a block of headers")
        handle = _HANDLERS.get(kind)
        if handle is None:  # of a kind that we do not know (5.5)
            self._spend()
            return
        try:
            handle(self, flags, number, data, start, stop)
        except StreamFault as fault:
            self._fail_stream(number, fault)

    def _on_data(self, flags: int, number: int, data: bytes, start: int, stop: int) -> None:
        """Section 6.1."""
        if number == 0:
            raise ConnectionFault(PROTOCOL_ERROR, "DATA on stream 0")
        length = stop - start
        self._count(length)
        start, stop = _without_padding(flags, data, start, stop)
        stream = self.streams.get(number)
        if stream is None:
            self._stray(number)
            return
        if not stream.remote_open:
            raise StreamFault(STREAM_CLOSED, "DATA after the end")
        stream.receive_window -= length
        if stream.receive_window < 0:
            raise StreamFault(FLOW_CONTROL_ERROR, "more than the stream's window")
        if stream.content_left >= 0 and not self._promised(stream, stop - start, flags):
            return
        if start < stop:
            stream.sink.data(data, start, stop)
        elif not flags & END_STREAM:
            self._spend()
        if stream.remote_open:
            if flags & END_STREAM:
                self._remote_ended(stream)
            elif flags & PADDED and stream.receive_window < self._limits.stream_window_bytes // 2:
                # Padding fills the window, and nobody reads it.
                self.grant(stream, stream.receive_window + length - (stop - start))

    def _on_headers(self, flags: int, number: int, data: bytes, start: int, stop: int) -> None:
        """Section 6.2."""
        if number == 0:
            raise ConnectionFault(PROTOCOL_ERROR, "HEADERS on stream 0")
        start, stop = _without_padding(flags, data, start, stop)
        fault: StreamFault | None = None
        if flags & WITH_PRIORITY:
            if stop - start < 5:
                raise ConnectionFault(FRAME_SIZE_ERROR, "HEADERS without the priority that they announce")
            if _depends_on(data, start) == number:
                fault = StreamFault(PROTOCOL_ERROR, "a stream that depends on itself")
            start += 5
        self._block_fault, self._block_ends = fault, bool(flags & END_STREAM)
        if flags & END_HEADERS:
            self._on_block(number, data[start:stop])
        else:
            self._block, self._block_stream, self._block_bytes = [data[start:stop]], number, stop - start

    def _on_continuation(self, flags: int, number: int, data: bytes, start: int, stop: int) -> None:
        """Section 6.10."""
        block = self._block
        if block is None:
            raise ConnectionFault(PROTOCOL_ERROR, "CONTINUATION of nothing")
        if start == stop:
            self._spend()
        block.append(data[start:stop])
        self._block_bytes += stop - start
        if self._block_bytes > self._limits.max_headers_bytes:
            raise ConnectionFault(ENHANCE_YOUR_CALM, f"headers of more than {self._limits.max_headers_bytes} bytes")
        if flags & END_HEADERS:
            self._block = None
            self._on_block(number, b"".join(block))

    def _on_block(self, number: int, block: bytes) -> None:
        """Headers are complete: a request, or the end of one."""
        stream = self.streams.get(number)
        if stream is not None:
            self._on_trailers(stream, self._decode(block))
            return
        if number % 2 == 0:
            raise ConnectionFault(PROTOCOL_ERROR, "a client's stream with an even number")
        if number <= self._last:
            by_us = self._closed_lately.get(number, self._closed_before.get(number))
            if not by_us:
                raise ConnectionFault(
                    PROTOCOL_ERROR if by_us is None else STREAM_CLOSED, "HEADERS on a stream that is closed, or was left out"
                )
            self._decode(block)
            return
        if self._final:
            self._decode(block)  # the peer reads in GOAWAY that nobody looks at it
            return
        self._last = number
        head = self._head(block)
        if self._block_fault is not None:
            raise self._block_fault
        limits = self._limits
        if len(self.streams) >= limits.max_streams:
            raise StreamFault(REFUSED_STREAM, f"more than {limits.max_streams} streams")
        content = -1 if head.content_bytes is None else head.content_bytes
        stream = Stream(number, self.sender.initial_window, limits.stream_window_bytes, content)
        if self._block_ends and content > 0:
            raise StreamFault(PROTOCOL_ERROR, "less than content-length promises")
        stream.remote_open = not self._block_ends
        self.streams[number] = stream
        sink = self._receiver.opened(stream, head)
        if sink is None:
            del self.streams[number]
            raise StreamFault(REFUSED_STREAM, "refused")
        if stream.local_open:  # it may have been answered already
            stream.sink = sink
            if self._block_ends:
                sink.ended()

    def _head(self, block: bytes) -> Head:
        """A request's headers. Raises ConnectionFault, StreamFault."""
        heads = self._heads
        if self._heads_changes == self._decoder.changes:
            known = heads.get(block)
            if known is not None:
                return known
        changes = self._decoder.changes
        fields = self._decode(block)
        try:
            head = read_head(fields)
        except MalformedError as error:
            raise StreamFault(PROTOCOL_ERROR, str(error)) from None
        if self._heads_changes != self._decoder.changes or len(heads) >= _KNOWN_HEADS:
            heads.clear()
            self._heads_changes = self._decoder.changes
        if changes == self._decoder.changes and len(block) <= _KNOWN_BLOCK_BYTES:
            heads[block] = head
        return head

    def _decode(self, block: bytes) -> list[Field]:
        try:
            return self._decoder.decode(block)
        except HpackError as error:
            raise ConnectionFault(COMPRESSION_ERROR, str(error)) from None
        except HeadersTooLargeError as error:
            raise StreamFault(ENHANCE_YOUR_CALM, str(error)) from None

    def _on_trailers(self, stream: Stream, fields: list[Field]) -> None:
        if not stream.remote_open:
            raise StreamFault(STREAM_CLOSED, "HEADERS after the end")
        if self._block_fault is not None:
            raise self._block_fault
        if not self._block_ends:
            raise StreamFault(PROTOCOL_ERROR, "trailers that do not end the stream")
        try:
            check_trailers(fields)
        except MalformedError as error:
            raise StreamFault(PROTOCOL_ERROR, str(error)) from None
        if stream.content_left > 0:
            raise StreamFault(PROTOCOL_ERROR, "less than content-length promises")
        self._remote_ended(stream)

    def _on_priority(self, _flags: int, number: int, data: bytes, start: int, stop: int) -> None:
        """Section 6.3: it is checked, and that is all (5.3.2)."""
        if number == 0:
            raise ConnectionFault(PROTOCOL_ERROR, "PRIORITY on stream 0")
        self._spend()
        if stop - start != 5:
            raise StreamFault(FRAME_SIZE_ERROR, "PRIORITY of another size than 5")
        if _depends_on(data, start) == number:
            raise StreamFault(PROTOCOL_ERROR, "a stream that depends on itself")

    def _on_rst_stream(self, _flags: int, number: int, data: bytes, start: int, stop: int) -> None:
        """Section 6.4."""
        if stop - start != 4:
            raise ConnectionFault(FRAME_SIZE_ERROR, "RST_STREAM of another size than 4")
        self._not_idle(number, "RST_STREAM")
        stream = self.streams.pop(number, None)
        if stream is None:
            self._spend()
            return
        self._remember(stream, by_us=False)
        self._drop(stream, int.from_bytes(data[start:stop], "big"))

    def _on_settings(self, flags: int, number: int, data: bytes, start: int, stop: int) -> None:
        """Section 6.5."""
        if number != 0:
            raise ConnectionFault(PROTOCOL_ERROR, "SETTINGS on a stream")
        if flags & frames.ACK:
            if start != stop:
                raise ConnectionFault(FRAME_SIZE_ERROR, "an acknowledgement with settings")
            return
        if (stop - start) % 6:
            raise ConnectionFault(FRAME_SIZE_ERROR, "SETTINGS that are cut off")
        if self._settled:
            self._spend()
        self._settled = True
        for name, value in frames.read_settings(data[start:stop]):
            self._set(name, value)
        self.sender.out.append(frames.SETTINGS_ACK)

    def _set(self, name: int, value: int) -> None:
        if name == frames.ENABLE_PUSH:
            if value > 1:
                raise ConnectionFault(PROTOCOL_ERROR, "SETTINGS_ENABLE_PUSH is neither 0 nor 1")
        elif name == frames.INITIAL_WINDOW_SIZE:
            if value > frames.MAX_WINDOW_BYTES:
                raise ConnectionFault(FLOW_CONTROL_ERROR, "SETTINGS_INITIAL_WINDOW_SIZE is above 2**31-1")
            self._drained(self.sender.resize(value, list(self.streams.values())))
        elif name == frames.MAX_FRAME_SIZE:
            if not frames.MIN_FRAME_BYTES <= value <= frames.MAX_FRAME_BYTES:
                raise ConnectionFault(PROTOCOL_ERROR, "SETTINGS_MAX_FRAME_SIZE is not within its bounds")
            self.sender.set_frame_bytes(value)

    def _on_push_promise(self, *_: object) -> None:
        """Section 6.6: a client may not send it."""
        raise ConnectionFault(PROTOCOL_ERROR, "PUSH_PROMISE from a client")

    def _on_ping(self, flags: int, number: int, data: bytes, start: int, stop: int) -> None:
        """Section 6.7."""
        if stop - start != 8:
            raise ConnectionFault(FRAME_SIZE_ERROR, "PING of another size than 8")
        if number != 0:
            raise ConnectionFault(PROTOCOL_ERROR, "PING on a stream")
        if not flags & frames.ACK:
            self._spend()
            self.sender.out.append(frames.frame(frames.PING, frames.ACK, 0, data[start:stop]))
        elif self._shutting_down and data[start:stop] == _SHUTDOWN_PING:
            self.finish()

    def _on_goaway(self, _flags: int, number: int, _data: bytes, start: int, stop: int) -> None:
        """Section 6.8: the client opens no more streams, and closes the connection itself when it has all answers."""
        if number != 0:
            raise ConnectionFault(PROTOCOL_ERROR, "GOAWAY on a stream")
        if stop - start < 8:
            raise ConnectionFault(FRAME_SIZE_ERROR, "GOAWAY of less than 8 bytes")
        self._spend()

    def _on_window_update(self, _flags: int, number: int, data: bytes, start: int, stop: int) -> None:
        """Section 6.9."""
        if stop - start != 4:
            raise ConnectionFault(FRAME_SIZE_ERROR, "WINDOW_UPDATE of another size than 4")
        by_bytes = int.from_bytes(data[start:stop], "big") & 0x7FFFFFFF
        if number == 0:
            if by_bytes == 0:
                raise ConnectionFault(PROTOCOL_ERROR, "WINDOW_UPDATE by nothing")
            self._drained(self.sender.grow(by_bytes))
            return
        self._not_idle(number, "WINDOW_UPDATE")
        stream = self.streams.get(number)
        if stream is None:
            return  # it was sent before the peer heard of the end
        if by_bytes == 0:
            raise StreamFault(PROTOCOL_ERROR, "WINDOW_UPDATE by nothing")
        if self.sender.grow_stream(stream, by_bytes):
            self._drained([stream])

    # -- what frames have in common ----------------------------------------------------------------------------------------

    def _count(self, length: int) -> None:
        """Bytes of DATA on the connection, whoever they are for."""
        self._receive_window -= length
        if self._receive_window < self._limits.connection_window_bytes // 2:
            if self._receive_window < 0:
                raise ConnectionFault(FLOW_CONTROL_ERROR, "more than the connection's window")
            by_bytes = self._limits.connection_window_bytes - self._receive_window
            self._receive_window += by_bytes
            self.sender.out.append(frames.window_update(0, by_bytes))

    def _spend(self) -> None:
        if not self._budget.spend():
            raise ConnectionFault(ENHANCE_YOUR_CALM, "too many frames that lead to nothing")

    def _promised(self, stream: Stream, length: int, flags: int) -> bool:
        """Whether so much data is what content-length says (section 8.1.1); else the stream is ended."""
        stream.content_left -= length
        if stream.content_left < 0 or (flags & END_STREAM and stream.content_left > 0):
            self._fail_stream(stream.id, StreamFault(PROTOCOL_ERROR, "another length than content-length says"))
            return False
        return True

    def _not_idle(self, number: int, what: str) -> None:
        """Streams that were never opened take no such frame (section 5.1)."""
        if number == 0 or number % 2 == 0 or (number > self._last and not self._final):
            raise ConnectionFault(PROTOCOL_ERROR, f"{what} on a stream that is not open")

    def _stray(self, number: int) -> None:
        """DATA for a stream that is not open."""
        self._not_idle(number, "DATA")
        if number <= self._last and not self._closed_lately.get(number, self._closed_before.get(number)):
            raise StreamFault(STREAM_CLOSED, "DATA on a closed stream")

    def _remote_ended(self, stream: Stream) -> None:
        stream.remote_open = False
        stream.sink.ended()

    def _local_ended(self, stream: Stream) -> None:
        """Our last frame is out: a peer that still sends is asked to stop (section 8.1)."""
        if self.streams.pop(stream.id, None) is None:
            return
        if stream.remote_open:
            self.sender.out.append(frames.rst_stream(stream.id, NO_ERROR))
        self._remember(stream, by_us=stream.remote_open)
        stream.sink = NOBODY

    def _remember(self, stream: Stream, *, by_us: bool) -> None:
        stream.remote_open = False
        self._closed_lately[stream.id] = by_us
        if len(self._closed_lately) >= _CLOSED_STREAMS:
            self._closed_before, self._closed_lately = self._closed_lately, {}
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self._final and not self.streams:
            self.closed = True

    def _drained(self, streams: list[Stream]) -> None:
        for stream in streams:
            sink = stream.sink
            if not stream.local_open:
                self._local_ended(stream)
            sink.drained()

    def _drop(self, stream: Stream, code: int) -> None:
        self.sender.forget(stream)
        stream.remote_open = False
        sink, stream.sink = stream.sink, NOBODY
        sink.gone(code)

    def _fail_stream(self, number: int, fault: StreamFault) -> None:
        self._spend()
        self.sender.out.append(frames.rst_stream(number, fault.code))
        stream = self.streams.pop(number, None)
        if stream is not None:
            self._remember(stream, by_us=True)
            self._drop(stream, fault.code)
        elif number == self._last:
            self._closed_lately[number] = True

    def _fail(self, fault: ConnectionFault) -> None:
        if not self.closed:
            self.fault = fault
            self.sender.out.append(frames.goaway(self._last, fault.code, str(fault)))
            self.lost()


def _without_padding(flags: int, data: bytes, start: int, stop: int) -> tuple[int, int]:
    if not flags & PADDED:
        return start, stop
    if start == stop:
        raise ConnectionFault(FRAME_SIZE_ERROR, "a padded frame that does not say how much")
    padding = data[start]
    if padding >= stop - start:
        raise ConnectionFault(PROTOCOL_ERROR, "more padding than payload")
    return start + 1, stop - padding


def _depends_on(data: bytes, start: int) -> int:
    return int.from_bytes(data[start : start + 4], "big") & 0x7FFFFFFF


_HANDLERS: Final[dict[int, Callable[[Connection, int, int, bytes, int, int], None]]] = {
    DATA: Connection._on_data,
    HEADERS: Connection._on_headers,
    frames.PRIORITY: Connection._on_priority,
    frames.RST_STREAM: Connection._on_rst_stream,
    frames.SETTINGS: Connection._on_settings,
    frames.PUSH_PROMISE: Connection._on_push_promise,
    frames.PING: Connection._on_ping,
    frames.GOAWAY: Connection._on_goaway,
    frames.WINDOW_UPDATE: Connection._on_window_update,
    frames.CONTINUATION: Connection._on_continuation,
}
