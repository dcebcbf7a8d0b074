"""What the runs mean: the table, and which of the demands are met. Pure: results in, text out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from bench.routing.policies import BATON, ORACLE, PEERS, PRECISE, ROUND_ROBIN
from bench.routing.run import RunResult
from bench.routing.twin import Twin

WAIT_LIMIT_S = 60.0
"""Baton's default limit of the wait in its queue."""
WAIT_MARGIN_S = 1.0
TWIN_TOLERANCE = 0.10
"""Of the figure itself, not percentage points: a hit ratio of 5 % is met by 4.5 to 5.5 %."""
ORACLE_TOLERANCE = 0.02
"""Of the figure itself, too."""
WORTH = 1.1
BETTER_PEER = {0.5: 1.0, 0.9: 1.3, 1.1: 2.5}
"""Load -> how many times the better peer's goodput Baton's is to be at least."""

_HEADINGS = (
    *(
        "trace",
        "load",
        "policy",
        "goodput",
        "good/s",
        "in time",
        "steady",
        "TTFT p50",
        "p99",
        "ITL p99",
        "hit",
        "spread",
        "alone",
    ),
    *("refused", "failed", "waited", "cores"),
)


@dataclass(frozen=True)
class Verdict:
    """One demand."""

    text: str
    met: bool | None
    """None: the runs that it is about were not made."""

    def __str__(self) -> str:
        return f"{ {True: 'met', False: 'NOT MET', None: 'not run'}[self.met]:8} {self.text}"


def table(results: Iterable[RunResult]) -> Table:
    """A line a run."""
    shown = Table(box=None, pad_edge=False)
    for index, heading in enumerate(_HEADINGS):
        shown.add_column(heading, justify="left" if index in (0, 2) else "right", no_wrap=True)
    for result in results:
        shown.add_row(*cells(result))
    return shown


def cells(result: RunResult) -> list[str]:
    """What the table shows of a run."""
    numbers = result.summary
    return [
        result.trace,
        f"{result.load:g}",
        result.contestant,
        f"{numbers.goodput:.1%}",
        f"{numbers.goodput_per_s:.2f}",
        f"{result.in_time:.1%}",
        f"{result.steady:.1%}",
        f"{numbers.ttft_p50_s:.2f} s",
        f"{numbers.ttft_p99_s:.1f} s",
        f"{numbers.itl_p99_s * 1e3:.0f} ms",
        f"{result.hit_ratio:.1%}",
        f"{result.spread:.2f}",
        str(result.whole),
        str(numbers.refused),
        str(numbers.failed),
        f"{numbers.longest_wait_s:.1f} s",
        f"{sum(result.cores.values()):.2f}",
    ]


def verdicts(results: Sequence[RunResult]) -> list[Verdict]:
    """Every demand, for each trace that was run."""
    found: list[Verdict] = []
    for trace in dict.fromkeys(result.trace for result in results):
        by = {(result.contestant, result.load): result for result in results if result.trace == trace}
        found += [_against_peers(trace, by, load, least) for load, least in BETTER_PEER.items()]
        found.append(_against_round_robin(trace, by))
        found.append(_waits(trace, by))
        found.append(_served(trace, by))
    return found


def _goodput(by: Mapping[tuple[str, float], RunResult], name: str, load: float) -> float | None:
    result = by.get((name, load))
    return None if result is None else result.summary.goodput


def _ratio(one: float, other: float) -> float:
    return one / other if other else math.inf if one else math.nan


def _against_peers(trace: str, by: Mapping[tuple[str, float], RunResult], load: float, least: float) -> Verdict:
    ours = _goodput(by, BATON, load)
    peers = {name: value for name in PEERS if (value := _goodput(by, name, load)) is not None}
    demand = f"{trace}, load {load:g}: goodput of {BATON} at least {least:g} times the better peer's"
    if ours is None or not peers:
        return Verdict(demand, None)
    best = max(peers, key=lambda name: peers[name])
    ratio = _ratio(ours, peers[best])
    return Verdict(f"{demand}: {ratio:.2f} ({ours:.1%} against {peers[best]:.1%} of {best})", ratio >= least)


def _against_round_robin(trace: str, by: Mapping[tuple[str, float], RunResult]) -> Verdict:
    demand = f"{trace}, every load: goodput of {BATON} not below round robin's"
    loads = sorted(load for name, load in by if name == BATON and (ROUND_ROBIN, load) in by)
    if not loads:
        return Verdict(demand, None)
    pairs = [(by[BATON, load].summary.goodput, by[ROUND_ROBIN, load].summary.goodput) for load in loads]
    shown = ", ".join(f"{_ratio(*pair):.2f} at {load:g}" for load, pair in zip(loads, pairs, strict=True))
    return Verdict(f"{demand}: {shown}", all(ours >= theirs for ours, theirs in pairs))


def _waits(trace: str, by: Mapping[tuple[str, float], RunResult]) -> Verdict:
    demand = f"{trace}: no request waits in the queue of {BATON} past its limit of {WAIT_LIMIT_S:g} s"
    waits_s = [result.summary.longest_wait_s for (name, _), result in by.items() if name == BATON]
    if not waits_s:
        return Verdict(demand, None)
    return Verdict(f"{demand}: longest {max(waits_s):.1f} s", max(waits_s) <= WAIT_LIMIT_S + WAIT_MARGIN_S)


def _served(trace: str, by: Mapping[tuple[str, float], RunResult]) -> Verdict:
    demand = f"{trace}: no request of {BATON} fails, nothing is done wrong to an engine"
    ours = [result for (name, _), result in by.items() if name == BATON]
    if not ours:
        return Verdict(demand, None)
    failed, wrong = sum(result.summary.failed for result in ours), sum(sum(result.violations.values()) for result in ours)
    return Verdict(f"{demand}: {failed} failed, {wrong} violations", not failed and not wrong)


def precise_verdicts(results: Sequence[RunResult], twins: Sequence[tuple[RunResult, Twin]]) -> list[Verdict]:
    """Hearing the events is as good as looking into the caches, and worth something. Single runs differ by chance, so the
    replays, several each, say the same beside them."""
    found: list[Verdict] = []
    replays = {(run.trace, run.load, run.contestant): twin for run, twin in twins}
    for trace, load in dict.fromkeys((result.trace, result.load) for result in results):
        by = {result.contestant: result for result in results if (result.trace, result.load) == (trace, load)}
        where = f"{trace}, load {load:g}"
        demand = f"{where}: hit ratio of {PRECISE} at most {ORACLE_TOLERANCE:.0%} below that of the {ORACLE}"
        goodput = f"{where}: goodput of {PRECISE} at least {WORTH:g} times that of {BATON}, which predicts"
        precise, oracle, predicting = by.get(PRECISE), by.get(ORACLE), by.get(BATON)
        if precise and oracle:
            ratio = _ratio(precise.hit_ratio, oracle.hit_ratio)
            text = f"{demand}: {ratio:.3f} ({precise.hit_ratio:.1%} against {oracle.hit_ratio:.1%})"
            found.append(Verdict(text, ratio >= 1 - ORACLE_TOLERANCE))
        else:
            found.append(Verdict(demand, None))
        if precise and predicting:
            ratio = _ratio(precise.summary.goodput, predicting.summary.goodput)
            text = f"{goodput}: {ratio:.2f} ({precise.summary.goodput:.1%} against {predicting.summary.goodput:.1%})"
            found.append(Verdict(text, ratio >= WORTH))
        else:
            found.append(Verdict(goodput, None))
        one, other, third = (replays.get((trace, load, name)) for name in (PRECISE, ORACLE, BATON))
        if one and other:
            ratio = _ratio(one.hit_ratio[1], other.hit_ratio[1])
            found.append(Verdict(f"{demand}, replayed: {ratio:.3f}", ratio >= 1 - ORACLE_TOLERANCE))
        if one and third:
            ratio = _ratio(one.goodput[1], third.goodput[1])
            found.append(Verdict(f"{goodput}, replayed: {ratio:.2f}", ratio >= WORTH))
        found.append(_served(where, {(name, load): by[name] for name in by}))
    return found


def tenant_verdicts(results: Sequence[RunResult], modest: str, share: float) -> list[Verdict]:
    """No tenant starves: the modest one has at least ``share`` of its requests served in time while the other floods."""
    return [
        Verdict(
            f"{result.trace}, {result.contestant}: the modest tenant has at least {share:.0%} goodput beside one that floods: "
            f"{result.by_tenant[modest].goodput:.1%}",
            result.by_tenant[modest].goodput >= share,
        )
        for result in results
        if result.contestant == BATON and modest in result.by_tenant
    ]


def twin_verdicts(pairs: Iterable[tuple[RunResult, Twin]]) -> list[Verdict]:
    """The replay without processes agrees with the run: the run lies in the range of the replays, or at most a tenth of the
    figure outside. They are all draws of the same chance; the run is one, and they are some."""
    found = []
    for result, twin in pairs:
        goodput, hit = result.summary.goodput, result.hit_ratio
        text = (
            f"{result.trace}, load {result.load:g}, {result.contestant}: `baton replay` within {TWIN_TOLERANCE:.0%}: "
            f"goodput {_shown(twin.goodput)} against {goodput:.1%}, hit ratio {_shown(twin.hit_ratio)} against {hit:.1%}"
        )
        found.append(Verdict(text, _agrees(twin.goodput, goodput) and _agrees(twin.hit_ratio, hit)))
    return found


def _agrees(replays: tuple[float, float, float], real: float) -> bool:
    least, _, most = replays
    return least * (1 - TWIN_TOLERANCE) <= real <= most * (1 + TWIN_TOLERANCE)


def _shown(spread: tuple[float, float, float]) -> str:
    least, mean, most = spread
    return f"{mean:.1%} ({least:.1%} to {most:.1%})"


def as_json(results: Iterable[RunResult]) -> list[dict[str, Any]]:
    """All numbers of all runs."""
    return [asdict(result) for result in results]
