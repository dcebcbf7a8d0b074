"""The results of a run as a file, and back: so that tables and picture can be made again without simulating anything."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from bench.plan_tables.measure import Measured


class ResultsError(ValueError):
    """The file holds no results; the message says where and why."""


@dataclass(frozen=True, kw_only=True)
class Results:
    """Everything that the report needs."""

    seeds: Sequence[int]
    quick: bool
    machine: dict[str, str]
    cpu_s: int
    """CPU time of all searches."""
    main: Sequence[Sequence[Measured]]
    """The five rows, in their order, each with every seed."""
    variants: dict[str, Measured]
    """Of the row with chunked prefill, by title, with the first seed."""
    nothing_shared: Sequence[Measured]
    """With the first seed."""

    @property
    def first(self) -> list[Measured]:
        """The five rows with the first seed."""
        return [each[0] for each in self.main]


def write(results: Results, path: Path) -> None:
    """Raises OSError."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(_plain(msgspec.to_builtins(results))), indent=1) + b"\n")


def read(path: Path) -> Results:
    """Raises ResultsError with the file, and OSError."""
    try:
        tree = _numbers(msgspec.json.decode(path.read_bytes()))
        return msgspec.convert(tree, Results)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise ResultsError(f"{path}: no results of this bench: {error}") from None


def _plain(value: object) -> object:
    """JSON has no NaN; ``"nan"`` stands for it, since null is a value of its own here."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return "nan" if isinstance(value, float) and math.isnan(value) else value


def _numbers(value: object) -> object:
    if isinstance(value, dict):
        return {key: _numbers(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_numbers(each) for each in value]
    return math.nan if value == "nan" else value
