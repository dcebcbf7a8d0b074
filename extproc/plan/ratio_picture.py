"""The picture of an answer: what each arrangement can do, and how that depends on the split."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from extproc.pictures import COLOURS, GREEN, GREY, ORANGE, picture
from extproc.plan.candidates import Candidate, Kind
from extproc.plan.ratio import Answer, Best

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(answer: Answer, path: Path) -> None:
    """Draw it. Raises PictureError and OSError."""
    apart = next((best for best in (answer.of(Kind.NIXL), answer.of(Kind.TCP)) if best is not None and best.screened), None)
    with picture(path, width_in=9.0, height_in=3.6, columns=2 if apart is not None else 1) as (figure, axes):
        question = answer.question
        figure.suptitle(
            f"{question.shape.name}, {question.gpus} x {question.gpu.name}: {question.workload.text}; "
            f"TTFT {question.slos.ttft_s:g} s, ITL {question.slos.itl_s * 1e3:g} ms",
            fontsize=9,
        )
        _bars(answer, axes[0])
        if apart is not None:
            _splits(apart, axes[1])


def _bars(answer: Answer, axes: Axes) -> None:
    for place, best in enumerate(reversed(answer.best)):
        rate = best.finalist.rate_per_s if best.finalist is not None else None
        mean = rate.mean if rate is not None else 0.0
        axes.barh(place, mean, color=GREEN if best.kind.apart else ORANGE, height=0.62)
        if rate is not None and math.isfinite(rate.high):
            axes.errorbar(mean, place, xerr=[[mean - rate.low], [rate.high - mean]], color="black", capsize=3, linewidth=1)
        label = best.finalist.candidate.text if best.finalist is not None else "none can do"
        axes.text(0, place - 0.42, f" {label}", fontsize=7, va="center", color=GREY)
    axes.set_yticks(range(len(answer.best)), [best.kind.value for best in reversed(answer.best)])
    axes.set_ylim(-0.6, len(answer.best) - 0.5)
    axes.set_xlabel("highest good rate, requests/s (bars: 95 % interval)")
    axes.set_title("Arrangements")


def _splits(best: Best, axes: Axes) -> None:
    """Against the share of the GPUs that prefill: what was simulated of each split, and what arithmetic allows."""
    families = sorted({candidate.family for candidate, _ in best.screened})
    for family, marker, colour in zip(families, "os^Dvp", COLOURS, strict=False):
        screened = sorted((_prefill_share(each), rate) for each, rate in best.screened if each.family == family)
        bounds = sorted((_prefill_share(each), each.bound_per_s) for each in best.able if each.family == family)
        axes.plot([x for x, _ in bounds], [y for _, y in bounds], ":", color=colour, linewidth=1.2)
        label = f"prefill TP{family[0]}, decode TP{family[1]}"
        axes.plot(
            [x for x, _ in screened],
            [y for _, y in screened],
            marker + "-",
            color=colour,
            markersize=5,
            linewidth=1,
            label=label,
        )
    axes.plot([], [], ":", color=GREY, label="bound by arithmetic")
    axes.set_xlim(0, 1)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("share of the GPUs that prefill")
    axes.set_ylabel("requests/s")
    axes.set_title(f"{best.kind.value}: splits (one seed)")
    axes.legend(fontsize=7)


def _prefill_share(candidate: Candidate) -> float:
    return candidate.arrangement.prefill * candidate.prefill_tp / candidate.arrangement.gpus
