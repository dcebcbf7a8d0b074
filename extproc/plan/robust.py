"""Whether a verdict stays when the assumptions that it rests on most are changed: the efficiencies of the engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from extproc.plan.candidates import Kind
from extproc.plan.errors import PlanError
from extproc.plan.question import Assumptions, Question
from extproc.plan.ratio import Effort, study
from extproc.plan.runs import Runner
from extproc.plan.verdict import Verdict, verdict

FACTOR = 1.25
"""Up and down: reports of what engines reach differ by about as much."""


@dataclass(frozen=True, kw_only=True)
class Changed:
    """What follows from other assumptions."""

    text: str
    verdict: Verdict | None
    why_none: str = ""
    """No arrangement can do any more: why."""


def changes(assume: Assumptions) -> Iterator[tuple[str, Assumptions]]:
    """The assumptions, one changed at a time."""
    for word, factor in (("slower", 1 / FACTOR), ("faster", FACTOR)):
        prefill = min(1.0, assume.prefill_efficiency * factor)
        yield f"prefill {word}, at {prefill:.0%} of the peak", replace(assume, prefill_efficiency=prefill)
        decode = min(1.0, assume.decode_efficiency * factor)
        yield f"decode {word}, at {decode:.0%} of the bandwidth", replace(assume, decode_efficiency=decode)


def robust(
    question: Question, effort: Effort, *, runner: Runner, progress: Callable[[str], None] = lambda _: None
) -> tuple[Changed, ...]:
    """Chunked prefill against NIXL, the best split of each found again, under each change."""
    found = []
    for text, assume in changes(question.assume):
        progress(text)
        changed = replace(question, assume=assume)
        try:
            answer = study(changed, kinds=(Kind.CHUNKED, Kind.NIXL), effort=effort, runner=runner, progress=progress)
        except PlanError as error:
            found.append(Changed(text=text, verdict=None, why_none=str(error)))
        else:
            found.append(Changed(text=text, verdict=verdict(answer)))
    return tuple(found)
