"""What workers hold of one prompt, by whose word, and what has to be loaded before it can be used."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias

from extproc.routing.job import Job
from extproc.routing.pool import Endpoint
from extproc.routing.prefix import Chain

Source: TypeAlias = Literal["events", "ranks", "placed", "cache_server", "predicted"]
"""Whose word it is: the worker's own events; the same, as a mean over its engines, any of which may take the prompt; ours, who
sent it there a moment ago; a cache server's, or what was stored there; the predicting index, over text."""


class Below(NamedTuple):
    """Tokens of a prompt that a worker would load into its GPU's memory instead of computing them."""

    cpu: int = 0
    disk: int = 0
    lmcache: int = 0
    load_s: float = 0.0
    """What loading all of them takes."""
    decode: int = 0
    """Those that a decode worker keeps of the turn before, for this one to read (:mod:`extproc.routing.next_turn`)."""

    @property
    def tokens(self) -> int:
        """All of them."""
        return self.cpu + self.disk + self.lmcache + self.decode


class Named(NamedTuple):
    """One of the engines behind an address, which a request shall go to."""

    rank: int
    """Its place among them, from 0."""
    more_tokens: int
    """On its GPU, over what was expected of whichever the worker's own balancing takes."""


NOTHING_BELOW: Mapping[str, Below] = MappingProxyType({})
_NO_RANKS: Mapping[str, Named] = MappingProxyType({})
_NO_SOURCES: Mapping[str, Source] = MappingProxyType({})


class Hits(NamedTuple):
    """Prompt tokens that workers hold, by address."""

    tokens: dict[str, int]
    """Wherever they lie."""
    below: Mapping[str, Below] = NOTHING_BELOW
    """Of these, what has to be loaded. Workers that would load nothing are not here."""
    sources: Mapping[str, Source] = _NO_SOURCES
    """Whose word counted, where it was not the predicting index."""
    ranks: Mapping[str, Named] = _NO_RANKS
    """Whose tokens these are, of workers with several engines behind their address. Where it is not here, nobody is named."""

    def of(self, endpoint: Endpoint) -> int:
        """In the caches of one."""
        return self.tokens.get(endpoint.address, 0)

    def load_s(self, endpoint: Endpoint) -> float:
        """Loading what one of them has below its GPU's memory."""
        found = self.below.get(endpoint.address)
        return 0.0 if found is None else found.load_s

    def at_once(self, endpoint: Endpoint) -> int:
        """In the memory of its GPU: only that needs no transfer to a decode worker."""
        found = self.below.get(endpoint.address)
        tokens = self.tokens.get(endpoint.address, 0)
        return tokens if found is None else tokens - found.tokens

    def rank(self, address: str) -> int | None:
        """The engine that what goes to one of them has to name for these tokens to be there; None: none."""
        named = self.ranks.get(address)
        return None if named is None else named.rank

    def source(self, address: str) -> Source:
        """Whose word counted for one."""
        return self.sources.get(address, "predicted")

    def below_tokens(self, address: str) -> dict[str, int]:
        """What one of them would load, by tier: `cpu`, `disk`, `lmcache`, `decode`."""
        found = self.below.get(address)
        if found is None:
            return {}
        by_tier = zip(("cpu", "disk", "lmcache", "decode"), (*found[:3], found.decode), strict=True)
        return {tier: tokens for tier, tokens in by_tier if tokens}

    def learned(self, job: Job, address: str, chain: Chain, floor_tokens: int = 0) -> bool:
        """The worker at ``address`` holds ``chain`` now: whether it holds more than before of ``job``, whose hits these are.

        What is not more than ``floor_tokens`` is not entered.
        """
        tokens = self.more(job, address, chain, floor_tokens)
        if not tokens:
            return False
        self.tokens[address] = tokens
        if address in self.sources and isinstance(self.sources, dict):
            self.sources[address] = "placed"
            if isinstance(self.below, dict):
                self.below.pop(address, None)  # it is computed or loaded by the time that this prompt comes
        return True

    def more(self, job: Job, address: str, chain: Chain, floor_tokens: int = 0) -> int:
        """Tokens of ``job`` that a worker which holds ``chain`` has, if that is more than what is known; else 0."""
        own, other, size = job.chain.hashes, chain.hashes, job.chain.block_tokens
        common = min(len(own), len(other))
        held = math.ceil(max(self.tokens.get(address, 0), floor_tokens) / size)
        if held >= common or own[held] != other[held]:
            return 0
        # A hash covers all blocks before its own: from the first that differs on, nothing is common.
        blocks = bisect_left(range(common), True, lo=held + 1, key=lambda index: own[index] != other[index])
        return min(int(blocks * size), job.tokens - 1)
