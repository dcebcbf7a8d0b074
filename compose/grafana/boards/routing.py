"""What the router decides, and whether its expectations come true."""

from __future__ import annotations

from grafana_foundation_sdk.models import dashboard as model

from compose.grafana.boards.promql import quantile, rate, share
from compose.grafana.boards.style import BAD, CALM, GOOD, SLO, WARN, Query, board, choice, lines, number, rows

_POLICY = 'policy=~"$policy"'
_RATIO = "baton_ttft_actual_to_predicted_ratio"
_PROMPT = "baton_prefix_prompt_tokens_total"


def routing() -> model.Dashboard:
    """Made anew."""
    now = [
        number(
            "Handed over",
            "Share of the prompts that a prefill worker prefills.",
            Query(
                share(rate("baton_decisions_total", f'{_POLICY},mode="disaggregate"'), rate("baton_decisions_total", _POLICY))
            ),
            unit="percentunit",
        ),
        number(
            "Prefix reuse",
            "Share of the prompt tokens that prefill workers had in their caches.",
            Query(share(rate("baton_prefix_reported_tokens_total"), rate(_PROMPT))),
            unit="percentunit",
        ),
        number(
            "Prefix index error",
            "Expected reuse less the real one, as a share of the prompt tokens. Bad: beyond 10 % either way.",
            Query(
                f"({rate('baton_prefix_predicted_tokens_total')} - {rate('baton_prefix_reported_tokens_total')})"
                f" / ({rate(_PROMPT)} > 0)"
            ),
            unit="percentunit",
            steps=((None, BAD), (-0.1, GOOD), (0.1, BAD)),
        ),
        number(
            "TTFT, real by expected",
            "Median. 1: the cost model is right. Above: it is too hopeful. Bad: under 0.5 or over 2.",
            Query(quantile(0.5, _RATIO)),
            unit="none",
            steps=((None, WARN), (0.5, GOOD), (2, WARN), (4, BAD)),
            decimals=2,
        ),
        number("Queued", "Prompts that wait for a prefill worker.", Query("sum(baton_queue_requests)"), unit="short"),
        number(
            "Prefill work queued",
            "Seconds of prefill that these prompts need. Bad: more than the TTFT SLO times the prefill workers.",
            Query("sum(baton_queue_work_seconds)"),
            unit="s",
            steps=((None, CALM),),
        ),
    ]
    decisions = [
        lines(
            "Decisions by reason",
            "Bad: aggregate with prefill_busy, no_prefill_worker or late: more prefill workers are wanted.",
            Query(rate("baton_decisions_total", _POLICY, "mode, reason"), "{{mode}}: {{reason}}"),
            unit="reqps",
            stack=True,
        ),
        lines(
            "Handed over, by policy",
            "Share of the prompts.",
            Query(
                share(
                    rate("baton_decisions_total", f'{_POLICY},mode="disaggregate"', "policy"),
                    rate("baton_decisions_total", _POLICY, "policy"),
                ),
                "{{policy}}",
            ),
            unit="percentunit",
            top=1,
        ),
        lines(
            "Why one worker did it all",
            "The field that forbids a handoff, the reason of the decision, or the error of the prefill it stands in for. "
            "Bad: errors (prefill_failed and the like).",
            Query(rate("baton_whole_requests_total", by="reason"), "{{reason}}"),
            unit="reqps",
            stack=True,
        ),
        lines(
            "Second choices",
            "retry: another prefill worker. aggregate: no prefill. stale: too old to use. decode: another decode worker. "
            "panic: every worker of a role failed lately. Bad: any steady rate.",
            Query(rate("baton_fallbacks_total", by="kind"), "{{kind}}"),
            unit="reqps",
        ),
        rows(
            "Handoffs by pair",
            "A second, the 50 busiest. Bad: a pair of another zone at the top.",
            (Query(f"topk(50, {rate('baton_handoffs_total', by='prefill, decode, connector')})"), "handoffs/s"),
            by="handoffs/s",
            unit="ops",
            span=8,
        ),
        lines(
            "What clients tried",
            "Headers and keys that were taken out of requests, wishes that no policy allows, a second. Bad: transfer keys: "
            "somebody tries to reach the KV of other prompts.",
            Query(rate("baton_client_headers_removed_total"), "routing headers"),
            Query(rate("baton_client_keys_removed_total", by="key"), "key {{key}}"),
            Query(rate("baton_ignored_overrides_total", by="name"), "ignored {{name}}"),
            unit="reqps",
        ),
    ]
    prefix = [
        lines(
            "Prefix reuse, expected and real",
            "Share of the prompt tokens. Bad: far apart: evictions, restarts, or another block size than configured.",
            Query(share(rate("baton_prefix_predicted_tokens_total"), rate(_PROMPT)), "expected"),
            Query(share(rate("baton_prefix_reported_tokens_total"), rate(_PROMPT)), "real"),
            unit="percentunit",
            top=1,
        ),
        lines(
            "Prompt tokens",
            "Of prompts whose prefill worker reported, a second, and those of them that need not be computed.",
            Query(rate(_PROMPT), "prompt"),
            Query(rate("baton_prefix_reported_tokens_total"), "found in the cache"),
            unit="short",
        ),
        lines(
            "Prefix index",
            "Blocks. Grows to its bound and stays there.",
            Query("sum(baton_prefix_index_blocks)", "blocks"),
            unit="short",
        ),
    ]
    model_ = [
        lines(
            "TTFT, real by expected",
            "Of streamed answers: what clients saw by what the decision expected. 1 is right. Bad: p50 far from 1: the "
            "estimates of speeds are wrong. p90 far above p50: something happens that the model does not know.",
            *(Query(quantile(share_, _RATIO, by="mode"), f"p{share_ * 100:g} {{{{mode}}}}") for share_ in (0.1, 0.5, 0.9)),
            unit="none",
            log=True,
        ),
        lines(
            "What the expected TTFT is made of",
            "Mean a prompt. queued: in the filter's queue. queue_prefill, queue_decode: behind others on the worker. handoff: "
            "moving the KV.",
            Query(
                f"{rate('baton_ttft_predicted_seconds_total', by='part')}"
                f" / on () group_left () ({rate(_RATIO + '_count')} > 0)",
                "{{part}}",
            ),
            unit="s",
            stack=True,
        ),
        lines(
            "Prefill calls",
            "Bad: failed above 0; p99 of ok is most of the TTFT.",
            Query(quantile(0.5, "baton_prefill_seconds", by="outcome"), "p50 {{outcome}}"),
            Query(quantile(0.99, "baton_prefill_seconds", by="outcome"), "p99 {{outcome}}"),
            unit="s",
        ),
    ]
    queue = [
        lines(
            "Queue",
            "Prompts that wait, and the seconds of prefill that they need. Bad: growth over minutes.",
            Query("sum(baton_queue_requests)", "prompts"),
            Query("sum(baton_queue_work_seconds)", "seconds of work"),
            unit="short",
        ),
        lines(
            "Time in the queue",
            "Of prompts that had to wait. Bad: near the dashed line, the strictest TTFT SLO.",
            Query(quantile(0.5, "baton_queue_wait_seconds"), "p50"),
            Query(quantile(0.99, "baton_queue_wait_seconds"), "p99"),
            Query('min(baton_slo_seconds{kind="ttft"})', f"{SLO} (the strictest)"),
            unit="s",
        ),
        lines(
            "Turned away",
            "A second, by reason. Bad: any steady rate: the pool is too small, or a policy too strict.",
            Query(rate("baton_rejected_total", by="reason"), "{{reason}}"),
            unit="reqps",
        ),
    ]
    return board(
        "baton-routing",
        "Baton: routing",
        "What the router decides and why, and whether its expectations of caches and of times come true.",
        [
            ("Now", now),
            ("Decisions", decisions),
            ("Prefix reuse", prefix),
            ("Cost model", model_),
            ("Queue", queue),
        ],
        choice("policy", "Policy", "label_values(baton_decisions_total, policy)"),
    )
