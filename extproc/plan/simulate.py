"""An arrangement under load: the filter's own router, the twin of the engine, a virtual clock.

What is simulated: queues, batches, chunks, caches and their eviction, preemption, transfers that share links. What is not: the
CPU time of the engines' front ends beside a fixed overhead a step, failures, and the noise of real machines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import msgspec

from extproc.plan.arrangement import Arrangement
from extproc.plan.engines import Engine
from extproc.plan.errors import PlanError
from extproc.replay import Replayed, Setup, replay
from extproc.replay_command import routing_of
from extproc.replay_router import Routed
from extproc.routing.job import Aims, Mode
from extproc.routing.settings import Routing
from workers.goodput import Outcome
from workers.sim.timing import Profile
from workers.sim.twin import TwinConfig
from workers.sim.twin_tier import TierConfig
from workers.traces import BLOCK_TOKENS, Request


@dataclass(frozen=True)
class Slos:
    """What a request is promised."""

    ttft_s: float
    """Longest time to the first token."""
    itl_s: float
    """Largest 99th percentile of the gaps between its tokens."""


@dataclass(frozen=True)
class Quantiles:
    """Of a time, in seconds; NaN where there is none."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """What came of it."""

    arrangement: str
    requests: int
    goodput: float
    """Share of all requests that were served within both limits, 0 to 1."""
    ttft_s: Quantiles
    itl_s: Quantiles
    """Of all gaps between tokens of all requests."""
    itl_p99_s: Quantiles
    """Over requests, of each one's own 99th percentile."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that the worker that prefilled them had in a cache."""
    output_tokens: int
    virtual_s: float
    """From the first arrival to the last answer."""
    prefill_busy: float | None
    """Share of the time in which a prefill worker was in a step, mean of all; None: colocated."""
    decode_busy: float
    """The same of the decode workers, or of those that do both."""
    link_busy: float | None
    """Share of what the decode workers' links can carry that was carried; None: colocated."""
    kv_peak: float
    """Largest share of a decode worker's KV cache that was ever in use."""
    preemptions: int
    outcomes: Sequence[Outcome]
    """In the order of the arrivals."""


def simulate(
    arrangement: Arrangement,
    requests: Sequence[Request],
    slos: Slos,
    *,
    seed: int,
    routing: Routing = Routing(),  # noqa: B008 (frozen)
    aims: Aims | None = None,
    counted: Callable[[Sequence[Outcome]], Sequence[Outcome]] = lambda outcomes: outcomes,
) -> Simulated:
    """Send the requests at their times to the arrangement, behind a filter with ``routing`` and a policy of ``aims``.

    Default aims: the filter's own, with the SLOs; every prompt is handed over, or none where workers are colocated. ``seed`` is
    that of the router; the one of the requests is theirs. ``counted``: which of the outcomes shares and quantiles of times to
    the first token are over, such as those after a warm-up; gaps between tokens are of all.
    Raises PlanError for requests that cannot be served at all.
    """
    if not requests:
        raise PlanError("no requests: the rate or the time is too low for one to come")
    setup = setup_of(arrangement)
    if aims is None:
        mode = Mode.AGGREGATE if arrangement.colocated else Mode.DISAGGREGATE
        aims = Aims(mode=mode, ttft_slo_s=slos.ttft_s, itl_slo_s=slos.itl_s)
    chosen = aims
    dispatcher = Routed(setup, msgspec.structs.replace(_routing_of(arrangement, setup, routing), seed=seed))
    try:
        replayed = replay(requests, dispatcher, setup, lambda _: chosen)
    except ValueError as error:
        raise PlanError(f"arrangement {arrangement.name!r}: {error}") from None
    return _simulated(arrangement, setup, replayed, counted(replayed.outcomes), slos)


def setup_of(arrangement: Arrangement) -> Setup:
    """The workers of an arrangement as a replay has them. Raises PlanError where a role's cache has no room for a block."""
    decode = arrangement.decode_engine
    prefill = decode if arrangement.colocated else arrangement.prefill_engine
    return Setup(
        prefill=arrangement.prefill,
        decode=arrangement.decode,
        engine=_config(arrangement, decode),
        profile=_profile(arrangement, decode),
        prefill_engine=_config(arrangement, prefill),
        prefill_profile=_profile(arrangement, prefill),
        shared_links=True,
        tier=_tier(arrangement),
        all_gaps=True,
    )


def _config(arrangement: Arrangement, engine: Engine) -> TwinConfig:
    blocks = engine.kv_tokens // BLOCK_TOKENS
    if not blocks:
        raise PlanError(f"arrangement {arrangement.name!r}: a KV cache of {engine.kv_tokens} tokens is less than one block")
    return TwinConfig(
        block_tokens=BLOCK_TOKENS,
        num_blocks=blocks,
        max_num_seqs=arrangement.max_num_seqs,
        max_num_batched_tokens=arrangement.chunk_tokens,
        prefix_caching=arrangement.prefix_caching,
        chunked=arrangement.chunked or not arrangement.colocated,
    )


def _tier(arrangement: Arrangement) -> TierConfig | None:
    cache = arrangement.shared_cache
    if cache is None:
        return None
    workers = arrangement.prefill or arrangement.decode
    return TierConfig(
        num_blocks=max(1, cache.capacity_tokens // BLOCK_TOKENS),
        bytes_a_s=cache.bytes_a_s,
        total_bytes_a_s=cache.total_bytes_a_s or workers * cache.bytes_a_s,
        overhead_s=cache.overhead_s,
    )


def _profile(arrangement: Arrangement, engine: Engine) -> Profile:
    """With the arrangement's link, and workers that know each other: a handshake of seconds is over before anyone measures."""
    link = arrangement.link
    if link is None:
        return replace(engine.profile, handshake_s=0.0)
    return replace(
        engine.profile,
        handshake_s=0.0,
        transfer_bytes_a_s=link.worker_bytes_a_s(engine.gpus),
        transfer_overhead_s=link.overhead_s,
    )


def _routing_of(arrangement: Arrangement, setup: Setup, routing: Routing) -> Routing:
    """What an operator would tell the filter of these workers; the rest it learns."""
    return msgspec.structs.replace(
        routing_of(routing, setup), step_tokens=arrangement.chunk_tokens, worker_max_seqs=arrangement.max_num_seqs
    )


def _simulated(
    arrangement: Arrangement, setup: Setup, replayed: Replayed, outcomes: Sequence[Outcome], slos: Slos
) -> Simulated:
    served = [outcome for outcome in outcomes if outcome.ttft_s is not None]
    decodes = [replayed.worked[address] for address in setup.decode_addresses]
    prefills = [replayed.worked[address] for address in setup.prefill_addresses]
    span_s = replayed.virtual_s - (replayed.outcomes[0].arrived_s if replayed.outcomes else 0.0)
    moved_bytes = sum(worked.transferred_bytes for worked in decodes)
    capacity_bytes = len(decodes) * setup.profile.transfer_bytes_a_s * span_s
    return Simulated(
        arrangement=arrangement.name,
        requests=len(outcomes),
        goodput=sum(each.good(slos.ttft_s, slos.itl_s) for each in outcomes) / len(outcomes) if outcomes else math.nan,
        ttft_s=_quantiles((each.ttft_s, 1) for each in served if each.ttft_s is not None),
        itl_s=_quantiles(gap for worked in decodes for gap in worked.gaps),
        itl_p99_s=_quantiles((each.itl_p99_s, 1) for each in served if each.itl_p99_s is not None),
        prompt_tokens=sum(each.input_tokens for each in served),
        cached_tokens=sum(each.cached_tokens for each in served),
        output_tokens=sum(each.output_tokens for each in served),
        virtual_s=span_s,
        prefill_busy=sum(each.busy_s for each in prefills) / len(prefills) / span_s if prefills else None,
        decode_busy=sum(each.busy_s for each in decodes) / len(decodes) / span_s,
        link_busy=moved_bytes / capacity_bytes if prefills else None,
        kv_peak=max(each.kv_peak for each in decodes),
        preemptions=sum(each.preemptions for each in (*prefills, *decodes)),
        outcomes=outcomes,
    )


def _quantiles(weighed: Iterable[tuple[float, int]]) -> Quantiles:
    """Of values with how often each comes: the smallest that the share of all does not exceed."""
    ordered = sorted(weighed)
    total = sum(count for _, count in ordered)
    if not total:
        return Quantiles(math.nan, math.nan, math.nan, math.nan)
    reached, found = 0, {}
    shares = {share: max(1, math.ceil(share * total)) for share in (0.5, 0.9, 0.99)}
    for value, count in ordered:
        reached += count
        for share, needed in shares.items():
            if share not in found and reached >= needed:
                found[share] = value
    mean = sum(value * count for value, count in ordered) / total
    return Quantiles(mean, found[0.5], found[0.9], found[0.99])
