"""A run in numbers: latencies, tokens, goodput, failures; of all requests, and of each value of a header. Pure arithmetic.

Latencies are over the served requests, as far as they go; goodput is over all requests, those that failed or were not sent
included, because whoever sent them was not served.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from extproc.loadgen.own import Own
from extproc.loadgen.run import Run
from extproc.loadgen.sample import Kind, Sample
from workers.goodput import percentile

VERSION = 1
"""Of the JSON document."""

_OFF = 0.05
"""Prompts or answers whose tokens are so far from what was asked for are not the load that was asked for."""


class Quantiles(msgspec.Struct, frozen=True, kw_only=True):
    """Of one quantity, in seconds; all are None where there is none of it."""

    count: int
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    max: float | None = None


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """As the engine counts them in ``usage``, of the served requests that have it."""

    without_usage: int
    """Served requests whose answer had none: their tokens are in no number here."""
    prompt: int
    cached: int | None
    """Of the prompt tokens; None: no answer says."""
    output: int
    asked_prompt: int
    """What the same requests were meant to have."""
    asked_output: int
    output_per_s: float
    """Over the whole run, to its last end."""
    prompt_per_s: float
    per_piece: float | None
    """Output tokens in a piece of the stream; 1: gaps between pieces are gaps between tokens."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that ended badly in the same way."""

    kind: str
    status: int | None
    code: str
    count: int
    example: str


class Numbers(msgspec.Struct, frozen=True, kw_only=True):
    """Of some requests."""

    requests: int
    served: int
    good: int
    goodput: float
    """Good ones of all."""
    good_per_s: float | None
    """Good ones a second of the time in which requests were due."""
    ttft: Quantiles
    itl: Quantiles
    """Of all gaps together."""
    itl_p99: Quantiles
    """Over requests, of each one's own 99th percentile: what goodput goes by."""
    tpot: Quantiles
    """Over requests: time per output token after the first."""
    end_to_end: Quantiles


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON document."""

    version: int = VERSION
    target: str
    model: str
    api: str
    load: str
    """When requests came, and how long they were, in words."""
    seed: int
    ttft_slo_s: float
    itl_slo_s: float
    span_s: float
    """In which requests were due."""
    wall_s: float
    """To the last end."""
    offered_per_s: float | None
    """Requests that were due, a second of that time."""
    peak_in_flight: int
    interrupted: bool
    all: Numbers
    tokens: Tokens
    failures: list[Failure]
    groups: dict[str, dict[str, Numbers]]
    """Header -> its value -> those requests."""
    own: Own
    warnings: list[str]


def report(
    run: Run,
    *,
    target: str,
    model: str,
    api: str,
    load: str,
    seed: int,
    span_s: float,
    ttft_slo_s: float,
    itl_slo_s: float,
) -> Report:
    """Everything about a run. ``span_s``: the time in which requests were to come, longer than to the last that did."""
    samples = run.samples
    if run.interrupted:
        span_s = min(span_s, run.wall_s)
    slos = (ttft_slo_s, itl_slo_s)
    counted = tokens(samples, run.wall_s)
    found = [*run.own.warnings, *run.notes]
    if counted.without_usage:
        found.append(f"{counted.without_usage} served requests have no usage: their tokens are not counted")
    if counted.asked_prompt and abs(counted.prompt / counted.asked_prompt - 1) > _OFF:
        found.append(f"prompts had {counted.prompt / counted.asked_prompt:.2f} times the tokens that were asked for")
    if counted.output < counted.asked_output * (1 - _OFF):
        found.append(f"answers had {counted.output / counted.asked_output:.2f} times the tokens that were asked for")
    if counted.per_piece is not None and counted.per_piece > 1.02:
        found.append(f"a piece of a stream has {counted.per_piece:.2f} tokens: ITL is between pieces, TPOT is per token")
    if run.interrupted:
        found.append("interrupted: these are the requests until then")
    return Report(
        target=target,
        model=model,
        api=api,
        load=load,
        seed=seed,
        ttft_slo_s=ttft_slo_s,
        itl_slo_s=itl_slo_s,
        span_s=span_s,
        wall_s=run.wall_s,
        offered_per_s=len(samples) / span_s if span_s > 0 else None,
        peak_in_flight=run.peak_in_flight,
        interrupted=run.interrupted,
        all=numbers(samples, span_s, *slos),
        tokens=counted,
        failures=failures(samples),
        groups={
            name: {value: numbers(some, span_s, *slos) for value, some in sorted(_by_value(samples, name).items())}
            for name in sorted({name for sample in samples for name in sample.groups})
        },
        own=run.own,
        warnings=found,
    )


def numbers(samples: Sequence[Sample], span_s: float, ttft_slo_s: float, itl_slo_s: float) -> Numbers:
    """Of these requests."""
    served = [sample for sample in samples if sample.kind is Kind.SERVED]
    outcomes = [sample.outcome() for sample in samples]
    good = sum(outcome.good(ttft_slo_s, itl_slo_s) for outcome in outcomes)
    return Numbers(
        requests=len(samples),
        served=len(served),
        good=good,
        goodput=good / len(samples) if samples else 0.0,
        good_per_s=good / span_s if span_s > 0 else None,
        ttft=quantiles(sample.ttft_s for sample in served if sample.ttft_s is not None),
        itl=quantiles(gap_s for sample in served for gap_s in sample.gaps_s),
        itl_p99=quantiles(percentile(sample.gaps_s, 0.99) for sample in served if sample.gaps_s),
        tpot=quantiles(sample.tpot_s for sample in served if sample.tpot_s is not None),
        end_to_end=quantiles(sample.end_s for sample in served if sample.end_s is not None),
    )


def tokens(samples: Iterable[Sample], wall_s: float) -> Tokens:
    """What the engine says of them."""
    served = [sample for sample in samples if sample.kind is Kind.SERVED]
    counted = [sample for sample in served if sample.prompt_tokens is not None and sample.output_tokens is not None]
    cached = [sample.cached_tokens for sample in counted if sample.cached_tokens is not None]
    prompt = sum(sample.prompt_tokens or 0 for sample in counted)
    output = sum(sample.output_tokens or 0 for sample in counted)
    pieces = sum(sample.pieces for sample in counted)
    return Tokens(
        without_usage=len(served) - len(counted),
        prompt=prompt,
        cached=sum(cached) if cached else None,
        output=output,
        asked_prompt=sum(sample.asked_input_tokens for sample in counted),
        asked_output=sum(sample.asked_output_tokens for sample in counted),
        output_per_s=output / wall_s if wall_s > 0 else 0.0,
        prompt_per_s=prompt / wall_s if wall_s > 0 else 0.0,
        per_piece=output / pieces if pieces else None,
    )


def failures(samples: Iterable[Sample]) -> list[Failure]:
    """By kind, status and code, the most frequent first."""
    bad = [sample for sample in samples if sample.kind is not Kind.SERVED]
    counts = Counter((sample.kind, sample.status, sample.code) for sample in bad)
    examples = {(sample.kind, sample.status, sample.code): sample.message for sample in reversed(bad)}
    return [
        Failure(kind=kind.value, status=status, code=code, count=count, example=examples[kind, status, code])
        for (kind, status, code), count in counts.most_common()
    ]


def quantiles(values: Iterable[float]) -> Quantiles:
    """The smallest values that so many of them do not exceed."""
    ordered = sorted(values)
    if not ordered:
        return Quantiles(count=0)
    return Quantiles(
        count=len(ordered),
        mean=math.fsum(ordered) / len(ordered),
        **{f"p{share}": _at(ordered, share / 100) for share in (50, 90, 95, 99)},
        max=ordered[-1],
    )


def _at(ordered: Sequence[float], share: float) -> float:
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _by_value(samples: Iterable[Sample], name: str) -> dict[str, list[Sample]]:
    values: dict[str, list[Sample]] = {}
    for sample in samples:
        if name in sample.groups:
            values.setdefault(sample.groups[name], []).append(sample)
    return values
