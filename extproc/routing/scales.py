"""Where a prompt that waits is best off at the moment: on which prefill worker, and whether that has room for it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal, Protocol

from extproc.routing.cost import Costs
from extproc.routing.hits import NOTHING_BELOW, Hits
from extproc.routing.job import Job, Objective, Offer, kind_of
from extproc.routing.next_turn import with_offer
from extproc.routing.picker import NoEndpointError, Picker
from extproc.routing.pool import Endpoint, Role
from extproc.routing.prefix import PrefixIndex
from extproc.routing.queue import Crowd, Fit, PrefillQueue, longest_wait_share
from extproc.routing.settings import Routing
from extproc.routing.ticket import Stuck, Ticket, Warmest
from extproc.routing.weighing import PrefillSide, Weighed

HOLD = {Objective.BALANCED: 1.0, Objective.TTFT: 0.0, Objective.THROUGHPUT: 10.0}
"""How much of `hold` counts for a prompt that waits, by objective."""

SMALL_WORK_S = 0.3
"""A late prompt that needs no more than this holds nobody up, and goes like any other."""

_WARMEST = 4
"""So many of the prefill workers that hold some of a prompt are weighed for it while it waits."""

_HOLDERS = 64
"""Workers that are known to hold some of a prompt, those that hold most of it; a thousand may share the first few blocks."""

_FEW = 8

_MODELS = 256
"""For so many it is known how fast prompts come."""

STALE_HITS_S = 0.5
"""What a worker's events said of a prompt that waits is looked up again after so long."""

_WEIGHED_AGAIN_S = 0.1
"""A prompt that waits is weighed so often although nothing has happened to the workers it may go to."""

_EXPECTED = 0.5
"""Prompts that must be expected to come while a late one is computed, for workers to be kept free of late ones."""

_MORE_LANES_FROM, _ALL_LANES_FROM = 0.25, 0.5
"""Shares of the longest wait from which on late prompts get all prefill workers but one, and all of them."""


class Arrivals:
    """How fast prompts come."""

    _WEIGHT = 0.05

    def __init__(self) -> None:
        self.mean_s: float = math.inf
        self.last_s: float = -math.inf

    def note(self, now_s: float) -> None:
        """One came."""
        gap_s = now_s - self.last_s
        self.mean_s = gap_s if math.isinf(self.mean_s) else self.mean_s + self._WEIGHT * (gap_s - self.mean_s)
        self.last_s = now_s

    def gap_s(self, now_s: float) -> float:
        """Expected until the next one: the mean, or the silence, if that has lasted longer."""
        return max(self.mean_s, now_s - self.last_s)


class ModelArrivals:
    """The same by model."""

    def __init__(self) -> None:
        self.by_model: dict[str | None, Arrivals] = {}

    def note(self, model: str | None, now_s: float) -> None:
        """A prompt for a model came. Clients may name any: of very many the one not heard of for longest is forgotten."""
        found = self.by_model.get(model)
        if found is None:
            if len(self.by_model) >= _MODELS:
                del self.by_model[min(self.by_model, key=lambda name: self.by_model[name].last_s)]
            found = self.by_model[model] = Arrivals()
        found.note(now_s)

    def gap_s(self, models: Iterable[str | None], now_s: float) -> float:
        """Expected until the next prompt for one of these."""
        gaps_s = [self.by_model[model].gap_s(now_s) for model in models if model in self.by_model]
        if len(gaps_s) < 2:
            return gaps_s[0] if gaps_s else math.inf
        return 1.0 / max(sum(1.0 / max(gap_s, 1e-9) for gap_s in gaps_s), 1e-9)


class Knows(Protocol):
    """Who knows more than the predicting index."""

    def hits(self, job: Job, predicted: Hits, now_s: float) -> Hits:
        """What holds in place of ``predicted``."""


class Scales:
    """Weighs the prompts that wait. What it has seen of the workers holds until :meth:`forget`."""

    def __init__(
        self,
        picker: Picker,
        costs: Costs,
        index: PrefixIndex,
        queue: PrefillQueue,
        settings: Routing,
        known: Knows | None = None,
    ) -> None:
        """``known``: what workers and cache servers themselves say; None: nobody is asked."""
        self.known = known
        self.now_s = 0.0
        """The time of what is being decided."""
        self._picker = picker
        self._costs = costs
        self._index = index
        self._queue = queue
        self._settings = settings
        self._views: dict[object, View] = {}
        self.arrivals = ModelArrivals()

    def forget(self) -> None:
        """Something was placed or ended, or time has passed: the workers are to be looked at again."""
        self._views.clear()

    def rivals(self, job: Job, role: Role = Role.PREFILL) -> list[Crowd]:
        """What waits and may go to workers of ``role`` that the prompt may go to as well."""
        crowds = self._queue.crowds
        if not crowds:
            return []
        kind = kind_of(job)
        return [crowd for other, crowd in crowds.items() if self._picker.meet(role, kind, other)]

    def crowded(self, job: Job) -> bool:
        """Whether prompts wait that share decode workers with this one."""
        return bool(self._queue.crowds) and bool(self.rivals(job, Role.DECODE))

    def ahead_s(self, job: Job) -> float:
        """Prefill seconds of what waits for the prefill workers of the prompt, all together."""
        return sum(crowd.queued_s for crowd in self.rivals(job))

    def fit(self, ticket: Ticket, view: View, now_s: float, *, late: bool) -> Fit:
        """For a prompt that is handed over. ``late``: it cannot meet its deadline any more."""
        job = ticket.job
        costs, hold = self._costs, self._settings.hold * HOLD[job.aims.objective]
        after_s = job.tokens * costs.kv_bytes_per_token(job) * view.transfer_s_per_byte + self._settings.handoff_overhead_s
        hits = self.hits(ticket).tokens
        if ticket.warmest is None:
            warm = [(-cached, address) for address, cached in hits.items() if address in view.members]
            first = sorted(warm)[:_WARMEST]
            most = -first[0][0] if first else 0
            least = -first[-1][0] if len(first) == _WARMEST else 0
            ticket.warmest = Warmest([view.members[address] for _, address in first], max(job.tokens - most, 1), least)
        # The idlest one first: of equals the first is best.
        best = view.idlest
        cached = hits.get(best.address, 0)
        best_uncached = max(job.tokens - cached, 1)
        below = ticket.hits.below if ticket.hits is not None else NOTHING_BELOW
        best_work_s = costs.prefill_rate(best).seconds(best_uncached, cached)
        best_s = soonest_s = costs.backlog_s(best, now_s) + best_work_s
        if best.address in below:
            best_s = soonest_s = best_s + below[best.address].load_s
        best_score = best_s + hold * best_work_s
        others = ticket.warmest.endpoints
        if best.address in below:
            # Loading may take longer than computing does elsewhere.
            free = [each for each in view.able if each.address not in below]
            others = [*others, *(costs.idlest_prefill(free, now_s)[:1] if free else ())]
        for endpoint in others:
            leg = endpoint.prefill
            if endpoint is view.idlest or leg.blocked_until_s > now_s or endpoint.address not in view.members:
                continue
            cached = hits.get(endpoint.address, 0)
            uncached = max(job.tokens - cached, 1)
            work_s = costs.prefill_rate(endpoint).seconds(uncached, cached)
            finish_s = costs.backlog_s(endpoint, now_s) + work_s
            if endpoint.address in below:
                finish_s += below[endpoint.address].load_s
            if finish_s < soonest_s:
                soonest_s = finish_s
            score = finish_s + hold * work_s
            if score < best_score:
                best, best_uncached, best_work_s, best_s, best_score = endpoint, uncached, work_s, finish_s, score
        outstanding = costs.outstanding_tokens(best, now_s)
        ready = outstanding <= 0 or outstanding + best_uncached <= costs.room_tokens(best)
        endpoint, work_s, finish_s = best, best_work_s, best_s + after_s
        soonest_s += after_s
        blocked_by: Literal["prefill", "decode", "lane"] | None = None
        if not ready:
            blocked_by = "prefill"
        elif not view.decode_has_room(job):
            blocked_by = "decode"
        elif late and work_s > SMALL_WORK_S and self._lane_closed(job, view, endpoint, work_s, now_s):
            blocked_by = "lane"
        fit = Fit(endpoint, work_s, finish_s, soonest_s, blocked_by is None)
        if blocked_by is None:
            ticket.stuck = None
        else:
            until_s = now_s + _WEIGHED_AGAIN_S
            if not late and ticket.waiting is not None:
                until_s = min(until_s, ticket.waiting.slo_s - soonest_s)
            version = sum([each.prefill.version for each in ticket.warmest.endpoints])
            ticket.stuck = Stuck(until_s, version, now_s + view.idlest_backlog_s, fit, blocked_by)
        return fit

    def fit_of_few(self, ticket: Ticket, weighed: Weighed, now_s: float) -> tuple[Endpoint, float] | None:
        """What :meth:`fit` says of a prompt that was weighed at the same moment, where all prefill workers were, and are few.

        It is the endpoint, and seconds from now to the first token where that comes first. None: it may say something else, or
        there is no room.

        That some decode worker has room for it is known: else none would have been weighed.
        """
        job, prefills = ticket.job, weighed.prefills
        costs, aims = self._costs, job.aims
        count = len(prefills)
        if count > _WARMEST or count != len(self._picker.group(Role.PREFILL, job.model, aims.prefill_labels)):
            return None
        hits, hold = self.hits(ticket).tokens, self._settings.hold * HOLD[aims.objective]
        # They stand in the order of Costs.with_backlog, so this is Costs.idlest_prefill: the first that has nothing to do.
        idlest = prefills[0]
        for side in prefills:
            leg = side[0].prefill
            if leg.blocked_until_s > now_s:
                return None  # all of them are
            if not leg.claims and (not leg.external_requests or side[2] <= 0):
                idlest = side
                break
        best, _, backlog_s, work_s, load_s = idlest
        soonest_s = backlog_s + work_s + load_s
        score = soonest_s + hold * work_s
        # Of equals the idlest one, then the one that holds most.
        others = [side for side in prefills if side is not idlest and (side[0].address in hits or idlest[4])]
        if len(others) > 1:
            others.sort(key=_most_first)
        for endpoint, _, backlog_s, work_s, load_s in others:
            finish_s = backlog_s + work_s + load_s
            if finish_s < soonest_s:
                soonest_s = finish_s
            if finish_s + hold * work_s < score:
                best, score = endpoint, finish_s + hold * work_s
        outstanding = costs.outstanding_tokens(best, now_s)
        if outstanding > 0 and outstanding + max(job.tokens - hits.get(best.address, 0), 1) > costs.room_tokens(best):
            return None
        decode = self._picker.group(Role.DECODE, job.model, aims.decode_labels, job.only)[0]
        moved_s = job.tokens * costs.kv_bytes_per_token(job) * costs.transfer_rate(decode).seconds(1.0)
        return best, soonest_s + (moved_s + self._settings.handoff_overhead_s)

    def still_stuck(self, ticket: Ticket, now_s: float) -> bool:
        """Whether weighing the prompt again could only say again that it cannot go. Raises NoEndpointError."""
        stuck, warmest = ticket.stuck, ticket.warmest
        if stuck is None or warmest is None or now_s >= stuck.until_s:
            return False
        if sum([each.prefill.version for each in warmest.endpoints]) != stuck.version:
            return False
        view = self.view(ticket.job, now_s)
        if view.idlest_backlog_s > 0.0 and now_s + view.idlest_backlog_s < stuck.idlest_free_s:
            return False
        if view.idlest_backlog_s <= 0.0 and stuck.idlest_free_s > now_s:
            return False
        if stuck.blocked_by == "prefill":
            return True
        if stuck.blocked_by == "decode":
            return not view.decode_has_room(ticket.job)
        return self._lane_closed(ticket.job, view, stuck.fit.endpoint, stuck.fit.work_s, now_s)

    def _lane_closed(self, job: Job, view: View, endpoint: Endpoint, work_s: float, now_s: float) -> bool:
        """Late prompts may not have all prefill workers: those that can still meet their deadline would wait behind them.

        They get a third of the workers, and more the nearer the oldest of them is to the end of its patience; all of them when
        nobody else is expected to come before they are through.
        """
        if work_s < _EXPECTED * self._gap_s(job, now_s):
            return False
        busy = len(view.late_at) - (endpoint.address in view.late_at)
        count = len(view.able)
        share = longest_wait_share(self.rivals(job), now_s)
        if share >= _ALL_LANES_FROM:
            return False
        lanes = math.ceil(count / 3) if share < _MORE_LANES_FROM else count - 1
        return busy >= max(1, lanes)

    def _gap_s(self, job: Job, now_s: float) -> float:
        """Expected until the next prompt that may go to the same prefill workers, whatever its labels."""
        models = self.arrivals.by_model
        if len(models) > 1:
            kind = kind_of(job)
            shared = [name for name in models if self._picker.meet(Role.PREFILL, kind, kind._replace(model=name))]
            return self.arrivals.gap_s(shared, now_s)
        return self.arrivals.gap_s(models, now_s)

    def view(self, job: Job, now_s: float) -> View:
        """The workers of one kind of prompt. Raises NoEndpointError."""
        aims = job.aims
        labelled = aims.prefill_labels or aims.decode_labels
        labels = (frozenset(aims.prefill_labels.items()), frozenset(aims.decode_labels.items())) if labelled else None
        key = labels, job.model, job.only
        view = self._views.get(key)
        if view is None:
            able = self._picker.able(Role.PREFILL, job.model, aims.prefill_labels, now_s)
            decodes = self._picker.group(Role.DECODE, job.model, aims.decode_labels, job.only)
            members = self._picker.members(Role.PREFILL, job.model, aims.prefill_labels)
            view = self._views[key] = View(able, members, decodes, self._costs, now_s)
        return view

    def looked_up_again(self, ticket: Ticket, now_s: float) -> bool:
        """Whether what workers said of the prompt is so old that it is to be asked again; it is forgotten then."""
        if self.known is None or ticket.job.token_chain is None or now_s - ticket.hits_s < STALE_HITS_S:
            return False
        ticket.hits = ticket.warmest = ticket.stuck = None
        return True

    def hits(self, ticket: Ticket) -> Hits:
        """What workers hold of its prompt."""
        if ticket.hits is None:
            chain, tokens = ticket.job.chain, ticket.job.tokens
            found = self._index.lookup(chain, _HOLDERS)
            # The last token is always computed: its logits are wanted. A thousand workers may hold the same few lengths.
            size, most = chain.block_tokens, tokens - 1
            if len(found) <= _FEW:
                ticket.hits = Hits({address: min(int(blocks * size), most) for address, blocks in found.items()})
            else:
                held = {blocks: min(int(blocks * size), most) for blocks in set(found.values())}
                ticket.hits = Hits({address: held[blocks] for address, blocks in found.items()})
            if self.known is not None:
                ticket.hits = self.known.hits(ticket.job, ticket.hits, self.now_s)
                ticket.hits_s = self.now_s
            if ticket.job.next_turn is not None:
                ticket.hits = self._with_offer(ticket.job, ticket.job.next_turn, ticket.hits)
            ticket.warmest = ticket.stuck = None
        return ticket.hits

    def _with_offer(self, job: Job, offer: Offer, hits: Hits) -> Hits:
        try:
            prefills = self._picker.group(Role.PREFILL, job.model, job.aims.prefill_labels)
        except NoEndpointError:
            return hits
        return with_offer(self._costs, prefills, job, offer, hits, self.now_s)


def _most_first(side: PrefillSide) -> tuple[int, str]:
    return -side[1], side[0].address


class View:
    """The workers of one kind of prompt, looked at once for all that wait, until something is placed."""

    __slots__ = (
        "_costs",
        "_decodes",
        "_late_at",
        "_no_room_for_tokens",
        "_now_s",
        "able",
        "idlest",
        "idlest_backlog_s",
        "members",
        "transfer_s_per_byte",
    )

    def __init__(
        self,
        able: list[Endpoint],
        members: dict[str, Endpoint],
        decodes: list[Endpoint],
        costs: Costs,
        now_s: float,
    ) -> None:
        self.able = able
        """Prefill workers that did not just fail."""
        self.members = members
        """All prefill workers, by address."""
        self.idlest, self.idlest_backlog_s = costs.idlest_prefill(able, now_s)
        """The prefill worker with the least to do, and until it is through with that."""
        self.transfer_s_per_byte = costs.transfer_rate(decodes[0]).seconds(1.0)
        self._late_at: set[str] | None = None
        self._no_room_for_tokens = math.inf
        self._decodes = decodes
        self._costs = costs
        self._now_s = now_s

    @property
    def late_at(self) -> set[str]:
        """Workers that are on late prompts."""
        if self._late_at is None:
            busy = (each for each in self.able if each.prefill.claims)
            self._late_at = {each.address for each in busy if any(claim.late for claim in each.prefill.claims)}
        return self._late_at

    def spare_decodes(self) -> list[Endpoint]:
        """Decode workers that have nothing to do at all."""
        costs, now_s = self._costs, self._now_s
        return [
            each
            for each in self._able_decodes()
            if not each.decode.claims and each.prefill.busy_until_s <= now_s and costs.sequences(each, now_s) < 1
        ]

    def decode_has_room(self, job: Job) -> bool:
        """Whether some decode worker can take it."""
        need = job.tokens + self._costs.answer_tokens(job)
        if need >= self._no_room_for_tokens:
            return False
        # Mostly the first one that is asked has room: a thousand are not looked through for that.
        full, now_s = self._costs.full, self._now_s
        found = any(each.decode.blocked_until_s <= now_s and not full(each, need, now_s) for each in self._decodes)
        if not found:
            found = any(not full(each, need, now_s) for each in self._able_decodes())
        if not found:
            self._no_room_for_tokens = need
        return found

    def _able_decodes(self) -> list[Endpoint]:
        """Those that did not just fail; if all did, all of them."""
        return [each for each in self._decodes if each.decode.blocked_until_s <= self._now_s] or self._decodes
