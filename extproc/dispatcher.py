"""The decision with a clock and an event loop: prompts wait here for their workers, and everybody reports here.

The router (:mod:`extproc.routing.router`) decides; this wakes it when something happened or its time has come, and passes on
what it says to those who wait.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import islice
from typing import Any

import msgspec

from extproc.errors import ApiError
from extproc.models import Names, unknown_model_message
from extproc.observe.logs import Logger
from extproc.observe.metrics import Metrics
from extproc.observe.reasons import reason_of
from extproc.routing.job import Job
from extproc.routing.load import Load
from extproc.routing.partition import POOL_LABEL
from extproc.routing.picker import FullError, NoEndpointError
from extproc.routing.pool import Endpoint, Role
from extproc.routing.router import Router
from extproc.routing.ticket import RejectedError, State, Ticket
from extproc.routing.truth import Check

REMEMBERED = 200
"""Decisions that `/debug/decisions` shows."""

_CODES = {
    "queue_full": "queue_full",
    "queue_wait": "queue_timeout",
    "late": "slo_unreachable",
    "max_in_flight": "policy_limit",
    "deadline": "prefill_timeout",
}
"""Reason of the router -> code of the error that the client reads."""

_LEAK_SWEEP_S = 10.0

_RANK = re.compile(r"_dp([0-9]{1,4})$")
"""Of an engine's id. What has more digits is no rank, and one worker says no more of them than are remembered."""


class Dispatcher:
    """One for all requests of a process."""

    def __init__(
        self,
        router: Router,
        *,
        names: Names,
        metrics: Metrics,
        log: Logger,
        longest_request_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``longest_request_s``: nothing can be in flight for longer, so what still counts then is a leak."""
        self.router = router
        self._names = names
        self._metrics = metrics
        self._log = log
        self._clock = clock
        self._longest_s = longest_request_s
        self._waiting: dict[Ticket, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._decisions: deque[dict[str, Any]] = deque(maxlen=REMEMBERED)
        self._engines: dict[str, dict[str, str]] = {}
        """Worker -> data-parallel rank, empty where there is one engine -> the engine's id."""
        self.on_restart: Callable[[str], None] = lambda _address: None
        """Told of a worker whose engine is a new one."""
        self._panics = 0
        self._mistrusted = 0

    # -- a prompt ----------------------------------------------------------------------------------------------------------

    def submit(self, job: Job) -> Ticket:
        """A ticket that is placed, or waits. Whoever holds it calls :meth:`finish` in the end. Raises ApiError."""
        try:
            ticket = self.router.submit(job, self._clock())
        except (RejectedError, NoEndpointError) as error:
            self._count_rejected(error)
            self._look_again()
            raise self.as_api_error(error) from None
        if ticket.state is State.WAITING:
            self._waiting[ticket] = asyncio.get_running_loop().create_future()
        self._look_again()
        return ticket

    def _look_again(self) -> None:
        """A prompt came: it may have let others go first, and if it waits, its limits are to be watched."""
        if self.router.unsettled:
            self.stir()
        elif self._waiting:
            self._set_alarm()

    def settled(self, ticket: Ticket) -> asyncio.Future[None] | None:
        """Done when the ticket is no longer waiting; None if it is not."""
        return self._waiting.get(ticket)

    def note(self, ticket: Ticket, request_id: str, instead_of: str | None = None) -> None:
        """Count and keep the decision of a placed ticket, for whoever asks why. Raises ApiError if it was turned away.

        ``instead_of``: the error of a handoff that the prompt was to have.
        """
        if ticket.error is not None:
            self._count_rejected(ticket.error)
            raise self.as_api_error(ticket.error) from None
        decision = ticket.decision
        assert decision is not None
        mode = "aggregate" if decision.prefill is None else "disaggregate"
        self._metrics.decisions.inc(mode, instead_of or reason_of(decision), decision.policy)
        if self.router.known is not None:
            known = ticket.job.token_chain is not None
            self._metrics.cache_lookups.inc(decision.cached_by if known else "no_tokens")
            self._count_rank("prefill", decision.prefill_rank)
            self._count_rank("decode", decision.decode_rank)
        if ticket.waiting is not None:
            self._metrics.queue_wait_seconds.observe(decision.queued_s)
            self._metrics.queue_position.observe(decision.position)
        self._decisions.append({"time": time.time(), "request_id": request_id, "decision": decision})

    def as_api_error(self, error: Exception) -> ApiError:
        """What the client is told."""
        return as_api_error(error, self._names.cards(self.router.pool.models()))

    def _count_rejected(self, error: Exception) -> None:
        reason = error.reason if isinstance(error, RejectedError) else "no_endpoint"
        self._metrics.rejected.labels(reason).inc()

    # -- what became of it -------------------------------------------------------------------------------------------------

    def prefilled(self, ticket: Ticket, *, tokens: int | None, cached_tokens: int | None, engine_id: str | None) -> None:
        """The prefill worker replied."""
        endpoint = ticket.prefill
        if endpoint is not None and engine_id is not None and self._is_new(endpoint, engine_id):
            self.router.told.new_engine(endpoint.address, engine_id)
        predicted = self.router.predicted_tokens
        self.router.prefill_done(ticket, self._clock(), tokens=tokens, cached_tokens=cached_tokens)
        if self.router.known is not None:
            self._count_transfer(ticket)
        if cached_tokens is not None:
            metrics = self._metrics
            metrics.prefix_prompt_tokens.inc(by=ticket.job.tokens if tokens is None else tokens)
            metrics.prefix_predicted_tokens.inc(by=self.router.predicted_tokens - predicted)
            metrics.prefix_reported_tokens.inc(by=cached_tokens)
            if ticket.check is not None and endpoint is not None:
                self._count_check(endpoint.address, ticket.check)
        self.stir()

    def _count_transfer(self, ticket: Ticket) -> None:
        """What its decode worker will get, as far as is known."""
        decode, hits, job = ticket.decode, ticket.hits, ticket.job
        if decode is not None and hits is not None:
            held_tokens = hits.at_once(decode)
            if ticket.decode_rank is None and decode.address in hits.ranks:
                held_tokens -= hits.ranks[decode.address].more_tokens
            missing_tokens = max(0, job.tokens - held_tokens)
            size_bytes = missing_tokens * self.router.costs.kv_bytes_per_token(job)
            self._metrics.cache_transfer_bytes.inc(decode.address, by=size_bytes)

    def _count_check(self, address: str, check: Check) -> None:
        metrics, source = self._metrics, check.source
        metrics.cache_expected_tokens.inc(address, source, by=check.expected_tokens)
        metrics.cache_found_tokens.inc(address, source, by=check.found_tokens)
        if check.stored_tokens:
            metrics.cache_stored_tokens.inc(address, by=check.stored_tokens)
        metrics.cache_error_share.observe(check.error_share, source)
        mistrusted = self.router.known.truth.mistrusted if self.router.known is not None else 0
        if mistrusted > self._mistrusted:
            self._mistrusted = mistrusted
            metrics.cache_mistrusted.inc(address)
            self._log.warning(
                "kv_events_mistrusted", endpoint=address, expected=check.expected_tokens, found=check.found_tokens
            )

    def prefill_failed(self, ticket: Ticket, *, blame: bool) -> None:
        """There was no handoff."""
        self.router.prefill_failed(ticket, self._clock(), blame=blame)
        self.stir()

    def prefill_again(self, ticket: Ticket, exclude: Collection[str]) -> Endpoint:
        """Another prefill worker. Raises NoEndpointError."""
        endpoint = self.router.prefill_again(ticket, self._clock(), exclude)
        self._count_rank("prefill", ticket.prefill_rank)
        return endpoint

    def decode_again(self, ticket: Ticket) -> Endpoint:
        """Another decode worker. Raises ApiError."""
        try:
            endpoint = self.router.decode_again(ticket, self._clock())
        except NoEndpointError as error:
            raise self.as_api_error(error) from None
        self._count_rank("decode", ticket.decode_rank)
        return endpoint

    def _count_rank(self, role: str, rank: int | None) -> None:
        """A leg goes to a worker."""
        if rank is not None:
            self._metrics.ranks_named.inc(role)

    def alternatives(self, ticket: Ticket, most: int) -> list[str]:
        """Other decode workers, ``ip:port``, for a prompt that is not handed over."""
        return self.router.alternatives(ticket, most, self._clock())

    def served_by(self, ticket: Ticket, address: str) -> Endpoint | None:
        """Another worker than the chosen one has the request; None if it is no decode worker of the pool."""
        served = self.router.served_by(ticket, address, self._clock())
        self.stir()
        return served

    def answered(self, ticket: Ticket, *, ok: bool, pair_fault: bool = False) -> None:
        """The decode worker's answer began, or failed."""
        self.router.answered(ticket, self._clock(), ok=ok, pair_fault=pair_fault)

    def routine(self, ticket: Ticket) -> bool:
        """A good answer would say nothing new: its workers have met, and none has failed since."""
        return self.router.routine(ticket)

    def unseen(self, ticket: Ticket) -> None:
        """It is handed over, and nobody will say that its answer is good. Only for what is :meth:`routine`."""
        self.router.handing_over(ticket)

    def finish(self, ticket: Ticket) -> None:
        """The request is over. Idempotent."""
        self._waiting.pop(ticket, None)
        self.router.finish(ticket, self._clock())
        self.stir()

    # -- the workers -------------------------------------------------------------------------------------------------------

    def on_load(self, address: str, load: Load) -> None:
        """A worker reported."""
        if load.restarted:
            self._log.info("worker_restarted", endpoint=address)
            self.on_restart(address)
        self.router.on_load(address, load, self._clock())
        self.stir()

    def restarted(self, endpoint: Endpoint) -> None:
        """The engine there is a new one."""
        self._log.info("worker_restarted", endpoint=endpoint.address)
        self._engines.pop(endpoint.address, None)  # whoever answers there next is no further restart
        self.router.restarted(endpoint.address)
        self.on_restart(endpoint.address)

    def gone(self, addresses: Iterable[str]) -> None:
        """These workers have left: what comes to their addresses is new, and no restart."""
        for address in addresses:
            self._engines.pop(address, None)

    def engine_told(self, address: str, engine_id: str) -> None:
        """Another process has had a reply of this engine."""
        endpoint = self.router.pool.get(address)
        if endpoint is not None:
            self._is_new(endpoint, engine_id)

    def _is_new(self, endpoint: Endpoint, engine_id: str) -> bool:
        """An engine has said who it is: whether nobody knew. Another one in the place of one that was known is a restart."""
        rank = rank_of(engine_id)
        before = self._engines.get(endpoint.address, {}).get(rank)
        if before == engine_id:
            return False
        if before is not None:
            self.restarted(endpoint)  # with all of its ranks: those of a server start together
        self._engines.setdefault(endpoint.address, {})[rank] = engine_id
        return True

    # -- time --------------------------------------------------------------------------------------------------------------

    def stir(self) -> None:
        """Something happened: place whom it lets go, and set the alarm for the next time."""
        if not self._waiting:
            return
        now_s = self._clock()
        for ticket in self.router.poll(now_s):
            future = self._waiting.pop(ticket, None)
            if future is not None and not future.done():
                future.set_result(None)
        self._set_alarm()

    def _set_alarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        wake_s = self.router.next_wake_s()
        if wake_s is not None and self._waiting:
            delay_s = max(wake_s - self._clock(), 0.001)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.stir()

    async def run(self) -> None:
        """Guard the ledger against leaks, until cancelled."""
        while True:
            await asyncio.sleep(_LEAK_SWEEP_S)
            now_s = self._clock()
            leaked = self.router.pool.expire(now_s - self._longest_s, now_s)
            if leaked:
                self._metrics.ledger_leaks.inc(leaked)
                self._log.error("ledger_leak", claims=leaked)
            panics, self._panics = self.router.picker.panics - self._panics, self.router.picker.panics
            if panics:
                self._metrics.fallbacks.labels("panic").inc(panics)

    # -- for people --------------------------------------------------------------------------------------------------------

    def decisions(self, last: int = REMEMBERED) -> list[dict[str, Any]]:
        """The last decisions, the newest first, ready for JSON."""
        return [msgspec.to_builtins(each) for each in self.noted(last)]

    def noted(self, last: int) -> Iterator[dict[str, Any]]:
        """The same, with the :class:`~extproc.routing.decision.Decision` itself."""
        return islice(reversed(self._decisions), last)

    def now_s(self) -> float:
        """On the clock of the decisions."""
        return self._clock()


def rank_of(engine_id: str) -> str:
    """The data-parallel rank in the id of an engine; empty: it has none. vLLM 0.32 puts `_dp` and the rank behind the id that
    the engines of a server have in common (v1/engine/core.py and utils.py)."""
    found = _RANK.search(engine_id)
    return "" if found is None else found[1]


def as_api_error(error: Exception, known_models: Iterable[str]) -> ApiError:
    """What the client is told of an error of the router. ``known_models``: those that live workers serve, and aliases."""
    if isinstance(error, RejectedError):
        code = _CODES[error.reason]
        return ApiError(code, str(error), retry_after_s=error.retry_after_s if code != "prefill_timeout" else None)
    if isinstance(error, NoEndpointError):
        if error.subset:
            return ApiError("no_subset_worker", str(error))
        if error.model is not None:
            return ApiError("model_not_found", unknown_model_message(error.model, known_models), param="model")
        return ApiError(f"no_{error.role.value}_worker", str(error))
    assert isinstance(error, FullError)
    return ApiError("no_decode_worker", "every decode worker runs all the sequences that it can")


def live_decode_worker(router: Router) -> Callable[[str, Collection[str]], str | None]:
    """Names live decode workers of the pool of a prefill worker in turn, none of those that it is given besides; None if there
    is no other. For a worker that only decodes, and keeps blocks for the next turn, it names those who read from it: prefill
    workers."""
    turn = 0

    def name(prefill: str, exclude: Collection[str]) -> str | None:
        nonlocal turn
        giver = router.pool.get(prefill)
        decodes_only = giver is not None and giver.roles == {Role.DECODE}
        live = [each for each in router.pool.live(Role.PREFILL if decodes_only else Role.DECODE) if each is not giver]
        if giver is not None and POOL_LABEL in giver.labels:  # one of another pool may not understand it
            live = [each for each in live if each.labels.get(POOL_LABEL) == giver.labels[POOL_LABEL]]
        found = [each.address for each in live if each.address not in exclude]
        turn += 1
        return found[turn % len(found)] if found else None

    return name
