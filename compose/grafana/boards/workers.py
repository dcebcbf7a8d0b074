"""Worker by worker: memory, queues, transfers, stalls."""

from __future__ import annotations

from grafana_foundation_sdk.models import dashboard as model

from compose.grafana.boards.promql import RANGE, WORKER, of_role, quantile, rate, read, read_rate, share
from compose.grafana.boards.style import SLO, Query, board, choice, lines, rows

_NAME = "{{role}} {{endpoint}}"
_FROM, _TO = 'prefill=~"$endpoint"', 'decode=~"$endpoint"'
_VLLM = 'instance=~"$endpoint"'


def _engine(share_: float, histogram: str) -> Query:
    return Query(
        f"histogram_quantile({share_}, sum by (le, instance) (rate(vllm:{histogram}_bucket{{{_VLLM}}}[{RANGE}])))",
        f"p{share_ * 100:g} {{{{instance}}}}",
    )


def workers() -> model.Dashboard:
    """Made anew."""
    table = [
        rows(
            "Workers",
            "One line a worker, now. Bad: live 0, KV over 90 %, waiting above 0 on a decode worker, page older than 10 s.",
            (Query(read("baton_endpoint_live")), "live"),
            (Query(f"sum by (role, endpoint) (baton_endpoint_in_flight{{{WORKER}}})"), "in flight"),
            (Query(f"sum by (role, endpoint) (baton_endpoint_tokens{{{WORKER}}})"), "tokens in flight"),
            (Query(read("baton_engine_running_requests")), "running"),
            (Query(read("baton_engine_waiting_requests")), "waiting"),
            (Query(read("baton_engine_kv_usage_ratio")), "KV in use"),
            (Query(read_rate("baton_engine_generation_tokens_total")), "tokens/s"),
            (Query(read("baton_scrape_age_seconds")), "page age"),
            by="KV in use",
            units={"KV in use": "percentunit", "page age": "s"},
        )
    ]
    memory = [
        lines(
            "KV memory in use",
            "Share of the KV cache. Bad: over 90 % on decode workers for minutes: requests wait, or lose their memory.",
            Query(read("baton_engine_kv_usage_ratio"), _NAME),
            unit="percentunit",
            top=1,
        ),
        lines(
            "Running",
            "Requests in the scheduler's batches.",
            Query(read("baton_engine_running_requests"), _NAME),
            unit="short",
        ),
        lines(
            "Waiting in the engine",
            "Requests that wait for the scheduler. Bad: above 0 on a decode worker: its memory or its batch is full.",
            Query(read("baton_engine_waiting_requests"), _NAME),
            unit="short",
        ),
        lines(
            "Preemptions",
            "Requests that lost their KV memory and began again, a minute. Bad: any steady rate.",
            Query(f"{read_rate('baton_engine_preemptions_total')} * 60", _NAME),
            unit="opm",
        ),
        lines(
            "In flight through the filter",
            "Requests that the filters count on the worker. Bad: one worker far above the others of its role.",
            Query(f"sum by (role, endpoint) (baton_endpoint_in_flight{{{WORKER}}})", _NAME),
            unit="short",
        ),
        lines(
            "Tokens in flight through the filter",
            "To prefill, or in the KV cache.",
            Query(f"sum by (role, endpoint) (baton_endpoint_tokens{{{WORKER}}})", _NAME),
            unit="short",
        ),
    ]
    transfers = [
        lines(
            "KV transfers",
            "That the worker received, a second. 0 while prompts are handed over to it: nothing really moves.",
            Query(read_rate("baton_engine_transfers_total", f"{WORKER},{of_role('decode')}"), _NAME),
            unit="ops",
        ),
        lines(
            "Time of a transfer",
            "Mean. Bad: a step up for one pair: another transport (TCP in place of RDMA or IPC).",
            Query(
                share(
                    read_rate("baton_engine_transfer_seconds_total", f"{WORKER},{of_role('decode')}"),
                    read_rate("baton_engine_transfers_total", f"{WORKER},{of_role('decode')}"),
                ),
                _NAME,
            ),
            unit="s",
        ),
        lines(
            "Speed of transfers",
            "Bytes by the seconds that they took. Bad: far below what the network between the workers can do.",
            Query(
                share(
                    read_rate("baton_engine_transfer_bytes_total", f"{WORKER},{of_role('decode')}"),
                    read_rate("baton_engine_transfer_seconds_total", f"{WORKER},{of_role('decode')}"),
                ),
                _NAME,
            ),
            unit="Bps",
        ),
        lines(
            "Handoffs by pair",
            "The twenty busiest. Bad: one pair with nearly all of it.",
            Query(
                f"topk(20, {rate('baton_handoffs_total', _FROM, 'prefill, decode')}"
                f" or {rate('baton_handoffs_total', _TO, 'prefill, decode')})",
                "{{prefill}} → {{decode}}",
            ),
            unit="ops",
        ),
        lines(
            "Handoffs that went wrong",
            "A minute, by worker. Bad: anything.",
            *(
                Query(f"{read_rate(f'baton_engine_{name}_total')} * 60", f"{legend} {{{{endpoint}}}}")
                for name, legend in (
                    ("failed_transfers", "failed"),
                    ("failed_notifications", "not notified"),
                    ("expired_requests", "expired"),
                    ("notifications_after_expiry", "read after expiry"),
                )
            ),
            unit="opm",
        ),
        lines(
            "Pairs",
            "Pairs of live workers that have made a handoff (warm), and that have not. Bad: cold above 0 for minutes.",
            Query("max(baton_pairs_warm)", "warm"),
            Query("max(baton_pairs_cold)", "cold"),
            Query("max(baton_endpoints_warming)", "workers that warm up"),
            unit="short",
        ),
    ]
    stalls = [
        lines(
            "Prompt tokens by where their KV came from",
            "Tokens a second. Bad: local_compute on decode workers: every such prompt stalls the streams there.",
            Query(
                f"sum by (role, source) ({read_rate('baton_engine_prompt_tokens_total', by='role, endpoint, source')})",
                "{{role}} {{source}}",
            ),
            unit="short",
            stack=True,
        ),
        lines(
            "Computed twice",
            "Tokens a second that a decode worker computed although they were handed over. Bad: anything.",
            Query(
                'max by (endpoint) (rate(baton_engine_recomputed_tokens_total{endpoint=~"$endpoint"}[$__rate_interval]))',
                "{{endpoint}}",
            ),
            unit="short",
        ),
        lines(
            "Time between tokens, by role",
            "Of all requests on the workers of a role. Bad: p99 over the dashed line.",
            Query(quantile(0.5, "baton_engine_itl_seconds", 'role=~"$role"', "role"), "p50 {{role}}"),
            Query(quantile(0.99, "baton_engine_itl_seconds", 'role=~"$role"', "role"), "p99 {{role}}"),
            Query('min(baton_slo_seconds{kind="itl"})', f"{SLO} (the strictest)"),
            unit="s",
        ),
        lines(
            "Time between tokens, by worker",
            "From the engines themselves: needs the workers as targets. Bad: one worker above the others.",
            _engine(0.99, "inter_token_latency_seconds"),
            unit="s",
        ),
        lines(
            "Stalls",
            "Share of the gaps between tokens that took more than 0.2 s, by worker. Needs the workers as targets.",
            Query(
                "1 - sum by (instance) (rate(vllm:inter_token_latency_seconds_bucket"
                f'{{{_VLLM},le="0.2"}}[{RANGE}])) / '
                f"(sum by (instance) (rate(vllm:inter_token_latency_seconds_count{{{_VLLM}}}[{RANGE}])) > 0)",
                "{{instance}}",
            ),
            unit="percentunit",
        ),
        lines(
            "Time in the engine's queue",
            "Before the scheduler took the request on. Needs the workers as targets. Bad: above 0 on prefill workers whose "
            "prompts the filter holds back: others send there too.",
            _engine(0.99, "request_queue_time_seconds"),
            unit="s",
        ),
        lines(
            "Time to the first token on the engine",
            "By role; on a decode worker it holds the transfer.",
            Query(quantile(0.5, "baton_engine_ttft_seconds", 'role=~"$role"', "role"), "p50 {{role}}"),
            Query(quantile(0.99, "baton_engine_ttft_seconds", 'role=~"$role"', "role"), "p99 {{role}}"),
            unit="s",
        ),
        lines(
            "Tokens generated",
            "A second, by worker.",
            Query(read_rate("baton_engine_generation_tokens_total"), _NAME),
            unit="short",
        ),
        lines(
            "Restarts, and age of the last page",
            "New engines at an address in the last ten minutes, and the time since a worker last gave its metrics. "
            "Bad: any restart; an age over 10 s: decisions rest on the filter's own counts.",
            Query(f"max by (role, endpoint) (increase(baton_engine_restarts_total{{{WORKER}}}[10m]))", f"restarts {_NAME}"),
            Query(read("baton_scrape_age_seconds"), f"age {_NAME}"),
            unit="short",
        ),
    ]
    cache = [
        lines(
            "Cache servers: tokens looked up and found",
            "A second. Empty where there is none.",
            Query(
                "sum by (server) (max by (server) (rate(baton_cache_server_lookup_tokens_total[$__rate_interval])))",
                "looked up",
            ),
            Query("sum by (server) (max by (server) (rate(baton_cache_server_hit_tokens_total[$__rate_interval])))", "found"),
            unit="short",
        ),
        lines(
            "Cache servers: memory in use",
            "Share of the memory tier. Full is normal: the oldest goes first.",
            Query("max by (server) (baton_cache_server_usage_ratio)", "{{server}}"),
            unit="percentunit",
            top=1,
        ),
        lines(
            "Cache servers: up",
            "1 if it answers its health check. Bad: 0; prompts are then computed anew.",
            Query("min by (server) (baton_cache_server_up)", "{{server}}"),
            unit="short",
            top=1,
        ),
    ]
    return board(
        "baton-workers",
        "Baton: workers",
        "Worker by worker: KV memory, queues, transfers and stalls.",
        [
            ("Workers", table),
            ("Memory and queues", memory),
            ("Transfers", transfers),
            ("Stalls", stalls),
            ("Cache servers", cache),
        ],
        choice("role", "Role", "label_values(baton_endpoint_live, role)"),
        choice("endpoint", "Worker", 'label_values(baton_endpoint_live{role=~"$role"}, endpoint)'),
    )
