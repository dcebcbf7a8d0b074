"""The payload of a batch -> events. Pure.

A payload is a msgpack array ``[time, events, data-parallel rank]`` (vLLM: distributed/kv_events.py). An event is a map with its
``type``; before vLLM 0.24 it was an array that began with it. Kinds and fields that are not known are left out and counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from extproc.observe.kv_events.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, NotABatchError
from extproc.observe.kv_events.long_events import LONG_BYTES, in_pieces, kind_of


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


_KINDS: dict[str, type[BlockStored | BlockRemoved | AllBlocksCleared]] = {
    "BlockStored": BlockStored,
    "BlockRemoved": BlockRemoved,
    "AllBlocksCleared": AllBlocksCleared,
}
_LONG_KINDS = ("BlockStored", "BlockRemoved")
_FIELDS = {kind: struct.__struct_fields__ for kind, struct in _KINDS.items()}
_PASSED_OVER = frozenset({"type", "kv_cache_spec_sliding_window", "locality", "ownership", "session_id"})
"""Fields that vLLM 0.32 has and that nothing here depends on."""

_fast = msgspec.msgpack.Decoder(_Batch)
_raw = msgspec.msgpack.Decoder(_RawBatch)
_time = msgspec.msgpack.Decoder(_Time)
_any = msgspec.msgpack.Decoder()
_known = msgspec.msgpack.Decoder(Event)

_MOST_NAMES = 100
"""So many unknown kinds and fields are told apart."""

_WHOLE_BYTES = 64 << 10
"""A batch that is longer is decoded in pieces."""

_AT_ONCE = 64
"""Events of a piece, unless they have :data:`LONG_BYTES` before."""

_MOST_EVENTS = 32_768
"""Of a batch. vLLM makes a batch of each step, and in a step removes at most the blocks that its new ones take: a prompt of
131,072 tokens takes 8,192. That one step admits four of these is an assumption."""


class Decoder:
    """For one publisher: it counts what it did not know, and remembers which form the events have."""

    def __init__(self) -> None:
        self.unknown: Counter[str] = Counter()
        """Kinds of events and fields that were not known -> how often, for fields in the batches that were looked at."""
        self._batches = 0
        self._look = False

    def quickly(self, payload: bytes) -> Batch | None:
        """None: it is long, or has a form that takes longer: :meth:`pieces` reads it."""
        self._batches += 1
        self._look = self._batches & 1023 == 1  # fields that are not known cost nothing otherwise
        if self._look or len(payload) > _WHOLE_BYTES:
            return None
        try:
            batch = _fast.decode(payload)
        except (msgspec.DecodeError, ValueError, RecursionError):
            return None
        return Batch(batch.ts, batch.events)

    def pieces(self, payload: bytes) -> Iterator[tuple[int, list[Event]]]:
        """The batch that was not to be had quickly, a fraction of a millisecond at a time: how many events, and what they say.
        Raises NotABatchError.
        """
        look = self._look
        try:
            if _events_of(payload) > _MOST_EVENTS:
                raise NotABatchError(f"more than {_MOST_EVENTS} events")
            events: list[Event] = []
            told = read_bytes = 0
            for raw in _raw.decode(payload).events:
                view = memoryview(raw)
                size = len(view)
                if size > LONG_BYTES:
                    if events:
                        yield told, events
                        told, events = 0, []
                    yield from self._long(bytes(raw))
                    continue
                told += 1
                read_bytes += size
                event = self._one(raw, view[0], look=look)
                if event is not None:
                    events.append(event)
                if told == _AT_ONCE or read_bytes > LONG_BYTES:
                    yield told, events
                    told, events, read_bytes = 0, [], 0
            yield told, events
        except (msgspec.DecodeError, ValueError, TypeError, IndexError, RecursionError) as error:
            raise NotABatchError(str(error)) from None

    def decode(self, payload: bytes) -> Batch:
        """All of it at once. Raises NotABatchError."""
        batch = self.quickly(payload)
        if batch is not None:
            return batch
        time_s = time_of(payload)
        if time_s is None:
            raise NotABatchError("it does not begin with a time")
        return Batch(time_s, [event for _, events in self.pieces(payload) for event in events])

    def _long(self, raw: bytes) -> Iterator[tuple[int, list[Event]]]:
        kind = kind_of(raw)
        if kind not in _LONG_KINDS:
            if kind not in _KINDS:
                self._pass_over(kind)
            else:
                yield 1, [AllBlocksCleared()]
            return
        told = 1
        for event in in_pieces(raw):
            yield told, [event]
            told = 0

    def _one(self, raw: msgspec.Raw, first: int, *, look: bool) -> Event | None:
        if not look and first & 0xF0 != 0x90:  # an array is decoded by its names of fields, which takes longer
            try:
                event: Event = _known.decode(raw)
            except msgspec.ValidationError:
                pass
            else:
                return event
        return self._event(_any.decode(raw))

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


def _events_of(payload: bytes) -> int:
    """How many events a batch has, as it says itself; 0 where it is none. The time before them is a float of 64 bits."""
    if len(payload) < 15:
        return 0
    if payload[1] != 0xCB and len(payload) > _WHOLE_BYTES:
        raise NotABatchError("it does not begin with a time of 64 bits")
    kind = payload[10]
    if kind == 0xDC:
        return int.from_bytes(payload[11:13], "big")
    return int.from_bytes(payload[11:15], "big") if kind == 0xDD else 0
