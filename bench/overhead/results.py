"""All that was measured, as it is written to a file and read again."""

from __future__ import annotations

from pathlib import Path

import msgspec

from bench.overhead.cells import Cell
from bench.overhead.streams import StreamCell


class ResultsError(ValueError):
    """The file holds no results; the message says why."""


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """Medians, and what they are from."""

    machine: dict[str, str]
    options: dict[str, str] = {}
    cells: list[Cell] = []
    stream_cells: list[StreamCell] = []
    idle: dict[str, dict[str, float]] = {}
    """Arrangement -> process -> share of a core that it takes while nothing is asked of it."""
    failures: list[str] = []
    """What did not run."""


def write(results: Results, verdicts: list[dict[str, str | float | bool]], file: Path) -> None:
    """As JSON, with what was judged. Raises OSError."""
    tree = {**msgspec.to_builtins(results), "verdicts": verdicts}
    file.write_bytes(msgspec.json.format(msgspec.json.encode(tree)) + b"\n")


def read(file: Path) -> Results:
    """Raises ResultsError, OSError."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=Results)
    except msgspec.DecodeError as error:
        raise ResultsError(f"{file}: {error}") from None
