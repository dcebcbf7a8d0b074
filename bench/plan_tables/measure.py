"""A row's goodput: the highest rate at which nine in ten requests are within the limits, once with both, once without ITL."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from bench.plan_tables import published
from bench.plan_tables.cluster import Row
from extproc.plan.goodput_search import Highest, Stretch, good_share, highest_rate
from extproc.plan.simulate import Simulated, Slos, simulate
from workers.traces import BLOCK_TOKENS, Request

SLOS = Slos(published.TTFT_SLO_S, published.ITL_SLO_S)
_PRIMED_A_WORKER_PER_S = 1 / 3
"""Prefixes a second and worker by which caches are filled first: slowly enough that nothing queues."""
_PRIMER_ANSWER = 2
"""Tokens; an answer of one is not handed over, and no prefill worker would have seen the prompt."""
_SETTLE_S = 10.0
_LOWEST_PER_S = 0.2
_FEWEST = 8
"""A rate below, or one at which fewer requests than these are counted, is called none."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What one way to count says."""

    rate_per_s: float
    share: float
    ttft_mean_s: float
    ttft_p50_s: float
    itl_p99_s: float
    """Of all gaps between tokens."""
    hits: float
    """Prompt tokens that came from a cache, of all."""
    prefill_busy: float | None
    link_busy: float | None
    kv_peak: float


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A row's result."""

    key: str
    both: Reading
    """Within both limits."""
    ttft_only: Reading
    """Within that of the time to the first token."""
    simulations: int
    cpu_s: float


def measure(row: Row, stretch: Stretch, *, seed: int, resolution: float, say: Callable[[str], None]) -> Measured:
    """Search both rates; runs are shared between the two searches."""
    began_s = time.process_time()
    runs: dict[float, Simulated] = {}

    def run(rate_per_s: float) -> Simulated:
        if rate_per_s not in runs:
            runs[rate_per_s] = run_at(row, rate_per_s, stretch, seed=seed)
            found = runs[rate_per_s]
            say(f"{row.key}: at {rate_per_s:.2f} requests/s {found.goodput:.0%} within both limits")
        return runs[rate_per_s]

    def search(itl_slo_s: float, guess_per_s: float) -> Highest:
        return highest_rate(
            lambda rate_per_s: good_share(run(rate_per_s).outcomes, ttft_slo_s=published.TTFT_SLO_S, itl_slo_s=itl_slo_s),
            guess_per_s=guess_per_s,
            lowest_per_s=max(_LOWEST_PER_S, _FEWEST / stretch.counted_s),
            resolution=resolution,
            step=1.15,
        )

    both = search(published.ITL_SLO_S, row.guess_per_s)
    ttft_only = search(math.inf, row.guess_per_s)
    return Measured(
        key=row.key,
        both=_reading(both, runs),
        ttft_only=_reading(ttft_only, runs),
        simulations=len(runs),
        cpu_s=round(time.process_time() - began_s, 1),
    )


def run_at(row: Row, rate_per_s: float, stretch: Stretch, *, seed: int) -> Simulated:
    """One run at a rate: caches are filled first, then requests come, and those of the middle are counted."""
    requests = row.workload.requests(rate_per_s, stretch.duration_s, seed)
    primer = _primer(row)
    begin_s = primer[-1].at_s + _SETTLE_S if primer else 0.0
    shifted = [replace(each, at_s=each.at_s + begin_s) for each in requests]
    first_s, last_s = begin_s + stretch.warm_up_s, begin_s + stretch.warm_up_s + stretch.counted_s
    return simulate(
        row.arrangement,
        [*primer, *shifted],
        SLOS,
        seed=seed,
        aims=row.aims,
        counted=lambda outcomes: [each for each in outcomes if first_s <= each.arrived_s < last_s],
    )


def _primer(row: Row) -> list[Request]:
    """The shared prefixes, one after the other, before the requests that are counted: caches are warm on a usual day.

    Where workers get requests by turns, each prefix comes as often as there are workers, so that each has seen it.
    """
    workload, arrangement = row.workload, row.arrangement
    if not workload.prefix_share or not arrangement.prefix_caching:
        return []
    seen: dict[int, Request] = {}
    for request in workload.requests(1.0, 20.0 * workload.prefix_groups, 0):
        seen.setdefault(request.hash_ids[0], request)
    workers = arrangement.decode if arrangement.colocated else arrangement.prefill
    times = workers if arrangement.colocated else 1
    each_s = 1 / (workers * _PRIMED_A_WORKER_PER_S)
    primer: list[Request] = []
    for request in seen.values():
        tokens = workload.shared_tokens(request)
        for _ in range(times):
            ids = request.hash_ids[: tokens // BLOCK_TOKENS]
            primer.append(Request(len(primer) * each_s, tokens, _PRIMER_ANSWER, ids))
    return primer


def _reading(found: Highest, runs: Mapping[float, Simulated]) -> Reading:
    if not found.rate_per_s:
        nan = math.nan
        return Reading(
            rate_per_s=0.0,
            share=nan,
            ttft_mean_s=nan,
            ttft_p50_s=nan,
            itl_p99_s=nan,
            hits=nan,
            prefill_busy=None,
            link_busy=None,
            kv_peak=nan,
        )
    run = runs[found.rate_per_s]
    return Reading(
        rate_per_s=found.rate_per_s,
        share=found.share,
        ttft_mean_s=run.ttft_s.mean,
        ttft_p50_s=run.ttft_s.p50,
        itl_p99_s=run.itl_s.p99,
        hits=run.cached_tokens / run.prompt_tokens,
        prefill_busy=run.prefill_busy,
        link_busy=run.link_busy,
        kv_peak=run.kv_peak,
    )
