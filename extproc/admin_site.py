"""The listener of the admin port: so many connections and no more, and none that is held open without asking anything.

The port shares its process's file descriptors with the requests of clients, which somebody who can reach it must not use up.
"""

from __future__ import annotations

import asyncio
from typing import Final, cast

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from extproc.config import Address

MOST_CONNECTIONS: Final = 256
IDLE_S: Final = 60.0
"""How long a connection may be open without a request on it whose headers are there."""

_BACKLOG = 128


class _Refuser(asyncio.Protocol):
    """A connection that is closed as soon as it is there."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).abort()


class AdminSite:
    """Listens, between :meth:`open` and :meth:`close`."""

    def __init__(self, *, most: int = MOST_CONNECTIONS, idle_s: float = IDLE_S) -> None:
        self._most = most
        self._idle_s = idle_s
        self._quiet: dict[RequestHandler, int] = {}

    async def open(self, server: web.Server, address: Address) -> None:
        """Serve ``server`` there. Raises OSError if the port is busy."""
        loop = asyncio.get_running_loop()
        self._server = server
        if address.path:
            self._listener = await loop.create_unix_server(self._connect, address.path, backlog=_BACKLOG)
        else:
            host = address.host.strip("[]")
            self._listener = await loop.create_server(self._connect, host, address.port, backlog=_BACKLOG)
        self._sweeping = asyncio.create_task(self._sweep())

    async def close(self, _: web.Application) -> None:
        """Take no more connections: a signal of the application, before those that are there are closed."""
        self._sweeping.cancel()
        self._listener.close()

    def _connect(self) -> asyncio.BaseProtocol:
        if len(self._server.connections) >= self._most:
            return _Refuser()
        return self._server()

    async def _sweep(self) -> None:
        """Close what asks nothing. Each look that finds no request on a connection counts for a quarter of the time."""
        while True:
            await asyncio.sleep(self._idle_s / 4)
            now: dict[RequestHandler, int] = {}
            for connection in self._server.connections:
                if connection._current_request is not None or connection.transport is None:
                    continue
                now[connection] = self._quiet.get(connection, 0) + 1
                if now[connection] > 4:
                    connection.transport.abort()
            self._quiet = now
