"""``/metrics`` of a worker: the ``vllm:*`` names that a router reads, with their right values, in Prometheus' text format."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from workers.sim import request
from workers.sim.histogram import Histogram

if TYPE_CHECKING:
    from workers.sim.engine import Engine

_LATENCY_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


class Metrics:
    """Of one worker: over all its engines' lives for histograms, of the present engine for the rest."""

    def __init__(self, model_name: str, adapters: int = 0) -> None:
        self._adapters = adapters
        self._labels = {"model_name": model_name, "engine": "0"}
        self._finished: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()
        self._histograms = {
            "time_to_first_token_seconds": Histogram(_FIRST_TOKEN_S),
            "inter_token_latency_seconds": Histogram(_TOKEN_S),
            "request_time_per_output_token_seconds": Histogram(_TOKEN_S),
            "e2e_request_latency_seconds": Histogram(_LATENCY_S),
            "request_queue_time_seconds": Histogram(_LATENCY_S),
            "request_inference_time_seconds": Histogram(_LATENCY_S),
            "request_prefill_time_seconds": Histogram(_LATENCY_S),
            "request_decode_time_seconds": Histogram(_LATENCY_S),
            "request_prompt_tokens": Histogram(_TOKENS),
            "request_generation_tokens": Histogram(_TOKENS),
            "request_params_max_tokens": Histogram(_TOKENS),
            "iteration_tokens_total": Histogram((1, *(2**i for i in range(3, 15)))),
        }

    def step(self, tokens: int, decodes: int, since_last_s: float | None) -> None:
        """A step of the engine; ``since_last_s`` is None after a pause."""
        self._histograms["iteration_tokens_total"].observe(tokens)
        if since_last_s is not None and decodes:
            self._histograms["inter_token_latency_seconds"].observe(since_last_s, decodes)

    def observe(self, sequence: request.Sequence, end: str) -> None:
        """A finished sequence."""
        self._finished[end] += 1
        first, last, scheduled = sequence.first_token_s, sequence.last_token_s, sequence.scheduled_s
        if first is None or last is None or scheduled is None:
            return
        values = {
            "time_to_first_token_seconds": first - sequence.arrived_s,
            "e2e_request_latency_seconds": last - sequence.arrived_s,
            "request_queue_time_seconds": scheduled - sequence.arrived_s,
            "request_inference_time_seconds": last - scheduled,
            "request_prefill_time_seconds": first - scheduled,
            "request_decode_time_seconds": last - first,
            "request_prompt_tokens": float(len(sequence.prompt)),
            "request_generation_tokens": float(sequence.answered),
            "request_params_max_tokens": float(sequence.stop.max_tokens),
        }
        if sequence.answered > 1:
            values["request_time_per_output_token_seconds"] = (last - first) / (sequence.answered - 1)
        for name, value in values.items():
            self._histograms[name].observe(value)

    def families(self, engine: Engine) -> Iterator[Metric]:
        """All of it, for the text format."""
        core, counters, transfers = engine.core, engine.core.counters, engine.transfers
        waiting = len(core.waiting) + len(core.pulling)
        external = counters.pulled_tokens + counters.host_tokens
        yield self._gauge("num_requests_running", "Number of requests in model execution batches.", len(core.running))
        yield self._gauge("num_requests_waiting", "Number of requests waiting to be processed.", waiting)
        yield self._gauge(
            "num_requests_waiting_by_reason",
            "Number of requests waiting, by reason.",
            (("capacity", len(core.waiting)), ("deferred", len(core.pulling))),
            "reason",
        )
        yield self._gauge(
            "num_requests_kv_fetch_by_stage",
            "Number of requests that fetch KV, by stage.",
            (
                ("waiting_to_start", sum(s.wants_pull for s in core.waiting)),
                ("in_progress", len(core.pulling)),
                ("completed_waiting", sum(s.pulled_tokens > 0 for s in core.waiting)),
            ),
            "stage",
        )
        yield self._gauge(
            "engine_sleep_state",
            "Engine sleep state.",
            (("awake", 1), ("weights_offloaded", 0), ("discard_all", 0)),
            "sleep_state",
        )
        yield self._gauge("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", engine.pool.usage)
        yield self._cache_config(engine)
        if self._adapters:
            yield self._lora(engine)
        for name, text, value in (
            ("prefix_cache_queries", "Prefix cache queries, in tokens.", counters.prefix_queries),
            ("prefix_cache_hits", "Prefix cache hits, in tokens.", counters.prefix_hits),
            ("external_prefix_cache_queries", "External prefix cache queries, in tokens.", counters.external_queries),
            ("external_prefix_cache_hits", "External prefix cache hits, in tokens.", counters.external_hits),
            ("num_preemptions", "Cumulative number of preemptions.", counters.preemptions),
            (
                "prompt_tokens",
                "Number of prefill tokens processed.",
                counters.local_compute_tokens + counters.local_hit_tokens + external,
            ),
            ("prompt_tokens_cached", "Cached prompt tokens.", counters.local_hit_tokens + external),
            ("generation_tokens", "Number of generation tokens processed.", counters.generated_tokens),
            ("nixl_num_failed_transfers", "Number of failed NIXL transfers.", transfers.failed),
            ("nixl_num_failed_notifications", "Number of failed NIXL notifications.", transfers.failed_notifications),
            ("nixl_num_kv_expired_reqs", "Number of requests that had their KV expire.", counters.expired),
            (
                "nixl_num_notifications_after_expiry",
                "Number of completion notifications for requests whose KV was freed.",
                counters.late_notifications,
            ),
        ):
            yield self._counter(name, text, value)
        yield self._counter(
            "prompt_tokens_by_source",
            "Number of prompt tokens by source.",
            (
                ("local_compute", counters.local_compute_tokens),
                ("local_cache_hit", counters.local_hit_tokens),
                ("external_kv_transfer", external),
            ),
            "source",
        )
        yield self._counter(
            "prompt_tokens_cached_by_source",
            "Cached prompt tokens by source.",
            (("device", counters.local_hit_tokens), ("host", counters.host_tokens), ("p2p", counters.pulled_tokens)),
            "source",
        )
        reasons = ("stop", "length", "abort", "error")
        yield self._counter(
            "request_success",
            "Count of successfully processed requests.",
            tuple((reason, self._finished[reason]) for reason in reasons),
            "finished_reason",
        )
        rejected = CounterMetricFamily("vllm:admission_rejections", "Admissions rejected.", labels=["model_name", "reason"])
        for reason in ("queued_reqs", "queued_tokens"):
            rejected.add_metric([self._labels["model_name"], reason], self.rejected[reason])
        yield rejected
        for name, histogram in self._histograms.items():
            yield self._histogram(name, histogram)
        yield self._histogram("nixl_xfer_time_seconds", transfers.seconds)
        yield self._histogram("nixl_bytes_transferred", transfers.bytes)

    def _gauge(
        self, name: str, text: str, value: float | Iterable[tuple[str, float]], label: str | None = None
    ) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=[*self._labels, *([label] if label else [])])
        self._fill(family, value)
        return family

    def _counter(
        self, name: str, text: str, value: float | Iterable[tuple[str, float]], label: str | None = None
    ) -> CounterMetricFamily:
        family = CounterMetricFamily(f"vllm:{name}", text, labels=[*self._labels, *([label] if label else [])])
        self._fill(family, value)
        return family

    def _fill(self, family: GaugeMetricFamily | CounterMetricFamily, value: float | Iterable[tuple[str, float]]) -> None:
        own = list(self._labels.values())
        if isinstance(value, int | float):
            family.add_metric(own, value)
            return
        for label, one in value:
            family.add_metric([*own, label], one)

    def _histogram(self, name: str, histogram: Histogram) -> HistogramMetricFamily:
        family = HistogramMetricFamily(f"vllm:{name}", name, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), *histogram.cumulated())
        return family

    def _lora(self, engine: Engine) -> GaugeMetricFamily:
        core = engine.core
        running = sorted({s.adapter for s in core.running if s.adapter})
        waiting = sorted({s.adapter for s in (*core.waiting, *core.pulling.values()) if s.adapter})
        labels = ["max_lora", "waiting_lora_adapters", "running_lora_adapters"]
        family = GaugeMetricFamily("vllm:lora_requests_info", "Running stats on lora requests.", labels=labels)
        family.add_metric([str(self._adapters), ",".join(waiting), ",".join(running)], time.time())
        return family

    def _cache_config(self, engine: Engine) -> GaugeMetricFamily:
        config = engine.config.core
        labels = {
            "block_size": str(config.block_size),
            "cache_dtype": "auto",
            "enable_prefix_caching": str(config.prefix_caching),
            "engine": "0",
            "gpu_memory_utilization": "0.9",
            "num_gpu_blocks": str(config.num_blocks),
            "prefix_caching_hash_algo": "sha256",
        }
        family = GaugeMetricFamily("vllm:cache_config_info", "Information of the LLMEngine CacheConfig", labels=list(labels))
        family.add_metric(list(labels.values()), 1)
        return family
