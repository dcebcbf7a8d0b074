"""``make bench-overhead``: what Baton, or a peer, costs between clients and workers that answer at once."""

from __future__ import annotations

import random
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import msgspec
from rich.console import Console

from bench.overhead import bodies, judge, report, wrk
from bench.overhead.arrangements import ARRANGEMENTS, Arrangement, Site, Way, refused
from bench.overhead.cells import Cell, Sample, Spot, measure, median_cell
from bench.overhead.machine import machine
from bench.overhead.options import Options, OptionsError, parse
from bench.overhead.workers import Workers
from bench.peers import MissingPeerError
from extproc.config import ConfigError
from extproc.stack import UpError
from workers.ready import PartError

_PROGRESS_S = 10.0
_TRIES = 5
_INTERRUPTED = 130


class Bench:
    """What was measured so far, and what is left to say about it."""

    def __init__(self, options: Options, console: Console) -> None:
        self.options = options
        self.failures: list[str] = []
        self._console = console
        self._samples: dict[tuple[str, Spot], list[Sample]] = {}
        self._order = random.Random()  # noqa: S311  (nothing is hidden by it)

    def say(self, text: str) -> None:
        """One line."""
        self._console.print(text, highlight=False, markup=False)

    @property
    def cells(self) -> list[Cell]:
        """The medians so far."""
        found = (median_cell(name, spot, samples) for (name, spot), samples in self._samples.items())
        places = {name: place for place, name in enumerate(ARRANGEMENTS)}
        return sorted(found, key=lambda cell: (cell.spot, places[cell.name]))

    def run(self, directory: Path) -> None:
        """All rounds. Raises LoadError, PartError, OSError and what starting the parts can raise."""
        program = wrk.find_wrk()
        wanted = self._wanted()
        files = self._write_bodies(directory)
        with ExitStack() as parts:
            workers = parts.enter_context(Workers(directory))
            site = parts.enter_context(
                Site(wanted, directory, self.options.peers, prefill=workers.prefill, decode=workers.decode, said=self.say)
            )
            self.failures += site.failures
            working = [way for way in site.ways if self._warm_up(way, workers, program, files)]
            plan = [(way, spot) for way in working for spot in self.options.spots(way.arrangement.name)]
            self._measure(plan, workers, program, files)

    def _wanted(self) -> list[Arrangement]:
        found = []
        for name in self.options.names:
            if (reason := refused(ARRANGEMENTS[name])) is not None:
                self.say(f"{name} is left out: {reason}")
            else:
                found.append(ARRANGEMENTS[name])
        return found

    def _write_bodies(self, directory: Path) -> dict[int, Path]:
        files = {}
        for body_kb in self.options.bodies_kb:
            files[body_kb] = directory / f"bodies-{body_kb}"
            wrk.write_bodies(bodies.bodies(body_kb << 10), files[body_kb])
        return files

    def _warm_up(self, way: Way, workers: Workers, program: str, files: dict[int, Path]) -> bool:
        """Whether a second passes without a fault, at last: health checks have to find their servers first."""
        spot = Spot(min(files), 4)
        for _ in range(_TRIES):
            sample = measure(way, spot, workers, program=program, bodies=files[spot.body_kb], seconds=1)
            if not sample.faults:
                return True
        self.failures.append(f"{way.arrangement.name} does not work: {'; '.join(sample.faults)}")
        return False

    def _measure(self, plan: list[tuple[Way, Spot]], workers: Workers, program: str, files: dict[int, Path]) -> None:
        options = self.options
        total = len(plan) * options.rounds
        self.say(f"{total} measurements of {options.seconds} s: about {total * (options.seconds + 0.2) / 60:.0f} minutes")
        told_s, done = time.monotonic(), 0
        for number in range(options.rounds):
            self._order.shuffle(plan)
            for way, spot in plan:
                sample = measure(way, spot, workers, program=program, bodies=files[spot.body_kb], seconds=options.seconds)
                self._samples.setdefault((way.arrangement.name, spot), []).append(sample)
                done += 1
                if time.monotonic() - told_s > _PROGRESS_S:
                    told_s = time.monotonic()
                    self.say(f"  round {number + 1}, {done} of {total}; {way.arrangement.name}, {spot}: {sample.per_s:,.0f}/s")

    def end(self) -> bool:
        """Tables, verdicts, files. Whether no bar was missed."""
        cells = self.cells
        if not cells:
            return False
        for table in report.request_tables(cells):
            self._console.print(table)
        verdicts = judge.request_verdicts(cells)
        for verdict in verdicts:
            self.say(str(verdict))
        for line in report.fault_lines(cells):
            self.say(f"(!) {line}")
        if self.options.json is not None:
            tree = {
                "machine": machine(),
                "options": {name: str(value) for name, value in vars(self.options).items()},
                "cells": report.as_json(cells),
                "verdicts": [each.as_json() for each in verdicts],
                "failures": self.failures,
            }
            self.options.json.write_bytes(msgspec.json.format(msgspec.json.encode(tree)))
        return all(each.met or each.aim for each in verdicts)


def main(arguments: list[str]) -> int:
    """Returns the exit status: 0; 1 if a bar was missed or something did not run; 2 for options; 130 for Ctrl-C."""
    console = Console(width=150, soft_wrap=True)
    try:
        options = parse(arguments)
    except OptionsError as error:
        console.print(f"bench: {error}", highlight=False, markup=False, style="red")
        return 2
    bench = Bench(options, console)
    status = 0
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        try:
            bench.run(Path(name))
        except KeyboardInterrupt:
            bench.say("\ninterrupted; what there is:")
            status = _INTERRUPTED
        except (PartError, MissingPeerError, ConfigError, UpError, wrk.LoadError, OSError) as error:
            bench.failures.append(str(error))
    met = bench.end()
    for failure in bench.failures:
        bench.say(f"failed: {failure}")
    return status or (1 if bench.failures or (options.judged and not met) else 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
