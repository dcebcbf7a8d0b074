"""One connection between two replicas: hello, proof, then batches both ways. Never waits: what cannot be written is left."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Final, Protocol, cast

from extproc.processes.post import Sent
from extproc.replicas import handshake
from extproc.replicas.frames import MOST_BYTES, FrameError, Opener, Sealer
from extproc.replicas.handshake import Hello, RefusedError
from extproc.replicas.keys import ReplicaKeys

GREETING_TIMEOUT_S: Final = 5.0
"""From the connection to the proof."""
_BUFFER_BYTES: Final = 256 << 10
"""Written and not taken, before a batch has to wait."""


class Owner(Protocol):
    """Who has the connections."""

    def greeted(self, link: Link) -> None:
        """It said who it is. Raises RefusedError."""

    def proved(self, link: Link) -> None:
        """It is a replica: from here on batches come and go."""

    def heard(self, link: Link, message: bytes) -> None:
        """A batch came."""

    def ended(self, link: Link, why: str, refused: RefusedError | None) -> None:
        """It is over, however it went; exactly once."""


class Link(asyncio.Protocol):
    """One of them. Needs a running event loop."""

    def __init__(
        self,
        owner: Owner,
        own: Hello,
        keys: ReplicaKeys,
        *,
        address: str | None,
        bytes_per_s: float,
        on_bytes: Callable[[str, int], None],
    ) -> None:
        """``address``: which was dialled; None: they have dialled us. ``on_bytes`` is told of bytes that are ``sent`` or
        ``received``."""
        self._owner = owner
        self._own = own
        self._own_bytes = handshake.encode(own)
        self._keys = keys
        self.address = address
        self._on_bytes = on_bytes
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._sealer = Sealer()
        self._opener = Opener(handshake.MOST_HELLO_BYTES)
        self._theirs: bytes | None = None
        """Key of what they send; None: no hello yet."""
        self._bytes_per_s = bytes_per_s
        self._credit, self._credit_at_s = 0.0, self._loop.time()
        self._held = False
        """The socket takes no more at the moment."""
        self._why: str | None = None
        self._refused: RefusedError | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.peer: Hello | None = None
        self.host = ""
        """Their IP address."""
        self.index: int | None = None
        """While batches come and go."""
        self.over = asyncio.Event()
        """Greeted and proved, or ended."""

    @property
    def name(self) -> str:
        """For people: name of their host, and address."""
        host = self.host if self.address is None else self.address
        return host if self.peer is None else f"{self.peer.name}@{host}"

    def send(self, data: bytes) -> Sent:
        """One batch."""
        if self.index is None or self._transport is None:
            return Sent.AWAY
        if self._held or not self._affordable():
            return Sent.FULL
        frame = self._sealer.seal(data)
        self._credit -= len(frame)
        self._on_bytes("sent", len(frame))
        self._transport.write(frame)
        return Sent.YES

    def end(self, why: str) -> None:
        """Close it at once."""
        if self._why is None:
            self._why = why
        if self._transport is not None:
            self._transport.abort()

    # -- for the event loop ------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=_BUFFER_BYTES)
        name = transport.get_extra_info("peername")
        self.host = str(name[0]) if name else "unknown"
        self._timer = self._loop.call_later(GREETING_TIMEOUT_S, self._late)
        with self._refusing():
            self._keys.check(transport.get_extra_info("ssl_object"))
            self._write(self._own_bytes)

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        self._on_bytes("received", len(data))
        if self._why is not None:
            return
        try:
            with self._refusing():
                for message in self._opener.feed(data):
                    self._take(message)
                    if self._why is not None:
                        return
        except FrameError as error:
            self.end(str(error))

    def pause_writing(self) -> None:
        """See asyncio."""
        self._held = True

    def resume_writing(self) -> None:
        """See asyncio."""
        self._held = False

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        if self._timer is not None:
            self._timer.cancel()
        self._transport = None
        why = self._why or (f"{type(exc).__name__}: {exc}" if exc else "closed by the other side")
        self._owner.ended(self, why, self._refused)
        self.over.set()

    # -- inside ------------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except RefusedError as error:
            self._refused, self._why = error, str(error)
            if self._transport is not None:
                self._transport.close()  # after what is written: they should be able to say why, too

    def _take(self, message: bytes) -> None:
        if self.index is not None:
            self._owner.heard(self, message)
        elif self.peer is None:
            self._greet(message)
        else:
            assert self._theirs is not None
            handshake.check(self._theirs, message)
            if self._timer is not None:
                self._timer.cancel()
            self._opener.most_bytes = MOST_BYTES
            if self._keys.secret is not None:
                self._opener.key = self._theirs
            self._owner.proved(self)
            self.over.set()

    def _greet(self, message: bytes) -> None:
        self.peer = handshake.read(message)
        handshake.version(self._own, self.peer)
        self._owner.greeted(self)
        dialed = self.address is not None
        said = (self._own_bytes, message) if dialed else (message, self._own_bytes)
        made = handshake.keys(self._keys.secret or b"", *said)
        ours, self._theirs = (made.dialer, made.acceptor) if dialed else (made.acceptor, made.dialer)
        self._write(handshake.proof(ours))
        if self._keys.secret is not None:
            self._sealer.key = ours

    def _write(self, message: bytes) -> None:
        assert self._transport is not None
        frame = self._sealer.seal(message)
        self._on_bytes("sent", len(frame))
        self._transport.write(frame)

    def _late(self) -> None:
        self._refused = RefusedError("timeout", f"it did not prove itself within {GREETING_TIMEOUT_S:g} s")
        self.end(str(self._refused))

    def _affordable(self) -> bool:
        """Whether the bandwidth allows one more batch; up to a quarter second of it can be used at once."""
        now_s = self._loop.time()
        most = self._bytes_per_s / 4
        self._credit = min(self._credit + (now_s - self._credit_at_s) * self._bytes_per_s, most)
        self._credit_at_s = now_s
        return self._credit > 0
