"""What the decision knows at one moment, as plain data: for people, and to decide the same again elsewhere.

:func:`take` looks and changes nothing; :func:`restore` makes a router of its own from what was taken, on a clock that stands at
0. This is the one file that knows the insides of the router's parts. No prompt is in a snapshot: blocks are hashes, and so are
the names that clients choose (sessions, tenants).
"""

from __future__ import annotations

import copy
import hashlib
import math
from array import array
from collections.abc import Collection, Iterable, Mapping
from itertools import islice
from typing import TypeVar

import msgspec

from extproc.routing.cost import TIERS, Costs
from extproc.routing.endpoint_spec import EndpointSet, EndpointSpec
from extproc.routing.hits import Below, Hits, Source
from extproc.routing.job import Aims, Job, Late
from extproc.routing.load import Load
from extproc.routing.pairs import Pairs
from extproc.routing.pool import Endpoint, Leg, Pool, Role
from extproc.routing.prefix import Chain, PrefixIndex
from extproc.routing.queue import PrefillQueue, Waiting, _Line
from extproc.routing.rates import PrefillMeter, PrefillRate, TransferRate
from extproc.routing.router import Router
from extproc.routing.scales import Arrivals
from extproc.routing.settings import Routing
from extproc.routing.ticket import Ticket

INDEX_BLOCKS = 200_000
"""Entries of the prefix index that a snapshot takes at most: 2 MB of JSON."""

_MOST_WAITING = 10_000
_MOST_PAIRS = 10_000
_MOST_SESSIONS = 10_000
_MOST_LINES = 1_000

_NO_CHAIN = Chain(array("Q"), 1.0)

_T = TypeVar("_T")


class LegState(msgspec.Struct, frozen=True, kw_only=True):
    """A worker in one of its roles."""

    requests: int = 0
    late_requests: int = 0
    """Of them, those that cannot meet their deadline any more."""
    tokens: int = 0
    busy_for_s: float | None = None
    """Until what is in flight is expected to be done; negative: overdue. None: nothing ever was."""
    external_requests: float = 0.0
    external_tokens: int = 0
    """KV tokens that the worker reported in use beyond ``tokens``."""
    external_age_s: float | None = None
    """Since the report that ``external_requests`` stands in; None: there was none."""
    failures: int = 0
    blocked_for_s: float = 0.0
    """Its breaker is open for so long."""
    turn: int = 0


class PrefillSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """Learned seconds of a prefill: ``uncached * (token_s + context_s * mean context)``."""

    token_s: float
    context_s: float


class Transfers(msgspec.Struct, frozen=True, kw_only=True):
    """KV blocks that came to a decode worker lately; what is long ago has faded."""

    bytes: float
    seconds: float


class EndpointState(msgspec.Struct, frozen=True, kw_only=True):
    """One worker."""

    address: str
    roles: list[Role]
    live: bool = False
    leaving: bool = False
    warming: bool = False
    spec: EndpointSpec
    models: list[str] | None = None
    """What it lists; None: nobody knows."""
    kv_tokens: int | None = None
    prefill: LegState = LegState()
    decode: LegState = LegState()
    speed: PrefillSpeed | None = None
    """None: it was never asked to prefill."""
    decode_scale: float | None = None
    """Its time between tokens, against the first guess."""
    transfers: Transfers | None = None
    reported: Load | None = None
    prefill_tokens_per_s: float = 0.0
    """From here on: what follows from the rest, for people."""
    itl_s: float = 0.0
    backlog_s: float = 0.0
    prefix_blocks: int = 0
    in_step: bool | None = None
    """Whether its own events tell all that it holds; None: it is not asked."""
    load_tiers: dict[str, Transfers] = {}
    """What it loaded from tiers below its GPU's memory, by tier; without those it never loaded from."""


class PairState(msgspec.Struct, frozen=True, kw_only=True):
    """A prefill and a decode worker that have met, or failed together."""

    prefill: str
    decode: str
    met: bool
    failures: int
    penalty_s: float
    transfers: Transfers | None = None


class WaitingState(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt in the queue."""

    model: str | None
    tokens: int
    aims: Aims
    age_s: float
    """Since it came to the filter."""
    waited_s: float
    deadline_in_s: float | None
    tenant: str = ""
    """Hashed."""
    session: str = ""
    """Hashed."""
    answer_tokens: int | None = None
    size_bytes: int = 0
    handoff: bool = True
    late: bool = False
    position: int = 0
    work_s: float = 0.0
    whole_reason: str | None = None
    undecided: bool = False
    """Handoff or not: nobody can say while every decode worker is full."""
    only: list[str] | None = None
    """Decode workers that it may have; None: any."""
    hits: dict[str, int] = {}
    """Prompt tokens that workers hold."""
    below: dict[str, Below] = {}
    """Of these, what would have to be loaded."""
    sources: dict[str, Source] = {}
    """Who says so, where it is not predicted."""


class LineState(msgspec.Struct, frozen=True, kw_only=True):
    """What a tenant got of the queue so far."""

    priority: int
    tenant: str
    """Hashed."""
    served_s: float
    weight: float


class QueueState(msgspec.Struct, frozen=True, kw_only=True):
    """The prefill queue."""

    requests: int = 0
    bytes: int = 0
    work_s: float = 0.0
    waiting: list[WaitingState] = []
    """In the order in which they came."""
    lines: list[LineState] = []
    served_s: float = 0.0
    """Prefill work that went lately, fading."""
    served_aged_s: float = 0.0
    """Of it, to those that had waited longest."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All of it. ``cut`` says how many entries of what are not in it, where there were too many."""

    version: int = 1
    settings: Routing
    endpoints: list[EndpointState]
    latest_speed: PrefillSpeed | None = None
    """Of the worker that replied last: what one counts as that never prefilled."""
    typical_uncached_tokens: float
    pairs: list[PairState] = []
    back: list[PairState] = []
    """The same the other way: decode workers (as `prefill`) that prefill workers (as `decode`) read the turn before from."""
    queue: QueueState = QueueState()
    in_flight: dict[str, int] = {}
    """Policy -> open requests."""
    sessions: dict[str, str] = {}
    """Hashed session -> the decode worker that holds it."""
    turn: int = 0
    arrivals: list[tuple[str | None, float, float]] = []
    """Model, mean time between prompts for it, and how long ago the last one came."""
    random: bytes = b""
    """State of the generator of the objective `random`."""
    index: dict[str, bytes] | None = None
    """Address -> 64-bit hashes of the blocks that it holds, the last used first. None: not asked for."""
    cut: dict[str, int] = {}


def hashed(name: str) -> str:
    """A name that a client chose, as it stands in a snapshot; none stays none."""
    return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest() if name else ""


def take(router: Router, now_s: float, *, index_blocks: int = 0, sessions: Collection[str] | None = None) -> Snapshot:
    """What ``router`` knows. ``index_blocks``: so many entries of the prefix index at most, none at 0.

    ``sessions``: only of these; None: of the last used ones.
    """
    costs, picker = router.costs, router.picker
    cut: dict[str, int] = {}
    if sessions is None:
        homes = dict(_newest(picker._sessions.items(), len(picker._sessions), _MOST_SESSIONS, "sessions", cut))
    else:
        homes = {name: picker._sessions[name] for name in sessions if name in picker._sessions}
    latest = costs._latest
    return Snapshot(
        settings=router.settings,
        endpoints=_endpoints(router, now_s),
        latest_speed=None if latest is None else _speed(latest),
        typical_uncached_tokens=costs._uncached_tokens.value,
        pairs=_pair_states(costs.pairs, "pairs", now_s, cut),
        back=_pair_states(costs.back, "back", now_s, cut),
        queue=_queue(router, now_s, cut),
        in_flight=_added(router._in_flight, router.others.in_flight),
        sessions={hashed(name): address for name, address in homes.items()},
        turn=router._turn,
        arrivals=_arrivals(router, now_s),
        random=array("I", picker._random.getstate()[1]).tobytes(),
        index=_index(router.index, index_blocks, cut) if index_blocks else None,
        cut=cut,
    )


def _pair_states(pairs: Pairs, name: str, now_s: float, cut: dict[str, int]) -> list[PairState]:
    return [
        PairState(
            prefill=giver,
            decode=taker,
            met=pair.met,
            failures=pair.failures,
            penalty_s=max(0.0, pair.until_s - now_s),
            transfers=_transfers(pair.transfers),
        )
        for (giver, taker), pair in _newest(pairs._pairs.items(), len(pairs._pairs), _MOST_PAIRS, name, cut)
    ]


def restore(snapshot: Snapshot, index: PrefixIndex | None = None) -> Router:
    """A router that decides as the one did that the snapshot is of; its clock stands at 0.

    ``index`` takes the place of what the snapshot has of one. What is in flight cannot be finished there. Raises ValueError
    for a snapshot that contradicts itself.
    """
    pool = Pool(EndpointSet())
    for state in snapshot.endpoints:
        pool._by_address[state.address] = _endpoint(state)
    pool.version += 1
    router = Router(pool, snapshot.settings, index)
    if index is None:
        for address, blocks in (snapshot.index or {}).items():
            hashes = array("Q")
            hashes.frombytes(blocks)
            for block in reversed(hashes):  # where one prompt ends and the next begins is not known: each stands for itself
                router.index.insert(address, Chain(array("Q", (block,)), 1.0))
    _restore_costs(router.costs, snapshot)
    for policy, count in snapshot.in_flight.items():
        router._in_flight[policy] = count
    router.picker._sessions.update(snapshot.sessions)
    if snapshot.random:
        numbers = array("I")
        numbers.frombytes(snapshot.random)
        router.picker._random.setstate((3, tuple(numbers), None))
    router._turn = snapshot.turn
    for model, mean_s, silence_s in snapshot.arrivals:
        arrivals = router.scales.arrivals.by_model[model] = Arrivals()
        arrivals.mean_s, arrivals.last_s = mean_s, -silence_s
    _restore_queue(router, snapshot.queue)
    return router


def _added(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {name: one.get(name, 0) + other.get(name, 0) for name in (*one, *other)}


def _newest(items: Iterable[_T], count: int, most: int, what: str, cut: dict[str, int]) -> list[_T]:
    """The last ``most`` of ``count`` items."""
    if count > most:
        cut[what] = count - most
    return list(islice(items, max(0, count - most), None))


# -- workers ---------------------------------------------------------------------------------------------------------------


def _endpoints(router: Router, now_s: float) -> list[EndpointState]:
    # The costs note a first guess of whomever they are asked about; on a copy that changes nothing.
    costs = copy.copy(router.costs)
    costs._prefill, costs._decode, costs._transfer = dict(costs._prefill), dict(costs._decode), dict(costs._transfer)
    found = []
    for endpoint in router.pool.endpoints:
        address = endpoint.address
        speed, decode, transfer = costs._prefill.get(address), costs._decode.get(address), costs._transfer.get(address)
        found.append(
            EndpointState(
                address=address,
                roles=sorted(endpoint.roles, key=lambda role: role.value),
                live=endpoint.live,
                leaving=endpoint.leaving,
                warming=endpoint.warming,
                spec=_spec(endpoint),
                models=None if endpoint.models is None else sorted(endpoint.models),
                kv_tokens=endpoint.kv_tokens,
                prefill=_leg(endpoint.prefill, now_s),
                decode=_leg(endpoint.decode, now_s),
                speed=None if speed is None else _speed(speed[0]),
                decode_scale=None if decode is None else decode._scale.value,
                transfers=_transfers(transfer),
                reported=endpoint.load,
                prefill_tokens_per_s=round(costs.prefill_rate(endpoint).tokens_per_s, 1),
                itl_s=round(costs.decode_rate(endpoint).itl_s(costs.sequences(endpoint, now_s), endpoint.decode.tokens), 6),
                backlog_s=round(costs.backlog_s(endpoint, now_s), 6),
                prefix_blocks=router.index.held(address),
                in_step=None if router.known is None else router.known.in_step(address),
                load_tiers=_load_tiers(costs, address),
            )
        )
    return found


def _load_tiers(costs: Costs, address: str) -> dict[str, Transfers]:
    found = {tier: _transfers(costs._loads.get((address, tier))) for tier in TIERS}
    return {tier: known for tier, known in found.items() if known is not None}


def _spec(endpoint: Endpoint) -> EndpointSpec:
    """With the labels that it goes by, which say its pool, too."""
    spec = endpoint.spec
    return spec if endpoint.labels is spec.labels else msgspec.structs.replace(spec, labels=dict(endpoint.labels))


def _leg(leg: Leg, now_s: float) -> LegState:
    return LegState(
        requests=leg.requests,
        late_requests=sum(claim.late for claim in leg.claims),
        tokens=leg.tokens,
        busy_for_s=_since(leg.busy_until_s, now_s),
        external_requests=leg.external_requests,
        external_tokens=leg.external_tokens,
        external_age_s=None if math.isinf(leg.external_s) else now_s - leg.external_s,
        failures=leg.failures,
        blocked_for_s=max(0.0, leg.blocked_until_s - now_s),
        turn=leg.turn,
    )


def _since(when_s: float, now_s: float) -> float | None:
    return None if math.isinf(when_s) else when_s - now_s


def _speed(rate: PrefillRate) -> PrefillSpeed:
    return PrefillSpeed(token_s=rate._a, context_s=rate._b)


def _endpoint(state: EndpointState) -> Endpoint:
    endpoint = Endpoint(state.spec, frozenset(state.roles))
    endpoint.live, endpoint.leaving, endpoint.warming = state.live, state.leaving, state.warming
    endpoint.models = None if state.models is None else dict.fromkeys(state.models, b"{}")
    endpoint.kv_tokens = state.kv_tokens
    endpoint.load = state.reported
    for leg, known in ((endpoint.prefill, state.prefill), (endpoint.decode, state.decode)):
        for number in range(known.requests):
            claim = leg.claim(tokens=0 if number else known.tokens, work_s=0.0, now_s=0.0, turn=known.turn)
            claim.late = number < known.late_requests
        leg.busy_until_s = -math.inf if known.busy_for_s is None else known.busy_for_s
        leg.external_requests, leg.external_tokens = known.external_requests, known.external_tokens
        leg.external_s = -math.inf if known.external_age_s is None else -known.external_age_s
        leg.failures, leg.turn = known.failures, known.turn
        leg.blocked_until_s = known.blocked_for_s or -math.inf
    return endpoint


def _restore_costs(costs: Costs, snapshot: Snapshot) -> None:
    for state in snapshot.endpoints:
        endpoint = Endpoint(state.spec, frozenset(state.roles))
        if state.speed is not None:
            costs._prefill[state.address] = _rate(state.speed), PrefillMeter()
        if state.decode_scale is not None:
            costs.decode_rate(endpoint)._scale.value = state.decode_scale
        if state.transfers is not None:
            _restore_transfers(costs.transfer_rate(endpoint), state.transfers)
        for tier, known in state.load_tiers.items():
            _restore_transfers(costs.load_rate(state.address, tier), known)
    if snapshot.latest_speed is not None:
        costs._latest = _rate(snapshot.latest_speed)
    costs._uncached_tokens.value = snapshot.typical_uncached_tokens
    _restore_pairs(costs.pairs, snapshot.pairs)
    _restore_pairs(costs.back, snapshot.back)


def _rate(speed: PrefillSpeed) -> PrefillRate:
    rate = PrefillRate(1.0)
    rate._a, rate._b = speed.token_s, speed.context_s
    return rate


def _arrivals(router: Router, now_s: float) -> list[tuple[str | None, float, float]]:
    known = router.scales.arrivals.by_model.items()
    return [(model, each.mean_s, now_s - each.last_s) for model, each in known if each.mean_s < math.inf]


def _transfers(rate: TransferRate | None) -> Transfers | None:
    return None if rate is None else Transfers(bytes=rate._bytes, seconds=rate._seconds)


def _restore_transfers(rate: TransferRate, known: Transfers) -> None:
    rate._bytes, rate._seconds = known.bytes, known.seconds


def _restore_pairs(pairs: Pairs, known: Iterable[PairState]) -> None:
    for each in known:
        pair = pairs._touch(each.prefill, each.decode)
        pair.met, pair.failures, pair.until_s = each.met, each.failures, each.penalty_s
        if each.transfers is not None:
            pair.transfers = TransferRate(1.0)
            _restore_transfers(pair.transfers, each.transfers)


# -- queue -----------------------------------------------------------------------------------------------------------------


def _queue(router: Router, now_s: float, cut: dict[str, int]) -> QueueState:
    queue = router.queue
    waiting = list(islice(queue, _MOST_WAITING))
    if len(queue) > len(waiting):
        cut["waiting"] = len(queue) - len(waiting)
    # Only the first of the queue are ever weighed: what the index holds of the others is not asked.
    window = router.settings.window
    lines = [
        LineState(priority=band, tenant=hashed(tenant), served_s=line.served_s, weight=line.weight)
        for band, tenants in queue._bands.items()
        for tenant, line in sorted(tenants.items(), key=lambda each: -len(each[1]))[:_MOST_LINES]
    ]
    return QueueState(
        requests=len(queue),
        bytes=queue.bytes,
        work_s=queue.queued_s,
        waiting=[_waiting(router, each, now_s, ask=number < window) for number, each in enumerate(waiting)],
        lines=lines,
        served_s=queue._work_s,
        served_aged_s=queue._aged_work_s,
    )


def _waiting(router: Router, waiting: Waiting, now_s: float, *, ask: bool) -> WaitingState:
    job, ticket = waiting.job, router._tickets[waiting]
    hits = ticket.hits
    if hits is None and ask:
        shadow = Ticket(job)  # the ticket itself stays as it is
        hits = router.scales.hits(shadow)
    return WaitingState(
        model=job.model,
        tokens=job.tokens,
        aims=job.aims,
        age_s=now_s - job.arrived_s,
        waited_s=now_s - waiting.came_s,
        deadline_in_s=_since(job.deadline_s, now_s),
        tenant=hashed(job.tenant),
        session=hashed(job.session),
        answer_tokens=job.answer_tokens,
        size_bytes=job.size_bytes,
        handoff=job.handoff,
        only=None if job.only is None else sorted(job.only),
        late=waiting.late,
        position=waiting.position,
        work_s=waiting.work_s,
        whole_reason=ticket.whole_reason,
        undecided=ticket.undecided,
        hits={} if hits is None else dict(hits.tokens),
        below={} if hits is None else dict(hits.below),
        sources={} if hits is None else dict(hits.sources),
    )


def _restore_queue(router: Router, state: QueueState) -> None:
    queue = router.queue
    lines = {(each.priority, each.tenant): each for each in state.lines}
    for (priority, tenant), each in lines.items():
        queue._bands.setdefault(priority, {})[tenant] = _Line(each.weight, each.served_s)
    for known in state.waiting:
        _restore_waiting(router, known)
    for (priority, tenant), each in lines.items():  # after them: whoever begins to wait changes the line
        line = queue._bands[priority][tenant]
        line.served_s, line.weight = each.served_s, each.weight
    _restore_sums(queue, state)


def _restore_sums(queue: PrefillQueue, state: QueueState) -> None:
    if queue.queued_s > 0:  # of a long queue only a part was kept
        for crowd in queue.crowds.values():
            crowd.queued_s *= state.work_s / queue.queued_s
    queue.bytes, queue.queued_s = state.bytes, state.work_s
    queue._work_s, queue._aged_work_s = state.served_s, state.served_aged_s


def _restore_waiting(router: Router, known: WaitingState) -> None:
    job = Job(
        model=known.model,
        chain=_NO_CHAIN,  # its hits are known
        tokens=known.tokens,
        aims=known.aims,
        arrived_s=-known.age_s,
        deadline_s=math.inf if known.deadline_in_s is None else known.deadline_in_s,
        tenant=known.tenant,
        session=known.session,
        answer_tokens=known.answer_tokens,
        size_bytes=known.size_bytes,
        handoff=known.handoff,
        only=None if known.only is None else frozenset(known.only),
    )
    waiting = Waiting(job, router.settings, -known.waited_s)
    waiting.late = known.late
    router.queue.add(waiting, known.work_s)
    waiting.position = known.position
    ticket = Ticket(job)
    ticket.waiting, ticket.whole_reason = waiting, known.whole_reason
    ticket.hits = Hits(dict(known.hits), known.below, known.sources)
    ticket.undecided = known.undecided
    router._tickets[waiting] = ticket
    router._impatient += known.aims.late is not Late.WAIT


# -- prefix index ----------------------------------------------------------------------------------------------------------


def _index(index: PrefixIndex, most: int, cut: dict[str, int]) -> dict[str, bytes]:
    """An even share for each holder; what one does not need is left to those that hold more."""
    found: dict[str, bytes] = {}
    left = most
    holders = sorted(index.addresses(), key=index.held)
    for number, address in enumerate(holders):
        blocks = index.recent(address, left // (len(holders) - number))
        left -= len(blocks)
        if blocks:
            found[address] = blocks.tobytes()
    if index.blocks > most - left:
        cut["index"] = index.blocks - (most - left)
    return found
