"""When `baton bench` sends: rates, ramps and gaps are what was asked for, and what makes no sense is said."""

from __future__ import annotations

import itertools
import statistics

import pytest

from extproc.loadgen.arrivals import Gaps, Stage, arrivals, parse_gaps, parse_stages
from extproc.loadgen.errors import BenchError

POISSON, CONSTANT = parse_gaps("poisson"), parse_gaps("constant")


def gaps_of(times_s: list[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(times_s)]


def test_a_constant_rate_comes_like_a_clock() -> None:
    assert arrivals([Stage(2, 2, 3)], CONSTANT, seed=1) == pytest.approx([0, 0.5, 1, 1.5, 2, 2.5])


@pytest.mark.parametrize(("gaps", "variation"), [(POISSON, 1.0), (parse_gaps("gamma:2"), 2.0), (parse_gaps("gamma:0.5"), 0.5)])
def test_gaps_have_the_mean_and_the_variation_that_was_asked_for(gaps: Gaps, variation: float) -> None:
    found = gaps_of(arrivals([Stage(5, 5, 4_000)], gaps, seed=3))
    assert statistics.mean(found) == pytest.approx(0.2, rel=0.05)
    assert statistics.pstdev(found) / statistics.mean(found) == pytest.approx(variation, rel=0.05)


def test_poisson_counts_vary_as_much_as_their_mean() -> None:
    times_s = arrivals([Stage(10, 10, 2_000)], POISSON, seed=5)
    counts = [sum(1 for _ in group) for _, group in itertools.groupby(times_s, key=lambda at_s: int(at_s))]
    assert statistics.pvariance(counts) / statistics.mean(counts) == pytest.approx(1.0, rel=0.15)


def test_a_ramp_has_the_requests_under_its_line_wherever_one_looks() -> None:
    # From 0 to 20/s in 100 s: rate t/5, so t^2/10 requests by t.
    times_s = arrivals([Stage(0, 20, 100)], CONSTANT, seed=0)
    assert len(times_s) == 1_000
    for at_s in (10, 50, 90):
        assert sum(each < at_s for each in times_s) == pytest.approx(at_s**2 / 10, abs=1)


def test_a_ramp_down_to_nothing_ends_in_time() -> None:
    times_s = arrivals([Stage(20, 0, 100)], POISSON, seed=0)
    assert max(times_s) <= 100
    assert sum(each < 50 for each in times_s) / len(times_s) == pytest.approx(0.75, abs=0.03)


def test_stages_follow_each_other_and_a_pause_sends_nothing() -> None:
    times_s = arrivals(parse_stages("4:10, 0:30 ,8:10"), POISSON, seed=2)
    first, pause, last = ([each for each in times_s if low <= each < high] for low, high in ((0, 10), (10, 40), (40, 50)))
    assert not pause
    assert 20 < len(first) < 60 < len(last) < 110
    assert times_s == sorted(times_s)


def test_another_rate_sends_the_same_requests_at_a_scaled_time() -> None:
    slow, fast = (arrivals([Stage(rate, rate, 100 / rate)], POISSON, seed=7) for rate in (1.0, 4.0))
    assert slow == pytest.approx([4 * each for each in fast])
    assert arrivals([Stage(1, 1, 100)], POISSON, seed=8) != slow


def test_a_limit_ends_it_early() -> None:
    assert len(arrivals([Stage(1, 1, 1e9)], POISSON, seed=0, limit=50)) == 50


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("5", "'5'"),
        ("5:10,x:3", "'x:3'"),
        ("5:0", "more than 0 s"),
        ("1e400:3", "0 requests/s or more"),
        ("", "RATE:SECONDS"),
        ("1-2-3:4", "RATE-RATE:SECONDS"),
        ("1.2.3:4", "'1.2.3'"),
    ],
)
def test_stages_that_make_no_sense_are_said_with_their_part(text: str, said: str) -> None:
    with pytest.raises(BenchError, match="stages") as error:
        parse_stages(text)
    assert said in str(error.value)


@pytest.mark.parametrize("text", ["uniform", "gamma", "gamma:", "gamma:0", "gamma:x", "gamma:nan", "poisson:1"])
def test_unknown_arrivals_are_said(text: str) -> None:
    with pytest.raises(BenchError, match="arrivals"):
        parse_gaps(text)


def test_no_request_and_far_too_many_are_errors() -> None:
    with pytest.raises(BenchError, match="no request comes"):
        arrivals([Stage(0, 0, 10)], POISSON, seed=0)
    with pytest.raises(BenchError, match="at most"):
        arrivals([Stage(1e6, 1e6, 1e6)], POISSON, seed=0)
