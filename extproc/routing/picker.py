"""Choose workers: the pair, or one decode worker for all of it, that costs least under the policy's objective.

Not every pair is weighed: of each role those that hold most of the prompt, and those with the least to do.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from copy import copy
from itertools import islice
from typing import NamedTuple

from extproc.routing import health
from extproc.routing.cost import Costs, Loaded
from extproc.routing.decision import Candidate, Decision
from extproc.routing.hits import Hits
from extproc.routing.job import Aims, Job, Kind, Mode, Objective
from extproc.routing.partition import DEFAULT_POOL, POOL_LABEL
from extproc.routing.pool import Endpoint, Pool, Role, matches
from extproc.routing.settings import Routing
from extproc.routing.weighing import DecodeSide, PrefillSide, Weighed, decode_sides, pairs, prefill_sides, wholes

_IDLEST = 3
_WARMEST = 3
"""So many of each role are weighed; one less of each where there are many, which differ less."""

_MANY = 32

_PACKED_ITL_SHARE = 0.6
"""Of the ITL SLO: up to here streams keep together while prompts wait."""

_LOOKED_AT = 64
"""Of more workers, only so many are looked at for a prompt, beside those that hold most of it."""

_HOLDERS = 8
"""So many of those that hold most of it."""

WEIGHED = frozenset((Objective.BALANCED, Objective.TTFT, Objective.THROUGHPUT))
"""Objectives that weigh costs."""

_WORTH_A_HIT = 0.1
"""Share of a prompt that a worker must hold for the objective `prefix` to go there."""

_SESSIONS = 100_000

_CANDIDATES_KEPT = 8
"""Of those that were weighed, so many are remembered with a decision."""

_NO_LABELS: frozenset[tuple[str, str]] = frozenset()

_GROUPS = 1_000
"""Lists of candidates that are remembered until the pool changes."""


class NoEndpointError(Exception):
    """No worker of a role can take the request."""

    def __init__(
        self,
        role: Role,
        model: str | None = None,
        labels: Mapping[str, str] | None = None,
        pool: str | None = None,
        *,
        subset: bool = False,
    ) -> None:
        """``model`` is given where workers are live, but none serves it; ``labels`` where none of those has them; ``pool``: it
        has to be one of that pool; ``subset``: of those that the prompt may have, none can take it."""
        what = f"serves the model {model!r}" if model is not None else "is live"
        if labels:
            what = f"has the labels {dict(labels)}"
        if pool is not None and model is None:
            what = f"of the pool {pool!r} is live"
        if subset:
            what = "among those that the gateway allows can take it"
        super().__init__(f"no {role.value} worker {what}")
        self.role = role
        self.model = model
        self.subset = subset


class FullError(Exception):
    """Every decode worker runs all the sequences that it can."""


class _Group(NamedTuple):
    """The endpoints among which a kind of prompt can choose."""

    endpoints: list[Endpoint]
    by_address: dict[str, Endpoint]


class Picker:
    """Chooses; it changes nothing but whose turn it is among equals."""

    def __init__(self, pool: Pool, costs: Costs, settings: Routing) -> None:
        self._pool = pool
        self._costs = costs
        self._settings = settings
        self._random = random.Random(settings.seed)  # noqa: S311 (a load balancer, not a secret)
        self._groups: dict[tuple[Role, str | None, frozenset[tuple[str, str]], frozenset[str] | None], _Group] = {}
        self._meet: dict[tuple[Role, Kind, Kind], bool] = {}
        """The same for :meth:`meet`."""
        self._version = -1
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self.panics = 0
        """Choices among workers that all failed lately."""

    # -- who may -----------------------------------------------------------------------------------------------------------

    def group(
        self, role: Role, model: str | None, labels: Mapping[str, str], only: frozenset[str] | None = None
    ) -> list[Endpoint]:
        """The live endpoints of ``role`` that serve ``model`` and have ``labels``, and are among ``only``, if that is given.

        Raises NoEndpointError.
        """
        return self._group(role, model, labels, only).endpoints

    def members(
        self, role: Role, model: str | None, labels: Mapping[str, str], only: frozenset[str] | None = None
    ) -> dict[str, Endpoint]:
        """The same by address. Raises NoEndpointError."""
        return self._group(role, model, labels, only).by_address

    def _group(self, role: Role, model: str | None, labels: Mapping[str, str], only: frozenset[str] | None) -> _Group:
        if self._version != self._pool.version or len(self._groups) > _GROUPS:
            self._version = self._pool.version
            self._groups.clear()
            self._meet.clear()
        key = (role, model, frozenset(labels.items()) if labels else _NO_LABELS, only)
        found = self._groups.get(key)
        if found is None:
            if only is not None and not only:
                raise NoEndpointError(role, subset=True)
            live = self._pool.live(role)
            pool = labels.get(POOL_LABEL)
            if pool is not None:
                live = [each for each in live if each.labels.get(POOL_LABEL) == pool]
                if not live:
                    raise NoEndpointError(role, model if self._nobodys(pool) else None, pool=pool)
            serving = [each for each in live if each.serves(model)]
            if not serving:
                raise NoEndpointError(role, model if live else None)
            fitting = [each for each in serving if matches(each.labels, labels)]
            if not fitting:
                raise NoEndpointError(role, labels=labels)
            if only is not None:
                fitting = [each for each in fitting if each.address in only]
                if not fitting:
                    raise NoEndpointError(role, subset=True)
            # Who has yet to make a first handoff is chosen only where there is nobody else.
            fitting = [each for each in fitting if not each.warming] or fitting
            found = self._groups[key] = _Group(fitting, {each.address: each for each in fitting})
        return found

    def _nobodys(self, pool: str) -> bool:
        """Whether what comes to ``pool`` is for a model that nobody has: it is the default one, which gets all the rest,
        and there is nobody in it."""
        live = [each for each in self._pool.endpoints if each.live and not each.leaving]
        return pool == DEFAULT_POOL and bool(live) and all(each.labels.get(POOL_LABEL) != pool for each in live)

    def meet(self, role: Role, one: Kind, other: Kind) -> bool:
        """Whether some worker of a role can get prompts of both kinds: models with adapters share workers."""
        if one == other:
            return True
        try:
            mine, theirs = (
                self.members(role, each.model, dict(each.prefill_labels if role is Role.PREFILL else each.decode_labels))
                for each in (one, other)
            )
        except NoEndpointError:
            return False
        key = role, one, other
        found = self._meet.get(key)
        if found is None:
            found = self._meet[key] = not mine.keys().isdisjoint(theirs)
        return found

    def able(
        self,
        role: Role,
        model: str | None,
        labels: Mapping[str, str],
        now_s: float,
        exclude: Collection[str] = (),
        only: frozenset[str] | None = None,
    ) -> list[Endpoint]:
        """Those of a group that did not just fail; if all did, all of them. Raises NoEndpointError."""
        group = self.group(role, model, labels, only)
        if exclude:
            group = [each for each in group if each.address not in exclude]
            if not group:
                raise NoEndpointError(role)
        # health.usable() without a call: a thousand workers are looked at for every prompt.
        if role is Role.PREFILL:
            good = [each for each in group if each.prefill.blocked_until_s <= now_s]
        else:
            good = [each for each in group if each.decode.blocked_until_s <= now_s]
        if not good:
            self.panics += 1
            return group
        return good

    def _some(
        self, role: Role, job: Job, labels: Mapping[str, str], hits: Hits, now_s: float, exclude: Collection[str]
    ) -> list[Endpoint]:
        """:meth:`able`, but of many only some: others for every prompt, and those that hold most of it. Raises NoEndpointError.

        The best of a hundred is hardly worse than the best of a thousand, and a tenth of the work.
        """
        only = job.only if role is Role.DECODE else None
        group = self.group(role, job.model, labels, only)
        if not exclude and len(group) <= _LOOKED_AT:
            if role is Role.PREFILL:
                good = [each for each in group if each.prefill.blocked_until_s <= now_s]
            else:
                good = [each for each in group if each.decode.blocked_until_s <= now_s]
            if good:
                return good
        elif len(group) > _LOOKED_AT:
            start = _start(job, len(group))
            window = group[start : start + _LOOKED_AT]
            window += group[: _LOOKED_AT - len(window)]
            members = self.members(role, job.model, labels, only)
            holders = [members[address] for address in hits.tokens if address in members]
            window += [each for each in holders[:_HOLDERS] if each not in window]
            if role is Role.PREFILL:
                good = [each for each in window if each.prefill.blocked_until_s <= now_s]
            else:
                good = [each for each in window if each.decode.blocked_until_s <= now_s]
            if exclude:
                good = [each for each in good if each.address not in exclude]
            if good:
                return good
        return self.able(role, job.model, labels, now_s, exclude, only)

    # -- decode ------------------------------------------------------------------------------------------------------------

    def decodes(
        self,
        job: Job,
        hits: Hits,
        now_s: float,
        exclude: Collection[str] = (),
        *,
        admit: bool = True,
        crowded: bool = False,
    ) -> list[Endpoint]:
        """Decode workers worth weighing. Without ``admit`` they may be full: they queue themselves.

        ``crowded``: prompts wait for prefill workers, so streams keep together where the ITL SLO has room for them, and leave
        other decode workers free for a prefill of their own, if the mode allows that.

        Raises NoEndpointError, FullError.
        """
        aims, costs = job.aims, self._costs
        need = job.tokens + costs.answer_tokens(job)
        home = self._sessions.get(job.session) if job.session else None
        if home is not None and home not in exclude:
            there = self.members(Role.DECODE, job.model, aims.decode_labels, job.only).get(home)
            if there is not None and health.usable(there.decode, now_s) and not costs.full(there, need, now_s):
                return [there]
        weighed = aims.objective in WEIGHED
        some = self._some(Role.DECODE, job, aims.decode_labels, hits, now_s, exclude) if weighed else []
        if home is not None:  # where all have failed lately, it may be one of them
            able = self.able(Role.DECODE, job.model, aims.decode_labels, now_s, exclude, job.only)
            at_home = [each for each in able if each.address == home and not costs.full(each, need, now_s)]
            if at_home:
                return at_home
        room = costs.with_room(some, need, now_s)
        if not room:
            able = self.able(Role.DECODE, job.model, aims.decode_labels, now_s, exclude, job.only)
            for some in _parts(able, job) if weighed else (able,):
                room = costs.with_room(some, need, now_s)
                if room:
                    break
            if not room:
                if admit:
                    raise FullError
                room = costs.with_room(able, None, now_s)
        if aims.objective is Objective.RANDOM:
            return [self._random.choice(room)[-1]]
        if aims.objective is Objective.ROUND_ROBIN:
            return [min(room, key=_turn)[-1]]
        # A stream would stand still behind a prefill that the worker is at.
        room = [each for each in room if each[-1].prefill.busy_until_s <= now_s or Role.PREFILL in each[-1].roles] or room
        if aims.itl_slo_s is not None:
            itls_s = [
                costs.decode_rate(each).itl_s(sequences + 1, each.decode.tokens + job.tokens) for sequences, _, _, each in room
            ]
            if crowded and aims.mode is Mode.AUTO:
                close_s = _PACKED_ITL_SHARE * aims.itl_slo_s
                packed = [each for each, itl_s in zip(room, itls_s, strict=True) if itl_s <= close_s]
                if packed:
                    return [max(packed, key=_load)[-1]]
            room = [each for each, itl_s in zip(room, itls_s, strict=True) if itl_s <= aims.itl_slo_s] or room
        if aims.objective is Objective.LEAST_LOAD:
            return [min(room)[-1]]
        return _idlest_and_warmest(room, hits)

    def decode(
        self,
        job: Job,
        prefill: Endpoint,
        hits: Hits,
        now_s: float,
        *,
        crowded: bool = False,
        among: list[Endpoint] | None = None,
    ) -> Candidate:
        """The best decode worker for a prompt that ``prefill`` computes; ``among``: those that :meth:`decodes` chose.

        Raises NoEndpointError, FullError.
        """
        decodes = self.decodes(job, hits, now_s, crowded=crowded) if among is None else among
        costs, held = self._costs, hits.tokens
        prefills = prefill_sides(costs, job, [prefill], held, now_s, hits.below)
        sides = decode_sides(costs, job, decodes, held, now_s)
        return min(self._pairs(job, prefills, sides, hits, now_s), key=_cost)

    def decode_again(self, job: Job, prefill: Endpoint, weighed: Weighed) -> Candidate | None:
        """:meth:`decode` of what was ``weighed`` at the same moment; None if that says nothing of ``prefill``."""
        mine = [each for each in weighed.apart if each.prefill == prefill.address]
        if not mine:
            return None
        # Alone it is as busy as it is, whatever the others are.
        pressure, terms = float(mine[0].terms.queue_prefill_s > 0), mine[0].terms
        if job.aims.objective is not Objective.BALANCED or terms.hold_s == self._settings.hold * pressure * terms.prefill_s:
            return mine[0]
        place = {each.address: number for number, each in enumerate(weighed.decodes)}
        mine = [copy(each) for each in sorted(mine, key=lambda each: place[each.decode])]
        for each in mine:
            each.terms = copy(each.terms)
            each.cost = self._costs.total(job.aims, each.terms, pressure=pressure)
        return min(mine, key=_cost)

    def remember(self, session: str, decode: str) -> None:
        """The conversation ``session`` is on the worker ``decode`` now."""
        if session:
            self._sessions[session] = decode
            self._sessions.move_to_end(session)
            if len(self._sessions) > _SESSIONS:
                self._sessions.popitem(last=False)

    # -- prefill -----------------------------------------------------------------------------------------------------------

    def prefills(self, job: Job, hits: Hits, now_s: float, exclude: Collection[str] = ()) -> list[Endpoint]:
        """Prefill workers worth weighing. Raises NoEndpointError."""
        objective, costs = job.aims.objective, self._costs
        if objective in WEIGHED:
            some = self._some(Role.PREFILL, job, job.aims.prefill_labels, hits, now_s, exclude)
            return _idlest_and_warmest(costs.with_backlog(some, now_s), hits)
        able = self.able(Role.PREFILL, job.model, job.aims.prefill_labels, now_s, exclude)
        if objective is Objective.RANDOM:
            return [self._random.choice(able)]
        if objective is Objective.ROUND_ROBIN:
            return [min(able, key=lambda each: each.prefill.turn)]
        if objective is Objective.LEAST_LOAD:
            return [min(able, key=lambda each: (costs.outstanding_tokens(each, now_s), each.prefill.turn))]
        warmest = max(able, key=lambda each: (hits.of(each), -each.prefill.turn))
        # A system prompt that everybody shares would bring everything to the one that saw it first.
        if hits.of(warmest) < _WORTH_A_HIT * job.tokens:
            return [min(able, key=lambda each: each.prefill.turn)]
        return [warmest]

    # -- both --------------------------------------------------------------------------------------------------------------

    def apart(
        self,
        job: Job,
        hits: Hits,
        now_s: float,
        exclude: Collection[str] = (),
        *,
        admit: bool = True,
        crowded: bool = False,
        among: list[Endpoint] | None = None,
    ) -> list[Candidate]:
        """Pairs, the best first; ``among``: decode workers that :meth:`decodes` chose. Raises NoEndpointError, FullError."""
        decodes = self.decodes(job, hits, now_s, admit=admit, crowded=crowded) if among is None else among
        costs, held = self._costs, hits.tokens
        prefills = prefill_sides(costs, job, self.prefills(job, hits, now_s, exclude), held, now_s, hits.below)
        return sorted(self._pairs(job, prefills, decode_sides(costs, job, decodes, held, now_s), hits, now_s), key=_cost)

    def whole(
        self,
        job: Job,
        hits: Hits,
        now_s: float,
        exclude: Collection[str] = (),
        *,
        admit: bool = True,
        crowded: bool = False,
        among: list[Endpoint] | None = None,
    ) -> list[Candidate]:
        """Decode workers that would do it all, the best first; ``refused`` where that breaks the ITL SLO of streams there.

        ``among``: decode workers that :meth:`decodes` chose. Raises NoEndpointError, FullError.
        """
        decodes = self.decodes(job, hits, now_s, exclude, admit=admit, crowded=crowded) if among is None else among
        return self._wholes(job, decode_sides(self._costs, job, decodes, hits.tokens, now_s), hits, now_s)

    def both(self, job: Job, decodes: list[Endpoint], hits: Hits, now_s: float) -> Weighed:
        """:meth:`apart` and :meth:`whole`, of decode workers that :meth:`decodes` chose. Raises NoEndpointError."""
        costs, held = self._costs, hits.tokens
        prefills = prefill_sides(costs, job, self.prefills(job, hits, now_s), held, now_s, hits.below)
        sides = decode_sides(costs, job, decodes, held, now_s)
        apart = self._pairs(job, prefills, sides, hits, now_s)
        apart.sort(key=_cost)
        return Weighed(now_s, decodes, prefills, apart, self._wholes(job, sides, hits, now_s))

    def _wholes(self, job: Job, sides: list[DecodeSide], hits: Hits, now_s: float) -> list[Candidate]:
        found = wholes(self._costs, job, sides, now_s, hits.below)
        if job.aims.itl_slo_s is not None:
            for each, (decode, cached, _, _, _) in zip(found, sides, strict=True):
                each.refused = self._stalls(job, decode, cached, now_s)
        found.sort(key=_cost)
        return found

    def _stalls(self, job: Job, decode: Endpoint, cached: int, now_s: float) -> str | None:
        if job.aims.itl_slo_s is None or self._costs.sequences(decode, now_s) < 1:
            return None
        gap_s = self._costs.longest_stall_s(job, decode, cached, now_s)
        if gap_s <= job.aims.itl_slo_s:
            return None
        return f"its streams would stand still for {gap_s * 1e3:.0f} ms, over the ITL SLO"

    def pressure(self, prefills: Collection[Endpoint], now_s: float) -> float:
        """How busy prefill workers are: the share of them that has work."""
        return sum(self._costs.backlog_s(each, now_s) > 0 for each in prefills) / max(len(prefills), 1)

    def _pairs(
        self, job: Job, prefills: list[PrefillSide], decodes: list[DecodeSide], hits: Hits, now_s: float
    ) -> list[Candidate]:
        found = pairs(self._costs, job, prefills, decodes, now_s, hits.below)
        if not found:
            raise NoEndpointError(Role.PREFILL)
        return found


def worth_a_handoff(aims: Aims, apart: list[Candidate], whole: list[Candidate], tokens: int, wait_s: float) -> str | None:
    """Why a prompt is handed over, or None if a decode worker shall do it all. ``wait_s``: in our queue, expected."""
    if aims.mode is Mode.DISAGGREGATE:
        return "policy"
    if not whole:
        return "cost"
    best = whole[0]
    if aims.threshold_uncached_tokens is not None:
        return "threshold" if tokens - best.cached_decode_tokens >= aims.threshold_uncached_tokens else None
    allowed = next((each for each in whole if each.refused is None), None)
    if allowed is None:
        return "cost"
    return "cost" if apart[0].cost + wait_s <= allowed.cost else None


def decision(job: Job, chosen: Candidate, reason: str, candidates: list[Candidate], hits: Hits | None = None) -> Decision:
    """What is kept of a choice. ``hits``: what it was made by."""
    made = Decision(
        policy=job.aims.policy,
        objective=job.aims.objective.value,
        reason=reason,
        prefill=chosen.prefill,
        decode=chosen.decode,
        prompt_tokens=job.tokens,
        cached_tokens=chosen.cached_decode_tokens if chosen.prefill is None else chosen.cached_prefill_tokens,
        terms=chosen.terms,
        candidates=_kept(chosen, candidates),
    )
    if hits is not None and (hits.sources or hits.below):
        computes = chosen.decode if chosen.prefill is None else chosen.prefill
        made.cached_by = hits.source(computes)
        made.below_tokens = hits.below_tokens(computes)
    return made


def _kept(chosen: Candidate, candidates: list[Candidate]) -> list[Candidate]:
    """The choice, and the first of the others: of both kinds at least one, if both were weighed. Each pair once."""
    if len(candidates) < _CANDIDATES_KEPT:
        all_of_them = {(chosen.prefill, chosen.decode): chosen}
        for each in candidates:
            all_of_them.setdefault((each.prefill, each.decode), each)
        return list(all_of_them.values())
    kept, seen = [chosen], {(chosen.prefill, chosen.decode)}
    both = False
    for each in candidates:
        pair = each.prefill, each.decode
        other_kind = (each.prefill is None) != (chosen.prefill is None)
        if pair in seen or (len(kept) == _CANDIDATES_KEPT and (both or not other_kind)):
            continue
        seen.add(pair)
        both = both or other_kind
        if len(kept) == _CANDIDATES_KEPT:
            kept.pop()
        kept.append(each)
    return kept


def _start(job: Job, count: int) -> int:
    """Where to begin among so many. The prompt's own hash says it, so that the same question has the same answer."""
    return (job.chain.hashes[-1] if len(job.chain.hashes) else job.tokens) % count


def _parts(endpoints: list[Endpoint], job: Job) -> Iterator[list[Endpoint]]:
    """All of them, so many at a time, beginning somewhere else for every prompt."""
    start = _start(job, len(endpoints))
    turned = endpoints[start:] + endpoints[:start] if len(endpoints) > _LOOKED_AT else endpoints
    for first in range(0, len(turned), _LOOKED_AT):
        yield turned[first : first + _LOOKED_AT]


def _cost(candidate: Candidate) -> float:
    return candidate.cost


def _load(loaded: Loaded) -> float:
    return loaded[0]


def _turn(loaded: Loaded) -> int:
    return loaded[1]


def _idlest_and_warmest(room: list[Loaded], hits: Hits) -> list[Endpoint]:
    """Those with the least to do, and of the others those that hold most of the prompt."""
    if len(room) <= _IDLEST:
        return [each[-1] for each in sorted(room)]
    few = len(room) > _MANY
    idlest = [each[-1] for each in sorted(room)[: _IDLEST - few]]
    held = hits.tokens
    if not held:
        return idlest
    # Where all hold a common beginning, only those that hold more, and a few that hold just that, are put in order.
    amounts = [held.get(each[-1].address, 0) for each in room]
    most = _IDLEST + _WARMEST
    least = max(sorted(amounts)[-most:][0], 1)
    more = [place for place, amount in enumerate(amounts) if amount > least]
    same = islice((place for place, amount in enumerate(amounts) if amount == least), most)
    warm = [(-amounts[place], place) for place in (*more, *same) if room[place][-1] not in idlest]
    return idlest + [room[place][-1] for _, place in sorted(warm)[: _WARMEST - few]]
