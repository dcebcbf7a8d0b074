"""What it is worth to know, not guess, what the workers' caches hold: replays of a trace, averaged over chance.

``python -m bench.cache_knowledge``; ``--requests 300 --runs 1`` for a quick look. Who goes where is chaotic, so one replay says
little: each is run several times, with arrivals moved by up to 20 ms, the same for every index. ``--filters`` know nothing of
each other. ``--foreign`` is the share of the requests that somebody else sends to the same workers, in turns, past the filter:
it shows in the workers' reports and in their caches, and is left out of the figures.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table

from extproc.replay import Dispatcher, Placed, Refused, Setup, capacity, replay
from extproc.replay_command import routing_of
from extproc.replay_index import Index, filters
from extproc.replay_peers import Turns
from extproc.routing.job import Aims, Job
from extproc.routing.load import Load
from extproc.routing.settings import Routing
from workers import goodput, traces
from workers.goodput import Summary
from workers.traces import Request

_TRACE = Path(__file__).parent / "traces" / "mooncake_synthetic.jsonl.gz"
_MOVED_S = 0.02
_WIDTH = 110
_AIMS = Aims(ttft_slo_s=goodput.TTFT_SLO_S, itl_slo_s=goodput.ITL_SLO_S)


@dataclass(frozen=True, kw_only=True)
class Question:
    """What to replay."""

    requests: int = 3993
    load: float = 0.9
    """Of the capacity, all requests together."""
    cache_tokens: int = 750_000
    """Of each worker; 750,000 in eight is about a tenth of what the whole synthetic trace uses."""
    host_tokens: int = 0
    """Of the host memory behind the cache of each prefill worker."""
    filters: int = 1
    foreign: float = 0.0
    """Share of the requests that others send."""
    runs: int = 6


class Beside:
    """Our filter, and others that send a share of the requests to the same workers without its knowing."""

    def __init__(self, ours: Dispatcher, theirs: Dispatcher, share: float, seed: int) -> None:
        self._ours, self._theirs = ours, theirs
        self._share = share
        self._rng = random.Random(seed)  # noqa: S311 (not a secret)
        self._of: dict[Hashable, tuple[Dispatcher, Hashable]] = {}
        self._names: dict[tuple[int, Hashable], Hashable] = {}
        self.is_ours: list[bool] = []
        """Of each request, in the order in which they came."""

    def submit(self, job: Job, now_s: float) -> Hashable:
        """A request came."""
        own = self._rng.random() >= self._share
        self.is_ours.append(own)
        to = self._ours if own else self._theirs
        name = len(self.is_ours)
        ticket = to.submit(job, now_s)
        self._of[name], self._names[id(to), ticket] = (to, ticket), name
        return name

    def poll(self, now_s: float) -> Sequence[tuple[Hashable, Placed | Refused]]:
        """What was decided."""
        both = (self._ours, self._theirs)
        return [(self._names.pop((id(to), ticket)), placed) for to in both for ticket, placed in to.poll(now_s)]

    def next_wake_s(self) -> float | None:
        """When poll() should be called although nothing else happens."""
        return self._ours.next_wake_s()

    def prefill_done(self, ticket: Hashable, now_s: float, *, tokens: int, cached_tokens: int) -> None:
        """The prefill worker answered."""
        to, own = self._of[ticket]
        to.prefill_done(own, now_s, tokens=tokens, cached_tokens=cached_tokens)

    def decode_began(self, ticket: Hashable, now_s: float) -> None:
        """The decode worker has read the handoff."""
        to, own = self._of[ticket]
        to.decode_began(own, now_s)

    def decode_done(self, ticket: Hashable, now_s: float) -> None:
        """The answer is complete."""
        to, own = self._of.pop(ticket)
        to.decode_done(own, now_s)

    def on_load(self, address: str, load: Load, now_s: float) -> None:
        """A worker reported."""
        self._ours.on_load(address, load, now_s)


def answer(question: Question, requests: Sequence[Request], index: Index, run: int) -> Summary:
    """One replay of requests that come at their times."""
    draw = random.Random(run)  # noqa: S311 (not a secret)
    moved = sorted((replace(each, at_s=each.at_s + draw.uniform(0, _MOVED_S)) for each in requests), key=lambda each: each.at_s)
    setup = setup_of(question)
    ours, watches = filters(setup, routing_of(Routing(seed=run), setup), index, question.filters)
    both = Beside(ours, Turns(setup.prefill_addresses, setup.decode_addresses), question.foreign, run)
    outcomes = replay(moved, both, setup, lambda _: _AIMS, watches=watches).outcomes
    return goodput.summary([each for each, own in zip(outcomes, both.is_ours, strict=True) if own])


def setup_of(question: Question) -> Setup:
    """The workers, with caches of that size."""
    return Setup.with_caches(question.cache_tokens, question.host_tokens)


def load(question: Question) -> list[Request]:
    """The trace at the rate asked for."""
    requests = traces.load(_TRACE, limit=question.requests)
    return traces.at_rate(requests, question.load * capacity(requests, setup_of(question)))


def as_table(found: dict[Index, list[Summary]]) -> Table:
    """Means over the runs, with the least and the most of goodput and hits."""
    table = Table(box=None, pad_edge=False)
    for title in ("index", "goodput", "hits", "TTFT p50", "TTFT p99", "longest wait"):
        table.add_column(title, justify="left" if title == "index" else "right")
    for index, runs in found.items():
        good, hits, waits = ([getattr(each, name) for each in runs] for name in ("goodput", "hit_ratio", "longest_wait_s"))
        table.add_row(
            index.value,
            f"{fmean(good):.1%} ({min(good):.1%} to {max(good):.1%})",
            f"{fmean(hits):.1%} ({min(hits):.1%} to {max(hits):.1%})",
            f"{fmean(each.ttft_p50_s for each in runs):.2f} s",
            f"{fmean(each.ttft_p99_s for each in runs):.1f} s",
            f"{min(waits):.1f} to {max(waits):.1f} s",
        )
    return table


def main() -> None:
    """Replay, and print a table."""
    usual = Question()
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--requests", type=int, default=usual.requests)
    options.add_argument("--load", type=float, default=usual.load, help="of the capacity")
    options.add_argument("--cache-tokens", type=int, default=usual.cache_tokens, help="of each worker")
    options.add_argument("--host-tokens", type=int, default=usual.host_tokens, help="host memory of each prefill worker")
    options.add_argument("--filters", type=int, default=usual.filters)
    options.add_argument("--foreign", type=float, default=usual.foreign, help="share of requests that others send")
    options.add_argument("--runs", type=int, default=usual.runs)
    options.add_argument("--index", nargs="+", choices=[each.value for each in Index], default=["predicted", "events"])
    given = vars(options.parse_args())
    indexes = [Index(each) for each in given.pop("index")]
    question = Question(**given)
    console, requests = Console(width=_WIDTH), load(question)
    found: dict[Index, list[Summary]] = {}
    for index in indexes:
        for run in range(question.runs):
            console.print(f"{index.value}, run {run + 1} of {question.runs} ...")
            found.setdefault(index, []).append(answer(question, requests, index, run))
    console.print(as_table(found))


if __name__ == "__main__":
    main()
