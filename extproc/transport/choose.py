"""Which transport: a setting."""

from __future__ import annotations

from typing import Literal

from extproc.transport.call import Server
from extproc.transport.grpc_server import GrpcServer

Kind = Literal["grpc", "lean"]


def make_server(kind: Kind, *, max_message_bytes: int, max_streams: int) -> Server:
    """A server that listens nowhere yet. One message has at most ``max_message_bytes``."""
    if kind == "lean":
        from extproc.transport.lean_server import LeanServer

        return LeanServer(max_message_bytes=max_message_bytes, max_streams=max_streams)
    return GrpcServer(max_message_bytes=max_message_bytes, max_streams=max_streams)
