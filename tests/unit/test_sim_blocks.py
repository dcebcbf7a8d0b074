"""Block hashes, the block pool with its prefix cache, and what blocks hold."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from workers.sim import hashing, text
from workers.sim.blocks import UNREADABLE, BlockPool, CacheEvent, Cleared, Kv, Removed, Stored


def stored(*hashes: bytes) -> Stored:
    return Stored(hashes, None, (), "", tuple(None for _ in hashes))


def test_block_hashes_are_those_of_vllm() -> None:
    root = hashing.root_hash()
    first = hashing.block_hash(root, [1, 2, 3, 4])
    second = hashing.block_hash(first, [5, 6, 7, 8])
    salted = hashing.block_hash(root, [1, 2, 3, 4], hashing.extra_keys(0, cache_salt="pepper"))
    adapted = hashing.block_hash(
        root, [1, 2, 3, 4], hashing.extra_keys(0, adapter="ada", adapter_path="/ada", cache_salt="pepper")
    )
    # Printed by vLLM 0.32 (sha256) for the same input.
    assert [hashing.wire_hash(h) for h in (root, first, second, salted, adapted)] == [
        1178507917319934360,
        1882140585328457242,
        15284023028817948126,
        17940538531300155498,
        11323389197964751659,
    ]
    assert root.hex() == "066b1e8987e027138e98701c46128929378935f9b6cd1549105ae6b4f0d71198"


def test_the_salt_is_in_the_first_block_only_and_the_adapter_in_all() -> None:
    assert hashing.extra_keys(0, cache_salt="s") == (("cache_salt", "s"),)
    assert hashing.extra_keys(1, cache_salt="s") is None
    assert hashing.extra_keys(1, adapter="a", adapter_path="p", cache_salt="s") == (("lora", "a", "p"),)


def test_block_zero_is_never_handed_out() -> None:
    pool = BlockPool(4, 16)
    taken = pool.take(3)
    assert taken == [1, 2, 3] and pool.take(1) is None
    assert pool.usage == 1.0
    pool.drop(taken)
    assert pool.usage == 0.0


def test_cached_blocks_are_evicted_last_used_last_and_the_end_of_a_prompt_first() -> None:
    events: list[CacheEvent] = []
    pool = BlockPool(7, 16, on_event=events.append)
    old, new = pool.take(2), pool.take(2)
    assert old is not None and new is not None
    pool.register(old, stored(b"o0", b"o1"))
    pool.register(new, stored(b"n0", b"n1"))
    pool.drop(old)
    pool.drop(new)
    assert pool.take(2) == [5, 6], "blocks that hold nothing go first"
    assert pool.take(1) == [old[1]] and pool.match([b"o0", b"o1"]) == [old[0]]
    pool.hold(pool.match([b"n0"]))
    assert pool.take(2) == [old[0], new[1]], "what is in use stays"
    removed = [event.hashes for event in events if isinstance(event, Removed)]
    assert removed == [(b"o1",), (b"o0",), (b"n1",)]


def test_a_block_without_a_hash_is_reused_at_once() -> None:
    pool = BlockPool(6, 16)
    blocks = pool.take(2)
    assert blocks is not None
    pool.drop(blocks)
    assert pool.take(1) == [blocks[0]]


def test_equal_content_is_cached_in_as_many_blocks_as_hold_it() -> None:
    events: list[CacheEvent] = []
    pool = BlockPool(4, 16, on_event=events.append)
    first, second = pool.take(1), pool.take(1)
    assert first is not None and second is not None
    pool.register(first, stored(b"h"))
    pool.register(second, stored(b"h"))
    assert len(events) == 2 and pool.match([b"h"]) == first and pool.is_hashed(second[0])
    pool.drop(first)
    assert pool.take(2) is not None
    assert events[2:] == [Removed((b"h",))] and pool.match([b"h"]) == second and pool.cached() == {b"h": 1}


def test_the_cache_is_cleared_only_when_nothing_is_in_use() -> None:
    events: list[CacheEvent] = []
    pool = BlockPool(4, 16, on_event=events.append)
    blocks = pool.take(1)
    assert blocks is not None
    pool.register(blocks, stored(b"h"))
    assert not pool.clear_cache()
    pool.drop(blocks)
    assert pool.clear_cache() and isinstance(events[-1], Cleared) and pool.match([b"h"]) == []


def write(pool: BlockPool, blocks: list[int], ids: list[int]) -> None:
    state, size = text.start_state(), pool.block_size
    for index, block in enumerate(blocks):
        part = text.token_bytes(ids[index * size : (index + 1) * size])
        pool.kv[block] = Kv(state.digest(), part)
        state.update(part)


@given(st.lists(st.integers(0, 1 << 28), min_size=1, max_size=40), st.integers(1, 9))
def test_blocks_that_hold_the_prompt_have_its_state_at_any_block_size(ids: list[int], size: int) -> None:
    pool = BlockPool(64, size)
    blocks = pool.take(-(-len(ids) // size))
    assert blocks is not None
    write(pool, blocks, ids)
    assert pool.state(blocks, len(ids)) == text.prompt_state(ids)


def test_any_wrong_block_changes_the_state() -> None:
    ids = list(range(100, 116))
    pool = BlockPool(16, 4)
    blocks, foreign = pool.take(4), pool.take(4)
    assert blocks is not None and foreign is not None
    write(pool, blocks, ids)
    write(pool, foreign, [7] * 8 + ids[8:])
    right = text.prompt_state(ids)
    assert pool.state(blocks, 16) == right
    for index in range(4):
        wrong = list(blocks)
        wrong[index] = foreign[index]
        # Blocks 2 and 3 hold the same tokens, computed after others.
        assert pool.state(wrong, 16) != right
    assert pool.state([blocks[1], blocks[0], *blocks[2:]], 16) != right
    assert pool.state(blocks[:3], 16) != right
    pool.kv[blocks[3]] = UNREADABLE
    assert pool.state(blocks, 16) != right
