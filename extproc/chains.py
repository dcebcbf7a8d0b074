"""Chains of long prompts, of which most was hashed a turn ago: pieces that are known are not hashed block by block again.

A piece is some sixty blocks. What it is known by covers the seed and all of the text up to its end, as a block's hash does.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from typing import Final

import xxhash

from extproc.routing.prefix import Chain, chain_of, hashes_of

_PIECE_BLOCKS: Final = 64
_PIECES: Final = 16_384
"""Remembered at most: half a kilobyte each, and some overhead."""


class KnownChains:
    """Remembers the pieces used last. Safe for several threads that use it at the same time."""

    def __init__(self, most_pieces: int = _PIECES) -> None:
        self._most = most_pieces
        self._pieces: OrderedDict[bytes, array[int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pieces)

    def chain_of(self, data: bytes | memoryview, seed: bytes, block_bytes: int, block_tokens: float) -> Chain:
        """What :func:`extproc.routing.prefix.chain_of` says. Raises ValueError for a block of no bytes."""
        piece_bytes = block_bytes * _PIECE_BLOCKS
        if block_bytes < 1 or len(data) < piece_bytes:
            return chain_of(data, seed, block_bytes, block_tokens)
        text = memoryview(data)
        # The seed has a length of its own: without it, its end and the beginning of the text could change places.
        name = xxhash.xxh3_128(len(seed).to_bytes(8, "little") + block_bytes.to_bytes(8, "little") + seed)
        before, hashes = xxhash.xxh3_64_intdigest(seed), array("Q")
        end = len(text) - len(text) % piece_bytes
        for start in range(0, end, piece_bytes):
            piece = text[start : start + piece_bytes]
            name.update(piece)
            digest = name.digest()
            known = self._pieces.get(digest)
            if known is None:
                known = self._pieces[digest] = hashes_of(piece, before, block_bytes)
                self._forget()
            else:
                self._used(digest)
            hashes += known
            before = known[-1]
        hashes += hashes_of(text[end:], before, block_bytes)
        return Chain(hashes, block_tokens)

    def _used(self, digest: bytes) -> None:
        try:
            self._pieces.move_to_end(digest)
        except KeyError:
            return  # another thread has just forgotten it

    def _forget(self) -> None:
        try:
            while len(self._pieces) > self._most:
                self._pieces.popitem(last=False)
        except KeyError:
            return  # another thread was first
