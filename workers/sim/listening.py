"""Closing a listener in order, also under load; and its TLS."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import NamedTuple

_POLL_S = 1.0


class ServerTls(NamedTuple):
    """What uvicorn, vLLM's server, is told of HTTPS."""

    certfile: str
    keyfile: str | None
    ca_certs: str | None
    cert_reqs: ssl.VerifyMode
    refresh: bool

    def context(self) -> ssl.SSLContext:
        """For the listener. Raises OSError where the files cannot be used."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certfile, self.keyfile, password="")
        context.verify_mode = self.cert_reqs
        if self.ca_certs is not None:
            context.load_verify_locations(cafile=self.ca_certs)
        return context

    async def follow(self, context: ssl.SSLContext) -> None:
        """Load the certificate into ``context`` again whenever it has changed, until cancelled."""
        before = self._state()
        while self.refresh:
            await asyncio.sleep(_POLL_S)
            now = self._state()
            if now != before:
                before = now
                try:
                    context.load_cert_chain(self.certfile, self.keyfile, password="")
                except OSError:
                    continue  # half of a new pair

    def _state(self) -> tuple[float, ...]:
        files = (Path(each) for each in (self.certfile, self.keyfile) if each is not None)
        return tuple(each.stat().st_mtime if each.exists() else 0.0 for each in files)


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
