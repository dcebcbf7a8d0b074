"""What a worker says about itself, as far as the decision uses it."""

from __future__ import annotations

import msgspec


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """One report. None: the worker did not say."""

    running: float | None = None
    """Requests in its scheduler."""
    waiting: float | None = None
    """Requests that wait for its scheduler."""
    kv_usage: float | None = None
    """Share of its KV cache in use, 0 to 1."""
    kv_tokens: int | None = None
    """Size of its KV cache."""
    block_tokens: int | None = None
    """Tokens in one of its KV blocks."""
    itl_s: float | None = None
    """Mean time between tokens since its last report."""
    transfer_s: float | None = None
    """Mean duration of a KV transfer that it received since its last report."""
    transfer_bytes: float | None = None
    """Mean size of those."""
    rank_running: tuple[float, ...] = ()
    """The same of each of its engines, in the order of their data-parallel ranks. Empty: it has one, or did not say."""
    rank_waiting: tuple[float, ...] = ()
    restarted: bool = False
    """It is a new process since its last report: its cache is empty."""
