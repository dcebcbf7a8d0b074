"""The order of it all: what is started, which cells are measured when, and what is said meanwhile."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from bench.overhead import bodies, cells, streams, wrk
from bench.overhead.arrangements import ARRANGEMENTS, Arrangement, Site, Way, refused
from bench.overhead.cells import Cell, Sample, Spot, median_cell
from bench.overhead.cpu import Meter, spent
from bench.overhead.options import Options
from bench.overhead.streams import StreamCell, StreamSample, StreamSpot, median_stream_cell
from bench.overhead.workers import Workers
from workers.process import Child
from workers.ready import free_ports, wait_ready

_HOST = "127.0.0.1"
_PROGRESS_S = 10.0
_TRIES = 5
_IDLE_S = 3.0
_WRK_START_S = 0.15
_CLIENT_START_S = 0.6
_WARM_UP = StreamSpot(4, 4, 8)
_START_TIMEOUT_S = 60.0


class Run:
    """What was measured so far. One for a whole bench."""

    def __init__(self, options: Options, directory: Path, said: Callable[[str], None]) -> None:
        self.failures: list[str] = []
        self.idle: dict[str, dict[str, float]] = {}
        self._options = options
        self._directory = directory
        self._say = said
        self._told_s = 0.0
        self._samples: dict[tuple[str, Spot], list[Sample]] = {}
        self._streamed: dict[tuple[str, StreamSpot], list[StreamSample]] = {}
        self._order = random.Random()  # noqa: S311  (nothing is hidden by it)

    @property
    def cells(self) -> list[Cell]:
        """The medians so far, in the order of the tables."""
        found = [median_cell(name, spot, samples) for (name, spot), samples in self._samples.items()]
        return sorted(found, key=lambda cell: (cell.spot, _place(cell.name)))

    @property
    def stream_cells(self) -> list[StreamCell]:
        """The medians so far, in the order of the tables."""
        found = [median_stream_cell(name, spot, samples) for (name, spot), samples in self._streamed.items()]
        return sorted(found, key=lambda cell: (cell.spot, _place(cell.name)))

    def run(self) -> None:
        """All parts. Raises LoadError, TalkError, PartError, OSError, and what starting them can raise."""
        wanted = self._wanted()
        if "requests" in self._options.parts:
            self._requests(wanted)
        if streamed := [each for each in wanted if self._options.stream_spots(each.name)]:
            self._streams(streamed)

    def _wanted(self) -> list[Arrangement]:
        found = []
        for name in self._options.names:
            if (reason := refused(ARRANGEMENTS[name])) is not None:
                self._say(f"{name} is left out: {reason}")
            else:
                found.append(ARRANGEMENTS[name])
        return found

    def _requests(self, wanted: Sequence[Arrangement]) -> None:
        options = self._options
        program = wrk.find_wrk()
        directory = self._folder("requests")
        files = {body_kb: directory / f"bodies-{body_kb}" for body_kb in options.bodies_kb}
        for body_kb, file in files.items():
            wrk.write_bodies(bodies.bodies(body_kb << 10), file)
        with ExitStack() as parts:
            workers = parts.enter_context(Workers(directory))
            site = parts.enter_context(
                Site(wanted, directory, options.peers, prefill=workers.prefill, decode=workers.decode, said=self._say)
            )
            self.failures += site.failures

            def one(way: Way, spot: Spot, seconds: int) -> Sample:
                return cells.measure(way, spot, workers, program=program, bodies=files[spot.body_kb], seconds=seconds)

            first = Spot(min(files), 4)
            ways = [way for way in site.ways if self._works(way, lambda way: one(way, first, 1).faults)]
            self._watch_idle(ways)
            plan = [(way, spot) for way in ways for spot in options.spots(way.arrangement.name)]
            self._announce(len(plan) * options.rounds, options.seconds + _WRK_START_S)
            for number in range(options.rounds):
                self._order.shuffle(plan)
                for done, (way, spot) in enumerate(plan, 1):
                    sample = one(way, spot, options.seconds)
                    self._samples.setdefault((way.arrangement.name, spot), []).append(sample)
                    self._tell(
                        f"  round {number + 1} of {options.rounds}, {done} of {len(plan)}: {way.arrangement.name}, {spot}: "
                        f"{sample.per_s:,.0f}/s"
                    )

    def _streams(self, wanted: Sequence[Arrangement]) -> None:
        options = self._options
        directory = self._folder("streams")
        token_s = options.token_ms / 1e3
        with ExitStack() as parts:
            workers = parts.enter_context(Workers(directory))
            ports = free_ports(len(workers.decode))
            argv = [sys.executable, "-m", "bench.overhead.stream_worker", "--token-ms", str(options.token_ms), *map(str, ports)]
            decode = parts.enter_context(Child("stream-workers", argv, log=directory / "stream-workers.log", grace_s=2.0))
            wait_ready(decode, f"http://{_HOST}:{ports[0]}/health", _START_TIMEOUT_S)
            addresses = [f"{_HOST}:{port}" for port in ports]
            site = parts.enter_context(
                Site(wanted, directory, options.peers, prefill=workers.prefill, decode=addresses, said=self._say)
            )
            self.failures += site.failures
            spots = {spot for each in wanted for spot in options.stream_spots(each.name)} | {_WARM_UP}
            files = {spot: directory / f"bodies-{spot.body_kb}-{spot.tokens}" for spot in spots}
            for spot, file in files.items():
                wrk.write_bodies(bodies.bodies(spot.body_kb << 10, stream=True, max_tokens=spot.tokens), file)
            log = directory / "stream-client.log"

            def one(way: Way, spot: StreamSpot) -> StreamSample:
                return streams.measure(way, spot, [workers.child, decode], bodies=files[spot], token_s=token_s, log=log)

            ways = [way for way in site.ways if self._works(way, lambda way: one(way, _WARM_UP).report.faults)]
            self._watch_idle(ways)
            plan = [(way, spot) for way in ways for spot in options.stream_spots(way.arrangement.name)]
            total = [spot for _, spot in plan for _ in range(options.rounds_of(spot))]
            seconds = sum(spot.tokens * token_s + streams.SPREAD_S + _CLIENT_START_S for spot in total)
            self._announce(len(total), seconds / max(1, len(total)))
            for number in range(options.stream_rounds):
                self._order.shuffle(plan)
                chosen = [(way, spot) for way, spot in plan if number < options.rounds_of(spot)]
                for done, (way, spot) in enumerate(chosen, 1):
                    sample = one(way, spot)
                    self._streamed.setdefault((way.arrangement.name, spot), []).append(sample)
                    self._tell(
                        f"  round {number + 1} of {options.stream_rounds}, {done} of {len(chosen)}: {way.arrangement.name}, "
                        f"{spot}: ITL p99 {sample.report.itl_p99_s * 1e3:.1f} ms"
                    )

    def _folder(self, name: str) -> Path:
        found = self._directory / name
        found.mkdir()
        return found

    def _works(self, way: Way, faults: Callable[[Way], Sequence[str]]) -> bool:
        """Whether it is without faults, at last: health checks have to find their servers first."""
        found: Sequence[str] = ()
        for _ in range(_TRIES):
            found = faults(way)
            if not found:
                return True
        self.failures.append(f"{way.arrangement.name} does not work: {'; '.join(found)}")
        return False

    def _watch_idle(self, ways: Sequence[Way]) -> None:
        meters = {way.arrangement.name: Meter(way.parts) for way in ways if way.parts}
        before = {name: meter.cpu_s() for name, meter in meters.items()}
        time.sleep(_IDLE_S)
        for name, meter in meters.items():
            self.idle[name] = {part: used_s / _IDLE_S for part, used_s in spent(before[name], meter.cpu_s()).items()}

    def _announce(self, number: int, seconds: float) -> None:
        self._say(f"{number} measurements of {seconds:.1f} s: about {max(1, round(number * seconds / 60))} minutes")
        self._told_s = time.monotonic()

    def _tell(self, text: str) -> None:
        if time.monotonic() - self._told_s > _PROGRESS_S:
            self._told_s = time.monotonic()
            self._say(text)


def _place(name: str) -> int:
    return list(ARRANGEMENTS).index(name)
