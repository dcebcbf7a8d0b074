"""A pair that failed is avoided, less every second, and starts anew when one of the two does."""

from __future__ import annotations

from extproc.routing import pairs as pairs_module
from extproc.routing.pairs import Pairs
from extproc.routing.rates import TransferRate


def test_the_first_handoff_of_a_pair_costs_a_handshake_and_later_ones_do_not() -> None:
    pairs = Pairs(0.5)
    assert pairs.handshake_s("p", "d") == 0.5
    pairs.succeeded("p", "d")
    assert pairs.handshake_s("p", "d") == 0.0
    assert pairs.handshake_s("d", "p") == pairs.handshake_s("p", "e") == 0.5


def test_a_slow_link_is_slow_for_its_own_pair_only() -> None:
    pairs, common = Pairs(0.5), TransferRate(10e9)
    assert pairs.transfer_rate("p", "d") is None
    for _ in range(50):
        pairs.transferred("p", "d", 1e9, 1.0, common)
    slow = pairs.transfer_rate("p", "d")
    assert slow is not None and 0.9 < slow.seconds(1e9) < 1.1
    assert pairs.transfer_rate("q", "d") is None and common.seconds(1e9) == 0.1
    pairs.forget("p")
    assert pairs.transfer_rate("p", "d") is None


def test_a_pair_that_failed_is_charged_less_every_second_until_it_is_as_good_as_any() -> None:
    pairs = Pairs(0.5)
    pairs.failed("p", "d", 100.0)
    charged = [pairs.penalty_s("p", "d", 100.0 + s) for s in (0, 2, 4, 6)]
    assert charged == sorted(charged, reverse=True)
    assert charged[0] > 1 > charged[-1] == 0.0
    assert pairs.penalty_s("p", "other", 100.0) == 0.0


def test_failing_again_costs_more_but_never_more_than_a_minute() -> None:
    pairs = Pairs(0.5)
    charged = []
    for _ in range(200):
        pairs.failed("p", "d", 0.0)
        charged.append(pairs.penalty_s("p", "d", 0.0))
    assert charged[0] < charged[1] < charged[2]
    assert charged[-1] == 60.0


def test_a_handoff_that_works_forgives_everything() -> None:
    pairs = Pairs(0.5)
    pairs.failed("p", "d", 0.0)
    pairs.succeeded("p", "d")
    assert (pairs.penalty_s("p", "d", 0.0), pairs.handshake_s("p", "d")) == (0.0, 0.0)


def test_after_a_failure_they_may_have_to_meet_anew() -> None:
    pairs = Pairs(0.5)
    pairs.succeeded("p", "d")
    pairs.failed("p", "d", 0.0)
    assert pairs.handshake_s("p", "d") == 0.5


def test_a_new_engine_has_met_nobody() -> None:
    pairs = Pairs(0.5)
    for pair in (("p", "d"), ("p", "e"), ("q", "d")):
        pairs.succeeded(*pair)
    pairs.forget("p")
    assert [pairs.handshake_s(*pair) for pair in (("p", "d"), ("p", "e"), ("q", "d"))] == [0.5, 0.5, 0.0]


def test_of_very_many_pairs_the_ones_not_used_for_longest_are_forgotten(monkeypatch) -> None:
    monkeypatch.setattr(pairs_module, "_MOST", 3)
    pairs = Pairs(0.5)
    for number in range(3):
        pairs.succeeded("p", f"d{number}")
    pairs.succeeded("p", "d0")
    pairs.succeeded("p", "d3")
    assert [pairs.handshake_s("p", f"d{number}") for number in range(4)] == [0.0, 0.5, 0.0, 0.0]


def test_who_has_met_whom_is_known_from_both_sides() -> None:
    pairs = Pairs(handshake_s=0.5)
    told: list[str] = []
    pairs.on_forget = told.append
    for prefill, decode in (("p0", "d0"), ("p0", "d1"), ("p1", "d0")):
        pairs.succeeded(prefill, decode)
    assert (pairs.decodes_of("p0"), pairs.prefills_of("d0")) == ({"d0", "d1"}, {"p0", "p1"})
    before = pairs.changes
    pairs.succeeded("p0", "d0")
    assert pairs.changes == before, "that was known"
    pairs.failed("p0", "d1", 0.0)
    assert (pairs.decodes_of("p0"), pairs.prefills_of("d1")) == ({"d0"}, set())
    pairs.transferred("p0", "d0", 1e6, 0.001, TransferRate(10e9))
    pairs.part("d0")
    assert (pairs.met("p0", "d0"), pairs.met("p1", "d0"), pairs.decodes_of("p1")) == (False, False, set())
    assert pairs.transfer_rate("p0", "d0") is not None, "the network is the same"
    pairs.succeeded("p0", "d0")
    pairs.forget("d0")
    assert (pairs.met("p0", "d0"), pairs.decodes_of("p0"), pairs.transfer_rate("p0", "d0")) == (False, set(), None)
    assert told == ["d0"]
    assert pairs.changes > before
