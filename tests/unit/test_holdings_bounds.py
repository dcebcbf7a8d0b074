"""No worker takes more of the index, or of the time of every prompt, than its share, whatever it says."""

from __future__ import annotations

import random
from array import array

import pytest

from extproc.routing.holdings import BLOCK_BYTES, Held, Holdings, Tier
from extproc.routing.stored_blocks import PIECE_BLOCKS
from extproc.routing.token_chain import TokenChain

BLOCK = 16
CAP = 4_000


def _flood(
    holdings: Holdings, address: str, blocks: int, *, seed: int, rank: int = 0, group: int = 0, size: int = BLOCK
) -> None:
    draw = random.Random(seed)
    for _ in range(blocks // 50):
        names = [draw.getrandbits(60) for _ in range(50)]
        tokens = [draw.randrange(150_000) for _ in range(50 * size)]
        holdings.source(address, rank).stored(names, None, tokens, size, group=group, kind="full_attention")


def _held(holdings: Holdings, address: str) -> int:
    return sum(source.blocks(Tier.GPU) for source in holdings.sources(address))


@pytest.mark.parametrize(("ranks", "groups"), [(1, 1), (64, 1), (1, 12), (16, 4)])
def test_a_worker_with_many_ranks_and_groups_leaves_the_others_what_one_engine_would(ranks: int, groups: int) -> None:
    holdings = Holdings(CAP)
    for worker in range(5):
        _flood(holdings, f"w{worker}", 500, seed=worker)
    for rank in range(ranks):
        for group in range(groups):
            _flood(holdings, "bad", 8_000 // (ranks * groups), seed=100 + rank * groups + group, rank=rank, group=group)
    assert holdings.bytes <= holdings.max_bytes
    assert [_held(holdings, f"w{worker}") for worker in range(5)] == [500] * 5, "they have less than their sixth"
    assert _held(holdings, "bad") <= CAP - 2_500


def test_what_a_worker_dropped_a_moment_ago_goes_before_what_others_hold() -> None:
    holdings = Holdings(CAP)
    _flood(holdings, "w", 1_900, seed=1)
    for turn in range(4):
        _flood(holdings, "bad", 1_900, seed=10 + turn)
        holdings.source("bad").lost()
    assert _held(holdings, "w") >= 1_600, "it may lose a few before what is gone is found"


@pytest.mark.parametrize(("size", "follows"), [(1, False), (4, False), (7, False), (8, True), (16, True), (528, True)])
def test_blocks_so_small_that_every_prompt_would_pay_for_them_are_not_followed(size: int, follows: bool) -> None:
    holdings = Holdings(CAP)
    source = holdings.source("a")
    source.cleared()
    source.stored([1], None, list(range(size)), size)
    assert (holdings.block_sizes() == (size,)) is follows
    assert holdings.in_step("a") is follows, "what is not followed is predicted"
    assert holdings.seen.other_groups == (not follows)


def test_no_worker_makes_prompts_pay_for_many_block_sizes() -> None:
    holdings = Holdings(CAP)
    for group, size in enumerate(range(8, 24)):
        holdings.source("bad").stored([group + 1], None, list(range(size)), size, group=group, kind="full_attention")
    assert sum(1 / size for size in holdings.block_sizes()) <= 1 / 8
    holdings.source("good").stored([9], None, list(range(16)), 16)
    assert holdings.lookup(TokenChain(array("I", range(16))))["good"] == Held(16)
    for number in range(20):
        holdings.source(f"bad{number}").stored([1], None, list(range(9 + number)), 9 + number)
    assert sum(1 / size for size in holdings.block_sizes()) <= 1 / 4
    for address in holdings.addresses():
        if address != "good":
            holdings.drop(address)
    assert holdings.block_sizes() == (16,), "who goes takes its sizes along"


def test_names_of_adapters_are_not_kept_however_long_and_many_they_are() -> None:
    holdings = Holdings(CAP)
    tokens = list(range(BLOCK))
    for number in range(3_000):
        holdings.source("a").stored([number], None, tokens, BLOCK, lora=f"{number}" * (1 if number % 2 else 200))
    kept = sum(len(name or "") for name in holdings._seeds)
    assert kept <= 1_000 * 256
    long = "x" * 100_000
    holdings.source("b").stored([1], None, tokens, BLOCK, lora=long)
    assert holdings.lookup(TokenChain(array("I", tokens), lora=long))["b"] == Held(BLOCK)


def test_groups_that_do_not_count_are_not_all_remembered() -> None:
    source = Holdings(CAP).source("a")
    for group in range(1, 1_000):
        source.stored([], None, [], BLOCK, group=group, kind="mamba")
    assert len(source._others) <= 64


def test_what_is_stored_twice_is_in_the_bytes_and_under_the_cap() -> None:
    holdings = Holdings(CAP)
    _flood(holdings, "a", 1_000, seed=3)
    once = holdings.bytes
    assert once == 1_000 * BLOCK_BYTES
    _flood(holdings, "a", 1_000, seed=3)
    assert holdings.bytes == once * 3 // 2
    source = holdings.source("a")
    draw = random.Random(3)
    for _ in range(20):
        source.removed([draw.getrandbits(60) for _ in range(50)])
        for _ in range(50 * BLOCK):
            draw.randrange(150_000)
    assert holdings.bytes == once and source.blocks(Tier.GPU) == 1_000
    _flood(holdings, "a", 1_000, seed=3)
    source.lost()
    while holdings.untidy:
        holdings.tidy()
    assert holdings.bytes == 0
    for _ in range(3):
        _flood(holdings, "b", 3_000, seed=4)
        assert holdings.bytes <= holdings.max_bytes + PIECE_BLOCKS * BLOCK_BYTES // 2
