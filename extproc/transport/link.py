"""One connection: the socket on one side, HTTP/2 and calls on the other."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, cast

from extproc.transport.http2.connection import Connection, Head, Limits, Sink, Stream
from extproc.transport.lean_call import LeanCall

if TYPE_CHECKING:
    from extproc.transport.lean_server import LeanServer

GREETING_TIMEOUT_S: Final = 10.0
"""By then a peer has said its first words."""
STALL_TIMEOUT_S: Final = 60.0
"""So long a peer may take nothing of what is written, before the connection is cut."""
SHUTDOWN_TIMEOUT_S: Final = 1.0
"""So long a peer may take to hear of a shutdown, and to take what was last written."""
_BUFFER_BYTES: Final = 1 << 20
"""Written and not taken, before messages wait."""
_LARGE_BYTES: Final = 16 * 1024
_MANY_PIECES: Final = 200
"""Of what waits for the end of a turn of the loop."""


class Link(asyncio.Protocol):
    """One connection of a server."""

    def __init__(self, server: LeanServer, limits: Limits, max_message_bytes: int) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._scheduled = False
        """A write is about to be made."""
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self.connection = Connection(self, limits, self._loop.time)
        self.max_message_bytes = max_message_bytes
        self.window_bytes = limits.stream_window_bytes
        self.peer = ""
        """``unix:`` or ``ip:port``."""

    # -- for the calls -----------------------------------------------------------------------------------------------------

    def opened(self, stream: Stream, head: Head) -> Sink | None:
        """See Receiver."""
        return self._server.open(LeanCall(self, stream, head, self._loop))

    def flush(self, size_bytes: int = 0) -> None:
        """Write what there is, soon: what comes within one turn of the loop goes out in one write.

        ``size_bytes``: of what was sent just now. What is large, or many pieces, goes at once, so that a socket which takes
        no more is noticed.
        """
        if size_bytes > _LARGE_BYTES or len(self.connection.sender.out) > _MANY_PIECES:
            self._write()
        elif not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._write)

    # -- for the server ----------------------------------------------------------------------------------------------------

    def shut_down(self) -> None:
        """Ask the peer for no more calls, and close after the last one."""
        self.connection.shut_down()
        self.flush()
        self._after(SHUTDOWN_TIMEOUT_S, self._finish)

    def cut(self) -> None:
        """Close, after what is written already."""
        self.connection.finish()
        self.connection.lost()
        self._write()

    # -- for the event loop ------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=_BUFFER_BYTES)
        self.peer = _peer(transport)
        self._after(GREETING_TIMEOUT_S, self._late)
        self.flush()
        if not self._server.connected(self):
            self.cut()

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        connection = self.connection
        try:
            connection.receive(data)
        except Exception as error:
            self._server.report("a connection failed", error)
            connection.abandon("internal error")
        if connection.sender.out or connection.closed:
            if connection.fault is not None:
                self._server.report(f"{self.peer} broke HTTP/2: {connection.fault}", None)
                connection.fault = None
            self._write()

    def pause_writing(self) -> None:
        """See asyncio."""
        self.connection.pause()
        self._after(STALL_TIMEOUT_S, self._stalled)

    def resume_writing(self) -> None:
        """See asyncio."""
        self._timers.pop("_stalled").cancel()
        self.connection.resume()
        self.flush()

    def connection_lost(self, _exc: Exception | None) -> None:
        """See asyncio."""
        for timer in self._timers.values():
            timer.cancel()
        self._transport = None
        self.connection.lost()
        self._server.disconnected(self)

    # -- inside ------------------------------------------------------------------------------------------------------------

    def _write(self) -> None:
        self._scheduled = False
        connection = self.connection
        out = connection.sender.out
        if out:
            if self._transport is not None:
                self._transport.write(b"".join(out))
            out.clear()
        if connection.closed:
            self._close()

    def _after(self, delay_s: float, then: Callable[[], None]) -> None:
        self._timers[then.__name__] = self._loop.call_later(delay_s, then)

    def _late(self) -> None:
        if not self.connection.greeted:
            self._abort()

    def _finish(self) -> None:
        self.connection.finish()
        self.flush()

    def _stalled(self) -> None:
        self._server.report(f"{self.peer} took nothing for {STALL_TIMEOUT_S:g} s", None)
        self._abort()

    def _close(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()
            self._after(SHUTDOWN_TIMEOUT_S, transport.abort)

    def _abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


def _peer(transport: asyncio.BaseTransport) -> str:
    connected = transport.get_extra_info("socket")
    if connected is not None and connected.family == socket.AF_UNIX:
        return "unix:"
    name = transport.get_extra_info("peername")
    if not name:
        return "unknown"
    return f"[{name[0]}]:{name[1]}" if ":" in name[0] else f"{name[0]}:{name[1]}"
