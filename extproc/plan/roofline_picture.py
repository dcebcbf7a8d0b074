"""The picture of ``baton plan roofline``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from extproc.pictures import BLUE, COLOURS, GREEN, GREY, picture
from extproc.plan.roofline import Point, Roofline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MARKS = "oDv^<>P"
_DASHES = ("--", ":", "-.")


def draw(found: Roofline, path: Path) -> None:
    """Roofs of the worker, its peak and what is reached of it, and where each prefill and decode step lies.

    Raises PictureError without matplotlib or for a name that is no picture's, and OSError.
    """
    with picture(path, width_in=7.5, height_in=4.6) as (_, (axes,)):
        inside = [point.flop_per_byte for point in found.points]
        left, right = min(inside) / 2, max(*inside, *(ridge.flop_per_byte for ridge in found.ridges)) * 3
        _roofs(axes, found, left, right)
        prefills = [point for point in found.points if point.what == "prefill"]
        _scatter(axes, prefills, GREEN, "s", "prefill; numbers: prompt tokens")
        for number, point in enumerate(prefills):
            last = number == len(prefills) - 1
            _name(axes, f"{point.context_tokens:,}", point, GREEN, right=last or point.bound == "memory", below=True)
        contexts = sorted({point.context_tokens for point in found.points if point.what == "decode"})
        colours = [colour for colour in COLOURS if colour not in (BLUE, GREEN, GREY)]
        for number, context in enumerate(contexts):
            steps = [point for point in found.points if point.what == "decode" and point.context_tokens == context]
            colour = colours[number % len(colours)]
            named = "" if number else "; numbers: sequences"
            _scatter(axes, steps, colour, _MARKS[number % len(_MARKS)], f"decode step at {context:,} tokens{named}")
            for point in () if number else steps:
                _name(axes, f"{point.batch:,}", point, colour)
        if not all(point.fits for point in found.points):
            axes.scatter([], [], facecolors="none", edgecolors=GREY, s=28, label="hollow: more than the KV cache holds")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlim(left, right)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: f"{value:,.10g}")
        axes.set_xlabel("arithmetic intensity: FLOP for each byte read")
        axes.set_ylabel("TFLOP/s of the worker")
        axes.set_title(found.worker)
        axes.legend(loc="lower right", fontsize=7.5)


def _roofs(axes: Axes, found: Roofline, left: float, right: float) -> None:
    gpus = found.gpus
    peak_bytes_a_s = gpus * found.ridges[0].memory_bytes_a_s
    alike: dict[float, list[str]] = {}
    for ridge in found.ridges:
        alike.setdefault(ridge.flops_a_s, []).append(ridge.dtype)
    for (flops_a_s, dtypes), dashes in zip(alike.items(), _DASHES, strict=False):
        ridge_at = gpus * flops_a_s / peak_bytes_a_s
        roof = [min(gpus * flops_a_s, peak_bytes_a_s * x) / 1e12 for x in (left, ridge_at, right)]
        label = f"peak in {' and '.join(dtypes)}: ridge at {ridge_at:,.0f} FLOP/byte"
        axes.plot([left, ridge_at, right], roof, color=GREY, linestyle=dashes, linewidth=1.2, label=label)
    ridge_at = found.reached_flop_per_byte
    roof = [min(found.reached_flops_a_s, found.reached_bytes_a_s * x) / 1e12 for x in (left, ridge_at, right)]
    axes.plot([left, ridge_at, right], roof, color=BLUE, label=f"assumed to be reached: ridge at {ridge_at:,.0f} FLOP/byte")


def _scatter(axes: Axes, points: list[Point], colour: str, mark: str, label: str) -> None:
    x = [point.flop_per_byte for point in points]
    faces = [colour if point.fits else "none" for point in points]
    axes.scatter(x, [_height(point) for point in points], facecolors=faces, edgecolors=colour, marker=mark, s=28, zorder=3)
    axes.scatter([], [], color=colour, marker=mark, s=28, label=label)


def _name(axes: Axes, text: str, point: Point, colour: str, *, right: bool = False, below: bool = False) -> None:
    axes.annotate(
        text,
        (point.flop_per_byte, _height(point)),
        xytext=(5 if right else -5, -12 if below else 4),
        textcoords="offset points",
        fontsize=7,
        color=colour,
        ha="left" if right else "right",
    )


def _height(point: Point) -> float:
    return point.flops / point.time_s / 1e12
