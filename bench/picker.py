"""What a decision costs with 1,000 workers: submit() and poll(), against weighing every pair.

``python -m bench.picker``. Prompts have 12K tokens, of which some worker of each role holds two thirds, and all of them the
system prompt. The naive time is that of weighing all pairs of the same pool in the same run, measured on a part of them. All
times are processor time, so that other processes do not count.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import random
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from extproc.routing.endpoint_spec import EndpointSet, EndpointSpec
from extproc.routing.job import Aims, Job, Mode
from extproc.routing.pool import Pool, Role
from extproc.routing.prefix import Chain
from extproc.routing.router import Router
from extproc.routing.settings import Routing
from extproc.routing.ticket import State, Ticket

_TOKENS = 12_000
_BLOCK_TOKENS = 64
_SYSTEM_BLOCKS = 16
_KNOWN_BLOCKS = 125
"""Of a conversation, the system prompt included; the rest of each prompt is new."""
_CONVERSATIONS = 1_000
_DECODING = 1_000
"""Requests that stream at any time."""
_NAIVE_PREFILLS = 5
"""So many prefill workers are weighed with all decode workers; all of them would take seconds for each prompt."""
_BASELINE = "every pair"


class _Times(NamedTuple):
    """Of one line, in seconds."""

    name: str
    took_s: list[float]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2_000, help="decisions a line")
    arguments = parser.parse_args()
    console = Console()
    for prefill, decode in ((500, 500), (200, 800)):
        table = Table(title=f"{prefill} prefill and {decode} decode workers, prompts of {_TOKENS:,} tokens")
        for column in ("", "p50 ms", "p99 ms", "p99.9 ms", f"p50 against {_BASELINE}"):
            table.add_column(column, justify="left" if not column else "right")
        lines = _lines(prefill, decode, arguments.rounds)
        naive_s = _quantile(lines[0].took_s, 0.5)
        for line in lines:
            p50, p99, p999 = (_quantile(line.took_s, part) for part in (0.5, 0.99, 0.999))
            table.add_row(line.name, *(f"{each * 1e3:.3f}" for each in (p50, p99, p999)), f"1/{naive_s / p50:,.0f}")
        console.print(table)


def _lines(prefill: int, decode: int, rounds: int) -> list[_Times]:
    found: list[_Times] = []
    for held, mode in itertools.product((True, False), (Mode.AUTO, Mode.DISAGGREGATE)):
        bench = BusyPool(prefill, decode, Aims(mode=mode, held=held, max_wait_s=1e6))
        if not found:
            found.append(_Times(_BASELINE, bench.naive()))
        name = f"submit, {'held' if held else 'immediate'}, {mode.value}"
        found.append(_Times(name, bench.submits(rounds)))
    slo = BusyPool(prefill, decode, Aims(itl_slo_s=0.05, ttft_slo_s=2.5, max_wait_s=1e6))
    found.append(_Times("submit, held, auto, with SLOs", slo.submits(rounds)))
    waiting = BusyPool(prefill, decode, Aims(mode=Mode.DISAGGREGATE, max_wait_s=1e6))
    joining, polling = waiting.with_waiting(1_000, rounds)
    found.append(_Times("submit, 1,000 wait", joining))
    found.append(_Times("poll after a prefill, 1,000 wait", polling))
    return found


class BusyPool:
    """A pool in the middle of its work, with a clock of its own."""

    def __init__(self, prefill: int, decode: int, aims: Aims) -> None:
        def specs(network: int, count: int) -> tuple[EndpointSpec, ...]:
            return tuple(EndpointSpec(address=f"10.{network}.{i >> 8}.{i & 255}:8000") for i in range(count))

        pool = Pool(EndpointSet(prefill=specs(0, prefill), decode=specs(1, decode)))
        for endpoint in pool.endpoints:
            pool.set_live(endpoint, True)
        self._router = Router(pool, Routing())
        self._random = random.Random(7)  # noqa: S311 (a benchmark)
        self._aims = aims
        self._now_s = 0.0
        # A prefill takes about 0.4 s at first guess: so many come that a third of the workers have work.
        self._gap_s = 0.4 * 3 / prefill
        self._prefilling: deque[Ticket] = deque()
        self._decoding: deque[Ticket] = deque()
        system = [self._random.getrandbits(64) for _ in range(_SYSTEM_BLOCKS)]
        rest = _KNOWN_BLOCKS - _SYSTEM_BLOCKS
        self._chains = []
        for turn in range(_CONVERSATIONS):
            chain = Chain(array("Q", [*system, *(self._random.getrandbits(64) for _ in range(rest))]), float(_BLOCK_TOKENS))
            for role in Role:
                workers = pool.live(role)
                self._router.index.insert(workers[turn % len(workers)].address, chain)
            self._chains.append(chain)

    def naive(self) -> list[float]:
        """Weigh every pair for a few prompts."""
        costs, prefills, decodes = self._router.costs, self._router.pool.live(Role.PREFILL), self._router.pool.live(Role.DECODE)
        some = prefills[:_NAIVE_PREFILLS]
        took = []
        for _ in range(5):
            job = self._job()
            began_s = time.thread_time()
            hits = self._router.index.lookup(job.chain)
            best = min(
                costs.total(job.aims, costs.apart(job, each, other, hits.get(each.address, 0), 0, self._now_s), pressure=0.3)
                for each in some
                for other in decodes
            )
            took.append((time.thread_time() - began_s) * len(prefills) / len(some))
            assert best > 0
        return took

    def submits(self, rounds: int) -> list[float]:
        """One prompt after the other; nobody waits."""
        for _ in range(_DECODING):
            self._one()
        return self._measured(lambda: [self._one() for _ in range(rounds)])

    def with_waiting(self, waiting: int, rounds: int) -> tuple[list[float], list[float]]:
        """Submit and poll while ``waiting`` prompts do so: one ends, the next is placed, another one comes."""
        while len(self._router.queue) < waiting:
            self._submit()
        joining: list[float] = []
        polling: list[float] = []

        def run() -> list[float]:
            for _ in range(rounds):
                self._now_s += self._gap_s
                done = self._prefilling.popleft()
                self._router.prefill_done(done, self._now_s, tokens=_TOKENS)
                self._decoded(done)
                began_s = time.thread_time()
                placed = self._router.poll(self._now_s)
                polling.append(time.thread_time() - began_s)
                self._placed(placed)
                while len(self._router.queue) < waiting:
                    joining.append(self._submit())
            return joining

        return self._measured(run), polling

    def _one(self) -> float:
        self._now_s += self._gap_s
        took_s = self._submit()
        while self._prefilling and self._prefilling[0].sent_s < self._now_s - 0.4:
            done = self._prefilling.popleft()
            self._router.prefill_done(done, self._now_s, tokens=_TOKENS)
            self._decoded(done)
        self._placed(self._router.poll(self._now_s))
        return took_s

    def _submit(self) -> float:
        job = self._job()
        began_s = time.thread_time()
        ticket = self._router.submit(job, self._now_s)
        if self._router.unsettled:
            self._placed(self._router.poll(self._now_s))  # as the filter does
        took_s = time.thread_time() - began_s
        if ticket.state is State.PLACED:
            self._placed([ticket])
        return took_s

    def _placed(self, tickets: Iterable[Ticket]) -> None:
        for ticket in tickets:
            if ticket.prefill is not None:
                self._prefilling.append(ticket)
            else:
                self._decoded(ticket)

    def _decoded(self, ticket: Ticket) -> None:
        self._decoding.append(ticket)
        if len(self._decoding) > _DECODING:
            self._router.finish(self._decoding.popleft(), self._now_s)

    def _job(self) -> Job:
        known = self._random.choice(self._chains).hashes
        new = array("Q", (self._random.getrandbits(64) for _ in range(_TOKENS // _BLOCK_TOKENS - _KNOWN_BLOCKS)))
        return Job(
            model="model",
            chain=Chain(known + new, float(_BLOCK_TOKENS)),
            tokens=_TOKENS,
            aims=self._aims,
            arrived_s=self._now_s,
            deadline_s=self._now_s + 1e6,
            size_bytes=4 * _TOKENS,
        )

    @staticmethod
    def _measured(run: Callable[[], list[float]]) -> list[float]:
        gc.collect()
        gc.freeze()
        try:
            return run()
        finally:
            gc.unfreeze()


def _quantile(took_s: list[float], part: float) -> float:
    ordered = sorted(took_s)
    return ordered[min(int(len(ordered) * part), len(ordered) - 1)]


if __name__ == "__main__":
    main()
