"""Prompts in, workers out: the one object that holds what the decision needs, and that everything is told to.

Pure: whoever drives it (the filter, or `baton replay`) gives the time, and asks again when something happened or when
:meth:`Router.next_wake_s` is reached. Every prompt has a :class:`Ticket`, from :meth:`Router.submit` to :meth:`Router.finish`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from contextlib import suppress
from itertools import islice

from extproc.routing import health
from extproc.routing.cost import Costs
from extproc.routing.decision import Candidate
from extproc.routing.hits import Below
from extproc.routing.holdings import Holdings
from extproc.routing.job import Job, Late, Mode
from extproc.routing.load import Load
from extproc.routing.picker import WEIGHED, FullError, NoEndpointError, Picker, decision, worth_a_handoff
from extproc.routing.pool import Claim, Endpoint, Pool, Role
from extproc.routing.prefix import Chain, PrefixIndex
from extproc.routing.queue import Fit, PrefillQueue, QueueFullError, Waiting, slo_deadline_s
from extproc.routing.scales import SMALL_WORK_S, Scales
from extproc.routing.settings import Routing
from extproc.routing.stores import Stores
from extproc.routing.ticket import RejectedError, State, Ticket
from extproc.routing.told import Others, Told
from extproc.routing.true_hits import Known
from extproc.routing.truth import Check
from extproc.routing.weighing import Weighed

_TICK_S = 0.2
"""While prompts wait, the queue is looked at so often, whatever happens: reports grow stale, pauses of workers end."""

_LOOKED_UP, _LOOK_UP_S = 4, 0.05
"""Of the prompts that wait so many at most are looked up again at a time, so often: each takes up to a millisecond or two."""

_RETRY_AFTER_MAX_S = 60.0

_LATE_LOOKED_AT = 32
"""Late prompts for which a spare decode worker is looked for, at a time."""

_SPARE_WORK = 2.0
"""How many times the work that a prompt needs on a prefill worker it may need on a spare decode worker."""


class Router:
    """The decision for one pool."""

    def __init__(
        self,
        pool: Pool,
        settings: Routing,
        index: PrefixIndex | None = None,
        holdings: Holdings | None = None,
        stores: Stores | None = None,
        *,
        predicts: bool = True,
    ) -> None:
        """``holdings``: what workers say they hold; None: none of them tells. ``stores``: what cache servers hold, which counts
        beside it. ``predicts``: whether the index counts where ``holdings`` does not know."""
        self.pool = pool
        self.settings = settings
        self.index = index if index is not None else PrefixIndex(settings.index_blocks)
        self.costs = Costs(settings)
        self.picker = Picker(pool, self.costs, settings)
        self.queue = PrefillQueue(settings)
        self.known = None if holdings is None else Known(pool, self.costs, holdings, stores, predicts=predicts)
        """What workers hold by their own word; None: nobody tells."""
        self.scales = Scales(self.picker, self.costs, self.index, self.queue, settings, self.known)
        self.predicted_tokens = self.reported_tokens = 0
        """Prompt tokens that prefill workers were expected to have in their caches, and had."""
        self.told = Told()
        """Who wants to know what happens here."""
        self.others = Others()
        """Routers of the same workers in other processes."""
        self._yielding_s = self._ours_from_s = math.inf
        """Since when another router may go first, and until when."""
        self._freed_s = -math.inf
        """When something last ended that was on a worker."""
        self._turn = 0
        self._tickets: dict[Waiting, Ticket] = {}
        self._heads: dict[int, set[Ticket]] = {}
        """First block of a prompt -> the tickets that wait with it: when one of them is placed, the others' hits change."""
        self._in_flight: dict[str, int] = {}
        self._impatient = 0
        self._changed: list[Ticket] = []
        self._settled = True
        self._last_poll_s = 0.0
        self._looked_up_s = -math.inf
        """When prompts that wait were last looked up again."""
        self._resize_all()

    # -- what the world says -----------------------------------------------------------------------------------------------

    def sync(self) -> None:
        """The pool has other endpoints than before. What is known of those that went at once, with nothing to finish, goes too:
        another worker may come to such an address."""
        self._settled = False
        self._forget([address for address in self.index.addresses() if self.pool.get(address) is None])
        self._resize_all()

    def sweep(self) -> list[str]:
        """Forget the workers that have left and have nothing more to do; their addresses."""
        gone = self.pool.sweep()
        self._forget(gone)
        return gone

    def _forget(self, gone: Collection[str]) -> None:
        if not gone:
            return
        for address in gone:
            self.index.drop(address)
            if self.known is not None:
                self.known.forget(address)
        self.costs.forget(gone)
        addresses = frozenset(gone)
        for tickets in self._heads.values():
            for ticket in tickets:
                if ticket.hits is not None and not addresses.isdisjoint(ticket.hits.tokens):
                    ticket.hits = ticket.warmest = ticket.stuck = None

    def restarted(self, address: str) -> None:
        """The engine at ``address`` is a new one: it holds nothing, and nobody has met it."""
        self._settled = False
        self.index.clear(address)
        if self.known is not None:
            self.known.forget(address)
        self.costs.pairs.forget(address)
        self.costs.back.forget(address)
        for tickets in self._heads.values():
            for ticket in tickets:
                ticket.hits = ticket.warmest = ticket.stuck = None

    def on_load(self, address: str, load: Load, now_s: float) -> None:
        """A worker reported."""
        endpoint = self.pool.get(address)
        if endpoint is None:
            return
        self._settled = False
        if load.restarted:
            self.restarted(address)
        endpoint.load = load
        if load.kv_tokens is not None and endpoint.spec.kv_tokens is None:
            endpoint.kv_tokens = load.kv_tokens
            self._resize(endpoint)
        if load.running is not None or load.waiting is not None:
            present = (load.running or 0.0) + (load.waiting or 0.0)
            both = len(endpoint.roles) > 1
            own = endpoint.prefill.reported(now_s) + endpoint.decode.reported(now_s) if both else 0
            # On a worker with both roles nobody can tell the legs of others apart; most of their time is decoding.
            leg = endpoint.prefill if endpoint.roles == {Role.PREFILL} else endpoint.decode
            tokens = 0
            if load.kv_usage is not None and endpoint.kv_tokens is not None and leg is endpoint.decode:
                tokens = max(0, int(load.kv_usage * endpoint.kv_tokens) - leg.tokens)
            leg.external(max(0.0, present - (own if both else leg.reported(now_s))), now_s, tokens)
        self.costs.reported(endpoint, load)

    def _resize_all(self) -> None:
        for endpoint in self.pool.endpoints:
            self._resize(endpoint)

    def _resize(self, endpoint: Endpoint) -> None:
        tokens = endpoint.kv_tokens or self.settings.worker_kv_tokens
        self.index.set_capacity(endpoint.address, max(1, int(tokens / self.settings.block_tokens)))
        if self.known is not None and endpoint.kv_tokens is not None:
            self.known.holdings.set_capacity(endpoint.address, endpoint.kv_tokens)

    @property
    def unsettled(self) -> bool:
        """Whether :meth:`poll` would do something although no time has passed since the last call of it."""
        return bool(self._changed) or not self._settled

    # -- a prompt comes ----------------------------------------------------------------------------------------------------

    def submit(self, job: Job, now_s: float) -> Ticket:
        """A prompt: its ticket is placed already, or waits. Raises RejectedError, NoEndpointError."""
        if job.token_chain is not None and job.token_chain_whole:
            job.tokens = max(job.token_chain.tokens, 1)  # counted, not estimated
        ticket = Ticket(job)
        self.scales.forget()
        self.scales.now_s = now_s
        self.scales.arrivals.note(job.model, now_s)
        aims = job.aims
        own = self._in_flight.get(aims.policy, 0)
        if aims.max_in_flight is not None:
            if own + self.others.in_flight.get(aims.policy, 0) >= aims.max_in_flight:
                raise RejectedError("max_in_flight", f"{aims.max_in_flight} requests of policy {aims.policy!r} are open", 1.0)
            self.told.open_requests(aims.policy, own + 1)
        self._in_flight[aims.policy] = own + 1
        try:
            self._decide(ticket, now_s)
        except BaseException:
            self.finish(ticket, now_s)
            raise
        return ticket

    def _decide(self, ticket: Ticket, now_s: float) -> None:
        aims = ticket.job.aims
        held = aims.held and self.settings.dispatch == "queue" and aims.objective in WEIGHED
        try:
            ticket.whole_reason = self._whole_reason(ticket, now_s, held=held)
        except FullError:
            ticket.undecided = True  # until there is room
        if held:
            self._enqueue(ticket, now_s)
        elif ticket.whole_reason is not None:
            self._place_whole(ticket, ticket.whole_reason, now_s, admit=False)
        else:
            self._place_best(ticket, now_s)

    def _whole_reason(self, ticket: Ticket, now_s: float, *, held: bool) -> str | None:
        """Why a decode worker shall do it all; None for a handoff. Raises NoEndpointError, FullError."""
        job, aims = ticket.job, ticket.job.aims
        if not job.handoff or aims.mode is not Mode.AUTO:
            self.picker.group(Role.DECODE, job.model, aims.decode_labels, job.only)
            if not job.handoff:
                return "cannot_hand_over"
            if aims.mode is Mode.AGGREGATE:
                return "policy"
            self.picker.group(Role.PREFILL, job.model, aims.prefill_labels)
            return None
        hits = self.scales.hits(ticket)
        decodes = self.picker.decodes(job, hits, now_s, admit=held, crowded=self.scales.crowded(job))
        if len(decodes) == 1 and Role.PREFILL in decodes[0].roles and self._only_itself(job):
            ticket.weighed = None
            return "cost"
        weighed = ticket.weighed = self.picker.both(job, decodes, hits, now_s)
        ticket.candidates = weighed.apart + weighed.whole
        wait_s = self._wait_s(job) if held else 0.0
        if worth_a_handoff(aims, weighed.apart, weighed.whole, job.tokens, wait_s) is not None:
            return None
        return "threshold" if aims.threshold_uncached_tokens is not None else "cost"

    def _only_itself(self, job: Job) -> bool:
        """Whether all that could be handed over would be from a worker to itself."""
        prefills = self.picker.group(Role.PREFILL, job.model, job.aims.prefill_labels)
        decodes = self.picker.group(Role.DECODE, job.model, job.aims.decode_labels, job.only)
        return len(prefills) == len(decodes) == 1 and prefills[0] is decodes[0]

    def _wait_s(self, job: Job) -> float:
        """Expected in our queue."""
        if not len(self.queue):
            return 0.0
        return self.scales.ahead_s(job) / len(self.picker.group(Role.PREFILL, job.model, job.aims.prefill_labels))

    def _enqueue(self, ticket: Ticket, now_s: float) -> None:
        weighed = ticket.weighed
        if weighed is not None and not len(self.queue) and self._placed_at_once(ticket, weighed, now_s):
            return
        fit = self._weigh_ticket(ticket, now_s)
        waiting = Waiting(ticket.job, self.settings, now_s)
        if fit is not None and now_s + fit.soonest_s > waiting.slo_s:
            if ticket.job.aims.late is Late.REJECT:
                raise self._too_late(ticket, fit, now_s)
            if ticket.job.aims.late is Late.AGGREGATE and ticket.whole_reason is None:
                self._place_whole(ticket, "late", now_s, admit=False)
                return
            waiting.late = True
        if fit is not None and fit.ready and not waiting.late and self._may_go_first():
            self._place(ticket, fit.endpoint, now_s)
            return
        try:
            self.queue.add(waiting, fit.work_s if fit is not None else 0.0)
        except QueueFullError as error:
            raise RejectedError("queue_full", str(error), self._retry_after_s(ticket.job)) from None
        ticket.waiting = waiting
        self._tickets[waiting] = ticket
        if ticket.job.chain.hashes:
            self._heads.setdefault(ticket.job.chain.hashes[0], set()).add(ticket)
        self._impatient += ticket.job.aims.late is not Late.WAIT
        self.told.waits()
        if fit is not None and fit.ready:
            self._advance(now_s)

    def _placed_at_once(self, ticket: Ticket, weighed: Weighed, now_s: float) -> bool:
        """Nobody waits, and what was weighed a moment ago says where there is room in time: mostly so. It is not weighed again.

        False where the long way has to be gone, which ends in the same decision.
        """
        job = ticket.job
        if ticket.whole_reason is not None:
            whole = weighed.whole
            if weighed.decodes[0].decode.blocked_until_s > now_s or now_s + whole[0].terms.ttft_s > slo_deadline_s(job):
                return False
            chosen = next((each for each in whole if each.refused is None), whole[0])
            self._settle(ticket, chosen, [*whole, *weighed.apart], ticket.whole_reason, now_s)
            return True
        fit = self.scales.fit_of_few(ticket, weighed, now_s)
        if fit is None or now_s + fit[1] > slo_deadline_s(job):
            return False
        best = self.picker.decode_again(job, fit[0], weighed)
        if best is None:
            return False
        self._settle(ticket, best, ticket.candidates, "cost", now_s)
        return True

    def _may_go_first(self) -> bool:
        """Whether no prompt in the queue could go now: all were asked, and no worker has become free since."""
        return not len(self.queue) or (self._settled and len(self.queue) <= self.settings.window)

    def _too_late(self, ticket: Ticket, fit: Fit, now_s: float) -> RejectedError:
        slo_s = ticket.job.aims.ttft_slo_s or 0.0
        expected_s = now_s - ticket.job.arrived_s + fit.soonest_s
        return RejectedError(
            "late",
            f"the first token would come after {expected_s:.1f} s, and the TTFT SLO is {slo_s:g} s",
            self._retry_after_s(ticket.job),
        )

    def _retry_after_s(self, job: Job) -> float:
        """When what waits now will be served, about."""
        try:
            group = self.picker.group(Role.PREFILL, job.model, job.aims.prefill_labels)
        except NoEndpointError:
            return 1.0
        return min(max(1.0, self.scales.ahead_s(job) / len(group)), _RETRY_AFTER_MAX_S)

    # -- time passes -------------------------------------------------------------------------------------------------------

    def poll(self, now_s: float) -> list[Ticket]:
        """Place and turn away what can be; the tickets whose state changed."""
        self.scales.forget()
        self.scales.now_s = now_s
        changed = self._changed
        if self.known is not None and len(self.queue):
            self._look_up_again(now_s)
        for waiting in self.queue.due(now_s):
            ticket = self._left(waiting)
            waited_s = now_s - waiting.came_s
            reason = "queue_wait" if now_s >= waiting.limit_s else "deadline"
            self._reject(
                ticket,
                RejectedError(reason, f"it waited {waited_s:.1f} s in the queue", self._retry_after_s(ticket.job)),
                now_s,
            )
            changed.append(ticket)
        if self._impatient:
            for waiting in self.queue.late(now_s, lambda each: self._weigh(each, now_s)):
                ticket = self._left(waiting)
                fit = self._weigh_ticket(ticket, now_s)
                if ticket.job.aims.late is Late.REJECT and fit is not None:
                    self._reject(ticket, self._too_late(ticket, fit, now_s), now_s)
                else:
                    self._try(ticket, now_s, lambda each: self._place_whole(each, "late", now_s, admit=False))
                changed.append(ticket)
        self._advance(now_s)
        self._last_poll_s, self._changed = now_s, []
        return changed

    def _look_up_again(self, now_s: float) -> None:
        """What workers say they hold changes while prompts wait, for instance for a worker that holds them no more."""
        if now_s - self._looked_up_s < _LOOK_UP_S:
            return
        self._looked_up_s, left = now_s, _LOOKED_UP
        for ticket in islice(self._tickets.values(), self.settings.window):
            if self.scales.looked_up_again(ticket, now_s):
                left -= 1
                if not left:
                    break

    def next_wake_s(self) -> float | None:
        """When to poll again if nothing happens before."""
        if self._changed:
            return self._last_poll_s  # a submit placed others as well, and they are not told yet
        due_s = self.queue.next_due_s()
        if due_s is None:
            return None
        wake_s = min(due_s, self._last_poll_s + _TICK_S)
        return min(wake_s, self._ours_from_s)

    def _others_first(self, now_s: float) -> bool:
        """Whether a worker with room is for a prompt of another router, which goes before ours. Not for long: it may not suit
        that prompt."""
        theirs, ours = self.others.first, self.queue.first()
        yields = theirs is not None and ours is not None and theirs < ours
        if yields:
            self._yielding_s = min(self._yielding_s, now_s)
            # What ends meanwhile, they have yet to hear of.
            last_s = max(self._yielding_s, self._freed_s) + self.others.yield_s
            self._ours_from_s = min(last_s, self._yielding_s + self.others.yield_most_s)
            yields = now_s < self._ours_from_s
        if not yields:
            self._yielding_s = self._ours_from_s = math.inf
        return yields

    def _advance(self, now_s: float) -> None:
        if self._others_first(now_s):
            return
        while len(self.queue):
            found = self.queue.next(now_s, lambda each: self._weigh(each, now_s))
            if found is None:
                break
            waiting, fit = found
            ticket = self._left(waiting)
            endpoint = fit.endpoint
            self._try(ticket, now_s, lambda each: self._place(each, endpoint, now_s))  # noqa: B023 (called at once)
            self._changed.append(ticket)
        self._use_spare_decodes(now_s)
        self._settled = True

    def _use_spare_decodes(self, now_s: float) -> None:
        """What is late already goes whole to a decode worker that has nothing to do: there it holds up nobody."""
        for waiting in self.queue.late_ones(_LATE_LOOKED_AT):
            ticket = self._tickets[waiting]
            job = ticket.job
            if job.aims.mode is not Mode.AUTO or ticket.whole_reason is not None:
                continue
            try:
                view = self.scales.view(job, now_s)
            except NoEndpointError:
                continue
            spare = view.spare_decodes()
            if not spare:
                continue
            hits = self.scales.hits(ticket)
            decode = max(spare, key=hits.of)
            terms = self.costs.whole(job, decode, hits.of(decode), now_s, hits.load_s(decode))
            fit = self._weigh_ticket(ticket, now_s)
            if fit is not None and terms.prefill_s > _SPARE_WORK * fit.work_s + SMALL_WORK_S:
                continue  # most of it is in the cache of a prefill worker, and worth waiting for
            chosen = Candidate(prefill=None, decode=decode.address, cost=0.0, terms=terms, cached_decode_tokens=hits.of(decode))
            chosen.cost = self.costs.total(job.aims, terms, pressure=0.0)
            self.queue.remove(waiting)
            self._settle(self._left(waiting), chosen, ticket.candidates, "spare", now_s)
            self._changed.append(ticket)

    def _try(self, ticket: Ticket, now_s: float, place: Callable[[Ticket], None]) -> None:
        try:
            place(ticket)
        except (NoEndpointError, FullError) as error:
            self._reject(ticket, error, now_s)

    def _left(self, waiting: Waiting) -> Ticket:
        ticket = self._tickets.pop(waiting)
        if ticket.job.chain.hashes:
            head = ticket.job.chain.hashes[0]
            same = self._heads.get(head)
            if same is not None:
                same.discard(ticket)
                if not same:
                    del self._heads[head]
        self._impatient -= ticket.job.aims.late is not Late.WAIT
        return ticket

    def _reject(self, ticket: Ticket, error: Exception, now_s: float) -> None:
        ticket.error = error
        self.finish(ticket, now_s)
        ticket.state = State.REJECTED

    # -- where a prompt is best off ----------------------------------------------------------------------------------------

    def _weigh(self, waiting: Waiting, now_s: float) -> Fit | None:
        ticket = self._tickets[waiting]
        if ticket.stuck is not None:
            with suppress(NoEndpointError):
                if self.scales.still_stuck(ticket, now_s):
                    return None
        return self._weigh_ticket(ticket, now_s, late=waiting.late)

    def _weigh_ticket(self, ticket: Ticket, now_s: float, *, late: bool = False) -> Fit | None:
        """Where it is best off; None if nobody can take it now. Workers that are gone show when it is placed."""
        job = ticket.job
        try:
            if ticket.undecided:
                ticket.whole_reason = self._whole_reason(ticket, now_s, held=True)
                ticket.undecided = False
            if ticket.whole_reason is not None:
                best = self.picker.whole(job, self.scales.hits(ticket), now_s)[0]
                endpoint = self.pool.get(best.decode)
                assert endpoint is not None
                ttft_s = best.terms.ttft_s
                return Fit(endpoint, best.terms.prefill_s, ttft_s, ttft_s, True)
            view = self.scales.view(job, now_s)
        except NoEndpointError:
            return None
        except FullError:
            return None
        fit = self.scales.fit(ticket, view, now_s, late=late)
        if fit.ready and self.scales.looked_up_again(ticket, now_s):
            fit = self.scales.fit(ticket, view, now_s, late=late)
        return fit

    # -- placing -----------------------------------------------------------------------------------------------------------

    def _place(self, ticket: Ticket, endpoint: Endpoint, now_s: float) -> None:
        """On the worker where it is best off."""
        if ticket.whole_reason is not None:
            self._place_whole(ticket, ticket.whole_reason, now_s, admit=True)
            return
        weighed = ticket.weighed
        among = weighed.decodes if weighed is not None and weighed.now_s == now_s else None
        crowded = self.scales.crowded(ticket.job)
        best = self.picker.decode(ticket.job, endpoint, self.scales.hits(ticket), now_s, crowded=crowded, among=among)
        self._settle(ticket, best, ticket.candidates, "cost" if ticket.job.aims.mode is Mode.AUTO else "policy", now_s)

    def _place_best(self, ticket: Ticket, now_s: float) -> None:
        # What was weighed to decide whether to hand it over need not be weighed again.
        weighed = ticket.weighed
        found = ticket.candidates if weighed is not None and weighed.now_s == now_s else []
        if not found:
            found = self.picker.apart(ticket.job, self.scales.hits(ticket), now_s, admit=False)
        self._settle(ticket, found[0], found, "cost" if ticket.job.aims.mode is Mode.AUTO else "policy", now_s)

    def _place_whole(self, ticket: Ticket, reason: str, now_s: float, *, admit: bool) -> None:
        crowded = self.scales.crowded(ticket.job)
        found = self.picker.whole(ticket.job, self.scales.hits(ticket), now_s, admit=admit, crowded=crowded)
        chosen = next((each for each in found if each.refused is None), found[0])
        self._settle(ticket, chosen, [*found, *ticket.candidates], reason, now_s)

    def _settle(self, ticket: Ticket, chosen: Candidate, candidates: list[Candidate], reason: str, now_s: float) -> None:
        job = ticket.job
        made = decision(job, chosen, reason, candidates, ticket.hits)
        if ticket.waiting is not None:
            made.queued_s = now_s - ticket.waiting.came_s
            made.position = ticket.waiting.position
        decode = self.pool.get(chosen.decode)
        assert decode is not None
        if chosen.prefill is not None:
            prefill = self.pool.get(chosen.prefill)
            assert prefill is not None
            self._claim_prefill(ticket, prefill, chosen, now_s)
        self._claim_decode(ticket, decode, now_s, self._decode_rank(ticket, decode, handed_over=chosen.prefill is not None))
        made.prefill_rank, made.decode_rank = ticket.prefill_rank, ticket.decode_rank
        if chosen.prefill is None:
            decode.prefill.occupy(chosen.terms.prefill_s, now_s)
            self.told.occupied(decode.address, chosen.terms.prefill_s)
        ticket.decision, ticket.state = made, State.PLACED

    def _claim_prefill(self, ticket: Ticket, prefill: Endpoint, chosen: Candidate, now_s: float) -> None:
        job = ticket.job
        self._turn += 1
        uncached = max(job.tokens - chosen.cached_prefill_tokens, 1)
        ticket.prefill, ticket.sent_s = prefill, now_s
        ticket.prefill_rank = None if ticket.hits is None else ticket.hits.rank(prefill.address)
        ticket.prefill_claim = prefill.prefill.claim(
            tokens=uncached, work_s=chosen.terms.prefill_s + chosen.terms.load_s, now_s=now_s, turn=self._turn
        )
        health.chosen(prefill.prefill, ticket.prefill_claim, self.settings, now_s)
        late = ticket.waiting is not None and ticket.waiting.late
        ticket.prefill_claim.late = late and chosen.terms.prefill_s > SMALL_WORK_S
        self.told.claimed(ticket.prefill_claim, Role.PREFILL, prefill.address)
        if self.known is not None:
            ticket.prefill_sent = self.known.sent(prefill.address, job, now_s, ticket.prefill_rank)
        self._learn(prefill.address, job)
        self.scales.forget()

    def _decode_rank(self, ticket: Ticket, decode: Endpoint, *, handed_over: bool) -> int | None:
        """The engine that a decode leg names. With a handoff its hit saves no computing, only the transfer of what it holds."""
        named = None if ticket.hits is None else ticket.hits.ranks.get(decode.address)
        if named is None:
            return None
        if handed_over:
            size_bytes = named.more_tokens * self.costs.kv_bytes_per_token(ticket.job)
            if self.costs.transfer_rate(decode).seconds(size_bytes) < self.settings.rank_gain_s:
                return None
        return named.rank

    def _claim_decode(self, ticket: Ticket, decode: Endpoint, now_s: float, rank: int | None = None) -> None:
        job = ticket.job
        self._turn += 1
        self._not_sent(ticket)
        ticket.decode, ticket.decode_rank = decode, rank
        ticket.decode_claim = decode.decode.claim(
            tokens=job.tokens + self.costs.answer_tokens(job), work_s=0.0, now_s=now_s, turn=self._turn
        )
        health.chosen(decode.decode, ticket.decode_claim, self.settings, now_s)
        self.told.claimed(ticket.decode_claim, Role.DECODE, decode.address)
        if job.session:
            self.picker.remember(job.session, decode.address)
            self.told.at_home(job.session, decode.address)
        ticket.decode_holds = False
        if ticket.prefill_claim is None or ticket.prefill_claim.leg is None:
            self._learn_decode(ticket, decode, now_s)

    def _not_sent(self, ticket: Ticket) -> None:
        """Its decode worker until now, if there was one, does not get the prompt after all."""
        if self.known is not None:
            self.known.under_way.failed(ticket.decode_sent)
            ticket.decode_sent = None

    def _learn_decode(self, ticket: Ticket, decode: Endpoint, now_s: float) -> None:
        """Its decode worker holds the prompt, or computes it now: with a handoff that is so once the prefill is done."""
        if not ticket.decode_holds:
            ticket.decode_holds = True
            if self.known is not None:
                ticket.decode_sent = self.known.sent(decode.address, ticket.job, now_s, ticket.decode_rank)
            self._learn(decode.address, ticket.job)

    def _learn(self, address: str, job: Job) -> None:
        if not job.chain.hashes:
            return
        self._holds(address, job.chain)
        self.told.learned(address, job.chain)

    def holds(self, address: str, chain: Chain, now_s: float) -> None:
        """Another router placed a prompt, whose chain is not empty: the worker holds it, or is about to."""
        if self.known is not None:
            self.known.under_way.send_elsewhere(address, chain, now_s)
        self._holds(address, chain)

    def _holds(self, address: str, chain: Chain) -> None:
        self.index.insert(address, chain)
        several = self.known is not None and self.known.several(address)
        for other in self._heads.get(chain.hashes[0], ()):
            hits, warmest = other.hits, other.warmest
            floor = warmest.least_tokens if warmest is not None else 0
            if hits is None or not (hits.more if several else hits.learned)(other.job, address, chain, floor):
                continue
            if several:
                # One of its engines holds it: what is to be expected of them, and which to name, is to be asked again.
                other.hits = None
            other.warmest = other.stuck = None
            self._settled = False

    # -- what other routers do ---------------------------------------------------------------------------------------------

    def claim_of_another(self, endpoint: Endpoint, role: Role, *, tokens: int, work_s: float, now_s: float) -> Claim:
        """Another router put a request on a worker. :meth:`give_back` ends it."""
        self._turn += 1
        leg = endpoint.leg(role)
        claim = leg.claim(tokens=tokens, work_s=work_s, now_s=now_s, turn=self._turn, another=True)
        health.chosen(leg, claim, self.settings, now_s)
        self.scales.forget()
        return claim

    def give_back(self, claim: Claim, now_s: float) -> None:
        """The end of a claim of another router."""
        _give_back(claim, now_s)
        self._freed_s = now_s
        self.unsettle()

    def unsettle(self) -> None:
        """Something has changed by which a prompt that waits may be able to go."""
        self._settled = False
        self.scales.forget()

    # -- what became of it -------------------------------------------------------------------------------------------------

    def prefill_done(
        self, ticket: Ticket, now_s: float, *, tokens: int | None = None, cached_tokens: int | None = None
    ) -> None:
        """The prefill worker replied. ``tokens`` of the prompt, and how many of them it had cached, if it said so."""
        claim, prefill = ticket.prefill_claim, ticket.prefill
        if claim is None or prefill is None or not claim.release(now_s):
            return
        self._settled = False
        self._freed_s = now_s
        self.told.released(claim)
        if ticket.decode is not None:
            self._learn_decode(ticket, ticket.decode, now_s)
        self._went_well(prefill, Role.PREFILL)
        predicted = max(0, ticket.job.tokens - claim.tokens)
        ticket.check = None
        total = tokens if tokens is not None else ticket.job.tokens
        cached = cached_tokens if cached_tokens is not None else predicted
        if cached_tokens is not None:
            self.predicted_tokens += predicted
            self.reported_tokens += cached_tokens
        uncached = max(total - cached, 1)
        below = self._checked(ticket, prefill, predicted, cached_tokens, now_s) if self.known is not None else None
        if below is None and self.known is None:
            below = _read_before(ticket, prefill, predicted, cached_tokens)
        if below is not None:
            self.costs.loaded(prefill, ticket.job, below, sent_s=ticket.sent_s, now_s=now_s, uncached=uncached, cached=cached)
            return
        self.costs.prefilled(prefill, sent_s=ticket.sent_s, now_s=now_s, uncached=uncached, cached=cached)
        self.told.prefilled(prefill.address, sent_s=ticket.sent_s, now_s=now_s, uncached=uncached, cached=cached)

    def _checked(
        self, ticket: Ticket, prefill: Endpoint, expected: int, cached_tokens: int | None, now_s: float
    ) -> Below | None:
        """A prompt was computed where workers tell what they hold: what this one loaded first, if it is sure that it did."""
        known, job, hits = self.known, ticket.job, ticket.hits
        assert known is not None
        known.under_way.answered(ticket.prefill_sent, now_s)
        below = None if hits is None else hits.below.get(prefill.address)
        chain, stores = job.token_chain, known.stores
        # Of a prompt whose beginning alone is known, more may be found than could be expected.
        if cached_tokens is not None and (job.token_chain_whole or cached_tokens < expected):
            source = hits.source(prefill.address) if hits is not None else "predicted"
            stored = 0 if chain is None or stores is None else stores.held(prefill, chain, job.stored_tokens, now_s)
            ticket.check = Check(source, job.tokens, expected, cached_tokens, stored)
            known.truth.note(prefill.address, ticket.check)
        if chain is not None and stores is not None:
            if below is not None and below.lmcache and cached_tokens is not None and cached_tokens < expected:
                stores.missed(prefill, chain, cached_tokens, expected_tokens=expected, now_s=now_s)
            stores.stored(prefill, chain)
        if below is None or cached_tokens is None or cached_tokens < expected - below.tokens // 2:
            return None
        return below

    def _went_well(self, endpoint: Endpoint, role: Role) -> None:
        leg = endpoint.leg(role)
        if leg.failures:
            self.told.judged(role, endpoint.address, ok=True)
        health.succeeded(leg)

    def prefill_failed(self, ticket: Ticket, now_s: float, *, blame: bool) -> None:
        """There was no handoff. ``blame``: it was the worker's fault, not the request's or the client's."""
        claim, prefill = ticket.prefill_claim, ticket.prefill
        if claim is None or prefill is None or not claim.release(now_s):
            return
        self._settled = False
        self._freed_s = now_s
        self.told.released(claim)
        if self.known is not None:
            self.known.under_way.failed(ticket.prefill_sent)
        if blame:
            health.failed(prefill.prefill, self.settings, now_s)
            self.told.judged(Role.PREFILL, prefill.address, ok=False)
            self.index.correct(prefill.address, ticket.job.chain, 0)
            self.told.corrected(prefill.address, ticket.job.chain)
        else:
            health.undecided(prefill.prefill, claim, now_s)

    def prefill_again(self, ticket: Ticket, now_s: float, exclude: Collection[str]) -> Endpoint:
        """Another prefill worker for the same decode worker, at once. Raises NoEndpointError."""
        self.scales.forget()
        self.scales.now_s = now_s
        self._settled = False
        ticket.hits = None
        decode = ticket.decode
        assert decode is not None
        prefill = self.picker.prefills(ticket.job, self.scales.hits(ticket), now_s, exclude)[0]
        hits = self.scales.hits(ticket)
        terms = self.costs.apart(
            ticket.job, prefill, decode, hits.of(prefill), hits.at_once(decode), now_s, hits.load_s(prefill)
        )
        chosen = Candidate(
            prefill=prefill.address,
            decode=decode.address,
            cost=self.costs.total(ticket.job.aims, terms, pressure=0.0),
            terms=terms,
            cached_prefill_tokens=hits.of(prefill),
        )
        self._end(ticket.prefill_claim, now_s)
        self._claim_prefill(ticket, prefill, chosen, now_s)
        for address in exclude:
            failed = self.pool.get(address)
            if failed is not None:
                # Its turn is over too, or it would be the one that waits longest for the next request, and fail it again.
                self._turn += 1
                failed.prefill.turn = self._turn
        if ticket.decision is not None:
            ticket.decision.prefill, ticket.decision.reason, ticket.decision.terms = prefill.address, "retry", terms
            ticket.decision.cached_by = hits.source(prefill.address)
            ticket.decision.below_tokens = hits.below_tokens(prefill.address)
            ticket.decision.prefill_rank = ticket.prefill_rank
        return prefill

    def decode_again(self, ticket: Ticket, now_s: float) -> Endpoint:
        """Another decode worker: the one that was chosen is gone, and its count with it. Raises NoEndpointError."""
        self.scales.forget()
        self.scales.now_s = now_s
        self._settled = False
        gone = ticket.decode
        self._end(ticket.decode_claim, now_s)
        exclude = () if gone is None else (gone.address,)
        found = self.picker.whole(ticket.job, self.scales.hits(ticket), now_s, exclude, admit=False)
        decode = self.pool.get(found[0].decode)
        assert decode is not None
        handed_over = ticket.prefill is not None
        self._claim_decode(ticket, decode, now_s, self._decode_rank(ticket, decode, handed_over=handed_over))
        if ticket.decision is not None:
            ticket.decision.decode, ticket.decision.decode_rank = decode.address, ticket.decode_rank
        return decode

    def alternatives(self, ticket: Ticket, most: int, now_s: float) -> list[str]:
        """Other decode workers for a prompt that one of them does all of, the best first, at most so many: who sends it on may
        take them where the chosen one cannot be reached. None of them has failed lately."""
        chosen, job = ticket.decode, ticket.job
        if chosen is None:
            return []
        try:
            group = self.picker.group(Role.DECODE, job.model, job.aims.decode_labels, job.only)
        except NoEndpointError:
            return []
        weighed = [each.decode for each in ticket.candidates if each.prefill is None]
        rank = {address: place for place, address in enumerate(dict.fromkeys(weighed))}
        others = [each for each in group if each is not chosen and health.usable(each.decode, now_s)]
        others.sort(key=lambda each: (rank.get(each.address, len(rank)), each.decode.requests, each.decode.turn))
        return [each.address for each in others[:most]]

    def served_by(self, ticket: Ticket, address: str, now_s: float) -> Endpoint | None:
        """Not the chosen decode worker has the request, but who is at ``address``: the ledger and the index follow it.

        None: that is no decode worker of the pool. Then nobody is counted for it, and nobody is judged by its answer.
        """
        chosen, job, decision = ticket.decode, ticket.job, ticket.decision
        if chosen is None:
            return None
        self._settled = False
        self.scales.forget()
        self._end(ticket.decode_claim, now_s)
        if ticket.decode_holds and job.chain.hashes:
            # What it had before is there still.
            pair = (None if decision is None else decision.prefill, chosen.address)
            weighed = [] if decision is None else decision.candidates
            had_tokens = next((each.cached_decode_tokens for each in weighed if (each.prefill, each.decode) == pair), 0)
            self.index.correct(chosen.address, job.chain, int(had_tokens / job.chain.block_tokens))
            if not had_tokens:
                self.told.corrected(chosen.address, job.chain)
        served = self.pool.get(address)
        if served is None or Role.DECODE not in served.roles:
            self._not_sent(ticket)
            ticket.decode, ticket.decode_holds = None, False
            return None
        self._claim_decode(ticket, served, now_s)
        if decision is not None:
            decision.decode, decision.decode_rank = served.address, None
        return served

    def answered(self, ticket: Ticket, now_s: float, *, ok: bool, pair_fault: bool = False) -> None:
        """The decode worker's answer began, or it failed. A client's own fault is ``ok``; nothing failed then.

        ``pair_fault``: it may be the pair that cannot work together, not the worker.
        """
        decode, prefill = ticket.decode, ticket.prefill
        if decode is None:
            return
        handed_over = prefill is not None and ticket.decision is not None and ticket.decision.prefill is not None
        self._settled = False
        if ok:
            self._learn_decode(ticket, decode, now_s)
            if self.known is not None:
                self.known.under_way.answered(ticket.decode_sent, now_s)
            self._went_well(decode, Role.DECODE)
            if handed_over and prefill is not None:
                self.costs.handed_over(prefill.address, decode.address)
                self.told.handed_over(prefill.address, decode.address)
            return
        health.failed(decode.decode, self.settings, now_s)
        self.told.judged(Role.DECODE, decode.address, ok=False)
        if pair_fault and handed_over and prefill is not None:
            self.costs.pairs.failed(prefill.address, decode.address, now_s)
            self.told.parted(prefill.address, decode.address)

    def routine(self, ticket: Ticket) -> bool:
        """A handoff between two that have met, to a worker that has not failed lately."""
        prefill, decode = ticket.prefill, ticket.decode
        if prefill is None or decode is None or decode.decode.failures:
            return False
        return self.costs.pairs.met(prefill.address, decode.address)

    def handing_over(self, ticket: Ticket) -> None:
        """Blocks will go from one of its workers to the other: for whom the transfers count that the decode worker reports."""
        prefill, decode = ticket.prefill, ticket.decode
        if prefill is not None and decode is not None:
            self.costs.handed_over(prefill.address, decode.address)
            self.told.handed_over(prefill.address, decode.address)

    def finish(self, ticket: Ticket, now_s: float) -> None:
        """The request is over, whatever became of it: it leaves the queue, and all that it held is given back. Idempotent."""
        if ticket.state in (State.FINISHED, State.REJECTED):
            return
        waiting = ticket.waiting
        if waiting is not None and waiting in self._tickets:
            self.queue.remove(waiting)
            self._left(waiting)
        if self.known is not None:
            if ticket.prefill_claim is not None and ticket.prefill_claim.leg is not None:
                self.known.under_way.failed(ticket.prefill_sent)
            self.known.under_way.answered(ticket.decode_sent, now_s)
        self._end(ticket.prefill_claim, now_s)
        self._end(ticket.decode_claim, now_s)
        self._settled = False
        ticket.state = State.FINISHED
        policy = ticket.job.aims.policy
        left = self._in_flight.get(policy, 0) - 1
        if ticket.job.aims.max_in_flight is not None:
            self.told.open_requests(policy, max(left, 0))
        if left > 0:
            self._in_flight[policy] = left
        else:
            self._in_flight.pop(policy, None)

    def _end(self, claim: Claim | None, now_s: float) -> None:
        """Give back what is left of it, if anything."""
        if claim is not None and claim.leg is not None:
            _give_back(claim, now_s)
            self._freed_s = now_s
            self.told.released(claim)


def _read_before(ticket: Ticket, prefill: Endpoint, expected: int, cached_tokens: int | None) -> Below | None:
    """What the prefill worker read first, if it is sure that it did."""
    below = None if ticket.hits is None else ticket.hits.below.get(prefill.address)
    if below is None or cached_tokens is None or cached_tokens < expected - below.tokens // 2:
        return None
    return below


def _give_back(claim: Claim | None, now_s: float) -> None:
    """What is left of it, if anything; it told nothing about the worker."""
    leg = claim.leg if claim is not None else None
    if claim is not None and leg is not None:
        claim.release(now_s)
        health.undecided(leg, claim, now_s)
