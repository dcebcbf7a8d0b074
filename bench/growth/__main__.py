"""How the cost of the gateway grows with what is asked of it: ``python -m bench.growth``.

More requests that wait, more endpoints, longer prompts, a larger prefix index, a burst. For every cost and every step from one
size to the next, the exponent is computed: 1 is in step with the input, 0 not at all. Exit status 1 if one is above its limit
(1.25 for what may grow with its input, 0.35 for what should stay as it is), or if a request was answered with an error other
than 429. What the processes use is their processor time; of several rounds, the least counts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol, get_args

import msgspec
import uvloop
from rich.console import Console
from rich.table import Table

from bench.growth import pure, served
from bench.growth.judge import Step
from bench.growth.series import Series, Tell
from bench.overhead.machine import machine
from extproc.transport.choose import Kind

_KB = 1 << 10
_Experiment = Callable[[Sequence[int], int, Tell, str], Series]
"""Called with sizes, rounds, whom to tell, and the filter's transport."""


class _Served(Protocol):
    def __call__(self, sizes: Sequence[int], rounds: int, tell: Tell, *, transport: str) -> Coroutine[None, None, Series]: ...


def _served(experiment: _Served) -> _Experiment:
    return lambda sizes, rounds, tell, transport: uvloop.run(experiment(sizes, rounds, tell, transport=transport))


def _pure(experiment: Callable[[Sequence[int], int, Tell], Series]) -> _Experiment:
    return lambda sizes, rounds, tell, _transport: experiment(sizes, rounds, tell)


_EXPERIMENTS: dict[str, tuple[_Experiment, tuple[int, ...]]] = {
    "held": (_served(served.held), (10, 100, 1_000, 5_000)),
    "burst": (_served(served.burst), (500, 5_000)),
    "prompts": (_served(served.prompts), (4 * _KB, 32 * _KB, 128 * _KB, 512 * _KB, 1024 * _KB, 8192 * _KB)),
    "endpoints": (_pure(pure.endpoints), (1, 10, 100, 1_000)),
    "index": (_pure(pure.index), (1_000, 10_000, 100_000, 1_000_000)),
}


class _Report(msgspec.Struct, kw_only=True):
    """What ``--json`` writes."""

    machine: dict[str, str]
    transport: str
    series: dict[str, Series]
    steps: dict[str, list[Step]]
    problems: list[str]


def main() -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.growth",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples: python -m bench.growth\n          python -m bench.growth --only held prompts --rounds 1 --most 1000",
    )
    parser.add_argument(
        "--only", nargs="+", choices=_EXPERIMENTS, default=list(_EXPERIMENTS), help="experiments (default: all)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="times that each size is measured (default: 3)")
    parser.add_argument("--most", type=int, help="leave out larger sizes (requests, bytes, endpoints, blocks)")
    parser.add_argument("--transport", choices=get_args(Kind), default="grpc", help="of the filter (default: grpc)")
    parser.add_argument("--json", type=Path, help="write what was measured here, too")
    arguments = parser.parse_args()
    console, progress = Console(), Console(stderr=True)
    found: dict[str, Series] = {}
    for name in arguments.only:
        experiment, sizes = _EXPERIMENTS[name]
        some = [size for size in sizes if arguments.most is None or size <= arguments.most]
        found[name] = experiment(some, arguments.rounds, partial(progress.print, f"{name}:"), arguments.transport)
        _show(console, found[name])
    problems = [f"{name}: {problem}" for name, series in found.items() for problem in _problems(series)]
    if arguments.json is not None:
        steps = {name: series.steps() for name, series in found.items()}
        report = _Report(machine=machine(), transport=arguments.transport, series=found, steps=steps, problems=problems)
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    for problem in problems:
        console.print(f"PROBLEM {problem}", markup=False, highlight=False)
    console.print("nothing grows faster than its input" if not problems else f"{len(problems)} problems")
    return 1 if problems else 0


def _problems(series: Series) -> list[str]:
    steep = [
        f"{step.cost} grows with the exponent {step.exponent:.2f} from {step.smaller:,.0f} to {step.larger:,.0f} {series.input}"
        f" ({step.limit:g} is allowed)"
        for step in series.steps()
        if step.too_steep
    ]
    return [*series.faults, *steep]


def _show(console: Console, series: Series) -> None:
    table = Table(title=series.title, title_justify="left")
    table.add_column(series.input, justify="right")
    for cost in series.costs:
        table.add_column(f"{cost.name}{f', {cost.unit}' if cost.unit else ''}", justify="right")
    exponents = {(step.cost, step.larger): step.exponent for step in series.steps()}
    for size, row in sorted(series.rows.items()):
        table.add_row(f"{size:,.0f}", *(_cell(row[cost.name], exponents.get((cost.name, size))) for cost in series.costs))
    console.print(table)
    console.print("(in brackets: the exponent of the step from the size above)\n")


def _cell(value: float, exponent: float | None) -> str:
    shown = f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.3f}"
    return shown if exponent is None else f"{shown} ({exponent:.2f})"


if __name__ == "__main__":
    sys.exit(main())
