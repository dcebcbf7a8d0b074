"""How a call ends: the status codes of gRPC, and the headers that say one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import IntEnum
from typing import Final

from extproc.transport.http2.hpack import Field, encode


class Status(IntEnum):
    """gRPC's status codes, as in its statuscodes.md."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


_ANSWER: Final[tuple[Field, ...]] = ((b":status", b"200"), (b"content-type", b"application/grpc"))
_MAX_TEXT_BYTES: Final = 1024
_PERCENT: Final = re.compile(rb"[^\x20-\x24\x26-\x7e]")


def answer_headers(metadata: Iterable[Field] = ()) -> bytes:
    """The headers in front of the first message, as a block for HTTP/2."""
    return encode((*_ANSWER, *metadata))


def trailers(code: int, text: str = "", metadata: Iterable[Field] = (), *, alone: bool = False) -> bytes:
    """The end of a call, as a block for HTTP/2. ``alone``: nothing came before it (gRPC's "trailers-only")."""
    fields: list[Field] = [*_ANSWER] if alone else []
    fields.append((b"grpc-status", str(int(code)).encode()))
    if text:
        fields.append((b"grpc-message", _percent_encoded(text)))
    return encode((*fields, *metadata))


def http_error(status: int) -> bytes:
    """An answer to a request that is not gRPC's, without a body."""
    return encode(((b":status", str(status).encode()),))


def _percent_encoded(text: str) -> bytes:
    data = text.encode("utf-8", "replace")[:_MAX_TEXT_BYTES]
    return _PERCENT.sub(lambda match: b"%%%02X" % match[0][0], data)


ANSWER_HEADERS: Final = answer_headers()
OK_TRAILERS: Final = trailers(Status.OK)
