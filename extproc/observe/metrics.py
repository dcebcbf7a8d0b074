"""Baton's own Prometheus metrics. One registry an instance; every fallback and every error has a counter here."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

# Prefill of a few tokens to 1 M tokens; the steps are those of a TTFT SLO.
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_BLOCKS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)


class Metrics:
    """Names start with ``baton_``; label values come from fixed sets or the configuration, never from a client."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "baton_requests",
            "Requests by what became of them: handoff, whole, refused, cancelled, or the code of the error",
            ["treatment", "outcome"],
            registry=registry,
        )
        self.handoffs = Counter(
            "baton_handoffs",
            "KV handoffs given to a decode worker",
            ["connector", "prefill", "decode"],
            registry=registry,
        )
        self.handoff_blocks = Histogram("baton_handoff_blocks", "KV blocks of a handoff", buckets=_BLOCKS, registry=registry)
        self.whole = Counter(
            "baton_whole_requests",
            "Prompts that one worker prefills and decodes, by reason",
            ["reason"],
            registry=registry,
        )
        self.prefill_seconds = Histogram(
            "baton_prefill_seconds",
            "Duration of a prefill call, by outcome",
            ["outcome"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.fallbacks = Counter(
            "baton_fallbacks",
            "Ways taken that were not the first choice: retry (another prefill worker), aggregate (no prefill), "
            "stale (a handoff too old to use, prefilled again), decode (another decode worker than was picked), "
            "panic (every worker of a role failed lately, and one was chosen all the same), "
            "unwarmed (no pair was warm, and one was chosen all the same)",
            ["kind"],
            registry=registry,
        )
        self.handoff_age_seconds = Histogram(
            "baton_handoff_age_seconds",
            "Age of a handoff when it goes to the decode worker, at the most",
            buckets=_SECONDS,
            registry=registry,
        )
        self.releases = Counter(
            "baton_releases",
            "Handoffs that no decode worker fetches, by what became of their blocks: released, failed, dropped",
            ["outcome"],
            registry=registry,
        )
        self.removed_keys = Counter(
            "baton_client_keys_removed", "Transfer keys that clients sent and no engine saw", ["key"], registry=registry
        )
        self.removed_headers = Counter(
            "baton_client_headers_removed", "Requests with a routing header that a client sent", registry=registry
        )
        self.streams = Gauge("baton_streams", "Requests open, from the headers to the end of the answer", registry=registry)
        self.prefills_in_flight = Gauge("baton_prefills_in_flight", "Prefill calls in flight", registry=registry)
        self.endpoint_live = Gauge(
            "baton_endpoint_live", "1 if the worker answers its health check", ["role", "endpoint"], registry=registry
        )
        self.endpoint_in_flight = Gauge(
            "baton_endpoint_in_flight",
            "Requests on the worker through this filter",
            ["role", "endpoint"],
            registry=registry,
        )
        self.decisions = Counter(
            "baton_decisions",
            "Decisions by what was chosen (disaggregate, aggregate), why, and the policy",
            ["mode", "reason", "policy"],
            registry=registry,
        )
        self.rejected = Counter(
            "baton_rejected",
            "Prompts turned away: queue_full, queue_wait, late, max_in_flight, deadline, no_endpoint",
            ["reason"],
            registry=registry,
        )
        self.queue_requests = Gauge("baton_queue_requests", "Prompts that wait for a prefill worker", registry=registry)
        self.queue_bytes = Gauge("baton_queue_bytes", "Bodies of the prompts that wait", registry=registry)
        self.queue_work_seconds = Gauge(
            "baton_queue_work_seconds", "Prefill seconds that the prompts which wait will need", registry=registry
        )
        self.queue_wait_seconds = Histogram(
            "baton_queue_wait_seconds", "Time in the queue of prompts that had to wait", buckets=_SECONDS, registry=registry
        )
        self.endpoint_tokens = Gauge(
            "baton_endpoint_tokens",
            "Tokens in flight on the worker through this filter: to prefill, or in its KV cache",
            ["role", "endpoint"],
            registry=registry,
        )
        self.prefix_blocks = Gauge("baton_prefix_index_blocks", "Blocks in the prefix index", registry=registry)
        self.predicted_cached_tokens = Gauge(
            "baton_predicted_cached_tokens", "Prompt tokens expected in prefill caches, since the start", registry=registry
        )
        self.reported_cached_tokens = Gauge(
            "baton_reported_cached_tokens", "Prompt tokens that were there, of the same prompts", registry=registry
        )
        self.scrapes = Counter("baton_scrapes", "Looks at a worker's metrics, by outcome", ["outcome"], registry=registry)
        self.discovery_reloads = Counter(
            "baton_discovery_reloads", "Looks at a source of workers, by outcome", ["source", "outcome"], registry=registry
        )
        self.ignored_overrides = Counter(
            "baton_ignored_overrides", "x-baton headers that no policy allows", ["name"], registry=registry
        )
        self.served_elsewhere = Counter(
            "baton_served_elsewhere", "Answers of another worker than the one that was chosen", registry=registry
        )
        self.ledger_leaks = Counter(
            "baton_ledger_leaks", "Counts of requests in flight that nobody gave back; a fault of Baton", registry=registry
        )
        self.warm_ups = Counter(
            "baton_warm_up",
            "Handoffs that the filter made to let two workers meet, by outcome: ok, failed, given_up (a failure that was one too "
            "many)",
            ["outcome"],
            registry=registry,
        )
        self.warm_up_seconds = Histogram(
            "baton_warm_up_seconds", "Duration of those that went well", buckets=_SECONDS, registry=registry
        )
        self.pairs_warm = Gauge("baton_pairs_warm", "Pairs of live workers that have made a handoff", registry=registry)
        self.pairs_cold = Gauge("baton_pairs_cold", "Pairs of live workers that have not", registry=registry)
        self.endpoints_warming = Gauge(
            "baton_endpoints_warming", "Live workers that get no clients' requests until they are warm", registry=registry
        )
        self.warm_up_waiting = Gauge(
            "baton_warm_up_waiting_requests", "Prompts that wait until a pair of workers is warm", registry=registry
        )
        self.cache_server_up = Gauge(
            "baton_cache_server_up", "1 if the cache server answers its health check", ["server"], registry=registry
        )
        self.cache_server_lookup_tokens = Counter(
            "baton_cache_server_lookup_tokens",
            "Tokens that workers looked up on the cache server",
            ["server"],
            registry=registry,
        )
        self.cache_server_hit_tokens = Counter(
            "baton_cache_server_hit_tokens", "Tokens of these that the cache server had", ["server"], registry=registry
        )
        self.cache_server_usage = Gauge(
            "baton_cache_server_usage_ratio", "Share of the cache server's memory tier in use", ["server"], registry=registry
        )
        self.cache_server_below_bytes = Gauge(
            "baton_cache_server_below_bytes",
            "Bytes that the cache server has put on the tiers below its memory since it started",
            ["server"],
            registry=registry,
        )
        self.draining = Gauge("baton_draining", "1 after SIGTERM", registry=registry)

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self.registry)
