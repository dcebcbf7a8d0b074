"""An arrangement: which engines serve a model together, and what carries KV between them. Facts only; no simulation here."""

from __future__ import annotations

from dataclasses import dataclass

from extproc.plan.engines import Engine
from extproc.plan.errors import PlanError
from extproc.plan.links import Link


@dataclass(frozen=True, kw_only=True)
class SharedCache:
    """A tier behind the prefill workers' own caches that all of them write to and read from: memory of hosts or of a server."""

    name: str
    capacity_tokens: int
    """Of prompts, all together; the least recently used go first."""
    bytes_a_s: float
    """At which one worker loads from it."""
    total_bytes_a_s: float | None = None
    """At which all workers together do; None: no limit but each worker's own."""
    overhead_s: float = 0.002
    """Of each load, before its bytes flow."""

    def __post_init__(self) -> None:
        """Raises PlanError for what no tier can have."""
        if self.capacity_tokens < 1:
            raise PlanError(f"shared cache {self.name!r}: capacity_tokens must be at least 1, not {self.capacity_tokens}")
        for field in ("bytes_a_s", "total_bytes_a_s"):
            value = getattr(self, field)
            if value is not None and not value > 0:
                raise PlanError(f"shared cache {self.name!r}: {field} must be above 0, not {value:g}")
        if self.overhead_s < 0:
            raise PlanError(f"shared cache {self.name!r}: overhead_s must be 0 or more, not {self.overhead_s:g}")


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """Engines of one or two roles, and the link between them."""

    name: str
    prefill: int
    """Prefill workers; 0: colocated, every worker does both."""
    decode: int
    """Decode workers, or workers that do both."""
    prefill_engine: Engine
    """Only read where there are prefill workers."""
    decode_engine: Engine
    link: Link | None = None
    """What KV takes from a prefill to a decode worker. None: colocated."""
    chunked: bool = True
    """Whether workers that do both cut prompts into chunks that share a step with decodes. False: a prompt takes one step, and
    no stream gets a token in it."""
    chunk_tokens: int = 8192
    """Tokens of a step, decodes included (``--max-num-batched-tokens``). Without chunks: the longest prompt, or several that
    are no longer together."""
    shared_cache: SharedCache | None = None
    max_num_seqs: int = 256
    prefix_caching: bool = True
    """Whether engines keep the KV of prompts that are over for the next one with the same beginning."""

    def __post_init__(self) -> None:
        """Raises PlanError for what cannot be put together, with the field."""
        if self.prefill < 0 or self.decode < 1:
            raise PlanError(
                f"arrangement {self.name!r}: {self.prefill} prefill and {self.decode} decode workers; "
                "there must be at least one that decodes"
            )
        if self.prefill and self.link is None:
            raise PlanError(f"arrangement {self.name!r}: prefill workers need a link to the decode workers")
        if self.chunk_tokens < self.max_num_seqs:
            raise PlanError(
                f"arrangement {self.name!r}: chunk_tokens ({self.chunk_tokens}) must not be below max_num_seqs "
                f"({self.max_num_seqs}), or a step could not decode every sequence"
            )
        if self.prefill:
            sizes = {self.prefill_engine.profile.kv_bytes_a_token, self.decode_engine.profile.kv_bytes_a_token}
            if len(sizes) > 1:
                raise PlanError(
                    f"arrangement {self.name!r}: a token's KV has {min(sizes):g} bytes on one side and {max(sizes):g} on the "
                    "other; both roles need the same model and KV dtype"
                )

    @property
    def gpus(self) -> int:
        """All GPUs."""
        return self.prefill * self.prefill_engine.gpus + self.decode * self.decode_engine.gpus

    @property
    def colocated(self) -> bool:
        """Whether every worker does both."""
        return not self.prefill
