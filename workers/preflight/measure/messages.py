"""What the two sides say to each other over TCP, one JSON line each, and what a measuring process tells its parent."""

from __future__ import annotations

import socket
import time
from typing import TypeVar

import msgspec

from workers.preflight.findings import Identity, Sample

PROTOCOL = 1
DEFAULT_PORT = 5590
LINE_MAX_BYTES = 256 << 10
BUFFER_MAX_BYTES = 4 << 30
"""Whoever serves may say less, never more."""
BLOCK_MIN_BYTES, BLOCK_MAX_BYTES = 4 << 10, 64 << 20
BLOCKS_MAX = 1 << 16
HELLO_TIMEOUT_S = 5.0
"""For a caller to say who it is."""

T = TypeVar("T")


class MeasureError(RuntimeError):
    """The measurement cannot go on; the message says what and where."""


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Reader to server, first line."""

    token: str
    protocol: int = PROTOCOL
    tool: str
    """nixl or ucx_perftest."""
    block_bytes: int
    buffer_bytes: int
    side_channel_port: int | None = None
    """A port that the reader listens on meanwhile: the server tries to reach it, at the address that the call comes from."""
    identity: Identity = Identity()


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """Server to reader: what there is to read."""

    tool: str
    memory: str = "dram"
    blocks: int = 0
    address: int = 0
    device_id: int = 0
    metadata: bytes = b""
    """Of the NIXL agent."""
    agent: str = ""
    seed: int = 0
    perftest_port: int | None = None
    reached_side_channel: str | None = None
    """How the attempt ended; None: it was not asked for."""
    identity: Identity = Identity()


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Server to reader, in place of an offer."""

    error: str


class Again(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag=True):
    """Reader to server: start the benchmark's server once more (ucx_perftest serves one client)."""


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """Server to reader: it runs."""


class Done(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag=True):
    """Reader to server, last line: what came out, so that it is shown on both sides."""

    bytes_per_s: float


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """A measuring process to its parent, one line each: progress in words, or the end."""

    progress: str = ""
    error: str = ""
    result: Result | None = None


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What came out. A server that was not called has none."""

    peer: str
    tool: str
    memory: str
    block_bytes: int
    first_transfer_s: float = 0.0
    latency_s: float = 0.0
    samples: tuple[Sample, ...] = ()
    bytes_per_s: float = 0.0
    identity: Identity = Identity()
    """Of the other side."""
    reached_side_channel: str | None = None


class Task(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a measuring process is told, on its standard input: the token is in no command line."""

    kind: str
    """serve or read."""
    host: str
    port: int
    token: str
    seconds: float
    """For all of it."""
    block_bytes: int
    buffer_bytes: int
    memory: str = "dram"
    """dram, cuda, or auto: cuda where there is a CUDA torch."""
    tool: str = "auto"
    """nixl, ucx_perftest, or auto: nixl where it is installed. Only the reader chooses."""
    side_channel_host: str = ""
    side_channel_port: int | None = None
    identity: Identity = Identity()


class Line:
    """One side of the conversation. Every call ends by its time-out, with MeasureError."""

    def __init__(self, connection: socket.socket, peer: str) -> None:
        """``peer`` names the other side in errors."""
        self.peer = peer
        self._connection = connection
        self._buffer = b""

    def send(self, message: msgspec.Struct, timeout_s: float) -> None:
        """Raises MeasureError."""
        self._connection.settimeout(timeout_s)
        try:
            self._connection.sendall(msgspec.json.encode(message) + b"\n")
        except OSError as error:
            raise MeasureError(f"{self.peer}: {_words(error, timeout_s)}") from None

    def receive(self, kind: type[T], timeout_s: float) -> T:
        """The next line, whole within ``timeout_s``. Raises MeasureError, also for what is no such message, or too long."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            try:
                self._connection.settimeout(max(0.001, deadline - time.monotonic()))
                part = self._connection.recv(64 << 10)
            except OSError as error:
                raise MeasureError(f"{self.peer}: {_words(error, timeout_s)}") from None
            if not part:
                raise MeasureError(f"{self.peer}: it closed the connection")
            self._buffer += part
            if len(self._buffer) > LINE_MAX_BYTES:
                raise MeasureError(f"{self.peer}: a line of over {LINE_MAX_BYTES} bytes")
        line, _, self._buffer = self._buffer.partition(b"\n")
        if kind is not Refusal and line.startswith(b'{"error":'):
            raise MeasureError(f"{self.peer}: {msgspec.json.decode(line, type=Refusal).error}")
        try:
            return msgspec.json.decode(line, type=kind)
        except msgspec.MsgspecError as error:
            raise MeasureError(f"{self.peer}: not what baton preflight of this version says: {error}") from None


def _words(error: OSError, timeout_s: float) -> str:
    return f"no answer within {timeout_s:g} s" if isinstance(error, TimeoutError) else error.strerror or str(error)
