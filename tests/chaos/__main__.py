"""``python -m tests.chaos --seed N --requests N --minutes M``: exit status 1, and the seed, if anything went wrong."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.chaos.run import Report, run
from tests.stack.harness import BODY_MODE


def table(report: Report) -> Table:
    """What came of a run."""
    shown = Table(title=f"Seed {report.seed}, {report.seconds:.0f} s; the longest request took {report.slowest_s:.1f} s")
    shown.add_column("")
    shown.add_column("what")
    shown.add_column("how often", justify="right")
    sections: list[tuple[str, Mapping[str, float]]] = [
        ("requests", report.outcomes),
        ("faults", report.faults),
        ("excused by a fault", report.excused),
        ("metrics", report.metrics),
    ]
    for name, counts in sections:
        for number, (what, count) in enumerate(sorted(counts.items(), key=lambda item: -item[1])):
            shown.add_row("" if number else name, what, f"{count:g}")
        shown.add_section()
    return shown


def main() -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--minutes", type=float, default=1.5)
    parser.add_argument("--body-mode", choices=("buffered", "full_duplex", "full_duplex_both"), default=BODY_MODE)
    parser.add_argument("--log", type=Path, help="write the filter's log here")
    arguments = parser.parse_args()
    report = asyncio.run(
        run(
            arguments.seed,
            requests=arguments.requests,
            seconds=arguments.minutes * 60,
            body_mode=arguments.body_mode,
        )
    )
    if arguments.log:
        arguments.log.write_text(report.log, encoding="utf-8")
    Console(width=120, markup=False, highlight=False).print(table(report))
    for problem in report.problems[:40]:
        print(f"PROBLEM {problem}")
    if report.problems:
        again = f"--seed {arguments.seed} --requests {arguments.requests} --minutes {arguments.minutes:g}"
        again += f" --body-mode {arguments.body_mode}"
        print(f"{len(report.problems)} problems; the same plan again: python -m tests.chaos {again}")
        return 1
    print(f"seed {arguments.seed}: nothing wrong")
    return 0


if __name__ == "__main__":
    sys.exit(main())
