"""What workers hold of a prompt by their own word, in place of what the index predicts. Pure.

A worker whose events are in step is believed, and what was sent there a moment ago counts beside it. One that has told a part
of what it holds has at least that. Every other one has what is predicted. What a cache server holds comes on top, for the
workers that use it. Of several engines behind one address see :mod:`extproc.routing.ranks`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from extproc.routing.cost import Costs
from extproc.routing.hits import NOTHING_BELOW, Below, Hits, Named, Source
from extproc.routing.holdings import Held, Holdings
from extproc.routing.job import Job
from extproc.routing.pool import Endpoint, Pool, Role
from extproc.routing.ranks import Spread, cut, delay_s, spread
from extproc.routing.stores import EVERYONE, Stores
from extproc.routing.token_chain import TokenChain
from extproc.routing.truth import Truth
from extproc.routing.under_way import Sent, UnderWay

_FEW = 8


class _Found(NamedTuple):
    """What is found of one prompt, to be completed."""

    tokens: dict[str, int]
    below: dict[str, Below]
    sources: dict[str, Source]

    def put(self, address: str, tokens: int, below: Below | None, source: Source) -> None:
        """In place of what was found of one worker."""
        self.tokens[address], self.sources[address] = tokens, source
        if below is not None and below.tokens:
            self.below[address] = below
        else:
            self.below.pop(address, None)

    def at_once(self, address: str) -> int:
        """In the memory of its GPU."""
        below = self.below.get(address)
        return self.tokens.get(address, 0) - (0 if below is None else below.tokens)


class Known:
    """Asks those who know."""

    def __init__(
        self, pool: Pool, costs: Costs, holdings: Holdings, stores: Stores | None = None, *, predicts: bool = True
    ) -> None:
        """``predicts``: whether predictions count where nobody knows."""
        self._pool = pool
        self.predicts = predicts
        self._costs = costs
        self.holdings = holdings
        self.stores = stores
        self.under_way = UnderWay(holdings)
        self.truth = Truth()

    def in_step(self, address: str) -> bool:
        """Whether a worker's own word counts alone."""
        return self.holdings.in_step(address)

    def several(self, address: str) -> bool:
        """Whether there are several engines behind an address."""
        return len(self.holdings.ranks(address)) > 1

    def sent(self, address: str, job: Job, now_s: float, rank: int | None = None) -> Sent | None:
        """A prompt goes to a worker. ``rank``: the place of the engine that it names there."""
        return None if job.token_chain is None else self.under_way.send(address, job.token_chain, now_s, rank)

    def forget(self, address: str) -> None:
        """The worker is gone, or its engine is a new one."""
        self.under_way.forget(address)
        self.truth.forget(address)

    def hits(self, job: Job, predicted: Hits, now_s: float) -> Hits:
        """In place of ``predicted``. Without the prompt's tokens nothing else is known."""
        if not self.predicts:
            predicted = Hits({})
        chain = job.token_chain
        if chain is None:
            return predicted
        holdings = self.holdings
        in_step, most = holdings.in_step, job.tokens - 1
        sources: dict[str, Source] = {address: "events" for address in holdings.addresses() if in_step(address)}
        tokens = {address: count for address, count in predicted.tokens.items() if address not in sources}
        below: dict[str, Below] = {}
        sizes = holdings.block_sizes()
        # Of a prompt the last token is always computed, and only full blocks are cached.
        last = chain.tokens - job.token_chain_whole
        usable = min(last // sizes[0] * sizes[0], most) if len(sizes) == 1 else None
        ranked = {address: ranks for address in holdings.addresses() if len(ranks := holdings.ranks(address)) > 1}
        several: dict[str, Held] = {}
        sent_there: dict[str, int] = {}
        for address, held in holdings.lookup(chain).items():
            if address in ranked:
                several[address] = held
                continue
            gpu, cpu, disk, lmcache = held[:4]
            count = gpu + cpu + disk + lmcache
            limit = usable if usable is not None else self._usable(address, last, most)
            if count > limit:
                count = limit
            if address not in sources:
                if count <= tokens.get(address, 0):
                    continue
                sources[address] = "events"
            tokens[address] = count
            if gpu < count:
                below[address] = self._below(job, address, cut(held, count))
        for address, sent in self.under_way.lookup(chain, job.chain, tokens, now_s):
            if address in ranked:
                sent_there[address] = max(sent, sent_there.get(address, 0))
                continue
            count = min(sent, usable if usable is not None else self._usable(address, last, most))
            if count > tokens.get(address, 0):
                tokens[address], sources[address] = count, "placed"
                below.pop(address, None)  # it is computed or loaded by the time that this prompt comes
        found = _Found(tokens, below, sources)
        spreads: dict[str, Spread] = {}
        for address in dict.fromkeys((*several, *sent_there)):
            placed = self.under_way.by_rank(chain, address, now_s)
            sent = sent_there.get(address, 0)
            if sent > max(placed.values(), default=0):  # by another router, which does not say
                placed[None] = sent
            limit = usable if usable is not None else self._usable(address, last, most)
            spreads[address] = spread(ranked[address], several.get(address), placed, limit)
            self._add_any(job, address, spreads[address], found)
        stored = {} if self.stores is None else self._add_stores(job, chain, self.stores, found, now_s)
        named = self._name(job, spreads, stored, found, now_s) if spreads and job.takes_rank else {}
        if len(tokens) > _FEW:
            tokens = dict(sorted(tokens.items(), key=lambda each: -each[1]))
        return Hits(tokens, below or NOTHING_BELOW, sources, named)

    def _add_any(self, job: Job, address: str, each: Spread, found: _Found) -> None:
        """A worker with several engines: what any of them holds."""
        held = each.any_of_them
        if held.tokens > found.tokens.get(address, 0):
            below = self._below(job, address, held)
            found.put(address, held.tokens, below, "events" if each.even else "ranks")
        elif address in found.sources and not each.even:
            found.sources[address] = "ranks"  # nothing of the mean is left, but one of them holds some

    def _name(
        self, job: Job, spreads: Mapping[str, Spread], stored: Mapping[str, int], found: _Found, now_s: float
    ) -> dict[str, Named]:
        """The engines that are worth being named; their tokens take the place of what any of them holds."""
        named: dict[str, Named] = {}
        least_s = self._costs.settings.rank_gain_s
        for address, (each, _, placed) in spreads.items():
            endpoint, place = self._pool.get(address), spreads[address].best
            if endpoint is None or not self.in_step(address):
                continue
            held = each[place]
            more = max(0, stored.get(address, 0) - held.tokens)
            below = self._below(job, address, held._replace(lmcache=held.lmcache + more))
            gain_s = self._seconds(job, endpoint, found.tokens.get(address, 0), found.below.get(address))
            gain_s -= self._seconds(job, endpoint, held.tokens + more, below)
            if gain_s >= least_s:
                gain_s -= delay_s(self._costs, self.under_way, job, endpoint, place, len(each), now_s)
            if gain_s >= least_s:
                named[address] = Named(place, max(0, held.gpu - found.at_once(address)))
                source: Source = "cache_server" if more else "placed" if place in placed else "events"
                found.put(address, held.tokens + more, below, source)
        return named

    def _seconds(self, job: Job, endpoint: Endpoint, cached: int, below: Below | None) -> float:
        """Until a worker that has nothing else to do has computed the prompt."""
        load_s = 0.0 if below is None else below.load_s
        return self._costs.prefill_rate(endpoint).seconds(max(job.tokens - cached, 1), cached) + load_s

    def _usable(self, address: str, last: int, most: int) -> int:
        """Tokens of full blocks of a worker."""
        size = self.holdings.block_tokens(address) or 1
        return min(last // size * size, most)

    def _below(self, job: Job, address: str, held: Held) -> Below:
        """Of ``held`` what is not on the GPU."""
        return self._costs.loading(job, address, held.cpu, held.disk, held.lmcache)

    def _add_stores(
        self,
        job: Job,
        chain: TokenChain,
        stores: Stores,
        found: _Found,
        now_s: float,
    ) -> dict[str, int]:
        """Worker -> tokens in the server that it uses."""
        stored: dict[str, int] = {}
        by_server = stores.lookup(chain, job.stored_tokens, now_s)
        if not by_server:
            return stored
        everyone = by_server.get(EVERYONE, 0)
        for endpoint in self._pool.endpoints:
            if Role.PREFILL not in endpoint.roles:
                continue
            server = stores.server_of(endpoint)
            if server is None:
                continue
            count = min(by_server.get(server, everyone), job.tokens - 1)
            address = endpoint.address
            own, stored[address] = found.tokens.get(address, 0), count
            if count <= own:
                continue
            before = found.below.get(address, Below())
            below = self._costs.loading(job, address, before.cpu, before.disk, before.lmcache + count - own)
            found.put(address, count, below, "cache_server")
        return stored
