"""A picture of what was measured: bars, by hand, as SVG. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from bench.overhead.arrangements import ARRANGEMENTS
from bench.overhead.cells import Spot
from bench.overhead.results import Results
from bench.overhead.streams import WHOLE

_PANEL_WIDTH, _PANELS_A_ROW = 560, 2
_LABEL_WIDTH, _VALUE_WIDTH, _ROW, _HEAD, _GAP = 210, 90, 22, 40, 24
_COLOURS = {"baton": "#0b6e4f", "smg": "#c8553d", "vllm-router": "#e0a458", "fastapi": "#8d8d8d"}
_PLAIN = "#9fb3c8"
_STREAMS = 150


@dataclass(frozen=True)
class Panel:
    """One group of bars, of arrangements by name."""

    title: str
    unit: str
    values: Sequence[tuple[str, float]]


def panels(results: Results) -> list[Panel]:
    """What is shown, as far as it was measured."""
    found = []
    for spot in (Spot(4, 16), Spot(128, 16)):
        cells = [cell for cell in results.cells if cell.spot == spot]
        found += [
            Panel(f"requests a second, {spot}", "", [(cell.name, cell.per_s) for cell in cells if cell.name != "direct"]),
            Panel(f"CPU of a request, {spot}", "µs", [(cell.name, cell.between_cpu_s * 1e6) for cell in cells]),
        ]
    streamed = [cell for cell in results.stream_cells if cell.spot != WHOLE and cell.spot.streams == _STREAMS]
    tokens_ms = [(cell.name, cell.between_a_token_s * 1e6) for cell in streamed]
    whole = [cell for cell in results.stream_cells if cell.spot == WHOLE]
    found += [
        Panel(f"ITL p99, {_STREAMS} streams", "ms", [(cell.name, cell.itl_p99_s * 1e3) for cell in streamed]),
        Panel(f"CPU of 1,000 tokens, {_STREAMS} streams", "ms", tokens_ms),
        Panel(f"CPU of a whole request, {WHOLE}", "ms", [(cell.name, cell.between_a_request_s * 1e3) for cell in whole]),
    ]
    shown = (Panel(each.title, each.unit, [pair for pair in each.values if pair[1] > 0]) for each in found)
    return [each for each in shown if each.values]


def svg(results: Results) -> str:
    """The whole picture."""
    found = panels(results)
    rows = [found[at : at + _PANELS_A_ROW] for at in range(0, len(found), _PANELS_A_ROW)]
    parts: list[str] = []
    top = _GAP
    for row in rows:
        for column, panel in enumerate(row):
            parts += _draw(panel, left=_GAP + column * (_PANEL_WIDTH + _GAP), top=top)
        top += max(_height(panel) for panel in row) + _GAP
    machine = f"{results.machine.get('cpu', '')}, {results.machine.get('cores', '?')} cores"
    parts.append(_text(_GAP, top, machine, colour="#666666"))
    width, height = _PANELS_A_ROW * (_PANEL_WIDTH + _GAP) + _GAP, top + _GAP
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="system-ui, sans-serif" font-size="13">\n'
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _height(panel: Panel) -> int:
    return _HEAD + _ROW * len(panel.values)


def _draw(panel: Panel, *, left: int, top: int) -> list[str]:
    unit = f" ({panel.unit})" if panel.unit else ""
    parts = [_text(left, top + 16, panel.title + unit, weight="bold")]
    most = max(value for _, value in panel.values)
    room = _PANEL_WIDTH - _LABEL_WIDTH - _VALUE_WIDTH
    for number, (name, value) in enumerate(panel.values):
        y = top + _HEAD + number * _ROW
        kind = ARRANGEMENTS[name].kind
        length = max(1.0, room * value / most)
        shown = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
        parts += [
            _text(left, y, name),
            f'<rect x="{left + _LABEL_WIDTH}" y="{y - 12}" width="{length:.1f}" height="{_ROW - 6}" '
            f'fill="{_COLOURS.get(kind, _PLAIN)}"/>',
            _text(left + _LABEL_WIDTH + length + 6, y, shown),
        ]
    return parts


def _text(x: float, y: float, text: str, *, colour: str = "#1a1a1a", weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" font-weight="{weight}">{escape(text)}</text>'
