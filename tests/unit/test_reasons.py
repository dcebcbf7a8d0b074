"""The reasons of decisions, as those who run the system read them."""

from __future__ import annotations

import asyncio

import pytest

from extproc.observe.pulse import Pulse
from extproc.observe.reasons import REASONS, reason_of
from extproc.routing.decision import Candidate, Decision, Terms


def decided(reason: str, *, prefill: str | None = None, cached: int = 0, candidates: list[Candidate] | None = None) -> Decision:
    return Decision(
        policy="default",
        objective="balanced",
        reason=reason,
        prefill=prefill,
        decode="d:1",
        prompt_tokens=1000,
        cached_tokens=cached,
        terms=Terms(),
        candidates=candidates or [],
    )


def apart(**terms: float) -> Candidate:
    return Candidate(prefill="p:1", decode="d:1", cost=1.0, terms=Terms(**terms))


WHOLE = Candidate(prefill=None, decode="d:1", cost=0.5, terms=Terms())


@pytest.mark.parametrize(
    ("decision", "reason"),
    [
        (decided("cost", prefill="p:1"), "handed_over"),
        (decided("policy", prefill="p:1"), "forced"),
        (decided("policy"), "forced"),
        (decided("cannot_hand_over", cached=900), "cannot_hand_over"),
        (decided("late"), "late"),
        (decided("spare"), "spare"),
        (decided("cost", cached=500, candidates=[WHOLE, apart()]), "cached_on_decode"),
        (decided("threshold", cached=900), "cached_on_decode"),
        (decided("threshold", cached=499), "too_short"),
        (decided("cost", candidates=[WHOLE, apart(transfer_s=0.1, queue_prefill_s=0.05)]), "too_short"),
        (decided("cost", candidates=[WHOLE, apart(transfer_s=0.1, queue_prefill_s=0.2)]), "prefill_busy"),
        (decided("cost", candidates=[WHOLE]), "only_worker"),
        (decided("cost", candidates=[WHOLE, WHOLE]), "too_short"),
    ],
)
def test_each_decision_has_a_reason_that_is_documented(decision, reason) -> None:
    assert reason_of(decision) == reason
    assert ("aggregate" if decision.prefill is None else "disaggregate", reason) in REASONS


async def test_the_pulse_tells_how_late_the_loop_is() -> None:
    now_s = 0.0
    late: list[float] = []
    pulse = Pulse(lambda: now_s, on_lag=late.append)
    task = asyncio.ensure_future(pulse.run())
    await asyncio.sleep(0)
    now_s = 0.35  # a beat is due after 0.1 s
    async with asyncio.timeout(5):
        while not late:
            await asyncio.sleep(0.01)
    task.cancel()
    assert late[0] == pytest.approx(0.25)
