"""The C library's search finds what Python's own does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc import find
from extproc.find import holds

_few = st.sampled_from(b"ab\0\xff")
_texts = st.lists(_few, max_size=60).map(bytes)


@given(_texts, _texts, st.integers(0, 2))
def test_both_searches_agree_on_long_and_short_texts(text: bytes, wanted: bytes, times: int) -> None:
    long = text + b"x" * (8192 * times) + text
    assert holds(long, wanted) is (wanted in long)


def test_what_stands_at_either_end_is_found_and_what_would_go_beyond_it_is_not() -> None:
    text = b'"data' + b"x" * 20_000 + b'"data'
    assert holds(text, b'"data')
    assert holds(text[1:], b'"data') and holds(text[:-1], b'"data')
    assert not holds(text[1:-1], b'"data')


def test_without_the_c_library_python_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find, "_memmem", None)
    assert holds(b"x" * 10_000 + b"y", b"y") and not holds(b"x" * 10_000, b"y")
