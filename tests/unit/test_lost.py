"""Why a candidate of a stored decision lost is said from its terms, and never says what the terms do not."""

from __future__ import annotations

from typing import Any

import pytest

from extproc.lost import why_lost
from extproc.routing.decision import Candidate, Decision, Terms


def candidate(cost: float, prefill: str | None = "p1", refused: str | None = None, **terms: float) -> Candidate:
    return Candidate(prefill=prefill, decode="d1", cost=cost, terms=Terms(**terms), refused=refused)


def why(best: Candidate, other: Candidate, reason: str = "cost") -> str:
    made: dict[str, Any] = {"policy": "p", "objective": "balanced", "prompt_tokens": 1, "cached_tokens": 0}
    decision = Decision(
        **made, reason=reason, prefill=best.prefill, decode=best.decode, terms=best.terms, candidates=[best, other]
    )
    return why_lost(decision, other)


@pytest.mark.parametrize(
    ("term", "words"),
    [
        ("queue_prefill_s", "waits 250 ms longer for the prefill worker"),
        ("prefill_s", "computes the prompt 250 ms longer"),
        ("transfer_s", "the transfer takes 250 ms longer"),
        ("handshake_s", "the two had never met: a handshake takes 250 ms"),
        ("overhead_s", "a handoff takes 250 ms by itself"),
        ("penalty_s", "the pair had failed: charged 250 ms"),
        ("queue_decode_s", "waits 250 ms longer for room on the decode worker"),
        ("generation_s", "its answer takes 250 ms longer beside the others there"),
        ("stall_s", "streams there would stand still for 250 ms, all together"),
        ("hold_s", "prefill workers were busy: its work counts 250 ms more"),
    ],
)
def test_the_term_that_grew_most_is_the_reason(term: str, words: str) -> None:
    assert (
        why(candidate(0.1, prefill_s=0.1), candidate(1.0, **{"prefill_s": 0.12, term: 0.25 + 0.1 * (term == "prefill_s")}))
        == words
    )


def test_every_term_has_its_words() -> None:
    for name in Terms.__struct_fields__:
        assert "1.0 s" in why(candidate(0.0), candidate(1.0, **{name: 1.0}))


def test_a_refusal_counts_before_any_cost() -> None:
    assert why(candidate(1.0), candidate(0.1, refused="its streams would stand still")) == "its streams would stand still"


def test_equals_took_turns() -> None:
    assert why(candidate(0.5), candidate(0.5)) == "costs the same; it was another's turn"


@pytest.mark.parametrize("reason", ["policy", "threshold", "late", "spare", "cannot_hand_over", "retry"])
def test_where_a_rule_decided_between_whole_and_apart_no_cost_is_blamed(reason: str) -> None:
    said = why(candidate(1.0), candidate(0.2, prefill=None), reason)
    assert "longer" not in said
    assert why(candidate(1.0), candidate(1.2, prefill="p2", transfer_s=0.2), reason) == "the transfer takes 200 ms longer"


def test_a_cheaper_one_is_not_called_dearer() -> None:
    assert (
        why(candidate(1.0, prefill_s=1.0), candidate(0.5, prefill="p2", prefill_s=0.5))
        == "cheaper by itself, but kept for others"
    )
