"""The filter's router as the replay drives it."""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence

from extproc.replay import Placed, Refused, Setup
from extproc.routing.endpoint_spec import EndpointSet, EndpointSpec
from extproc.routing.holdings import Holdings
from extproc.routing.job import Job
from extproc.routing.load import Load
from extproc.routing.picker import NoEndpointError
from extproc.routing.pool import Pool
from extproc.routing.router import Router
from extproc.routing.settings import Routing
from extproc.routing.ticket import RejectedError, State, Ticket


class Routed:
    """A router of its own, with the workers of a replay, all of them live."""

    def __init__(self, setup: Setup, settings: Routing, holdings: Holdings | None = None) -> None:
        """``holdings``: what the workers say they hold; None: that is predicted."""

        def specs(addresses: Sequence[str]) -> tuple[EndpointSpec, ...]:
            return tuple(EndpointSpec(address=address) for address in addresses)

        pool = Pool(EndpointSet(prefill=specs(setup.prefill_addresses), decode=specs(setup.decode_addresses)))
        for endpoint in pool.endpoints:
            pool.set_live(endpoint, True)
        self.router = Router(pool, settings, holdings=holdings)
        self._new: list[tuple[Hashable, Placed | Refused]] = []
        self._undecided: set[Ticket] = set()
        """The router may name a ticket again that was placed when it came; it is passed on once."""

    def submit(self, job: Job, now_s: float) -> Hashable:
        """A request came."""
        try:
            ticket = self.router.submit(job, now_s)
        except (RejectedError, NoEndpointError) as error:
            refused = Ticket(job)
            self._new.append((refused, Refused(_reason(error))))
            return refused
        if ticket.state is State.PLACED:
            self._new.append((ticket, _placed(ticket)))
        else:
            self._undecided.add(ticket)
        return ticket

    def poll(self, now_s: float) -> Sequence[tuple[Hashable, Placed | Refused]]:
        """What was decided."""
        new, self._new = self._new, []
        for ticket in self.router.poll(now_s):
            if ticket in self._undecided:
                self._undecided.remove(ticket)
                new.append((ticket, _placed(ticket)))
        return new

    def next_wake_s(self) -> float | None:
        """When poll() should be called although nothing else happens."""
        return self.router.next_wake_s()

    def prefill_done(self, ticket: Hashable, now_s: float, *, tokens: int, cached_tokens: int) -> None:
        """The prefill worker answered."""
        self.router.prefill_done(_own(ticket), now_s, tokens=tokens, cached_tokens=cached_tokens)

    def decode_began(self, ticket: Hashable, now_s: float) -> None:
        """The decode worker has read the handoff."""
        self.router.answered(_own(ticket), now_s, ok=True)

    def decode_done(self, ticket: Hashable, now_s: float) -> None:
        """The answer is complete."""
        self.router.finish(_own(ticket), now_s)

    def on_load(self, address: str, load: Load, now_s: float) -> None:
        """A worker reported."""
        self.router.on_load(address, load, now_s)


class Several:
    """Filters that know nothing of each other, each with a share of the requests."""

    def __init__(self, filters: Sequence[Routed], seed: int = 0) -> None:
        self._filters = filters
        self._rng = random.Random(seed)  # noqa: S311 (not a secret)
        self._of: dict[Hashable, Routed] = {}

    def submit(self, job: Job, now_s: float) -> Hashable:
        """A request came."""
        one = self._rng.choice(self._filters)
        ticket = one.submit(job, now_s)
        self._of[ticket] = one
        return ticket

    def poll(self, now_s: float) -> Sequence[tuple[Hashable, Placed | Refused]]:
        """What was decided."""
        return [each for one in self._filters for each in one.poll(now_s)]

    def next_wake_s(self) -> float | None:
        """When poll() should be called although nothing else happens."""
        return min((wake_s for one in self._filters if (wake_s := one.next_wake_s()) is not None), default=None)

    def prefill_done(self, ticket: Hashable, now_s: float, *, tokens: int, cached_tokens: int) -> None:
        """The prefill worker answered."""
        self._of[ticket].prefill_done(ticket, now_s, tokens=tokens, cached_tokens=cached_tokens)

    def decode_began(self, ticket: Hashable, now_s: float) -> None:
        """The decode worker has read the handoff."""
        self._of[ticket].decode_began(ticket, now_s)

    def decode_done(self, ticket: Hashable, now_s: float) -> None:
        """The answer is complete."""
        self._of.pop(ticket).decode_done(ticket, now_s)

    def on_load(self, address: str, load: Load, now_s: float) -> None:
        """A worker reported, to all of them."""
        for one in self._filters:
            one.on_load(address, load, now_s)


def _own(ticket: Hashable) -> Ticket:
    assert isinstance(ticket, Ticket)
    return ticket


def _placed(ticket: Ticket) -> Placed | Refused:
    if ticket.error is not None:
        return Refused(_reason(ticket.error))
    assert ticket.decision is not None
    return Placed(ticket.decision.prefill, ticket.decision.decode)


def _reason(error: Exception) -> str:
    return error.reason if isinstance(error, RejectedError) else "no_worker"
