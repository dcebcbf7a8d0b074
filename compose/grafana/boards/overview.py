"""The fleet: do clients get what they were promised, are both roles in balance, is anything wrong."""

from __future__ import annotations

from grafana_foundation_sdk.models import dashboard as model

from compose.grafana.boards.promql import CLIENT, mean, of_role, quantile, rate, share
from compose.grafana.boards.style import BAD, CALM, GOOD, SLO, WARN, Query, board, choice, lines, number, rows

_JUDGED = "baton_client_slo_requests_total"
_KEPT = CLIENT + ',slo="met"'
_MET = f"({rate(_JUDGED, _KEPT)} or vector(0))"
_GOODPUT = share(_MET, rate(_JUDGED, CLIENT))
_BROKEN = CLIENT + ',outcome=~"upstream_reset|timeout|no_worker|worker_error|gateway_error"'


def _live(role: str) -> str:
    return f"count(max by (endpoint) (baton_endpoint_live{{{of_role(role)}}}) == 1) or vector(0)"


def _slo(kind: str) -> Query:
    return Query(f'max by (policy) (baton_slo_seconds{{kind="{kind}",policy=~"$policy"}})', f"{SLO} {{{{policy}}}}")


def overview() -> model.Dashboard:
    """Made anew."""
    ttft, itl = "baton_client_ttft_seconds", "baton_client_mean_itl_seconds"
    seconds = ((None, CALM),)
    now = [
        number(
            "Goodput",
            "Share of the prompts with an SLO that kept it. Bad: below 90 %.",
            Query(_GOODPUT),
            unit="percentunit",
            steps=((None, BAD), (0.5, WARN), (0.9, GOOD)),
        ),
        number(
            "TTFT p99",
            "From the first byte of the request to the first one of the answer, at Envoy, streamed answers. Bad: over the SLO.",
            Query(quantile(0.99, ttft, CLIENT)),
            unit="s",
            steps=seconds,
        ),
        number(
            "ITL p99",
            "Mean time between tokens of an answer; the 99th percentile of the answers. Bad: over the SLO.",
            Query(quantile(0.99, itl, CLIENT)),
            unit="s",
            steps=seconds,
        ),
        number("Requests", "All that ended, a second.", Query(rate("baton_client_requests_total", CLIENT)), unit="reqps"),
        number(
            "Prefill : decode",
            "What the P:D balance says (needs the rules of compose/prometheus/rules.yml). "
            "Bad: anything but balanced for ten minutes.",
            Query("max(baton:pd_balance:direction)"),
            unit="none",
            words={
                "-1": ("a worker to decode", WARN),
                "0": ("balanced", GOOD),
                "1": ("a worker to prefill", WARN),
                "2": ("more of both", BAD),
            },
        ),
        number(
            "Broken",
            "Share of the requests that a worker, a timeout or Envoy broke. Bad: over 1 %.",
            Query(
                share(
                    f"({rate('baton_client_requests_total', _BROKEN)} or vector(0))",
                    rate("baton_client_requests_total", CLIENT),
                )
            ),
            unit="percentunit",
            steps=((None, GOOD), (0.001, WARN), (0.01, BAD)),
        ),
    ]
    clients = [
        lines(
            "Goodput by policy",
            "Share of the prompts that kept the SLO of their policy. Bad: falling while load is steady.",
            Query(
                f"({rate(_JUDGED, _KEPT, 'policy')} or 0 * {rate(_JUDGED, CLIENT, 'policy')})"
                f" / ({rate(_JUDGED, CLIENT, 'policy')} > 0)",
                "{{policy}}",
            ),
            unit="percentunit",
            top=1,
        ),
        lines(
            "What became of the SLO",
            "Prompts with an SLO: which half of it was missed. ttft_missed: prefill or the queue is short of capacity. "
            "itl_missed: decode workers are crowded, or compute prompts.",
            Query(rate(_JUDGED, CLIENT, "slo"), "{{slo}}"),
            unit="reqps",
            stack=True,
        ),
        lines(
            "Requests by outcome",
            "As Envoy saw them end. Bad: upstream_reset, timeout, no_worker, worker_error, gateway_error.",
            Query(rate("baton_client_requests_total", CLIENT, "outcome"), "{{outcome}}"),
            unit="reqps",
            stack=True,
        ),
        lines(
            "TTFT by policy",
            "Time to the first token as clients see it. Bad: p99 over the dashed line.",
            Query(quantile(0.5, ttft, CLIENT, "policy"), "p50 {{policy}}"),
            Query(quantile(0.99, ttft, CLIENT, "policy"), "p99 {{policy}}"),
            _slo("ttft"),
            unit="s",
        ),
        lines(
            "ITL by policy",
            "Mean time between tokens of an answer. Bad: p99 over the dashed line.",
            Query(quantile(0.5, itl, CLIENT, "policy"), "p50 {{policy}}"),
            Query(quantile(0.99, itl, CLIENT, "policy"), "p99 {{policy}}"),
            _slo("itl"),
            unit="s",
        ),
        lines(
            "Single gaps between tokens",
            "Every gap of the streams that are watched (observe.sample), and every gap on decode workers. A p99 far above the "
            "mean is a stall: a prompt computed on a decode worker, or memory that ran out.",
            Query(quantile(0.99, "baton_client_itl_seconds", CLIENT, "mode"), "watched p99 {{mode}}"),
            Query(quantile(0.99, "baton_engine_itl_seconds", of_role("decode")), "decode workers p99"),
            Query(quantile(0.5, "baton_engine_itl_seconds", of_role("decode")), "decode workers p50"),
            unit="s",
        ),
        lines(
            "TTFT by mode",
            "Handed over (disaggregate) against one worker for all (aggregate). Bad: a handoff that takes longer for its gain.",
            Query(quantile(0.5, ttft, CLIENT, "mode"), "p50 {{mode}}"),
            Query(quantile(0.99, ttft, CLIENT, "mode"), "p99 {{mode}}"),
            unit="s",
        ),
        lines(
            "Time of generation",
            "From the first byte of the answer to the last, streamed answers that came whole.",
            Query(quantile(0.5, "baton_client_generation_seconds", CLIENT), "p50"),
            Query(quantile(0.99, "baton_client_generation_seconds", CLIENT), "p99"),
            unit="s",
        ),
        lines(
            "Open requests",
            "From the headers to the end of the answer, and prompts that wait in the queue. Bad: growth at steady load.",
            Query("sum(baton_streams)", "open"),
            Query("sum(baton_prefills_in_flight)", "prefill calls"),
            Query("sum(baton_queue_requests)", "queued"),
            unit="short",
        ),
    ]
    balance = [
        lines(
            "Load of the two roles",
            "Prefill: prefill calls per live prefill worker (1: each computes all the time). Decode: share of the KV memory in "
            "use, mean over workers. Bad: one near its end while the other has room. Move a worker to the full side.",
            Query(
                "sum(rate(baton_prefill_seconds_sum[$__rate_interval])) / "
                f"(count(max by (endpoint) (baton_endpoint_live{{{of_role('prefill')}}}) == 1) > 0)",
                "prefill calls per worker",
            ),
            Query(f"avg(max by (endpoint) (baton_engine_kv_usage_ratio{{{of_role('decode')}}}))", "decode KV in use"),
            unit="percentunit",
        ),
        lines(
            "Time in the queue",
            "Of prompts that had to wait for a prefill worker. Bad: a large part of the TTFT SLO.",
            Query(quantile(0.5, "baton_queue_wait_seconds"), "p50"),
            Query(quantile(0.99, "baton_queue_wait_seconds"), "p99"),
            Query(
                share(rate("baton_queue_wait_seconds_sum"), rate("baton_decisions_total")),
                "mean over all prompts",
            ),
            unit="s",
        ),
        lines(
            "Live workers",
            "By role. Bad: a step down that nobody ordered; a role without a worker serves nothing.",
            Query(_live("prefill"), "prefill"),
            Query(_live("decode"), "decode"),
            unit="short",
        ),
        lines(
            "How prompts are served",
            "Handed over, or by one worker, and why. Bad: prefill_busy, no_prefill_worker, late.",
            Query(rate("baton_decisions_total", 'policy=~"$policy"', "mode, reason"), "{{mode}}: {{reason}}"),
            unit="reqps",
            stack=True,
        ),
        lines(
            "KV that moves",
            "Bytes that decode workers fetched from prefill workers. 0 while prompts are handed over: nothing really moves.",
            Query(
                "sum(max by (endpoint) (rate(baton_engine_transfer_bytes_total[$__rate_interval])))",
                "fetched",
            ),
            unit="Bps",
        ),
        lines(
            "Age of handoffs",
            "When they go to the decode worker. Bad: near handoff.lease_s; blocks are freed then.",
            Query(quantile(0.5, "baton_handoff_age_seconds"), "p50"),
            Query(quantile(0.99, "baton_handoff_age_seconds"), "p99"),
            unit="s",
        ),
    ]
    wrong = [
        rows(
            "Alerts that fire",
            "Of compose/prometheus/rules.yml. What each means and what to do: docs/alerts.md.",
            (Query('ALERTS{alertname=~"Baton.*",alertstate="firing"}'), "firing"),
            by="severity",
            span=8,
            hidden=("__name__", "alertstate"),
        ),
        lines(
            "Wrong handoffs",
            "Signals that KV may not be what it should be, a minute. Bad: anything. Text of answers may be wrong.",
            *(
                Query(f"sum(max by (endpoint) (rate(baton_engine_{name}_total[$__rate_interval]))) * 60", legend)
                for name, legend in (
                    ("notifications_after_expiry", "read after expiry"),
                    ("failed_transfers", "failed transfers"),
                    ("expired_requests", "leases that ended unread"),
                    ("failed_notifications", "failed notifications"),
                )
            ),
            Query("sum(rate(baton_served_elsewhere_total[$__rate_interval])) * 60", "served by another worker"),
            unit="opm",
        ),
        lines(
            "Second choices and refusals",
            "Fallbacks by kind, and prompts turned away by reason. Bad: any steady rate.",
            Query(rate("baton_fallbacks_total", by="kind"), "fallback: {{kind}}"),
            Query(rate("baton_rejected_total", by="reason"), "refused: {{reason}}"),
            unit="reqps",
        ),
        lines(
            "Prompt tokens computed twice",
            "Tokens a second that decode workers computed although they were handed over. Bad: anything; answers are right, "
            "but the transfer was in vain and the streams there stall.",
            Query(
                "sum by (endpoint) (max by (endpoint) (rate(baton_engine_recomputed_tokens_total[$__rate_interval])))",
                "{{endpoint}}",
            ),
            unit="short",
        ),
        lines(
            "The filter's own time",
            "What the filter computes for one request, without any wait, and how late its event loop runs. Bad: p99 over 10 "
            "ms, lag over 50 ms.",
            Query(quantile(0.5, "baton_filter_seconds"), "own time p50"),
            Query(quantile(0.99, "baton_filter_seconds"), "own time p99"),
            Query(quantile(0.99, "baton_event_loop_lag_seconds"), "event loop lag p99"),
            unit="s",
        ),
        lines(
            "The filter's own time by phase",
            "Mean a request. Bad: one phase that grows with the pool or with the length of prompts.",
            Query(mean("baton_filter_phase_seconds", by="phase"), "{{phase}}"),
            unit="s",
            stack=True,
        ),
        lines(
            "Looks at workers, and lines of Envoy's log",
            "A second. Bad: failed looks; lines that were lost: TTFT, ITL, goodput and tokens then miss requests.",
            Query(rate("baton_scrapes_total", by="outcome"), "looks {{outcome}}"),
            Query(rate("baton_access_log_lines_total"), "log lines"),
            Query(rate("baton_access_log_lost_total"), "log lines lost"),
            unit="ops",
        ),
        lines(
            "Envoy: open requests and connections",
            "Needs Envoy's /stats/prometheus as a target; empty without.",
            Query('sum(envoy_http_downstream_rq_active{envoy_http_conn_manager_prefix="front"})', "requests"),
            Query('sum(envoy_http_downstream_cx_active{envoy_http_conn_manager_prefix="front"})', "connections"),
            unit="short",
        ),
        lines(
            "Envoy: calls of the filter",
            "Streams to the filter that Envoy opened, and that failed, a second. Needs Envoy as a target. Bad: failed above 0.",
            Query("sum(rate(envoy_http_ext_proc_streams_started[$__rate_interval]))", "started"),
            Query("sum(rate(envoy_http_ext_proc_streams_failed[$__rate_interval]))", "failed"),
            unit="ops",
        ),
    ]
    return board(
        "baton-overview",
        "Baton: fleet",
        "Goodput against the SLO, TTFT and ITL apart, the balance of prefill and decode, and what must not happen.",
        [
            ("Now", now),
            ("What clients get", clients),
            ("Prefill and decode", balance),
            ("What should not happen", wrong),
        ],
        choice("model", "Model", "label_values(baton_client_requests_total, model)"),
        choice("policy", "Policy", "label_values(baton_client_requests_total, policy)"),
    )
