"""An answer of `baton plan ratio` as tables for people and as one document for programs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.table import Table

from extproc.plan.candidates import Candidate, Kind
from extproc.plan.confidence import Interval
from extproc.plan.demand import Part
from extproc.plan.engines import SMALL_STEP_TOKENS
from extproc.plan.ratio import Answer, Best
from extproc.plan.robust import Changed
from extproc.plan.runs import Seen
from extproc.plan.verdict import Verdict

_SPLITS = 9
"""Splits shown of a kind."""


def headline(answer: Answer) -> str:
    """What was asked."""
    question, slos = answer.question, answer.question.slos
    return (
        f"{question.shape.name}, weights {question.shape.weight_dtype(question.weight_dtype)}, KV {question.kv_dtype}, "
        f"on {question.gpus} x {question.gpu.name}, KV over {question.link.name}\n"
        f"{question.workload.text}\n"
        f"{question.share:.0%} of the requests within TTFT {slos.ttft_s:g} s and ITL {slos.itl_s * 1e3:g} ms "
        f"(99th percentile of each request's gaps)"
    )


def work_done(answer: Answer) -> str:
    """What it took."""
    stretch, effort = answer.stretch, answer.effort
    return (
        f"{answer.considered} arrangements by arithmetic, {answer.simulations} simulations; {effort.seeds} seeds, "
        f"{stretch.counted_s:.0f} s counted after {stretch.warm_up_s:.0f} s of warm-up, rates to {effort.resolution:.0%}"
    )


def rates_table(answer: Answer) -> Table:
    """What each kind can do at most."""
    table = Table(
        "arrangement", "best split", "GPUs P:D", "requests/s", "95 % interval", "a GPU", "first full", "USD a 10^6 good tokens",
        box=None, pad_edge=False,
    )  # fmt: skip
    for best in answer.best:
        finalist = best.finalist
        if finalist is None:
            table.add_row(best.kind.value, "none can do", "", "0", "", "", "", "")
            continue
        candidate, rate = finalist.candidate, finalist.rate_per_s
        table.add_row(
            best.kind.value,
            candidate.text,
            gpu_ratio(candidate),
            f"{rate.mean:.3g}",
            _between(rate, "{:.3g}"),
            f"{rate.mean / candidate.gpus:.3g}",
            _full(best),
            _usd(best.usd_per_million),
        )
    return table


def times_table(answer: Answer) -> Table:
    """Times at the rate that was asked for, or at each one's highest; means over seeds."""
    table = Table(
        "arrangement", "requests/s", "good", "TTFT mean", "p50", "p90", "p99", "ITL p50", "p99", "a request's p99: p50", "p90",
        "late", "slow", "hits", box=None, pad_edge=False,
    )  # fmt: skip
    for best in answer.best:
        if not best.seen:
            continue
        mean = _Mean(best.seen)
        table.add_row(
            best.kind.value,
            f"{mean(lambda seen: seen.rate_per_s):.3g}",
            f"{mean(lambda seen: seen.good):.1%}",
            *(f"{value:.2f} s" for value in _points(mean, "ttft_s", "mean", "p50", "p90", "p99")),
            *(f"{value * 1e3:.1f} ms" for value in _points(mean, "itl_s", "p50", "p99")),
            *(f"{value * 1e3:.1f} ms" for value in _points(mean, "itl_p99_s", "p50", "p90")),
            f"{mean(lambda seen: seen.late):.1%}",
            f"{mean(lambda seen: seen.slow):.1%}",
            f"{mean(lambda seen: seen.hit_ratio):.0%}",
        )
    return table


def notes(answer: Answer) -> list[str]:
    """What the tables do not say: kinds that cannot do, candidates that cannot be told apart, the splits that were tried."""
    lines = []
    for best in answer.best:
        finalist = best.finalist
        if finalist is None:
            lines.append(f"{best.kind.value}: {best.why_none}.")
            continue
        if not finalist.rate_per_s.mean:
            lines.append(f"{best.kind.value}: at no rate that was tried {answer.question.share:.0%} of the requests were good.")
        had_s, duration_s = answer.had_s(finalist), answer.stretch.duration_s
        if had_s < duration_s:
            lines.append(
                f"{best.kind.value}: at {finalist.rate_per_s.mean:.3g} requests/s the trace ends after {had_s:.3g} s of the "
                f"{duration_s:.0f} s that are to be simulated: the rate that lasts may be lower. Give a longer trace."
            )
        if not answer.lasts(finalist):
            lines.append(
                f"{best.kind.value}: more than {finalist.candidate.hard_bound_per_s:.3g} requests/s cannot last: the "
                "simulation was too short for batches and queues to settle. Take the bound."
            )
        if best.tied:
            tied = ", ".join(candidate.text for candidate in best.tied)
            lines.append(f"{best.kind.value}: {finalist.candidate.text} cannot be told apart from {tied}.")
        if finalist.candidate.idle_gpus:
            lines.append(f"{best.kind.value}: {finalist.candidate.idle_gpus} GPUs are left over, and paid for.")
        if best.bottleneck is None and finalist.rate_per_s.mean:
            lines.append(
                f"{best.kind.value}: no part is full when the SLO is missed (the fullest, {_first(finalist.candidate).value}, "
                f"is at {best.used:.0%}); requests that come at once wait for each other, and "
                f"{finalist.candidate.idle_ttft_s:.2f} s of the {answer.question.slos.ttft_s:g} s to the first token pass on "
                "idle workers already."
            )
    for best in answer.best:
        if best.kind.apart and len([rate for _, rate in best.screened if rate]) > 1:
            tried = sorted(best.screened, key=lambda each: -each[1])[:_SPLITS]
            words = ", ".join(f"{candidate.text} {rate:.3g}" for candidate, rate in tried)
            lines.append(f"{best.kind.value}, requests/s of one seed: {words}.")
    return lines


def assumptions(answer: Answer) -> str:
    """On what it rests."""
    question, assume = answer.question, answer.question.assume
    cache = (
        f"; LMCache {assume.cache_gb_a_gpu:g} GB and {assume.cache_gb_a_s_a_gpu:g} GB/s a GPU"
        if answer.of(Kind.NIXL_CACHE_FP8) is not None
        else ""
    )
    return (
        f"Assumed: prefill at {assume.prefill_efficiency:.0%} of the dense peak, decode at {assume.decode_efficiency:.0%} of "
        f"the memory bandwidth, {assume.tp_efficiency:.0%} of both left each time TP doubles; a step takes "
        f"{assume.step_overhead_s * 1e3:g} ms and the time of {SMALL_STEP_TOKENS} prompt tokens more; "
        f"{question.link.bytes_a_s / 1e9:.3g} GB/s a port of {question.link.name}, {question.price:g} USD a "
        f"GPU-hour{cache}. Nothing of it was measured on these GPUs."
    )


def robust_lines(changed: Sequence[Changed]) -> list[str]:
    """Whether the verdict stays when assumptions change."""
    return [f"{each.text}: {each.verdict.text if each.verdict is not None else each.why_none}" for each in changed]


def document(answer: Answer, judged: Verdict | None, changed: Sequence[Changed]) -> dict[str, Any]:
    """All of it for programs; times in seconds, rates a second, what is not a number is null."""
    question = answer.question
    found: dict[str, Any] = {
        "question": {
            "model": question.shape.name,
            "gpu": question.gpu.name,
            "gpus": question.gpus,
            "link": question.link.name,
            "weight_dtype": question.shape.weight_dtype(question.weight_dtype),
            "kv_dtype": question.kv_dtype,
            "workload": question.workload.text,
            "rate_per_s": question.rate_per_s,
            "ttft_slo_s": question.slos.ttft_s,
            "itl_slo_s": question.slos.itl_s,
            "share": question.share,
            "enough": question.enough,
            "usd_a_gpu_hour": question.price,
            "assumptions": {name: getattr(question.assume, name) for name in question.assume.__dataclass_fields__},
        },
        "effort": {
            "seeds": answer.effort.seeds,
            "resolution": answer.effort.resolution,
            "warm_up_s": answer.stretch.warm_up_s,
            "counted_s": answer.stretch.counted_s,
            "considered": answer.considered,
            "simulations": answer.simulations,
        },
        "arrangements": [_arrangement(best) for best in answer.best],
        "verdict": _verdict(judged),
        "sensitivity": [
            {"assumption": each.text, "verdict": _verdict(each.verdict), "why_none": each.why_none or None} for each in changed
        ],
    }
    plain: dict[str, Any] = _plain(found)
    return plain


def gpu_ratio(candidate: Candidate) -> str:
    """GPUs of prefill workers to those of decode workers, as so many to one; nothing where workers do both."""
    arrangement = candidate.arrangement
    if arrangement.colocated:
        return "-"
    prefill, decode = arrangement.prefill * candidate.prefill_tp, arrangement.decode * candidate.decode_tp
    return (
        f"{prefill}:{decode} = {prefill / decode:.2g}:1"
        if prefill >= decode
        else f"{prefill}:{decode} = 1:{decode / prefill:.2g}"
    )


def _arrangement(best: Best) -> dict[str, Any]:
    if best.finalist is None:
        return {"name": best.kind.value, "rate_per_s": 0.0, "why_none": best.why_none}
    finalist, candidate = best.finalist, best.finalist.candidate
    mean = _Mean(best.seen) if best.seen else None
    return {
        "name": best.kind.value,
        "split": _split(candidate),
        "rate_per_s": _interval(finalist.rate_per_s),
        "rates_per_s_by_seed": list(finalist.rates_per_s),
        "limits_per_s": {part.value: limit for part, limit in candidate.limits.items()},
        "bottleneck": best.bottleneck.value if best.bottleneck is not None else None,
        "used": best.used,
        "idle_ttft_s": candidate.idle_ttft_s,
        "usd_per_million_good_tokens": _interval(best.usd_per_million) if best.usd_per_million is not None else None,
        "not_told_apart": [_split(each) for each in best.tied],
        "screened": [{**_split(each), "rate_per_s": rate} for each, rate in best.screened],
        "seen": None
        if mean is None
        else {
            "rate_per_s": mean(lambda seen: seen.rate_per_s),
            "good": mean(lambda seen: seen.good),
            "late": mean(lambda seen: seen.late),
            "slow": mean(lambda seen: seen.slow),
            "good_tokens_per_s": mean(lambda seen: seen.good_tokens_per_s),
            "ttft_s": _quantiles(mean, "ttft_s"),
            "itl_s": _quantiles(mean, "itl_s"),
            "itl_p99_of_requests_s": _quantiles(mean, "itl_p99_s"),
            "hit_ratio": mean(lambda seen: seen.hit_ratio),
            "prefill_busy": mean(lambda seen: seen.prefill_busy),
            "decode_busy": mean(lambda seen: seen.decode_busy),
            "link_busy": mean(lambda seen: seen.link_busy),
            "kv_peak": mean(lambda seen: seen.kv_peak),
            "preemptions": mean(lambda seen: seen.preemptions),
        },
    }


def _split(candidate: Candidate) -> dict[str, Any]:
    arrangement = candidate.arrangement
    return {
        "text": candidate.text,
        "prefill_workers": arrangement.prefill,
        "prefill_tp": candidate.prefill_tp if arrangement.prefill else None,
        "decode_workers": arrangement.decode,
        "decode_tp": candidate.decode_tp,
        "chunk_tokens": arrangement.chunk_tokens if arrangement.chunked else None,
        "idle_gpus": candidate.idle_gpus,
    }


def _quantiles(mean: _Mean, name: str) -> dict[str, float]:
    points = ("mean", "p50", "p90", "p99")
    return dict(zip(points, _points(mean, name, *points), strict=True))


def _points(mean: _Mean, name: str, *points: str) -> list[float]:
    def of(point: str) -> Callable[[Seen], float]:
        return lambda seen: float(getattr(getattr(seen, name), point))

    return [mean(of(point)) for point in points]


def _interval(found: Interval) -> dict[str, float]:
    return {"mean": found.mean, "low": found.low, "high": found.high}


def _verdict(judged: Verdict | None) -> dict[str, Any] | None:
    if judged is None:
        return None
    return {
        "choice": judged.choice.value,
        "text": judged.text,
        "gain": _interval(judged.gain) if judged.gain is not None else None,
    }


class _Mean:
    """Over what was seen, seed by seed."""

    def __init__(self, seen: Sequence[Seen]) -> None:
        self._seen = seen

    def __call__(self, what: Callable[[Seen], float | None]) -> float:
        """NaN where a seed has none."""
        values = [what(each) for each in self._seen]
        numbers = [value for value in values if value is not None]
        return math.fsum(numbers) / len(numbers) if len(numbers) == len(values) else math.nan


def _first(candidate: Candidate) -> Part:
    return min(candidate.limits, key=lambda part: candidate.limits[part])


def _full(best: Best) -> str:
    if best.bottleneck is None:
        return "none"
    name: str = best.bottleneck.value
    if best.bottleneck is Part.STALLS:  # a guess, not a capacity
        return name
    return f"{name}, {min(1.0, best.used):.0%}"


def _usd(found: Interval | None) -> str:
    return "-" if found is None else f"{found.mean:.2f} ({_between(found, '{:.2f}')})"


def _between(found: Interval, form: str) -> str:
    return f"{form.format(found.low)} to {form.format(found.high)}"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
