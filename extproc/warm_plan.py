"""Which two workers meet next, and which workers are warm: pure, so that it can be asked about any pool.

A pair has met when a handoff went from the one to the other. In a small pool (at most ``partners`` workers in each role) the
warm workers are those of which every prefill has met every decode worker, so that no client ever pays for a first transfer. It
grows by one worker at a time, and the first pair is enough to begin. In a larger pool one meeting makes a worker warm.

A worker with nobody to meet is not warm, and nothing is held against it either.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import NamedTuple, Protocol

import msgspec

from extproc.config import WarmUp

_BACKOFF_S = 1.0
_BACKOFF_MAX_S = 30.0
_NOTHING_LEFT_S = 5.0
"""How long after a look in vain the pairs of a large pool are gone through again."""


class Link(NamedTuple):
    """Two workers between which KV can pass, both ``ip:port``."""

    prefill: str
    decode: str


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """A live worker, as far as it matters whom it can meet."""

    address: str
    prefill: frozenset[int] = frozenset()
    """Policies under which it prefills, by their place; none: it is no prefill worker."""
    decode: frozenset[int] = frozenset()
    """Policies under which it decodes."""
    models: frozenset[str] | None
    """None: nobody knows."""


class _Tries(msgspec.Struct):
    """Failures of a pair since it last met."""

    reason: str
    count: int = 0
    next_s: float = 0.0
    given_up: bool = False


class Cold(msgspec.Struct, frozen=True):
    """A pair that failed, for people."""

    prefill: str
    decode: str
    failures: int
    given_up: bool
    reason: str


class Acquaintances(Protocol):
    """Who has met whom: a handoff between them went well, and none has failed since."""

    def met(self, prefill: str, decode: str) -> bool:
        """Whether the two have."""
        ...

    def decodes_of(self, prefill: str) -> Set[str]:
        """Whom a prefill worker has met."""
        ...

    def prefills_of(self, decode: str) -> Set[str]:
        """Whom a decode worker has met."""
        ...


class Plan:
    """Told what happens; asked what to do. Who has met whom is the only thing that it does not know itself."""

    def __init__(
        self,
        settings: WarmUp,
        pairs: Acquaintances,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """``jitter`` gives numbers from 0 to 1."""
        self._settings = settings
        self._pairs = pairs
        self._met = pairs.met
        self._jitter = jitter
        self._decodes_of: dict[str, list[str]] = {}
        self._prefills_of: dict[str, list[str]] = {}
        self._tries: dict[Link, _Tries] = {}
        self._known: set[Link] = set()
        """Pairs of a small pool that met since both were new, also if a handoff has failed since."""
        self._busy: dict[str, Link] = {}
        self._void: set[Link] = set()
        """Under way, with a worker that is another one by now."""
        self._background_s = -math.inf
        """When the next two that are warm may meet, in a large pool."""
        self.warm: frozenset[str] = frozenset()
        """Workers that clients' requests may go to."""

    # -- what happens ------------------------------------------------------------------------------------------------------

    def workers(self, live: Sequence[Worker]) -> None:
        """Those that live now."""
        prefills = [(worker.address, (worker.prefill, worker.models)) for worker in live if worker.prefill]
        decodes = [(worker.address, (worker.decode, worker.models)) for worker in live if worker.decode]
        self._decodes_of, self._prefills_of = _partners(prefills, decodes), _partners(decodes, prefills)
        present = {worker.address for worker in live}
        for links in (self._known, self._tries):
            for link in [link for link in links if not present.issuperset(link)]:
                self._drop(link)
        self.look()

    def _drop(self, link: Link) -> None:
        self._known.discard(link)
        self._tries.pop(link, None)

    def renewed(self, address: str) -> None:
        """The engine at ``address`` is a new one: it has met nobody."""
        for link in [link for link in (*self._known, *self._tries) if address in link]:
            self._drop(link)
        if address in self._busy:
            self._void.add(self._busy[address])
        self.look()

    def ended(self, link: Link, reason: str | None, now_s: float) -> bool:
        """A meeting is over; ``reason``: why it failed. Whether the pair is given up, which it was not before.

        ``met`` says the same of a pair before this is called.
        """
        void = link in self._void
        self._void.discard(link)
        for address in link:
            self._busy.pop(address, None)
        given_up = False
        if reason is None:
            self._tries.pop(link, None)
        elif not void:
            tries = self._tries.setdefault(link, _Tries(reason))
            tries.reason, tries.count = reason, tries.count + 1
            given_up = not tries.given_up and tries.count >= self._settings.attempts
            tries.given_up |= given_up
            pause_s = min(_BACKOFF_S * 2.0 ** min(tries.count - 1, 10), _BACKOFF_MAX_S)
            tries.next_s = now_s + (self._settings.retry_s if tries.given_up else pause_s) * (0.75 + 0.5 * self._jitter())
        self.look()
        return given_up

    def is_void(self, link: Link) -> bool:
        """Whether one of the two was replaced while they met."""
        return link in self._void

    # -- who is warm -------------------------------------------------------------------------------------------------------

    @property
    def small(self) -> bool:
        """Whether everybody is to meet everybody."""
        return max(len(self._decodes_of), len(self._prefills_of)) <= self._settings.partners

    def has_partners(self, address: str) -> bool:
        """Whether there is somebody for it to meet."""
        return address in self._decodes_of or address in self._prefills_of

    def links(self) -> Iterator[Link]:
        """All pairs of live workers."""
        return (Link(prefill, decode) for prefill, decodes in self._decodes_of.items() for decode in decodes)

    def look(self) -> None:
        """Work out anew who is warm; to be called when ``met`` may say something else."""
        self.warm = frozenset(self._all_met() if self.small else self._some_met())

    def _all_met(self) -> set[str]:
        met = [link for link in self.links() if self._met(*link)]
        self._known.update(met)
        # Those that are warm already stay so: it is the newcomer that has to meet them.
        met.sort(key=lambda link: sum(address not in self.warm for address in link))
        found: set[str] = set()
        for link in met:
            new = set(link) - found
            if new and all(self._fits(address, found | new) for address in new):
                found |= new
        return found

    def _fits(self, address: str, among: set[str]) -> bool:
        """Whether it has met all its partners ``among`` those; a pair that is given up is not waited for."""
        return all(self._settled(Link(address, each)) for each in self._decodes_of.get(address, ()) if each in among) and all(
            self._settled(Link(each, address)) for each in self._prefills_of.get(address, ()) if each in among
        )

    def _settled(self, link: Link) -> bool:
        tries = self._tries.get(link)
        return link in self._known or (tries is not None and tries.given_up)

    def _some_met(self) -> Iterator[str]:
        for address in {**self._decodes_of, **self._prefills_of}:
            if any(each in self._prefills_of for each in self._pairs.decodes_of(address)) or any(
                each in self._decodes_of for each in self._pairs.prefills_of(address)
            ):
                yield address

    # -- who is next -------------------------------------------------------------------------------------------------------

    def next(self, now_s: float) -> list[Link]:
        """Pairs to let meet now; they count as under way until :meth:`ended`."""
        found: list[Link] = []
        room = self._settings.concurrency - len(set(self._busy.values()))
        if room <= 0:
            return found
        for link in self._wanted(now_s):
            if any(address in self._busy for address in link) or not self._due(link, now_s):
                continue
            self._busy.update(dict.fromkeys(link, link))
            found.append(link)
            if not self.small and self.warm.issuperset(link):
                self._background_s = now_s + 1.0 / self._settings.background_per_s
            if len(found) >= room:
                break
        return found

    def _due(self, link: Link, now_s: float) -> bool:
        tries = self._tries.get(link)
        return (tries is None or tries.next_s <= now_s) and not self._met(*link)

    def _wanted(self, now_s: float) -> Iterable[Link]:
        """The most wanted first; not all of them are free."""
        return self._wanted_of_few() if self.small else self._wanted_of_many(now_s)

    def _wanted_of_few(self) -> list[Link]:
        """A new worker with a warm one, then two new ones, then those that only have to meet again; trouble last."""

        def rank(numbered: tuple[int, Link]) -> tuple[int, int, int]:
            place, link = numbered
            tries = self._tries.get(link)
            warm = sum(address in self.warm for address in link)
            return (0 if tries is None else tries.count, (1, 0, 2)[warm], place)

        # Along the diagonals: then the first few are pairs of different workers.
        numbered = [
            (turn * len(self._decodes_of) + place, link)
            for place, (prefill, decodes) in enumerate(self._decodes_of.items())
            for turn in range(len(decodes))
            if not self._met(*(link := Link(prefill, decodes[(place + turn) % len(decodes)])))
        ]
        return [link for _, link in sorted(numbered, key=rank)]

    def _wanted_of_many(self, now_s: float) -> Iterator[Link]:
        """Each new worker with one other, if that is new too so much the better; the others at their pace."""
        for new_too in (True, False):
            for place, (prefill, decodes) in enumerate(self._decodes_of.items()):
                if prefill in self.warm or prefill in self._busy:
                    continue
                for decode in _from(decodes, place):
                    if prefill in self._busy:
                        break
                    if (decode not in self.warm) is new_too:
                        yield Link(prefill, decode)
        for place, (decode, prefills) in enumerate(self._prefills_of.items()):
            if decode in self.warm:
                continue
            for prefill in _from(prefills, place):
                if decode in self._busy:
                    break
                yield Link(prefill, decode)
        for place, (decode, prefills) in enumerate(self._prefills_of.items()):
            if decode not in self.warm or decode in self._busy:
                continue
            for prefill in _from(prefills, place, self._settings.partners):
                if now_s < self._background_s:
                    return
                yield Link(prefill, decode)
        self._background_s = max(self._background_s, now_s + _NOTHING_LEFT_S)

    # -- for people --------------------------------------------------------------------------------------------------------

    def counts(self) -> tuple[int, int]:
        """Pairs of live workers that have met, and all there are."""
        total = sum(len(decodes) for decodes in self._decodes_of.values())
        met = sum(each in self._prefills_of for prefill in self._decodes_of for each in self._pairs.decodes_of(prefill))
        return met, total

    def failing(self) -> list[Cold]:
        """Pairs that do not work, the worst first."""
        found = [Cold(*link, each.count, each.given_up, each.reason) for link, each in self._tries.items()]
        return sorted(found, key=lambda each: (-each.failures, each.prefill, each.decode))

    def why_cold(self) -> Mapping[str, str]:
        """Workers that are not warm and have failed to meet somebody -> why, in the last of their failures."""
        found: dict[str, str] = {}
        for link, tries in self._tries.items():
            for address in link:
                if address not in self.warm:
                    other = link.decode if address == link.prefill else link.prefill
                    found[address] = f"with {other}: {tries.reason}"
        return found


_Kind = tuple[frozenset[int], frozenset[str] | None]
"""Policies and models of a worker in one role."""


def _partners(workers: Sequence[tuple[str, _Kind]], others: Sequence[tuple[str, _Kind]]) -> dict[str, list[str]]:
    """Whom each of ``workers`` can meet, for those that can meet anybody. Those of one kind share a list."""
    kinds: dict[_Kind, list[str]] = {}
    for address, kind in others:
        kinds.setdefault(kind, []).append(address)
    everybody = {address for address, _ in others}
    shared: dict[_Kind, list[str]] = {}
    found: dict[str, list[str]] = {}
    for address, kind in workers:
        if kind not in shared:
            shared[kind] = [other for theirs in kinds if _fit(kind, theirs) for other in kinds[theirs]]
        partners = shared[kind]
        if address in everybody:
            partners = [other for other in partners if other != address]
        if partners:
            found[address] = partners
    return found


def _fit(one: _Kind, other: _Kind) -> bool:
    """Whether a prompt may have both."""
    (policies, models), (other_policies, other_models) = one, other
    common = models is None or other_models is None or not models.isdisjoint(other_models)
    return common and not policies.isdisjoint(other_policies)


def _from(addresses: Sequence[str], place: int, most: int | None = None) -> Iterator[str]:
    """All of them, or so many, from ``place`` on and around."""
    count = len(addresses)
    return (addresses[(place + step) % count] for step in range(count if most is None else min(most, count)))
