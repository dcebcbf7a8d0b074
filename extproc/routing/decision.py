"""What was decided, and why: kept for the log, the header ``x-baton-decision``, ``/debug/decisions`` and ``baton explain``.

Dozens of :class:`Terms` and :class:`Candidate` are made for each prompt. They hold no cycles, so the garbage collector need not
know of them (``gc=False``): its runs were most of the time of the slowest decisions.
"""

from __future__ import annotations

import msgspec


class Terms(msgspec.Struct, kw_only=True, gc=False):
    """What one choice costs, in seconds. Which of them count, and how much, is the objective's business."""

    queue_prefill_s: float = 0.0
    """Until the prefill worker is through with what it has."""
    prefill_s: float = 0.0
    """Computing what its cache does not hold."""
    load_s: float = 0.0
    """Loading what it holds below its GPU's memory: in the CPU's, on a disk, in a cache server."""
    transfer_s: float = 0.0
    """Moving the KV that the decode worker does not hold."""
    handshake_s: float = 0.0
    """The two have never met."""
    overhead_s: float = 0.0
    """Of any handoff."""
    penalty_s: float = 0.0
    """The pair failed a while ago."""
    queue_decode_s: float = 0.0
    """Until the decode worker has room for one more sequence."""
    generation_s: float = 0.0
    """What the answer takes longer than on an idle decode worker."""
    stall_s: float = 0.0
    """What a prefill on the decode worker holds up its streams, all together."""
    hold_s: float = 0.0
    """Work counts more than its own seconds while the pool is busy."""

    @property
    def ttft_s(self) -> float:
        """Expected time from the dispatch to the first token."""
        handoff_s = self.transfer_s + self.handshake_s + self.overhead_s + self.penalty_s
        return self.queue_prefill_s + self.prefill_s + self.load_s + handoff_s + self.queue_decode_s


class Candidate(msgspec.Struct, kw_only=True, gc=False):
    """One choice that was weighed."""

    prefill: str | None
    """``ip:port``; None: the decode worker does it all."""
    decode: str
    cost: float
    """What the objective makes of the terms; the least wins. Seconds, but for `prefix`, `least-load` and the like."""
    terms: Terms
    cached_prefill_tokens: int = 0
    cached_decode_tokens: int = 0
    refused: str | None = None
    """Why it could not be taken although it may have been the cheapest."""


class Decision(msgspec.Struct, kw_only=True):
    """The choice for one prompt."""

    policy: str
    objective: str
    reason: str
    """`cost`, `policy`, `threshold`, `cannot_hand_over`, `late`, `spare`, `retry`."""
    prefill: str | None
    decode: str
    prompt_tokens: int
    cached_tokens: int
    """Of the prompt, expected in the caches of the worker that computes it."""
    cached_by: str = "predicted"
    """Who says so: `events` of the worker; `ranks`: the same, as a mean over its engines, any of which may take it; `placed`:
    it was sent there a moment ago; `cache_server`; `predicted` from text."""
    below_tokens: dict[str, int] = {}
    """Of these, what has to be loaded first, by tier: `cpu`, `disk`, `lmcache`."""
    prefill_rank: int | None = None
    """The engine that the prefill leg names (`X-data-parallel-rank`), of a worker with several; null: none."""
    decode_rank: int | None = None
    """The same of the decode leg."""
    terms: Terms
    queued_s: float = 0.0
    """Time in our queue."""
    position: int = 0
    """Prompts in the queue when it came."""
    candidates: list[Candidate] = []
    """The cheapest ones, the chosen one first."""

    def header(self) -> str:
        """One line for ``x-baton-decision``: an RFC 9651 item with parameters, times in milliseconds."""
        mode = "aggregate" if self.prefill is None else "disaggregate"
        terms = {name.removesuffix("_s"): value for name, value in msgspec.structs.asdict(self.terms).items() if value >= 5e-5}
        parts = [
            mode,
            *(f'prefill="{self.prefill}"' for _ in (1,) if self.prefill is not None),
            *(f"prefill-rank={self.prefill_rank}" for _ in (1,) if self.prefill_rank is not None),
            f'decode="{self.decode}"',
            *(f"decode-rank={self.decode_rank}" for _ in (1,) if self.decode_rank is not None),
            f"reason={self.reason}",
            f'policy="{self.policy}"',
            f"objective={self.objective}",
            f"tokens={self.prompt_tokens}",
            f"cached={self.cached_tokens}",
            *(f"cached-by={self.cached_by}" for _ in (1,) if self.cached_by != "predicted"),
            f"queued-ms={self.queued_s * 1e3:.1f}",
            *(f"position={self.position}" for _ in (1,) if self.queued_s),
            *(f"{name.replace('_', '-')}-ms={value * 1e3:.1f}" for name, value in terms.items()),
        ]
        return ";".join(parts)
