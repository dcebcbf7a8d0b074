"""A gRPC server for known peers, with the part of ``grpc.aio.server``'s interface that Baton uses.

What a handler costs beside the handler itself is one task. There is no compression, no reflection and no interceptor.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import grpc

from extproc.transport import rpc, status
from extproc.transport.call import CallGoneError, Handler
from extproc.transport.http2.connection import Head, Limits
from extproc.transport.lean_call import LeanCall, LeanHandler, timeout_s
from extproc.transport.link import Link
from extproc.transport.ports import Port, bind
from extproc.transport.status import Status

if TYPE_CHECKING:  # it imports a library that a server in plaintext does not need
    from extproc.transport.tls.door import Door, OnShake
    from extproc.transport.tls.ring import KeyRing

OnFault = Callable[[str, BaseException | None], None]
"""Is told what went wrong, and the exception if there is one."""

MAX_CONNECTIONS: Final = 1_000
"""Peers are known and few: an Envoy has one connection for each of its threads."""
_CANCEL_TIMEOUT_S: Final = 5.0
"""So long a handler that is cancelled may take to end."""


class _Route:
    """What is done with all requests of the same headers."""

    __slots__ = ("block", "handler", "timeout_s")

    def __init__(self, handler: LeanHandler | None, block: bytes = b"", timeout_s: float | None = None) -> None:
        self.handler = handler
        self.block = block
        """The answer where there is no handler."""
        self.timeout_s = timeout_s


class LeanServer:
    """Serves gRPC on HTTP/2 connections."""

    def __init__(
        self,
        *,
        max_message_bytes: int,
        max_streams: int,
        on_fault: OnFault | None = None,
        on_shake: OnShake | None = None,
        limits: Limits | None = None,
    ) -> None:
        """``max_message_bytes``: of a message that is received. ``max_streams``: on each connection; of handlers, that a
        peer has given up but that still run, there may be as many again in all. ``on_shake``: told of TLS handshakes.
        ``limits``: others, for tests.
        """
        self._limits = limits or Limits(max_streams=max_streams)
        self._max_message_bytes = max_message_bytes
        self._max_running = 2 * max_streams
        self._on_fault = on_fault or _log_fault
        self._methods: dict[str, LeanHandler] = {}
        self._generic: list[grpc.GenericRpcHandler] = []
        self._ports: list[Port] = []
        self._secured: list[tuple[Port, KeyRing]] = []
        self._doors: list[Door] = []
        self._on_shake: OnShake = on_shake or (lambda _outcome, _why: None)
        self._listeners: list[asyncio.Server] = []
        self._links: set[Link] = set()
        self._running: dict[LeanCall, asyncio.Task[None]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = self._cutting = False
        self._idle = asyncio.Event()
        """While it stops: neither a connection nor a handler is left."""

    # -- before it starts --------------------------------------------------------------------------------------------------

    def serve(self, path: str, handler: Handler) -> None:
        """Serve one method, ``/package.Service/Method``, in the native way: messages are bytes.

        A peer that is gone does not cancel the handler; only :meth:`stop` does, after its grace.
        """
        self._not_started()
        self._methods[path] = handler

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]]) -> None:
        """As grpc.aio; generated code calls it."""
        self._not_started()
        for name, handler in handlers.items():
            self._methods[f"/{service}/{name}"] = rpc.adapt(handler)

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """As grpc.aio."""
        self._not_started()
        self._generic.extend(handlers)

    def add_insecure_port(self, address: str) -> int:
        """Bind ``unix:PATH`` or ``HOST:PORT``. The TCP port, which is a free one for port 0; 1 for a Unix socket.

        A socket file that nobody listens at is replaced. Raises RuntimeError if the address cannot be used.
        """
        self._not_started()
        port = bind(address)
        self._ports.append(port)
        return port.number

    def add_secure_port(self, address: str, ring: KeyRing) -> int:
        """The same with TLS, by the keys that the ring has when a connection comes."""
        self._not_started()
        port = bind(address)
        self._secured.append((port, ring))
        return port.number

    # -- its life ----------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Take connections."""
        self._not_started()
        loop = self._loop = asyncio.get_running_loop()
        for port in self._ports:
            self._listeners.append(await loop.create_server(self._link, sock=port.socket))
        for port, ring in self._secured:
            from extproc.transport.tls.door import Door

            door = Door(port.socket, ring, self._link, self._on_shake)
            self._doors.append(door)
            door.open()

    async def stop(self, grace_s: float | None) -> None:
        """Take no more calls. Those that are open may end within ``grace_s`` seconds (None: at once), then they are cut.

        May be called again with less grace.
        """
        if not self._stopping:
            self._stopping = True
            for listener in self._listeners:
                listener.close()
            for door in self._doors:
                await door.close()
            for port in (*self._ports, *(port for port, _ in self._secured)):
                port.remove_file()
                port.socket.close()
            for link in list(self._links):
                link.shut_down()
            self._look()
        if grace_s:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), grace_s)
        if not self._idle.is_set():
            self._cutting = True
            await self._cut()

    async def wait_for_termination(self, timeout: float | None = None) -> bool:  # noqa: ASYNC109 - as grpc.aio
        """Until it has stopped. True: the time was over before."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            return True
        return False

    async def _cut(self) -> None:
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        if tasks:
            _, left = await asyncio.wait(tasks, timeout=_CANCEL_TIMEOUT_S)
            if left:
                self.report(f"{len(left)} handlers went on after they were cancelled", None)
        for link in list(self._links):
            link.cut()
        if self._links:
            await asyncio.wait_for(self._idle.wait(), _CANCEL_TIMEOUT_S)

    # -- for its connections -----------------------------------------------------------------------------------------------

    def connected(self, link: Link) -> bool:
        """A connection is there. False: it is one too many."""
        self._links.add(link)
        return len(self._links) <= MAX_CONNECTIONS and not self._stopping

    def disconnected(self, link: Link) -> None:
        """A connection is lost."""
        self._links.discard(link)
        self._look()

    def open(self, call: LeanCall) -> LeanCall | None:
        """Serve a call. None: there are too many."""
        loop = self._loop
        if loop is None or self._cutting or len(self._running) >= self._max_running:
            return None
        route: _Route | None = call.head.notes
        if route is None:
            route = call.head.notes = self._route(call.head)
        if route.handler is None:
            call.answer(route.block)
            return call
        if route.timeout_s is not None:
            call.expire_after(route.timeout_s)
        self._running[call] = loop.create_task(self._run(call, route.handler))
        return call

    def report(self, what: str, error: BaseException | None) -> None:
        """Something went wrong."""
        self._on_fault(what, error)

    # -- inside ------------------------------------------------------------------------------------------------------------

    async def _run(self, call: LeanCall, handler: LeanHandler) -> None:
        try:
            await handler(call)
            call.finish()
        except asyncio.CancelledError:
            if self._cutting:
                call.finish(Status.UNAVAILABLE, "the server is shutting down")
            else:
                call.finish(Status.CANCELLED, "cancelled")
        except CallGoneError:
            pass  # the handler sent to a call that is over, and let it be
        except Exception as error:
            call.finish(Status.INTERNAL, "internal error")
            self.report(f"{call.head.path} failed", error)
        finally:
            call.released()
            del self._running[call]
            if self._stopping:
                self._look()

    def _route(self, head: Head) -> _Route:
        if head.method != "POST":
            return _Route(None, status.http_error(405))
        if not head.names.get("content-type", "").startswith("application/grpc"):
            return _Route(None, status.http_error(415))
        timeout = head.names.get("grpc-timeout")
        try:
            allowed_s = None if timeout is None else timeout_s(timeout)
        except ValueError as error:
            return _Route(None, status.trailers(Status.INTERNAL, str(error), alone=True))
        handler = self._methods.get(head.path) or self._generic_method(head)
        if handler is None:
            return _Route(None, status.trailers(Status.UNIMPLEMENTED, "there is no such method", alone=True))
        return _Route(handler, timeout_s=allowed_s)

    def _generic_method(self, head: Head) -> LeanHandler | None:
        details = rpc.Details(head.path, rpc.metadata(head))
        for generic in self._generic:
            found = generic.service(details)
            if found is not None:
                return rpc.adapt(found)
        return None

    def _link(self) -> Link:
        return Link(self, self._limits, self._max_message_bytes)

    def _look(self) -> None:
        if self._stopping and not self._links and not self._running:
            self._idle.set()

    def _not_started(self) -> None:
        if self._loop is not None:
            raise RuntimeError("the server has been started")


def _log_fault(what: str, error: BaseException | None) -> None:
    logging.getLogger(__name__).error(what, exc_info=error)
