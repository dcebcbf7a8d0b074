"""What workers hold of a prompt by their own word, in place of what the index predicts. Pure.

A worker whose events are in step is believed, and what was sent there a moment ago counts beside it. One that has told a part
of what it holds has at least that. Every other one has what is predicted. What a cache server holds comes on top, for the
workers that use it.
"""

from __future__ import annotations

from extproc.routing.cost import Costs
from extproc.routing.hits import NOTHING_BELOW, Below, Hits, Source
from extproc.routing.holdings import Held, Holdings
from extproc.routing.job import Job
from extproc.routing.pool import Pool, Role
from extproc.routing.stores import EVERYONE, Stores
from extproc.routing.token_chain import TokenChain
from extproc.routing.truth import Truth
from extproc.routing.under_way import Sent, UnderWay

_FEW = 8


class Known:
    """Asks those who know."""

    def __init__(self, pool: Pool, costs: Costs, holdings: Holdings, stores: Stores | None = None) -> None:
        self._pool = pool
        self._costs = costs
        self.holdings = holdings
        self.stores = stores
        self.under_way = UnderWay(holdings)
        self.truth = Truth()

    def in_step(self, address: str) -> bool:
        """Whether a worker's own word counts alone."""
        return self.holdings.in_step(address)

    def sent(self, address: str, job: Job, now_s: float) -> Sent | None:
        """A prompt goes to a worker."""
        return None if job.token_chain is None else self.under_way.send(address, job.token_chain, now_s)

    def forget(self, address: str) -> None:
        """The worker is gone, or its engine is a new one."""
        self.under_way.forget(address)
        self.truth.forget(address)

    def hits(self, job: Job, predicted: Hits, now_s: float) -> Hits:
        """In place of ``predicted``. Without the prompt's tokens nothing else is known."""
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
        for address, held in holdings.lookup(chain).items():
            gpu, cpu, disk, lmcache, _ = held
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
                below[address] = self._below(job, address, held, count)
        for address, sent in self.under_way.lookup(chain, job.chain, tokens, now_s):
            count = min(sent, usable if usable is not None else self._usable(address, last, most))
            if count > tokens.get(address, 0):
                tokens[address], sources[address] = count, "placed"
                below.pop(address, None)  # it is computed or loaded by the time that this prompt comes
        if self.stores is not None:
            self._add_stores(job, chain, self.stores, tokens, below, sources, now_s)
        if len(tokens) > _FEW:
            tokens = dict(sorted(tokens.items(), key=lambda each: -each[1]))
        return Hits(tokens, below or NOTHING_BELOW, sources)

    def _usable(self, address: str, last: int, most: int) -> int:
        """Tokens of full blocks of a worker."""
        size = self.holdings.block_tokens(address) or 1
        return min(last // size * size, most)

    def _below(self, job: Job, address: str, held: Held, count: int) -> Below:
        """Of ``held`` the first ``count`` tokens, without those on the GPU."""
        over = held.tokens - count  # what is slowest is left out first
        slow = []
        for amount in (held.lmcache, held.disk, held.cpu):
            used = max(0, amount - over)
            over -= amount - used
            slow.append(used)
        lmcache, disk, cpu = slow
        return self._costs.loading(job, address, cpu, disk, lmcache)

    def _add_stores(
        self,
        job: Job,
        chain: TokenChain,
        stores: Stores,
        tokens: dict[str, int],
        below: dict[str, Below],
        sources: dict[str, Source],
        now_s: float,
    ) -> None:
        found = stores.lookup(chain, job.stored_tokens, now_s)
        if not found:
            return
        everyone = found.get(EVERYONE, 0)
        for endpoint in self._pool.endpoints:
            if Role.PREFILL not in endpoint.roles:
                continue
            server = stores.server_of(endpoint)
            if server is None:
                continue
            count = min(found.get(server, everyone), job.tokens - 1)
            address = endpoint.address
            own = tokens.get(address, 0)
            if count <= own:
                continue
            before = below.get(address, Below())
            tokens[address], sources[address] = count, "cache_server"
            below[address] = self._costs.loading(job, address, before.cpu, before.disk, before.lmcache + count - own)
