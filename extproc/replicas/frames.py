"""Messages on a stream: a length, a code under the connection's key if there is one, and the message. Pure."""

from __future__ import annotations

import hmac
from collections.abc import Iterator
from typing import Final

MOST_BYTES: Final = 256 << 10
"""Of a frame. Batches are far smaller."""
_LENGTH: Final = 4
_CODE: Final = 16


class FrameError(Exception):
    """What came is no frame, or none of the sender's."""


class Sealer:
    """Makes frames."""

    def __init__(self) -> None:
        self.key: bytes | None = None
        """None: without a code."""
        self._number = 0

    def seal(self, message: bytes) -> bytes:
        """One frame."""
        code = b"" if self.key is None else _code(self.key, self._number, message)
        self._number += 1
        return (len(code) + len(message)).to_bytes(_LENGTH, "big") + code + message


class Opener:
    """Takes them apart again, as they come in pieces."""

    def __init__(self, most_bytes: int) -> None:
        """``most_bytes``: of a frame; it may be changed between two."""
        self.most_bytes = most_bytes
        self.key: bytes | None = None
        self._number = 0
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The messages that are whole now. Raises FrameError. The key may be changed between two."""
        data = self._rest + data if self._rest else data
        at, end = 0, len(data)
        while end - at >= _LENGTH:
            length = int.from_bytes(data[at : at + _LENGTH], "big")
            if length > self.most_bytes:
                raise FrameError(f"a frame of {length} bytes")
            if end - at < _LENGTH + length:
                break
            frame = data[at + _LENGTH : at + _LENGTH + length]
            at += _LENGTH + length
            message = self._open(frame)
            self._rest = b""
            yield message
        self._rest = data[at:]

    def _open(self, frame: bytes) -> bytes:
        number, self._number = self._number, self._number + 1
        if self.key is None:
            return frame
        code, message = frame[:_CODE], frame[_CODE:]
        if not hmac.compare_digest(code, _code(self.key, number, message)):
            raise FrameError("a message that the replica has not sent, or not so")
        return message


def _code(key: bytes, number: int, message: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "big") + message, "sha256")[:_CODE]
