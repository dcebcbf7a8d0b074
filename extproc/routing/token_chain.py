"""A prompt as the engine caches it: its token ids, and what makes equal tokens different -> our own keys of its blocks. Pure.

A key names a block *and all before it*. Keys are our own, not the engine's: those depend on a hash algorithm, a seed and the
path of an adapter, which only the engine knows. Both sides of a comparison are made here: from a request, and from the token
ids in the engine's KV events. What a block's key covers beside its tokens follows vLLM (v1/core/kv_cache_utils.py,
``generate_block_hash_extra_keys``): the adapter in every block (here: in the seed), the salt in the first block, and each
multimodal item that lies in a block with its place in it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import xxhash

KEY_MASK = (1 << 60) - 1
"""Keys have 60 bits: an int of CPython then takes 32 bytes, with 64 bits it would be 48, and millions of them are held."""

TOKEN_BYTES = 4


class Placed(NamedTuple):
    """A multimodal item in a prompt, e.g. an image."""

    identity: str
    """What the engine calls it: the hash of its content (`mm_hash`)."""
    first_token: int
    """Where its placeholder tokens begin."""
    tokens: int
    """How many there are."""


class TokenChain:
    """A prompt's token ids, and the keys of its blocks for any block size. Keys are made when they are first asked for, and
    once for each block size; that takes 0.25 µs a block, so whoever has a long prompt asks for them off the event loop first.
    """

    __slots__ = ("_keys", "cache_salt", "items", "lora", "token_ids")

    def __init__(
        self,
        token_ids: array[int],
        *,
        lora: str | None = None,
        cache_salt: str | None = None,
        items: Sequence[Placed] = (),
    ) -> None:
        """``token_ids`` is an ``array('I')`` and belongs to the chain from now on. ``lora`` is the name of the adapter, None
        for the base model. ``items`` are in the order of their places. Raises ValueError for another kind of array.
        """
        if token_ids.itemsize != TOKEN_BYTES or token_ids.typecode not in "IL":
            raise ValueError(f"token ids must be 32-bit and unsigned, not array({token_ids.typecode!r})")
        self.token_ids = token_ids
        self.lora = lora or None
        self.cache_salt = cache_salt or None
        self.items = tuple(items)
        self._keys: dict[int, array[int]] = {}

    @property
    def tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.token_ids)

    def keys(self, block_tokens: int) -> array[int]:
        """The keys of its full blocks of so many tokens, an ``array('Q')``, not to be changed. Raises ValueError below 1."""
        found = self._keys.get(block_tokens)
        if found is None:
            if block_tokens < 1:
                raise ValueError(f"a block must have at least 1 token, not {block_tokens}")
            found = self._keys[block_tokens] = keys_after(
                seed_of(self.lora),
                memoryview(self.token_ids).cast("B"),
                block_tokens,
                self._extras(block_tokens) if self.cache_salt or self.items else None,
            )
        return found

    def beginning(self, tokens: int) -> TokenChain:
        """The chain of its first so many tokens. Keys that are made already serve for it as well."""
        items = [item for item in self.items if item.first_token < tokens]
        found = TokenChain(self.token_ids[:tokens], lora=self.lora, cache_salt=self.cache_salt, items=items)
        found._keys = {size: keys[: found.tokens // size] for size, keys in self._keys.items()}
        return found

    def _extras(self, block_tokens: int) -> list[bytes]:
        """What each full block's key covers beside its tokens."""
        count = len(self.token_ids) // block_tokens
        inside: dict[int, list[tuple[str, int]]] = {}
        for item in self.items:
            last = (item.first_token + item.tokens - 1) // block_tokens
            for block in range(item.first_token // block_tokens, min(last + 1, count)):
                inside.setdefault(block, []).append((item.identity, item.first_token - block * block_tokens))
        return [
            extra_bytes(inside.get(block, ()), salts=(self.cache_salt,) if self.cache_salt and not block else ())
            for block in range(count)
        ]


def seed_of(lora: str | None) -> int:
    """What stands before the first block of a prompt for an adapter, None: of the base model."""
    return xxhash.xxh3_64_intdigest(lora.encode("utf-8", "surrogatepass") if lora else b"") & KEY_MASK


def extra_bytes(items: Sequence[tuple[str, int]] = (), *, salts: Sequence[str] = (), digests: Sequence[bytes] = ()) -> bytes:
    """What a block's key covers beside its tokens, in one way of writing: multimodal items with their place relative to the
    block's start (below 0: it began before), salts, digests of prompt embeddings. Empty for none.
    """
    parts: list[bytes] = []
    for identity, offset in items:
        name = identity.encode("utf-8", "surrogatepass")
        parts += (b"m", len(name).to_bytes(4, "big"), name, offset.to_bytes(8, "big", signed=True))
    for salt in salts:
        word = salt.encode("utf-8", "surrogatepass")
        parts += (b"s", len(word).to_bytes(4, "big"), word)
    for digest in digests:
        parts += (b"e", len(digest).to_bytes(4, "big"), digest)
    return b"".join(parts)


def keys_after(
    before: int, token_bytes: memoryview | bytes, block_tokens: int, extras: Sequence[bytes] | None = None
) -> array[int]:
    """The keys of full blocks that follow the block with key ``before`` (or :func:`seed_of`), an ``array('Q')``.

    ``token_bytes`` are 32-bit token ids as this machine has them in memory. ``extras``: :func:`extra_bytes` of each block.
    """
    digest, mask, step = xxhash.xxh3_64_intdigest, KEY_MASK, block_tokens * TOKEN_BYTES
    starts = range(0, len(token_bytes) - step + 1, step)
    if extras is None:
        return array("Q", [before := digest(token_bytes[at : at + step], before) & mask for at in starts])
    keys = array("Q")
    for at, extra in zip(starts, extras, strict=True):
        block = token_bytes[at : at + step]
        before = digest(b"".join((block, extra)) if extra else block, before) & mask
        keys.append(before)
    return keys
