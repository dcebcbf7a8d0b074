"""Pictures of measurements and plans: one style, and the same bytes from the same numbers.

The extra ``pictures`` brings matplotlib. It is imported when a picture is drawn, not before: the filter has no use for it. What
is drawn, and what it means, is the business of the one who draws.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, RED, PURPLE, GREY = COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b2182b", "#8c62aa", "#6b6b6b")
"""Told apart by those who see few colours, too; say with shapes or words what only a colour says."""

_STYLE: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": "#444444",
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "figure.facecolor": "white",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "grid.color": "#e3e3e3",
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "savefig.dpi": 150,
    # Without a fixed salt, element ids differ from run to run. Glyphs as paths look the same everywhere.
    "svg.fonttype": "path",
    "svg.hashsalt": "baton",
}
_SUFFIXES = (".svg", ".png")


class PictureError(ValueError):
    """The picture cannot be drawn; the message says what to do."""


@contextmanager
def picture(
    path: Path | str, *, width_in: float = 7.5, height_in: float = 4.2, rows: int = 1, columns: int = 1
) -> Iterator[tuple[Figure, list[Axes]]]:
    """A figure and its axes, row by row, to draw on; written to ``path`` (.svg or .png) at the end.

    Two runs with the same numbers and the same matplotlib write the same bytes. Nothing is written if the block fails. Raises
    PictureError for another suffix or without matplotlib, and OSError.
    """
    path = Path(path)
    check(path)
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        # What a user's own matplotlibrc says must not be in it.
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        figure = Figure(figsize=(width_in, height_in), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False)
        yield figure, [each for row in axes for each in row]
        # Both would be different tomorrow, or with the next release.
        unknown = {"Date": None, "Creator": None} if path.suffix == ".svg" else {"Software": None}
        figure.savefig(path, metadata=unknown)
    if path.suffix == ".svg":
        # Matplotlib leaves blanks at the ends of lines, which reviews and hooks complain about.
        lines = path.read_text(encoding="utf-8").splitlines()
        path.write_text("".join(f"{line.rstrip()}\n" for line in lines), encoding="utf-8")


def check(path: Path | str) -> None:
    """Raise PictureError if ``path`` could not be drawn: to be asked before work that takes long."""
    if Path(path).suffix not in _SUFFIXES:
        raise PictureError(f"{path}: the name of a picture ends with {' or '.join(_SUFFIXES)}")
    if not Path(path).absolute().parent.is_dir():
        raise PictureError(f"{path}: No such file or directory: there is no such folder")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise PictureError("pictures need matplotlib: pip install 'kv-baton[pictures]'") from None
