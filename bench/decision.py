"""What a decision costs while nobody waits: in a loop, without anything of a request around it.

``python -m bench.decision``. Prompts of 1,000 tokens, two thirds of which were sent before; eight of them are in flight. A line
is one kind of policy: processor time of submit() and note(), and of the whole cycle with the prefill's reply and the end.

The second table is what it costs to ask what workers say they hold (``kv_events``): a lookup for one prompt, of which every
worker holds another share by its own events, in blocks of 16 tokens. ``--lookup-only`` leaves the first table out.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from extproc.config import Config, Workers
from extproc.dispatcher import Dispatcher
from extproc.models import Names
from extproc.observe.logs import make_logger
from extproc.observe.metrics import Metrics
from extproc.routing.endpoint_spec import EndpointSet, EndpointSpec
from extproc.routing.holdings import Holdings
from extproc.routing.job import Aims, Job, Mode
from extproc.routing.pool import Pool
from extproc.routing.prefix import Chain
from extproc.routing.router import Router
from extproc.routing.settings import Routing
from extproc.routing.ticket import Ticket
from extproc.routing.token_chain import TokenChain

_TOKENS, _BLOCK_TOKENS = 1_000, 64
_KNOWN_BLOCKS = 10
_CONVERSATIONS = 40
_IN_FLIGHT = 8
_REPEATS = 7
_ENGINE_BLOCK_TOKENS = 16
_LOOKUPS = 30
BUDGET_TOKENS, BUDGET_WORKERS, BUDGET_US = 128_000, 64, 2_000
"""Asking so many workers about a prompt of so many tokens takes no longer."""
_PREFILL_S, _PAUSE_S = 0.05, 0.5
"""How long a prefill takes, and until the next prompt comes then, on the router's clock: nobody has to wait."""

POLICIES = {
    "held, weighed, handed over": Aims(threshold_uncached_tokens=1),
    "held, weighed, whole": Aims(threshold_uncached_tokens=1_000_000),
    "held, mode disaggregate": Aims(mode=Mode.DISAGGREGATE),
    "sent at once, mode disaggregate": Aims(mode=Mode.DISAGGREGATE, held=False),
}


class Clock:
    """The router's clock, in seconds. It stands still during a decision."""

    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        """Now."""
        return self.now_s


class Cost(NamedTuple):
    """Microseconds of one decision: the least of several medians, since other work on the machine only adds."""

    submit_us: float
    cycle_us: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; the exit status."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        epilog="example:\n  python -m bench.decision --workers 8",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=1_000, help="decisions a median (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="of each role (default: %(default)s)")
    parser.add_argument("--lookup-only", action="store_true", help="only what asking workers' own words costs")
    given = parser.parse_args(arguments)
    for name in ("rounds", "workers"):
        if getattr(given, name) < 1:
            parser.error(f"--{name}: {getattr(given, name)} is not at least 1")
    if not given.lookup_only:
        table = Table(
            "policy", "submit, note", "with prefill done, finish", title=f"{given.workers} + {given.workers} workers, µs"
        )
        with Console(stderr=True).status("deciding"):
            for name, aims in POLICIES.items():
                found = measure(aims, given.workers, given.rounds)
                table.add_row(name, f"{found.submit_us:.1f}", f"{found.cycle_us:.1f}")
        Console().print(table)
    table = Table("prompt tokens", "workers", "predicted", "their own words", "first time", title="who holds what, µs a prompt")
    missed = False
    with Console(stderr=True).status("asking"):
        for tokens in (1_000, 16_000, BUDGET_TOKENS):
            for workers in (8, BUDGET_WORKERS):
                lookup = measure_lookup(tokens, workers)
                row = (lookup.predicted_us, lookup.told_us, lookup.first_us)
                table.add_row(f"{tokens:,}", str(workers), *(f"{each:,.0f}" for each in row))
                missed |= tokens == BUDGET_TOKENS and lookup.told_us > BUDGET_US
    Console().print(table)
    if missed:
        Console(stderr=True).print(f"more than {BUDGET_US:,} µs for {BUDGET_TOKENS:,} tokens", style="red")
    return int(missed)


class Lookup(NamedTuple):
    """Microseconds of finding out who holds a prompt, the least of several."""

    predicted_us: float
    """By the index over text alone."""
    told_us: float
    """By what workers say, beside that."""
    first_us: float
    """The same with the keys of the prompt's blocks, which are made once a prompt, and off the event loop."""


def measure_lookup(tokens: int, workers: int) -> Lookup:
    """One prompt in a pool of so many workers, half of them of each role."""
    clock, chance = time.perf_counter, random.Random(3)  # noqa: S311 (a benchmark)
    ids = array("I", (chance.randrange(150_000) for _ in range(tokens)))
    text = Chain(array("Q", (chance.getrandbits(64) for _ in range(tokens // _BLOCK_TOKENS))), float(_BLOCK_TOKENS))
    count = max(1, workers // 2)
    pool = pool_of(count)
    holdings = Holdings(workers * (tokens // _ENGINE_BLOCK_TOKENS) + 1_000)
    keys = TokenChain(ids).keys(_ENGINE_BLOCK_TOKENS)
    routers = {"predicted": Router(pool, Routing()), "told": Router(pool, Routing(), holdings=holdings)}
    for number, endpoint in enumerate(pool.endpoints):
        blocks = max(1, len(keys) * (number + 1) // workers)
        source = holdings.source(endpoint.address)
        source.cleared()
        source.stored(list(keys[:blocks]), None, ids[: blocks * _ENGINE_BLOCK_TOKENS], _ENGINE_BLOCK_TOKENS)
        for router in routers.values():
            router.index.insert(endpoint.address, text, max(1, len(text.hashes) * (number + 1) // workers))

    def took_us(router: Router, chain: TokenChain | None) -> float:
        job = Job(model=None, chain=text, token_chain=chain, tokens=tokens, aims=Aims(), arrived_s=0.0, deadline_s=0.0)
        began = clock()
        router.scales.hits(Ticket(job))
        return (clock() - began) * 1e6

    known = TokenChain(ids)
    known.keys(_ENGINE_BLOCK_TOKENS)
    rounds = range(_LOOKUPS)
    return Lookup(
        min(took_us(routers["predicted"], None) for _ in rounds),
        min(took_us(routers["told"], known) for _ in rounds),
        min(took_us(routers["told"], TokenChain(ids)) for _ in rounds),
    )


def measure(aims: Aims, workers: int, rounds: int) -> Cost:
    """One policy in a pool of so many workers of each role."""
    now = Clock()
    dispatcher, jobs = dispatcher_of(workers, now), jobs_of(aims)
    found = [one(dispatcher, [next(jobs) for _ in range(rounds)], now) for _ in range(_REPEATS)]
    return Cost(min(each.submit_us for each in found), min(each.cycle_us for each in found))


def one(dispatcher: Dispatcher, jobs: list[Job], now: Clock) -> Cost:
    """The medians of these prompts, one after the other."""
    submits, cycles, clock = [], [], time.perf_counter
    flying: deque[tuple[Ticket, float]] = deque()
    gc.collect()
    gc.disable()
    for job in jobs:
        job.arrived_s, job.deadline_s = now.now_s, now.now_s + 600.0
        began = clock()
        ticket = dispatcher.submit(job)
        dispatcher.note(ticket, "r-1")
        submit_s = clock() - began
        now.now_s += _PREFILL_S
        began = clock()
        if ticket.prefill is not None:
            dispatcher.prefilled(ticket, tokens=job.tokens, cached_tokens=0, engine_id="engine")
        flying.append((ticket, submit_s + clock() - began))
        submits.append(submit_s)
        now.now_s += _PAUSE_S
        if len(flying) > _IN_FLIGHT:
            over, before = flying.popleft()
            began = clock()
            dispatcher.finish(over)
            cycles.append(before + clock() - began)
    gc.enable()
    for over, _ in flying:
        dispatcher.finish(over)
    return Cost(statistics.median(submits) * 1e6, statistics.median(cycles or [0.0]) * 1e6)


def dispatcher_of(workers: int, clock: Callable[[], float]) -> Dispatcher:
    """With so many workers of each role, all of them live."""
    config = Config(workers=Workers(prefill=["10.0.0.1:8000"], decode=["10.1.0.1:8000"]))
    return Dispatcher(
        Router(pool_of(workers), Routing()),
        names=Names(config.models),
        metrics=Metrics(),
        log=make_logger("critical"),
        longest_request_s=86_400.0,
        clock=clock,
    )


def pool_of(workers: int) -> Pool:
    """The same without anything around them."""

    def specs(network: int) -> tuple[EndpointSpec, ...]:
        return tuple(EndpointSpec(address=f"10.{network}.0.{number + 1}:8000") for number in range(workers))

    pool = Pool(EndpointSet(prefill=specs(0), decode=specs(1)))
    for endpoint in pool.endpoints:
        pool.set_live(endpoint, True)
    return pool


def jobs_of(aims: Aims) -> Iterator[Job]:
    """Prompts without end, of a few conversations in turn. When they came is left open."""
    chance = random.Random(7)  # noqa: S311 (a benchmark)
    known = [array("Q", (chance.getrandbits(64) for _ in range(_KNOWN_BLOCKS))) for _ in range(_CONVERSATIONS)]
    while True:
        for hashes in known:
            new = array("Q", (chance.getrandbits(64) for _ in range(_TOKENS // _BLOCK_TOKENS - _KNOWN_BLOCKS)))
            yield Job(
                model=None,
                chain=Chain(hashes + new, float(_BLOCK_TOKENS)),
                tokens=_TOKENS,
                aims=aims,
                arrived_s=0.0,
                deadline_s=0.0,
            )


if __name__ == "__main__":
    raise SystemExit(main())
