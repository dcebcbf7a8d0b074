"""One sequence inside the engine: what it was asked, how far it is, which blocks it holds. Plain data, no I/O."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from workers.sim import text
from workers.sim.text import Answer, Step, Stop


def _ignore(_: object) -> None:
    pass


class Status(Enum):
    """Where a sequence is."""

    WAITING = auto()
    PULLING = auto()
    """Its blocks are allocated and on their way from a prefill worker."""
    RUNNING = auto()
    FINISHED = auto()


@dataclass
class Sequence:
    """One prompt and its answer. ``on_steps`` gets the new tokens; ``on_end`` is called once, with the reason or an error."""

    request_id: str
    prompt: list[int]
    stop: Stop
    adapter: str = ""
    adapter_path: str = ""
    cache_salt: str | None = None
    kv_params: dict[str, Any] | None = None
    prompt_logprobs: int | None = None
    """Asked for, they need the whole prompt computed: no prefix cache hit."""
    eos_first: bool = False
    null_params: bool = False
    """Answer a prefill without kv_transfer_params (a fault)."""
    on_steps: Callable[[list[Step]], None] = _ignore
    on_end: Callable[[str], None] = _ignore

    status: Status = Status.WAITING
    arrived_s: float = 0.0
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    token_ids: list[int] = field(default_factory=list)
    """Prompt and answer."""
    raw: bytes = b""
    """The prompt as bytes."""
    computed: int = 0
    """Tokens whose KV is in the blocks."""
    blocks: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    registered: int = 0
    """Full blocks that are in the prefix cache."""
    cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache when it was first scheduled."""
    host_tokens: int = 0
    """Prompt tokens that were then loaded from the host's memory."""
    pulled_tokens: int = 0
    local_tokens: int = 0
    answer: Answer | None = None
    kv_result: dict[str, Any] | None = None
    """kv_transfer_params of the reply."""
    preemptions: int = 0
    pull_allowed: bool = True
    pull_until: int = 0
    """The tokens of the prompt before this one are pulled."""

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt)
        self.raw = text.token_bytes(self.prompt)
        self._state: hashlib.blake2b = text.start_state(self.adapter)
        self._state_blocks = 0

    @property
    def is_prefill_leg(self) -> bool:
        """It was asked to keep its blocks for a decode worker."""
        return bool(self.kv_params and self.kv_params.get("do_remote_decode"))

    @property
    def wants_pull(self) -> bool:
        """Its KV is to come from a prefill worker, and has not yet."""
        return bool(self.pull_allowed and self.kv_params and self.kv_params.get("do_remote_prefill"))

    @property
    def wants_turn(self) -> bool:
        """It is a prefill whose beginning is in the blocks of a decode worker, and has not come yet."""
        params = self.kv_params
        if not self.pull_allowed or not params or not params.get("do_remote_decode") or not params.get("remote_block_ids"):
            return False
        return all(name in params for name in ("remote_engine_id", "remote_request_id", "remote_host", "remote_port"))

    @property
    def answered(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - len(self.prompt)

    def bytes_of(self, start: int, end: int) -> bytes:
        """The tokens from ``start`` to ``end``, as bytes."""
        if end <= len(self.prompt):
            return self.raw[start * 4 : end * 4]
        return text.token_bytes(self.token_ids[start:end])

    def context(self, block_index: int, block_size: int) -> bytes:
        """The state before a block, if all before it is right."""
        if block_index < self._state_blocks:
            self._state, self._state_blocks = text.start_state(self.adapter), 0
        if block_index > self._state_blocks:
            self._state.update(self.bytes_of(self._state_blocks * block_size, block_index * block_size))
            self._state_blocks = block_index
        return self._state.digest()
