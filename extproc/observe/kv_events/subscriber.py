"""All publishers: who is followed, in turns that never hold the event loop for long.

Decoding stays on the event loop: a thread of Python would want the same lock, and take it for five milliseconds at a time. A
turn ends after half a millisecond, and the loop does what else it has to before the next.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import aiohttp
import zmq

from extproc.observe.kv_events import addresses
from extproc.observe.kv_events.addresses import NoPublisherError, Publisher
from extproc.observe.kv_events.entering import Counts
from extproc.observe.kv_events.follower import Follower, State
from extproc.observe.kv_events.report import Report
from extproc.observe.kv_events.settings import KvEvents
from extproc.observe.logs import Logger
from extproc.observe.metrics import Metrics
from extproc.routing.holdings import Holdings
from extproc.routing.pool import Endpoint, Pool
from extproc.tls.workers import PLAIN, WorkerLink

TURN_S = 0.0005
"""So long a turn may take, and one piece of work more."""

_TICK_S = 0.5
_TOLD_EVERY = 4
"""Metrics follow every so many ticks."""
_ASK_TIMEOUT_S = 5.0
_ASKED_AT_ONCE = 16
_LONGEST_PAUSE_S = 60.0
_TIDY_EVERY_S = 0.002
_SOCKETS = 16_384


class _Followed:
    """A worker, and what is known of its publishers."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.counts = Counts()
        self.followers: dict[Publisher, Follower] = {}
        self.why_not: str | None = "not asked yet"
        """Why nothing of it is followed."""
        self.asking: asyncio.Task[None] | None = None
        self.ask_at_s = 0.0
        self.pause_s = 0.0
        self.was_live = False
        self.unknown: frozenset[str] = frozenset()
        """Unknown names that were told."""


class Subscriber:
    """Use on one event loop; ``run`` must be running."""

    def __init__(
        self,
        settings: KvEvents,
        pool: Pool,
        holdings: Holdings,
        *,
        metrics: Metrics,
        log: Logger,
        link: WorkerLink = PLAIN,
        own_headers: Mapping[str, str] | None = None,
    ) -> None:
        """``own_headers``: see :mod:`extproc.worker_key`."""
        self._settings = settings
        self._pool = pool
        self.holdings = holdings
        self._log = log
        self._link = link
        self._own_headers = own_headers or {}
        self._report = Report(metrics, holdings)
        self._followed: dict[str, _Followed] = {}
        self._ready: deque[Follower] = deque()
        self._turn_is_due = False
        self._tidying = False
        self._ticks = 0
        self._context: zmq.Context[Any] | None = None
        self._session: aiohttp.ClientSession | None = None
        self._slots = asyncio.Semaphore(_ASKED_AT_ONCE)
        self.longest_turn_s = 0.0
        """Of the turns so far, in processor time."""

    async def run(self) -> None:
        """Until cancelled."""
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, _SOCKETS)
        timeout = aiohttp.ClientTimeout(total=_ASK_TIMEOUT_S)
        try:
            async with aiohttp.ClientSession(timeout=timeout, cookie_jar=aiohttp.DummyCookieJar()) as self._session:
                while True:
                    self.sync()
                    await self._tick()
                    await asyncio.sleep(_TICK_S)
        finally:
            for address in list(self._followed):
                self._leave(address)
            self._context.destroy(0)
            self._context = self._session = None

    def sync(self) -> None:
        """The workers are those of the pool."""
        if self._context is None:
            return
        present = {each.address: each for each in self._pool.endpoints}
        for address in self._followed.keys() - present.keys():
            self._leave(address)
        for address, endpoint in present.items():
            followed = self._followed.get(address)
            if followed is None or followed.endpoint is not endpoint:
                if followed is not None:
                    self._leave(address)
                followed = self._followed[address] = _Followed(endpoint)
            if endpoint.live and not followed.was_live:
                followed.ask_at_s = 0.0  # it may be another process, with other ports
            followed.was_live = endpoint.live
            self._look_for(followed)

    def restarted(self, address: str) -> None:
        """Somebody says that another engine is there now. Until its publisher has shown whether that is so, what was known of
        it does not count."""
        followed = self._followed.get(address)
        if followed is not None:
            followed.ask_at_s = 0.0
            for follower in followed.followers.values():
                follower.suspect()

    def distrusted(self, address: str) -> None:
        """What was known of it has proved wrong: it is forgotten, and all that there is to replay is asked for."""
        followed = self._followed.get(address)
        if followed is not None:
            for follower in followed.followers.values():
                follower.start_over()

    def status(self) -> dict[str, Any]:
        """For people."""
        workers: dict[str, dict[str, Any]] = {}
        for address, followed in sorted(self._followed.items()):
            if followed.followers:
                states = [each.state for each in followed.followers.values()]
                state = next((each for each in State if each in states and each is not State.FOLLOWING), State.FOLLOWING)
                workers[address] = {
                    "state": state.value,
                    "in_step": self.holdings.in_step(address),
                    "ranks": len(states),
                    "blocks": self._report.blocks(address),
                }
            else:
                workers[address] = {"state": "none", "why": followed.why_not}
        return {"workers": workers, "index": self.holdings.status()}

    def counts(self, address: str) -> Counts | None:
        """What was counted of an endpoint."""
        followed = self._followed.get(address)
        return None if followed is None else followed.counts

    # -- who is followed ---------------------------------------------------------------------------------------------------

    def _look_for(self, followed: _Followed) -> None:
        """Where it publishes, if that is not known or may have changed."""
        if followed.asking is not None or not followed.endpoint.live or time.monotonic() < followed.ask_at_s:
            return
        try:
            found = addresses.by_settings(self._settings, followed.endpoint)
        except NoPublisherError as error:
            self._none(followed, str(error))
            return
        if found is not None:
            self._follow(followed, found)
        else:
            followed.asking = asyncio.create_task(self._ask(followed))

    async def _ask(self, followed: _Followed) -> None:
        assert self._session is not None
        try:
            async with self._slots:
                found = await addresses.ask(self._session, self._link, self._own_headers, followed.endpoint.address)
        except NoPublisherError as error:
            self._none(followed, str(error))
        else:
            self._follow(followed, found)
        finally:
            followed.asking = None

    def _none(self, followed: _Followed, why: str) -> None:
        if why != followed.why_not and not followed.followers:
            self._log.warning("kv_events_none", endpoint=followed.endpoint.address, why=why)
        followed.why_not = why
        followed.pause_s = min(max(2 * followed.pause_s, self._settings.check_interval_s), _LONGEST_PAUSE_S)
        followed.ask_at_s = time.monotonic() + followed.pause_s

    def _follow(self, followed: _Followed, found: list[Publisher]) -> None:
        followed.pause_s, followed.ask_at_s, followed.why_not = 0.0, float("inf"), None
        wanted = dict.fromkeys(found)
        if not wanted.keys() ^ followed.followers.keys():
            return
        address, settings = followed.endpoint.address, self._settings
        for follower in followed.followers.values():
            follower.close()
        followed.followers.clear()
        self.holdings.drop(address)
        assert self._context is not None
        for publisher in wanted:
            followed.followers[publisher] = Follower(
                self._context,
                publisher,
                self.holdings.source(address, publisher.rank),
                followed.counts,
                max_batch_bytes=settings.max_batch_bytes,
                replay_timeout_s=settings.replay_timeout_s,
                check_interval_s=settings.check_interval_s,
                wake=self._wake,
                on_lag=self._report.on_lag,
            )
        if followed.endpoint.kv_tokens is not None:
            self.holdings.set_capacity(address, followed.endpoint.kv_tokens)
        self._log.info(
            "kv_events_followed",
            endpoint=address,
            ranks=len(wanted),
            events=found[0].events,
            replay=found[0].replay,
            topic=found[0].topic,
        )

    def _leave(self, address: str) -> None:
        followed = self._followed.pop(address)
        if followed.asking is not None:
            followed.asking.cancel()
        for follower in followed.followers.values():
            follower.close()
        self.holdings.drop(address)
        self._report.gone(address)

    # -- turns -------------------------------------------------------------------------------------------------------------

    def _wake(self, follower: Follower) -> None:
        if not follower.queued:
            follower.queued = True
            self._ready.append(follower)
            if not self._turn_is_due:
                self._turn_is_due = True
                asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        ready = self._ready
        began_s, end_s = time.thread_time(), time.perf_counter() + TURN_S
        while ready:
            follower = ready.popleft()
            if follower.closed:
                continue
            follower.queued = False
            more = True
            while more and time.perf_counter() < end_s:
                more = follower.work()
            if more and not follower.queued:
                follower.queued = True
                ready.append(follower)
            if time.perf_counter() >= end_s:
                break
        self.longest_turn_s = max(self.longest_turn_s, time.thread_time() - began_s)
        self._turn_is_due = bool(ready)
        if ready:
            asyncio.get_running_loop().call_soon(self._turn)

    async def _tick(self) -> None:
        self._ticks += 1
        told = self._ticks % _TOLD_EVERY == 1
        for address, followed in list(self._followed.items()):
            await asyncio.sleep(0)  # each takes a tenth of a millisecond, and there may be hundreds
            if self._followed.get(address) is not followed:
                continue
            for follower in followed.followers.values():
                follower.tick()
            unknown = frozenset(name for each in followed.followers.values() for name in each.unknown)
            if unknown - followed.unknown:
                self._log.warning("kv_events_unknown", endpoint=address, names=sorted(unknown - followed.unknown))
                followed.unknown |= unknown
            if told:
                self._report.tell(address, followed.counts, len(followed.followers), unknown_names(followed.followers))
        if told:
            self._report.index()
        if self.holdings.untidy and not self._tidying:
            self._tidying = True
            asyncio.get_running_loop().call_soon(self._tidy)

    def _tidy(self) -> None:
        end_s = time.perf_counter() + TURN_S
        while self.holdings.untidy and time.perf_counter() < end_s:
            self.holdings.tidy()
        self._tidying = self.holdings.untidy
        if self._tidying:
            asyncio.get_running_loop().call_later(_TIDY_EVERY_S, self._tidy)


def unknown_names(followers: Mapping[Publisher, Follower]) -> int:
    """How often kinds or fields came that were not known."""
    return sum(sum(each.unknown.values()) for each in followers.values())
