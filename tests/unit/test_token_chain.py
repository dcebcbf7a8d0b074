"""A prompt's own block keys: equal exactly where the engine would share KV blocks."""

from __future__ import annotations

import random
from array import array

import pytest

from extproc.routing.token_chain import KEY_MASK, Placed, TokenChain, extra_bytes, keys_after, seed_of


def _ids(count: int, seed: int = 0) -> array[int]:
    draw = random.Random(seed)
    return array("I", [draw.randrange(150_000) for _ in range(count)])


def _shared(one: TokenChain, other: TokenChain, block_tokens: int = 16) -> int:
    """Leading blocks with equal keys; none further on may be equal."""
    ours, theirs = one.keys(block_tokens), other.keys(block_tokens)
    same = [left == right for left, right in zip(ours, theirs, strict=False)]
    leading = same.index(False) if False in same else len(same)
    assert not any(same[leading:])
    return leading


def test_a_key_names_a_block_and_all_before_it() -> None:
    ids = _ids(160)
    changed = array("I", ids)
    changed[70] += 1
    assert _shared(TokenChain(ids), TokenChain(changed)) == 4


def test_a_block_that_is_not_full_has_no_key() -> None:
    assert len(TokenChain(_ids(47)).keys(16)) == 2
    assert len(TokenChain(_ids(15)).keys(16)) == 0
    assert len(TokenChain(array("I")).keys(16)) == 0


def test_a_longer_prompt_begins_with_the_keys_of_the_shorter() -> None:
    ids = _ids(160)
    assert _shared(TokenChain(ids), TokenChain(array("I", ids[:96]))) == 6


def test_block_sizes_have_keys_of_their_own() -> None:
    chain = TokenChain(_ids(256))
    assert len(chain.keys(16)) == 16
    assert len(chain.keys(128)) == 2
    assert not set(chain.keys(16)) & set(chain.keys(128))
    assert chain.keys(16) is chain.keys(16), "made once"


def test_another_adapter_or_salt_shares_nothing() -> None:
    ids = _ids(64)
    chains = [
        TokenChain(ids),
        TokenChain(ids, lora="a"),
        TokenChain(ids, lora="b"),
        TokenChain(ids, cache_salt="a"),
        TokenChain(ids, lora="a", cache_salt="a"),
    ]
    for number, one in enumerate(chains):
        for other in chains[number + 1 :]:
            assert _shared(one, other) == 0


def test_an_empty_adapter_or_salt_is_none() -> None:
    ids = _ids(64)
    assert _shared(TokenChain(ids), TokenChain(ids, lora="", cache_salt="")) == 4


def test_an_image_counts_from_its_first_block_on_with_its_place() -> None:
    ids = _ids(96)

    def chain(*items: Placed) -> TokenChain:
        return TokenChain(ids, items=items)

    cat, dog, later = Placed("cat", 40, 20), Placed("dog", 40, 20), Placed("cat", 41, 20)
    assert _shared(chain(cat), chain(cat)) == 6
    assert _shared(chain(cat), chain(dog)) == 2
    assert _shared(chain(cat), chain(later)) == 2
    assert _shared(chain(), chain(cat)) == 2


def test_an_image_past_the_last_full_block_does_not_count() -> None:
    ids = _ids(40)
    assert _shared(TokenChain(ids), TokenChain(ids, items=(Placed("cat", 33, 5),))) == 2


def test_items_lie_in_blocks_as_in_the_engine() -> None:
    """Offsets are relative to the block; one that began before has a negative one."""
    ids = _ids(48)
    items = (Placed("a", 10, 10), Placed("b", 24, 30))
    expected = keys_after(
        seed_of(None),
        ids.tobytes(),
        16,
        [extra_bytes([("a", 10)], salts=["s"]), extra_bytes([("a", -6), ("b", 8)]), extra_bytes([("b", -8)])],
    )
    assert TokenChain(ids, cache_salt="s", items=items).keys(16) == expected


def test_keys_can_be_made_block_by_block() -> None:
    """As they come in events: each batch after the last block of the one before."""
    ids = _ids(160)
    whole = TokenChain(ids, lora="x").keys(16)
    first = keys_after(seed_of("x"), ids[:64].tobytes(), 16)
    rest = keys_after(first[-1], memoryview(ids[64:]).cast("B"), 16)
    assert first + rest == whole
    assert max(whole) <= KEY_MASK


def test_extras_cannot_be_taken_for_each_other() -> None:
    written = {
        extra_bytes([("a", 1)]),
        extra_bytes([("a", 2)]),
        extra_bytes(salts=["a"]),
        extra_bytes(digests=[b"a"]),
        extra_bytes(salts=["a", "b"]),
        extra_bytes(salts=["ab"]),
        extra_bytes([("a", 1), ("a", 1)]),
    }
    assert len(written) == 7
    assert extra_bytes() == b""


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="32-bit"):
        TokenChain(array("Q", [1]))
    with pytest.raises(ValueError, match="at least 1"):
        TokenChain(_ids(16)).keys(0)
