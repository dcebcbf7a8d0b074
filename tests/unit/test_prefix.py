"""The chain of a prompt, and the index of who holds which prefix, against a naive model of the same rules."""

from __future__ import annotations

import gc
import random
import tracemalloc
from array import array
from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.routing import prefix
from extproc.routing.prefix import Chain, PrefixIndex, chain_of


def chain(text: str) -> Chain:
    """One block a letter, so that equal beginnings of texts are shared blocks."""
    return chain_of(text.encode(), b"model", 1, 64)


def test_a_prompt_that_goes_on_keeps_its_chain() -> None:
    first, longer = chain_of(b"abcdefgh", b"m", 4, 1), chain_of(b"abcdefghijkl", b"m", 4, 1)
    assert longer.hashes[: len(first.hashes)] == first.hashes
    assert len(longer.hashes) == 3


def test_only_full_blocks_count() -> None:
    assert chain_of(b"abcdefg", b"m", 4, 1).hashes == chain_of(b"abcd", b"m", 4, 1).hashes
    assert not chain_of(b"abc", b"m", 4, 1).hashes
    assert not chain_of(b"", b"m", 4, 1).hashes


def test_a_block_counts_with_everything_before_it() -> None:
    one, other = chain_of(b"aaaabbbbcccc", b"m", 4, 1).hashes, chain_of(b"aaaaxxxxcccc", b"m", 4, 1).hashes
    assert one[0] == other[0]
    assert one[1] != other[1]
    assert one[2] != other[2], "the third block is the same text after another second one"
    assert len(set(chain_of(b"aaaaaaaa", b"m", 4, 1).hashes)) == 2, "the same text further on is another block"


def test_another_seed_shares_nothing() -> None:
    assert not set(chain_of(b"a" * 64, b"model 1", 4, 1).hashes) & set(chain_of(b"a" * 64, b"model 2", 4, 1).hashes)


def test_the_hash_does_not_change_between_versions() -> None:
    """Replicas of different versions may come to compare chains."""
    assert list(chain_of(b"abcdefgh", b"model", 4, 1).hashes) == [0x1E5FA9BA3D0CD0D6, 0xCB4CA73CC88420CC]


def test_a_block_of_no_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="block_bytes"):
        chain_of(b"a", b"", 0, 1)


def test_everyone_who_holds_the_beginning_is_found_with_the_length_it_holds() -> None:
    index = PrefixIndex(100)
    index.insert("a", chain("hello world"))
    index.insert("b", chain("hello"))
    index.insert("c", chain("howdy"))
    index.insert("d", chain("other"))
    assert index.lookup(chain("hello there")) == {"a": 6, "b": 5, "c": 1}
    assert index.matched(chain("hello there"), "a") == 6
    assert index.matched(chain("hello there"), "d") == 0
    assert index.matched(chain("hello there"), "nobody") == 0
    assert index.lookup(chain("")) == {}


def test_only_the_part_that_is_said_to_be_held_is_held() -> None:
    index = PrefixIndex(100)
    index.insert("a", chain("hello"), 2)
    index.insert("a", chain("other"), 0)
    index.insert("a", chain("third"), -1)
    assert index.lookup(chain("hello")) == {"a": 2}
    assert index.blocks == 2


def test_the_tail_of_a_prompt_goes_before_its_head() -> None:
    index = PrefixIndex(100)
    index.set_capacity("a", 6)
    index.insert("a", chain("1234"))
    index.insert("a", chain("xyz"))
    assert index.lookup(chain("1234")) == {"a": 3}
    assert index.lookup(chain("xyz")) == {"a": 3}
    assert index.evictions == 1


def test_what_is_used_again_stays_and_the_other_goes() -> None:
    index = PrefixIndex(100)
    index.set_capacity("a", 4)
    index.insert("a", chain("12"))
    index.insert("a", chain("xy"))
    index.insert("a", chain("12"))
    index.insert("a", chain("no"))
    assert index.lookup(chain("12")) == {"a": 2}
    assert index.lookup(chain("xy")) == {}


def test_of_a_prompt_larger_than_the_cache_the_head_is_held() -> None:
    index = PrefixIndex(100)
    index.set_capacity("a", 3)
    index.insert("a", chain("12345"))
    assert index.lookup(chain("12345")) == {"a": 3}


def test_a_smaller_capacity_takes_effect_at_once() -> None:
    index = PrefixIndex(100)
    index.insert("a", chain("12345"))
    index.set_capacity("a", 2)
    assert index.lookup(chain("12345")) == {"a": 2}
    assert (index.blocks, index.held("a"), index.evictions) == (2, 2, 3)


def test_at_the_total_limit_the_fullest_endpoint_gives_way() -> None:
    index = PrefixIndex(6)
    index.insert("full", chain("12345"))
    index.insert("small", chain("xyz"))
    assert index.lookup(chain("xyz")) == {"small": 3}
    assert index.lookup(chain("12345")) == {"full": 3}
    assert index.blocks == 6


def test_a_prompt_larger_than_the_total_limit_does_not_exceed_it() -> None:
    index = PrefixIndex(3)
    index.insert("b", chain("x"))
    index.insert("a", chain("123456789"))
    assert index.blocks == 3
    assert index.lookup(chain("123456789"))["a"] >= 2


@pytest.mark.parametrize("prompt_blocks", [1, 2, 8, 64, 2000])
def test_a_block_takes_no_more_memory_than_it_is_counted_for(prompt_blocks: int) -> None:
    draw, index = random.Random(1), PrefixIndex(1_000_000)
    prompts = [array("Q", draw.randbytes(8 * prompt_blocks)) for _ in range(40_000 // prompt_blocks)]
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for number, hashes in enumerate(prompts):
        index.insert(f"10.0.0.{number % 64}:8000", Chain(array("Q", hashes), 64.0))
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert taken <= index.blocks * prefix._BLOCK_BYTES + index._runs * prefix._RUN_BYTES


def test_prompts_of_one_block_cannot_take_more_memory_than_the_limit_of_blocks_allows(monkeypatch) -> None:
    monkeypatch.setattr(prefix, "_LEAST_BYTES", 0)
    index = PrefixIndex(1000)
    for number in range(3000):
        index.insert("ab"[number % 2], Chain(array("Q", [number]), 64.0))
    most = 1000 * 250 // (prefix._BLOCK_BYTES + prefix._RUN_BYTES)
    assert index.blocks == most
    assert [index.matched(Chain(array("Q", [number]), 64.0), "ab"[number % 2]) for number in (2999, 2998, 0)] == [1, 1, 0]
    long = PrefixIndex(1000)
    long.insert("a", Chain(array("Q", range(1000)), 64.0))
    assert long.blocks == 1000


def test_an_endpoint_that_was_started_again_holds_nothing_and_the_others_keep_theirs() -> None:
    index = PrefixIndex(100)
    index.insert("a", chain("hello"))
    index.insert("b", chain("hello"))
    index.clear("a")
    assert index.lookup(chain("hello")) == {"b": 5}
    assert index.evictions == 0
    index.clear("nobody")


def test_the_slot_of_an_endpoint_that_went_is_given_again_without_its_blocks() -> None:
    index = PrefixIndex(100)
    assert (index.slot("a"), index.slot("b"), index.slot("a")) == (0, 1, 0)
    index.insert("a", chain("hello"))
    index.drop("a")
    index.drop("nobody")
    assert index.slot("c") == 0
    assert index.lookup(chain("hello")) == {}
    assert index.blocks == 0


def test_what_the_engine_did_not_hold_is_forgotten_for_that_endpoint_only() -> None:
    index = PrefixIndex(100)
    index.insert("a", chain("hello"))
    index.insert("a", chain("help!"))
    index.insert("b", chain("hello"))
    index.correct("a", chain("hello"), 2)
    assert index.lookup(chain("hello")) == {"a": 2, "b": 5}
    assert index.lookup(chain("help!")) == {"a": 2, "b": 3}, "nothing after a gap counts"
    index.correct("a", chain("hello"), 100)
    index.correct("nobody", chain("hello"), 0)
    assert index.matched(chain("hello"), "a") == 2


def test_thousands_of_holders_are_all_found() -> None:
    index = PrefixIndex(100_000)
    for number in range(3000):
        index.insert(f"e{number}", chain("ab") if number % 2 else chain("abc"))
    found = index.lookup(chain("abc"))
    assert len(found) == 3000
    assert found["e0"] == 3
    assert found["e2999"] == 2


def test_of_many_holders_those_that_hold_most_are_found() -> None:
    index, text = PrefixIndex(100_000), "abcdefghijklmnopqrstuvwxyz0123456789"
    for number in range(500):
        index.insert(f"e{number}", chain(text[:20]))
    for number, blocks in ((7, 36), (300, 34), (499, 28)):
        index.insert(f"e{number}", chain(text[:blocks]))
    assert list(index.lookup(chain(text), 3).items()) == [("e7", 36), ("e300", 34), ("e499", 28)]
    some = index.lookup(chain(text), 10)
    assert list(some.items())[:3] == [("e7", 36), ("e300", 34), ("e499", 28)]
    assert len(some) == 10 and set(list(some.values())[3:]) == {20}
    assert len(index.lookup(chain(text))) == 500


def test_the_blocks_used_last_are_told_from_the_head_of_the_last_prompt_on() -> None:
    index = PrefixIndex(100)
    index.insert("a", chain("abcd"))
    index.insert("a", chain("abxy"))
    index.insert("b", chain("other"))
    expected = [*chain("abxy").hashes, *chain("abcd").hashes[2:]]
    assert list(index.recent("a", 100)) == expected
    assert list(index.recent("a", 3)) == expected[:3]
    assert not index.recent("nobody", 3)
    assert index.addresses() == ["a", "b"]


@given(
    st.integers(1, 12),
    st.lists(st.tuples(st.sampled_from("pqr"), st.lists(st.integers(0, 5), max_size=20), st.integers(0, 9))),
)
def test_hashes_that_collide_place_a_prompt_badly_and_break_nothing(limit, steps) -> None:
    """Who forges a collision makes a chain in which a hash stands twice, or behind other ones than before."""
    index = PrefixIndex(limit)
    for address, hashes, number in steps:
        one = Chain(array("Q", hashes), 64)
        if number == 0:
            index.correct(address, one, len(hashes) // 2)
        elif number == 1:
            index.set_capacity(address, 1 + len(hashes))
        else:
            index.insert(address, one)
        held = [index.held(each) for each in "pqr"]
        assert index.blocks == sum(held) <= limit and min(held) >= 0
        assert all(0 < length <= len(hashes) for length in index.lookup(one).values())
        assert len(index.recent(address, 100)) == index.held(address)
    for each in "pqr":
        index.drop(each)
    assert index.blocks == 0
    assert all(not index.lookup(Chain(array("Q", [first]), 64)) for first in range(6))


def test_masks_that_collisions_leave_behind_do_not_pile_up() -> None:
    index = PrefixIndex(20)
    for number in range(1, 2_000):
        # The same block stands first in one prompt and third in the next.
        index.insert("a", Chain(array("Q", [number, number + 1, number + 2]), 64))
    assert len(index._masks) <= 40


@pytest.mark.parametrize("make", [lambda: PrefixIndex(0), lambda: PrefixIndex(1).set_capacity("a", 0)])
def test_a_limit_below_one_is_refused(make) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        make()


class Model:
    """The same rules, the slow way."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.blocks: dict[str, OrderedDict[int, None]] = {}
        self.capacity: dict[str, int] = {}

    def insert(self, address: str, chain: Chain, blocks: int | None) -> None:
        own = self.blocks.setdefault(address, OrderedDict())
        room = min(self.limit, self.capacity.get(address, self.limit))
        for block in reversed(chain.hashes[: room if blocks is None else max(0, min(blocks, room))]):
            own[block] = None
            own.move_to_end(block)
        self.trim(address)
        while (excess := sum(map(len, self.blocks.values())) - self.limit) > 0:
            fullest = max(self.blocks.values(), key=len)
            for _ in range(min(excess, len(fullest))):
                fullest.popitem(last=False)

    def trim(self, address: str) -> None:
        own = self.blocks.setdefault(address, OrderedDict())
        while len(own) > self.capacity.get(address, len(own)):
            own.popitem(last=False)

    def set_capacity(self, address: str, blocks: int) -> None:
        self.capacity[address] = blocks
        self.trim(address)

    def clear(self, address: str) -> None:
        if address in self.blocks:
            self.blocks[address].clear()

    def drop(self, address: str) -> None:
        self.blocks.pop(address, None)
        self.capacity.pop(address, None)

    def correct(self, address: str, chain: Chain, held: int) -> None:
        for block in chain.hashes[held:]:
            self.blocks.get(address, OrderedDict()).pop(block, None)

    def lookup(self, chain: Chain) -> dict[str, int]:
        lengths = {address: self.matched(chain, address) for address in self.blocks}
        return {address: length for address, length in lengths.items() if length}

    def matched(self, chain: Chain, address: str) -> int:
        own = self.blocks.get(address, {})
        return next((n for n, block in enumerate(chain.hashes) if block not in own), len(chain.hashes))


_address = st.sampled_from("pqr")
_text = st.text("ab", max_size=6)
_step = st.one_of(
    st.tuples(st.just("insert"), _address, _text, st.none() | st.integers(0, 6)),
    st.tuples(st.just("correct"), _address, _text, st.integers(0, 6)),
    st.tuples(st.just("set_capacity"), _address, st.integers(1, 8)),
    st.tuples(st.just("clear"), _address),
    st.tuples(st.just("drop"), _address),
)


@given(st.integers(1, 15), st.lists(_step, max_size=40))
def test_the_index_says_what_the_naive_model_says(limit, steps) -> None:
    index, model = PrefixIndex(limit), Model(limit)
    for name, address, *rest in steps:
        arguments = [chain(value) if isinstance(value, str) else value for value in rest]
        getattr(index, name)(address, *arguments)
        getattr(model, name)(address, *arguments)
        assert index.blocks == sum(map(len, model.blocks.values())) <= limit
        assert index._runs == sum(len(index.runs(each)) for each in index.addresses())
        for text in ("aaaaaa", "ababab", "bbaabb", *(value for value in rest if isinstance(value, str))):
            assert index.lookup(chain(text)) == model.lookup(chain(text))
            for each in "pqr":
                assert index.matched(chain(text), each) == model.matched(chain(text), each)
    for each in "pqr":
        index.drop(each)
    assert (index.blocks, index._runs) == (0, 0)
    assert not index.lookup(chain("a"))


def test_a_chain_made_by_hand_works_too() -> None:
    """The replay makes chains of hashes that a trace brings."""
    index = PrefixIndex(10)
    index.insert("a", Chain(array("Q", [2**64 - 1, 0]), 512))
    assert index.lookup(Chain(array("Q", [2**64 - 1, 0, 5]), 512)) == {"a": 2}
