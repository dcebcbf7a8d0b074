"""Where connections with TLS come in: each does its handshake, in bounded time and number, and only then meets the server."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import Callable
from typing import Final, Literal, get_args

from extproc.transport.tls.ring import KeyRing

MAX_HANDSHAKES: Final = 256
"""At once. Each costs a millisecond or two of CPU, and a peer may begin any number of them."""
_FULL_S: Final = 0.2
"""The process is out of descriptors: so long nobody is let in."""

Outcome = Literal[
    "ok",
    "no_certificate",
    "bad_certificate",
    "not_trusted",
    "plaintext",
    "timeout",
    "gone",
    "too_many",
    "failed",
]

OUTCOMES: Final[tuple[Outcome, ...]] = get_args(Outcome)

OnShake = Callable[[Outcome, str], None]
"""Is told of every handshake: how it ended, and of one that failed the error's own words."""

_NO_TLS = frozenset(("HTTP_REQUEST", "HTTPS_PROXY_REQUEST", "WRONG_VERSION_NUMBER", "UNKNOWN_PROTOCOL"))


class Door:
    """One listening socket."""

    def __init__(
        self, listening: socket.socket, ring: KeyRing, make: Callable[[], asyncio.Protocol], on_shake: OnShake
    ) -> None:
        """``make``: who gets a connection when its handshake is done."""
        self._listening = listening
        self._ring = ring
        self._make = make
        self._on_shake = on_shake
        self._shaking: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Take connections."""
        self._accepting = asyncio.get_running_loop().create_task(self._accept())

    async def close(self) -> None:
        """Take none any more. Handshakes that are under way are cut, and the socket is whoever's it was."""
        tasks = [*self._shaking, *([] if self._accepting is None else [self._accepting])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                peer, _ = await loop.sock_accept(self._listening)
            except OSError as error:
                if error.errno == errno.EBADF:
                    return
                await asyncio.sleep(_FULL_S)
                continue
            if len(self._shaking) >= MAX_HANDSHAKES:
                peer.close()
                self._on_shake("too_many", f"{MAX_HANDSHAKES} are under way")
                continue
            task = loop.create_task(self._shake(peer))
            self._shaking.add(task)
            task.add_done_callback(self._shaking.discard)

    async def _shake(self, peer: socket.socket) -> None:
        with contextlib.suppress(OSError):
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            # The keys of this moment: others may hold for the next connection.
            await asyncio.get_running_loop().connect_accepted_socket(
                self._make, peer, ssl=self._ring.context, ssl_handshake_timeout=self._ring.handshake_timeout_s
            )
        except (OSError, EOFError) as error:
            peer.close()
            self._on_shake(outcome_of(error), str(error))
        except BaseException:
            peer.close()
            raise
        else:
            self._on_shake("ok", "")


def outcome_of(error: BaseException) -> Outcome:
    """Of a handshake that failed: why."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return "bad_certificate"
    if isinstance(error, ssl.SSLError):
        reason = error.reason or ""
        if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
            return "no_certificate"
        if reason in _NO_TLS:
            return "plaintext"
        if "ALERT" in reason:  # it says no to ours
            return "not_trusted"
        return "gone" if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError) else "failed"
    if isinstance(error, TimeoutError | ConnectionAbortedError):  # the event loops' own word for it
        return "timeout"
    return "gone" if isinstance(error, ConnectionError | EOFError) else "failed"
