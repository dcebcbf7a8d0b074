"""What is known about a worker before it was ever asked: its address, and what the operator says about it."""

from __future__ import annotations

import msgspec


class EndpointSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One worker, as a configuration or a discovery source gives it."""

    address: str
    """`ip:port` of its HTTP server; `[v6]:port` for IPv6."""
    labels: dict[str, str] = {}
    """What policies select by, e.g. `{tier: gold}`."""
    models: list[str] | None = None
    """Models and LoRA adapters that it serves; null: what the worker itself reports."""
    max_seqs: int | None = None
    """Sequences that it runs at once (`--max-num-seqs`); null: not known."""
    kv_tokens: int | None = None
    """Tokens that its KV cache holds; null: not known."""
    prefill_tokens_per_s: float | None = None
    """Its prefill rate before any was observed; null: not known."""
    max_batched_tokens: int | None = None
    """Tokens of one scheduler step (`--max-num-batched-tokens`); null: not known."""
    instance: str | None = None
    """Which life of the worker it is, if whoever names it knows: with another one at the same address, nothing is left of what
    its cache held. Kubernetes: the pod's uid and the restarts of its container."""


class EndpointSet(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All workers, by role. An empty role is valid: it is scaled to zero."""

    prefill: tuple[EndpointSpec, ...] = ()
    decode: tuple[EndpointSpec, ...] = ()
    both: tuple[EndpointSpec, ...] = ()
    """Workers that take prompts and stream answers."""
