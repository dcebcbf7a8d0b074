"""Closing a listener in order, also under load."""

from __future__ import annotations

import asyncio


async def close_listener(server: asyncio.Server) -> None:
    """Accept no more, let what was just accepted become a connection, then close.

    asyncio makes the transport a turn after the accept; a server closed in between breaks on it and leaks the socket.
    """
    loop = asyncio.get_running_loop()
    for socket in server.sockets:
        loop.remove_reader(socket.fileno())
    for _ in range(3):
        await asyncio.sleep(0)
    server.close()
