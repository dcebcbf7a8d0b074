"""What a router says of itself while it works, for routers of the same workers in other processes; and what it hears of them.

Pure, like all of this package: who carries it (:mod:`extproc.processes`) overrides the methods of :class:`Told`, and applies
to its own router what the others said, by an :class:`Another` for each of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from extproc.routing import health
from extproc.routing.load import Load
from extproc.routing.pool import Claim, Role
from extproc.routing.prefix import Chain
from extproc.routing.queue import First

if TYPE_CHECKING:
    from extproc.routing.router import Router

_MOST_CLAIMS = 1_000_000
"""Of one other router; more are a fault of it, and are not counted."""


class Told:
    """Nobody listens. All methods return at once."""

    def claimed(self, claim: Claim, role: Role, address: str) -> None:
        """A request has a share in the load of a worker."""

    def released(self, claim: Claim) -> None:
        """It has no longer."""

    def occupied(self, address: str, work_s: float) -> None:
        """A decode worker computes a prompt by itself, for so long."""

    def learned(self, address: str, chain: Chain) -> None:
        """A worker holds these blocks, or soon will."""

    def corrected(self, address: str, chain: Chain) -> None:
        """It does not."""

    def prefilled(self, address: str, *, sent_s: float, now_s: float, uncached: float, cached: float) -> None:
        """A prefill worker replied: an observation of its speed, in clock seconds and tokens."""

    def judged(self, role: Role, address: str, *, ok: bool) -> None:
        """A request failed on a worker, or went well after others had failed."""

    def handed_over(self, prefill: str, decode: str) -> None:
        """KV went from one to the other."""

    def parted(self, prefill: str, decode: str) -> None:
        """A handoff between them could not be used."""

    def at_home(self, session: str, address: str) -> None:
        """A conversation is on a decode worker now."""

    def open_requests(self, policy: str, count: int) -> None:
        """So many requests of a policy that has a limit are open."""

    def waits(self) -> None:
        """A prompt has begun to wait in the queue."""

    def met(self, prefill: str, decode: str) -> None:
        """A first handoff between them, made for that, went well."""

    def renewed(self, address: str) -> None:
        """A worker is there, or there again, and counts as not having met anybody."""

    def new_engine(self, address: str, engine_id: str) -> None:
        """The engine at an address is this one; before it was another one, or not known."""

    def reported(self, address: str, load: Load) -> None:
        """A worker was asked for its load."""


class Others:
    """What holds of all other routers together."""

    __slots__ = ("first", "in_flight", "yield_most_s", "yield_s")

    def __init__(self) -> None:
        self.yield_s = 0.005
        """How long a worker with room is left to a prompt of theirs that goes before ours: for them to hear that there is room,
        and for us to hear that they took it."""
        self.yield_most_s = 0.02
        """And at most, while more and more room comes."""
        self.in_flight: dict[str, int] = {}
        """Policy with a limit -> open requests."""
        self.first: First | None = None
        """The prompt that would go first of those in their queues."""


class Another:
    """One other router: what is on the workers through it, as part of our own ledger, so that it counts like our own load."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._claims: dict[int, Claim | None] = {}
        """By its own numbers; None: on a worker that we do not know (yet)."""
        self._unplaced: dict[int, tuple[Role, str, int, float, float, bool]] = {}
        self._unconfirmed: set[int] | None = None
        """While it tells all of its claims again: those that it has not told yet."""
        self.in_flight: dict[str, int] = {}
        self.first: First | None = None
        """Of its queue."""

    @property
    def claims(self) -> int:
        """How many it has, as far as we know."""
        return len(self._claims)

    def claim(
        self, number: int, role: Role, address: str, *, tokens: int, work_s: float, since_s: float, late: bool, now_s: float
    ) -> None:
        """It put a request on a worker."""
        if self._unconfirmed is not None:
            self._unconfirmed.discard(number)
        if number in self._claims or len(self._claims) >= _MOST_CLAIMS:
            return
        endpoint = self._router.pool.get(address)
        if endpoint is None:
            self._claims[number] = None
            self._unplaced[number] = role, address, tokens, work_s, since_s, late
            return
        claim = self._router.claim_of_another(endpoint, role, tokens=tokens, work_s=work_s, now_s=now_s)
        claim.since_s, claim.late = min(since_s, now_s), late
        self._claims[number] = claim

    def release(self, number: int, now_s: float) -> None:
        """The request has left the worker."""
        if self._unconfirmed is not None:
            self._unconfirmed.discard(number)
        self._unplaced.pop(number, None)
        claim = self._claims.pop(number, None)
        if claim is not None:
            self._router.give_back(claim, now_s)

    def place_again(self, now_s: float) -> None:
        """Workers may have come that its claims were waiting for."""
        for number, (role, address, tokens, work_s, since_s, late) in list(self._unplaced.items()):
            if self._router.pool.get(address) is not None:
                del self._unplaced[number], self._claims[number]
                self.claim(number, role, address, tokens=tokens, work_s=work_s, since_s=since_s, late=late, now_s=now_s)

    def begin(self) -> None:
        """It tells all of its claims again, from here to :meth:`complete`."""
        self._unconfirmed = set(self._claims)
        self.in_flight.clear()

    def complete(self, now_s: float) -> None:
        """What it did not tell again is over."""
        left, self._unconfirmed = self._unconfirmed or (), None
        for number in tuple(left):
            self.release(number, now_s)

    def drop(self, now_s: float) -> int:
        """It is gone, and everything of it; how many claims that were."""
        count, self._unconfirmed = len(self._claims), None
        for number in tuple(self._claims):
            self.release(number, now_s)
        self.in_flight.clear()
        self.first = None
        return count

    def judged(self, role: Role, address: str, *, ok: bool, now_s: float) -> None:
        """What it found out about the health of a worker."""
        endpoint = self._router.pool.get(address)
        if endpoint is None:
            return
        if ok:
            health.succeeded(endpoint.leg(role))
        else:
            health.failed(endpoint.leg(role), self._router.settings, now_s)
        self._router.unsettle()
