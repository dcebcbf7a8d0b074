"""The portable transport: grpc.aio."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, Final

import grpc
import grpc.aio

from extproc.transport.call import CallGoneError, Handler

if TYPE_CHECKING:
    from extproc.transport.tls.keys import Keys
    from extproc.transport.tls.ring import KeyRing

MAX_CONNECTIONS: Final = 1_000
"""Those in their handshakes count. Peers are known and few: an Envoy has one for each of its threads."""
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class GrpcServer:
    """A :class:`extproc.transport.call.Server`."""

    def __init__(self, *, max_message_bytes: int, max_streams: int, handshake_timeout_s: float = 10.0) -> None:
        self._server = grpc.aio.server(
            maximum_concurrent_rpcs=max_streams,
            options=[
                ("grpc.max_receive_message_length", max_message_bytes),
                ("grpc.max_send_message_length", max_message_bytes),
                ("grpc.max_concurrent_streams", max_streams),
                # gRPC's own overload guard refuses a burst of a few thousand streams.
                ("grpc.server.max_pending_requests", max_streams),
                ("grpc.server.max_pending_requests_hard_limit", max_streams),
                # Envoy's keepalive pings must not end in GOAWAY "too_many_pings" during a long prefill.
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 0),
                ("grpc.http2.max_ping_strikes", 0),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.server_handshake_timeout_ms", int(handshake_timeout_s * 1e3)),
                ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
                # A busy port is an error, not a second server behind it.
                ("grpc.so_reuseport", 0),
            ],
        )

    def serve(self, path: str, handler: Handler) -> None:
        """As in the interface."""
        service, _, method = path.strip("/").rpartition("/")

        async def process(_requests: Any, context: Any) -> None:
            await handler(GrpcCall(context))

        # No (de)serialisers: the messages stay bytes.
        handlers: dict[str, Any] = {method: grpc.stream_stream_rpc_method_handler(process)}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """As in the interface."""
        self._server.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(self, service: str, handlers: Any) -> None:
        """As in the interface."""
        self._server.add_registered_method_handlers(service, handlers)

    def add_insecure_port(self, address: str) -> int:
        """As in the interface."""
        return int(self._server.add_insecure_port(address))

    def add_secure_port(self, address: str, ring: KeyRing) -> int:
        """As in the interface."""
        shown = ring.keys

        def newer() -> grpc.ServerCertificateConfiguration | None:
            # Called from a thread of gRPC's own before each handshake. None: still the same.
            nonlocal shown
            if ring.keys is shown:
                return None
            shown = ring.keys
            return _certificates(shown)

        credentials = grpc.dynamic_ssl_server_credentials(
            _certificates(shown),
            newer,  # type: ignore[arg-type]  # the stubs forget that it may say None
            require_client_authentication=ring.wants_client_certificates,
        )
        return int(self._server.add_secure_port(address, credentials))

    def start(self) -> Awaitable[None]:
        """As in the interface."""
        return self._server.start()

    def stop(self, grace_s: float | None) -> Awaitable[object]:
        """As in the interface."""
        return self._server.stop(grace_s)


def _certificates(keys: Keys) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(keys.key_pem, keys.chain_pem)], root_certificates=keys.client_ca_pem)


class GrpcCall:
    """A :class:`extproc.transport.call.Call`. grpc.aio cancels the task of its handler when the peer resets it.

    No read is ever cancelled, neither by us nor with its handler: grpc.aio would not give back what it has allocated for it
    (96 bytes, which lie scattered over the heap; grpc/grpc#43360). Envoy resets every request's call at its end, with a read
    open. So reads run in tasks of their own, which end with their call.
    """

    def __init__(self, context: Any) -> None:
        self._context = context
        self._read: asyncio.Task[Any] | None = None

    def header(self, name: str) -> str | None:
        """As in the interface."""
        for key, value in self._context.invocation_metadata() or ():
            if key == name:
                return value if isinstance(value, str) else None
        return None

    def stirred(self) -> asyncio.Future[Any]:
        """As in the interface."""
        if self._read is None:
            self._read = asyncio.ensure_future(self._context.read())
            self._read.add_done_callback(_seen)
        return self._read

    async def receive(self) -> bytes | None:
        """As in the interface."""
        read = self.stirred()
        self._read = None
        try:
            message = await asyncio.shield(read)
        except grpc.aio.BaseError:
            return None  # the server was stopped, or the call is no more
        return None if message is grpc.aio.EOF else message

    async def send(self, message: bytes) -> None:
        """As in the interface."""
        try:
            await self._context.write(message)
        except grpc.aio.BaseError as error:
            raise CallGoneError(str(error)) from None

    async def abort(self, code: int, text: str) -> None:
        """As in the interface."""
        await self._context.abort(_CODES[code], text)


def _seen(read: asyncio.Future[Any]) -> None:
    """Nobody may be there any more who waits for it; asyncio would log its error."""
    if not read.cancelled():
        read.exception()
