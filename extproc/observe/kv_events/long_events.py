"""An event that is long -> several that say the same, each of which is quickly decoded. Pure.

A prompt of 131,072 tokens may come in one event, and decoding it whole would take five milliseconds. msgpack says how many
elements a list has, but not how many bytes they take; a regular expression finds where some thousand of them end much faster
than it takes to decode them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import repeat
from typing import Any

import msgspec

from extproc.observe.kv_events.events import BlockRemoved, BlockStored, Hash, NotABatchError

LONG_BYTES = 16 << 10
"""An event that is longer is decoded in pieces."""

_PIECE = 2048
"""Elements of a list at a time: a tenth of a millisecond."""

_LONGEST_BLOCK = 1 << 16
"""Tokens. vLLM's longest blocks, of Mamba groups, have some thousand."""

_NULL = msgspec.Raw(b"\xc0")


class _Stored(msgspec.Struct, tag_field="type", tag="BlockStored", gc=False):
    block_hashes: msgspec.Raw
    parent_block_hash: Hash | None
    token_ids: msgspec.Raw
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: msgspec.Raw = _NULL
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class _Removed(msgspec.Struct, tag_field="type", tag="BlockRemoved", gc=False):
    block_hashes: msgspec.Raw
    medium: str | None = None
    group_idx: int | None = None


class _StoredArray(_Stored, array_like=True, tag="BlockStored", gc=False):
    pass


class _RemovedArray(_Removed, array_like=True, tag="BlockRemoved", gc=False):
    pass


class _Named(msgspec.Struct, gc=False):
    type: str


class _NamedArray(msgspec.Struct, array_like=True, gc=False):
    type: str


_maps = msgspec.msgpack.Decoder(_Stored | _Removed)
_arrays = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray)
_named = msgspec.msgpack.Decoder(_Named)
_named_arrays = msgspec.msgpack.Decoder(_NamedArray)
_ids = msgspec.msgpack.Decoder(list[int])
_hashes = msgspec.msgpack.Decoder(list[Hash])
_extras = msgspec.msgpack.Decoder(list[list[Any] | None] | None)


def in_pieces(raw: bytes) -> Iterator[BlockStored | BlockRemoved]:
    """Events that say together what this one says, which is of one of the two kinds that can be long. Raises NotABatchError and
    msgspec.DecodeError where that cannot be understood.
    """
    event = (_arrays if _is_list(raw) else _maps).decode(raw)
    if isinstance(event, _Removed):
        for hashes in _lists(bytes(event.block_hashes), _PIECE, _hashes):
            yield BlockRemoved(hashes, event.medium, event.group_idx)
        return
    size = event.block_size
    if not 0 <= size <= _LONGEST_BLOCK:
        raise NotABatchError(f"blocks of {size} tokens")
    told, tokens = bytes(event.block_hashes), bytes(event.token_ids)
    blocks = max(1, _PIECE // max(size, 1))
    extras = _extras.decode(event.extra_keys)
    # Tokens that are not those of the blocks are of no use: then only the hashes count.
    some: Iterator[list[int]] = repeat([])
    if size and _header(tokens)[0] == _header(told)[0] * size:
        some = _lists(tokens, blocks * size, _ids)
    parent, start = event.parent_block_hash, 0
    for hashes, ids in zip(_lists(told, blocks, _hashes), some, strict=False):
        beside = extras[start : start + len(hashes)] if extras else None
        yield BlockStored(
            hashes,
            parent,
            ids,
            size,
            event.lora_id,
            event.medium,
            event.lora_name,
            beside,
            event.group_idx,
            event.kv_cache_spec_kind,
        )
        parent, start = hashes[-1], start + len(hashes)


def kind_of(raw: bytes) -> str:
    """The kind of an event, without decoding the rest of it. Raises msgspec.DecodeError."""
    return (_named_arrays if _is_list(raw) else _named).decode(raw).type


def _is_list(raw: bytes) -> bool:
    return raw[0] & 0xF0 == 0x90 or raw[0] in (0xDC, 0xDD)


def _header(raw: bytes) -> tuple[int, int]:
    """How many elements a list has, and where the first begins."""
    kind = raw[0]
    if kind & 0xF0 == 0x90:
        return kind & 0x0F, 1
    if kind == 0xDC:
        return int.from_bytes(raw[1:3], "big"), 3
    if kind == 0xDD:
        return int.from_bytes(raw[1:5], "big"), 5
    raise NotABatchError("no list where there should be one")


def _lists(raw: bytes, each: int, decoder: msgspec.msgpack.Decoder[Any]) -> Iterator[list[Any]]:
    count, at = _header(raw)
    while count > 0:
        some = min(count, each)
        found = _elements(each if some == each else _PIECE * _LONGEST_BLOCK).match(raw, at)
        if found is None:
            raise NotABatchError("an element of a list is neither a number nor a hash")
        yield decoder.decode(b"\xdd" + some.to_bytes(4, "big") + raw[at : found.end()])
        at, count = found.end(), count - some


@lru_cache(maxsize=64)
def _elements(count: int) -> re.Pattern[bytes]:
    """So many numbers or hashes, or all that there are, if ``count`` is more than there can be."""
    how_many = f"{{{count}}}" if count < _PIECE * _LONGEST_BLOCK else "+"
    one = rb"[\x00-\x7f]|\xcd.{2}|\xce.{4}|\xcf.{8}|\xcc.|\xc4\x20.{32}|\xc4\x10.{16}|\xc4\x08.{8}"
    return re.compile(rb"(?>" + one + rb")" + how_many.encode() + rb"+", re.DOTALL)
