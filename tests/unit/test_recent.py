"""The last seconds: every event is counted once, for ten whole seconds, and what is kept stays small."""

from __future__ import annotations

from extproc.recent import WINDOW_S, Recent


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_events_are_counted_by_kind_and_pair_once_their_second_is_over() -> None:
    clock = Clock()
    recent = Recent(clock)
    for _ in range(3):
        recent.came()
    recent.handed_over("p1", "d1")
    recent.handed_over("p1", "d1")
    recent.handed_over("p2", "d1")
    recent.whole()
    for status in (200, 404, 429, 500, 503):
        recent.answered(status)
    assert recent.counts().requests == 0, "the running second is not shown"
    clock.now_s += 1
    counts = recent.counts()
    assert (counts.requests, counts.handoffs, counts.whole, counts.refused, counts.errors) == (3, 3, 1, 1, 2)
    assert recent.pairs() == {("p1", "d1"): 2, ("p2", "d1"): 1}


def test_an_event_is_forgotten_after_the_window_even_if_nothing_happens_any_more() -> None:
    clock = Clock()
    recent = Recent(clock)
    recent.handed_over("p1", "d1")
    clock.now_s += WINDOW_S
    assert recent.pairs() == {("p1", "d1"): 1}
    clock.now_s += 1
    assert recent.pairs() == {}
    assert recent.counts().handoffs == 0


def test_the_window_grows_from_the_start_to_its_full_length() -> None:
    clock = Clock()
    recent = Recent(clock)
    assert recent.window_s() == 1.0
    clock.now_s += 4
    assert recent.window_s() == 4.0
    clock.now_s += 400
    assert recent.window_s() == WINDOW_S


def test_hours_of_traffic_keep_no_more_than_the_window() -> None:
    clock = Clock()
    recent = Recent(clock)
    for _ in range(3600):
        recent.handed_over("p1", "d1")
        clock.now_s += 1
    assert len(recent._slots) == WINDOW_S + 1
    assert recent.pairs() == {("p1", "d1"): WINDOW_S}


def test_pairs_of_one_second_are_bounded_and_the_count_stays_right() -> None:
    clock = Clock()
    recent = Recent(clock)
    for number in range(30_000):
        recent.handed_over(f"p{number}", "d1")
    clock.now_s += 1
    assert len(recent.pairs()) == 20_000
    assert recent.counts().handoffs == 30_000
