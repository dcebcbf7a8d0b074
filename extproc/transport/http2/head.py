"""The headers of a request, checked: RFC 9113 sections 8.2 and 8.3."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

from extproc.transport.http2.hpack import Field

_is_name: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+").fullmatch
_is_value: Final = re.compile(rb"(?:[^\x00\r\n\t ](?:[^\x00\r\n]*[^\x00\r\n\t ])?)?").fullmatch
_PSEUDO: Final = frozenset((b":method", b":scheme", b":authority", b":path"))
_OF_A_CONNECTION: Final = frozenset((b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade"))
_DIGITS: Final = re.compile(rb"[0-9]{1,18}").fullmatch


class MalformedError(ValueError):
    """A request that is none (section 8.1.1)."""


class Head:
    """The headers of one request. Equal requests share one: nobody changes it.

    ``notes`` is for whoever handles requests and wants to look at the same headers only once.
    """

    __slots__ = ("authority", "content_bytes", "fields", "method", "names", "notes", "path")

    def __init__(self, pseudo: dict[bytes, bytes], fields: tuple[tuple[str, str], ...], content_bytes: int | None) -> None:
        self.method = pseudo[b":method"].decode("latin-1")
        self.path = pseudo.get(b":path", b"").decode("latin-1")
        self.authority = pseudo.get(b":authority", b"").decode("latin-1")
        self.fields = fields
        """Names in lower case and values, as they came."""
        self.names: dict[str, str] = {}
        """Name -> value; values of a repeated name are joined with a comma."""
        for name, value in fields:
            self.names[name] = f"{self.names[name]},{value}" if name in self.names else value
        self.content_bytes = content_bytes
        """What content-length promises; None if it is not there."""
        self.notes: Any = None


def read_head(fields: Iterable[Field]) -> Head:
    """The headers of a request. Raises MalformedError."""
    pseudo: dict[bytes, bytes] = {}
    regular: list[tuple[str, str]] = []
    content_bytes: int | None = None
    for name, value in fields:
        if name[:1] == b":":
            if name not in _PSEUDO or name in pseudo or regular:
                raise MalformedError("a pseudo-header that is unknown, repeated, or after a regular one")
            if not _is_value(value):
                raise MalformedError("a pseudo-header's value")
            pseudo[name] = value
            continue
        check_field(name, value)
        if name == b"content-length":
            if not _DIGITS(value) or content_bytes not in (None, int(value)):
                raise MalformedError("content-length is no number, or says two")
            content_bytes = int(value)
        regular.append((name.decode("ascii"), value.decode("latin-1")))
    method = pseudo.get(b":method")
    if not method:
        raise MalformedError("no :method")
    if method == b"CONNECT":
        if not pseudo.get(b":authority") or b":scheme" in pseudo or b":path" in pseudo:
            raise MalformedError("CONNECT with other than :authority")
    elif not pseudo.get(b":scheme") or not pseudo.get(b":path"):
        raise MalformedError("no :scheme or no :path")
    return Head(pseudo, tuple(regular), content_bytes)


def check_field(name: bytes, value: bytes) -> None:
    """A regular header, or a trailer (sections 8.2.1 and 8.2.2). Raises MalformedError."""
    if not _is_name(name):
        raise MalformedError("a header's name")
    if not _is_value(value):
        raise MalformedError("a header's value")
    if name in _OF_A_CONNECTION or (name == b"te" and value != b"trailers"):
        raise MalformedError("a header that belongs to a connection")


def check_trailers(fields: Iterable[Field]) -> None:
    """Trailers (section 8.1): no pseudo-header may be among them. Raises MalformedError."""
    for name, value in fields:
        check_field(name, value)
