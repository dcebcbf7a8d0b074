"""``make plan-tables``: the published tables, simulated."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from bench.plan_tables import picture, report, results, running
from bench.plan_tables.cluster import Constants
from bench.plan_tables.results import ResultsError
from extproc import pictures
from extproc.pictures import PictureError
from extproc.plan.errors import PlanError

_INTERRUPTED = 130
_EXAMPLES = """
examples:
  python -m bench.plan_tables
      all rows, on all cores: a few minutes on two
  python -m bench.plan_tables --quick
      short runs and rough rates: does it work here?
  python -m bench.plan_tables --json numbers.json --markdown tables.md --picture tables.svg
  python -m bench.plan_tables --from numbers.json --picture tables.svg
      nothing is simulated: tables and picture of what was simulated before
"""


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status: 0; 1 if something could not be simulated or written; 2 for options; 130 for Ctrl-C."""
    options = _parser().parse_args(arguments)
    console = Console(width=150, soft_wrap=True, stderr=True)

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False)

    try:
        if options.picture is not None:
            pictures.check(options.picture)
        if options.read is not None:
            found = results.read(options.read)
        else:
            seeds = range(options.seed, options.seed + (1 if options.quick else options.seeds))
            with running.pool(options.processes) as (executor, lines):
                found = running.run(seeds=seeds, quick=options.quick, executor=executor, lines=lines, say=say)
        tables = report.markdown(found, Constants())
        sys.stdout.write(tables + "\n")
        if options.json is not None:
            results.write(found, options.json)
        if options.markdown is not None:
            options.markdown.write_text(tables + "\n", encoding="utf-8")
        if options.picture is not None:
            picture.draw(found, options.picture)
    except (PlanError, ResultsError, PictureError, OSError) as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        say("interrupted")
        return _INTERRUPTED
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.plan_tables",
        description="Published goodput of five arrangements of 64 GPUs, against the same five simulated.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="short runs, rough rates")
    parser.add_argument("--seed", type=int, default=0, help="the first, of arrivals and of the router (default: 0)")
    parser.add_argument("--seeds", type=_count, default=2, help="so many for the five rows (default: 2; quick: 1)")
    parser.add_argument("--processes", type=_count, default=os.cpu_count() or 1, help="simulations at once (default: cores)")
    parser.add_argument("--from", dest="read", type=Path, metavar="FILE", help="results to report instead of simulating")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results, too")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables, too")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw them, too: .svg or .png")
    return parser


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"at least 1, not {value}")
    return value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
