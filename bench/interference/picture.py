"""A picture of what was measured: the gaps between tokens over one round, and how many of all gaps are how long."""

from __future__ import annotations

import math
from pathlib import Path

from bench.interference.arrangements import TITLES
from bench.interference.numbers import Row, gaps_of, row, timed_gaps
from bench.interference.results import Results, Round
from extproc.pictures import BLUE, GREEN, GREY, ORANGE, picture

_COLOURS = dict(zip(TITLES, (ORANGE, BLUE, GREEN), strict=True))
_DASHES = dict(zip(TITLES, ("-", "--", "-."), strict=True))

_CELLS, _CELLS_A_LOG = 600, 20
"""How finely dots are told apart, over the width of the picture and for each factor e of its height."""


def draw(results: Results, path: Path) -> None:
    """Raises PictureError, OSError."""
    names = [name for name in TITLES if any(each.arrangement == name for each in results.rounds)]
    every = {name: [each for each in results.rounds if each.arrangement == name] for name in names}
    with picture(path, width_in=9.0, height_in=1.9 * (len(names) + 1.3), rows=len(names) + 1) as (figure, axes):
        figure.suptitle(
            f"{results.load['streams']:g} streams, long prompts of {results.load['prompt_tokens']:,g} tokens in between"
        )
        shown = {name: _shown(every[name]) for name in names}
        longest_ms = max((gap * 1e3 for each in shown.values() for _, gap in _gaps(each)), default=1.0)
        shortest_ms = min((gap * 1e3 for each in shown.values() for _, gap in _gaps(each) if gap > 1e-3), default=1.0)
        last_s = max((each.seconds for each in shown.values()), default=1.0)
        for axis, name in zip(axes, names, strict=False):
            each = shown[name]
            for number, prompt in enumerate(each.prompts):
                end_s = each.seconds if prompt.first_s is None else prompt.first_s
                axis.axvspan(
                    prompt.due_s, end_s, color="#e9e9e9", label=None if number else "a long prompt waits or is prefilled"
                )
            points = _apart(_gaps(each), last_s)
            at_s, gaps_ms = [at for at, _ in points], [gap * 1e3 for _, gap in points]
            axis.plot(at_s, gaps_ms, linestyle="", marker="o", markersize=2.2, markeredgewidth=0, color=_COLOURS[name])
            axis.set_yscale("log")
            axis.set_ylim(shortest_ms * 0.7, longest_ms * 1.5)
            axis.set_xlim(0, last_s)
            axis.set_title(_title(row(name, every[name], int(results.load["prompt_tokens"]))), loc="left")
            axis.set_ylabel("gap, ms")
        if names:
            axes[0].legend(loc="lower left")
            axes[len(names) - 1].set_xlabel(
                f"seconds of round {shown[names[0]].number}; a dot is a token: its gap to the one before"
            )
        axis = axes[len(names)]
        for name in names:
            ordered_ms = sorted(gap * 1e3 for gap in gaps_of(every[name], loaded=True))
            shares = [1 - index / len(ordered_ms) for index in range(len(ordered_ms))]
            axis.plot(ordered_ms, shares, _DASHES[name], color=_COLOURS[name], label=TITLES[name], drawstyle="steps-post")
        axis.axhline(0.01, color=GREY, linewidth=0.8)
        axis.text(1.0, 0.011, "p99", color=GREY, ha="right", va="bottom", transform=axis.get_yaxis_transform())
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlim(shortest_ms * 0.7, longest_ms * 1.5)
        axis.set_xlabel("gap between two tokens of a stream while long prompts come, ms; all rounds")
        axis.set_ylabel("share that is longer")
        axis.legend(loc="lower left")


def _title(found: Row) -> str:
    stalled = "" if math.isnan(found.stalled) else f", {found.stalled:.0%} of the time stalled"
    return f"{TITLES[found.name]}: ITL p50 {found.itl_p50_s * 1e3:.0f} ms, p99 {found.itl_p99_s * 1e3:.0f} ms{stalled}"


def _gaps(each: Round) -> list[tuple[float, float]]:
    return [pair for answer in each.streams for pair in timed_gaps(answer)]


def _apart(points: list[tuple[float, float]], last_s: float) -> list[tuple[float, float]]:
    """Those that can be told apart: streams of one step have the same gap at the same time. In order."""
    found = {
        (round(at_s / last_s * _CELLS), round(math.log(max(gap_s, 1e-6)) * _CELLS_A_LOG)): (at_s, gap_s)
        for at_s, gap_s in points
    }
    return [found[cell] for cell in sorted(found)]


def _shown(rounds: list[Round]) -> Round:
    """The first: the same round, and so the same requests, of every arrangement."""
    return min(rounds, key=lambda each: each.number)
