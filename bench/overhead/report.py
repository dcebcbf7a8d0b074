"""What was measured, as tables. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rich.table import Table

from bench.overhead.arrangements import ARRANGEMENTS, ENVOY, ROUTER
from bench.overhead.cells import CLIENT, WORKERS, Cell, Spot
from bench.overhead.cpu import WATCHER
from bench.overhead.judge import ENVOY_SMG, ENVOY_VLLM_ROUTER, SMG, judged, ratio
from bench.overhead.results import Results
from bench.overhead.streams import WHOLE, StreamCell, StreamSpot

Say = Callable[[str], None]
_SHORT_SPOTS = (Spot(4, 1), Spot(4, 16), Spot(128, 1), Spot(128, 16))
_PARTS = (ENVOY, ROUTER, WATCHER, WORKERS, CLIENT)


def tables(results: Results) -> Iterable[Table]:
    """All of them."""
    for spot in sorted({cell.spot for cell in results.cells}):
        yield _requests(spot, [cell for cell in results.cells if cell.spot == spot])
    if (name := judged(results.cells)) is not None:
        yield _ratios(name, results.cells)
    for stream_spot in sorted({cell.spot for cell in results.stream_cells}):
        yield _streams(stream_spot, [cell for cell in results.stream_cells if cell.spot == stream_spot])
    if results.idle:
        yield _idle(results.idle)


def _table(title: str, heads: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("")
    for head in heads:
        table.add_column(head, justify="right")
    return table


def _title(cell: Cell | StreamCell) -> str:
    return ARRANGEMENTS[cell.name].title + (" (!)" if cell.faults else "")


def _requests(spot: Spot, cells: Sequence[Cell]) -> Table:
    heads = ("req/s", "rounds", "p50 ms", "p99 ms", "CPU µs", *_PARTS, "MB")
    table = _table(str(spot), heads)
    for cell in cells:
        table.add_row(
            _title(cell),
            f"{cell.per_s:,.0f}",
            f"{min(cell.per_s_rounds):,.0f}–{max(cell.per_s_rounds):,.0f}",
            f"{cell.p50_s * 1e3:.2f}",
            f"{cell.p99_s * 1e3:.2f}",
            _micros(cell.between_cpu_s),
            *(_micros(cell.cpu_s.get(part)) for part in _PARTS),
            _megabytes(cell.memory_mb),
        )
        if cell.name == "direct":
            table.add_row(
                "… twice, one after the other",
                f"{cell.per_s / 2:,.0f}",
                "",
                f"{cell.p50_s * 2e3:.2f}",
                *[""] * (len(heads) - 3),
            )
    return table


def _ratios(name: str, cells: Sequence[Cell]) -> Table:
    table = _table(f"{name} over a peer", ("peer", "req/s", "p50", "p99", "CPU"))
    by_key = {(cell.name, cell.spot): cell for cell in cells}
    for spot in sorted({cell.spot for cell in cells if cell.name == name}):
        own = by_key[name, spot]
        for peer in (ENVOY_SMG, SMG, ENVOY_VLLM_ROUTER):
            if (other := by_key.get((peer, spot))) is not None:
                pairs = ((own.per_s, other.per_s), (own.p50_s, other.p50_s), (own.p99_s, other.p99_s))
                cpu = ratio(own.between_cpu_s, other.between_cpu_s)
                table.add_row(str(spot), peer, *(f"{ratio(*pair):.2f}" for pair in pairs), f"{cpu:.2f}")
    return table


def _streams(spot: StreamSpot, cells: Sequence[StreamCell]) -> Table:
    whole = spot == WHOLE
    title = f"{spot}; CPU in µs of a {'whole request' if whole else 'token'}, times in ms, delay from the worker to the client"
    heads = ("ITL p50", "p99", "rounds", "delay p50", "p99", "added", "TTFT", "CPU", *_PARTS, "MB")
    table = _table(title, heads)
    direct = next((cell for cell in cells if cell.name == "direct"), None)
    for cell in cells:
        cpu_s = cell.cpu_a_request_s if whole else cell.cpu_a_token_s
        table.add_row(
            _title(cell),
            f"{cell.itl_p50_s * 1e3:.2f}",
            f"{cell.itl_p99_s * 1e3:.2f}",
            f"{min(cell.itl_p99_rounds_s) * 1e3:.1f}–{max(cell.itl_p99_rounds_s) * 1e3:.1f}",
            f"{cell.delay_p50_s * 1e3:.2f}",
            f"{cell.delay_p99_s * 1e3:.2f}",
            "" if direct is None else f"{(cell.delay_p50_s - direct.delay_p50_s) * 1e3:.2f}",
            f"{cell.ttft_p50_s * 1e3:.1f}",
            _micros(cell.between_a_request_s if whole else cell.between_a_token_s),
            *(_micros(cpu_s.get(part)) for part in _PARTS),
            _megabytes(cell.memory_mb),
        )
    return table


def _idle(idle: dict[str, dict[str, float]]) -> Table:
    table = _table("while nothing is asked: share of a core", _PARTS[:3])
    for name, parts in idle.items():
        table.add_row(ARRANGEMENTS[name].title, *(f"{parts[part]:.1%}" if part in parts else "" for part in _PARTS[:3]))
    return table


def _micros(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds * 1e6:,.0f}" if seconds > 1e-4 else f"{seconds * 1e6:.1f}"


def _megabytes(memory_mb: dict[str, float]) -> str:
    return f"{sum(megabytes for part, megabytes in memory_mb.items() if part != WORKERS):,.0f}"


def fault_lines(results: Results) -> list[str]:
    """Of the cells that are marked."""
    cells: list[Cell | StreamCell] = [*results.cells, *results.stream_cells]
    return [f"(!) {cell.name}, {cell.spot}: {'; '.join(cell.faults)}" for cell in cells if cell.faults]


def markdown(results: Results) -> str:
    """The short tables, for a document."""
    blocks = []
    if results.cells:
        spots = [spot for spot in _SHORT_SPOTS if any(cell.spot == spot for cell in results.cells)]
        heads = [f"{spot}: req/s, p50, CPU" for spot in spots]
        blocks.append(_markdown(heads, _names(results.cells), lambda name, at: _short(results.cells, name, spots[at])))
    streamed = [cell for cell in results.stream_cells if cell.spot != WHOLE]
    if streamed:
        counts = sorted({cell.spot.streams for cell in streamed})
        heads = [f"{count} streams: ITL p99, CPU a token" for count in counts]
        blocks.append(_markdown(heads, _names(streamed), lambda name, at: _short_stream(streamed, name, counts[at])))
    whole = [cell for cell in results.stream_cells if cell.spot == WHOLE]
    if whole:
        rows = {cell.name: f"{cell.between_a_request_s * 1e3:.1f} ms" for cell in whole}
        blocks.append(_markdown(["CPU of a whole request"], list(rows), lambda name, _: rows[name]))
    blocks.append(f"Measured on: {', '.join(f'{name} {value}' for name, value in results.machine.items() if value)}.\n")
    return "\n".join(blocks)


def _names(cells: Sequence[Cell] | Sequence[StreamCell]) -> list[str]:
    measured = {cell.name for cell in cells}
    return [name for name in ARRANGEMENTS if name in measured]


def _markdown(heads: Sequence[str], names: Sequence[str], value: Callable[[str, int], str]) -> str:
    lines = [f"| | {' | '.join(heads)} |", f"|---|{'---|' * len(heads)}"]
    lines += [f"| {ARRANGEMENTS[name].title} | {' | '.join(value(name, at) for at in range(len(heads)))} |" for name in names]
    return "\n".join(lines) + "\n"


def _short(cells: Sequence[Cell], name: str, spot: Spot) -> str:
    for cell in cells:
        if (cell.name, cell.spot) == (name, spot):
            return f"{cell.per_s:,.0f}, {cell.p50_s * 1e3:.2f} ms, {_micros(cell.between_cpu_s)} µs"
    return ""


def _short_stream(cells: Sequence[StreamCell], name: str, streams: int) -> str:
    for cell in cells:
        if (cell.name, cell.spot.streams) == (name, streams):
            return f"{cell.itl_p99_s * 1e3:.1f} ms, {_micros(cell.between_a_token_s)} µs"
    return ""
