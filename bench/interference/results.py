"""All that was measured, as it is written to a file and read again."""

from __future__ import annotations

from pathlib import Path

import msgspec


class ResultsError(ValueError):
    """The file holds no results; the message says why."""


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request, as its client saw it. Times are from the beginning of the round."""

    due_s: float
    """When it was to be sent."""
    first_s: float | None = None
    """When its first token came; None: it never did."""
    gaps_ms: list[float] = []
    """From token to token. Tokens that came in one piece have gaps of 0."""
    handed_over: bool = False
    """One worker prefilled it and another one wrote it."""
    cut: bool = False
    """The round was over before it was; it is no fault."""
    fault: str = ""


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """One arrangement, once."""

    arrangement: str
    number: int
    seconds: float
    loaded_s: float
    """When the first long prompt came; before that streams were alone."""
    streams: list[Answer]
    prompts: list[Answer]


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """Everything, token by token."""

    machine: dict[str, str]
    versions: dict[str, str]
    command: str
    engine: str
    device: str
    model: str
    seed: int
    load: dict[str, int | float]
    arrangements: dict[str, str]
    """Name -> what it runs on, in words."""
    rounds: list[Round] = []
    failures: list[str] = []


def write(results: Results, file: Path) -> None:
    """As JSON, a round a line. Raises OSError."""
    tree = msgspec.to_builtins(results)
    rounds = ",\n".join(msgspec.json.encode(each).decode() for each in tree.pop("rounds"))
    head = msgspec.json.encode(tree).decode()
    file.write_text(f'{head[:-1]},\n"rounds":[\n{rounds}\n]}}\n', encoding="utf-8")


def read(file: Path) -> Results:
    """Raises ResultsError, OSError."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=Results)
    except msgspec.DecodeError as error:
        raise ResultsError(f"{file}: {error}") from None
