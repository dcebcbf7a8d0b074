"""Makes the document of ``/live`` from what the filter knows, at most twice a second, however many people look.

It only reads. The fields are described in :mod:`extproc.live_document`.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from heapq import nlargest
from itertools import islice
from operator import itemgetter
from typing import Any

import msgspec

from extproc import __version__
from extproc import live_document as doc
from extproc.config import Config
from extproc.dispatcher import Dispatcher
from extproc.lost import why_lost
from extproc.observe.logs import Logger
from extproc.recent import Recent
from extproc.routing import health
from extproc.routing.decision import Candidate, Decision, Terms
from extproc.routing.partition import POOL_LABEL
from extproc.routing.pool import Endpoint, Role
from extproc.routing.why import time_words

_FRESH_S = 0.5
"""A document this young is given to the next one who asks."""

_STEP_S = 2.0
_POINTS = 150
"""Of the history: five minutes."""

_LABELS_MOST = 8
_MODELS_MOST = 4
_TARGETS_MOST = 16

_TERM_NAMES = tuple((name, name.removesuffix("_s")) for name in Terms.__struct_fields__)

_ROLES = {
    frozenset((Role.PREFILL,)): ["prefill"],
    frozenset((Role.DECODE,)): ["decode"],
    frozenset(Role): ["prefill", "decode"],
}

Status = Callable[[], tuple[bool, Mapping[str, Any]]]


class Live:
    """One for a process. ``run`` keeps the history."""

    def __init__(
        self,
        config: Config,
        dispatcher: Dispatcher,
        recent: Recent,
        status: Status,
        *,
        log: Logger,
        times: Callable[[], Mapping[str, Any]] | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """``status`` is what ``/healthz`` shows. ``times``: as :meth:`extproc.observe.times.Times.snapshot` says
        how long clients waited; what it does not know, the engines may."""
        self._config = config
        self._dispatcher = dispatcher
        self._recent = recent
        self._status = status
        self._log = log
        self._times = times
        self._clock = clock
        self._wall_clock = wall_clock
        self._started_s = clock()
        self._built: tuple[float, bytes] | None = None
        self._points: deque[_Point] = deque(maxlen=_POINTS)
        self._rows: dict[tuple[int, str | None, str], tuple[object, doc.DecisionNow]] = {}
        """Decisions as shown last time. The key tells one that was changed by a second try; its object is kept, so that no
        other one gets its id."""
        self._targets = [
            doc.Target(policy=rule.name, ttft_s=rule.slo.ttft_s, itl_s=rule.slo.itl_s)
            for rule in config.policies
            if rule.slo.ttft_s is not None or rule.slo.itl_s is not None
        ][:_TARGETS_MOST]

    async def run(self) -> None:
        """Note a point of the history every two seconds, until cancelled. A fault here is no reason to stop serving."""
        while True:
            try:
                self.note()
            except Exception:
                self._log.exception("live_page_failed")
            await asyncio.sleep(_STEP_S)

    def note(self) -> None:
        """One point of the history."""
        times = self._times_now()
        counts = self._recent.counts()
        self._points.append(
            _Point(times, counts.requests / self._recent.window_s(), len(self._dispatcher.router.queue)),
        )

    def render(self) -> bytes:
        """The document as JSON."""
        now_s = self._clock()
        if self._built is None or now_s - self._built[0] >= _FRESH_S:
            self._built = now_s, msgspec.json.encode(self.document())
        return self._built[1]

    def document(self) -> doc.Live:
        """As it is at this moment."""
        now_s = self._dispatcher.now_s()
        ready, status = self._status()
        pairs = self._recent.pairs()
        shown = nlargest(doc.PAIRS_MOST, pairs.items(), key=itemgetter(1))
        endpoints = self._dispatcher.router.pool.endpoints
        handoffs = _by_worker(pairs)
        reasons = status.get("warm_up", {}).get("warming", {})
        window_s = self._recent.window_s()
        counts = self._recent.counts()
        return doc.Live(
            at=self._wall_clock(),
            window_s=window_s,
            filter=self._filter(ready, status),
            workers=[
                _worker(each, now_s, handoffs.get(each.address, 0), reasons.get(each.address))
                for each in endpoints[: doc.WORKERS_MOST]
            ],
            workers_left_out=max(0, len(endpoints) - doc.WORKERS_MOST),
            pairs=[doc.PairNow(prefill, decode, count) for (prefill, decode), count in shown],
            pairs_left_out=len(pairs) - len(shown),
            queue=self._queue(now_s),
            rates=doc.RatesNow(
                requests_per_s=round(counts.requests / window_s, 2),
                handoffs_per_s=round(counts.handoffs / window_s, 2),
                whole_per_s=round(counts.whole / window_s, 2),
                refused_per_s=round(counts.refused / window_s, 2),
                errors_per_s=round(counts.errors / window_s, 2),
            ),
            times=self._times_now(),
            targets=self._targets,
            history=self._history(),
            decisions=self._decisions(),
        )

    # -- the parts ---------------------------------------------------------------------------------------------------------

    def _filter(self, ready: bool, status: Mapping[str, Any]) -> doc.FilterNow:
        warm_up = status.get("warm_up", {})
        return doc.FilterNow(
            ready=ready,
            why=_short(status.get("why")),
            draining=bool(status.get("draining")),
            version=__version__,
            uptime_s=round(self._clock() - self._started_s, 1),
            warm_up=doc.WarmUpNow(
                enabled=bool(warm_up.get("enabled")),
                pairs=warm_up.get("pairs", 0),
                pairs_warm=warm_up.get("pairs_warm", 0),
                waiting_requests=warm_up.get("waiting_requests", 0),
                failing=[_failing(each) for each in warm_up.get("failing", ())][: doc.FAULTS_MOST],
            ),
            discovery=[
                doc.SourceNow(
                    kind=each["source"],
                    name=_short(each["name"]) or "",
                    endpoints=each["endpoints"],
                    error=_short(each["error"]),
                )
                for each in status.get("discovery", ())
            ][: doc.FAULTS_MOST],
            cache_servers={
                address: "ok" if each.get("up") else _short(each.get("fault")) or "down"
                for address, each in islice(status.get("cache_servers", {}).items(), doc.FAULTS_MOST)
            },
            listens_on=self._config.envoy.listen,
        )

    def _queue(self, now_s: float) -> doc.QueueNow:
        queue = self._dispatcher.router.queue
        oldest = next(iter(queue), None)
        return doc.QueueNow(
            requests=len(queue),
            work_s=round(queue.queued_s, 3),
            longest_wait_s=0.0 if oldest is None else round(now_s - oldest.came_s, 3),
        )

    def _times_now(self) -> doc.TimesNow:
        found = _seen(self._times()) if self._times is not None else doc.TimesNow()
        if found.ttft is None and not self._config.access_log:
            found.window_s = None
        if found.itl is None:
            found.itl = _itl_of_engines(self._dispatcher.router.pool.endpoints)
        return found

    def _history(self) -> doc.History:
        points = self._points
        return doc.History(
            step_s=_STEP_S,
            ttft_p50_s=[each.ttft_p50_s for each in points],
            ttft_p99_s=[each.ttft_p99_s for each in points],
            itl_p50_s=[each.itl_p50_s for each in points],
            itl_p99_s=[each.itl_p99_s for each in points],
            requests_per_s=[each.requests_per_s for each in points],
            queue_requests=[each.queue_requests for each in points],
        )

    def _decisions(self) -> list[doc.DecisionNow]:
        rows: dict[tuple[int, str | None, str], tuple[object, doc.DecisionNow]] = {}
        for noted in self._dispatcher.noted(doc.DECISIONS_MOST):
            decision: Decision = noted["decision"]
            key = id(noted), decision.prefill, decision.decode
            rows[key] = self._rows.get(key) or (noted, _decision(noted["time"], noted["request_id"], decision))
        self._rows = rows
        return [row for _, row in rows.values()]


class _Point:
    __slots__ = ("itl_p50_s", "itl_p99_s", "queue_requests", "requests_per_s", "ttft_p50_s", "ttft_p99_s")

    def __init__(self, times: doc.TimesNow, requests_per_s: float, queue_requests: int) -> None:
        self.ttft_p50_s, self.ttft_p99_s = _ends(times.ttft)
        self.itl_p50_s, self.itl_p99_s = _ends(times.itl)
        self.requests_per_s = round(requests_per_s, 2)
        self.queue_requests = queue_requests


def _ends(found: doc.Quantiles | None) -> tuple[float | None, float | None]:
    """The middle, or where only a mean is known that; and the 99th percentile."""
    if found is None:
        return None, None
    return found.p50_s if found.p50_s is not None else found.mean_s, found.p99_s


def _by_worker(pairs: Mapping[tuple[str, str], int]) -> dict[str, int]:
    found: dict[str, int] = defaultdict(int)
    for (prefill, decode), count in pairs.items():
        found[prefill] += count
        found[decode] += count
    return found


def _worker(endpoint: Endpoint, now_s: float, handoffs: int, why_warming: str | None) -> doc.WorkerNow:
    state, why = _state(endpoint, now_s, why_warming)
    load = endpoint.load
    prefill, decode = endpoint.prefill, endpoint.decode
    reported_s = max(prefill.external_s, decode.external_s)
    models = endpoint.spec.models if endpoint.spec.models is not None else list(endpoint.models or ())
    return doc.WorkerNow(
        address=endpoint.address,
        roles=_ROLES[endpoint.roles],
        state=state,
        why=_short(why),
        pool=endpoint.labels.get(POOL_LABEL),
        labels={
            name[: doc.TEXT_MOST]: value[: doc.TEXT_MOST] for name, value in islice(endpoint.spec.labels.items(), _LABELS_MOST)
        },
        models=[name[: doc.TEXT_MOST] for name in models[:_MODELS_MOST]],
        prefill_requests=prefill.requests,
        decode_requests=decode.requests,
        prefill_tokens=prefill.tokens,
        decode_tokens=decode.tokens,
        backlog_s=round(max(0.0, prefill.busy_until_s - now_s), 3),
        other_requests=round(prefill.external_requests + decode.external_requests, 1),
        running=None if load is None else load.running,
        waiting=None if load is None else load.waiting,
        kv_usage=None if load is None or load.kv_usage is None else round(load.kv_usage, 4),
        kv_tokens=endpoint.kv_tokens,
        itl_s=None if load is None or load.itl_s is None else round(load.itl_s, 5),
        report_age_s=None if load is None or reported_s < 0 else round(max(0.0, now_s - reported_s), 1),
        handoffs=handoffs,
    )


def _state(endpoint: Endpoint, now_s: float, why_warming: str | None) -> tuple[doc.State, str | None]:
    if not endpoint.live:
        return "down", "its health check fails, or has not answered yet"
    if endpoint.leaving:
        return "leaving", "no longer configured; it finishes what it has"
    for role in endpoint.roles:
        leg = endpoint.leg(role)
        if not health.usable(leg, now_s):
            return "failing", f"{leg.failures} failures in a row; left alone for {time_words(leg.blocked_until_s - now_s)}"
    if endpoint.warming:
        return "warming", why_warming or "it has yet to make its first handoff"
    return "live", None


def _decision(at: float, request_id: str, decision: Decision) -> doc.DecisionNow:
    chosen = decision.candidates[0].prefill, decision.candidates[0].decode
    return doc.DecisionNow(
        at=at,
        request_id=request_id[: doc.TEXT_MOST],
        policy=decision.policy,
        objective=decision.objective,
        reason=decision.reason,
        prefill=decision.prefill,
        decode=decision.decode,
        prompt_tokens=decision.prompt_tokens,
        cached_tokens=decision.cached_tokens,
        cached_by=decision.cached_by,
        prefill_rank=decision.prefill_rank,
        decode_rank=decision.decode_rank,
        below_tokens=decision.below_tokens,
        queued_ms=round(decision.queued_s * 1e3, 1),
        ttft_ms=round(decision.terms.ttft_s * 1e3, 2),
        candidates=[
            _candidate(each, None if number == 0 else why_lost(decision, each))
            for number, each in enumerate(decision.candidates)
            if number == 0 or (each.prefill, each.decode) != chosen  # it may have been weighed twice
        ],
    )


def _candidate(candidate: Candidate, why: str | None) -> doc.CandidateNow:
    terms = candidate.terms
    return doc.CandidateNow(
        prefill=candidate.prefill,
        decode=candidate.decode,
        cost=round(candidate.cost, 6),
        terms_ms={shown: round(value * 1e3, 2) for name, shown in _TERM_NAMES if (value := getattr(terms, name)) >= 5e-6},
        cached_prefill_tokens=candidate.cached_prefill_tokens,
        cached_decode_tokens=candidate.cached_decode_tokens,
        why=why,
    )


def _seen(times: Mapping[str, Any]) -> doc.TimesNow:
    by = sorted(times.get("by", ()), key=lambda each: -int(each.get("answers", 0)))[: doc.TIMES_MOST]
    return doc.TimesNow(
        window_s=times["window_s"],
        ttft=_quantiles(times, "ttft"),
        itl=_quantiles(times, "itl"),
        by=[
            doc.TimesOf(
                model=_short(each["model"]) or "",
                policy=_short(each["policy"]) or "",
                mode=each["mode"],
                answers=each["answers"],
                ttft=_quantiles(each, "ttft"),
                itl=_quantiles(each, "itl"),
            )
            for each in by
        ],
    )


def _quantiles(times: Mapping[str, Any], name: str) -> doc.Quantiles | None:
    found = times[name]
    if found is None:
        return None
    # Only gaps between tokens are watched; the rest is what Envoy measures.
    source = times["source"] if name == "itl" else "envoy access log"
    p50_s, p90_s, p99_s = (round(found[each], 6) for each in ("p50_s", "p90_s", "p99_s"))
    return doc.Quantiles(source=source, p50_s=p50_s, p90_s=p90_s, p99_s=p99_s, samples=found["samples"])


def _itl_of_engines(endpoints: tuple[Endpoint, ...]) -> doc.Quantiles | None:
    """What the decode workers say: the mean of each counts by the requests that it runs."""
    total_s = weights = 0.0
    for endpoint in endpoints:
        load = endpoint.load
        if endpoint.live and load is not None and load.itl_s is not None and Role.DECODE in endpoint.roles:
            weight = max(1.0, load.running or 0.0)
            total_s += weight * load.itl_s
            weights += weight
    return doc.Quantiles(source="engines", mean_s=round(total_s / weights, 5)) if weights else None


def _failing(pair: Mapping[str, Any]) -> str:
    return _short(f"{pair.get('prefill')} → {pair.get('decode')}: {pair.get('reason')}") or ""


def _short(text: object) -> str | None:
    return None if text is None else str(text)[: doc.TEXT_MOST]
