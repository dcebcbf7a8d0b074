"""Baton's own Prometheus metrics. One registry an instance; every fallback and every error has a counter here.

Names start with ``baton_`` and carry their unit. Label values come from fixed sets, from the configuration or from the
workers; the one that clients choose, the tenant, is bounded. Counters with a fixed set of values show all of them from the
start, so that the first event is a step that a query can see.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, disable_created_metrics, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from extproc.next_turn.outcomes import OUTCOMES as NEXT_TURN_OUTCOMES
from extproc.observe.accounts import Accounts
from extproc.observe.client_metrics import ClientMetrics
from extproc.observe.instruments import Maker
from extproc.observe.own_time import PHASES
from extproc.observe.served_by import BY

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
"""From a prefill of a few tokens to one of a million; the steps are those of a TTFT SLO."""

_BLOCKS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)

_POSITIONS = (0, 1, 3, 10, 30, 100, 300, 1000, 3000)

_OWN_SECONDS = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1)
"""What a program does between two waits."""

ITL_SECONDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
"""vLLM's own buckets of the time between tokens: no others can be made of them."""

TTFT_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
"""vLLM's own, of the time to the first token."""

_FALLBACKS = ("retry", "aggregate", "stale", "decode", "panic", "unwarmed", "gateway")
_REJECTIONS = ("queue_full", "queue_wait", "late", "max_in_flight", "deadline", "no_endpoint")
TOKEN_REASONS = (
    *("api", "ask_failed", "busy", "distrusted", "failed", "invalid", "left_alone", "multimodal", "no_source", "no_template"),
    *("no_worker", "refused", "template_kwargs", "template_refused", "timeout", "too_long", "unknown_field"),
)
"""Why the token ids of a prompt are not known."""
_DIRECTORY_OUTCOMES = (
    *("hit", "miss", "known", "timeout", "failed", "left_alone", "busy", "not_asked", "refused", "no_servers"),
)
_PREFILL_OUTCOMES = ("ok", "failed", "refused", "cancelled")
SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
"""vLLM's names for where the KV of a prompt token came from."""

HANDSHAKES = (
    *("ok", "no_certificate", "bad_certificate", "not_trusted", "plaintext", "timeout", "gone", "too_many", "failed"),
)
"""How a TLS handshake can end."""

_WORKER = ("role", "endpoint")


class _One(Collector):
    def __init__(self, family: Metric, process: str | None) -> None:
        self._family = family
        if process is not None:
            family.samples = [sample._replace(labels={**sample.labels, "process": process}) for sample in family.samples]

    def collect(self) -> Iterable[Metric]:
        yield self._family


class Metrics:
    """All of them. ``entries`` lists them for the reference."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for every counter, which nobody asks for
        self.registry = CollectorRegistry()
        make = Maker(self.registry)
        self.entries = make.entries

        make.topic("Requests")
        self.requests = make.tally(
            "baton_requests",
            "Requests that ended, by what became of them. `outcome`: `handoff`, `whole` (one worker did all of it), `models`, "
            "`cancelled` (the client left before it was sent on), `prefill_refused` (the prefill worker's own 4xx), "
            "`protocol_error`, or a code of [errors](errors.md). `mode`: `disaggregate`, `aggregate`, `none` (no prompt, "
            "or never placed). `-`: there is none",
            ("treatment", "model", "policy", "mode", "outcome"),
            watch="the share of outcomes that are codes of 5xx",
        )
        self.streams = make.gauge("baton_streams", "Requests open, from the headers to the end of the answer")
        self.rejected = make.counter(
            "baton_rejected",
            "Prompts turned away before they had workers",
            ["reason"],
            known=_REJECTIONS,
            watch="any steady rate: the pool is too small, or a policy too strict",
        )
        self.fallbacks = make.counter(
            "baton_fallbacks",
            "Ways taken that were not the first choice: `retry` (another prefill worker), `aggregate` (no prefill), `stale` (a "
            "handoff too old to use, prefilled again), `decode` (another decode worker than was picked), `panic` (every worker "
            "of a role failed lately, and one was chosen all the same), `unwarmed` (no pair was warm, and one was chosen all "
            "the same), `gateway` (it took a decode worker that was named behind the chosen one, `epp.fallback_endpoints`)",
            ["kind"],
            known=_FALLBACKS,
            watch="`retry` and `aggregate` against `baton_requests_total`",
        )
        self.removed_keys = make.counter(
            "baton_client_keys_removed",
            "Transfer keys that clients sent and no engine saw",
            ["key"],
            watch="anything above 0: somebody tries to reach other prompts' KV",
        )
        self.removed_headers = make.counter(
            "baton_client_headers_removed", "Requests with a routing header that a client sent", watch="the same"
        )
        self.ignored_overrides = make.counter("baton_ignored_overrides", "`x-baton-…` headers that no policy allows", ["name"])
        self.draining = make.gauge("baton_draining", "1 after SIGTERM")

        make.topic("Decisions")
        self.decisions = make.tally(
            "baton_decisions",
            "Prompts that got their workers, by what was chosen and why; the reasons stand below",
            ("mode", "reason", "policy"),
            watch="`aggregate` with `prefill_busy` or `no_prefill_worker`: more prefill workers are wanted",
        )
        self.whole = make.tally(
            "baton_whole_requests",
            "Prompts that one worker prefills and decodes: by the field that forbids a handoff ([requests](requests.md)), the "
            "reason of the decision, or the error of the prefill that it stands in for",
            ("reason",),
        )
        self.prefix_prompt_tokens = make.tally(
            "baton_prefix_prompt_tokens", "Prompt tokens of prompts whose prefill worker said how many it had cached"
        )
        self.prefix_predicted_tokens = make.tally(
            "baton_prefix_predicted_tokens",
            "Of these, expected in its cache",
            watch="its rate against the reported one: far apart, the prefix index is wrong (evictions, restarts, another block "
            "size)",
        )
        self.prefix_reported_tokens = make.tally(
            "baton_prefix_reported_tokens",
            "Of these, that were there",
            watch="its rate against that of the prompt tokens is the hit ratio",
        )
        self.cache_lookups = make.tally(
            "baton_cache_lookups",
            "Prompts that got workers where workers tell what they hold, by whose word counted for the one that computes: "
            "`events` (its own), `ranks` (the same, as a mean over its engines), `placed` (sent there a moment ago), "
            "`cache_server`, `predicted` (from text: its events are not in step), `no_tokens` (from text: the prompt's tokens "
            "are not known)",
            ("by",),
            known=[(by,) for by in ("events", "ranks", "placed", "cache_server", "predicted", "no_tokens")],
            watch="`no_tokens` and `predicted`: what is known is not used",
        )
        self.ranks_named = make.tally(
            "baton_ranks_named",
            "Legs that name an engine of a worker with several behind one address (`X-data-parallel-rank`)",
            ("role",),
            known=[("prefill",), ("decode",)],
            watch="its share of the prompts: the worker's own balancing does not choose for these",
        )
        self.cache_expected_tokens = make.tally(
            "baton_cache_expected_tokens",
            "Prompt tokens expected in the caches of a prefill worker that said how many were, by whose word",
            ("endpoint", "by"),
        )
        self.cache_found_tokens = make.tally(
            "baton_cache_found_tokens",
            "Of the same prompts, what its engine found",
            ("endpoint", "by"),
            watch="its rate against the expected one",
        )
        self.cache_stored_tokens = make.tally(
            "baton_cache_stored_expected_tokens",
            "Prompt tokens expected in the cache server of the prefill worker, whatever its own caches hold besides",
            ("endpoint",),
            watch="its rate against that of `baton_cache_server_hit_tokens_total`, over the workers of a server",
        )
        self.cache_transfer_bytes = make.tally(
            "baton_cache_transfer_expected_bytes",
            "KV that handoffs were expected to move to a decode worker: of their prompts, what it does not hold",
            ("endpoint",),
            watch="its rate against that of `baton_engine_transfer_bytes_total`: more is moved where it holds less than known",
        )
        self.cache_error_share = make.spread(
            "baton_cache_error_share",
            "How far the two are apart, as a share of the prompt",
            ("by",),
            bounds=(0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0),
            known=[(by,) for by in ("events", "ranks", "placed", "cache_server", "predicted")],
            watch="`events` above 0.05: events are lost, or the prompt's tokens are not those that the engine makes",
        )
        self.cache_mistrusted = make.tally(
            "baton_cache_mistrusted",
            "Times that a worker's events were wrong about what it holds so often that all of it was asked anew",
            ("endpoint",),
            watch="anything above 0",
        )
        self.cache_directory = make.tally(
            "baton_cache_directory",
            "Questions to LMCache's directory: `hit`, `miss`, `known` (asked a second ago), `timeout`, `failed`, `left_alone` "
            "(it failed several times in a row), `busy` (too many under way), `not_asked` (adapters, media, salts that LMCache "
            "does not take, a model's name of over 1,024 characters), `refused` (it did not take the question), `no_servers` "
            "(it hears of none)",
            ("outcome",),
            known=[(each,) for each in _DIRECTORY_OUTCOMES],
            watch="`timeout`, `failed`, `left_alone`, `refused` and `no_servers`: what our own prefills stored counts instead",
        )
        self.cache_directory_seconds = make.spread(
            "baton_cache_directory_seconds", "How long prompts waited for its answers", bounds=_OWN_SECONDS
        )
        self.prefix_blocks = make.gauge("baton_prefix_index_blocks", "Blocks in the prefix index")
        self.answers_served = make.tally(
            "baton_answers_served",
            "Answers whose start Envoy showed, by who gave them: " + ", ".join(f"`{by}` ({what})" for by, what in BY.items()),
            ("by",),
            known=[(by,) for by in BY],
            watch="`pool` and `stranger`: the gateway's workers are not the filter's, or its routes retry",
        )
        self.handoffs_lost = make.counter(
            "baton_handoffs_lost",
            "Handoffs whose request another than a decode worker of the pool answered: computed in vain, and given back",
            watch="anything above 0",
        )
        self.served_elsewhere = make.counter(
            "baton_served_elsewhere", "Answers of another worker than the one that was chosen", watch="anything above 0"
        )
        self.unknown_to_envoy = make.counter(
            "baton_unknown_to_envoy",
            "Prompts that Envoy answered 503 because the cluster of their route does not have the worker that was chosen",
            watch="anything above 0: Envoy's configuration is not of these pools, or it hears nothing of the workers",
        )
        self.pool_requests = make.tally(
            "baton_pool_requests", "Requests sent to workers of a pool; only where there are `pools`", ("pool",)
        )
        self.pool_workers = make.gauge(
            "baton_pool_workers",
            "Live workers of a pool, by role; `?`: those that may belong to one by the models that they have yet to tell",
            ["pool", "role"],
            watch="0: requests to that pool are 503",
        )

        make.topic("Queue")
        self.queue_requests = make.gauge(
            "baton_queue_requests", "Prompts that wait for a prefill worker", watch="growth over minutes: more prefill workers"
        )
        self.queue_bytes = make.gauge("baton_queue_bytes", "Bodies of the prompts that wait")
        self.queue_work_seconds = make.gauge(
            "baton_queue_work_seconds", "Prefill seconds that the prompts which wait will need"
        )
        self.queue_wait_seconds = make.spread(
            "baton_queue_wait_seconds", "Time in the queue of prompts that had to wait", bounds=SECONDS
        )
        self.queue_position = make.spread(
            "baton_queue_position", "Prompts that waited already when one that had to wait came", bounds=_POSITIONS
        )

        make.topic("Prefill and handoff")
        self.prefill_seconds = make.spread(
            "baton_prefill_seconds",
            "Duration of a prefill call",
            ("outcome",),
            bounds=SECONDS,
            known=[(each,) for each in _PREFILL_OUTCOMES],
            watch='`outcome="failed"` above 0; the 99th percentile of `ok` is most of the TTFT',
        )
        self.prefills_in_flight = make.gauge("baton_prefills_in_flight", "Prefill calls in flight")
        self.handoffs = make.tally(
            "baton_handoffs",
            "KV handoffs given to a decode worker; over 5,000 pairs, the later ones are `other`",
            ("connector", "prefill", "decode"),
        )
        self.next_turns = make.tally(
            "baton_next_turn",
            "What became of blocks that decode workers keep (`handoff.next_turn`), and why they were not used; see "
            "[the next turn](routing.md#what-becomes-of-kept-blocks)",
            ("outcome",),
            known=[(each,) for each in NEXT_TURN_OUTCOMES],
            watch="`failed`; `expired` near `kept`: blocks are kept for nothing; `unusable`, `not_shown`",
        )
        self.next_turn_kept = make.gauge("baton_next_turn_kept", "Answers whose blocks are remembered")
        self.next_turn_bytes = make.gauge("baton_next_turn_bytes", "Memory that their token ids take")
        self.handoff_blocks = make.spread("baton_handoff_blocks", "KV blocks of a handoff", bounds=_BLOCKS)
        self.handoff_age_seconds = make.spread(
            "baton_handoff_age_seconds",
            "Age of a handoff when it goes to the decode worker, at the most",
            bounds=SECONDS,
            watch="anything near `handoff.lease_s`",
        )
        self.releases = make.counter(
            "baton_releases",
            "Handoffs that no decode worker fetches, by what became of their blocks",
            ["outcome"],
            known=("released", "failed", "dropped"),
            watch="`failed` and `dropped`: their blocks stay pinned to the end of the lease",
        )

        make.topic("Workers, as this filter sees them")
        self.endpoint_live = make.gauge("baton_endpoint_live", "1 if the worker answers its health check", _WORKER, watch="0")
        self.endpoint_in_flight = make.gauge("baton_endpoint_in_flight", "Requests on the worker through this filter", _WORKER)
        self.endpoint_tokens = make.gauge(
            "baton_endpoint_tokens",
            "Tokens in flight on the worker through this filter: to prefill, or in its KV cache",
            _WORKER,
        )
        self.ledger_leaks = make.counter(
            "baton_ledger_leaks",
            "Counts of requests in flight that nobody gave back; a fault of Baton",
            watch="anything above 0",
        )
        self.discovery_reloads = make.counter(
            "baton_discovery_reloads",
            "Looks at a source of workers",
            ["source", "outcome"],
            watch="`failed` and `refused`: the set of workers is out of date",
        )
        self.endpoints_refused = make.counter(
            "baton_endpoints_refused",
            "Addresses that a source of workers named and that no worker may have (`workers.networks`)",
            ["source"],
            watch="anything above 0: the source is faulty, or somebody else writes there",
        )
        self.probe_failures = make.counter(
            "baton_probe_failures",
            "Looks at a worker's health that failed; `tls`: its certificate, or ours, is not accepted",
            ["kind"],
            known=("status", "timeout", "unreachable", "tls"),
            watch="any `tls`: requests to that worker fail, too",
        )
        self.secret_reloads = make.counter(
            "baton_secret_reloads",
            "Certificates and keys that changed on disk; `failed`: what was read before is used on",
            ["name", "outcome"],
            watch="any `failed`: the old ones will expire",
        )
        self.discovery_failing_seconds = make.gauge(
            "baton_discovery_failing_seconds",
            "For how long a source of workers could not be read; the workers are then those that it named last",
            ["source"],
            watch="over 60 s",
        )
        self.kubernetes_requests = make.counter(
            "baton_kubernetes_requests",
            "Requests to the API server of Kubernetes (`list`, `watch`; one that breaks off after it began counts twice), and "
            "objects that were not what they should be and are left out (`object`)",
            ["verb", "outcome"],
            watch="`forbidden` and `unauthorized`: rights or the token are not what they should be; a steady rate of `gone`",
        )
        self.scrapes = make.counter("baton_scrapes", "Looks at a worker's metrics", ["outcome"], known=("ok", "failed"))
        self.scrape_age_seconds = make.gauge(
            "baton_scrape_age_seconds",
            "Time since the last page of metrics that the worker gave; decisions then rest on the filter's own counts alone",
            _WORKER,
            watch="over 10 s",
        )

        make.topic("Engines, as they report")
        self.engine_itl_seconds = make.spread(
            "baton_engine_itl_seconds",
            "Time between tokens, of all requests on the workers of a role, from the engines' own histograms",
            ("role",),
            bounds=ITL_SECONDS,
            watch="the 99th percentile of `decode`: prompts that a decode worker computes itself show here",
        )
        self.engine_ttft_seconds = make.spread(
            "baton_engine_ttft_seconds",
            "Time to the first token on the engine, likewise; on a decode worker it holds the transfer",
            ("role",),
            bounds=TTFT_SECONDS,
        )
        self.engine_running = make.gauge("baton_engine_running_requests", "Requests in the scheduler's batches", _WORKER)
        self.engine_waiting = make.gauge(
            "baton_engine_waiting_requests",
            "Requests that wait for the scheduler",
            _WORKER,
            watch="above 0 on decode workers: KV memory is short",
        )
        self.engine_kv_usage = make.gauge(
            "baton_engine_kv_usage_ratio", "Share of the KV cache in use, 0 to 1", _WORKER, watch="over 0.9 on decode workers"
        )
        self.engine_preemptions = make.tally(
            "baton_engine_preemptions", "Requests that lost their KV memory and began again", _WORKER, watch="any steady rate"
        )
        self.engine_prompt_tokens = make.tally(
            "baton_engine_prompt_tokens",
            "Prompt tokens by where their KV came from: `local_compute`, `local_cache_hit`, `external_kv_transfer`",
            (*_WORKER, "source"),
            watch="`local_compute` on decode workers: it stalls the streams there",
        )
        self.engine_generation_tokens = make.tally(
            "baton_engine_generation_tokens", "Tokens generated, by the model that the engine names", (*_WORKER, "model")
        )
        self.engine_recomputed_tokens = make.tally(
            "baton_engine_recomputed_tokens",
            "Silent recompute: prompt tokens that a decode worker computed itself although they were handed over, at the least",
            ("endpoint",),
            watch="anything above 0: answers are right, the transfer was in vain (`kv_load_failure_policy: recompute`)",
        )
        self.engine_transfers = make.tally("baton_engine_transfers", "KV transfers that the worker received", _WORKER)
        self.engine_transfer_seconds = make.tally(
            "baton_engine_transfer_seconds", "Their duration, all together", _WORKER, watch="its rate by that of the transfers"
        )
        self.engine_transfer_bytes = make.tally("baton_engine_transfer_bytes", "Their size, all together", _WORKER)
        self.engine_failed_transfers = make.tally(
            "baton_engine_failed_transfers", "KV transfers that failed, handshakes included", _WORKER, watch="anything above 0"
        )
        self.engine_failed_notifications = make.tally(
            "baton_engine_failed_notifications",
            "Times that a decode worker could not say that it is done with blocks",
            _WORKER,
            watch="anything above 0: blocks stay pinned",
        )
        self.engine_expired_requests = make.tally(
            "baton_engine_expired_requests",
            "Handoffs whose lease ended before they were read",
            _WORKER,
            watch="anything above 0: KV memory was held for nothing, or a decode worker came too late",
        )
        self.engine_late_notifications = make.tally(
            "baton_engine_notifications_after_expiry",
            "Times that a decode worker was done with blocks that were free already: it may have read another prompt's KV. "
            "Some errors of a decode worker count here too and mean nothing ([architecture](architecture.md))",
            _WORKER,
            watch="anything above 0: raise the lease (`kv_lease_duration`, `handoff.lease_s`)",
        )
        self.engine_restarts = make.tally("baton_engine_restarts", "New engines at an address", _WORKER, watch="any")

        make.topic("Tokens")
        self.tokens = make.tally(
            "baton_tokens",
            "Tokens by `kind`: `prompt` (as the prefill worker counted them; for a prompt without one, estimated from its "
            "text), `cached` (of these, found in the prefill worker's cache), `completion` (only where Envoy's gRPC access log "
            "is on; "
            "`baton_engine_generation_tokens_total` has them by model in any case). `tenant`: the first 100 of the policies' "
            "`tenant_header`, then `other`",
            ("model", "tenant", "kind"),
        )
        self.accounts = Accounts(self.tokens)
        self.clients = ClientMetrics(make)

        make.topic("The filter itself")
        self.filter_seconds = make.spread(
            "baton_filter_seconds",
            "The filter's own time for one request: what it computes, not what it waits for",
            bounds=_OWN_SECONDS,
            watch="the 99th percentile over 10 ms",
        )
        self.filter_phase_seconds = make.spread(
            "baton_filter_phase_seconds",
            "The same by phase: `headers`, `parse` (body, policy, block hashes), `decide`, `queue` (from the decision to when "
            "it is acted on), `prefill_call`, `reply`, `answer` (its start)",
            ("phase",),
            bounds=_OWN_SECONDS,
            known=[(each,) for each in PHASES],
        )
        self.loop_lag_seconds = make.spread(
            "baton_event_loop_lag_seconds",
            "How late the event loop ran a timer, ten times a second",
            bounds=_OWN_SECONDS,
            watch="the 99th percentile over 50 ms: too little CPU, or a fault of Baton",
        )
        self.log_lines = make.tally(
            "baton_log_lines",
            "Log lines of requests: `logged`, `left_out` (`log_sample`); lines of any kind: `dropped`, as nobody read them "
            "fast enough",
            ["outcome"],
            known=(("logged",), ("left_out",), ("dropped",)),
            watch="`dropped`",
        )
        self.trace_spans = make.tally(
            "baton_trace_spans",
            "Spans of requests: `exported`, `dropped` (the collector is too slow), `failed` (it did not take them)",
            ["outcome"],
            known=(("exported",), ("dropped",), ("failed",)),
            watch="`dropped`, `failed`",
        )

        self.tls_handshakes = make.tally(
            "baton_tls_handshakes",
            "TLS handshakes at the gRPC port (`transport: lean`; grpc.aio says nothing of them): `ok`, `no_certificate` and "
            "`bad_certificate` (of the client: of another CA, or expired), `not_trusted` (the client refuses ours), "
            "`plaintext`, `timeout`, `gone`, `too_many` (at once), `failed`",
            ["outcome"],
            known=[(each,) for each in HANDSHAKES],
            watch="any but `ok` and `gone`: somebody cannot connect, or should not",
        )
        self.tls_expiry = make.gauge(
            "baton_tls_certificate_expiry_timestamp_seconds",
            "When the certificate of the gRPC port ends, as Unix time; 0 in plaintext",
            watch="less than a few days from now: it is not renewed",
        )

        make.topic("Processes")
        self.siblings = make.gauge(
            "baton_siblings",
            "Other processes of the same filter that are heard; with `processes: N` it should be N - 1. With `replicas`: other "
            "replicas that are heard",
        )
        self.process_restarts = make.gauge(
            "baton_process_restarts", "How often this process was started again since its parent runs", watch="above 0"
        )
        self.sibling_messages = make.tally(
            "baton_sibling_messages",
            "What processes tell each other, in datagrams: `sent`, `received`, `waited` (its reader was behind, it was sent "
            "later), `unsent` (nobody was there), `missed`, `malformed`, `overflow` (so far behind that it is told everything "
            "again), `gone` (a process was given up, and its share of the ledger with it)",
            ["outcome"],
            known=[(each,) for each in ("sent", "received", "waited", "unsent", "missed", "malformed", "overflow", "gone")],
            watch="`missed`, `malformed`, `overflow`",
        )

        self.sibling_facts = make.tally(
            "baton_sibling_facts",
            "Facts in those messages: `sent`, `received`",
            ["direction"],
            known=(("sent",), ("received",)),
        )

        make.topic("Replicas")
        self.replicas_known = make.gauge(
            "baton_replicas_known",
            "Addresses of other replicas, from `replicas.peers` and `replicas.dns`",
            watch="above `baton_siblings` for minutes: this one is blind to somebody's requests",
        )
        self.replica_lag_seconds = make.gauge(
            "baton_replica_lag_seconds",
            "How much later than the quickest message of a minute the last one of a replica came; the largest of all replicas",
            watch="over 50 ms",
        )
        self.replica_bytes = make.tally(
            "baton_replica_bytes",
            "Bytes between replicas, without TLS's own: `sent`, `received`",
            ["direction"],
            known=(("sent",), ("received",)),
        )
        self.replica_links = make.tally(
            "baton_replica_links",
            "Connections between replicas: `connected`, `ended` (from then on only the workers tell what it does), "
            "`unreached`, `lookup_failed` (of `replicas.dns`), and refused ones by reason",
            ["outcome"],
            known=[
                (each,)
                for each in (
                    *("connected", "ended", "unreached", "lookup_failed", "refused_version", "refused_secret"),
                    *("refused_certificate", "refused_malformed", "refused_too_many", "refused_timeout"),
                )
            ],
            watch="`ended` without a restart; `refused_…`",
        )

        make.topic("Warm-up")
        self.warm_ups = make.counter(
            "baton_warm_up",
            "Handoffs that the filter made to let two workers meet: `ok`, `failed`, `given_up` (one failure too many)",
            ["outcome"],
            known=("ok", "failed", "given_up"),
            watch="`given_up`",
        )
        self.warm_up_seconds = make.histogram("baton_warm_up_seconds", "Duration of those that went well", bounds=SECONDS)
        self.pairs_warm = make.gauge("baton_pairs_warm", "Pairs of live workers that have made a handoff")
        self.pairs_cold = make.gauge("baton_pairs_cold", "Pairs of live workers that have not", watch="above 0 for minutes")
        self.endpoints_warming = make.gauge(
            "baton_endpoints_warming", "Live workers that get no clients' requests until they are warm"
        )
        self.warm_up_waiting = make.gauge("baton_warm_up_waiting_requests", "Prompts that wait until a pair of workers is warm")

        make.topic("Token ids")
        self.token_chains = make.tally(
            "baton_token_chains",
            "Prompts by where their token ids came from: the client (`ids`), an earlier reply to the same prompt (`learned`), "
            "the `tokenizer`, a `worker` that was asked; `learned_prefix`: only their beginning is known; `none`",
            ("source",),
            known=[(each,) for each in ("ids", "learned", "tokenizer", "worker", "learned_prefix", "none")],
            watch="`none`: for these, what workers say they hold is not used",
        )
        self.token_chain_missing = make.tally(
            "baton_token_chain_missing",
            "Prompts whose token ids are not all known, by reason; see [tokens](tokens.md#reasons)",
            ("reason",),
            known=[(each,) for each in TOKEN_REASONS],
            watch="`timeout`, `busy`, `ask_failed`, `distrusted`",
        )
        self.token_chain_seconds = make.spread(
            "baton_token_chain_seconds",
            "Time that a request took for its token ids",
            ("source",),
            bounds=_OWN_SECONDS,
        )
        self.token_chains_compared = make.tally(
            "baton_token_chains_compared",
            "Token ids compared with those that the prefill worker replied with",
            ("source", "result"),
            watch='`result="other"`: the source is not asked for ten minutes. Is it the same tokenizer, template and settings?',
        )
        self.token_lessons = make.tally(
            "baton_token_lessons",
            "Prompts of prefill replies: `kept`, `dropped` (too many waited), `unreadable`, `forgotten` (they differ)",
            ("outcome",),
            known=[(each,) for each in ("kept", "dropped", "unreadable", "forgotten")],
        )
        self.token_beginnings = make.tally(
            "baton_token_beginnings",
            "Prompts that went on from an earlier one: whether they began with its token ids",
            ("result",),
            known=[("held",), ("other",)],
        )
        self.token_waiting = make.gauge("baton_token_waiting", "Prompts that are tokenised now, or of which a worker is asked")
        self.token_cache_bytes = make.gauge("baton_token_cache_bytes", "Token ids that are kept", ["kind"])
        self.token_cache_max_bytes = make.gauge("baton_token_cache_max_bytes", "So many may be", ["kind"])

        make.topic("Cache servers")
        self.cache_server_up = make.gauge(
            "baton_cache_server_up", "1 if the cache server answers its health check", ["server"], watch="0"
        )
        self.cache_server_lookup_tokens = make.counter(
            "baton_cache_server_lookup_tokens", "Tokens that workers looked up on the cache server", ["server"]
        )
        self.cache_server_hit_tokens = make.counter(
            "baton_cache_server_hit_tokens", "Tokens of these that the cache server had", ["server"]
        )
        self.cache_server_usage = make.gauge(
            "baton_cache_server_usage_ratio", "Share of the cache server's memory tier in use", ["server"]
        )
        self.cache_server_below_bytes = make.gauge(
            "baton_cache_server_below_bytes",
            "Bytes that the cache server has put on the tiers below its memory since it started",
            ["server"],
        )

        make.topic("KV events")
        worker = ["endpoint"]
        self.kv_events = make.tally("baton_kv_events", "KV cache events of the worker that were read", worker)
        self.kv_event_batches = make.tally(
            "baton_kv_event_batches",
            "Batches of KV events: as published (`live`), from a replay, had already (`old`), not understood (`faulty`)",
            ["endpoint", "outcome"],
            watch="faulty",
        )
        self.kv_event_blocks = make.tally(
            "baton_kv_event_blocks", "Blocks that the worker said it stored and removed", ["endpoint", "kind"]
        )
        self.kv_event_clears = make.tally("baton_kv_event_clears", "Times that the worker said its cache was emptied", worker)
        self.kv_event_gaps = make.tally(
            "baton_kv_event_gaps",
            "Missing batches: filled by a replay, or `lost`, which drops what was known of the worker",
            ["endpoint", "outcome"],
            watch="lost",
        )
        self.kv_event_replays = make.tally(
            "baton_kv_event_replays", "Replays asked for, and those that failed", ["endpoint", "outcome"], watch="failed"
        )
        self.kv_event_restarts = make.tally(
            "baton_kv_event_restarts", "Restarts of the worker's engine that its events showed", worker
        )
        self.kv_event_dropped_blocks = make.tally(
            "baton_kv_event_dropped_blocks",
            "Entries dropped because events were missed or not understood",
            worker,
            watch="growth",
        )
        self.kv_events_unknown = make.tally(
            "baton_kv_events_unknown",
            "Events passed over: a kind or field (`name`, looked at in every 1,024th batch) or a `medium` that is not known",
            ["endpoint", "what"],
        )
        self.kv_event_lag_seconds = make.spread(
            "baton_kv_event_lag_seconds",
            "From the time in a batch, by the worker's clock, to its reading here",
            bounds=_OWN_SECONDS,
            watch="over 1 s: decisions are made with what was",
        )
        self.kv_event_publishers = make.gauge(
            "baton_kv_event_publishers", "Publishers of the worker that are followed, one for each data-parallel rank", worker
        )
        self.kv_in_step = make.gauge(
            "baton_kv_in_step",
            "1 if all that the worker's caches hold is known by its events; else prediction counts",
            worker,
            watch="0",
        )
        self.kv_index_blocks = make.gauge(
            "baton_kv_index_blocks", "Blocks that the worker holds, as its events say", ["endpoint", "tier"]
        )
        self.kv_index_bytes = make.gauge("baton_kv_index_bytes", "Memory of what is known of the workers' caches, about")
        self.kv_index_max_bytes = make.gauge("baton_kv_index_max_bytes", "What that may take: `kv_events.max_blocks`")
        self.kv_index_evictions = make.tally(
            "baton_kv_index_evictions", "Entries that had to go for newer ones", watch="growth: raise `kv_events.max_blocks`"
        )
        self.kv_index_ignored_blocks = make.tally(
            "baton_kv_index_ignored_blocks",
            "Blocks of events that change nothing: stored behind an unknown one (`orphan`), `removed` but not known, of a"
            " `group` that does not decide",
            ["why"],
        )

    async def render(self, process: str | None = None) -> bytes:
        """The text exposition format; ``process`` is a label of every sample, where there are several processes.

        Hundreds of workers make it tens of milliseconds of work, so others get their turns.
        """
        parts: list[bytes] = []
        for family in self.registry.collect():
            parts.append(generate_latest(_One(family, process)))
            await asyncio.sleep(0)
        return b"".join(parts)

    def forget(self, endpoint: str) -> None:
        """A worker has gone: so do its series."""
        for tally in (
            self.engine_preemptions,
            self.engine_prompt_tokens,
            self.engine_generation_tokens,
            self.engine_recomputed_tokens,
            self.engine_transfers,
            self.engine_transfer_seconds,
            self.engine_transfer_bytes,
            self.engine_failed_transfers,
            self.engine_failed_notifications,
            self.engine_expired_requests,
            self.engine_late_notifications,
            self.engine_restarts,
            self.cache_expected_tokens,
            self.cache_found_tokens,
            self.cache_stored_tokens,
            self.cache_transfer_bytes,
            self.cache_mistrusted,
        ):
            tally.forget("endpoint", endpoint)
        self.handoffs.forget("prefill", endpoint)
        self.handoffs.forget("decode", endpoint)
