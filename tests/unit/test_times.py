"""Quantiles of the last minute: right to two percent, bounded, and forgotten in time."""

from __future__ import annotations

import random

import pytest

from extproc.observe.quantiles import at, bucket_of, merged, middle_of, quantiles
from extproc.observe.tags import Tags
from extproc.observe.times import WINDOW_S, Times

CHAT = Tags("m", "chat", "disaggregate")
BATCH = Tags("m", "batch", "aggregate")


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def times(clock: Clock) -> Times:
    return Times(clock)


@pytest.mark.parametrize("seconds", [1e-5, 0.00042, 0.045, 2.5, 119.0, 3600.0])
def test_a_bucket_tells_a_time_to_two_percent(seconds: float) -> None:
    assert middle_of(bucket_of(seconds)) == pytest.approx(seconds, rel=0.021)


@pytest.mark.parametrize(("seconds", "kept"), [(0.0, 1e-5), (-1.0, 1e-5), (1e9, 86_400.0)])
def test_times_that_cannot_be_are_the_nearest_that_can(seconds: float, kept: float) -> None:
    assert middle_of(bucket_of(seconds)) == pytest.approx(kept, rel=0.021)


def test_quantiles_are_those_of_the_sorted_list() -> None:
    draw = random.Random(7)
    values = sorted(draw.lognormvariate(-3, 1) for _ in range(5000))
    counts = merged({bucket_of(value): 1} for value in values)
    found = quantiles(counts)
    assert found is not None and found.samples == 5000
    assert found.p50_s == pytest.approx(values[2499], rel=0.021)
    assert found.p90_s == pytest.approx(values[4499], rel=0.021)
    assert found.p99_s == pytest.approx(values[4949], rel=0.021)


def test_one_value_is_every_quantile_of_itself() -> None:
    assert at({bucket_of(0.5): 1}, (0.0, 0.5, 1.0)) == pytest.approx([0.5] * 3, rel=0.021)
    assert quantiles({}) is None


def test_a_snapshot_has_all_together_and_each_kind_of_request(times: Times) -> None:
    times.answered(CHAT, ttft_s=0.1, generation_s=1.0, mean_itl_s=0.02)
    times.answered(BATCH, ttft_s=3.0, generation_s=10.0, mean_itl_s=0.08)
    shown = times.snapshot()
    assert shown["window_s"] == WINDOW_S
    assert shown["answers"] == 2
    assert shown["ttft"]["samples"] == 2
    assert shown["itl"]["p50_s"] == pytest.approx(0.02, rel=0.021)
    assert shown["source"] == "envoy access log"
    by = {each["policy"]: each for each in shown["by"]}
    assert by["chat"]["mode"] == "disaggregate" and by["batch"]["mode"] == "aggregate"
    assert by["chat"]["ttft"]["p99_s"] == pytest.approx(0.1, rel=0.021)
    assert by["batch"]["generation"]["p50_s"] == pytest.approx(10.0, rel=0.021)


def test_the_gaps_of_watched_answers_come_before_the_means_of_others(times: Times) -> None:
    times.answered(CHAT, ttft_s=0.1, mean_itl_s=0.02)
    times.watched(CHAT, {bucket_of(0.02): 99, bucket_of(0.5): 1})
    shown = times.snapshot()
    assert shown["source"] == "stream watch"
    assert shown["itl"]["samples"] == 100
    assert shown["itl"]["p50_s"] == pytest.approx(0.02, rel=0.021)
    assert shown["mean_itl"]["samples"] == 1


def test_what_is_not_known_is_none_and_counts_as_an_answer(times: Times) -> None:
    times.answered(CHAT, ttft_s=0.1)
    shown = times.snapshot()
    assert shown["generation"] is None and shown["itl"] is None
    assert shown["answers"] == 1


def test_after_a_minute_nothing_is_left(times: Times, clock: Clock) -> None:
    times.answered(CHAT, ttft_s=0.1)
    clock.now_s += WINDOW_S / 2
    times.answered(CHAT, ttft_s=0.2)
    assert times.snapshot()["answers"] == 2
    clock.now_s += WINDOW_S / 2 + 5
    assert times.snapshot()["answers"] == 1
    clock.now_s += WINDOW_S
    shown = times.snapshot()
    assert shown["ttft"] is None and shown["by"] == []


def test_however_many_kinds_come_memory_is_bounded_and_nothing_is_lost(times: Times) -> None:
    for number in range(10_000):
        times.answered(Tags("m", f"policy-{number}", "aggregate"), ttft_s=0.1)
    shown = times.snapshot()
    assert shown["answers"] == 10_000
    assert len(shown["by"]) <= 257


def test_room_is_made_for_new_kinds_once_old_ones_are_forgotten(times: Times, clock: Clock) -> None:
    for number in range(300):
        times.answered(Tags("m", f"old-{number}", "aggregate"), ttft_s=0.1)
    clock.now_s += WINDOW_S + 5
    times.answered(CHAT, ttft_s=0.1)
    assert [each["policy"] for each in times.snapshot()["by"]] == ["chat"]
