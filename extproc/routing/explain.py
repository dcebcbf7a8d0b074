"""What would be decided for a prompt, and why: a rehearsal that changes nothing.

The decision is made by the router's own code, on a router that was rebuilt from a snapshot (:mod:`extproc.routing.snapshot`).
So an explanation cannot say anything else than the router would do, and a stored snapshot says the same as a running filter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from extproc.routing import snapshot as snapshots
from extproc.routing.decision import Candidate, Decision
from extproc.routing.hits import Hits
from extproc.routing.job import Job, Objective
from extproc.routing.picker import FullError, NoEndpointError
from extproc.routing.pool import Endpoint, Role
from extproc.routing.prefix import Chain, PrefixIndex
from extproc.routing.router import Router
from extproc.routing.snapshot import Snapshot, hashed
from extproc.routing.ticket import RejectedError, Ticket
from extproc.routing.why import Why, who_is_out

_MOST_PAIRS = 400
_MOST_OF_A_ROLE = 20
"""Workers of each role whose pairs are shown where there are more pairs than that."""

_MOST_LEFT_OUT = 1_000


class Weighed(Candidate, kw_only=True):
    """One choice, and what spoke against it."""

    chosen: bool = False
    why: str = ""
    """Why it lost; empty for the chosen one."""
    cached_by: str = "predicted"
    """Who says what the worker that computes holds, as in :class:`Decision`."""
    below_tokens: dict[str, int] = msgspec.field(default_factory=dict)
    """What it would load of that, by tier, as in :class:`Decision`."""
    rank: int | None = None
    """The engine of that worker that would have to be named for it, as in :class:`Decision`."""


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that was not weighed in a role."""

    endpoint: str
    role: Role
    why: str


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Why a prompt is turned away."""

    reason: str
    """As :class:`RejectedError` has it, or `no_endpoint`, or `full`."""
    message: str
    retry_after_s: float | None = None
    role: Role | None = None
    """Of which no worker can take it."""
    model: str | None = None
    """That no worker serves."""

    def error(self) -> Exception:
        """What the router raised."""
        if self.reason == "no_endpoint" and self.role is not None:
            error = NoEndpointError(self.role, self.model)
            error.args = (self.message,)
            return error
        if self.reason == "full":
            return FullError(self.message)
        return RejectedError(self.reason, self.message, self.retry_after_s or 0.0)


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """A decision that was not carried out."""

    outcome: Literal["placed", "waits", "rejected"]
    decision: Decision | None = None
    """If it is placed. Its own list of candidates is empty: they are all below."""
    refusal: Refusal | None = None
    """If it is turned away."""
    behind: int = 0
    """If it waits: prompts that came before it."""
    waits_for: str | None = None
    """The prefill worker where it would be best off now, or the decode worker that does it all. None: nobody can take it."""
    expected_wait_s: float = 0.0
    """In our queue: the work that waits, shared by the workers, and what is left of what they are at. An estimate."""
    queue_requests: int
    queue_work_s: float
    """Prefill seconds of all that wait."""
    candidates: list[Weighed] = []
    """The chosen one first, then by cost. In seconds; the terms are those of the moment before the decision."""
    left_out: list[LeftOut] = []
    not_shown: dict[str, int] = {}
    """How many `candidates` and workers that were `left_out` are not in the lists, because there are very many."""


def explain(router: Router, job: Job, now_s: float) -> Explanation:
    """What :meth:`Router.submit` would do with ``job``. ``router`` and ``job`` stay as they are."""
    taken = snapshots.take(router, now_s, sessions=(job.session,))
    index = router.index
    if router.known is None:
        return _explain(taken, _on_own_clock(job, now_s), lambda: snapshots.restore(taken, _Shadow(index)))
    router.scales.now_s = now_s
    given = _Given(router.scales.hits(Ticket(job)))

    def make() -> Router:
        made = snapshots.restore(taken, _Shadow(index))
        made.scales.known = given
        return made

    return _explain(taken, _on_own_clock(job, now_s), make)


def explain_snapshot(taken: Snapshot, job: Job) -> Explanation:
    """The same from a snapshot. The times of ``job`` are on a clock that stands at 0. Raises ValueError for a bad snapshot."""
    return _explain(taken, _on_own_clock(job, 0.0), lambda: snapshots.restore(taken))


class _Given:
    """What a router knew of the one prompt that is explained: workers' own words are of its moment, and on its clock."""

    def __init__(self, hits: Hits) -> None:
        self._hits = hits

    def hits(self, job: Job, predicted: Hits, now_s: float) -> Hits:  # noqa: ARG002
        return self._hits


class _Shadow(PrefixIndex):
    """What another index holds, and beside it what is inserted here."""

    def __init__(self, real: PrefixIndex) -> None:
        super().__init__(1_000_000)
        self._real = real

    def lookup(self, chain: Chain, most: int | None = None) -> dict[str, int]:
        found = dict(self._real.lookup(chain, most))
        for address, blocks in super().lookup(chain, most).items():
            found[address] = max(blocks, found.get(address, 0))
        return found


def _on_own_clock(job: Job, now_s: float) -> Job:
    return msgspec.structs.replace(
        job,
        arrived_s=job.arrived_s - now_s,
        deadline_s=job.deadline_s - now_s,
        tenant=hashed(job.tenant),
        session=hashed(job.session),
    )


def _explain(taken: Snapshot, job: Job, make: Callable[[], Router]) -> Explanation:
    before = make()  # as things are: a router that has decided has changed
    ahead_s = _expected_wait_s(before, job)
    ticket, error = _rehearse(make(), job)
    decision = ticket.decision if ticket is not None else None
    waits = error is None and decision is None
    favoured = _favoured(before, job, ticket) if waits and ticket is not None else None
    chosen: Candidate | None = favoured
    if decision is not None:
        chosen = Candidate(prefill=decision.prefill, decode=decision.decode, cost=0.0, terms=decision.terms)
    shown, hidden = _candidates(before, job, chosen, decision, ahead_s)
    out = who_is_out(before, job)
    not_shown = {"candidates": hidden, "left_out": len(out) - _MOST_LEFT_OUT}
    waiting = ticket.waiting if ticket is not None else None
    return Explanation(
        outcome="rejected" if error is not None else "placed" if decision is not None else "waits",
        decision=None if decision is None else msgspec.structs.replace(decision, candidates=[]),
        refusal=_refusal(error) if error is not None else None,
        behind=waiting.position + taken.cut.get("waiting", 0) if waits and waiting is not None else 0,
        waits_for=None if favoured is None else favoured.prefill or favoured.decode,
        expected_wait_s=ahead_s if waits else 0.0,
        queue_requests=taken.queue.requests,
        queue_work_s=taken.queue.work_s,
        candidates=shown,
        left_out=[LeftOut(endpoint=each, role=role, why=why) for each, role, why in out[:_MOST_LEFT_OUT]],
        not_shown={what: count for what, count in not_shown.items() if count > 0},
    )


def _rehearse(router: Router, job: Job) -> tuple[Ticket | None, Exception | None]:
    try:
        ticket = router.submit(job, 0.0)
    except (RejectedError, NoEndpointError, FullError) as error:
        return None, error
    return ticket, ticket.error


def _refusal(error: Exception) -> Refusal:
    if isinstance(error, RejectedError):
        return Refusal(reason=error.reason, message=str(error), retry_after_s=error.retry_after_s)
    if isinstance(error, NoEndpointError):
        return Refusal(reason="no_endpoint", message=str(error), role=error.role, model=error.model)
    return Refusal(reason="full", message="every decode worker runs all the sequences that it can")


def _expected_wait_s(router: Router, job: Job) -> float:
    try:
        group = router.picker.able(Role.PREFILL, job.model, job.aims.prefill_labels, 0.0)
    except NoEndpointError:
        return 0.0
    least_s = min(router.costs.backlog_s(each, 0.0) for each in group)
    return least_s + router.scales.ahead_s(job) / len(group)


def _favoured(router: Router, job: Job, waiting: Ticket) -> Candidate | None:
    """Where a prompt that waits would go now if there were room."""
    ticket = Ticket(job)
    ticket.whole_reason, ticket.undecided = waiting.whole_reason, waiting.undecided
    fit = router._weigh_ticket(ticket, 0.0)
    if fit is None:
        return None
    hits = router.scales.hits(ticket)
    try:
        if ticket.whole_reason is not None:
            return router.picker.whole(job, hits, 0.0)[0]
        return router.picker.decode(job, fit.endpoint, hits, 0.0, crowded=router.scales.crowded(job))
    except (NoEndpointError, FullError):
        return None


def _candidates(
    router: Router, job: Job, chosen: Candidate | None, decision: Decision | None, ahead_s: float
) -> tuple[list[Weighed], int]:
    """All choices with their costs, the chosen one first, and how many there are that are not in the list."""
    hits = router.scales.hits(Ticket(job))
    prefills, decodes = _able(router, job, Role.PREFILL), _able(router, job, Role.DECODE)
    named = () if chosen is None else (chosen.prefill, chosen.decode)
    pairs = len(prefills) * len(decodes) - sum(each in decodes for each in prefills)
    count = pairs + len(decodes)
    if pairs > _MOST_PAIRS:
        prefills = _best_of(prefills, router, hits, Role.PREFILL, named)
        decodes = _best_of(decodes, router, hits, Role.DECODE, named)
    weighed = [_whole(router, job, decode, hits) for decode in decodes]
    weighed += _pairs(router, job, prefills, decodes, hits)
    for each in weighed:
        each.chosen = chosen is not None and (each.prefill, each.decode) == (chosen.prefill, chosen.decode)
        computes = each.decode if each.prefill is None else each.prefill
        each.cached_by, each.below_tokens = hits.source(computes), hits.below_tokens(computes)
        each.rank = hits.rank(computes)
    weighed.sort(key=lambda each: (not each.chosen, each.cost))
    if weighed:
        best = weighed[0] if weighed[0].chosen else None
        why = Why(router, job, hits, best or weighed[0], decision, ahead_s)
        for each in weighed[0 if best is None else 1 :]:
            each.why = why.lost(each)
    return weighed, count - len(weighed)


def _able(router: Router, job: Job, role: Role) -> list[Endpoint]:
    out = {address for address, of, _ in who_is_out(router, job) if of is role}
    return [each for each in router.pool.endpoints if role in each.roles and each.address not in out]


def _best_of(
    endpoints: list[Endpoint], router: Router, hits: Hits, role: Role, named: tuple[str | None, ...]
) -> list[Endpoint]:
    costs = router.costs
    if role is Role.PREFILL:
        load = {each.address: costs.backlog_s(each, 0.0) for each in endpoints}
    else:
        load = {each.address: costs.sequences(each, 0.0) for each in endpoints}
    idlest = sorted(endpoints, key=lambda each: (load[each.address], each.leg(role).turn))
    warmest = sorted(endpoints, key=lambda each: -hits.of(each))
    first = [each for each in endpoints if each.address in named]
    half = _MOST_OF_A_ROLE // 2
    return list(dict.fromkeys((*first, *warmest[:half], *idlest)))[:_MOST_OF_A_ROLE]


def _whole(router: Router, job: Job, decode: Endpoint, hits: Hits) -> Weighed:
    cached = hits.of(decode)
    terms = router.costs.whole(job, decode, cached, 0.0, hits.load_s(decode))
    cost = router.costs.total(job.aims, terms, pressure=0.0)
    refused = router.picker._stalls(job, decode, cached, 0.0)
    return Weighed(prefill=None, decode=decode.address, cost=cost, terms=terms, cached_decode_tokens=cached, refused=refused)


def _pairs(router: Router, job: Job, prefills: list[Endpoint], decodes: list[Endpoint], hits: Hits) -> list[Weighed]:
    costs = router.costs
    weighed = prefills
    if prefills and job.aims.objective is not Objective.RANDOM:
        weighed = router.picker.prefills(job, hits, 0.0)
    pressure = router.picker.pressure(weighed, 0.0)
    found = []
    for prefill in prefills:
        for decode in decodes:
            if prefill is decode:
                continue
            cached_prefill, cached_decode = hits.of(prefill), hits.of(decode)
            terms = costs.apart(job, prefill, decode, cached_prefill, hits.at_once(decode), 0.0, hits.load_s(prefill))
            found.append(
                Weighed(
                    prefill=prefill.address,
                    decode=decode.address,
                    cost=costs.total(job.aims, terms, pressure=pressure),
                    terms=terms,
                    cached_prefill_tokens=cached_prefill,
                    cached_decode_tokens=cached_decode,
                )
            )
    return found
