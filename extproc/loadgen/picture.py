"""The picture of a run: latencies as requests came, and how they are distributed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from extproc import pictures
from extproc.loadgen.account import Report
from extproc.loadgen.sample import Kind, Sample
from workers.goodput import percentile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

_MOST_STEPS = 400


def draw(path: Path, found: Report, samples: Sequence[Sample]) -> None:
    """Write it. Raises PictureError and OSError."""
    served = [sample for sample in samples if sample.kind is Kind.SERVED]
    failed_s = [sample.due_s for sample in samples if sample.kind is not Kind.SERVED]
    first = [(sample.due_s, sample.ttft_s) for sample in served if sample.ttft_s is not None]
    worst = [(sample.due_s, percentile(sample.gaps_s, 0.99)) for sample in served if sample.gaps_s]
    gaps_s = [gap_s for sample in served for gap_s in sample.gaps_s]
    with pictures.picture(path, width_in=9.5, height_in=6.2, rows=2, columns=2) as (figure, axes):
        ttft, ttft_cdf, itl, itl_cdf = axes
        _over_time(ttft, first, 1.0, found.ttft_slo_s, failed_s)
        ttft.set_title("Time to first token, as requests came")
        ttft.set_ylabel("s")
        _distribution(ttft_cdf, [value for _, value in first], 1.0, found.ttft_slo_s)
        ttft_cdf.set_title("Time to first token")
        ttft_cdf.set_xlabel("s")
        _over_time(itl, worst, 1e3, found.itl_slo_s, failed_s)
        itl.set_title("Gap between tokens, p99 of each request")
        itl.set_ylabel("ms")
        itl.set_xlabel("s since the start")
        _distribution(itl_cdf, gaps_s, 1e3, found.itl_slo_s, label="all gaps")
        _distribution(itl_cdf, [value for _, value in worst], 1e3, None, label="p99 of each request", colour=pictures.ORANGE)
        itl_cdf.set_title("Gap between tokens")
        itl_cdf.set_xlabel("ms")
        itl_cdf.legend(loc="lower right", frameon=True)
        figure.legend(*ttft.get_legend_handles_labels(), loc="outside lower center", ncols=3)
        figure.suptitle(
            f"{found.model}: {found.all.requests} requests, {found.all.served} served, "
            f"{found.all.goodput:.1%} within {found.ttft_slo_s:g} s and {found.itl_slo_s * 1e3:g} ms"
        )


def _over_time(axes: Axes, points: Sequence[tuple[float, float]], unit: float, slo_s: float, failed_s: Sequence[float]) -> None:
    axes.scatter([at_s for at_s, _ in points], [value * unit for _, value in points], s=8, color=pictures.BLUE, label="served")
    axes.axhline(slo_s * unit, color=pictures.GREY, linestyle="--", linewidth=1, label="wanted")
    if failed_s:
        axes.plot(failed_s, [0.0] * len(failed_s), "x", color=pictures.RED, markersize=5, label="not served")
    axes.set_ylim(bottom=0)


def _distribution(
    axes: Axes,
    values: Sequence[float],
    unit: float,
    slo_s: float | None,
    *,
    label: str | None = None,
    colour: str = pictures.BLUE,
) -> None:
    ordered = sorted(values)
    count = len(ordered)
    # More steps than that are not seen, and make the file large; the last one always is.
    steps = [*range(0, count, -(-count // _MOST_STEPS)), count - 1] if count else []
    axes.step([ordered[n] * unit for n in steps], [(n + 1) / count for n in steps], where="post", color=colour, label=label)
    if slo_s is not None:
        axes.axvline(slo_s * unit, color=pictures.GREY, linestyle="--", linewidth=1)
    axes.set_ylim(0, 1.02)
    axes.set_xlim(left=0)
    axes.set_ylabel("share")
