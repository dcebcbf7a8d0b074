"""What was measured, as tables and as JSON. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from rich.table import Table

from bench.overhead.arrangements import ARRANGEMENTS, ENVOY, ROUTER
from bench.overhead.cells import CLIENT, WORKERS, Cell, Spot


def request_tables(cells: Sequence[Cell]) -> Iterable[Table]:
    """One a size of body and number of connections."""
    for spot in sorted({cell.spot for cell in cells}):
        yield _request_table(spot, [cell for cell in cells if cell.spot == spot])


def _request_table(spot: Spot, cells: Sequence[Cell]) -> Table:
    table = Table(title=str(spot), title_justify="left", title_style="bold")
    table.add_column("")
    heads = ("req/s", "rounds", "p50 ms", "p99 ms", "CPU µs: all between", "Envoy", "router", "workers", "client", "MB")
    for head in heads:
        table.add_column(head, justify="right")
    for cell in cells:
        table.add_row(
            ARRANGEMENTS[cell.name].title + (" (!)" if cell.faults else ""),
            f"{cell.per_s:,.0f}",
            f"{min(cell.per_s_rounds):,.0f}–{max(cell.per_s_rounds):,.0f}",
            f"{cell.p50_s * 1e3:.2f}",
            f"{cell.p99_s * 1e3:.2f}",
            f"{cell.between_cpu_s * 1e6:,.0f}",
            *(_micros(cell, part) for part in (ENVOY, ROUTER, WORKERS, CLIENT)),
            f"{sum(megabytes for part, megabytes in cell.memory_mb.items() if part != WORKERS):,.0f}",
        )
        if cell.name == "direct":
            table.add_row("… twice, one after the other", f"{cell.per_s / 2:,.0f}", "", f"{cell.p50_s * 2e3:.2f}", *[""] * 7)
    return table


def _micros(cell: Cell, part: str) -> str:
    return f"{cell.cpu_s[part] * 1e6:,.0f}" if part in cell.cpu_s else ""


def fault_lines(cells: Iterable[Cell]) -> list[str]:
    """Of the cells that are marked."""
    return [f"{cell.name}, {cell.spot}: {'; '.join(cell.faults)}" for cell in cells if cell.faults]


def as_json(cells: Iterable[Cell]) -> list[dict[str, Any]]:
    """One object a cell, seconds and megabytes."""
    return [msgspec.to_builtins(cell) for cell in cells]
