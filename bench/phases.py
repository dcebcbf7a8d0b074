"""What one request with a handoff costs in the filter's own code, phase by phase, without network and event loop.

``python -m bench.phases``. Each round is one new request that goes through all phases in order: Envoy's messages as bytes,
body, chain, decision, both legs, replies as bytes, metrics, log line. Times are processor time of the thread, less what taking
them costs; a row shows the median of the rounds and its share of the sum.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from bench.phases_world import Sent, World, prompts
from extproc import memory

_DEFAULT_KB = (4, 32, 128, 512)
_DEFAULT_ROUNDS = 300
_WARM_ROUNDS = 20
_LARGEST_KB = 1 << 10
_BESIDE = ("decide: the same with 64 workers", "decide: sent at once, mode disaggregate")
"""Phases that are another way of one that is in the sum."""

_EXAMPLES = """examples:
  python -m bench.phases
  python -m bench.phases --size 4 --size 128 --rounds 1000
  python -m bench.phases --json before.json
  python -m bench.phases --against before.json      # a column with the ratio to an earlier run
"""


class Found(NamedTuple):
    """One phase at one size."""

    p50_us: float
    p90_us: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; the exit status."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=_DEFAULT_ROUNDS, help="requests of each size (default: %(default)s)")
    parser.add_argument(
        "--size", type=int, action="append", metavar="KB", help="of a body; may be given again (default: 4, 32, 128, 512)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured")
    parser.add_argument("--against", type=Path, metavar="FILE", help="show the ratio to what an earlier --json wrote")
    parser.add_argument("--seed", type=int, default=7, help="of the prompts (default: %(default)s)")
    given = parser.parse_args(arguments)
    sizes_kb = given.size or list(_DEFAULT_KB)
    if given.rounds < 1:
        parser.error(f"--rounds: {given.rounds} is not at least 1")
    if wrong := [size for size in sizes_kb if not 1 <= size <= _LARGEST_KB]:
        parser.error(f"--size: {wrong[0]} is not from 1 to {_LARGEST_KB}")
    try:
        before = json.loads(given.against.read_text())["sizes"] if given.against else {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(f"--against: {given.against} cannot be read: {error}")
    memory.keep_freed()  # as the server does
    console, progress = Console(), Console(stderr=True)
    found: dict[int, dict[str, Found]] = {}
    for size_kb in sizes_kb:
        with progress.status(f"{given.rounds} requests of {size_kb} KB"):
            found[size_kb] = measure(size_kb << 10, given.rounds, given.seed)
        console.print(_table(size_kb, found[size_kb], before.get(str(size_kb), {}).get("phases", {})))
    if given.json:
        given.json.write_text(json.dumps(_document(found, given.rounds), indent=1) + "\n")
        progress.print(f"written to {given.json}")
    return 0


def measure(size_bytes: int, rounds: int, seed: int) -> dict[str, Found]:
    """Phase -> its cost, for bodies of about ``size_bytes``."""
    clock = Stopwatch()
    bodies = prompts(size_bytes, random.Random(seed))  # noqa: S311 (a benchmark)
    world = World()
    for number in range(_WARM_ROUNDS + rounds):
        if number == _WARM_ROUNDS:
            clock.took_ns.clear()
        world.serve(Sent(number, next(bodies)), clock)
    found = {}
    for phase, took_ns in clock.took_ns.items():
        ordered = sorted(took_ns)
        p50_ns, p90_ns = statistics.median(ordered), ordered[min(len(ordered) * 9 // 10, len(ordered) - 1)]
        found[phase] = Found(max(p50_ns, 0.0) / 1e3, max(p90_ns, 0.0) / 1e3)
    return found


class Stopwatch:
    """Takes the processor time of calls, by phase."""

    def __init__(self) -> None:
        self.took_ns: dict[str, list[int]] = {}
        spans = []
        for _ in range(5_000):
            began_ns = time.thread_time_ns()
            spans.append(time.thread_time_ns() - began_ns)
        self._own_ns = int(statistics.median(spans))

    def __call__(self, phase: str, work: Callable[[], Any]) -> Any:
        """What ``work`` returns. Several calls under one name in one request are put down one by one: name them apart."""
        began_ns = time.thread_time_ns()
        result = work()
        took_ns = time.thread_time_ns() - began_ns - self._own_ns
        self.took_ns.setdefault(phase, []).append(took_ns)
        return result


def sum_us(found: dict[str, Found]) -> float:
    """Of the phases of one request, in microseconds."""
    return sum(each.p50_us for phase, each in found.items() if phase not in _BESIDE)


def _table(size_kb: int, found: dict[str, Found], before: dict[str, dict[str, float]]) -> Table:
    table = Table(title=f"body of {size_kb} KB", title_justify="left", box=None, pad_edge=False)
    for column in ("phase", "p50 µs", "share", "p90 µs", *(("before µs", "ratio") if before else ())):
        table.add_column(column, justify="left" if column == "phase" else "right")
    total_us = sum_us(found)
    for phase, each in found.items():
        share = "" if phase in _BESIDE else f"{each.p50_us / total_us:.0%}"
        table.add_row(phase, f"{each.p50_us:,.1f}", share, f"{each.p90_us:,.1f}", *_compared(each.p50_us, before.get(phase)))
    earlier = {phase: Found(each["p50_us"], each["p90_us"]) for phase, each in before.items()}
    before_us = {"p50_us": sum_us(earlier)} if before else None
    table.add_row("sum", f"{total_us:,.1f}", "", "", *_compared(total_us, before_us), style="bold")
    return table


def _compared(now_us: float, before: dict[str, float] | None) -> tuple[str, ...]:
    if before is None:
        return ()
    ratio = f"{now_us / before['p50_us']:.2f}" if before["p50_us"] else ""
    return f"{before['p50_us']:,.1f}", ratio


def _document(found: dict[int, dict[str, Found]], rounds: int) -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "rounds": rounds,
        "sizes": {
            str(size_kb): {
                "sum_us": round(sum_us(phases), 2),
                "phases": {
                    name: {key: round(value, 2) for key, value in each._asdict().items()} for name, each in phases.items()
                },
            }
            for size_kb, phases in found.items()
        },
    }


if __name__ == "__main__":
    sys.exit(main())
