"""The head of a request, as bytes. Pure; what could smuggle a second field or request into it is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

from extproc.http1.errors import RefusedError

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110, section 5.6.2
_TARGET = re.compile(r"[/*][!-~]*")  # visible ASCII: RFC 9112, section 3.2, allows less
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")  # RFC 9110, section 5.5; a tab may stand in a value

_FRAMING = frozenset(
    "host content-length transfer-encoding connection keep-alive proxy-connection expect te trailer upgrade".split()
)
"""Fields that say where a message ends and what the connection is for: only this module sets them."""


def start(path: str, host: str, fields: Mapping[str, str]) -> bytes:
    """The part of a POST's head that is the same for every call to one peer. Raises RefusedError."""
    if _TARGET.fullmatch(path) is None:
        raise RefusedError("the path has a character that no request may have")
    return b"".join((_encoded(f"POST {path} HTTP/1.1\r\nhost: {_value('host', host)}\r\n"), _lines(fields, frozenset())))


def finish(start: bytes, fields: Mapping[str, str], own: frozenset[str], body_bytes: int) -> bytes:
    """The whole head: ``start``, ``fields``, and the length of the body. Names in ``own`` (lower case), which ``start`` has
    already, are left out. Raises RefusedError.
    """
    return b"%scontent-length: %d\r\n\r\n" % (start + _lines(fields, own), body_bytes)


def _lines(fields: Mapping[str, str], own: frozenset[str]) -> bytes:
    lines = []
    for name, value in fields.items():
        lowered = _checked(name)
        if lowered not in own:
            lines.append(f"{name}: {_value(name, value)}\r\n")
    return _encoded("".join(lines))


@lru_cache(maxsize=256)
def _checked(name: str) -> str:
    """In lower case."""
    if _TOKEN.fullmatch(name) is None:
        raise RefusedError(f"{name!r} is no name of a header")
    lowered = name.lower()
    if lowered in _FRAMING:
        raise RefusedError(f"the header {lowered} is not the caller's to set")
    return lowered


def _value(name: str, value: str) -> str:
    if _CONTROL.search(value) is not None:  # the value itself is not shown: it may be a secret
        raise RefusedError(f"the value of the header {name} has a character that no header may have")
    return value


def _encoded(text: str) -> bytes:
    # Beyond ASCII a value is opaque bytes (RFC 9110, section 5.5). Envoy's were read as UTF-8, so they leave as they came.
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise RefusedError("a header has a character that cannot be encoded") from None
