"""Whether to disaggregate at all, and how sure that is. In words, from what was simulated; it simulates nothing itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from extproc.plan import confidence
from extproc.plan.candidates import Kind
from extproc.plan.confidence import Interval
from extproc.plan.question import Question
from extproc.plan.ratio import Answer, Best, Finalist


class Choice(Enum):
    """What to do."""

    DISAGGREGATE = "disaggregate"
    TOGETHER = "do not disaggregate"
    UNSURE = "cannot be told"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What to do, and why."""

    choice: Choice
    text: str
    gain: Interval | None
    """Highest good rate of the best disaggregated arrangement over that of the best other one; None: one of them
    has none, or one that cannot last."""


def verdict(answer: Answer) -> Verdict | None:
    """Of what was simulated; None where only one side was asked for."""
    question = answer.question
    together, apart = _best(answer, False), _best(answer, True)
    if together is None or apart is None:
        return None
    one, other = apart.finalist, together.finalist
    if one is None or other is None or not _serves(one) or not _serves(other):
        return _one_sided(question, together, apart)
    for best, finalist in ((together, other), (apart, one)):
        if not answer.lasts(finalist):
            return _unsettled(answer, best.kind, finalist)
    gain = confidence.ratio(one.rates_per_s, other.rates_per_s, resolution=answer.effort.resolution)
    enough = 1 + question.enough
    compared = (
        f"{apart.kind.value} ({one.candidate.text}) has {gain.mean:.2f} times the goodput of {together.kind.value} "
        f"({other.candidate.text}), 95 % interval {gain.low:.2f} to {gain.high:.2f} over {answer.effort.seeds} seeds"
    )
    if min(answer.had_s(one), answer.had_s(other)) < answer.stretch.duration_s:
        compared += " of a trace that ends before the simulation does"
    if gain.low > enough:
        return Verdict(choice=Choice.DISAGGREGATE, text=f"Disaggregate: {compared}.", gain=gain)
    if gain.high <= enough:
        apart_or_not = "" if confidence.told_apart(gain) else "; the two cannot be told apart"
        text = (
            f"{together.kind.value.capitalize()} is enough: {compared}{apart_or_not}. "
            "One role and no KV transfer are half of what must be run."
        )
        return Verdict(choice=Choice.TOGETHER, text=text, gain=gain)
    text = f"Cannot be told: {compared}; the {enough:.2f} from which on it would be worth it lies within. Use more --seeds."
    return Verdict(choice=Choice.UNSURE, text=text, gain=gain)


def _unsettled(answer: Answer, kind: Kind, finalist: Finalist) -> Verdict:
    longer = (
        "give a longer trace"
        if answer.had_s(finalist) < answer.stretch.duration_s
        else "the simulation was too short for batches and queues to settle"
    )
    text = (
        f"Cannot be told: {finalist.rate_per_s.mean:.3g} requests/s of {kind.value} ({finalist.candidate.text}) cannot last, "
        f"its bound is {finalist.candidate.hard_bound_per_s:.3g}; {longer}."
    )
    return Verdict(choice=Choice.UNSURE, text=text, gain=None)


def _one_sided(question: Question, together: Best, apart: Best) -> Verdict:
    served = f"{question.share:.0%} of the requests within the SLOs"
    if _serves(apart.finalist):
        why = together.why_none or f"{together.kind.value} does not keep {served} at any rate that was tried"
        return Verdict(choice=Choice.DISAGGREGATE, text=f"Disaggregate: {why}.", gain=None)
    if _serves(together.finalist):
        why = apart.why_none or f"{apart.kind.value} does not keep {served} at any rate that was tried"
        return Verdict(choice=Choice.TOGETHER, text=f"Do not disaggregate: {why}.", gain=None)
    return Verdict(
        choice=Choice.UNSURE,
        text=f"No arrangement of {question.gpus} GPUs keeps {served} at any rate that was tried.",
        gain=None,
    )


def _best(answer: Answer, apart: bool) -> Best | None:
    """Of the plain kinds on one side. The cache tier and FP8 help either side; they are no reason to disaggregate."""
    plain: Sequence[Kind] = (Kind.NIXL, Kind.TCP) if apart else (Kind.CHUNKED, Kind.COLOCATED)
    found = [each for kind in plain if (each := answer.of(kind)) is not None]
    if not found:
        return None
    return max(found, key=lambda each: each.finalist.rate_per_s.mean if each.finalist is not None else -1.0)


def _serves(finalist: Finalist | None) -> bool:
    return finalist is not None and finalist.rate_per_s.mean > 0
