"""A worker that fails is left alone for a while, then gets one request to show itself."""

from __future__ import annotations

import pytest

from extproc.routing import health
from extproc.routing.pool import Claim, Leg
from extproc.routing.settings import Routing

SETTINGS = Routing(breaker_failures=3, breaker_pause_s=2.0)


def broken(now_s: float = 0.0) -> Leg:
    leg = Leg()
    for _ in range(3):
        health.failed(leg, SETTINGS, now_s)
    return leg


def send(leg: Leg, now_s: float) -> Claim:
    claim = leg.claim(tokens=1, work_s=0.0, now_s=now_s, turn=1)
    health.chosen(leg, claim, SETTINGS, now_s)
    return claim


def test_failures_in_a_row_stop_it_and_one_success_between_them_does_not() -> None:
    leg = Leg()
    for _ in range(2):
        health.failed(leg, SETTINGS, 0.0)
    health.succeeded(leg)
    for _ in range(2):
        health.failed(leg, SETTINGS, 0.0)
    assert health.usable(leg, 0.0)
    health.failed(leg, SETTINGS, 0.0)
    assert not health.usable(leg, 0.0)
    assert not health.usable(leg, 1.9)
    assert health.usable(leg, 2.0)


def test_after_the_pause_one_request_at_a_time_is_the_trial() -> None:
    leg = broken()
    send(leg, 2.0)
    assert not health.usable(leg, 2.0)
    assert not health.usable(leg, 20.0)


def test_a_trial_that_goes_well_opens_it() -> None:
    leg = broken()
    send(leg, 2.0)
    health.succeeded(leg)
    assert health.usable(leg, 2.0)
    send(leg, 2.0)
    assert health.usable(leg, 2.0), "an open worker has no trials"


def test_every_trial_that_fails_doubles_the_pause_up_to_a_minute() -> None:
    leg, now_s = broken(), 2.0
    pauses = []
    for _ in range(8):
        send(leg, now_s)
        health.failed(leg, SETTINGS, now_s)
        pauses.append(leg.blocked_until_s - now_s)
        now_s = leg.blocked_until_s
    assert pauses == [4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0, 60.0]


def test_many_requests_that_fail_together_are_one_failure_not_a_long_pause() -> None:
    leg = broken()
    for _ in range(50):
        health.failed(leg, SETTINGS, 0.1)
    assert leg.blocked_until_s == 2.0


def test_a_trial_that_ends_without_telling_anything_lets_the_next_one_be_the_trial() -> None:
    leg = broken()
    trial = send(leg, 2.0)
    health.undecided(leg, trial, 3.0)
    assert health.usable(leg, 3.0)
    send(leg, 3.0)
    assert not health.usable(leg, 3.0)


@pytest.mark.parametrize("trying", [False, True])
def test_a_client_that_leaves_an_older_request_shortens_neither_the_pause_nor_the_trial(trying: bool) -> None:
    leg = Leg()
    older = send(leg, 0.0)
    for _ in range(3):
        health.failed(leg, SETTINGS, 0.0)
    if trying:
        send(leg, 2.0)
    before_s = leg.blocked_until_s
    health.undecided(leg, older, 1.0)
    assert leg.blocked_until_s == before_s


def test_a_trial_that_never_comes_back_does_not_block_for_ever() -> None:
    leg = broken()
    send(leg, 2.0)
    assert health.usable(leg, 2.0 + 31.0)
