"""A picture of the tables: goodput, p99 ITL and mean TTFT of each row, published and simulated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from bench.plan_tables import published
from bench.plan_tables.published import ROWS
from bench.plan_tables.results import Results
from extproc.pictures import BLUE, GREEN, GREY, ORANGE, picture

_HEIGHT = 0.26


def draw(results: Results, path: Path) -> None:
    """Raises PictureError, OSError."""
    both = [each.both for each in results.first]
    only = [each.ttft_only for each in results.first]
    panels = (
        (
            "goodput, requests/s",
            [row.goodput_per_s for row in ROWS],
            [fmean(each.both.rate_per_s for each in row) for row in results.main],
            [fmean(each.ttft_only.rate_per_s for each in row) for row in results.main],
            None,
        ),
        (
            "p99 ITL, ms (logarithmic)",
            [row.itl_p99_ms for row in ROWS],
            [each.itl_p99_s * 1e3 for each in both],
            [each.itl_p99_s * 1e3 for each in only],
            published.ITL_SLO_S * 1e3,
        ),
        (
            "mean TTFT, ms",
            [row.ttft_mean_ms for row in ROWS],
            [each.ttft_mean_s * 1e3 for each in both],
            [each.ttft_mean_s * 1e3 for each in only],
            published.TTFT_SLO_S * 1e3,
        ),
    )
    with picture(path, width_in=11.0, height_in=4.2, columns=3) as (figure, axes):
        figure.suptitle(
            f"{published.GPUS} H200, dense 70B, {published.INPUT_TOKENS:,} tokens in, {published.OUTPUT_TOKENS} out: "
            "published and simulated"
        )
        for axis, (title, *series, limit) in zip(axes, panels, strict=True):
            for offset, (label, colour, values) in enumerate(
                zip(
                    ("published", "simulated, both limits", "simulated, TTFT limit only"),
                    (GREY, BLUE, ORANGE),
                    series,
                    strict=True,
                )
            ):
                at = [number + (offset - 1) * _HEIGHT for number in range(len(ROWS))]
                bars = axis.barh(at, _drawable(values), height=_HEIGHT, color=colour, label=label)
                axis.bar_label(bars, labels=[_short(value) for value in values], padding=2, fontsize=7)
            axis.set_title(title, loc="left")
            axis.set_ylim(len(ROWS) - 0.5, -0.5)
            axis.grid(visible=False, axis="y")
            if limit is not None:
                axis.axvline(limit, color=GREEN, linewidth=1, linestyle="--", label="limit")
            axis.margins(x=0.18)
        axes[1].set_xscale("log")
        axes[1].set_xlim(5, 6_000)
        axes[0].set_yticks(range(len(ROWS)), [row.name.replace(", ", ",\n") for row in ROWS])
        for axis in axes[1:]:
            axis.set_yticks(range(len(ROWS)), [""] * len(ROWS))
        axes[0].legend(loc="upper right", fontsize=7)
        axes[1].legend(axes[1].get_lines(), ["limit"], loc="lower right", fontsize=7)


def _drawable(values: Sequence[float]) -> list[float]:
    return [0.0 if math.isnan(value) else value for value in values]


def _short(value: float) -> str:
    if math.isnan(value):
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
