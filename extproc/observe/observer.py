"""What is known of a request from outside the filter: how Envoy saw it end, and when its tokens came.

The filter tells Envoy a name and labels of each request (:meth:`Observer.marks`); Envoy's log and the process that watches
streams report under that name. All of it may be missing: then the numbers are, and nothing else.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from extproc.config import Address, Config, Tls
from extproc.headers import USAGE_KEY, WATCH_KEY
from extproc.observe.access_log import AccessLog, Note
from extproc.observe.client_metrics import InFlight
from extproc.observe.log_lines import ID_KEY, Line
from extproc.observe.logs import Logger
from extproc.observe.metrics import Metrics
from extproc.observe.quantiles import at
from extproc.observe.sighting import Sighting
from extproc.observe.tags import NONE, Tags
from extproc.observe.times import Times
from extproc.observe.watcher import Watcher

_LATE_S = 10.0
"""A watched stream that nobody reported so long after its request's end is lost."""
_SWEEP_S = 1.0
_REMEMBERED = 100
"""Requests that are over, and watched answers, that are shown."""


class Observed(msgspec.Struct):
    """One request."""

    note: Note
    request_id: str = ""
    """Of a watched one."""
    states_usage: bool = False
    """The answer is a stream that says how many tokens it has."""
    open: bool = True
    watched: bool = False

    def more(self) -> dict[str, str]:
        """Which of Envoy's filters look at the answer."""
        return {key: "1" for key, wanted in ((USAGE_KEY, self.states_usage), (WATCH_KEY, self.watched)) if wanted}


class Observer:
    """One for all requests of a process."""

    def __init__(
        self,
        config: Config,
        metrics: Metrics,
        log: Logger,
        *,
        clock: Callable[[], float] = time.monotonic,
        seed: int | None = None,
    ) -> None:
        self._metrics = metrics
        self._log = log
        self._clock = clock
        self._random = random.Random(seed)  # noqa: S311  # draws a sample
        self._marks = not config.epp.enabled
        """A mesh's Envoy takes no marks."""
        self.times = Times(clock)
        self.access_log = AccessLog(expected=config.access_log, told=self._on_line, on_lost=self._on_lost, log=log, clock=clock)
        self.watcher = (
            Watcher(
                config.watch_listen,
                max_streams=config.observe.max_streams,
                transport=config.transport,
                told=self._on_sighting,
                log=log,
                tls=_watch_tls(config),
            )
            if config.watches
            else None
        )
        self.pass_on_sighting: Callable[[Sighting], bool] = lambda _sighting: False
        """Gets what was seen of streams that are not known here; True: they are another process's, which has it now."""
        self._in_flight: dict[Tags, int] = {}
        self._watched: dict[str, Observed] = {}
        self._due: deque[tuple[float, str]] = deque()
        self._seen: deque[dict[str, Any]] = deque(maxlen=_REMEMBERED)
        self._ended: deque[tuple[Line, Tags]] = deque(maxlen=_REMEMBERED)
        metrics.clients.log_streams.set_function(lambda: self.access_log.streams)
        for rule in config.policies:
            for slo, seconds in (("ttft", rule.slo.ttft_s), ("itl", rule.slo.itl_s)):
                if seconds is not None:
                    metrics.clients.slo_seconds.labels(rule.name, slo).set(seconds)
        InFlight(metrics.registry, lambda: self._in_flight)

    # -- a request ---------------------------------------------------------------------------------------------------------

    def begin(self) -> Observed:
        """A request is there."""
        observed = Observed(self.access_log.begin())
        self._count(observed.note.tags, 1)
        return observed

    def marks(self, observed: Observed, tags: Tags) -> dict[str, str]:
        """What Envoy is told with the reply to a request: how it is served, by labels."""
        note = observed.note
        if tags != note.tags and observed.open:
            self._count(note.tags, -1)
            self._count(tags, 1)
        note.tags = tags
        if not self._marks:
            return {}
        marks = {**tags.as_dict(), ID_KEY: note.key}
        if tags.mode != "none":
            marks.update(observed.more())
        return marks

    def draw(self, observed: Observed, share: float, request_id: str) -> None:
        """Perhaps watch this stream; ``share`` of those that come here are."""
        if self.watcher is None or self._random.random() >= share:
            return
        key = observed.note.key
        if not self.watcher.take(key):
            self._metrics.clients.watched.inc("not_watched")
            return
        observed.watched, observed.request_id = True, request_id
        self._watched[key] = observed

    def end(self, observed: Observed) -> None:
        """The filter has done with it. Idempotent."""
        if not observed.open:
            return
        observed.open = False
        self._count(observed.note.tags, -1)
        self.access_log.end(observed.note)
        if observed.watched and self.watcher is not None:
            key = observed.note.key
            self.watcher.leave(key)
            if observed.note.tags.mode == "none":
                del self._watched[key]  # it was answered here: there was no stream
            else:
                self._due.append((self._clock() + _LATE_S, key))

    def _count(self, tags: Tags, by: int) -> None:
        # A series that was there stays, at 0: the labels are few, and a gauge that vanishes is no 0 to a query.
        kind = _kind_of(tags)
        self._in_flight[kind] = self._in_flight.get(kind, 0) + by

    # -- what is reported --------------------------------------------------------------------------------------------------

    def _on_line(self, line: Line, note: Note) -> None:
        self._metrics.clients.log_lines.inc()
        self._told(line, note)

    def _told(self, line: Line, note: Note) -> None:
        clients, kind = self._metrics.clients, _kind_of(note.tags)
        self._ended.append((line, note.tags))
        clients.requests.inc(kind.model, kind.policy, kind.mode, line.outcome)
        clients.judge(line, note)
        if line.status < 400:
            self._note_prompt(note, line.prompt_tokens)
        if line.completion_tokens is not None:
            self._metrics.accounts.note_completion(kind.model, note.tags.tenant, line.completion_tokens)
        if not line.streamed or line.ttft_s is None or line.status >= 400:
            return
        streams = clients.streams(kind)
        streams.ttft(line.ttft_s)
        whole = line.outcome == "ok"
        generation_s, mean_itl_s = (line.generation_s, line.mean_itl_s) if whole else (None, None)
        if generation_s is not None:
            streams.generation(generation_s)
        if mean_itl_s is not None:
            streams.mean_itl(mean_itl_s)
        self.times.answered(kind, ttft_s=line.ttft_s, generation_s=generation_s, mean_itl_s=mean_itl_s)

    def ended(self, line: Line, note: Note) -> None:
        """A request is over, of which no Envoy will report: this is what the filter saw itself."""
        self._told(line, note)

    def _on_lost(self, note: Note) -> None:
        self._note_prompt(note, None)

    def _note_prompt(self, note: Note, prompt_tokens: int | None) -> None:
        """Account for a prompt of which there was an estimate only."""
        if note.estimated_tokens is not None:
            tokens = note.estimated_tokens if prompt_tokens is None else prompt_tokens
            self._metrics.accounts.note_prompt(note.tags.model, note.tags.tenant, tokens, None)

    def _on_sighting(self, seen: Sighting) -> None:
        if seen.key in self._watched or not self.pass_on_sighting(seen):
            self.sighted(seen)

    def sighted(self, seen: Sighting) -> None:
        """A stream that was watched has come to its end."""
        observed = self._watched.pop(seen.key, None)
        if observed is None:
            return  # of another filter, or too late
        kind = _kind_of(observed.note.tags)
        outcome = "failed" if seen.failed else "whole" if seen.whole else "cut"
        self._metrics.clients.watched.inc(outcome)
        if seen.gaps:
            self._metrics.clients.add_gaps(kind, seen.gaps, seen.gaps_s)
            self.times.watched(kind, seen.gaps)
        shown = _shown(seen, observed, outcome)
        self._seen.append(shown)
        self._log.info("stream_watched", **shown)

    # -- time --------------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Watch streams, and look for what is overdue, until cancelled."""
        self._log.info("observing", **self.status())
        watching = None if self.watcher is None or self.watcher.elsewhere else asyncio.ensure_future(self.watcher.run())
        try:
            while True:
                await asyncio.sleep(_SWEEP_S)
                if watching is not None and watching.done():
                    watching.result()
                self.sweep()
        finally:
            if watching is not None:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)

    def sweep(self) -> None:
        """Count what is overdue."""
        before = self.access_log.lost
        self.access_log.sweep()
        self._metrics.clients.log_lost.inc(by=self.access_log.lost - before)
        now_s = self._clock()
        while self._due and self._due[0][0] <= now_s:
            if self._watched.pop(self._due.popleft()[1], None) is not None:
                self._metrics.clients.watched.inc("lost")

    def shown(self) -> dict[str, Any]:
        """For people, ready for JSON: the last minute, the last requests that are over, the last watched answers; the newest
        first."""
        return {
            **self.times.snapshot(),
            "ended": [_ended(line, tags) for line, tags in reversed(self._ended)],
            "watched": list(reversed(self._seen)),
        }

    def share_watch(self, processes: int, *, here: bool) -> None:
        """The process that watches is one for all: started ``here`` or by another of so many, with a part of its room each."""
        if self.watcher is not None:
            self.watcher.share(processes, here=here)

    def status(self) -> dict[str, Any]:
        """For `/healthz`."""
        log = self.access_log.status()
        if not self._marks:
            log["without_it"] = (
                "as the filter sees it: TTFT, ends of answers; not who broke one off, no ITL, no tokens of answers"
            )
        return {
            "access_log": log,
            "stream_watch": {"running": False, "why": "observe.sample is 0"} if self.watcher is None else self.watcher.status(),
        }


def _watch_tls(config: Config) -> Tls | None:
    """The process that watches is reached as the filter is; but on a Unix socket nobody listens in."""
    if config.tls_mode == "none" or Address.parse(config.watch_listen).path:
        return None
    return msgspec.structs.replace(config.tls, mode=config.tls_mode)


def _kind_of(tags: Tags) -> Tags:
    """Without the tenant: there are few kinds of requests, and many tenants."""
    return tags if tags.tenant == NONE else Tags(tags.model, tags.policy, tags.mode)


def _ended(line: Line, tags: Tags) -> dict[str, Any]:
    """One request that is over, for people."""
    return {
        "request_id": line.request_id,
        **tags.as_dict(),
        "outcome": line.outcome,
        "status": line.status,
        "flags": ",".join(line.flags),
        "details": line.details,
        "worker": line.upstream or None,
        "ttft_ms": _ms(line.ttft_s),
        "generation_ms": _ms(line.generation_s),
        "mean_itl_ms": _ms(line.mean_itl_s),
        "duration_ms": _ms(line.duration_s),
        "prompt_tokens": line.prompt_tokens,
        "completion_tokens": line.completion_tokens,
        "received_bytes": line.received_bytes,
        "sent_bytes": line.sent_bytes,
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)


def _shown(seen: Sighting, observed: Observed, outcome: str) -> dict[str, Any]:
    """One watched answer, for people and the log."""
    found = _p50_p99_ms(seen)
    return {
        "request_id": observed.request_id,
        **observed.note.tags.as_dict(),
        "outcome": outcome,
        "finish_reason": seen.finish_reason,
        "tokens": seen.tokens,
        "events": seen.events,
        "prompt_tokens": seen.prompt_tokens,
        "itl_p50_ms": found[0],
        "itl_p99_ms": found[1],
        "itl_max_ms": _ms(seen.longest_s) if seen.gaps else None,
    }


def _p50_p99_ms(seen: Sighting) -> tuple[float | None, float | None]:
    """p50 and p99 of the times between tokens, in milliseconds."""
    if not seen.gaps:
        return None, None
    p50_s, p99_s = at(seen.gaps, (0.5, 0.99))
    return _ms(p50_s), _ms(p99_s)
