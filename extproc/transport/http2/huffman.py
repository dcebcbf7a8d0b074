"""The Huffman code of HPACK: RFC 7541 section 5.2 and appendix B."""

from __future__ import annotations

from typing import Final

# Bits of the code of each byte, and of the end of a string (EOS). The code is canonical: shorter codes come first, and among
# codes of one length those of smaller symbols; so the lengths say all of it.
_LENGTHS: Final = tuple(
    int(bits)
    for bits in """
    13 23 28 28 28 28 28 28 28 24 30 28 28 30 28 28
    28 28 28 28 28 28 30 28 28 28 28 28 28 28 28 28
    6 10 10 12 13 6 8 11 10 10 8 11 8 6 6 6
    5 5 5 6 6 6 6 6 6 6 7 8 15 6 12 10
    13 6 7 7 7 7 7 7 7 7 7 7 7 7 7 7
    7 7 7 7 7 7 7 7 8 7 8 13 19 13 14 6
    15 5 6 5 6 5 6 6 6 5 7 7 6 6 6 5
    6 7 6 5 5 6 7 7 7 7 7 15 11 14 13 28
    20 22 20 20 22 22 22 23 22 23 23 23 23 23 24 23
    24 24 22 23 24 23 23 23 23 21 22 23 22 23 23 24
    22 21 20 22 22 23 23 21 23 22 22 24 21 22 23 23
    21 21 22 21 23 22 23 23 20 22 22 22 23 22 22 23
    26 26 20 19 22 23 22 25 26 26 26 27 27 26 24 25
    19 21 26 27 27 26 27 24 21 21 26 26 28 27 27 27
    20 24 20 21 22 21 21 23 22 22 25 25 24 24 26 23
    26 27 26 26 27 27 27 27 27 28 27 27 27 27 27 26
    30
    """.split()
)
_EOS: Final = 256


class HuffmanError(ValueError):
    """These are not the bytes of a string."""


class _Node:
    """A place in the tree of codes."""

    __slots__ = ("children", "is_padding", "steps", "symbol")

    def __init__(self) -> None:
        self.children: list[_Node | None] = [None, None]
        self.symbol: int | None = None
        self.is_padding = False
        """A string may end here: what was read since the last symbol are ones, and fewer than eight."""
        self.steps: dict[int, tuple[_Node, bytes]] = {}
        """Byte -> where it leads and what it says; filled as bytes come, at most 256 for each of 256 nodes."""


def _tree() -> _Node:
    root = _Node()
    code = length = 0
    for symbol in sorted(range(257), key=lambda each: (_LENGTHS[each], each)):
        code <<= _LENGTHS[symbol] - length
        length = _LENGTHS[symbol]
        node = root
        for position in range(length - 1, -1, -1):
            bit = code >> position & 1
            child = node.children[bit]
            if child is None:
                child = node.children[bit] = _Node()
            node = child
        node.symbol = symbol
        code += 1
    node, root.is_padding = root, True
    for _ in range(7):
        following = node.children[1]
        assert following is not None
        node = following
        node.is_padding = True
    return root


_ROOT: Final = _tree()


def _step(node: _Node, byte: int) -> tuple[_Node, bytes]:
    said = bytearray()
    for position in range(7, -1, -1):
        child = node.children[byte >> position & 1]
        assert child is not None  # the code is complete
        node = child
        if node.symbol is not None:
            if node.symbol == _EOS:
                raise HuffmanError("EOS within a string")
            said.append(node.symbol)
            node = _ROOT
    return node, bytes(said)


def decode(data: bytes) -> bytes:
    """The string. Raises HuffmanError for EOS, and for padding that is too long or not of ones."""
    node, said = _ROOT, []
    for byte in data:
        step = node.steps.get(byte)
        if step is None:
            step = node.steps[byte] = _step(node, byte)
        node, part = step
        said.append(part)
    if not node.is_padding:
        raise HuffmanError("padding that is none")
    return b"".join(said)
