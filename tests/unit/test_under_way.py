"""What was sent to workers a moment ago, found by how a prompt begins, however many begin alike."""

from __future__ import annotations

import random
from array import array

import pytest

from extproc.routing.holdings import Holdings
from extproc.routing.prefix import Chain
from extproc.routing.token_chain import TokenChain
from extproc.routing.under_way import PATIENCE_S, Sent, UnderWay

BLOCK = 16
NOTHING = Chain(array("Q"), 64.0)


def _telling(*addresses: str) -> UnderWay:
    """Workers in step that hold one block, by which its size is known."""
    holdings = Holdings(1000)
    for address in addresses:
        source = holdings.source(address)
        source.cleared()
        source.stored([1], None, list(range(BLOCK)), BLOCK)
    return UnderWay(holdings)


def _chain(*blocks: int) -> TokenChain:
    """Of blocks that are named by numbers."""
    return TokenChain(array("I", [token for block in blocks for token in [block] * BLOCK]))


def _found(under_way: UnderWay, chain: TokenChain, known: dict[str, int] | None = None, now_s: float = 0.0) -> dict[str, int]:
    """The most that each worker was sent."""
    found: dict[str, int] = {}
    for address, tokens in under_way.lookup(chain, NOTHING, known or {}, now_s):
        found[address] = max(tokens, found.get(address, 0))
    return found


def test_of_few_that_begin_alike_the_one_that_shares_most_is_found() -> None:
    """Against all of them compared block by block, with some sent, some answered and some failed again."""
    draw = random.Random(4)
    workers = [f"w{number}" for number in range(6)]
    for _ in range(60):
        under_way = _telling(*workers)
        there: list[tuple[str, list[int], Sent]] = []
        for _ in range(20):
            blocks = [draw.randrange(2) + 10 if draw.random() < 0.2 else 9 for _ in range(draw.randrange(1, 30))]
            sent = under_way.send(address := draw.choice(workers), _chain(*blocks), 0.0)
            assert sent is not None
            if draw.random() < 0.3:
                under_way.failed(sent)
            elif sum(each[0] == address for each in there) < 8:
                there.append((address, blocks, sent))
            else:
                under_way.failed(sent)
        asked = [draw.choice((9, 9, 9, 10)) for _ in range(25)]
        known = {worker: draw.randrange(12) * BLOCK for worker in workers[:3]}
        expected: dict[str, int] = {}
        for address, blocks, _ in there:
            shared = next((at for at, (a, b) in enumerate(zip(asked, blocks, strict=False)) if a != b), min(25, len(blocks)))
            if shared * BLOCK > max(known.get(address, 0), expected.get(address, 0)):
                expected[address] = shared * BLOCK
        assert _found(under_way, _chain(*asked), known) == expected
        for _, _, sent in there:
            under_way.failed(sent)
        assert len(under_way) == 0 and not under_way._begin, "nothing is left of them"


class _Counted(array):  # type: ignore[type-arg]
    """Keys that count how often one is looked at."""

    looks = 0

    def __getitem__(self, at):  # type: ignore[no-untyped-def]
        _Counted.looks += 1
        return super().__getitem__(at)


@pytest.mark.parametrize("shared", [1, 5, 70])
def test_thousands_with_one_system_prompt_are_not_all_looked_at(shared: int) -> None:
    under_way = _telling("a", "b")
    for number in range(3000):
        under_way.send("ab"[number % 2], _chain(*[7] * shared, 1000 + number, 5), 0.0)
    chain = _chain(*[7] * shared, 1, 2)
    chain._keys[BLOCK] = _Counted("Q", chain.keys(BLOCK))
    _Counted.looks = 0
    assert _found(under_way, chain) == {"a": shared * BLOCK, "b": shared * BLOCK}
    assert _Counted.looks < 300


def test_one_that_is_older_than_many_is_found_where_it_shares_much_more() -> None:
    under_way = _telling("a")
    under_way.send("a", _chain(7, *range(100, 120)), 0.0)
    for number in range(500):
        under_way.send("a", _chain(7, 1000 + number), 0.0)
    assert _found(under_way, _chain(7, *range(100, 125))) == {"a": 21 * BLOCK}


def test_what_is_over_does_not_stand_before_what_is_not() -> None:
    under_way = _telling("a")
    still = under_way.send("a", _chain(7, 8, 9), 0.0)
    over = [under_way.send("a", _chain(7, 8, 1000 + number), 0.0) for number in range(50)]
    for each in over:
        under_way.answered(each, 0.0)
    assert _found(under_way, _chain(7, 8, 9, 10), now_s=PATIENCE_S) == {"a": 3 * BLOCK}
    under_way.failed(still)
    assert _found(under_way, _chain(7, 8, 9, 10), now_s=PATIENCE_S) == {}


def test_what_other_routers_sent_is_found_by_its_text() -> None:
    under_way = _telling("a")
    text = Chain(array("Q", range(50)), 64.0)
    under_way.send_elsewhere("a", text, 0.0)
    longer = Chain(array("Q", [*range(40), 99]), 64.0)
    assert dict(under_way.lookup(_chain(1), longer, {}, 0.0)) == {"a": 40 * 64}
    assert dict(under_way.lookup(_chain(1), longer, {"a": 40 * 64}, 0.0)) == {}


def test_hashes_of_another_router_that_repeat_themselves_are_forgotten_like_any_other() -> None:
    under_way = _telling("a")
    under_way.send_elsewhere("a", Chain(array("Q", [7] * 70), 64.0), 0.0)
    under_way.send("a", _chain(1), 1_000.0)
    under_way.send("a", _chain(1), 1_000.0)
    assert len(under_way) == 2
