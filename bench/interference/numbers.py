"""From tokens to the numbers of the table. Pure.

Only what happened from the first long prompt on counts, but for the quiet ITL, which is from before it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from bench.interference.results import Answer, Round
from workers.goodput import percentile

STALL = 3.0
"""A gap is a stall if it is longer than so many times the median gap of the same arrangement with no long prompt about."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One arrangement over all its rounds. Seconds; NaN where there was nothing to count."""

    name: str
    rounds: int
    gaps: int
    itl_p50_s: float
    itl_p99_s: float
    itl_p99_rounds_s: tuple[float, ...]
    """The 99th percentile of each round alone."""
    itl_p99_stream_s: float
    """The 99th percentile of one stream's gaps: the median over the streams. What one reader sees of it."""
    longest_s: float
    quiet_p50_s: float
    quiet_p99_s: float
    stalled: float
    """Share of the streams' time that they spent in stalls, while a long prompt waited or was prefilled."""
    stalled_else: float
    """The same while none did: what machine and engine do by themselves."""
    prompts: int
    prompt_ttft_p50_s: float
    prompt_ttft_p99_s: float
    starts: int
    """Streams that began while long prompts came."""
    stream_ttft_p50_s: float
    stream_ttft_p99_s: float
    tokens_a_s: float
    """Of the streams."""
    prompt_tokens_a_s: float
    handed_over: int
    """Of the long prompts."""
    faults: tuple[str, ...]


def timed_gaps(answer: Answer) -> list[tuple[float, float]]:
    """When each gap ended, from the beginning of the round, and how long it was; both in seconds."""
    if answer.first_s is None:
        return []
    gaps_s = [gap / 1e3 for gap in answer.gaps_ms]
    ends_s = list(accumulate(gaps_s, initial=answer.first_s))[1:]
    return list(zip(ends_s, gaps_s, strict=True))


def gaps_of(rounds: Iterable[Round], *, loaded: bool) -> list[float]:
    """All gaps of the streams while long prompts came, or before."""
    return [
        gap_s
        for each in rounds
        for answer in each.streams
        for end_s, gap_s in timed_gaps(answer)
        if (end_s >= each.loaded_s) is loaded
    ]


def _stalls(rounds: Iterable[Round], limit_s: float) -> tuple[float, float]:
    """Seconds of the streams in gaps over ``limit_s`` that touch a long prompt's time to its first token, and in others."""
    by_prompts_s = else_s = 0.0
    for each in rounds:
        waits = [(prompt.due_s, each.seconds if prompt.first_s is None else prompt.first_s) for prompt in each.prompts]
        for answer in each.streams:
            for end_s, gap_s in timed_gaps(answer):
                if end_s < each.loaded_s or not gap_s > limit_s:
                    continue
                if any(due_s < end_s and end_s - gap_s < first_s for due_s, first_s in waits):
                    by_prompts_s += gap_s
                else:
                    else_s += gap_s
    return by_prompts_s, else_s


def _of_each_stream(rounds: Iterable[Round]) -> list[float]:
    """The 99th percentile of the loaded gaps of each stream that was not cut short before it had any."""
    found = []
    for each in rounds:
        for answer in each.streams:
            gaps_s = [gap_s for end_s, gap_s in timed_gaps(answer) if end_s >= each.loaded_s]
            if gaps_s:
                found.append(percentile(gaps_s, 0.99))
    return found


def row(name: str, rounds: Sequence[Round], prompt_tokens: int) -> Row:
    """One line of the table."""
    loaded, quiet = gaps_of(rounds, loaded=True), gaps_of(rounds, loaded=False)
    quiet_p50_s = _quantile(quiet, 0.5)
    by_prompts_s, else_s = _stalls(rounds, STALL * quiet_p50_s)
    known = bool(loaded and quiet)
    ttft_s = [_ttft(answer) for each in rounds for answer in each.prompts if answer.first_s is not None]
    starts_s = [
        _ttft(answer)
        for each in rounds
        for answer in each.streams
        if answer.first_s is not None and answer.due_s >= each.loaded_s
    ]
    seconds = sum(each.seconds - each.loaded_s for each in rounds)
    tokens = len(loaded) + len(starts_s)
    return Row(
        name=name,
        rounds=len(rounds),
        gaps=len(loaded),
        itl_p50_s=_quantile(loaded, 0.5),
        itl_p99_s=_quantile(loaded, 0.99),
        itl_p99_rounds_s=tuple(_quantile(gaps_of([each], loaded=True), 0.99) for each in rounds),
        itl_p99_stream_s=_quantile(_of_each_stream(rounds), 0.5),
        longest_s=max(loaded, default=math.nan),
        quiet_p50_s=quiet_p50_s,
        quiet_p99_s=_quantile(quiet, 0.99),
        stalled=by_prompts_s / sum(loaded) if known else math.nan,
        stalled_else=else_s / sum(loaded) if known else math.nan,
        prompts=len(ttft_s),
        prompt_ttft_p50_s=_quantile(ttft_s, 0.5),
        prompt_ttft_p99_s=_quantile(ttft_s, 0.99),
        starts=len(starts_s),
        stream_ttft_p50_s=_quantile(starts_s, 0.5),
        stream_ttft_p99_s=_quantile(starts_s, 0.99),
        tokens_a_s=tokens / seconds if seconds else math.nan,
        prompt_tokens_a_s=len(ttft_s) * prompt_tokens / seconds if seconds else math.nan,
        handed_over=sum(answer.handed_over for each in rounds for answer in each.prompts),
        faults=faults(rounds),
    )


def faults(rounds: Iterable[Round]) -> tuple[str, ...]:
    """What went wrong, each with how often."""
    found: dict[str, int] = {}
    for each in rounds:
        for kind, answers in (("stream", each.streams), ("long prompt", each.prompts)):
            for answer in answers:
                if answer.fault:
                    line = f"{kind}: {answer.fault}"
                    found[line] = found.get(line, 0) + 1
    return tuple(f"{count} × {line}" if count > 1 else line for line, count in found.items())


def _ttft(answer: Answer) -> float:
    assert answer.first_s is not None
    return answer.first_s - answer.due_s


def _quantile(values: Sequence[float], share: float) -> float:
    return percentile(values, share) if values else math.nan
