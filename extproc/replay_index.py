"""How the filter of a replay knows what the workers' caches hold: it predicts, is told by their events, or looks into them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

from extproc.replay import Dispatcher, Setup, Watch, chain_of_ids, tokens_of
from extproc.replay_router import Routed, Several
from extproc.routing.holdings import Held, Holdings, Tier
from extproc.routing.settings import Routing
from extproc.routing.token_chain import TokenChain
from workers.sim.twin import TwinEngine
from workers.sim.twin_cache import Change, Left
from workers.traces import BLOCK_TOKENS

_MAX_BLOCKS = 4_000_000


class Index(StrEnum):
    """What the filter goes by."""

    PREDICTED = "predicted"
    EVENTS = "events"
    ORACLE = "oracle"


class Events(Holdings):
    """The filter's own holdings, fed with the events of the replay's workers."""

    def begin(self, engines: Mapping[str, TwinEngine]) -> None:
        """All caches are empty, and every event from now on is seen."""
        for address in engines:
            self.source(address).cleared()

    def told(self, address: str, changes: Sequence[Change], ids: Mapping[int, int]) -> None:
        """What a worker's events say."""
        source = self.source(address)
        for change in changes:
            tier = Tier.CPU.number if change.below else Tier.GPU.number
            if isinstance(change, Left):
                source.removed([_name(key) for key in change.keys], tier)
                continue
            tokens = [token for key in change.keys for token in tokens_of(ids.get(key, key))]
            before = None if change.before is None else _name(change.before)
            source.stored([_name(key) for key in change.keys], before, tokens, BLOCK_TOKENS, tier=tier)


class Oracle(Holdings):
    """Looks into the caches at the moment of the question."""

    def begin(self, engines: Mapping[str, TwinEngine]) -> None:
        """These are looked into."""
        self._engines = engines

    def told(self, address: str, changes: Sequence[Change], ids: Mapping[int, int]) -> None:
        """It need not be told."""

    def lookup(self, chain: TokenChain) -> dict[str, Held]:
        """What each holds now."""
        keys = chain_of_ids(chain.token_ids[::BLOCK_TOKENS], chain.tokens).hashes
        found = {}
        for address, engine in self._engines.items():
            gpu = engine.cache.match(keys)
            below = 0 if engine.tier is None else engine.tier.match(keys[gpu:])
            if gpu + below:
                found[address] = Held(gpu * BLOCK_TOKENS, below * BLOCK_TOKENS)
        return found

    def in_step(self, address: str) -> bool:
        """Always, and all of them."""
        return address in self._engines

    def addresses(self) -> list[str]:
        """All workers."""
        return list(self._engines)

    def block_sizes(self) -> tuple[int, ...]:
        """Those of the trace."""
        return (BLOCK_TOKENS,)

    def block_tokens(self, address: str) -> int | None:
        """The same, of those there are."""
        return BLOCK_TOKENS if address in self._engines else None


def filters(setup: Setup, routing: Routing, index: Index, count: int = 1) -> tuple[Dispatcher, list[Watch]]:
    """So many filters that know nothing of each other, and who is to be told of the workers' caches."""
    if index is Index.PREDICTED:
        made = [Routed(setup, routing) for _ in range(count)]
        return made[0] if count == 1 else Several(made, routing.seed), []
    kind = Events if index is Index.EVENTS else Oracle
    known = [kind(_MAX_BLOCKS) for _ in range(count)]
    made = [Routed(setup, routing, each) for each in known]
    return made[0] if count == 1 else Several(made, routing.seed), list(known)


def _name(key: int) -> int:
    """As engines call blocks: 64 bits without a sign. Those of answers have keys below zero here."""
    return key & ((1 << 64) - 1)
