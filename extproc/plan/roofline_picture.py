"""The picture of ``baton plan roofline``."""

from __future__ import annotations

from pathlib import Path

from extproc.pictures import BLUE, COLOURS, GREEN, GREY, picture
from extproc.plan.roofline import Point, Roofline

_MARKS = "osDv^<>P"


def draw(found: Roofline, gpus: int, path: Path) -> None:
    """Roofs of the worker, its peak and what is reached of it, and where each prefill and decode step lies.

    Raises PictureError without matplotlib or for a name that is no picture's, and OSError.
    """
    with picture(path, width_in=7.5, height_in=4.6) as (_, (axes,)):
        inside = [point.flop_per_byte for point in found.points]
        left, right = min(inside) / 2, max(*inside, *(ridge.flop_per_byte for ridge in found.ridges)) * 3
        peak_bytes_a_s = gpus * found.ridges[0].memory_bytes_a_s
        for ridge, style in zip(found.ridges, ("--", ":", "-.", (0, (1, 4))), strict=False):
            peak = gpus * ridge.flops_a_s
            line = [left, ridge.flop_per_byte, right]
            label = f"peak, {ridge.dtype}: ridge at {ridge.flop_per_byte:,.0f} FLOP/byte"
            height = [min(peak, peak_bytes_a_s * x) / 1e12 for x in line]
            axes.plot(line, height, color=GREY, linestyle=style, linewidth=1.2, label=label)
        line = [left, found.reached_flop_per_byte, right]
        label = f"reached: ridge at {found.reached_flop_per_byte:,.0f} FLOP/byte"
        height = [min(found.reached_flops_a_s, found.reached_bytes_a_s * x) / 1e12 for x in line]
        axes.plot(line, height, color=BLUE, linewidth=2, label=label)
        prefills = [point for point in found.points if point.what == "prefill"]
        _scatter(axes, prefills, GREEN, "s", "prefill, prompt tokens", [f"{point.context_tokens:,}" for point in prefills])
        contexts = sorted({point.context_tokens for point in found.points if point.what == "decode"})
        colours = [colour for colour in COLOURS if colour not in (BLUE, GREEN, GREY)]
        for number, context in enumerate(contexts):
            steps = [point for point in found.points if point.what == "decode" and point.context_tokens == context]
            names = [str(point.batch) for point in steps] if number == 0 else []
            label = f"decode at {context:,} tokens, sequences" if names else f"decode at {context:,} tokens"
            _scatter(axes, steps, colours[number % len(colours)], _MARKS[number % len(_MARKS)], label, names)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlim(left, right)
        axes.set_xlabel("arithmetic intensity, FLOP per byte read")
        axes.set_ylabel("TFLOP/s of the worker")
        axes.set_title(found.worker)
        axes.legend(loc="lower right", fontsize=7.5)


def _scatter(axes: object, points: list[Point], colour: str, mark: str, label: str, names: list[str]) -> None:
    from matplotlib.axes import Axes

    assert isinstance(axes, Axes)
    if not points:
        return
    x = [point.flop_per_byte for point in points]
    y = [point.flops / point.time_s / 1e12 for point in points]
    axes.scatter(x, y, color=colour, marker=mark, s=28, label=label, zorder=3)
    for name, at in zip(names, zip(x, y, strict=True), strict=False):
        axes.annotate(name, at, xytext=(-4, 6), textcoords="offset points", fontsize=7, color=colour, ha="right")
