"""KV cache events over ZMQ, in vLLM 0.32's wire format: what is in the prefix cache, told to whoever subscribes.

Frames: topic, sequence number (8 bytes, big-endian), msgpack ``[time, events, data-parallel rank]`` with each event a map
that has a ``type``. A ROUTER socket replays the last batches: it is asked with a start number and answers batch by batch,
then with sequence number -1. What may live here: the sockets and the format.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from workers.sim.blocks import CacheEvent, Removed, Stored
from workers.sim.hashing import wire_hash

_END = (-1).to_bytes(8, "big", signed=True)
_BUFFERED_BATCHES = 10_000
_encode = msgspec.msgpack.Encoder().encode


def as_map(event: CacheEvent, block_size: int, adapter_ids: dict[str, int]) -> dict[str, Any]:
    """One event as it goes on the wire."""
    if isinstance(event, Stored):
        return {
            "type": "BlockStored",
            "block_hashes": [wire_hash(digest) for digest in event.hashes],
            "parent_block_hash": None if event.parent is None else wire_hash(event.parent),
            "token_ids": list(event.token_ids),
            "block_size": block_size,
            "lora_id": adapter_ids.get(event.adapter),
            "medium": event.medium,
            "lora_name": event.adapter or None,
            "extra_keys": [None if keys is None else list(keys) for keys in event.extra_keys],
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
    if isinstance(event, Removed):
        return {
            "type": "BlockRemoved",
            "block_hashes": [wire_hash(digest) for digest in event.hashes],
            "medium": event.medium,
            "group_idx": 0,
        }
    return {"type": "AllBlocksCleared"}


def as_array(event: dict[str, Any]) -> list[Any]:
    """The form that versions of vLLM before 0.24 sent: the kind, then the fields in their order."""
    return list(event.values())


class Publisher:
    """Publishes the events of one worker. Used from one event loop."""

    def __init__(
        self, endpoint: str, replay_endpoint: str | None, *, topic: str, block_size: int, adapters: tuple[str, ...] = ()
    ) -> None:
        self.endpoint = endpoint
        self.replay_endpoint = replay_endpoint
        self._topic = topic.encode()
        self._block_size = block_size
        self._adapter_ids = {name: number for number, name in enumerate(adapters, start=1)}
        self._context = zmq.Context()
        self._publish = self._context.socket(zmq.PUB)
        _bind(self._publish, endpoint)
        self._replay: zmq.asyncio.Socket | None = None
        self._task: asyncio.Task[None] | None = None
        self._pending: list[CacheEvent] = []
        self._sequence = 0
        self.legacy = False
        """As before vLLM 0.24: events are arrays, and a replay does not say the topic."""
        self._lost = 0
        self._forgotten = False
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=_BUFFERED_BATCHES)
        if replay_endpoint:
            self._replay = zmq.asyncio.Context.shadow(self._context.underlying).socket(zmq.ROUTER)
            _bind(self._replay, replay_endpoint)
            self._task = asyncio.create_task(self._serve_replay(self._replay))

    def add(self, event: CacheEvent) -> None:
        """Keep an event for the next batch."""
        self._pending.append(event)

    def flush(self) -> None:
        """Publish what came since the last time, as one batch."""
        if not self._pending:
            return
        events, self._pending = self._pending, []
        maps = [as_map(event, self._block_size, self._adapter_ids) for event in events]
        payload = _encode([time.time(), [as_array(each) for each in maps] if self.legacy else maps, 0])
        number, self._sequence = self._sequence, self._sequence + 1
        if not self._lost or not self._forgotten:
            self._buffer.append((number, payload))
        if self._lost:
            self._lost -= 1
        else:
            self._publish.send_multipart((self._topic, number.to_bytes(8, "big"), payload))

    def lose(self, batches: int, *, forgotten: bool = False) -> None:
        """The next ``batches`` are lost on their way. ``forgotten``: they cannot be replayed, nor what was before them."""
        self._lost, self._forgotten = batches, forgotten
        if forgotten:
            self._buffer.clear()

    def batches(self) -> tuple[tuple[int, bytes], ...]:
        """What a replay can give, oldest first."""
        return tuple(self._buffer)

    def restart(self) -> None:
        """As a new process would: numbers from zero, nothing to replay."""
        self._pending.clear()
        self._buffer.clear()
        self._sequence = 0

    async def close(self) -> None:
        """Give the sockets up."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for socket in (self._publish, self._replay):
            if socket is not None:
                socket.close(0)
        self._context.term()

    async def _serve_replay(self, router: zmq.asyncio.Socket) -> None:
        while True:
            frames = await router.recv_multipart()
            if len(frames) != 3:
                continue
            client, _, start = frames
            first = int.from_bytes(start, "big")
            topic = () if self.legacy else (self._topic,)
            for number, payload in self.batches():
                if number >= first:
                    await router.send_multipart((client, b"", *topic, number.to_bytes(8, "big"), payload))
            await router.send_multipart((client, b"", *([b""] if topic else []), _END, b""))


def _bind(socket: zmq.Socket[bytes] | zmq.asyncio.Socket, endpoint: str) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 100_000)
    socket.bind(endpoint)
