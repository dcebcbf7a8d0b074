"""What workers say that they hold, against what a cache that is kept beside really holds."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from typing import Any

import pytest

from extproc.routing.holdings import Held, Holdings, Tier
from extproc.routing.stored_blocks import PIECE_BLOCKS, Stored
from extproc.routing.token_chain import KEY_MASK, Placed, TokenChain

BLOCK = 16
CPU = Tier.CPU.number
DISK = Tier.DISK.number


def _ids(blocks: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(150_000) for _ in range(blocks * BLOCK)]


def _hash(ids: list[int], block: int, block_tokens: int = BLOCK, salt: object = None) -> int:
    """The engine's hash of one block, and all before it."""
    return random.Random(repr((ids[: (block + 1) * block_tokens], salt))).getrandbits(64)


def _hashes(ids: list[int], block_tokens: int = BLOCK, salt: object = None) -> list[int]:
    return [_hash(ids, block, block_tokens, salt) for block in range(len(ids) // block_tokens)]


def _chain(ids: list[int], **more: Any) -> TokenChain:
    return TokenChain(array("I", ids), **more)


def _store(holdings: Holdings, address: str, ids: list[int], **more: Any) -> list[int]:
    hashes = _hashes(ids)
    holdings.source(address).stored(hashes, None, ids, BLOCK, **more)
    return hashes


def test_what_was_stored_is_held_as_far_as_the_prompt_is_the_same() -> None:
    holdings = Holdings(1000)
    ids = _ids(8)
    _store(holdings, "a", ids)
    _store(holdings, "b", ids[: 3 * BLOCK])
    assert holdings.lookup(_chain(ids)) == {"a": Held(8 * BLOCK), "b": Held(3 * BLOCK)}
    assert holdings.lookup(_chain(ids[: 5 * BLOCK] + _ids(3, 1))) == {"a": Held(5 * BLOCK), "b": Held(3 * BLOCK)}
    assert holdings.lookup(_chain(_ids(8, 2))) == {}
    assert holdings.blocks == 8, "a block that two hold is kept once"


def test_blocks_come_one_by_one_behind_their_parents() -> None:
    holdings = Holdings(1000)
    ids = _ids(6)
    hashes = _store(holdings, "a", ids[: 2 * BLOCK])
    for block in range(2, 6):
        name = _hash(ids, block)
        holdings.source("a").stored([name], hashes[-1], ids[block * BLOCK : (block + 1) * BLOCK], BLOCK)
        hashes.append(name)
    assert holdings.lookup(_chain(ids)) == {"a": Held(6 * BLOCK)}


def test_blocks_behind_a_hole_do_not_count_and_come_back() -> None:
    holdings = Holdings(1000)
    ids = _ids(6)
    hashes = _store(holdings, "a", ids)
    holdings.source("a").removed([hashes[2]])
    assert holdings.lookup(_chain(ids)) == {"a": Held(2 * BLOCK)}
    holdings.source("a").stored([hashes[2]], hashes[1], ids[2 * BLOCK : 3 * BLOCK], BLOCK)
    assert holdings.lookup(_chain(ids)) == {"a": Held(6 * BLOCK)}
    holdings.source("a").removed([hashes[0]])
    assert holdings.lookup(_chain(ids)) == {}


def test_one_of_two_equal_blocks_may_go() -> None:
    """The engine may compute a block twice, and says that each is stored, and that each is removed."""
    holdings = Holdings(1000)
    ids = _ids(3)
    hashes = _store(holdings, "a", ids)
    _store(holdings, "a", ids)
    holdings.source("a").removed(hashes)
    assert holdings.lookup(_chain(ids)) == {"a": Held(3 * BLOCK)}
    holdings.source("a").removed(hashes)
    assert holdings.lookup(_chain(ids)) == {}
    assert holdings.blocks == 0


def test_a_removal_concerns_one_endpoint_tier_and_rank() -> None:
    holdings = Holdings(1000)
    ids = _ids(4)
    hashes = _store(holdings, "a", ids)
    _store(holdings, "b", ids)
    holdings.source("b", 1).stored(hashes[:3], None, ids[: 3 * BLOCK], BLOCK)
    _store(holdings, "a", ids, tier=CPU)
    holdings.source("a").removed(hashes)
    holdings.source("b").removed(hashes[1:])
    others = (Held(BLOCK),)
    assert holdings.lookup(_chain(ids)) == {"a": Held(0, 4 * BLOCK), "b": Held(3 * BLOCK, rank=1, others=others)}
    assert (holdings.ranks("a"), holdings.ranks("b"), holdings.ranks("c")) == ([0], [0, 1], [])


def test_slower_tiers_count_from_where_the_gpu_ends() -> None:
    holdings = Holdings(1000)
    ids = _ids(10)
    hashes = _store(holdings, "a", ids)
    source = holdings.source("a")
    # GPU 0-3 and 8-9, CPU 2-6, disk 5-8: the engine asks its GPU first, then what is behind that in any slower tier.
    source.removed(hashes[4:8])
    source.stored(hashes[2:7], hashes[1], ids[2 * BLOCK : 7 * BLOCK], BLOCK, tier=CPU)
    source.stored(hashes[5:9], hashes[4], ids[5 * BLOCK : 9 * BLOCK], BLOCK, tier=DISK)
    assert holdings.lookup(_chain(ids)) == {"a": Held(4 * BLOCK, 3 * BLOCK, 2 * BLOCK)}


def test_a_block_without_tokens_is_known_by_its_hash() -> None:
    """An offloading connector says no more than hashes."""
    holdings = Holdings(1000)
    ids = _ids(4)
    hashes = _store(holdings, "a", ids, extra_keys=[["salt"], None, None, None])
    source = holdings.source("a")
    source.stored(hashes, None, [], 0, tier=CPU)
    source.removed(hashes)
    assert holdings.lookup(_chain(ids, cache_salt="salt")) == {"a": Held(0, 4 * BLOCK)}
    assert holdings.lookup(_chain(ids)) == {}
    source.stored([1, 2], None, [], 0, tier=CPU)
    assert holdings.seen.orphans == 2


@pytest.mark.parametrize(
    ("event", "chain"),
    [
        ({"lora": "x", "extra_keys": [["x"], ["x"], ["x"]]}, {"lora": "x"}),
        ({"extra_keys": [["s"], None, None]}, {"cache_salt": "s"}),
        ({"lora": "x", "extra_keys": [["x", "x"], ["x"], ["x"]]}, {"lora": "x", "cache_salt": "x"}),
        ({"extra_keys": [[["cat", 4], "s"], [["cat", -12]], None]}, {"cache_salt": "s", "items": [Placed("cat", 4, 20)]}),
        ({}, {}),
    ],
)
def test_what_makes_equal_tokens_different_is_read_as_the_engine_publishes_it(
    event: dict[str, Any], chain: dict[str, Any]
) -> None:
    holdings = Holdings(1000)
    ids = _ids(3)
    _store(holdings, "a", ids, **event)
    assert holdings.lookup(_chain(ids, **chain)) == {"a": Held(3 * BLOCK)}
    assert holdings.lookup(_chain(ids, cache_salt="another")) == {}
    assert (holdings.lookup(_chain(ids)) == {}) is bool(chain)


@pytest.mark.parametrize("odd", [[b"digest"], [{"new": 1}], [None], [["cat"]], [["cat", "x"]], [3]])
def test_extras_that_no_prompt_of_ours_has_match_none(odd: list[Any]) -> None:
    holdings = Holdings(1000)
    ids = _ids(2)
    _store(holdings, "a", ids, extra_keys=[odd, None])
    assert holdings.lookup(_chain(ids)) == {}
    assert holdings.source("a").blocks(Tier.GPU) == 2


def test_hashes_may_be_whole_or_their_low_bits() -> None:
    holdings = Holdings(1000)
    ids = _ids(2)
    whole = [bytes(24) + name.to_bytes(8, "big") for name in _hashes(ids)]
    holdings.source("a").stored(whole, None, ids, BLOCK)
    holdings.source("a").removed([_hashes(ids)[1]])
    assert holdings.lookup(_chain(ids)) == {"a": Held(BLOCK)}


def test_block_sizes_differ_by_worker() -> None:
    holdings = Holdings(1000)
    ids = _ids(20)
    _store(holdings, "a", ids)
    holdings.source("b").stored(_hashes(ids, 128), None, ids[:256], 128)
    assert holdings.lookup(_chain(ids)) == {"a": Held(320), "b": Held(256)}
    assert sorted(holdings.block_sizes()) == [16, 128]
    assert (holdings.block_tokens("a"), holdings.block_tokens("b"), holdings.block_tokens("c")) == (16, 128, None)


def test_of_full_attention_groups_the_least_counts_and_others_do_not() -> None:
    holdings = Holdings(1000)
    ids = _ids(6)
    source = holdings.source("a")
    hashes = _store(holdings, "a", ids, group=0, kind="full_attention")
    source.stored(hashes[-1:], None, ids, BLOCK, group=2, kind="sliding_window")
    assert holdings.lookup(_chain(ids)) == {"a": Held(6 * BLOCK)}
    source.stored(hashes[:4], None, ids[: 4 * BLOCK], BLOCK, group=1, kind="mla_attention")
    assert holdings.lookup(_chain(ids)) == {"a": Held(4 * BLOCK)}
    source.removed(hashes[-1:], group=2)
    source.removed(hashes[:1], group=1)
    assert holdings.lookup(_chain(ids)) == {}
    assert holdings.seen.other_groups == 2
    # What an offloading connector says of such a group has no kind.
    source.stored(hashes[-1:], None, [], 0, group=2, tier=CPU)
    assert holdings.seen.other_groups == 3


def test_a_model_without_full_attention_is_never_in_step() -> None:
    holdings = Holdings(1000)
    source = holdings.source("a")
    source.cleared()
    assert holdings.in_step("a")
    source.stored([1], None, _ids(1), BLOCK, kind="mamba")
    assert not holdings.in_step("a")


def test_blocks_behind_an_unknown_one_are_nobodys() -> None:
    holdings = Holdings(1000)
    ids = _ids(4)
    hashes = _hashes(ids)
    source = holdings.source("a")
    source.stored(hashes[2:], hashes[1], ids[2 * BLOCK :], BLOCK)
    assert holdings.seen.orphans == 2
    source.stored(hashes, None, ids, BLOCK)
    assert holdings.lookup(_chain(ids)) == {"a": Held(4 * BLOCK)}
    source.removed([77])
    assert holdings.seen.unknown_removed == 1


@pytest.mark.parametrize("bad", [[-1] * BLOCK, [1 << 40] * BLOCK])
def test_tokens_that_are_none_are_refused(bad: list[int]) -> None:
    holdings = Holdings(1000)
    with pytest.raises(OverflowError):
        holdings.source("a").stored([5], None, bad, BLOCK)
    assert holdings.blocks == 0


def test_in_step_only_when_all_ranks_are_complete() -> None:
    holdings = Holdings(1000)
    assert not holdings.in_step("a")
    first, second = holdings.source("a"), holdings.source("a", 1)
    assert not holdings.in_step("a")
    first.cleared()
    assert not holdings.in_step("a")
    second.cleared()
    assert holdings.in_step("a")
    first.lost()
    assert not holdings.in_step("a")


def test_a_late_start_is_in_step_when_nearly_all_of_the_cache_is_known() -> None:
    holdings = Holdings(1000)
    holdings.set_capacity("a", 20 * BLOCK)
    _store(holdings, "a", _ids(18))
    assert not holdings.in_step("a")
    _store(holdings, "a", _ids(1, 5))
    assert holdings.in_step("a")


def test_a_suspect_holds_nothing_until_it_is_settled() -> None:
    holdings = Holdings(1000)
    ids = _ids(2)
    source = holdings.source("a")
    source.cleared()
    _store(holdings, "a", ids)
    source.suspect = True
    assert (holdings.lookup(_chain(ids)), holdings.in_step("a")) == ({}, False)
    source.suspect = False
    assert (holdings.lookup(_chain(ids)), holdings.in_step("a")) == ({"a": Held(2 * BLOCK)}, True)


def test_the_cap_lets_the_oldest_go_and_is_counted() -> None:
    holdings = Holdings(4096)
    first, last = _ids(1, 1), _ids(1, 9_999)
    for number in range(12_000):
        draw = random.Random(number)
        holdings.source(f"w{number % 5}").stored([draw.getrandbits(64)], None, [number] * BLOCK, BLOCK)
        if number == 0:
            _store(holdings, "w0", first)
    _store(holdings, "w0", last)
    assert 3_000 < holdings.blocks < 4_200, "a shard that is empty has nothing that could go"
    assert holdings.evictions > 7_000
    held = sum(holdings.source(f"w{each}").blocks(Tier.GPU) for each in range(5))
    assert held == holdings.blocks, "counts of holders follow what goes"
    assert holdings.lookup(_chain(first)) == {}
    assert holdings.lookup(_chain(last)) == {"w0": Held(BLOCK)}


def test_dropped_endpoints_leave_nothing_and_their_numbers_are_used_again() -> None:
    holdings = Holdings(100_000)
    ids = _ids(300)
    _store(holdings, "stays", ids[: 100 * BLOCK])
    for turn in range(3):
        _store(holdings, f"a{turn}", ids)
        holdings.drop(f"a{turn}")
        assert holdings.lookup(_chain(ids)) == {"stays": Held(100 * BLOCK)}
        _store(holdings, f"b{turn}", ids[:BLOCK])
        assert holdings.lookup(_chain(ids))[f"b{turn}"] == Held(BLOCK), "a new one does not inherit what the number held"
        while holdings.untidy:
            holdings.tidy()
        holdings.drop(f"b{turn}")
    while holdings.untidy:
        holdings.tidy()
    assert holdings.blocks == 100
    assert holdings.addresses() == ["stays"]
    holdings.drop("stays")
    while holdings.untidy:
        holdings.tidy()
    assert (holdings.blocks, holdings.block_sizes()) == (0, ())


def test_any_order_of_events_ends_at_what_the_caches_hold() -> None:
    """Random caches with prompts that share beginnings, against sets that are kept beside."""
    draw = random.Random(7)
    holdings = Holdings(10_000)
    prompts = [_ids(4, seed) + _ids(6, 100 * seed + tail) for seed in range(5) for tail in range(6)]
    chains = [_chain(ids) for ids in prompts]
    copies: dict[tuple[str, int, int], Counter[int]] = {}
    where = [(f"w{worker}", rank, tier) for worker in range(6) for rank in range(2) for tier in (0, CPU)]
    for step in range(6_000):
        address, rank, tier = place = draw.choice(where)
        cache = copies.setdefault(place, Counter())
        source = holdings.source(address, rank)
        if draw.random() < 0.45 or not cache:
            ids = draw.choice(prompts)
            hashes = _hashes(ids)
            end = draw.randrange(1, 11)
            source.stored(hashes[:end], None, ids[: end * BLOCK], BLOCK, tier=tier)
            cache.update(hashes[:end])
        elif draw.random() < 0.002:
            source.cleared()
            for other in (0, CPU):
                copies.pop((address, rank, other), None)
        else:
            for name in draw.sample(sorted(cache), min(len(cache), 12)):
                source.removed([name], tier=tier)
                cache -= Counter([name])
            copies[place] = cache
        if step % 97 == 0:
            holdings.tidy()
            for ids, chain in zip(prompts, chains, strict=True):
                assert holdings.lookup(chain) == _true(copies, ids)
    assert holdings.seen.unknown_removed == 0


@pytest.mark.parametrize("own_names", [False, True])
def test_what_is_counted_is_what_there_is(own_names: bool) -> None:
    """Whether engines call equal blocks the same or not, with tiers, repeats, emptied caches, and engines that come and go."""
    draw = random.Random(11)
    holdings = Holdings(10_000)
    prompts = [_ids(3, seed) + _ids(4, 100 * seed + tail) for seed in range(3) for tail in range(4)]
    for step in range(3_000):
        address = f"w{draw.randrange(5)}"
        source, ids = holdings.source(address), draw.choice(prompts)
        hashes = _hashes(ids, salt=address if own_names else None)
        end, tier = draw.randrange(1, 8), draw.choice((0, 0, CPU))
        what = draw.random()
        if what < 0.5:
            source.stored(hashes[:end], None, ids[: end * BLOCK], BLOCK, tier=tier)
        elif what < 0.55:
            source.stored(hashes[:end], None, [], 0, tier=CPU)
        elif what < 0.97:
            source.removed(hashes[end:], tier=tier)
        elif what < 0.98:
            for _ in source.emptying(everywhere=draw.random() < 0.3):
                pass
        else:
            holdings.drop(address)
        if step % 5 == 0 and holdings.untidy:
            holdings.tidy()
        if step % 50 == 0:
            for store in holdings._stores.values():
                keys = {key for masks in store.masks for shard in masks for key in shard}
                assert store.blocks == len(keys)
                named = [*(each.names for each in store._holders.values()), *store._left]
                assert store.names == sum(map(len, named))
                repeats = [tier for each in store._holders.values() for tier in each.repeats]
                assert store.repeated == sum(map(len, [*repeats, *store._left_repeats]))
                for tier in range(2):
                    for number in store._holders:
                        held = sum(bool(mask & 1 << number) for shard in store.masks[tier] for mask in shard.values())
                        assert store.counts[tier][number] == held
                assert store.totals == [sum(counts.values()) for counts in store.counts]
    for address in holdings.addresses():
        holdings.drop(address)
    while holdings.untidy:
        holdings.tidy()
    assert (holdings.blocks, holdings.bytes) == (0, 0)


def test_keys_of_one_table_differ_where_a_dict_looks_first() -> None:
    """A dict looks by the low bits of a key: if all keys of a table had these in common, it would look several times."""
    holdings = Holdings(10_000)
    _store(holdings, "a", _ids(4_000))
    shards = [shard for store in holdings._stores.values() for shard in store.masks[0] if len(shard) > 4]
    assert len(shards) > 200
    assert all(len({key & 255 for key in shard}) > len(shard) // 2 for shard in shards)


def test_memory_has_a_bound_where_engines_call_equal_blocks_differently() -> None:
    """Each name takes memory, so many names of few blocks are bounded like many blocks."""
    holdings = Holdings(1000)
    ids = _ids(400)
    for worker in range(20):
        holdings.source(f"w{worker}").stored(_names(400, worker), None, ids, BLOCK)
        assert holdings.bytes <= holdings.max_bytes
    assert holdings.evictions > 0
    held = sum(holdings.source(f"w{worker}").blocks(Tier.GPU) for worker in range(20))
    assert held + holdings.blocks <= 2 * 1000


def test_an_engine_that_says_no_tokens_is_understood_by_what_another_calls_the_block() -> None:
    holdings = Holdings(1000)
    ids = _ids(4)
    hashes = _store(holdings, "a", ids)
    holdings.source("b").stored(hashes[:1], None, ids[:BLOCK], BLOCK)
    holdings.source("b").stored(hashes, None, [], 0, tier=CPU)
    assert holdings.lookup(_chain(ids))["b"] == Held(BLOCK, 3 * BLOCK)


def test_a_long_event_is_entered_in_pieces_and_an_engine_may_be_forgotten_between_them() -> None:
    holdings = Holdings(10_000)
    ids = _ids(900)
    hashes = _names(900)
    source = holdings.source("a")
    event = Stored(hashes, None, ids, BLOCK, None, None, 0, None)
    pieces = source.entering((event,), 0)
    assert next(pieces) == 900, "all of them are told at once"
    assert holdings.lookup(_chain(ids)) == {"a": Held(PIECE_BLOCKS * BLOCK)}
    source.lost()
    list(pieces)
    assert holdings.lookup(_chain(ids)) == {}, "what came before is gone, so the rest belongs to nothing"
    assert source.blocks(Tier.GPU) == 0
    assert holdings.seen.orphans == 900 - PIECE_BLOCKS
    odd = Stored(hashes, None, ids, BLOCK, None, [["salt"], *[None] * 899], 0, None)
    assert sum(1 for _ in source.entering((odd,), 0)) == 4
    assert holdings.lookup(_chain(ids, cache_salt="salt")) == {"a": Held(900 * BLOCK)}


def _names(count: int, seed: int = 5) -> list[int]:
    draw = random.Random(seed)
    return [draw.getrandbits(64) for _ in range(count)]


def _true(copies: dict[tuple[str, int, int], Counter[int]], ids: list[int]) -> dict[str, Held]:
    """As the engine looks: the GPU from the start, then the CPU from there on."""
    found: dict[str, Held] = {}
    hashes = _hashes(ids)
    for address, rank in sorted({place[:2] for place in copies}):
        gpu = next((at for at, name in enumerate(hashes) if not copies.get((address, rank, 0), {}).get(name)), len(hashes))
        end = next((at for at in range(gpu, 10) if not copies.get((address, rank, CPU), {}).get(hashes[at])), len(hashes))
        held = Held(gpu * BLOCK, (end - gpu) * BLOCK, rank=rank)
        best = found.get(address)
        if not held.tokens:
            continue
        if best is not None:  # of two ranks
            best, held = (best, held) if (best.tokens, best.gpu) >= (held.tokens, held.gpu) else (held, best)
            held = best._replace(others=(held,))
        found[address] = held
    return found


def test_hashes_fit_into_what_is_kept_of_them() -> None:
    assert KEY_MASK < 1 << 60
