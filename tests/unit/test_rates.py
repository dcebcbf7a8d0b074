"""What is learned about speed follows what was observed, and survives what makes no sense."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.routing.rates import DecodeRate, Ewma, PrefillMeter, PrefillRate, TransferRate

SIZES = [(500, 0), (8000, 0), (2000, 6000), (30_000, 0), (1000, 60_000), (12_000, 20_000)] * 40


def truth(uncached: float, cached: float) -> float:
    """A worker of 12,500 tokens/s whose attention shows at long contexts."""
    return uncached * 8e-5 + uncached * (cached + uncached / 2) * 2e-9


def test_the_first_guess_is_linear() -> None:
    rate = PrefillRate(10_000)
    assert rate.seconds(5000) == pytest.approx(0.5)
    assert rate.seconds(5000, 20_000) == pytest.approx(0.5)


@pytest.mark.parametrize("guess", [1000, 100_000])
def test_a_wrong_guess_is_corrected_for_short_prompts_and_for_long_ones(guess: float) -> None:
    rate = PrefillRate(guess)
    for uncached, cached in SIZES:
        rate.note(uncached, uncached * (cached + uncached / 2), truth(uncached, cached))
    for uncached, cached in ((1000, 0), (8000, 0), (1000, 50_000), (25_000, 0)):
        assert rate.seconds(uncached, cached) == pytest.approx(truth(uncached, cached), rel=0.15)


def test_a_worker_that_becomes_slower_is_seen_to() -> None:
    rate = PrefillRate(10_000)
    for uncached, cached in SIZES:
        rate.note(uncached, uncached * (cached + uncached / 2), truth(uncached, cached))
    for uncached, cached in SIZES * 2:
        rate.note(uncached, uncached * (cached + uncached / 2), 3 * truth(uncached, cached))
    assert rate.seconds(8000) == pytest.approx(3 * truth(8000, 0), rel=0.15)


@given(st.lists(st.tuples(st.floats(-10, 0) | st.floats(1, 1e6), st.floats(0, 1e11), st.floats(-1, 1e3)), max_size=50))
def test_no_observation_makes_work_cost_nothing_or_less(observations: list[tuple[float, float, float]]) -> None:
    rate = PrefillRate(10_000)
    for observation in observations:
        rate.note(*observation)
    assert rate.seconds(1000) > 0
    assert rate.seconds(1000, 100_000) >= rate.seconds(1000)
    assert rate.tokens_per_s > 0


def learned(replies: list[tuple[float, float, float]]) -> PrefillRate:
    """From replies of (sent, came, uncached tokens)."""
    rate, meter = PrefillRate(10_000), PrefillMeter()
    for sent_s, now_s, uncached in replies:
        meter.reply(rate, sent_s=sent_s, now_s=now_s, uncached=uncached, cached=0)
    return rate


def test_a_prompt_that_waited_behind_another_one_did_not_take_that_long_itself() -> None:
    # Always two sent together, the second is through one second after the first.
    replies = []
    for number in range(0, 200, 2):
        replies += [(number, number + 1.0, 5000), (number, number + 2.0, 5000)]
    assert learned(replies).seconds(5000) == pytest.approx(1.0, rel=0.1)


def test_replies_of_one_step_are_one_observation() -> None:
    # Four prompts of 1000 tokens share a step of one second.
    replies = [(second, second + 1.0 + k * 1e-4, 1000.0) for second in range(100) for k in range(4)]
    assert 4 * learned(replies).seconds(1000) == pytest.approx(1.0, rel=0.1)


def test_a_mean_moves_towards_what_is_observed() -> None:
    mean = Ewma(10.0)
    for _ in range(100):
        mean.note(20.0)
    assert mean.value == pytest.approx(20.0, rel=0.01)


def test_more_sequences_make_a_step_longer_and_reports_move_the_whole_curve() -> None:
    rate = DecodeRate(0.02, 0.0003)
    assert rate.itl_s(100) == pytest.approx(0.05)
    for _ in range(100):
        rate.note(100, 0.1)
    assert rate.itl_s(100) == pytest.approx(0.1, rel=0.02)
    assert rate.itl_s(0) == pytest.approx(0.04, rel=0.02)


def test_one_absurd_report_does_not_make_a_decode_worker_useless() -> None:
    rate = DecodeRate(0.02, 0.0003)
    rate.note(10, 1e9)
    assert rate.itl_s(10) < 5 * 0.023


def test_transfers_are_learned_by_size() -> None:
    rate = TransferRate(1e9)
    assert rate.seconds(1e9) == pytest.approx(1.0)
    for _ in range(300):
        rate.note(5e8, 0.05)
    assert rate.seconds(1e9) == pytest.approx(0.1, rel=0.1)
    rate.note(0, 1.0)
    rate.note(1e9, 0.0)
    assert rate.seconds(1e9) == pytest.approx(0.1, rel=0.1)
