"""What was measured, as tables. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from bench.interference.arrangements import TITLES
from bench.interference.numbers import STALL, Row, row
from bench.interference.results import Results


@dataclass(frozen=True)
class Sheet:
    """One table; the first column is the arrangement."""

    title: str
    heads: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]


def rows(results: Results) -> list[Row]:
    """A line for each arrangement that was measured, in their order."""
    found = []
    for name in TITLES:
        rounds = [each for each in results.rounds if each.arrangement == name]
        if rounds:
            found.append(row(name, rounds, int(results.load["prompt_tokens"])))
    return found


def sheets(results: Results) -> list[Sheet]:
    """All tables."""
    found = rows(results)
    load = results.load
    rounds = max((each.rounds for each in found), default=0)
    return [
        Sheet(
            f"{load['streams']:g} streams, prompts of {load['prompt_tokens']:,g} tokens come every {load['every_s']:g} s; "
            f"{rounds} round{'s' if rounds != 1 else ''}; ITL in ms",
            (
                "ITL p50",
                "p99",
                "p99 of rounds",
                "p99 of a stream",
                "longest",
                "quiet p50",
                "p99 ÷ quiet",
                "stalled",
                "else",
                "tokens/s",
            ),
            tuple(
                (
                    TITLES[each.name],
                    _ms(each.itl_p50_s),
                    _ms(each.itl_p99_s),
                    f"{_ms(min(each.itl_p99_rounds_s))}–{_ms(max(each.itl_p99_rounds_s))}",
                    _ms(each.itl_p99_stream_s),
                    _ms(each.longest_s),
                    _ms(each.quiet_p50_s),
                    _number(each.itl_p99_s / each.quiet_p50_s, "×"),
                    _share(each.stalled),
                    _share(each.stalled_else),
                    _number(each.tokens_a_s),
                )
                for each in found
            ),
        ),
        Sheet(
            "Time to the first token, in seconds",
            (
                "long p50",
                "long p99",
                "long prompts",
                "handed over",
                "prompt tokens/s",
                "stream p50",
                "stream p99",
                "streams begun",
            ),
            tuple(
                (
                    TITLES[each.name],
                    _seconds(each.prompt_ttft_p50_s),
                    _seconds(each.prompt_ttft_p99_s),
                    str(each.prompts),
                    str(each.handed_over),
                    _number(each.prompt_tokens_a_s),
                    _seconds(each.stream_ttft_p50_s),
                    _seconds(each.stream_ttft_p99_s),
                    str(each.starts),
                )
                for each in found
            ),
        ),
    ]


def notes(results: Results) -> list[str]:
    """What the tables mean, and where they are from."""
    lines = [
        f"stalled: share of the streams' time in gaps over {STALL:g} × their quiet p50 while a long prompt had no token yet",
        "else: the same while there was no such prompt; quiet: before the first one",
        f"p99 of fewer than 100 values is the largest of them; seed {results.seed}",
        *(f"{TITLES[name]}: {text}" for name, text in results.arrangements.items()),
        f"{results.engine} on {results.device}, {results.model}: {_listed(results.versions)}",
        f"machine: {_listed(results.machine)}",
    ]
    if results.engine == "sim":
        lines.append("The engines are simulated: this shows that the bench works, and nothing of this machine.")
    return lines


def fault_lines(results: Results) -> list[str]:
    """What went wrong with requests."""
    return [f"(!) {each.name}: {fault}" for each in rows(results) for fault in each.faults]


def table(sheet: Sheet) -> Table:
    """For a terminal."""
    made = Table(title=sheet.title, title_justify="left", title_style="bold")
    made.add_column("")
    for head in sheet.heads:
        made.add_column(head, justify="right")
    for line in sheet.lines:
        made.add_row(*line)
    return made


def markdown(results: Results) -> str:
    """For a document."""
    blocks = []
    for sheet in sheets(results):
        lines = [
            f"**{sheet.title}**",
            "",
            _line(("", *sheet.heads)),
            _line(("---", *["---:"] * len(sheet.heads))),
            *(_line(line) for line in sheet.lines),
        ]
        blocks.append("\n".join(lines))
    blocks.append("\n".join(f"* {line}" for line in [*notes(results), *fault_lines(results)]))
    return "\n\n".join(blocks) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _listed(facts: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items() if value)


def _ms(seconds: float) -> str:
    if math.isnan(seconds):
        return "–"
    ms = seconds * 1e3
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.1f}"


def _share(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.1%}"


def _seconds(seconds: float) -> str:
    return "–" if math.isnan(seconds) else f"{seconds:.2f}"


def _number(value: float, unit: str = "") -> str:
    if math.isnan(value):
        return "–"
    return f"{value:,.0f}{unit}" if value >= 100 else f"{value:.1f}{unit}"
