"""A buffer offered to, or read from, another process with NIXL over UCX, as vLLM's NixlConnector does it."""

from __future__ import annotations

import importlib
import time
import uuid
from typing import Any

import numpy as np

from workers.preflight.measure.memory import Buffer, pattern
from workers.preflight.measure.messages import MeasureError

_SEGMENT = {"dram": "DRAM", "cuda": "VRAM"}
_STEP_PRIME, _NEXT_PRIME = 7_919, 7_927
"""Blocks are read in an order in which no two neighbours follow each other, like those of a worker that has run for a while."""


class Link:
    """One NIXL agent with one registered buffer."""

    def __init__(self, buffer: Buffer) -> None:
        """Raises MeasureError if NIXL has no UCX or cannot register the buffer."""
        try:
            nixl: Any = importlib.import_module("nixl._api")
        except ImportError as error:
            raise MeasureError(f"NIXL cannot be used: {error}") from None
        self.name = str(uuid.uuid4())
        self._buffer = buffer
        try:
            self._agent: Any = nixl.nixl_agent(self.name, nixl.nixl_agent_config(backends=["UCX"]))
            self._registered = self._agent.register_memory(
                [(buffer.address, buffer.size_bytes, buffer.device_id, "")], _SEGMENT[buffer.memory], backends=["UCX"]
            )
        except Exception as error:  # NIXL's own kinds have no common base
            raise MeasureError(f"NIXL cannot register {buffer.size_bytes} bytes of {buffer.memory}: {error!r}") from None

    def metadata(self) -> bytes:
        """What a reader needs to reach this agent."""
        return bytes(self._agent.get_agent_metadata())

    def close(self) -> None:
        """Give the registration back."""
        self._agent.deregister_memory(self._registered)


class Reader(Link):
    """Reads blocks of a remote buffer into its own."""

    def connect(self, metadata: bytes) -> None:
        """Raises MeasureError for what is not NIXL's."""
        try:
            self._remote = self._agent.add_remote_agent(metadata)
        except Exception as error:
            raise MeasureError(f"NIXL cannot use what the other side said: {error!r}") from None

    def read(self, *, blocks: int, total: int, block_bytes: int, remote: tuple[int, int, str], timeout_s: float) -> float:
        """Seconds that reading ``blocks`` of ``total`` blocks took, making the request included. Raises MeasureError."""
        address, device_id, memory = remote
        offsets = scattered(blocks, total) * block_bytes
        start = time.perf_counter()
        try:
            handle = self._agent.initialize_xfer(
                "READ",
                self._descriptors(self._buffer.address, offsets, block_bytes, self._buffer.device_id, self._buffer.memory),
                self._descriptors(address, offsets, block_bytes, device_id, memory),
                self._remote,
                backends=["UCX"],
            )
            state = self._agent.transfer(handle)
            deadline = time.monotonic() + timeout_s
            while state == "PROC" and time.monotonic() < deadline:
                time.sleep(0)  # the progress thread needs the interpreter's lock now and then
                state = self._agent.check_xfer_state(handle)
        except Exception as error:
            raise MeasureError(f"NIXL failed to read {blocks} blocks of {block_bytes} bytes: {error!r}") from None
        seconds = time.perf_counter() - start
        if state != "DONE":
            why = f"not done after {timeout_s:.0f} s" if state == "PROC" else "failed"
            raise MeasureError(f"a read of {blocks} blocks of {block_bytes} bytes {why}")
        self._agent.release_xfer_handle(handle)
        return seconds

    def check(self, *, blocks: int, total: int, block_bytes: int, seed: int) -> None:
        """The blocks that were read last are those of the other side. Raises MeasureError."""
        shape = (total, block_bytes // 4)
        there = pattern(total * block_bytes, seed).reshape(shape)
        here = self._buffer.words().reshape(shape)
        chosen = scattered(blocks, total)
        if not np.array_equal(here[chosen], there[chosen]):
            raise MeasureError("what was read is not what the other side has: the transport delivers wrong bytes")

    def _descriptors(self, address: int, offsets: Any, block_bytes: int, device_id: int, memory: str) -> Any:
        rows = np.empty((len(offsets), 3), dtype=np.uint64)
        rows[:, 0] = offsets + address
        rows[:, 1] = block_bytes
        rows[:, 2] = device_id
        return self._agent.get_xfer_descs(rows, _SEGMENT[memory])


def scattered(blocks: int, total: int) -> Any:
    """Numbers of ``blocks`` different ones of ``total`` blocks, no two neighbours after each other where that can be."""
    step = _STEP_PRIME if total % _STEP_PRIME else _NEXT_PRIME
    return (np.arange(blocks, dtype=np.uint64) * np.uint64(step)) % np.uint64(total)
