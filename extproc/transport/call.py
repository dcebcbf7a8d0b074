"""What the filter needs of a gRPC server, whichever carries it: calls that are whole messages in order, as bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from extproc.transport.tls.ring import KeyRing


class CallGoneError(Exception):
    """The call was reset, or its connection is no more: nobody is there to be answered."""


class Call(Protocol):
    """One call of Envoy's, both ways open. Its handler returns: it ends well. Its handler raises: status INTERNAL."""

    def header(self, name: str) -> str | None:
        """A header of the call itself, by its lower-case name; None if there is none."""

    async def receive(self) -> bytes | None:
        """The next message; None when there are no more, for whatever reason. Does not wait for what is there already."""

    def stirred(self) -> asyncio.Future[Any]:
        """Done when :meth:`receive` would not wait. Takes nothing away; it must not be cancelled, nor its result be read."""

    async def send(self, message: bytes) -> None:
        """Send one message. Raises CallGoneError."""

    async def abort(self, code: int, text: str) -> None:
        """End it with a gRPC status (``code`` is its number) instead of messages."""


Handler = Callable[[Call], Coroutine[Any, Any, None]]


class Server(Protocol):
    """A gRPC server. It serves generated servicers (their ``add_…_to_server``), and calls as above."""

    def serve(self, path: str, handler: Handler) -> None:
        """Let ``handler`` have every call of ``path`` (``/package.Service/Method``)."""

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Called by generated code."""

    def add_registered_method_handlers(self, service: str, handlers: Any) -> None:
        """Called by generated code."""

    def add_insecure_port(self, address: str) -> int:
        """Listen there (``unix:/path`` or ``host:port``). Raises RuntimeError if it cannot be used."""

    def add_secure_port(self, address: str, ring: KeyRing) -> int:
        """The same with TLS, by the keys that the ring has when a connection comes."""

    def start(self) -> Awaitable[None]:
        """Take calls."""

    def stop(self, grace_s: float | None) -> Awaitable[object]:
        """Take no more calls; those that are open have so long to end, then they are cut."""
