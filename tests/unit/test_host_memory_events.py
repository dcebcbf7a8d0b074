"""What vLLM's tier in host memory tells, and what is known of it then: blocks in any order, without salts and images, as bare
hashes, several times; and how it shows that there is more in it than was told."""

from __future__ import annotations

import random
from array import array

import msgspec
import pytest

from extproc.observe.kv_events.decode import Decoder
from extproc.observe.kv_events.entering import Counts, Entering
from extproc.observe.kv_events.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from extproc.routing.holdings import Held, Holdings, Source, Tier
from extproc.routing.stored_blocks import StoredBlocks, ordering
from extproc.routing.token_chain import TokenChain

BLOCK = 8


class Engine:
    """Makes events as vLLM does, and gives them to the holdings as they come over the wire."""

    def __init__(self, salt: str | None = None) -> None:
        self.holdings = Holdings(10_000)
        self.source: Source = self.holdings.source("a")
        self.source.cleared()
        self.salt = salt
        self.entering = Entering(self.source, Counts(), lambda: pytest.fail("it was not understood"))

    def hashes(self, ids: list[int]) -> list[int]:
        found = [0]
        for start in range(0, len(ids) - BLOCK + 1, BLOCK):
            found.append(random.Random(repr((found[-1], ids[start : start + BLOCK], self.salt))).getrandbits(63))
        return found[1:]

    def stored(self, ids: list[int], which: range, medium: str) -> list[Event]:
        """One event a block. Only the GPU's have what a hash covers beside tokens."""
        names = self.hashes(ids)
        made: list[Event] = []
        for at in which:
            extra = None if medium == "CPU" else [[self.salt] if self.salt and at == 0 else None]
            parent, tokens = names[at - 1] if at else None, ids[at * BLOCK : (at + 1) * BLOCK]
            made.append(BlockStored([names[at]], parent, tokens, BLOCK, medium=medium, extra_keys=extra, group_idx=0))
        return made

    def placeholder(self, name: int) -> Event:
        return BlockStored([name], None, [], 0, medium="CPU", group_idx=0)

    def tell(self, *events: Event) -> None:
        """One batch."""
        for _ in self.entering.batch(Decoder().decode(msgspec.msgpack.encode([1.0, events, 0])).events):
            pass

    def held(self, ids: list[int]) -> Held | None:
        return self.holdings.lookup(TokenChain(array("I", ids))).get("a")


def ids_of(blocks: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(50_000) for _ in range(blocks * BLOCK)]


def parents_first(events: list[BlockStored]) -> list[StoredBlocks]:
    pieces = ordering(events)
    try:
        while True:
            next(pieces)
    except StopIteration as end:
        found: list[StoredBlocks] = end.value
        return found


def gone(names: list[int], medium: str) -> BlockRemoved:
    return BlockRemoved(list(names), medium=medium, group_idx=0)


@pytest.mark.parametrize("seed", range(5))
def test_blocks_of_one_copy_come_in_any_order_though_the_gpu_has_none_of_them_left(seed: int) -> None:
    engine, ids = Engine(), ids_of(12)
    events = engine.stored(ids, range(12), "CPU")
    random.Random(seed).shuffle(events)
    engine.tell(*events)
    assert engine.held(ids) == Held(0, cpu=12 * BLOCK)
    assert engine.holdings.seen.orphans == 0


def test_blocks_that_are_in_order_stay_so_and_a_ring_of_parents_ends() -> None:
    engine, ids = Engine(), ids_of(3)
    events = [each for each in engine.stored(ids, range(3), "CPU") if isinstance(each, BlockStored)]
    assert parents_first(events) is events
    ring = [BlockStored([1], 2, [], 0), BlockStored([2], 1, [], 0)]
    assert sorted(each.block_hashes[0] for each in parents_first(ring)) == [1, 2]


def test_what_the_gpu_drops_is_in_host_memory_and_what_that_drops_is_gone() -> None:
    engine, ids = Engine(), ids_of(6)
    names = engine.hashes(ids)
    engine.tell(*engine.stored(ids, range(6), "GPU"))
    engine.tell(*engine.stored(ids, range(6), "CPU"))
    assert engine.held(ids) == Held(6 * BLOCK), "each block counts in the fastest tier"
    engine.tell(gone(names[2:], "GPU"))
    assert engine.held(ids) == Held(2 * BLOCK, cpu=4 * BLOCK)
    engine.tell(gone(names[4:], "CPU"))
    assert engine.held(ids) == Held(2 * BLOCK, cpu=2 * BLOCK)
    engine.tell(gone(names[:2], "GPU"))
    assert engine.held(ids) == Held(0, cpu=4 * BLOCK), "a block whose parent is in host memory only"
    engine.tell(gone(names[:1], "CPU"))
    assert engine.held(ids) is None, "what is behind a hole is of no use"
    engine.tell(*engine.stored(ids, range(1), "GPU"))
    assert engine.held(ids) == Held(BLOCK, cpu=3 * BLOCK), "and it is again when the hole is filled"


def test_a_bare_hash_counts_while_the_gpu_or_another_event_explains_it() -> None:
    engine, ids = Engine(), ids_of(4)
    names = engine.hashes(ids)
    engine.tell(*engine.stored(ids, range(4), "GPU"))
    engine.tell(*map(engine.placeholder, names[:3]))
    engine.tell(gone(names, "GPU"))
    assert engine.held(ids) == Held(0, cpu=3 * BLOCK)
    engine.tell(engine.placeholder(names[3]))
    assert engine.held(ids) == Held(0, cpu=3 * BLOCK), "nobody knows this one any more"
    engine.tell(gone(names, "CPU"))
    assert engine.held(ids) is None
    assert engine.holdings.blocks == 0


def test_a_block_that_two_chunks_announce_is_there_until_both_are_gone() -> None:
    engine, ids = Engine(), ids_of(4)
    other = [*ids[: 3 * BLOCK], *ids_of(1, 7)]
    # Chunks of two blocks: the third block is in a chunk with each of the fourths.
    for prompt in (ids, other):
        engine.tell(*engine.stored(prompt, range(0 if prompt is ids else 2, 4), "CPU"))
    engine.tell(gone(engine.hashes(ids)[2:], "CPU"))
    assert engine.held(other) == Held(0, cpu=4 * BLOCK)
    engine.tell(gone(engine.hashes(other)[2:], "CPU"))
    assert engine.held(other) == Held(0, cpu=2 * BLOCK)


def test_a_salted_block_in_host_memory_is_not_taken_for_one_without_a_salt() -> None:
    salted = Engine("tenant-1")
    ids = ids_of(3)
    names = salted.hashes(ids)
    salted.tell(*salted.stored(ids, range(3), "GPU"))
    salted.tell(*salted.stored(ids, range(3), "CPU"))
    salted.tell(gone(names, "GPU"))
    assert salted.held(ids) is None, "another tenant's"
    assert salted.source.blocks(Tier.CPU) == 3, "though they are there"
    # The GPU has dropped them before host memory tells that it has them: their tokens alone do not say whose they are.
    late = ids_of(3, 9)
    salted.tell(*salted.stored(late, range(3), "CPU"))
    assert salted.held(late) is None
    assert salted.holdings.seen.orphans == 3


def test_host_memory_that_drops_what_nobody_heard_of_is_not_all_known() -> None:
    engine = Engine()
    assert engine.source.in_step
    old = list(range(1, 101))
    engine.tell(*engine.stored(ids_of(1), range(1), "GPU"))
    # As after the GPU cache alone was emptied: what was in host memory is still there.
    engine.tell(gone(old, "CPU"))
    assert not engine.source.in_step
    ids = ids_of(1000, 3)
    engine.tell(*engine.stored(ids, range(1000), "CPU"))
    engine.tell(gone(engine.hashes(ids)[-50:], "CPU"))
    assert not engine.source.in_step
    for end in range(950, 0, -50):
        engine.tell(gone(engine.hashes(ids)[end - 50 : end], "CPU"))
    assert engine.source.in_step, "what it drops has long been known: so is the rest"


def test_a_late_start_is_not_in_step_before_host_memory_has_shown_what_it_drops() -> None:
    engine = Engine()
    engine.source.lost()
    engine.holdings.set_capacity("a", 100 * BLOCK)
    ids = ids_of(300)
    engine.tell(*engine.stored(ids, range(96), "GPU"))
    assert engine.source.in_step, "the GPU's cache is known, and there is nothing behind it"
    engine.tell(*engine.stored(ids, range(300), "CPU"))
    assert not engine.source.in_step, "nobody knows what else is in host memory"
    names = engine.hashes(ids)
    engine.tell(gone(names[100:], "CPU"))
    assert engine.source.in_step, "200 blocks went, and all were known"


def test_emptying_the_gpus_cache_leaves_host_memory_as_it_is_and_in_step() -> None:
    """vLLM 0.32 says AllBlocksCleared when the GPU's blocks were forgotten; /reset_prefix_cache does not touch host memory."""
    engine, ids = Engine(), ids_of(600)
    engine.tell(*engine.stored(ids, range(600), "GPU"))
    engine.tell(*engine.stored(ids, range(500), "CPU"))
    engine.tell(AllBlocksCleared())
    assert engine.held(ids) == Held(0, cpu=500 * BLOCK)
    assert (engine.source.blocks(Tier.GPU), engine.source.blocks(Tier.CPU)) == (0, 500)
    assert engine.source.in_step, "all was known, and what is there now is known too"
    engine.tell(gone(engine.hashes(ids)[400:500], "CPU"))
    assert engine.held(ids) == Held(0, cpu=400 * BLOCK)
    assert engine.source.in_step


def test_what_one_batch_says_of_host_memory_stands_whether_before_or_behind_the_emptying() -> None:
    engine, ids, late = Engine(), ids_of(4), ids_of(3, 1)
    events = [*engine.stored(ids, range(4), "GPU"), *engine.stored(ids, range(4), "CPU"), AllBlocksCleared()]
    engine.tell(*events, *engine.stored(late, range(3), "GPU"))
    assert (engine.held(ids), engine.held(late)) == (Held(0, cpu=4 * BLOCK), Held(3 * BLOCK))


def test_after_a_late_start_emptying_shows_all_of_the_gpu_and_nothing_of_host_memory() -> None:
    engine, ids = Engine(), ids_of(300)
    engine.source.lost()
    engine.tell(*engine.stored(ids, range(300), "CPU"))
    engine.tell(AllBlocksCleared())
    assert not engine.source.in_step, "what else is in host memory nobody has heard"
    engine.tell(gone(engine.hashes(ids)[100:], "CPU"))
    assert engine.source.in_step, "200 blocks went, and all were known"


def test_once_it_has_proved_wrong_host_memory_is_not_taken_to_outlast_an_emptying() -> None:
    """``/reset_prefix_cache?reset_external=true`` empties it without a word. Only answers can show that."""
    engine, ids = Engine(), ids_of(300)
    engine.entering.wary = True
    engine.tell(*engine.stored(ids, range(300), "CPU"))
    engine.tell(AllBlocksCleared())
    assert engine.held(ids) is None
    assert engine.source.in_step, "the GPU's cache is known, and nothing is heard of host memory"
    engine.tell(*engine.stored(ids, range(300), "CPU"))
    assert not engine.source.in_step
