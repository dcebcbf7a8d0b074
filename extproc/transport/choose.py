"""Which transport: a setting."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from extproc.transport.call import Server
from extproc.transport.grpc_server import GrpcServer

if TYPE_CHECKING:
    from extproc.transport.tls.door import OnShake

Kind = Literal["grpc", "lean"]


def make_server(
    kind: Kind,
    *,
    max_message_bytes: int,
    max_streams: int,
    on_shake: OnShake | None = None,
    handshake_timeout_s: float = 10.0,
) -> Server:
    """A server that listens nowhere yet. One message has at most ``max_message_bytes``.

    ``on_shake``: told of TLS handshakes; grpc.aio says nothing of them. ``handshake_timeout_s``: for grpc.aio, which has
    one for all of its ports.
    """
    if kind == "lean":
        from extproc.transport.lean_server import LeanServer

        return LeanServer(max_message_bytes=max_message_bytes, max_streams=max_streams, on_shake=on_shake)
    return GrpcServer(max_message_bytes=max_message_bytes, max_streams=max_streams, handshake_timeout_s=handshake_timeout_s)
