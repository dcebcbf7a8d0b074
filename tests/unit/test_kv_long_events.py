"""Batches and events that are long: what they say is the same as if they were short, and comes in pieces."""

from __future__ import annotations

import random
from array import array
from typing import Any

import msgspec
import pytest

from extproc.observe.kv_events.decode import Decoder
from extproc.observe.kv_events.entering import Counts, Entering
from extproc.observe.kv_events.events import BlockRemoved, BlockStored, Event, NotABatchError
from extproc.observe.kv_events.long_events import in_pieces
from extproc.routing.holdings import Held, Holdings, Tier
from extproc.routing.token_chain import TokenChain

BLOCK = 16
encode = msgspec.msgpack.encode


def stored(blocks: int, *, seed: int = 0, whole_hashes: bool = False, **more: Any) -> dict[str, Any]:
    draw = random.Random(seed)
    tokens = [draw.choice((5, 200, 40_000, 140_000)) + draw.randrange(50) for _ in range(blocks * BLOCK)]
    hashes: list[Any] = [draw.randbytes(32) if whole_hashes else draw.getrandbits(64) for _ in range(blocks)]
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": None,
        "token_ids": tokens,
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        **more,
    }


def pieces(events: list[Any]) -> list[tuple[int, list[Event]]]:
    decoder, payload = Decoder(), encode([1.0, events, 0])
    decoder.decode(encode([1.0, []]))  # the first is looked at more closely
    assert decoder.quickly(payload) is None
    return list(decoder.pieces(payload))


def fail() -> None:
    pytest.fail("it was not understood")


@pytest.mark.parametrize("form", [dict, list])
@pytest.mark.parametrize(
    "more",
    [{}, {"whole_hashes": True}, {"extra_keys": [["salt", ["image", 3]], *[None] * 8191]}, {"lora_name": "x", "seed": 4}],
)
def test_a_long_event_says_what_it_would_say_whole(form: type, more: dict[str, Any]) -> None:
    event = stored(8192, **more)
    told = event if form is dict else list(event.values())
    parts = pieces([told, {"type": "BlockRemoved", "block_hashes": event["block_hashes"][:3], "medium": "GPU"}])
    made = [each for _, events in parts for each in events if isinstance(each, BlockStored)]
    assert max(len(each.token_ids) for each in made) <= 2048, "a tenth of a millisecond"
    assert [name for each in made for name in each.block_hashes] == event["block_hashes"]
    assert [token for each in made for token in each.token_ids] == event["token_ids"]
    assert sum(count for count, _ in parts) == 2, "it counts once"
    source, other = Holdings(20_000).source("a"), Holdings(20_000).source("a")
    for _ in Entering(source, Counts(), fail).pieces(iter(parts)):
        pass
    for _ in other.entering((msgspec.convert(event, BlockStored),), 0):
        pass
    other.removed(event["block_hashes"][:3])
    assert source.blocks(Tier.GPU) == other.blocks(Tier.GPU) == 8189
    assert source.groups[0].names == other.groups[0].names, "the same keys for the same names"


def test_a_long_removal_says_what_it_would_say_whole() -> None:
    draw = random.Random(1)
    names = [draw.getrandbits(64) for _ in range(100_000)]
    for event in ({"type": "BlockRemoved", "block_hashes": names, "medium": "CPU"}, ["BlockRemoved", names, "CPU"]):
        made = list(in_pieces(encode(event)))
        assert all(isinstance(each, BlockRemoved) and each.medium == "CPU" for each in made)
        assert [name for each in made for name in each.block_hashes] == names
        assert max(len(each.block_hashes) for each in made) <= 2048


def test_a_long_event_without_tokens_or_with_too_few_is_known_by_its_hashes() -> None:
    event = stored(8192)
    for tokens in ([], event["token_ids"][:-1]):
        made = list(in_pieces(encode({**event, "token_ids": tokens})))
        assert [name for each in made for name in each.block_hashes] == event["block_hashes"]
        assert not any(each.token_ids for each in made if isinstance(each, BlockStored))


def test_a_batch_of_many_events_is_decoded_some_at_a_time() -> None:
    names = list(range(1, 20_001))
    parts = pieces([{"type": "BlockRemoved", "block_hashes": [name], "medium": "GPU"} for name in names])
    assert max(len(events) for _, events in parts) <= 64
    assert [e.block_hashes[0] for _, events in parts for e in events if isinstance(e, BlockRemoved)] == names


_STORED = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "block_size": 16}


@pytest.mark.parametrize(
    "events",
    [
        [["AllBlocksCleared"]] * 200_000,
        [{"type": "K"}] * 300_000,
        [{"type": "BlockRemoved", "block_hashes": []}] * 100_000,
        [{**_STORED, "token_ids": [1] * 200_000, "block_size": 200_000}],
        [{**_STORED, "token_ids": [], "block_hashes": ["x" * 40_000]}],
        [{**_STORED, "token_ids": [-1] * 40_000, "block_size": 40_000}],
        [{"type": "BlockRemoved", "block_hashes": [1.5] * 20_000}],
        [{"type": "BlockRemoved", "block_hashes": "x" * 70_000}],
        [[7, "x" * 70_000]],
    ],
    ids=range(9),
)
def test_a_batch_that_is_long_for_no_reason_is_refused(events: list[Any]) -> None:
    with pytest.raises(NotABatchError):
        Decoder().decode(encode([1.0, events, 0]))
    with pytest.raises(NotABatchError):
        Decoder().decode(encode([1, events, 0]))


def test_long_events_of_kinds_that_are_not_known_are_passed_over() -> None:
    decoder = Decoder()
    for told in ({"type": "Pinned", "x": [1] * 100_000}, ["Pinned", [1] * 100_000]):
        assert decoder.decode(encode([1.0, [told]])).events == []
    assert decoder.unknown == {"Pinned": 2}


def test_many_events_of_host_memory_are_put_in_order_with_stops_between() -> None:
    holdings = Holdings(50_000)
    source = holdings.source("a")
    whole = stored(6_000)
    names, ids = whole["block_hashes"], whole["token_ids"]
    events: list[Event] = [
        BlockStored([names[at]], names[at - 1] if at else None, ids[at * BLOCK : (at + 1) * BLOCK], BLOCK, medium="CPU")
        for at in range(6_000)
    ]
    random.Random(2).shuffle(events)
    entered = [source.blocks(Tier.CPU) for _ in Entering(source, Counts(), fail).batch(events)]
    assert entered.count(0) >= 8, "others had their turn while it was put in order"
    assert holdings.lookup(TokenChain(array("I", ids)))["a"] == Held(0, cpu=6_000 * BLOCK)
    assert holdings.seen.orphans == 0
