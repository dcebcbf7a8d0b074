"""Why a prompt was handed over, or was not, in words for those who run the system. The router's own reasons name its rules."""

from __future__ import annotations

from typing import Final

from extproc.routing.decision import Decision

REASONS: Final = {
    ("disaggregate", "handed_over"): "a handoff costs less, or the prompt is over the policy's threshold",
    ("disaggregate", "forced"): "the policy says `mode: disaggregate`",
    ("aggregate", "cached_on_decode"): "the decode worker holds at least half of the prompt",
    ("aggregate", "too_short"): "what is to be computed is not worth a handoff",
    ("aggregate", "prefill_busy"): "the wait for a prefill worker would cost more than the handoff itself",
    ("aggregate", "only_worker"): "the only prefill worker is the decode worker",
    ("aggregate", "forced"): "the policy says `mode: aggregate`",
    ("aggregate", "cannot_hand_over"): "the request's shape forbids it; `baton_whole_requests_total` names the field",
    ("aggregate", "late"): "the SLO is out of reach, and the policy says `when_late: aggregate`",
    ("aggregate", "spare"): "it is late, and a decode worker has nothing to do",
    ("aggregate", "no_prefill_worker"): "no prefill worker is live, and the policy falls back",
}
"""(mode, reason) -> what it means."""


def reason_of(decision: Decision) -> str:
    """The reason of a decision: one of :data:`REASONS` for its mode."""
    if decision.reason == "policy":
        return "forced"
    if decision.prefill is not None:
        return "handed_over"
    if decision.reason not in ("cost", "threshold"):
        return decision.reason
    if decision.cached_tokens * 2 >= decision.prompt_tokens:
        return "cached_on_decode"
    if decision.reason == "threshold":
        return "too_short"
    apart = next((each for each in decision.candidates if each.prefill is not None), None)
    if apart is None:  # only the cheapest candidates are kept
        return "only_worker" if len(decision.candidates) == 1 else "too_short"
    terms = apart.terms
    handoff_s = terms.transfer_s + terms.handshake_s + terms.overhead_s + terms.penalty_s
    return "prefill_busy" if terms.queue_prefill_s > handoff_s else "too_short"
