"""Workers with several engines behind one address, each with a cache of its own: which of them a request names. Pure.

vLLM (``--data-parallel-size``) takes the engine with the fewest requests, whatever its cache holds, unless the request names
one in ``X-data-parallel-rank`` (0.32: v1/engine/core_client.py, DPLBAsyncMPClient.get_core_engine_for_request). So what one
engine holds is there only for a request that names it, and else the mean of what all of them hold is to be expected.

A request that names one forgoes the engines' own balancing. That knows every request at once, and we know what an engine has
from the worker's last report. So an engine is named only where its hit saves more than it has more to do than the others, by
``routing.rank_gain_s``, and never one at which requests wait while none wait at another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from extproc.routing.cost import Costs
from extproc.routing.holdings import Held
from extproc.routing.job import Job
from extproc.routing.pool import Endpoint, Role
from extproc.routing.under_way import UnderWay


class Spread(NamedTuple):
    """What the engines behind one address hold of a prompt, each by its place among them."""

    each: list[Held]
    any_of_them: Held
    """The mean: what is to be expected where nobody is named."""
    placed: frozenset[int]
    """Places whose tokens were sent there a moment ago, and are not told of yet."""

    @property
    def even(self) -> bool:
        """All hold the same, so it does not matter which is taken."""
        return all(held[:4] == self.any_of_them[:4] for held in self.each)

    @property
    def best(self) -> int:
        """The place of the one that holds most; of several the first."""
        return max(range(len(self.each)), key=lambda place: (self.each[place].tokens, self.each[place].gpu, -place))


def spread(ranks: Sequence[int], held: Held | None, placed: Mapping[int | None, int], most: int) -> Spread:
    """``ranks`` of the address, in their order, which is that of their places: vLLM counts the engines of one server from 0,
    also where their ranks begin elsewhere (hybrid load balancing). ``held``: by their events. ``placed``: tokens that were sent
    a moment ago, by the place that was named; None: none was. No more than ``most`` tokens can be used.
    """
    told = {} if held is None else {each.rank: each for each in (held, *held.others)}
    each, sent = [], set()
    for place, rank in enumerate(ranks):
        own = cut(told.get(rank, _NOTHING), most)
        sent_tokens = min(placed.get(place, 0), most)
        if sent_tokens > own.tokens:
            own = Held(sent_tokens)
            sent.add(place)
        each.append(own)
    count = len(each)
    gpu, cpu, disk, lmcache = (sum(column) // count for column in zip(*(held[:4] for held in each), strict=True))
    mean = Held(gpu, cpu, disk, lmcache)
    somewhere = min(placed.get(None, 0), most) - mean.tokens
    if somewhere > 0:
        mean = mean._replace(gpu=mean.gpu + somewhere // count)
    return Spread(each, mean, frozenset(sent))


_NOTHING = Held(0)


def cut(held: Held, most: int) -> Held:
    """The first ``most`` tokens of it; what is slowest is left out first."""
    gpu = min(held.gpu, most)
    cpu = min(held.cpu, most - gpu)
    disk = min(held.disk, most - gpu - cpu)
    return Held(gpu, cpu, disk, min(held.lmcache, most - gpu - cpu - disk))


def delay_s(costs: Costs, under_way: UnderWay, job: Job, endpoint: Endpoint, place: int, count: int, now_s: float) -> float:
    """What a prompt waits longer at one of ``count`` engines of a worker than at the one with the fewest requests, as far as is
    known; infinite where requests wait for that one, and for another one none.

    Of an engine that prefills each request more is a typical prompt; of one that decodes, one sequence more in its batch.
    """
    requests = [float(under_way.named(endpoint.address, each)) for each in range(count)]
    load = endpoint.load
    reported_s = max(endpoint.prefill.external_s, endpoint.decode.external_s)
    if load is not None and len(load.rank_running) == count and now_s - reported_s <= costs.settings.stale_s:
        running, waiting = load.rank_running, load.rank_waiting
        if waiting[place] and not all(waiting):
            return math.inf
        # As vLLM counts: what was sent since the report, or what was reported, whichever is more.
        requests = [max(*each) for each in zip(requests, map(sum, zip(running, waiting, strict=True)), strict=True)]
    more = requests[place] - min(requests)
    if Role.PREFILL in endpoint.roles:
        return more * costs.typical_prefill_s(endpoint)
    return costs.answer_tokens(job) * costs.decode_rate(endpoint).longer_s(more, 0.0, 0.0)
