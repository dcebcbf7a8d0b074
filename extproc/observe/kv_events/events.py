"""A publisher's events. The fields are vLLM's (distributed/kv_events.py)."""

from __future__ import annotations

from typing import Any

import msgspec

Hash = int | bytes


class BlockStored(msgspec.Struct, tag_field="type", tag="BlockStored", gc=False):
    """Consecutive blocks entered a tier."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(msgspec.Struct, tag_field="type", tag="BlockRemoved", gc=False):
    """Blocks left a tier."""

    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag_field="type", tag="AllBlocksCleared", gc=False):
    """The cache was emptied."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class NotABatchError(ValueError):
    """The payload cannot be understood, or an event in it of which it matters what it says."""
