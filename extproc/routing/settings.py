"""What the decision can be told about a pool before it has learned anything, and where its limits are."""

from __future__ import annotations

from typing import Literal

import msgspec

_MAY_BE_ZERO = frozenset(
    ("hold", "aged_share", "tenant_quantum_s", "handshake_s", "handoff_overhead_s", "decode_seq_s", "decode_token_s", "seed")
)

_SHARES = {"aged_share": 1.0, "kv_headroom": 1.0}
"""Upper bounds of what is no more than a whole."""


class Routing(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How workers are chosen. What is learned from the workers replaces the first guesses given here."""

    dispatch: Literal["queue", "immediate"] = "queue"
    """`queue`: a prompt waits here until a prefill worker has room. `immediate`: it is sent at once and waits in the engine."""
    step_tokens: int = 8192
    """A prefill worker gets another prompt while its unfinished ones leave room in one scheduler step
    (`--max-num-batched-tokens`); a worker's own `max_batched_tokens` counts before this."""
    hold: float = 2.0
    """How much more than its own seconds the work counts that a choice adds to a pool that is busy. A prompt waits for the
    worker that holds its prefix where that saves more work than it costs time."""
    queue_requests: int = 10_000
    """Prompts that wait at once; one more is answered 429."""
    queue_bytes: int = 1 << 30
    """Bodies of the prompts that wait, together; one more is answered 429."""
    queue_wait_s: float = 60.0
    """Longest wait of a prompt, then 429. A policy may shorten it."""
    window: int = 256
    """So many of the prompts that wait are weighed against each other at a time."""
    aged_share: float = 0.1
    """Share of the prefill work that goes to those that have waited longest, however late they are: nobody starves."""
    tenant_quantum_s: float = 2.0
    """Prefill seconds by which a tenant may be ahead of its fair share before the others go first."""
    prefill_tokens_per_s: float = 10_000.0
    """First guess of a prefill worker's speed."""
    decode_step_s: float = 0.02
    """First guess of a decode step with one sequence: the time between two tokens."""
    decode_seq_s: float = 0.0003
    """First guess of what each sequence more adds to a decode step."""
    decode_token_s: float = 5e-8
    """First guess of what each token in the KV cache of its sequences adds to a decode step: the time to read it."""
    kv_bytes_per_token: float = 131_072.0
    """KV cache of one token, all layers; 131,072 is an 8B Llama in BF16, 327,680 a 70B."""
    kv_bytes_by_model: dict[str, float] = {}
    """The same for one model each; `models.configs` can compute it."""
    transfer_bytes_per_s: float = 10e9
    """First guess of the bandwidth between a prefill and a decode worker."""
    cpu_bytes_per_s: float = 20e9
    """First guess of how fast a worker loads KV blocks from its CPU's memory into its GPU's, where its events tell of them."""
    disk_bytes_per_s: float = 2e9
    """The same from a disk."""
    lmcache_bytes_per_s: float = 5e9
    """The same from a cache server."""
    rank_gain_s: float = 0.1
    """Of a worker with several data-parallel ranks behind one address, a request names the one that holds most of its prompt
    (`X-data-parallel-rank`) where that saves so many seconds; else the worker's own balancing chooses. A huge number: never."""
    handoff_overhead_s: float = 0.03
    """What a handoff costs beside prefill and transfer: a second request, scheduling, the first step."""
    handshake_s: float = 0.5
    """What the first transfer of a pair counts: it takes seconds, but only once."""
    block_tokens: int = 64
    """Tokens of a block of the prefix index."""
    index_blocks: int = 1_000_000
    """Blocks that the prefix index remembers, all workers together: about 30 bytes each in long prompts. Where prompts have but
    a block or two, as many as fit into 250 bytes for each of this number, or into 160 MiB if that is more."""
    worker_kv_tokens: int = 1_000_000
    """KV cache of a worker that does not report its size."""
    worker_max_seqs: int = 256
    """Sequences of a decode worker (`--max-num-seqs`) that does not report them."""
    kv_headroom: float = 0.95
    """Share of a decode worker's KV cache that may be taken by what was sent there; one more waits."""
    breaker_failures: int = 3
    """Failures of a worker in a row, in one role, after which it is left alone for a while."""
    breaker_pause_s: float = 2.0
    """First pause; it doubles with every failed trial, up to 60 s."""
    stale_s: float = 5.0
    """What a worker reported is not believed for longer."""
    seed: int = 0
    """Of the objective `random`."""

    def __post_init__(self) -> None:
        """Raises ValueError that begins with the field."""
        for field in self.__struct_fields__:
            value = getattr(self, field)
            if isinstance(value, str | dict):
                continue
            least = 0 if field in _MAY_BE_ZERO else 1e-9 if isinstance(value, float) else 1
            most = _SHARES.get(field, 1e12)
            if not least <= value <= most:
                raise ValueError(f"{field}: {value:g} is not from {least:g} to {most:g}")
        for model, size_bytes in self.kv_bytes_by_model.items():
            if not 0 < size_bytes <= 1e12:
                raise ValueError(f"kv_bytes_by_model.{model}: {size_bytes:g} is not above 0")
