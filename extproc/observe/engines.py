"""What the engines report of themselves, as metrics of ours: by worker, and for times by role.

An engine's counters run since it started, ours since the filter did: what is added is what an engine counted from one page to
the next. The first page of a worker adds nothing. A counter that has gone down belongs to a new engine, and all of it is new.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial

from extproc.observe.instruments import Bounded, Spread
from extproc.observe.load import Scrape
from extproc.observe.metrics import SOURCES, Metrics
from extproc.observe.recompute import Recompute
from extproc.routing.pool import Role


class Engines:
    """One for a process."""

    def __init__(self, metrics: Metrics, *, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` is that of the scraper."""
        self._metrics = metrics
        self._clock = clock
        self._pages: dict[str, tuple[Scrape, str]] = {}
        """By address: the last page, and the role as a label."""
        self._asked_s: dict[str, float] = {}
        self._models = Bounded()
        self.recompute = Recompute()
        self._counters = (
            ("preemptions", metrics.engine_preemptions),
            ("transfer_count", metrics.engine_transfers),
            ("transfer_sum_s", metrics.engine_transfer_seconds),
            ("transfer_sum_bytes", metrics.engine_transfer_bytes),
            ("failed_transfers", metrics.engine_failed_transfers),
            ("failed_notifications", metrics.engine_failed_notifications),
            ("expired_requests", metrics.engine_expired_requests),
            ("late_notifications", metrics.engine_late_notifications),
        )
        self._gauges = (
            ("running", metrics.engine_running),
            ("waiting", metrics.engine_waiting),
            ("kv_usage", metrics.engine_kv_usage),
        )

    def on_scrape(self, address: str, roles: Collection[Role], scrape: Scrape, asked_s: float) -> None:
        """A page of the worker at ``address``, asked for at ``asked_s``."""
        role = label(roles)
        before, role_before = self._pages.get(address, (None, role))
        if role_before != role:
            self.gone(address)
            before = None
        if before is None:
            self._begin(address, role)
            before = scrape  # nothing has been counted since
        self._asked_s[address] = asked_s
        self._pages[address] = scrape, role
        for name, gauge in self._gauges:
            value = getattr(scrape, name)
            if value is not None:
                gauge.labels(role, address).set(value)
        for name, tally in self._counters:
            tally.inc(role, address, by=grown(getattr(before, name), getattr(scrape, name)))
        if scrape.restarted:
            self._metrics.engine_restarts.inc(role, address)
        self._tokens(address, role, before, scrape, asked_s)
        metrics = self._metrics
        _add(metrics.engine_itl_seconds, role, before.itl_buckets, scrape.itl_buckets, before.itl_sum_s, scrape.itl_sum_s)
        _add(metrics.engine_ttft_seconds, role, before.ttft_buckets, scrape.ttft_buckets, before.ttft_sum_s, scrape.ttft_sum_s)

    def gone(self, address: str) -> None:
        """The worker is no more: so are its series."""
        page = self._pages.pop(address, None)
        self._asked_s.pop(address, None)
        self.recompute.gone(address)
        self._metrics.forget(address)
        if page is not None:
            for gauge in (*(each for _, each in self._gauges), self._metrics.scrape_age_seconds):
                with suppress(KeyError):  # an engine need not say everything
                    gauge.remove(page[1], address)

    def _begin(self, address: str, role: str) -> None:
        """Its counters are there from the start, at 0."""
        for _, tally in self._counters:
            tally.inc(role, address, by=0)
        self._metrics.engine_restarts.inc(role, address, by=0)
        self._metrics.engine_recomputed_tokens.inc(address, by=0)
        self._metrics.scrape_age_seconds.labels(role, address).set_function(partial(self._age_s, address))

    def _age_s(self, address: str) -> float:
        return self._clock() - self._asked_s.get(address, self._clock())

    def _tokens(self, address: str, role: str, before: Scrape, now: Scrape, asked_s: float) -> None:
        metrics = self._metrics
        model = self._models.of(now.model or "")
        metrics.engine_generation_tokens.inc(role, address, model, by=grown(before.generation_tokens, now.generation_tokens))
        if now.sources is None:
            return
        earlier = before.sources or {}
        new = {source: grown(earlier.get(source), now.sources.get(source)) for source in SOURCES}
        for source, tokens in new.items():
            metrics.engine_prompt_tokens.inc(role, address, source, by=tokens)
        recomputed = self.recompute.on_scrape(
            address,
            computed=new["local_compute"],
            arrived=new["local_cache_hit"] + new["external_kv_transfer"],
            asked_s=asked_s,
        )
        metrics.engine_recomputed_tokens.inc(address, by=recomputed)


def label(roles: Collection[Role]) -> str:
    """``prefill``, ``decode`` or ``both``."""
    return "both" if len(roles) > 1 else next((role.value for role in roles), "both")


def grown(before: float | None, now: float | None) -> float:
    """What a counter counted between two pages."""
    if now is None:
        return 0.0
    return now - before if before is not None and before <= now else now


def _add(
    spread: Spread,
    role: str,
    before: dict[float, float] | None,
    now: dict[float, float] | None,
    sum_before_s: float | None,
    sum_s: float | None,
) -> None:
    """What went into a histogram between two pages."""
    if not now or now == before:
        return
    earlier = before or {}
    if any(earlier.get(bound, 0.0) > samples for bound, samples in now.items()):
        earlier, sum_before_s = {}, None
    added: dict[float, float] = {}
    below = 0.0
    for bound in sorted(now):
        up_to = now[bound] - earlier.get(bound, 0.0)
        added[bound] = max(up_to - below, 0.0)
        below = up_to
    spread.add(added, grown(sum_before_s, sum_s), role)
