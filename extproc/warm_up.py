"""Workers meet before clients need them to: runs what :mod:`extproc.warm_plan` asks for, and keeps requests off the others.

A prompt for which no pair is warm waits here until one is. Several filters each do this for themselves; a pair that has met
through another one costs a small prompt more.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from extproc.config import Config
from extproc.dispatcher import Dispatcher
from extproc.errors import ApiError
from extproc.observe.logs import Logger
from extproc.observe.metrics import Metrics
from extproc.policy_config import Match, PolicyRule, WorkerLabels, pools_of
from extproc.routing.job import Job, Mode
from extproc.routing.partition import POOL_LABEL
from extproc.routing.pool import Endpoint, Role, matches
from extproc.warm_call import Meeting, MeetingError
from extproc.warm_plan import Link, Plan, Worker

_TICK_S = 0.2
_SHOWN = 20
"""Pairs that do not work, as `/healthz` shows them."""
_RETRY_AFTER_S = 5.0
_UNSURE_S = 5.0
"""A worker that was away and does not report by then counts as a new engine."""
_ALONE_S = 15.0
"""So long another process may take to make a worker warm."""
_GROUPS = 1_000
"""Kinds of prompts of which is remembered whether they have to wait."""

_Group = tuple[str | None, tuple[tuple[str, str], ...], tuple[tuple[str, str], ...], frozenset[str] | None]


class WarmUp:
    """One for a process. ``run`` must be running."""

    def __init__(
        self,
        config: Config,
        dispatcher: Dispatcher,
        meeting: Meeting,
        *,
        metrics: Metrics,
        log: Logger,
        on_change: Callable[[], None],
        leads: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``on_change`` is called when a worker begins or ceases to be warm. ``leads``: no other process of this filter makes
        first handoffs, and says whom they let meet."""
        self._settings = config.warm_up
        self._dispatcher = dispatcher
        self._router = dispatcher.router
        self._pairs = dispatcher.router.costs.pairs
        self._meeting = meeting
        self._metrics = metrics
        self._log = log
        self._on_change = on_change
        self._leads = leads
        self._clock = clock
        partition = self._router.pool.partition
        self._rules = rules(config.policies, () if partition is None else partition.names)
        self._plan = Plan(config.warm_up, self._pairs)
        if self._settings.enabled:
            self._pairs.on_forget = self._forgotten
        self._first = random.random()  # noqa: S311 (no secret)
        self._seen: tuple[int, int] | None = None
        """Versions of the pool and of the pairs that were looked at last."""
        self._counted: tuple[tuple[int, int] | None, tuple[int, int]] = (None, (0, 0))
        self._live: dict[str, Endpoint] = {}
        self._workers: dict[str, Worker] = {}
        self._since_s: dict[str, float] = {}
        """Workers that are not warm, and since when."""
        self._unwarmed: set[str] = set()
        """Workers that were given up on."""
        self._unsure: dict[str, float] = {}
        """Workers that were away, and until when their next report is waited for."""
        self._waiting: dict[asyncio.Future[None], Job] = {}
        self._states: dict[_Group, tuple[bool, bool]] = {}
        self._transferred: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        metrics.pairs_warm.set_function(lambda: self._counts()[0])
        metrics.pairs_cold.set_function(lambda: self._counts()[1] - self._counts()[0])
        metrics.endpoints_warming.set_function(lambda: len(self._since_s))
        metrics.warm_up_waiting.set_function(lambda: len(self._waiting))

    async def run(self) -> None:
        """Let workers meet until cancelled."""
        if not self._settings.enabled:
            return
        try:
            while True:
                self.sync()
                self._start()
                await asyncio.sleep(_TICK_S)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- what happens ------------------------------------------------------------------------------------------------------

    def came(self, address: str, *, again: bool) -> None:
        """The worker is live, and was not before. ``again``: it may be the engine that was there; its next report tells."""
        if not self._settings.enabled:
            return
        if again:
            self._unsure[address] = self._clock() + _UNSURE_S
        else:
            self._renew(address)
        self._seen = None
        self.sync()

    def reported(self, address: str, *, same: bool) -> None:
        """``same``: the engine is surely the one of its last report."""
        if address in self._unsure:
            if same:
                del self._unsure[address]
            else:
                self._renew(address)
            self._seen = None
            self.sync()

    def _renew(self, address: str) -> None:
        """Nobody has met it."""
        self._unsure.pop(address, None)
        self._pairs.part(address)
        self._plan.renewed(address)
        self._router.told.renewed(address)

    def _forgotten(self, address: str) -> None:
        """The engine is another one, or gone."""
        self._unsure.pop(address, None)
        self._plan.renewed(address)
        self._seen = None
        # Not at once: whoever found out may be in the middle of something.
        asyncio.get_running_loop().call_soon(self.sync)

    def sync(self) -> None:
        """Workers may have come or gone, or met: find out who is warm."""
        if not self._settings.enabled:
            return
        now_s = self._clock()
        for address in [address for address, until_s in self._unsure.items() if until_s <= now_s]:
            self._renew(address)
            self._seen = None
        seen = self._router.pool.version, self._pairs.changes
        if seen != self._seen:
            self._look()
            self._seen = self._router.pool.version, seen[1]
        self._give_up()
        self._let_go()

    def _look(self) -> None:
        self._live = {each.address: each for each in self._router.pool.endpoints if each.live and not each.leaving}
        workers = {address: _worker(endpoint, self._rules) for address, endpoint in self._live.items()}
        if workers != self._workers:
            self._workers = workers
            # Each filter begins elsewhere, or several would all be at the same workers.
            first = int(self._first * len(workers))
            found = list(workers.values())
            self._plan.workers(found[first:] + found[:first])
        else:
            self._plan.look()
        self._let_be(self._clock())

    def _let_be(self, now_s: float) -> None:
        """Tell the pool who is warm."""
        changed = False
        for address, endpoint in self._live.items():
            warm = address in self._plan.warm and address not in self._unsure
            warming = not warm and self._plan.has_partners(address)
            if not warming:
                self._since_s.pop(address, None)
            elif address not in self._since_s:
                self._since_s[address] = now_s
            if warming is not endpoint.warming:
                self._router.pool.set_warming(endpoint, warming)
                changed = True
                self._log.info("worker_warming" if warming else "worker_warm", endpoint=address)
        for address in self._since_s.keys() - self._live.keys():
            del self._since_s[address]
        self._states.clear()
        if changed:
            self._dispatcher.stir()
            self._on_change()

    def _give_up(self) -> None:
        """Say so once, when workers begin to be used that could not be warmed."""
        now_s = self._clock()
        late = {address for address, since_s in self._since_s.items() if now_s - since_s >= self._settings.give_up_s}
        if late != self._unwarmed:
            self._states.clear()
        if late - self._unwarmed:
            self._log.error("serving_unwarmed", endpoints=sorted(late), why=dict(self._plan.why_cold()))
        self._unwarmed, before = late, self._unwarmed
        if late != before:
            self._on_change()

    def took_transfer(self, address: str) -> bool:
        """Whether the decode worker has had a transfer of ours since this was last asked.

        What it reports of transfers then says nothing about bandwidth: a first one is nearly all handshake.
        """
        found = address in self._transferred
        self._transferred.discard(address)
        return found

    # -- meetings ----------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if not self._leads() and not self._left_alone():
            return
        for link in self._plan.next(self._clock()):
            task = asyncio.create_task(self._meet(link))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _left_alone(self) -> bool:
        """Whether a worker is not warm for so long that the process which should see to it seems not to."""
        return min(self._since_s.values(), default=math.inf) <= self._clock() - _ALONE_S

    async def _meet(self, link: Link) -> None:
        started_s = self._clock()
        self._transferred.add(link.decode)
        reason: str | None = None
        try:
            await self._meeting.hold(link.prefill, link.decode, self._model(link))
        except MeetingError as error:
            reason = str(error)
        except Exception as error:
            # A fault of ours must not keep the two apart for ever: they are tried again like others.
            self._log.exception("warm_up_fault", prefill=link.prefill, decode=link.decode)
            reason = f"{type(error).__name__}: {error}"
        self._transferred.add(link.decode)
        self._ended(link, reason, self._clock() - started_s)
        self.sync()
        self._start()

    def _ended(self, link: Link, reason: str | None, seconds: float) -> None:
        now_s = self._clock()
        known = {"prefill": link.prefill, "decode": link.decode, "seconds": round(seconds, 3)}
        present = all(address in self._live for address in link)
        if reason is None:
            if present and not self._plan.is_void(link):
                self._pairs.succeeded(*link)
                self._router.told.met(*link)
            self._plan.ended(link, None, now_s)
            self._seen = None
            self._metrics.warm_ups.labels("ok").inc()
            self._metrics.warm_up_seconds.observe(seconds)
            self._log.info("pair_warm", **known)
        else:
            if present:
                self._pairs.failed(*link, now_s)
            given_up = self._plan.ended(link, reason, now_s)
            self._seen = None
            self._metrics.warm_ups.labels("given_up" if given_up else "failed").inc()
            self._log.warning("pair_given_up" if given_up else "pair_not_warm", reason=reason, **known)

    def _model(self, link: Link) -> str | None:
        """One that both serve; the first that the prefill worker lists, which is no adapter. None: nobody knows any."""
        names = [_names(self._live[address]) for address in link if address in self._live]
        known = [each for each in names if each is not None]
        return next((name for name in known[0] if all(name in each for each in known)), None) if known else None

    # -- prompts that come meanwhile ---------------------------------------------------------------------------------------

    def admit(self, job: Job) -> asyncio.Future[None] | None:
        """What a prompt has to wait for before it is given workers; None: nothing. The future may raise ApiError.

        Only a prompt that needs a handoff waits: one that a single worker serves has no first transfer to fear.
        """
        if not self._since_s or not job.handoff or job.aims.mode is Mode.AGGREGATE:
            return None
        open_, warm = self._state(job)
        if warm:
            return None
        if open_ or self._settings.when_cold == "serve":
            self._metrics.fallbacks.labels("unwarmed").inc()
            return None
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self._waiting[future] = job
        timer = loop.call_later(max(0.0, job.deadline_s - self._clock()), self._too_late, future)

        def over(_: asyncio.Future[None]) -> None:
            timer.cancel()
            self._waiting.pop(future, None)

        future.add_done_callback(over)
        return future

    def _too_late(self, future: asyncio.Future[None]) -> None:
        if not future.done():
            met, total = self._counts()
            message = f"no pair of workers that could serve this is warm yet ({met} of {total} pairs are)"
            future.set_exception(ApiError("warming", message, retry_after_s=_RETRY_AFTER_S))

    def _let_go(self) -> None:
        for future, job in list(self._waiting.items()):
            open_, warm = self._state(job)
            if future.done() or not open_:
                continue
            if not warm:
                self._metrics.fallbacks.labels("unwarmed").inc()
            future.set_result(None)

    def _state(self, job: Job) -> tuple[bool, bool]:
        """Whether it need not wait (any longer), and whether that is because a pair is warm (or nobody is live)."""
        group = _group(job)
        if group not in self._states:
            if len(self._states) > _GROUPS:
                self._states.clear()
            self._states[group] = self._weigh(group)
        return self._states[group]

    def _weigh(self, group: _Group) -> tuple[bool, bool]:
        model, prefill_labels, decode_labels, only = group
        open_ = warm = True
        for role, wanted, among in ((Role.PREFILL, prefill_labels, None), (Role.DECODE, decode_labels, only)):
            fitting = [
                each
                for each in self._live.values()
                if role in each.roles
                and each.serves(model)
                and matches(each.labels, dict(wanted))
                and (among is None or each.address in among)
            ]
            if not fitting:
                return True, True  # whoever chooses says what is missing
            warm &= any(not each.warming for each in fitting)
            open_ &= any(not each.warming or each.address in self._unwarmed for each in fitting)
        return open_, warm

    # -- for people --------------------------------------------------------------------------------------------------------

    def ready(self) -> bool:
        """Whether a pair is warm, or there is none to be warmed, or that was given up."""
        if not self._since_s:
            return True
        usable = [each for each in self._live.values() if not each.warming or each.address in self._unwarmed]
        return all(any(role in each.roles for each in usable) for role in Role)

    def status(self) -> dict[str, Any]:
        """As `/healthz` shows it."""
        if not self._settings.enabled:
            return {"enabled": False}
        met, total = self._counts()
        cold = self._plan.why_cold()
        return {
            "enabled": True,
            "pairs_warm": met,
            "pairs": total,
            "warming": {address: cold.get(address) for address in self._since_s},
            "waiting_requests": len(self._waiting),
            "failing": [msgspec.to_builtins(each) for each in self._plan.failing()[:_SHOWN]],
        }

    def summary(self) -> str:
        """In a few words."""
        met, total = self._counts()
        return f"warming: {met} of {total} pairs"

    def _counts(self) -> tuple[int, int]:
        """Pairs that are warm, and all."""
        seen = self._router.pool.version, self._pairs.changes
        if self._counted[0] != seen:
            self._counted = seen, self._plan.counts()
        return self._counted[1]


def _group(job: Job) -> _Group:
    return job.model, _items(job.aims.prefill_labels), _items(job.aims.decode_labels), job.only


def _items(labels: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(labels.items()))


def _names(endpoint: Endpoint) -> list[str] | None:
    if endpoint.spec.models is not None:
        return list(endpoint.spec.models)
    return None if endpoint.models is None else list(endpoint.models)


def rules(policies: Sequence[PolicyRule], pools: Sequence[str] = ()) -> list[WorkerLabels]:
    """The labels that the two workers of a handoff may be asked for, one item for each policy that hands over.

    ``pools``: all there are; then one for each policy and pool that it may send to.
    """
    handing_over = [each for each in policies if each.mode is not Mode.AGGREGATE or "mode" in each.allow_overrides]
    found = [(each.workers, tuple(pools_of(each)) or pools) for each in handing_over]
    if not any(each.match == Match() for each in policies):
        # What matches no policy is handed over where that costs less, between any two.
        found.append((WorkerLabels(), pools))
    if not pools:
        return [labels for labels, _ in found]
    inside: list[WorkerLabels] = []
    for labels, among in found:
        for pool in among:
            within = {POOL_LABEL: pool}
            both = WorkerLabels(prefill={**labels.prefill, **within}, decode={**labels.decode, **within})
            if both not in inside:
                inside.append(both)
    return inside


def _worker(endpoint: Endpoint, wanted: Sequence[WorkerLabels]) -> Worker:
    names = _names(endpoint)

    def under(role: Role) -> frozenset[int]:
        if role not in endpoint.roles:
            return frozenset()
        labels = [each.prefill if role is Role.PREFILL else each.decode for each in wanted]
        return frozenset(place for place, each in enumerate(labels) if matches(endpoint.labels, each))

    return Worker(
        address=endpoint.address,
        prefill=under(Role.PREFILL),
        decode=under(Role.DECODE),
        models=None if names is None else frozenset(names),
    )
