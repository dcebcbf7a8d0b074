"""A tokenizer without a vocabulary file: text is cut into pieces of at most four bytes, and a piece is its token id.

Stateless and reversible, so every process agrees on the ids and any id can be turned back into text. About three characters
of English make a token (four with the vocabularies of real models). No I/O here.
"""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache

EOS = 0
TURN_START = 1
TURN_END = 2
IMAGE = 3
BOS = 4

_SPECIAL_TEXT = {TURN_START: "<|start|>", TURN_END: "<|end|>", IMAGE: "<|image|>"}
"""What detokenize shows of a special token; the others are skipped, as with skip_special_tokens."""

# Id ranges by piece length. Pieces of more than one byte are ASCII, seven bits a byte.
_ONE = 16
_TWO = _ONE + (1 << 8)
_THREE = _TWO + (1 << 14)
_FOUR = _THREE + (1 << 21)
VOCAB_SIZE = _FOUR + (1 << 28)

_OFFSETS = (0, _ONE, _TWO, _THREE, _FOUR)
_PIECE = re.compile(rb"[ A-Za-z0-9][a-z0-9]{0,3}|[\x00-\xff]", re.DOTALL)
_WHOLE_PIECE = re.compile(rb"[ A-Za-z0-9][a-z0-9]{3}")


class _Windows(dict[int, int]):
    """Four bytes, as the machine reads them as an integer, to the token id. KeyError where they are not one piece."""

    _MAX_ENTRIES = 1 << 17

    def __missing__(self, window: int) -> int:
        piece = window.to_bytes(4, sys.byteorder)
        if not _WHOLE_PIECE.fullmatch(piece):
            raise KeyError(window)
        found = piece_id(piece)
        if len(self) < self._MAX_ENTRIES:
            self[window] = found
        return found


_windows = _Windows()


@lru_cache(maxsize=1 << 16)
def piece_id(piece: bytes) -> int:
    """The token id of one piece: a single byte, or two to four ASCII bytes."""
    if len(piece) == 1:
        return _ONE + piece[0]
    value = 0
    for byte in piece:
        value = (value << 7) | byte
    return _OFFSETS[len(piece)] + value


@lru_cache(maxsize=1 << 16)
def piece_bytes(token_id: int) -> bytes:
    """The bytes of a token. A special token has none."""
    for length in (4, 3, 2):
        if token_id >= _OFFSETS[length]:
            value = token_id - _OFFSETS[length]
            return bytes((value >> 7 * (length - 1 - i)) & 0x7F for i in range(length))
    return bytes((token_id - _ONE,)) if token_id >= _ONE else b""


def encode(text: str) -> list[int]:
    """Text to token ids, no special tokens added."""
    data = text.encode("utf-8", "surrogatepass")
    whole = len(data) & ~3
    try:
        # Where every four bytes from the start are one piece, cutting is not needed: that is many times faster, and benchmarks
        # whose prompts are of such pieces would otherwise measure this function.
        ids = list(map(_windows.__getitem__, array("I", data[:whole])))
    except KeyError:
        return [piece_id(piece) for piece in _PIECE.findall(data)]
    return ids + [piece_id(piece) for piece in _PIECE.findall(data, whole)] if whole < len(data) else ids


def decode(token_ids: Iterable[int], *, show_special: bool = False) -> str:
    """Token ids to text. Bytes that are no UTF-8 show as U+FFFD."""
    if show_special:
        return b"".join(_SPECIAL_TEXT.get(t, "").encode() or piece_bytes(t) for t in token_ids).decode("utf-8", "replace")
    return b"".join(map(piece_bytes, token_ids)).decode("utf-8", "replace")


def token_strings(token_ids: Sequence[int]) -> list[str]:
    """Each token as text of its own."""
    return [_SPECIAL_TEXT.get(t) or piece_bytes(t).decode("utf-8", "replace") for t in token_ids]
