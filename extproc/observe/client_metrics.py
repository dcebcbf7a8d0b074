"""What clients see of their requests, as Envoy tells it: metrics by model, policy and mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric

from extproc.observe.access_log import Note
from extproc.observe.instruments import Maker
from extproc.observe.log_lines import Line
from extproc.observe.promises import PARTS, VERDICTS
from extproc.observe.quantiles import middle_of
from extproc.observe.tags import Tags

_LABELS = ("model", "policy", "mode")

IN_FLIGHT = "baton_in_flight_requests"
IN_FLIGHT_MEANING = "Requests open, by how they are served"

TTFT_SECONDS = (
    *(0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 1.5, 2.0, 2.5, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0),
)
ITL_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.045, 0.05, 0.06, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0),
)
"""45 ms is a bound."""
RATIOS = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0, 100.0)
GENERATION_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 120.0, 300.0, 600.0)


_MOST_KINDS = 1_000


class Streams(NamedTuple):
    """Observes the times of streamed answers, in seconds, under the labels of one kind of request."""

    ttft: Callable[[float], None]
    generation: Callable[[float], None]
    mean_itl: Callable[[float], None]


class ClientMetrics:
    """Those that come from Envoy's access log, and from streams that are watched."""

    def __init__(self, make: Maker) -> None:
        self._streams: dict[Tags, Streams] = {}
        make.topic("What clients see")
        make.describe(IN_FLIGHT, "gauge", _LABELS, IN_FLIGHT_MEANING)
        self.requests = make.tally(
            "baton_client_requests",
            "Requests in Envoy's eyes (with `epp.enabled` in the filter's own), when they are over. `outcome`: `ok`, "
            "`client_gone` (the client closed before the end), `cut` (an answer broke off, and Envoy does not say by whom), "
            "`upstream_reset` (the worker broke off), `timeout`, `no_worker` (none could be reached), `refused` (answered by "
            "the filter), `client_error`, `worker_error` (the worker's 4xx, 5xx), `gateway_error` (Envoy's own)",
            (*_LABELS, "outcome"),
            watch="the share of `upstream_reset`, `timeout` and `worker_error`",
        )
        self.ttft_seconds = make.spread(
            "baton_client_ttft_seconds",
            "Streamed answers: from the first byte of the request to the first one of the answer's body, at Envoy",
            _LABELS,
            bounds=TTFT_SECONDS,
            watch="the share above the TTFT SLO",
        )
        self.generation_seconds = make.spread(
            "baton_client_generation_seconds",
            "Streamed answers that came whole: from the first byte of the body to the last",
            _LABELS,
            bounds=GENERATION_SECONDS,
        )
        self.mean_itl_seconds = make.spread(
            "baton_client_mean_itl_seconds",
            "Streamed answers that state their tokens (`stream_options.include_usage`): generation / (tokens - 1)",
            _LABELS,
            bounds=ITL_SECONDS,
            watch="the share above the ITL SLO",
        )
        self.itl_seconds = make.spread(
            "baton_client_itl_seconds",
            "Every time from token to token, of the streams that are watched (`observe.sample`)",
            _LABELS,
            bounds=ITL_SECONDS,
            watch="the 99th percentile: what the mean of an answer hides",
        )
        self.slo_requests = make.tally(
            "baton_client_slo_requests",
            f"Prompts of policies with an SLO, when they are over: {VERDICTS}. Streamed answers alone can be `met`",
            (*_LABELS, "slo"),
            watch="the share of `met` is the goodput",
        )
        self.slo_seconds = make.gauge(
            "baton_slo_seconds",
            "The SLO of a policy. `kind`: `ttft`, `itl`. A client's header may change it",
            ("policy", "kind"),
        )
        self.ttft_predicted_seconds = make.tally(
            "baton_ttft_predicted_seconds",
            "TTFT that decisions expected, of the answers in `baton_ttft_actual_to_predicted_ratio`. `part`: "
            + ", ".join(f"`{part}` ({meaning})" for part, meaning in PARTS.items()),
            ("mode", "part"),
        )
        self.ttft_actual_to_predicted = make.spread(
            "baton_ttft_actual_to_predicted_ratio",
            "TTFT that the client saw by the one that the decision expected; 1: the cost model is right",
            ("mode",),
            bounds=RATIOS,
            watch="the median far from 1: the estimates of the workers' speed are wrong",
        )
        self.watched = make.tally(
            "baton_watched_streams",
            "Streams that were drawn to be watched. `outcome`: `whole`, `cut` (the client left, or the worker broke off), "
            "`failed` (the engine reported an error in the stream), `not_watched` (too many at once, or the process was away), "
            "`lost` (it was watched, and nothing was reported)",
            ("outcome",),
            known=[(outcome,) for outcome in ("whole", "cut", "failed", "not_watched", "lost")],
        )
        self.log_lines = make.tally("baton_access_log_lines", "Lines of Envoy's access log that came")
        self.log_lost = make.tally(
            "baton_access_log_lost",
            "Requests whose line did not come within 10 s",
            watch="more than a few: the log service was away, or Envoy was ended",
        )
        self.log_streams = make.gauge(
            "baton_access_log_streams", "Threads of Envoy that are connected to the access log service"
        )

    def streams(self, kind: Tags) -> Streams:
        """What takes the times of streamed answers of one kind of request."""
        found = self._streams.get(kind)
        if found is None:
            if len(self._streams) >= _MOST_KINDS:
                self._streams.clear()
            labels = (kind.model, kind.policy, kind.mode)
            spreads = (self.ttft_seconds, self.generation_seconds, self.mean_itl_seconds)
            found = self._streams[kind] = Streams(*(spread.child(*labels) for spread in spreads))
        return found

    def judge(self, line: Line, note: Note) -> None:
        """Whether a prompt was served as promised."""
        promise, tags = note.promise, note.tags
        if promise is None:
            return
        verdict = promise.kept(line)
        if verdict is not None:
            self.slo_requests.inc(tags.model, tags.policy, tags.mode, verdict)
        expected_s, mode = sum(promise.expected_s), tags.mode
        as_decided = promise.mode == mode  # not after a prefill that failed
        if expected_s > 0 and as_decided and line.streamed and line.ttft_s is not None and line.status < 400:
            self.ttft_actual_to_predicted.observe(line.ttft_s / expected_s, mode)
            add = self.ttft_predicted_seconds.inc
            for part, seconds in zip(PARTS, promise.expected_s, strict=True):
                add(mode, part, by=seconds)

    def add_gaps(self, tags: Tags, gaps: Mapping[int, int], total_s: float) -> None:
        """The times between the tokens of one answer, as counts in the buckets of :mod:`extproc.observe.quantiles`."""
        placed: dict[float, float] = {}
        for bucket, count in gaps.items():
            # What was exactly at a bound may fall into a bucket that goes beyond it: the middle decides.
            bound = middle_of(bucket)
            placed[bound] = placed.get(bound, 0.0) + count
        self.itl_seconds.add(placed, total_s, tags.model, tags.policy, tags.mode)


class InFlight:
    """A gauge of what is open, by labels that change while it is."""

    def __init__(self, registry: CollectorRegistry, counts: Callable[[], Mapping[Tags, int]]) -> None:
        self._counts = counts
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """For the registry."""
        family = GaugeMetricFamily(IN_FLIGHT, IN_FLIGHT_MEANING, labels=_LABELS)
        for tags, count in self._counts().items():
            family.add_metric((tags.model, tags.policy, tags.mode), count)
        yield family
