"""Policies of other routers, for comparison in a replay. None of them holds a request: the engines queue."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence

from extproc.replay import Placed, Refused
from extproc.routing.job import Job
from extproc.routing.load import Load

_IMBALANCE = 64
_IMBALANCE_RATIO = 1.5
_MATCH = 0.3
"""The usual settings of cache-aware routers: the longest match goes first from 30 % of the prompt on, unless one worker has 64
requests and half as many more than another."""


class _Pushed(ABC):
    """Requests are placed on arrival."""

    def __init__(self, prefill: Sequence[str], decode: Sequence[str]) -> None:
        self._prefill = prefill
        self._decode = decode
        self._in_flight = dict.fromkeys((*prefill, *decode), 0)
        self._placed: dict[int, Placed] = {}
        self._new: list[tuple[Hashable, Placed | Refused]] = []
        self._turn = 0

    def submit(self, job: Job, now_s: float) -> Hashable:
        """A request came."""
        del now_s
        self._turn += 1
        placed = Placed(self._choose_prefill(job), self._choose_decode())
        for address in placed:
            if address is not None:
                self._in_flight[address] += 1
        self._placed[self._turn] = placed
        self._new.append((self._turn, placed))
        return self._turn

    @abstractmethod
    def _choose_prefill(self, job: Job) -> str: ...

    def _choose_decode(self) -> str:
        return self._decode[self._turn % len(self._decode)]

    def poll(self, now_s: float) -> Sequence[tuple[Hashable, Placed | Refused]]:
        """What was decided."""
        del now_s
        new, self._new = self._new, []
        return new

    def next_wake_s(self) -> float | None:
        """Never."""
        return None

    def prefill_done(self, ticket: Hashable, now_s: float, *, tokens: int, cached_tokens: int) -> None:
        """The prefill worker answered."""
        del now_s, tokens, cached_tokens
        assert isinstance(ticket, int)
        prefill = self._placed[ticket].prefill
        assert prefill is not None
        self._in_flight[prefill] -= 1

    def decode_began(self, ticket: Hashable, now_s: float) -> None:
        """Not used."""
        del ticket, now_s

    def decode_done(self, ticket: Hashable, now_s: float) -> None:
        """The answer is complete."""
        del now_s
        assert isinstance(ticket, int)
        self._in_flight[self._placed.pop(ticket).decode] -= 1

    def on_load(self, address: str, load: Load, now_s: float) -> None:
        """Not used."""
        del address, load, now_s


class Turns(_Pushed):
    """Round robin."""

    def _choose_prefill(self, job: Job) -> str:
        del job
        return self._prefill[self._turn % len(self._prefill)]


class CacheAware(_Pushed):
    """The longest match by what was sent there before, unless the load is very uneven; no match: the one sent least so far.

    It never forgets a block, as the trees of such routers hold far more than a worker does. Decode workers: the less
    busy of two taken by chance.
    """

    def __init__(self, prefill: Sequence[str], decode: Sequence[str], *, seed: int = 0) -> None:
        super().__init__(prefill, decode)
        self._random = random.Random(seed)  # noqa: S311 (a load balancer, not a secret)
        self._sent: dict[str, set[int]] = {address: set() for address in prefill}

    def _choose_prefill(self, job: Job) -> str:
        loads = {address: self._in_flight[address] for address in self._prefill}
        most, least = max(loads.values()), min(loads.values())
        hashes = job.chain.hashes
        known = {address: _match(hashes, sent) for address, sent in self._sent.items()}
        if most - least > _IMBALANCE and most > _IMBALANCE_RATIO * least:
            chosen = min(self._prefill, key=loads.__getitem__)
        elif max(known.values()) > _MATCH * len(hashes):
            chosen = max(self._prefill, key=known.__getitem__)
        else:
            chosen = min(self._prefill, key=lambda address: len(self._sent[address]))
        self._sent[chosen].update(hashes)
        return chosen

    def _choose_decode(self) -> str:
        pair = self._random.sample(self._decode, min(2, len(self._decode)))
        return min(pair, key=self._in_flight.__getitem__)


def _match(hashes: Sequence[int], sent: set[int]) -> int:
    for count, digest in enumerate(hashes):
        if digest not in sent:
            return count
    return len(hashes)
