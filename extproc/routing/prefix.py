"""Prompt -> chain of block hashes; which endpoint holds which prefix."""

from __future__ import annotations

from array import array

import msgspec


class Chain(msgspec.Struct, frozen=True):
    """A prompt as the hashes of its blocks, each over the block and all before it."""

    hashes: array[int]
    """64-bit unsigned, one a full block."""
    block_tokens: float
    """Tokens of a block, estimated or exact."""
