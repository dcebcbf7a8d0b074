"""Frames as they stand on the wire: RFC 9113 sections 4.1 and 6."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""What a client sends first (section 3.4)."""

DATA: Final = 0x0
HEADERS: Final = 0x1
PRIORITY: Final = 0x2
RST_STREAM: Final = 0x3
SETTINGS: Final = 0x4
PUSH_PROMISE: Final = 0x5
PING: Final = 0x6
GOAWAY: Final = 0x7
WINDOW_UPDATE: Final = 0x8
CONTINUATION: Final = 0x9

ACK: Final = 0x1
END_STREAM: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
WITH_PRIORITY: Final = 0x20

HEADER_TABLE_SIZE: Final = 0x1
ENABLE_PUSH: Final = 0x2
MAX_CONCURRENT_STREAMS: Final = 0x3
INITIAL_WINDOW_SIZE: Final = 0x4
MAX_FRAME_SIZE: Final = 0x5
MAX_HEADER_LIST_SIZE: Final = 0x6

HEAD_BYTES: Final = 9
"""In front of each frame."""
MIN_FRAME_BYTES: Final = 16_384
"""The largest payload that everybody takes (section 4.2)."""
MAX_FRAME_BYTES: Final = (1 << 24) - 1
MAX_WINDOW_BYTES: Final = (1 << 31) - 1
DEFAULT_WINDOW_BYTES: Final = 65_535
"""Of a connection and of every stream, until somebody says otherwise (section 6.9.2)."""

HEAD: Final = struct.Struct(">BHBBI")
"""Length (8 and 16 bits), type, flags, stream; the stream's first bit is reserved."""
_PAYLOAD_32 = struct.Struct(">BHBBII")
_SETTING = struct.Struct(">HI")
_GOAWAY = struct.Struct(">BHBBIII")


def head(kind: int, flags: int, stream: int, length_bytes: int) -> bytes:
    """The head of a frame."""
    return HEAD.pack(length_bytes >> 16, length_bytes & 0xFFFF, kind, flags, stream)


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """A whole frame."""
    return head(kind, flags, stream, len(payload)) + payload


def settings(values: dict[int, int]) -> bytes:
    """A SETTINGS frame (section 6.5)."""
    return frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(*item) for item in values.items()))


def read_settings(payload: bytes) -> Iterator[tuple[int, int]]:
    """The payload of a SETTINGS frame, whose length is a multiple of 6."""
    return _SETTING.iter_unpack(payload)


def window_update(stream: int, by_bytes: int) -> bytes:
    """A WINDOW_UPDATE frame (section 6.9)."""
    return _PAYLOAD_32.pack(0, 4, WINDOW_UPDATE, 0, stream, by_bytes)


def rst_stream(stream: int, code: int) -> bytes:
    """A RST_STREAM frame (section 6.4)."""
    return _PAYLOAD_32.pack(0, 4, RST_STREAM, 0, stream, code)


def goaway(last_stream: int, code: int, why: str = "") -> bytes:
    """A GOAWAY frame (section 6.8); ``why`` is for people who debug."""
    text = why.encode("utf-8", "replace")[:256]
    return _GOAWAY.pack(0, 8 + len(text), GOAWAY, 0, 0, last_stream, code) + text


SETTINGS_ACK: Final = frame(SETTINGS, ACK, 0)
