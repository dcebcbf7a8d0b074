"""What engines report, as our metrics: deltas from page to page, restarts, workers that go, and prompts computed twice."""

from __future__ import annotations

import itertools

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from extproc.observe.engines import Engines
from extproc.observe.load import Scrape, parse
from extproc.observe.metrics import Metrics
from extproc.observe.recompute import Recompute
from extproc.routing.pool import Role

W = "10.0.0.1:8000"
DECODE = (Role.DECODE,)


class World:
    """Engines, and what their metrics say."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.now_s = 0.0
        self.engines = Engines(self.metrics, clock=lambda: self.now_s)

    def page(self, address: str = W, roles: tuple[Role, ...] = DECODE, **said: object) -> None:
        self.now_s += 1
        self.engines.on_scrape(address, roles, Scrape(**said), self.now_s)  # type: ignore[arg-type]

    def of(self, name: str, **labels: str) -> float | None:
        for family in text_string_to_metric_families(generate_latest(self.metrics.registry).decode()):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    return sample.value
        return None

    def series(self, text: str) -> list[str]:
        return [line for line in generate_latest(self.metrics.registry).decode().splitlines() if text in line]


@pytest.fixture
def world() -> World:
    return World()


def test_the_first_page_counts_nothing_and_the_next_what_came_in_between(world) -> None:
    world.page(preemptions=7, transfer_count=100, transfer_sum_bytes=5e9, generation_tokens=1000, model="m")
    assert world.of("baton_engine_preemptions_total", endpoint=W) == 0, "it is there, so that the first event is a step"
    assert world.of("baton_engine_transfers_total") == 0
    world.page(preemptions=9, transfer_count=103, transfer_sum_bytes=5.5e9, generation_tokens=1010, model="m")
    assert world.of("baton_engine_preemptions_total", role="decode", endpoint=W) == 2
    assert world.of("baton_engine_transfers_total") == 3
    assert world.of("baton_engine_transfer_bytes_total") == 5e8
    assert world.of("baton_engine_generation_tokens_total", model="m") == 10


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("failed_transfers", "baton_engine_failed_transfers_total"),
        ("failed_notifications", "baton_engine_failed_notifications_total"),
        ("expired_requests", "baton_engine_expired_requests_total"),
        ("late_notifications", "baton_engine_notifications_after_expiry_total"),
    ],
)
def test_what_is_wrong_with_handoffs_is_counted_by_worker(world, field, name) -> None:
    world.page(**{field: 3})
    world.page(**{field: 4})
    world.page("10.0.0.2:8000", **{field: 0})
    assert world.of(name, endpoint=W, role="decode") == 1
    assert world.of(name, endpoint="10.0.0.2:8000") == 0


def test_an_engine_that_started_anew_counts_from_zero(world) -> None:
    world.page(preemptions=50, itl_buckets={0.01: 90, float("inf"): 100}, itl_sum_s=9)
    world.page(preemptions=2, itl_buckets={0.01: 4, float("inf"): 5}, itl_sum_s=0.5, restarted=True)
    assert world.of("baton_engine_preemptions_total") == 2
    assert world.of("baton_engine_itl_seconds_count", role="decode") == 5
    assert world.of("baton_engine_itl_seconds_sum", role="decode") == 0.5
    assert world.of("baton_engine_restarts_total") == 1


def test_a_page_that_leaves_something_out_counts_nothing(world) -> None:
    world.page(preemptions=5)
    world.page()
    world.page(preemptions=6)
    assert world.of("baton_engine_preemptions_total") in (1, 6), "never a negative step"


def test_histograms_of_a_role_are_the_sum_over_its_workers(world) -> None:
    inf = float("inf")
    for address, samples in ((W, 4), ("10.0.0.2:8000", 6)):
        world.page(address, itl_buckets={0.01: 10, 0.025: 10, inf: 10}, itl_sum_s=1)
        world.page(address, itl_buckets={0.01: 10, 0.025: 10 + samples, inf: 10 + samples}, itl_sum_s=1 + samples * 0.02)
    world.page("10.0.0.3:8000", (Role.PREFILL,), ttft_buckets={0.5: 0, inf: 0}, ttft_sum_s=0)
    world.page("10.0.0.3:8000", (Role.PREFILL,), ttft_buckets={0.5: 2, inf: 2}, ttft_sum_s=0.6)
    assert world.of("baton_engine_itl_seconds_bucket", role="decode", le="0.01") == 0
    assert world.of("baton_engine_itl_seconds_bucket", role="decode", le="0.025") == 10
    assert world.of("baton_engine_itl_seconds_sum", role="decode") == pytest.approx(0.2)
    assert world.of("baton_engine_ttft_seconds_count", role="prefill") == 2


def test_gauges_are_the_last_page_and_its_age(world) -> None:
    world.page(running=3, waiting=1, kv_usage=0.5)
    world.page(running=4)
    world.now_s += 7
    assert world.of("baton_engine_running_requests", endpoint=W) == 4
    assert world.of("baton_engine_kv_usage_ratio", endpoint=W) == 0.5
    assert world.of("baton_scrape_age_seconds", endpoint=W, role="decode") == 7


def test_the_series_of_a_worker_go_with_it(world) -> None:
    for address in (W, "10.0.0.2:8000"):
        world.page(
            address, running=1, waiting=0, kv_usage=0.1, preemptions=1, generation_tokens=5, sources={"local_compute": 5.0}
        )
    assert len(world.series(W)) > 10
    world.engines.gone(W)
    assert world.series(W) == []
    assert len(world.series("10.0.0.2:8000")) > 10, "and no others"
    world.engines.gone(W)
    world.engines.gone("never:1")


def test_a_worker_whose_role_changes_has_the_series_of_the_new_one_only(world) -> None:
    world.page(running=1)
    world.page(roles=(Role.PREFILL, Role.DECODE), running=2)
    assert {'role="both"' in line for line in world.series(W) if "role=" in line} == {True}


def test_what_an_engine_names_does_not_make_series_without_end(world) -> None:
    for number in range(500):
        world.page(model=f"m{number}", generation_tokens=number, sources={f"source_{number}": 1.0})
    assert len(world.series("baton_engine_")) < 400


def test_a_page_in_the_text_format_comes_through(world) -> None:
    text = b"""
vllm:num_requests_running{engine="0",model_name="m"} 1
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_compute"} 10
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="external_kv_transfer"} %d
vllm:inter_token_latency_seconds_bucket{engine="0",le="0.01",model_name="m"} %d
vllm:inter_token_latency_seconds_bucket{engine="0",le="+Inf",model_name="m"} %d
"""
    for number in (0, 7):
        world.engines.on_scrape(W, DECODE, parse(text % (number, number, number)), 1.0)
    assert world.of("baton_engine_prompt_tokens_total", source="external_kv_transfer") == 7
    assert world.of("baton_engine_itl_seconds_bucket", le="0.01") == 7


# -- computed twice ----------------------------------------------------------------------------------------------------------


class Sums:
    """A decode worker's counters as Recompute sees them, page by page."""

    def __init__(self) -> None:
        self.recompute = Recompute()
        self.seconds = itertools.count(1)
        self.now_s = 0.0

    def send(self, tokens: int, *, handoff: bool = True):
        return self.recompute.sent(W, tokens, handoff=handoff)

    def end(self, sent) -> None:
        sent.ended_s = self.now_s

    def page(self, computed: float = 0, arrived: float = 0) -> float:
        self.now_s += 1
        return self.recompute.on_scrape(W, computed=computed, arrived=arrived, asked_s=self.now_s)


@pytest.fixture
def sums() -> Sums:
    found = Sums()
    found.send(1)
    found.page()
    return found


def test_a_handoff_that_arrives_is_no_recompute(sums) -> None:
    sent = sums.send(1000)
    assert sums.page(arrived=999, computed=1) == 0
    sums.end(sent)
    assert sums.page() == sums.page() == 0


def test_a_handoff_that_the_worker_computes_itself_is_one_and_counts_once(sums) -> None:
    sent = sums.send(1000)
    assert sums.page(computed=1000) == 0, "it may still arrive"
    sums.end(sent)
    assert sums.page() == 1000
    assert sums.page() == 0


def test_half_a_handoff_is_half(sums) -> None:
    sent = sums.send(1000)
    sums.end(sent)
    assert sums.page(arrived=600, computed=400) == 400


def test_a_client_that_leaves_before_its_prompt_came_is_none(sums) -> None:
    sums.end(sums.send(1000))
    assert sums.page() == sums.page() == 0


def test_prompts_that_were_not_handed_over_may_be_computed(sums) -> None:
    gone, whole = sums.send(1000), sums.send(1000, handoff=False)
    sums.end(gone)
    sums.end(whole)
    assert sums.page(computed=1000) == 0, "the whole one answers for it, whatever became of the other"


def test_prompts_of_other_filters_are_none(sums) -> None:
    for _ in range(5):
        sent = sums.send(1000)
        sums.end(sent)
        assert sums.page(computed=5000, arrived=1000) == 0


def test_one_that_ended_after_the_page_was_asked_for_is_looked_at_next_time(sums) -> None:
    sent = sums.send(1000)
    sums.now_s += 1
    sent.ended_s = sums.now_s + 0.5
    assert sums.recompute.on_scrape(W, computed=0, arrived=0, asked_s=sums.now_s) == 0
    sums.now_s += 1
    assert sums.recompute.on_scrape(W, computed=0, arrived=1000, asked_s=sums.now_s) == 0


def test_requests_that_never_end_are_bounded() -> None:
    recompute = Recompute()
    for _ in range(30_000):
        recompute.sent(W, 20, handoff=True).ended_s = 0.0
    assert recompute.on_scrape(W, computed=1e9, arrived=0, asked_s=1.0) == 10_000 * 20, "the last ten thousand are followed"
