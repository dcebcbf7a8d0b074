"""A chain is the same whether its pieces are known or not, whatever was hashed before."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.chains import KnownChains
from extproc.routing.prefix import chain_of

_texts = st.lists(st.tuples(st.binary(min_size=1, max_size=3), st.integers(1, 200)), max_size=4).map(
    lambda parts: b"".join(part * times for part, times in parts)
)


@given(st.lists(st.tuples(_texts, st.integers(0, 800), st.sampled_from([b"", b"m", b"model"]), st.integers(1, 9)), max_size=8))
def test_known_pieces_change_nothing(prompts: list[tuple[bytes, int, bytes, int]]) -> None:
    known = KnownChains(6)
    for text, cut, seed, block_bytes in prompts:
        for data in (text, text[:cut], text + text[:cut]):
            expected = chain_of(data, seed, block_bytes, 64.0)
            assert known.chain_of(data, seed, block_bytes, 64.0) == expected
            assert known.chain_of(memoryview(data), seed, block_bytes, 64.0) == expected
    assert len(known) <= 6


def test_a_seed_and_a_text_that_together_read_the_same_are_two_prompts() -> None:
    known, text = KnownChains(), b"x" * 1_000
    for seed, data in ((b"mxx", text), (b"m", b"xx" + text), (b"", b"mxx" + text)):
        assert known.chain_of(data, seed, 4, 1.0) == chain_of(data, seed, 4, 1.0)


def test_the_next_turn_finds_the_pieces_of_the_one_before() -> None:
    known = KnownChains()
    known.chain_of(b"a" * 64 * 4 * 5, b"m", 4, 1.0)
    assert len(known) == 5
    known.chain_of(b"a" * 64 * 4 * 5 + b"b" * 64 * 4, b"m", 4, 1.0)
    assert len(known) == 6, "only the new piece is new"


def test_a_block_of_no_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="block_bytes"):
        KnownChains().chain_of(b"a" * 1_000, b"", 0, 1.0)


def test_several_threads_may_use_it_at_once() -> None:
    known, faults = KnownChains(8), []

    def work(number: int) -> None:
        try:
            for turn in range(300):
                data = bytes((number, turn % 7)) * 2_000
                assert known.chain_of(data, b"m", 4, 1.0) == chain_of(data, b"m", 4, 1.0)
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults and len(known) <= 8 + len(threads)
