"""Token ids as they travel, a JSON list, to the array that chains are made of.

128K ids take 6 ms. So whoever must not be held up for long lets a thread do it in pieces, between which it gives way.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable

import msgspec

_decoder = msgspec.json.Decoder(list[int])

PIECE_BYTES = 32 << 10
"""Of JSON: some five thousand ids, a quarter of a millisecond."""

AT_ONCE_BYTES = 16 << 10
"""A shorter list costs the event loop less than a thread would."""


def give_way() -> None:
    """Let another thread have the interpreter."""
    time.sleep(0)


def unpack(listed: bytes | memoryview, between: Callable[[], None] = give_way) -> array[int] | None:
    """``array('I')`` of a JSON list; None for what is not a list of token ids. ``between`` is called after each piece."""
    text = bytes(listed)
    if len(text) <= PIECE_BYTES:
        return _piece(text)
    start, found = 0, array("I")
    last = len(text) - 1
    while start < last:
        end = text.find(b",", start + PIECE_BYTES)
        end = last if end < 0 else end
        opening = b"" if not start else b"["
        piece = _piece(opening + text[start:end] + b"]" if end < last else opening + text[start:])
        if not piece:
            return None
        found += piece
        if end == last:
            break
        start = end + 1
        between()
    return found


def _piece(text: bytes) -> array[int] | None:
    try:
        return array("I", _decoder.decode(text))
    except (msgspec.DecodeError, OverflowError, RecursionError):
        return None
