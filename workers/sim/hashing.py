"""The chain of block hashes that names a prefix, computed as vLLM does with ``--prefix-caching-hash-algo sha256``.

A full block's hash covers its parent's hash, its tokens, and the extra keys that make equal tokens different: the LoRA adapter
in every block, the cache salt in the first. No I/O here.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Sequence

DEFAULT_SEED = "vllm-none-hash"
"""What the hash before the first block is made from where PYTHONHASHSEED is not set."""

HASH_BYTES = hashlib.sha256().digest_size

ExtraKeys = tuple[tuple[str, ...], ...] | None


def _sha256(value: object) -> bytes:
    return hashlib.sha256(pickle.dumps(value, protocol=5)).digest()


def root_hash(seed: str = DEFAULT_SEED) -> bytes:
    """The parent of every first block."""
    return _sha256(seed)


def block_hash(parent: bytes, token_ids: Sequence[int], extra_keys: ExtraKeys = None) -> bytes:
    """The hash of one full block."""
    return _sha256((parent, tuple(token_ids), extra_keys))


def extra_keys(block_index: int, *, adapter: str = "", adapter_path: str = "", cache_salt: str | None = None) -> ExtraKeys:
    """What beside the tokens goes into a block's hash."""
    keys: list[tuple[str, ...]] = []
    if adapter:
        keys.append(("lora", adapter, adapter_path))
    if block_index == 0 and cache_salt:
        keys.append(("cache_salt", cache_salt))
    return tuple(keys) or None


def wire_hash(digest: bytes) -> int:
    """A block hash as KV events carry it: the low 64 bits."""
    return int.from_bytes(digest[-8:], "big")
