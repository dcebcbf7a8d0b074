"""The same requests replayed without processes (``baton replay``), to see whether the fast twin can be trusted.

Who goes where is chaotic: a request that comes some milliseconds earlier finds a prefix that is held, or one that is being
computed, and all that follows is different. So the twin is run many times, each time as inexact as a real run is: arrivals are
moved, messages take longer, and the engines' steps are late by up to what was measured in the run. What is random has another
seed each time. What the replays say is the range of theirs.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import msgspec

from bench.routing.engines import EngineOptions
from bench.routing.policies import BEST, CONTESTANTS
from extproc.replay import Setup, replay
from extproc.replay_command import routing_of
from extproc.replay_index import filters
from extproc.routing.job import Aims, Mode, Objective
from extproc.routing.settings import Routing
from workers import goodput
from workers.traces import Request

REPLAYS = 16
_MOVED_S = 0.02
"""Arrivals are moved by up to so much: how late a request of the bench is sent and read."""
_SLOWEST_HOP_S = 0.01
"""A message from one process to the next takes up to so much: some milliseconds on a busy machine, times the speed."""


@dataclass(frozen=True)
class Twin:
    """What the replays of one run say: of each figure the least, the mean and the most."""

    goodput: tuple[float, float, float]
    hit_ratio: tuple[float, float, float]


def twin_setup(options: EngineOptions) -> Setup:
    """The bench's workers as the replay has them."""
    return Setup.with_caches(options.cache_tokens, options.host_tokens, prefill=options.prefill, decode=options.decode)


def twin(
    name: str, requests: Sequence[Request], setup: Setup, count: int = 1, *, prefill_s: float = 0.0, decode_s: float = 0.0
) -> Twin | None:
    """One of Baton's policies on these requests, with so many filters; None for a peer, which the replay does not have.

    ``prefill_s``, ``decode_s``: how late the steps of the real engines of each role were, in simulated seconds.
    """
    if CONTESTANTS[name].kind != "baton":
        return None
    aims = twin_aims(name)
    found = []
    for seed in range(REPLAYS):
        rng = random.Random(seed)  # noqa: S311 (not a secret)
        moved, inexact = _moved(requests, rng), _inexact(setup, rng, prefill_s, decode_s)
        settings = msgspec.structs.replace(routing_of(Routing(), inexact), seed=seed)
        dispatcher, watches = filters(inexact, settings, CONTESTANTS[name].index, count)
        replayed = replay(moved, dispatcher, inexact, lambda _: aims, watches=watches)
        found.append(goodput.summary(replayed.outcomes))
    return Twin(_spread([each.goodput for each in found]), _spread([each.hit_ratio for each in found]))


def _inexact(setup: Setup, rng: random.Random, prefill_late_s: float, decode_late_s: float) -> Setup:
    """The same draw for both roles: a machine that is late for one is late for the other."""
    share = rng.random()
    step_s = setup.profile.step_overhead_s + share * decode_late_s
    of_prefill = setup.of_prefill[1]
    slower = replace(of_prefill, step_overhead_s=of_prefill.step_overhead_s + share * prefill_late_s)
    hop_s = rng.uniform(setup.hop_s, max(setup.hop_s, _SLOWEST_HOP_S))
    return replace(setup, hop_s=hop_s, profile=replace(setup.profile, step_overhead_s=step_s), prefill_profile=slower)


def _moved(requests: Sequence[Request], rng: random.Random) -> list[Request]:
    return sorted((replace(each, at_s=each.at_s + rng.uniform(0, _MOVED_S)) for each in requests), key=lambda each: each.at_s)


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    return min(values), fmean(values), max(values)


def twin_aims(name: str) -> Aims:
    """The aims of one of Baton's policies, in simulated seconds."""
    if CONTESTANTS[name].fragment == BEST:
        return Aims(ttft_slo_s=goodput.TTFT_SLO_S, itl_slo_s=goodput.ITL_SLO_S)
    return Aims(objective=Objective(name), mode=Mode.DISAGGREGATE, held=False)
