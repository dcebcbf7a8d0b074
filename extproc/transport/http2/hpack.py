"""Compressed headers: RFC 7541.

The decoder keeps the dynamic table that the peer fills. What we send uses none: our answers have few headers, always the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from extproc.transport.http2 import huffman

Field = tuple[bytes, bytes]
"""Name and value of one header."""

DEFAULT_TABLE_BYTES: Final = 4096
"""Of a dynamic table, until SETTINGS_HEADER_TABLE_SIZE says otherwise."""
ENTRY_BYTES: Final = 32
"""What an entry counts beside its name and value (section 4.1)."""

# Appendix A.
_STATIC: Final[tuple[Field, ...]] = tuple(
    (name.encode(), value.encode())
    for name, value in (
        (":authority", ""),
        (":method", "GET"),
        (":method", "POST"),
        (":path", "/"),
        (":path", "/index.html"),
        (":scheme", "http"),
        (":scheme", "https"),
        (":status", "200"),
        (":status", "204"),
        (":status", "206"),
        (":status", "304"),
        (":status", "400"),
        (":status", "404"),
        (":status", "500"),
        ("accept-charset", ""),
        ("accept-encoding", "gzip, deflate"),
        ("accept-language", ""),
        ("accept-ranges", ""),
        ("accept", ""),
        ("access-control-allow-origin", ""),
        ("age", ""),
        ("allow", ""),
        ("authorization", ""),
        ("cache-control", ""),
        ("content-disposition", ""),
        ("content-encoding", ""),
        ("content-language", ""),
        ("content-length", ""),
        ("content-location", ""),
        ("content-range", ""),
        ("content-type", ""),
        ("cookie", ""),
        ("date", ""),
        ("etag", ""),
        ("expect", ""),
        ("expires", ""),
        ("from", ""),
        ("host", ""),
        ("if-match", ""),
        ("if-modified-since", ""),
        ("if-none-match", ""),
        ("if-range", ""),
        ("if-unmodified-since", ""),
        ("last-modified", ""),
        ("link", ""),
        ("location", ""),
        ("max-forwards", ""),
        ("proxy-authenticate", ""),
        ("proxy-authorization", ""),
        ("range", ""),
        ("referer", ""),
        ("refresh", ""),
        ("retry-after", ""),
        ("server", ""),
        ("set-cookie", ""),
        ("strict-transport-security", ""),
        ("transfer-encoding", ""),
        ("user-agent", ""),
        ("vary", ""),
        ("via", ""),
        ("www-authenticate", ""),
    )
)
_MAX_INT_BYTES: Final = 5
"""Of an integer: more would be above 2**32, or zeros that say nothing (section 5.1)."""

EMPTY_TABLE: Final = b"\x20"
"""In front of an encoder's first block: its dynamic table has no room (section 6.3)."""


class HpackError(ValueError):
    """The block cannot be read. The table is lost with it, and so is the connection."""


class HeadersTooLargeError(ValueError):
    """The block was read, and the table is as it must be, but the headers are above the limit."""


class Decoder:
    """Reads the blocks of one connection, in the order in which they came."""

    __slots__ = ("_entries", "_limit_bytes", "_max_list_bytes", "_size_bytes", "changes")

    def __init__(self, max_list_bytes: int) -> None:
        """``max_list_bytes``: most that the headers of one block may have, each with 32 bytes more than its text."""
        self._entries: list[Field] = []
        """Oldest first."""
        self._size_bytes = 0
        self._limit_bytes = DEFAULT_TABLE_BYTES
        self._max_list_bytes = max_list_bytes
        self.changes = 0
        """Of the table, so far: while it stands still, equal blocks mean equal headers."""

    def decode(self, block: bytes) -> list[Field]:
        """The headers of one block. Raises HpackError, HeadersTooLargeError."""
        try:
            return self._decode(block)
        except IndexError:
            raise HpackError("the block is cut off") from None
        except huffman.HuffmanError as error:
            raise HpackError(str(error)) from None

    def _decode(self, block: bytes) -> list[Field]:
        fields: list[Field] = []
        left_bytes = self._max_list_bytes
        position, end = 0, len(block)
        while position < end:
            first = block[position]
            if first & 0x80:  # indexed (6.1)
                if first < 0xFF:
                    index, position = first & 0x7F, position + 1
                else:
                    index, position = _integer(block, position, 0x7F)
                field = self._field(index)
            elif first & 0x60 == 0x20:  # size of the table (6.3)
                if fields or left_bytes < 0:
                    raise HpackError("a new size of the table after a header")
                size_bytes, position = _integer(block, position, 0x1F)
                self._resize(size_bytes)
                continue
            else:  # literal: added to the table (6.2.1), or not (6.2.2, 6.2.3)
                index, position = _integer(block, position, 0x3F if first & 0x40 else 0x0F)
                if index:
                    name = self._field(index)[0]
                else:
                    name, position = _string(block, position)
                value, position = _string(block, position)
                field = (name, value)
                if first & 0x40:
                    self._add(field)
            left_bytes -= len(field[0]) + len(field[1]) + ENTRY_BYTES
            if left_bytes >= 0:
                fields.append(field)
        if left_bytes < 0:
            raise HeadersTooLargeError(f"headers of more than {self._max_list_bytes} bytes")
        return fields

    def _field(self, index: int) -> Field:
        if 0 < index <= len(_STATIC):
            return _STATIC[index - 1]
        place = len(self._entries) + len(_STATIC) - index
        if index == 0 or place < 0:
            raise HpackError(f"no entry {index} in the table")
        return self._entries[place]

    def _add(self, field: Field) -> None:
        self.changes += 1
        self._entries.append(field)
        self._size_bytes += len(field[0]) + len(field[1]) + ENTRY_BYTES
        if self._size_bytes > self._limit_bytes:
            self._evict()

    def _resize(self, size_bytes: int) -> None:
        if size_bytes > DEFAULT_TABLE_BYTES:
            raise HpackError(f"a table of {size_bytes} bytes, more than we allow")
        self.changes += 1
        self._limit_bytes = size_bytes
        self._evict()

    def _evict(self) -> None:
        """The oldest go (4.3, 4.4); an entry larger than the table empties it."""
        gone = 0
        while self._size_bytes > self._limit_bytes:
            name, value = self._entries[gone]
            self._size_bytes -= len(name) + len(value) + ENTRY_BYTES
            gone += 1
        del self._entries[:gone]


def _integer(block: bytes, position: int, mask: int) -> tuple[int, int]:
    """An integer whose first bits are in the byte at ``position`` (5.1), and where it ends."""
    value = block[position] & mask
    position += 1
    if value < mask:
        return value, position
    for shift in range(0, 7 * _MAX_INT_BYTES, 7):
        byte = block[position]
        position += 1
        value += (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise HpackError("an integer that does not end")


def _string(block: bytes, position: int) -> tuple[bytes, int]:
    """A string (5.2), and where it ends."""
    coded = block[position] & 0x80
    length, start = _integer(block, position, 0x7F)
    end = start + length
    if end > len(block):
        raise HpackError("a string is cut off")
    data = block[start:end]
    return huffman.decode(data) if coded else data, end


def _encoded_integer(first: int, mask: int, value: int) -> bytes:
    if value < mask:
        return bytes((first | value,))
    out = bytearray((first | mask,))
    value -= mask
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


_PLACES: Final = {field: place for place, field in enumerate(_STATIC, 1)}


def encode(fields: Iterable[Field]) -> bytes:
    """A block that says ``fields`` and leaves the peer's table as it is."""
    parts: list[bytes] = []
    for field in fields:
        place = _PLACES.get(field)
        if place is not None:
            parts.append(_encoded_integer(0x80, 0x7F, place))
            continue
        parts.append(b"\x00")
        for text in field:
            parts.append(_encoded_integer(0, 0x7F, len(text)))
            parts.append(text)
    return b"".join(parts)
