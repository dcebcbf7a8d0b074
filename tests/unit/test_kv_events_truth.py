"""What no event says: host memory was emptied. Answers show it, and what events say of it is not taken for granted again."""

from __future__ import annotations

from array import array

from extproc.routing.holdings import Held, Tier
from extproc.routing.job import Mode
from extproc.routing.token_chain import TokenChain
from extproc.routing.truth import IN_A_ROW
from tests.unit.routing_world import pool_of
from tests.unit.test_kv_events import _ids, _stored, until, world
from tests.unit.test_true_hits import Told, ids
from workers.sim.blocks import Cleared


def test_host_memory_that_is_not_found_again_and_again_is_mistrusted_whatever_new_prompts_come_between() -> None:
    told = Told(pool_of(1, 1))
    asked: list[str] = []
    assert told.router.known is not None
    told.router.known.truth.on_mistrust = asked.append
    for number in range(IN_A_ROW):
        assert asked == []
        for seed, held in ((number, True), (1_000 + number, False)):
            prompt = ids(1601, seed)
            if held:
                told.stores_blocks("p0", prompt[:1600], Tier.CPU)
            ticket = told.send(prompt, mode=Mode.DISAGGREGATE)
            told.prefilled(ticket, tokens=1601, cached_tokens=0)
            assert ticket.check is not None
            assert (ticket.check.expected_tokens, ticket.check.found_tokens) == (1600 if held else 0, 0)
            told.finish(ticket)
    assert asked == ["p0"], "a prompt that nobody ever had shows nothing"


async def test_what_is_read_again_then_does_not_hold_what_an_emptying_may_have_taken() -> None:
    """``/reset_prefix_cache?reset_external=true``; the replay reaches back to the first batch, so it says the same again."""
    async with world() as made:
        chain = TokenChain(array("I", _ids(6)))
        made.publish(_stored(_ids(6)), _stored(_ids(6), "CPU"))
        made.publish(Cleared())
        await until(lambda: made.holdings.held(chain, made.address) == Held(0, cpu=96))
        assert made.in_step, "as after /reset_prefix_cache alone"
        made.subscriber.distrusted(made.address)
        await until(lambda: made.in_step)
        assert made.held(_ids(6)) == 0
        made.publish(_stored(_ids(2)), _stored(_ids(2), "CPU"))
        await until(lambda: made.held(_ids(2)) == 32)
        assert not made.in_step, "until host memory has shown what it drops"
