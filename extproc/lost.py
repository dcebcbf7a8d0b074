"""Why the choices that a stored decision weighed lost, in words, from their terms alone.

:mod:`extproc.routing.why` knows more, but only while the pool is as it was. What is said here stays true afterwards.
"""

from __future__ import annotations

from extproc.routing.decision import Candidate, Decision, Terms
from extproc.routing.why import time_words

_SAME_S = 1e-6

_WORDS = {
    "queue_prefill_s": "waits {} longer for the prefill worker",
    "prefill_s": "computes the prompt {} longer",
    "load_s": "loads what it holds for {}: it is not in its GPU's memory",
    "transfer_s": "the transfer takes {} longer",
    "handshake_s": "the two had never met: a handshake takes {}",
    "overhead_s": "a handoff takes {} by itself",
    "penalty_s": "the pair had failed: charged {}",
    "queue_decode_s": "waits {} longer for room on the decode worker",
    "generation_s": "its answer takes {} longer beside the others there",
    "stall_s": "streams there would stand still for {}, all together",
    "hold_s": "prefill workers were busy: its work counts {} more",
}

_BY_RULE = {
    "policy": "the policy decides this, not the cost",
    "threshold": "the policy's threshold decides this, not the cost",
    "cannot_hand_over": "the request cannot be handed over",
    "late": "the SLO was out of reach, and the policy then lets a decode worker do it all",
    "spare": "it was late, and a decode worker had nothing to do",
    "retry": "weighed before a prefill worker failed",
}


def why_lost(decision: Decision, other: Candidate) -> str:
    """Why ``other`` was not taken."""
    if other.refused is not None:
        return other.refused
    best = decision.candidates[0]
    if (best.prefill is None) != (other.prefill is None) and decision.reason in _BY_RULE:
        return _BY_RULE[decision.reason]
    if abs(other.cost - best.cost) <= _SAME_S:
        return "costs the same; it was another's turn"
    if other.cost < best.cost:
        return _BY_RULE.get(decision.reason, "cheaper by itself, but kept for others")
    more = {name: getattr(other.terms, name) - getattr(best.terms, name) for name in Terms.__struct_fields__}
    name = max(more, key=lambda each: more[each])
    if more[name] <= _SAME_S:
        return "the objective ranks it lower"
    return _WORDS[name].format(time_words(more[name]))
