"""Calls, and the connections that they share.

An idle connection takes the next request at once, without a task. It is given up early enough that the peer does not close it
first, and never used after anything was said on it that nobody asked for. A request is written once: whatever happens after its
first byte is the caller's to judge.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import NamedTuple, Protocol

from extproc.http1.connection import Connection, Limits, Reply, Target
from extproc.http1.errors import BrokenError, ConnectError, HttpError
from extproc.tls.reasons import tls_reason

_FULL_PAUSE_S = 0.005
"""How long to wait before the next try where the queue of a Unix socket is full; doubled each time, up to a limit."""

_LONGEST_FULL_PAUSE_S = 0.08


class Settings(NamedTuple):
    """How connections are kept."""

    connect_s: float
    idle_s: float
    """How long an idle one is kept; less than the peer keeps it."""
    idle_connections: int = 1024
    """How many are kept, of all targets together."""


class Exchange(Protocol):
    """A call that is under way."""

    def cancel(self) -> None:
        """Close its connection at once; its reply hears nothing. Not for an exchange whose reply was told already: its
        connection may carry another by then.
        """


class Tls(Protocol):
    """How connections are encrypted."""

    @property
    def context(self) -> ssl.SSLContext | None:
        """For a new one; None: it is plain."""

    @property
    def server_name(self) -> str | None:
        """What the peer's certificate must hold."""


class Pool:
    """Connections to any number of targets. Belongs to the event loop that runs when it is made."""

    def __init__(
        self,
        settings: Settings,
        limits: Limits,
        *,
        mark: bytes,
        tls: Tls | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``mark``: see :class:`Connection`. ``tls``: for all targets but Unix sockets. ``clock`` must go on while the event
        loop stands still."""
        self._tls = tls
        self._settings = settings
        self._limits = limits
        self._mark = mark
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._idle: dict[Target, list[Connection]] = {}
        """By target; the last one was used last."""
        self._idle_count = 0
        self._open: set[Connection] = set()
        self._opening: set[_Opening] = set()
        self._sweep: asyncio.TimerHandle | None = None
        self._closed = False
        self._all_lost: asyncio.Future[None] | None = None

    @property
    def open_connections(self) -> int:
        """Idle or not."""
        return len(self._open)

    @property
    def idle_connections(self) -> int:
        """Of the open ones."""
        return self._idle_count

    def send(self, target: Target, head: bytes, body: bytes, reply: Reply) -> Exchange:
        """Write a request, at once where a connection is idle. ``reply`` may fail before this returns.

        Raises BrokenError after :meth:`close`.
        """
        if self._closed:
            raise BrokenError("the client is closed")
        connection = self._take(target)
        if connection is not None:
            connection.send(head, body, reply)
            return connection
        opening = _Opening(reply)
        opening.task = self._loop.create_task(opening.run(self, target, head, body))
        self._opening.add(opening)
        opening.task.add_done_callback(lambda _: self._opening.discard(opening))
        return opening

    async def close(self) -> None:
        """Close everything; calls that are under way fail."""
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        openings = tuple(self._opening)
        for opening in openings:
            opening.close()
        await asyncio.gather(*(opening.task for opening in openings), return_exceptions=True)
        self._idle.clear()
        self._idle_count = 0
        for connection in tuple(self._open):
            connection.close()
        if self._open:
            self._all_lost = self._loop.create_future()
            await self._all_lost

    # -- of connections ----------------------------------------------------------------------------------------------------

    def free(self, connection: Connection) -> None:
        """See :class:`extproc.http1.connection.Owner`."""
        if self._closed or self._idle_count >= self._settings.idle_connections:
            connection.cancel()
            return
        connection.idle_since_s = self._clock()
        self._idle.setdefault(connection.target, []).append(connection)
        self._idle_count += 1
        if self._sweep is None:
            self._sweep = self._loop.call_later(self._settings.idle_s, self._give_up_old)

    def lost(self, connection: Connection) -> None:
        """See :class:`extproc.http1.connection.Owner`."""
        self._open.discard(connection)
        idle = self._idle.get(connection.target, [])
        with suppress(ValueError):
            idle.remove(connection)
            self._idle_count -= 1
            if not idle:
                del self._idle[connection.target]
        if self._all_lost is not None and not self._open and not self._all_lost.done():
            self._all_lost.set_result(None)

    # -- inside ------------------------------------------------------------------------------------------------------------

    def _take(self, target: Target) -> Connection | None:
        """The idle connection that was used last. Whatever is too old, or not clean, is closed on the way."""
        idle = self._idle.get(target)
        while idle:
            connection = idle.pop()
            self._idle_count -= 1
            if not idle:
                del self._idle[target]
            if self._clock() - connection.idle_since_s < self._settings.idle_s and connection.clean():
                return connection
            connection.cancel()
        return None

    def _give_up_old(self) -> None:
        """Close what was idle for too long; look again when the next one will have been."""
        self._sweep = None
        now_s = self._clock()
        oldest_s = now_s
        for target, idle in tuple(self._idle.items()):
            old = 0
            while old < len(idle) and now_s - idle[old].idle_since_s >= self._settings.idle_s:
                idle[old].cancel()
                old += 1
            del idle[:old]
            self._idle_count -= old
            if idle:
                oldest_s = min(oldest_s, idle[0].idle_since_s)
            else:
                del self._idle[target]
        if self._idle:
            left_s = max(oldest_s + self._settings.idle_s - now_s, 0.0)
            self._sweep = self._loop.call_later(left_s, self._give_up_old)

    async def connect(self, target: Target) -> Connection:
        """A new connection. Raises ConnectError."""
        try:
            async with asyncio.timeout(self._settings.connect_s):
                connection = await self._connect(target)
        except TimeoutError:
            raise ConnectError(f"no connection within {self._settings.connect_s:g} s") from None
        except (OSError, ValueError) as error:  # ValueError: a name that no name server can be asked for
            raise ConnectError(f"no connection ({tls_reason(error) or type(error).__name__})") from None
        if connection.open:  # it may have been lost again by now
            self._open.add(connection)
        return connection

    async def _connect(self, target: Target) -> Connection:
        def made() -> Connection:
            return Connection(self, target, self._limits, self._mark)

        if not target.path:
            context = None if self._tls is None else self._tls.context
            if self._tls is None or context is None:
                return (await self._loop.create_connection(made, target.host, target.port))[1]
            named = self._tls.server_name
            return (await self._loop.create_connection(made, target.host, target.port, ssl=context, server_hostname=named))[1]
        # Such a connection is there at once or never, and the event loops differ in how they see a full queue.
        with ExitStack() as unused:
            connected = unused.enter_context(socket.socket(socket.AF_UNIX))
            connected.setblocking(False)
            pause_s = _FULL_PAUSE_S
            while True:
                try:
                    connected.connect(target.path)
                    break
                except BlockingIOError:  # connect(2), EAGAIN: the queue is full; the peer empties it as fast as it can
                    await asyncio.sleep(pause_s)
                    pause_s = min(pause_s * 2, _LONGEST_FULL_PAUSE_S)
            connection = (await self._loop.create_unix_connection(made, sock=connected))[1]
            unused.pop_all()
            return connection


class _Opening:
    """A call that waits for its connection."""

    task: asyncio.Task[None]

    def __init__(self, reply: Reply) -> None:
        self._reply: Reply | None = reply
        self._connection: Connection | None = None

    async def run(self, pool: Pool, target: Target, head: bytes, body: bytes) -> None:
        """Connect, and write the request."""
        try:
            self._connection = await pool.connect(target)
        except ConnectError as error:
            self._fail(error)
            return
        if self._reply is None:
            self._connection.cancel()
        else:
            self._connection.send(head, body, self._reply)

    def close(self) -> None:
        """Stop, and tell the reply."""
        self.task.cancel()
        self._fail(BrokenError("the client was closed"))

    def cancel(self) -> None:
        """See :class:`Exchange`."""
        self._reply = None
        if self._connection is not None:
            self._connection.cancel()
        else:
            self.task.cancel()

    def _fail(self, error: HttpError) -> None:
        reply, self._reply = self._reply, None
        if reply is not None:
            reply.failed(error)
