"""Whether a request was served as promised is judged by what its client saw, and only where that can be known."""

from __future__ import annotations

from typing import Any

import pytest

from extproc.observe.access_log import Note
from extproc.observe.log_lines import Line
from extproc.observe.metrics import Metrics
from extproc.observe.promises import PARTS, Promise
from extproc.observe.tags import Tags
from extproc.routing.decision import Decision, Terms


def line(**fields: Any) -> Line:
    told: dict[str, Any] = {
        "key": "a",
        "request_id": "b",
        "mode": "",
        "status": 200,
        "flags": (),
        "outcome": "ok",
        "details": "",
        "upstream": "",
        "streamed": True,
        "duration_s": 2.0,
        "ttft_s": 0.5,
        "generation_s": 1.0,
        "prompt_tokens": 10,
        "completion_tokens": 101,
        "received_bytes": 1,
        "sent_bytes": 1,
        **fields,
    }
    return Line(**told)


BOTH = Promise(1.0, 0.02)


@pytest.mark.parametrize(
    ("promise", "said", "verdict"),
    [
        (BOTH, {}, "met"),
        (BOTH, {"ttft_s": 1.1}, "ttft_missed"),
        (BOTH, {"generation_s": 2.1}, "itl_missed"),
        (BOTH, {"ttft_s": 1.1, "generation_s": 2.1}, "both_missed"),
        (BOTH, {"completion_tokens": None, "generation_s": 9.0}, "met"),
        (Promise(None, 0.02), {"ttft_s": 99.0}, "met"),
        (Promise(None, None), {"ttft_s": 99.0}, None),
        (BOTH, {"streamed": False}, None),
        (BOTH, {"outcome": "client_gone", "generation_s": None}, None),
        (BOTH, {"outcome": "client_gone", "generation_s": None, "ttft_s": 1.1}, "ttft_missed"),
        (BOTH, {"outcome": "client_gone", "generation_s": None, "ttft_s": None}, None),
        (BOTH, {"outcome": "upstream_reset", "generation_s": None}, "failed"),
        (BOTH, {"outcome": "refused", "status": 429, "streamed": False}, "failed"),
        (BOTH, {"outcome": "refused", "status": 503, "streamed": False}, "failed"),
        (BOTH, {"outcome": "refused", "status": 404, "streamed": False}, None),
        (BOTH, {"outcome": "client_error", "status": 400, "streamed": False}, None),
    ],
)
def test_the_verdict_is_about_what_the_client_saw(promise: Promise, said: dict[str, Any], verdict: str | None) -> None:
    assert promise.kept(line(**said)) == verdict


def test_the_expected_ttft_is_held_against_the_real_one_by_its_parts() -> None:
    promise = Promise(1.0, None)
    promise.expect(
        Decision(
            policy="p",
            objective="balanced",
            reason="cost",
            prefill="a",
            decode="b",
            prompt_tokens=10,
            cached_tokens=0,
            terms=Terms(queue_prefill_s=0.05, prefill_s=0.1, transfer_s=0.02, overhead_s=0.01, queue_decode_s=0.05, stall_s=9),
            queued_s=0.02,
        )
    )
    metrics = Metrics()
    metrics.clients.judge(line(ttft_s=0.5), Note(key="a", tags=Tags("m", "p", "disaggregate"), promise=promise))
    found = metrics.registry.get_sample_value
    assert found("baton_ttft_actual_to_predicted_ratio_sum", {"mode": "disaggregate"}) == pytest.approx(2.0)
    parts = [found("baton_ttft_predicted_seconds_total", {"mode": "disaggregate", "part": part}) for part in PARTS]
    assert parts == pytest.approx([0.02, 0.05, 0.1, 0.03, 0.05])
    labels = {"model": "m", "policy": "p", "mode": "disaggregate", "slo": "met"}
    assert found("baton_client_slo_requests_total", labels) == 1


def test_without_a_promise_nothing_is_judged() -> None:
    metrics = Metrics()
    metrics.clients.judge(line(), Note(key="a"))
    assert not metrics.clients.slo_requests._values
