"""What was done wrong with a worker: kept, counted, and listed at ``/sim/violations``. No I/O here."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import asdict, dataclass
from typing import Any

ROUTER_KINDS = {
    "second_use": "a handoff was read a second time",
    "use_after_expiry": "a handoff was read after its lease had ended",
    "use_after_release": "a handoff was read after it had been given back",
    "unknown_engine": "a handoff names an engine that never was at that address",
    "unknown_request": "a handoff names a request that its engine never pinned blocks for",
    "other_prompt": "a handoff was used for another prompt than it was made for",
    "other_beginning": "blocks of an answer were read for a prompt that does not begin with exactly their tokens",
    "turn_stuck": "a prefill was given blocks to read on an engine without bidirectional_kv_xfer, which waits for ever",
    "foreign_blocks": "a handoff names blocks that do not belong to it",
    "incomplete_params": "kv_transfer_params lack a key that vLLM dies or hangs without",
    "streamed_prefill": "a prefill was streamed: its reply carries no handoff and its blocks stay pinned",
    "min_tokens_above_cap": "a prefill asked for more tokens than its cap",
    "several_sequences": "n > 1 or a list of prompts came with kv_transfer_params",
    "smuggled_params": "transfer keys came in vllm_xargs or in extra_args of the sampling parameters",
    "leaked_blocks": "pinned blocks were freed by nothing but the end of their lease, and no decode worker ever asked for them",
}
"""What a router must never cause."""

ENVIRONMENT_KINDS = {
    "peer_lost": "pinned blocks ran into the end of their lease after a decode worker had asked for them and then gone",
    "reply_lost": "pinned blocks ran into the end of their lease, and the prefill's reply never reached its client",
    "turn_unused": "blocks of an answer ran into the end of their time: the next turn did not come, or did not use them",
    "engine_gone": "a handoff names an engine that has been restarted since",
}
"""What a fault can cause under a router that does everything right."""

_KEPT = 10_000


@dataclass(frozen=True)
class Violation:
    """One thing that was wrong."""

    kind: str
    request_id: str
    detail: str
    at_s: float
    """Seconds since the epoch."""


class Violations:
    """Those of one worker. The newest are kept, all are counted."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._kept: deque[Violation] = deque(maxlen=_KEPT)

    def add(self, kind: str, request_id: str, detail: str, now_s: float) -> None:
        """Keep one. ``kind`` is one of those above."""
        assert kind in ROUTER_KINDS or kind in ENVIRONMENT_KINDS, kind
        self.counts[kind] += 1
        self._kept.append(Violation(kind, request_id, detail, now_s))

    def clear(self) -> None:
        """Forget all."""
        self.counts.clear()
        self._kept.clear()

    def kept(self) -> tuple[Violation, ...]:
        """The newest, oldest first."""
        return tuple(self._kept)

    def report(self) -> dict[str, Any]:
        """What ``/sim/violations`` answers."""
        return {
            "count": sum(n for kind, n in self.counts.items() if kind in ROUTER_KINDS),
            "counts": {kind: n for kind, n in self.counts.items() if kind in ROUTER_KINDS},
            "violations": [asdict(v) for v in self._kept if v.kind in ROUTER_KINDS],
            "environment": {
                "counts": {kind: n for kind, n in self.counts.items() if kind in ENVIRONMENT_KINDS},
                "events": [asdict(v) for v in self._kept if v.kind in ENVIRONMENT_KINDS],
            },
        }
