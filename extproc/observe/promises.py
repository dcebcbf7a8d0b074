"""What a request was promised, and whether it was kept: the SLO of its policy, and the TTFT that its decision expected."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from extproc.observe.log_lines import Line
from extproc.observe.tags import Mode
from extproc.routing.decision import Decision

Verdict = Literal["met", "ttft_missed", "itl_missed", "both_missed", "failed"]

VERDICTS: Final = (
    "`met`, `ttft_missed`, `itl_missed` (the mean of the answer, where it states its tokens), `both_missed`, `failed` (no "
    "answer, or one that broke off, or turned away by the filter)"
)

PARTS: Final = {
    "queued": "in the filter's queue",
    "queue_prefill": "until the prefill worker is through with what it has",
    "prefill": "computing the prompt",
    "handoff": "moving the KV blocks",
    "queue_decode": "until the decode worker has room",
}
"""Of the expected TTFT."""


class Promise(msgspec.Struct, gc=False):
    """Of one request."""

    ttft_slo_s: float | None
    itl_slo_s: float | None
    expected_s: tuple[float, ...] = ()
    """The parts of the TTFT that the decision expected, in the order of :data:`PARTS`; empty: there is no such decision."""

    mode: Mode = "none"
    """That was decided."""

    def expect(self, decision: Decision) -> None:
        """Note what the decision expects."""
        self.mode = "aggregate" if decision.prefill is None else "disaggregate"
        terms = decision.terms
        handoff_s = terms.transfer_s + terms.handshake_s + terms.overhead_s + terms.penalty_s
        prefill_s = terms.prefill_s + terms.load_s
        self.expected_s = (decision.queued_s, terms.queue_prefill_s, prefill_s, handoff_s, terms.queue_decode_s)

    def kept(self, line: Line) -> Verdict | None:
        """None: there is no SLO, or nobody can tell: the answer is no stream, the error is the client's, the client left."""
        if self.ttft_slo_s is None and self.itl_slo_s is None:
            return None
        # A 429 is the filter's way of not keeping it, a 400 or 404 the client's own fault.
        if line.outcome == "refused" and line.status < 500 and line.status != 429:
            return None
        if line.outcome not in ("ok", "client_gone", "client_error", "cut"):
            return "failed"
        if line.outcome == "client_error" or not line.streamed or line.ttft_s is None:
            return None
        late = self.ttft_slo_s is not None and line.ttft_s > self.ttft_slo_s
        itl_s = line.mean_itl_s if line.outcome == "ok" else None
        slow = self.itl_slo_s is not None and itl_s is not None and itl_s > self.itl_slo_s
        if late:
            return "both_missed" if slow else "ttft_missed"
        if slow:
            return "itl_missed"
        return "met" if line.outcome == "ok" else None
