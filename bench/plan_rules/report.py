"""What was found, as rows that a file keeps, and those as the tables and the picture of docs/plan-ratio.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from bench.plan_rules.cases import Case
from extproc.pictures import BLUE, COLOURS, GREEN, GREY, ORANGE, picture
from extproc.plan.candidates import Candidate, Kind
from extproc.plan.ratio import Answer
from extproc.plan.verdict import verdict


class Split(msgspec.Struct, frozen=True):
    """One split."""

    prefill: int
    decode: int
    rate_per_s: float | None
    """With one seed; None: not simulated."""
    bound_per_s: float


class Row(msgspec.Struct, frozen=True):
    """What came of one case."""

    name: str
    command: str
    seeds: int
    split: str
    gpus_prefill: int
    gpus_decode: int
    rate_per_s: float
    low_per_s: float
    high_per_s: float
    first_full: str
    tied: list[str]
    splits: list[Split]
    chunked: str
    chunked_per_s: float
    gain: float | None
    gain_low: float | None
    gain_high: float | None
    choice: str
    why: str


class Results(msgspec.Struct, frozen=True):
    """All of a run."""

    made_by: str
    machine: str
    rows: list[Row]


def row_of(case: Case, answer: Answer) -> Row:
    """The part of an answer that the rules are about."""
    best, other, judged = answer.of(Kind.NIXL), answer.of(Kind.CHUNKED), verdict(answer)
    assert best is not None
    finalist = best.finalist
    gain = judged.gain if judged is not None else None
    gpus = _gpus(finalist.candidate) if finalist is not None else (0, 0)
    chunked = other.finalist if other is not None else None
    return Row(
        name=case.name,
        command=case.command,
        seeds=answer.effort.seeds,
        split=finalist.candidate.text if finalist is not None else "",
        gpus_prefill=gpus[0],
        gpus_decode=gpus[1],
        rate_per_s=finalist.rate_per_s.mean if finalist is not None else 0.0,
        low_per_s=finalist.rate_per_s.low if finalist is not None else 0.0,
        high_per_s=finalist.rate_per_s.high if finalist is not None else 0.0,
        first_full=best.bottleneck.value if best.bottleneck is not None else "none",
        tied=[_ratio(*_gpus(each)) for each in best.tied],
        splits=sorted(
            (
                Split(*_gpus(each), rate_per_s=dict(best.screened).get(each), bound_per_s=each.bound_per_s)
                for each in best.able
                if finalist is not None and each.family == finalist.candidate.family
            ),
            key=lambda each: each.prefill,
        ),
        chunked=chunked.candidate.text if chunked is not None else "",
        chunked_per_s=chunked.rate_per_s.mean if chunked is not None else 0.0,
        gain=gain.mean if gain is not None else None,
        gain_low=gain.low if gain is not None else None,
        gain_high=gain.high if gain is not None else None,
        choice=judged.choice.value if judged is not None else "",
        why=judged.text if judged is not None else "",
    )


def splits_table(cases: Sequence[Case], results: Results) -> str:
    """The rules about the split, as Markdown."""
    lines = [
        "| prompt : answer | with | the rule | best split, GPUs | not told apart from | requests/s | 95 % | first full |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case, row in _rows(cases, results, "split"):
        found = _ratio(row.gpus_prefill, row.gpus_decode)
        tied, what = ", ".join(row.tied) or "-", f"ITL {case.itl_s * 1e3:g} ms"
        lines.append(
            f"| {case.isl:,} : {case.osl:,} | {what} | {case.said} | **{found}** | {tied} | "
            f"{row.rate_per_s:.2f} | {row.low_per_s:.2f} to {row.high_per_s:.2f} | {row.first_full} |"
        )
    return "\n".join(lines) + "\n"


def chunked_table(cases: Sequence[Case], results: Results) -> str:
    """The rule about chunked prefill, as Markdown."""
    lines = [
        "| prompt | SLOs: TTFT, ITL | chunked prefill | requests/s | NIXL | requests/s | NIXL / chunked (95 %) | answer |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case, row in _rows(cases, results, "chunked"):
        gain = "-" if row.gain is None else f"{row.gain:.2f} ({row.gain_low:.2f} to {row.gain_high:.2f})"
        lines.append(
            f"| {case.isl:,} | {case.ttft_s:g} s, {case.itl_s * 1e3:g} ms | {row.chunked or 'none can do'} | "
            f"{row.chunked_per_s:.2f} | {row.split or 'none can do'} | {row.rate_per_s:.2f} | {gain} | {row.choice} |"
        )
    return "\n".join(lines) + "\n"


def draw(cases: Sequence[Case], results: Results, path: Path) -> None:
    """Rate by split, and the gain of disaggregation by the length of the prompt."""
    with picture(path, width_in=9.0, height_in=3.4, columns=3) as (_, axes):
        for place, first in enumerate(("long-in", "long-out")):
            colours = iter(COLOURS)
            for case, row in _rows(cases, results, "split"):
                if not case.name.startswith(first):
                    continue
                share = [each.prefill / (each.prefill + each.decode) for each in row.splits]
                seen = [
                    (at, each.rate_per_s) for at, each in zip(share, row.splits, strict=True) if each.rate_per_s is not None
                ]
                colour, label = next(colours), f"ITL {case.itl_s * 1e3:g} ms"
                axes[place].plot(share, [each.bound_per_s for each in row.splits], ":", color=colour, linewidth=1.0)
                axes[place].plot(
                    [at for at, _ in seen], [y for _, y in seen], "o-", color=colour, markersize=4, linewidth=1.2, label=label
                )
                axes[place].axvline(_share(case.said), color=GREY, linestyle="--", linewidth=1)
            axes[place].set_title("32K in, 400 out" if first == "long-in" else "4K in, 8K out")
            axes[place].plot([], [], ":", color=GREY, label="bound by arithmetic")
            axes[place].plot([], [], "--", color=GREY, label="the rule")
            axes[place].set_xlabel("share of GPUs that prefill")
            axes[place].set_ylabel("good requests/s")
            axes[place].set_xlim(0, 1)
            axes[place].set_ylim(bottom=0)
            axes[place].legend(fontsize=7)
        for itl_s, colour in ((0.02, GREEN), (0.045, BLUE), (0.1, ORANGE)):
            rows = [
                (case, row) for case, row in _rows(cases, results, "chunked") if case.itl_s == itl_s and row.gain is not None
            ]
            if not rows:
                continue
            x, y = [case.isl for case, _ in rows], [row.gain or 0.0 for _, row in rows]
            spread = [
                [(row.gain or 0.0) - (row.gain_low or 0.0) for _, row in rows],
                [(row.gain_high or 0.0) - (row.gain or 0.0) for _, row in rows],
            ]
            label = f"ITL {itl_s * 1e3:g} ms"
            axes[2].errorbar(x, y, yerr=spread, fmt="o-", markersize=4, linewidth=1.2, capsize=3, color=colour, label=label)
        axes[2].axhline(1.1, color=GREY, linestyle="--", linewidth=1)
        axes[2].set_xscale("log", base=2)
        sizes = sorted({case.isl for case, _ in _rows(cases, results, "chunked")})
        axes[2].set_xticks(sizes, [f"{size // 1024}K" for size in sizes])
        axes[2].set_xlabel("prompt, one node of 8 GPUs")
        axes[2].set_ylabel("NIXL / chunked prefill")
        axes[2].set_title("Worth it? (dashed: 1.1)")
        axes[2].legend(fontsize=7)


def _rows(cases: Sequence[Case], results: Results, rule: str) -> list[tuple[Case, Row]]:
    by_name = {row.name: row for row in results.rows}
    return [(case, by_name[case.name]) for case in cases if case.rule == rule and case.name in by_name]


def _gpus(candidate: Candidate) -> tuple[int, int]:
    arrangement = candidate.arrangement
    return arrangement.prefill * candidate.prefill_tp, arrangement.decode * candidate.decode_tp


def _ratio(prefill: int, decode: int) -> str:
    if not prefill or not decode:
        return "-"
    return f"{prefill / decode:.3g}:1" if prefill >= decode else f"1:{decode / prefill:.3g}"


def _share(ratio: str) -> float:
    prefill, _, decode = ratio.partition(":")
    return float(prefill) / (float(prefill) + float(decode))
