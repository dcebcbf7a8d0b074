"""The payload of a batch -> events. Pure.

A payload is a msgpack array ``[time, events, data-parallel rank]`` (vLLM: distributed/kv_events.py). An event is a map with its
``type``; before vLLM 0.24 it was an array that began with it. Kinds and fields that are not known are left out and counted.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import msgspec

_Hash = int | bytes


class BlockStored(msgspec.Struct, tag_field="type", tag="BlockStored", gc=False):
    """Consecutive blocks entered a tier."""

    block_hashes: list[_Hash]
    parent_block_hash: _Hash | None
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

    block_hashes: list[_Hash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag_field="type", tag="AllBlocksCleared", gc=False):
    """The cache was emptied."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


class _RawBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


class _Time(msgspec.Struct, array_like=True, gc=False):
    ts: float


class Batch(NamedTuple):
    """What a payload says."""

    time_s: float
    """When it was published, by the worker's clock, in seconds since 1970."""
    events: list[Event]


class NotABatchError(ValueError):
    """The payload cannot be understood, or an event in it of which it matters what it says."""


_KINDS: dict[str, type[BlockStored | BlockRemoved | AllBlocksCleared]] = {
    "BlockStored": BlockStored,
    "BlockRemoved": BlockRemoved,
    "AllBlocksCleared": AllBlocksCleared,
}
_FIELDS = {kind: struct.__struct_fields__ for kind, struct in _KINDS.items()}
_PASSED_OVER = frozenset({"type", "kv_cache_spec_sliding_window", "locality", "ownership", "session_id"})
"""Fields that vLLM 0.32 has and that nothing here depends on."""

_fast = msgspec.msgpack.Decoder(_Batch)
_raw = msgspec.msgpack.Decoder(_RawBatch)
_time = msgspec.msgpack.Decoder(_Time)
_any = msgspec.msgpack.Decoder()

_MOST_NAMES = 100
"""So many unknown kinds and fields are told apart."""


class Decoder:
    """For one publisher: it counts what it did not know, and remembers which form the events have."""

    def __init__(self) -> None:
        self.unknown: Counter[str] = Counter()
        """Kinds of events and fields that were not known -> how often, for fields in the batches that were looked at."""
        self._batches = 0

    def decode(self, payload: bytes) -> Batch:
        """Raises NotABatchError."""
        self._batches += 1
        if self._batches & 1023 == 1:  # fields that are not known cost nothing otherwise
            return self._slowly(payload)
        try:
            batch = _fast.decode(payload)
        except (msgspec.DecodeError, ValueError, RecursionError):
            return self._slowly(payload)
        return Batch(batch.ts, batch.events)

    def _slowly(self, payload: bytes) -> Batch:
        """Event by event, in any form."""
        try:
            batch = _raw.decode(payload)
            events = []
            for raw in batch.events:
                event = self._event(_any.decode(raw))
                if event is not None:
                    events.append(event)
        except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
            raise NotABatchError(str(error)) from None
        return Batch(batch.ts, events)

    def _event(self, told: Any) -> Event | None:
        if isinstance(told, dict):
            kind = told.get("type")
            if kind not in _KINDS:
                self._pass_over(kind)
                return None
            for name in told:
                if name not in _FIELDS[kind] and name not in _PASSED_OVER:
                    self._count(f"{kind}.{name}")
        elif isinstance(told, list) and told:
            kind = told[0]
            if kind not in _KINDS:
                self._pass_over(kind)
                return None
            fields = _FIELDS[kind]
            if len(told) - 1 > len(fields) + len(_PASSED_OVER):
                self._count(f"{kind}[{len(fields)}:]")
            told = {**dict(zip(fields, told[1:], strict=False)), "type": kind}
        else:
            raise NotABatchError(f"an event is {type(told).__name__}")
        event: Event = msgspec.convert(told, _KINDS[kind])
        return event

    def _pass_over(self, kind: object) -> None:
        if not isinstance(kind, str):
            raise NotABatchError("an event without a kind")
        self._count(kind)

    def _count(self, name: str) -> None:
        name = name[:80]
        if name in self.unknown or len(self.unknown) < _MOST_NAMES:
            self.unknown[name] += 1


def time_of(payload: bytes) -> float | None:
    """When a batch was published, in seconds since 1970; None: it is not one. Costs a fraction of :meth:`Decoder.decode`."""
    try:
        return _time.decode(payload).ts
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
