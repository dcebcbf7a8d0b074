"""Batches that are entered at once: what is known afterwards is what it is where each is taken apart."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest

from extproc.observe.kv_events import entering, plain
from extproc.observe.kv_events.entering import Counts, Entering
from extproc.observe.kv_events.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from extproc.routing.holdings import Holdings
from extproc.routing.token_chain import TokenChain

BLOCK = 8
PROMPTS = [[seed * 1000 + at for at in range(6 * BLOCK)] for seed in range(3)]


class _Engines:
    def __init__(self) -> None:
        self.holdings = Holdings(60)
        self.counts = [Counts() for _ in range(3)]
        self.faults = 0
        self.entering = [Entering(self.holdings.source(f"w{at}"), counts, self._fault) for at, counts in enumerate(self.counts)]

    def _fault(self) -> None:
        self.faults += 1

    def enter(self, engine: int, events: list[Event]) -> None:
        for _ in self.entering[engine].batch(events):
            pass

    def known(self) -> list[Any]:
        found: list[Any] = [self.holdings.status(), self.faults, *map(vars, self.counts)]
        found += [self.holdings.lookup(TokenChain(array("I", ids))) for ids in PROMPTS]
        return found + [self.holdings.in_step(address) for address in self.holdings.addresses()]


def _stored(draw: random.Random, odd: float) -> BlockStored:
    prompt = draw.randrange(len(PROMPTS))
    start = draw.randrange(5)
    end = draw.randrange(start + 1, 7)
    event = BlockStored(
        [prompt << 40 | at + 1 for at in range(start, end)],
        prompt << 40 | start if start else None,
        PROMPTS[prompt][start * BLOCK : end * BLOCK],
        BLOCK,
        extra_keys=draw.choice((None, [None] * (end - start))),
        medium="GPU",
        group_idx=0,
        kv_cache_spec_kind="full_attention",
    )
    if draw.random() < odd:
        name, value = draw.choice(
            (
                ("medium", draw.choice(("CPU", "elsewhere", None, "gpu"))),
                ("group_idx", 1),
                ("kv_cache_spec_kind", "sliding_window"),
                ("block_size", 0),
                ("block_size", 2 * BLOCK),
                ("token_ids", []),
                ("token_ids", [-1] * len(event.token_ids)),
                ("extra_keys", [["salt"]] + [None] * (end - start - 1)),
                ("block_hashes", [each.to_bytes(8, "big") for each in event.block_hashes if isinstance(each, int)]),
                ("block_hashes", []),
                ("parent_block_hash", b"\7" * 32),
                ("lora_name", "adapter"),
            )
        )
        setattr(event, name, value)
    return event


def _event(draw: random.Random, odd: float) -> Event:
    what = draw.random()
    if what < 0.5:
        return _stored(draw, odd)
    if what < 0.99:
        names = [draw.randrange(3) << 40 | draw.randrange(8) for _ in range(draw.randrange(4))]
        medium, group = draw.choice((("CPU", 0), ("GPU", 1), (None, None))) if draw.random() < odd else ("GPU", 0)
        return BlockRemoved(names, medium, group)
    return AllBlocksCleared()


@pytest.mark.parametrize("odd", [0.0, 0.02, 0.3])
def test_at_once_or_apart_the_same_is_known(odd: float, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(5)
    once, apart = _Engines(), _Engines()
    at_once = 0

    def counted(*given: Any) -> tuple[int, int] | None:
        nonlocal at_once
        entered = plain.enter(*given)
        at_once += entered is not None
        return entered

    for _ in range(1_500):
        engine = draw.randrange(3)
        events = [_event(draw, odd) for _ in range(draw.randrange(6))]
        monkeypatch.setattr(entering, "enter_at_once", counted)
        once.enter(engine, events)
        monkeypatch.setattr(entering, "enter_at_once", lambda *_: None)
        apart.enter(engine, events)
        assert once.known() == apart.known()
    assert at_once > (300 if odd else 1_000)


def test_many_blocks_are_not_entered_at_once() -> None:
    holdings = Holdings(10_000)
    ids = list(range(BLOCK * 300))
    event = BlockStored(list(range(1, 301)), None, ids, BLOCK)
    pieces = Entering(holdings.source("w"), Counts(), lambda: None).batch([event])
    assert holdings.blocks == 0
    assert len(list(pieces)) > 1 and holdings.blocks == 300
