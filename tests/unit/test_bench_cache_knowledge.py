"""The bench of what it is worth to know the caches: it counts our requests alone, and each run is repeatable."""

from __future__ import annotations

import pytest

from bench.cache_knowledge import Question, answer, load
from extproc.replay_index import Index

_SMALL = Question(requests=80, cache_tokens=200_000, runs=1)


def test_who_hears_the_events_knows_as_much_as_who_looks_into_the_caches() -> None:
    requests = load(_SMALL)
    heard, seen = (answer(_SMALL, requests, index, 0) for index in (Index.EVENTS, Index.ORACLE))
    assert heard.requests == 80
    assert heard.hit_ratio == pytest.approx(seen.hit_ratio, abs=0.02)


def test_what_others_send_is_on_the_workers_and_not_in_the_figures() -> None:
    question = Question(requests=80, foreign=0.5, filters=2)
    found = answer(question, load(question), Index.PREDICTED, 3)
    assert 20 < found.requests < 60
    assert found == answer(question, load(question), Index.PREDICTED, 3), "the same run again"
