"""What workers say they hold decides where prompts go: events, tiers, cache servers, the way back to a conversation."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from typing import Any

import pytest

from extproc.config import Models
from extproc.dispatcher import Dispatcher
from extproc.models import Names
from extproc.observe.logs import make_logger
from extproc.observe.metrics import Metrics
from extproc.routing.explain import explain
from extproc.routing.hits import Below
from extproc.routing.holdings import Holdings, Tier
from extproc.routing.job import Aims, Job, Mode, Objective
from extproc.routing.router import Router
from extproc.routing.settings import Routing
from extproc.routing.snapshot import restore, take
from extproc.routing.stores import Stores
from extproc.routing.ticket import Ticket
from extproc.routing.token_chain import TokenChain
from extproc.routing.truth import IN_A_ROW
from extproc.routing.under_way import PATIENCE_S
from tests.unit.routing_world import World, pool_of, specs

BLOCK = 16


def ids(tokens: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(150_000) for _ in range(tokens)]


class Told(World):
    """A world whose workers tell what they hold, but those that are ``silent``."""

    def __init__(self, *args: Any, silent: tuple[str, ...] = (), stores: Stores | None = None, **settings: Any) -> None:
        predicts = settings.pop("predicts", True)
        super().__init__(*args, **settings)
        self.holdings = Holdings(100_000)
        self.router = Router(self.pool, Routing(**settings), holdings=self.holdings, stores=stores, predicts=predicts)
        self._names: dict[tuple[int, ...], int] = {}
        for endpoint in self.pool.endpoints:
            if endpoint.address not in silent:
                source = self.holdings.source(endpoint.address)
                source.cleared()
                source.stored([1], None, ids(BLOCK, 99), BLOCK)  # one block, by which its size is known

    def stores_blocks(self, address: str, tokens: list[int], tier: Tier = Tier.GPU, **more: Any) -> None:
        """Events of it come."""
        names = [hash((*tokens[: (block + 1) * BLOCK], *more.items().__repr__())) for block in range(len(tokens) // BLOCK)]
        source = self.holdings.source(address)
        source.stored([each & (1 << 63) - 1 for each in names], None, tokens, BLOCK, tier=tier.number, **more)

    def evicts(self, address: str, tokens: list[int], first: int = 0) -> None:
        names = [hash((*tokens[: (block + 1) * BLOCK], *{}.items().__repr__())) for block in range(len(tokens) // BLOCK)]
        self.holdings.source(address).removed([each & (1 << 63) - 1 for each in names[first // BLOCK :]])

    def ask(self, tokens: list[int], **fields: Any) -> Job:
        more = {name: fields.pop(name) for name in ("lora", "cache_salt") if name in fields}
        return self.job(len(tokens), token_chain=TokenChain(array("I", tokens), **more), **fields)

    def send(self, tokens: list[int], **fields: Any) -> Ticket:
        return self.router.submit(self.ask(tokens, **fields), self.now_s)

    def hits(self, tokens: list[int], **fields: Any) -> dict[str, int]:
        self.router.scales.now_s = self.now_s
        return dict(self.router.scales.hits(Ticket(self.ask(tokens, **fields))).tokens)


# -- whose word counts -----------------------------------------------------------------------------------------------------


def test_a_worker_that_tells_is_believed_and_not_what_was_predicted_of_it() -> None:
    world, prompt = Told(), ids(1600)
    world.stores_blocks("p1", prompt[:800])
    world.warm("p0", "the same text", 1600)
    assert world.hits(prompt, text="the same text") == {"p1": 800}, "p0 tells, and has not told of this"


def test_a_worker_that_does_not_tell_counts_as_predicted() -> None:
    world, prompt = Told(silent=("p0",)), ids(1600)
    world.stores_blocks("p1", prompt[:800])
    world.warm("p0", "the same text", 1600)
    assert world.hits(prompt, text="the same text") == {"p0": 1599, "p1": 800}


def test_a_prompt_whose_tokens_are_not_known_counts_as_predicted_everywhere_and_says_so() -> None:
    world = Told()
    world.warm("p0", "text", 1600)
    ticket = world.router.submit(world.job(1600, "text", mode=Mode.DISAGGREGATE), world.now_s)
    assert ticket.decision is not None
    assert (ticket.decision.cached_tokens, ticket.decision.cached_by) == (1599, "predicted")


def test_where_predictions_are_forbidden_only_what_is_known_counts() -> None:
    world, prompt = Told(silent=("p0",), predicts=False), ids(1600)
    world.stores_blocks("p1", prompt[:800])
    world.warm("p0", "the same text", 1600)
    assert world.hits(prompt, text="the same text") == {"p1": 800}
    ticket = world.router.submit(world.job(1600, "the same text", mode=Mode.DISAGGREGATE), world.now_s)
    assert ticket.decision is not None and ticket.decision.cached_tokens == 0, "nobody knows its tokens"


def test_what_is_evicted_is_not_held_any_more_and_the_decision_changes() -> None:
    world, prompt = Told(pool_of(2, 1)), ids(16_000)
    world.stores_blocks("p1", prompt)
    first = world.send(prompt, mode=Mode.DISAGGREGATE)
    assert first.decision is not None
    assert (first.decision.prefill, first.decision.cached_by) == ("p1", "events")
    world.prefilled(first, tokens=16_000, cached_tokens=15_984)
    world.finish(first)
    world.wait(PATIENCE_S + 0.1)
    world.evicts("p1", prompt, first=160)
    assert world.hits(prompt) == {"p1": 160}
    second = world.send(prompt, mode=Mode.DISAGGREGATE)
    assert second.decision is not None
    assert second.decision.cached_tokens in (0, 160), "nobody holds it: it is computed"


def test_the_last_block_of_a_prompt_that_ends_with_it_is_computed() -> None:
    world, prompt = Told(), ids(160)
    world.stores_blocks("p0", prompt)
    assert world.hits(prompt) == {"p0": 144}, "the engine wants logits of the last token, and caches full blocks only"
    assert world.hits([*prompt, 5]) == {"p0": 160}


def test_salt_and_adapter_keep_equal_tokens_apart() -> None:
    world, prompt = Told(), ids(160)
    world.stores_blocks("p0", prompt)
    assert world.hits([*prompt, 5]) == {"p0": 160}
    assert world.hits([*prompt, 5], cache_salt="tenant") == {}
    assert world.hits([*prompt, 5], lora="adapter") == {}


# -- placed a moment ago ---------------------------------------------------------------------------------------------------


def test_a_burst_of_one_prompt_follows_the_first_before_its_events_come() -> None:
    world, prompt = Told(pool_of(3, 1)), ids(16_000)
    first = world.send(prompt, mode=Mode.DISAGGREGATE, held=False)
    assert first.decision is not None
    second = world.ask(prompt)
    hits = world.router.scales.hits(Ticket(second))
    assert hits.tokens == {first.decision.prefill: 15_984}
    assert hits.source(first.decision.prefill or "") == "placed"


def test_what_was_placed_counts_no_more_when_its_events_never_come() -> None:
    world, prompt = Told(), ids(1600)
    ticket = world.send(prompt, mode=Mode.DISAGGREGATE)
    world.wait(1.0)
    assert len(world.hits(prompt)) == 1
    world.prefilled(ticket, tokens=1600, cached_tokens=0)
    assert len(world.hits(prompt)) == 2, "and its decode worker has it now"
    world.finish(ticket)
    world.wait(PATIENCE_S - 0.1)
    assert len(world.hits(prompt)) == 2
    world.wait(0.2)
    assert world.hits(prompt) == {}
    world.finish(world.send(ids(32, 5)))
    assert len(world.router.known.under_way if world.router.known else ()) <= 2, "and is forgotten"


def test_a_prefill_that_failed_has_left_nothing() -> None:
    world, prompt = Told(), ids(1600)
    ticket = world.send(prompt, mode=Mode.DISAGGREGATE)
    world.router.prefill_failed(ticket, world.now_s, blame=True)
    assert world.hits(prompt) == {}


def test_a_decode_worker_that_was_passed_over_does_not_count_as_having_the_prompt() -> None:
    world, prompt = Told(pool_of(1, 2)), ids(1600)
    ticket = world.send(prompt, mode=Mode.AGGREGATE)
    assert ticket.decode is not None
    first = ticket.decode.address
    second = "d1" if first == "d0" else "d0"
    assert world.hits(prompt) == {first: 1584}
    assert world.router.served_by(ticket, second, world.now_s) is world[second]
    world.router.answered(ticket, world.now_s, ok=True)
    assert world.hits(prompt) == {second: 1584}


def test_nothing_is_remembered_of_a_worker_whose_engine_is_new() -> None:
    world, prompt = Told(), ids(1600)
    ticket = world.send(prompt, mode=Mode.DISAGGREGATE)
    assert ticket.prefill is not None
    world.router.restarted(ticket.prefill.address)
    assert world.hits(prompt) == {}


def test_a_prompt_that_waits_is_placed_by_what_is_held_then_not_by_what_was_held_when_it_came() -> None:
    world, prompt, other = Told(pool_of(2, 1)), ids(16_000), ids(20_000, 3)
    world.stores_blocks("p0", prompt)
    busy = [world.send(ids(20_000, seed), mode=Mode.DISAGGREGATE) for seed in (7, 8)]
    waits = world.send(prompt, mode=Mode.DISAGGREGATE)
    assert waits.decision is None
    world.evicts("p0", prompt)
    world.wait(1.0)
    assert waits.decision is None
    for ticket in busy:
        world.prefilled(ticket, tokens=20_000, cached_tokens=0)
    assert waits.decision is not None
    assert waits.decision.cached_tokens == 0, "what p0 held is gone"
    del other


def test_of_prompts_that_wait_together_the_second_finds_what_the_first_has_loaded_or_computed() -> None:
    world, prompt = Told(pool_of(1, 1)), ids(16_000)
    world.stores_blocks("p0", prompt[:8_000], tier=Tier.CPU)
    busy = [world.send(ids(16_000, seed), mode=Mode.DISAGGREGATE) for seed in (7, 8)]
    first, second = (world.send(prompt, text="the same", mode=Mode.DISAGGREGATE) for _ in range(2))
    for each in (*busy, first):
        world.prefilled(each, tokens=16_000, cached_tokens=0)
        world.finish(each)
    assert first.decision is not None and second.decision is not None
    assert (first.decision.cached_by, first.decision.below_tokens) == ("events", {"cpu": 8_000})
    assert (second.decision.cached_by, second.decision.below_tokens) == ("placed", {})
    assert second.decision.cached_tokens > 15_000


def test_what_another_router_placed_counts_until_the_events_of_it_must_have_come() -> None:
    world, prompt = Told(pool_of(2, 1)), ids(1600)
    other = world.ask(prompt, text="conversation")
    world.router.holds("p1", other.chain, world.now_s)
    found = world.router.scales.hits(Ticket(world.ask(prompt, text="conversation")))
    assert (found.tokens, found.source("p1")) == ({"p1": 1584}, "placed")
    assert world.hits(prompt, text="another conversation") == {}
    world.now_s += 10.1
    assert world.hits(prompt, text="conversation") == {}


def test_a_prompt_does_not_wait_on_for_a_worker_that_holds_it_no_more() -> None:
    world, prompt = Told(pool_of(2, 1)), ids(16_000)
    world.stores_blocks("p0", prompt)
    for number in range(2):
        world["p0"].prefill.claim(tokens=20_000, work_s=1.0, now_s=world.now_s, turn=number)
    waits = world.send(prompt, mode=Mode.DISAGGREGATE)
    assert waits.decision is None, "p0 is worth waiting for, although p1 has nothing to do"
    world.wait(0.6)
    assert waits.decision is None
    world.evicts("p0", prompt)
    world.wait(0.6)
    assert waits.decision is not None
    assert waits.decision.prefill == "p1"


# -- tiers -----------------------------------------------------------------------------------------------------------------


def test_what_lies_below_the_gpu_counts_as_cached_and_costs_loading() -> None:
    world, prompt = Told(pool_of(1, 1), disk_bytes_per_s=1e9, kv_bytes_per_token=100_000.0), ids(10_016)
    world.stores_blocks("p0", prompt[:1600])
    world.stores_blocks("p0", prompt[:10_000], Tier.DISK)
    ticket = world.send(prompt, mode=Mode.DISAGGREGATE)
    made = ticket.decision
    assert made is not None
    assert (made.cached_tokens, made.below_tokens) == (10_000, {"disk": 8_400})
    assert made.terms.load_s == pytest.approx(8_400 * 100_000 / 1e9)
    assert made.terms.prefill_s == pytest.approx(16 / 10_000)


def test_a_worker_with_it_on_the_gpu_goes_before_one_that_has_it_on_a_slow_disk() -> None:
    world, prompt = Told(pool_of(3, 1), disk_bytes_per_s=1e8), ids(10_000)
    world.stores_blocks("p0", prompt, Tier.DISK)
    world.stores_blocks("p2", prompt[:8_000])
    ticket = world.send(prompt, mode=Mode.DISAGGREGATE)
    assert ticket.prefill is not None
    assert ticket.prefill.address == "p2", "2,000 tokens take 0.2 s, and 10,000 from that disk 13 s"


def test_a_disk_that_is_slower_than_computing_is_not_worth_going_to() -> None:
    world, prompt = Told(pool_of(2, 1), disk_bytes_per_s=1e8), ids(10_000)
    world.stores_blocks("p0", prompt, Tier.DISK)
    ticket = world.send(prompt, mode=Mode.DISAGGREGATE)
    assert ticket.prefill is not None
    assert ticket.prefill.address == "p1"


def test_how_fast_a_tier_is_is_learned_from_what_prefills_took() -> None:
    world, prompt = Told(pool_of(1, 1), kv_bytes_per_token=100_000.0), ids(50_016)
    world.stores_blocks("p0", prompt[:50_000], Tier.CPU)
    load_s = [0.0]
    for _ in range(5):
        ticket = world.send(prompt, mode=Mode.DISAGGREGATE)
        assert ticket.decision is not None
        load_s.append(ticket.decision.terms.load_s)
        world.wait(2.0016)  # 5 GB in 2 s
        speed = world.router.costs.prefill_rate(world["p0"]).tokens_per_s
        world.prefilled(ticket, tokens=50_016, cached_tokens=50_000)
        assert world.router.costs.prefill_rate(world["p0"]).tokens_per_s == speed, "says nothing of computing"
        world.finish(ticket)
        world.wait(PATIENCE_S + 0.1)
    assert load_s[1] == pytest.approx(0.25)
    assert load_s[-1] == pytest.approx(2.0, rel=0.1)


def test_what_a_decode_worker_has_below_its_gpu_is_transferred_all_the_same() -> None:
    world, prompt = Told(pool_of(1, 1)), ids(10_000)
    world.stores_blocks("d0", prompt[:1_600])
    nothing_below = world.send(prompt, mode=Mode.DISAGGREGATE, held=False).decision
    world = Told(pool_of(1, 1))
    world.stores_blocks("d0", prompt[:1_600])
    world.stores_blocks("d0", prompt, Tier.CPU)
    more_below = world.send(prompt, mode=Mode.DISAGGREGATE, held=False).decision
    assert nothing_below is not None and more_below is not None
    assert more_below.terms.transfer_s == nothing_below.terms.transfer_s


def test_two_tiers_behind_each_other_are_both_loaded() -> None:
    world, prompt = Told(), ids(1616)
    world.stores_blocks("p0", prompt[:800], Tier.CPU)
    world.stores_blocks("p0", prompt[:1600], Tier.DISK)
    found = world.router.scales.hits(Ticket(world.ask(prompt)))
    assert found.tokens == {"p0": 1600}
    assert found.below_tokens("p0") == {"cpu": 800, "disk": 800}


# -- cache servers ---------------------------------------------------------------------------------------------------------


def servers(**more: Any) -> Stores:
    return Stores(**{"label": None, "chunk_tokens": 256, "capacity_tokens": 1_000_000, **more})


def test_what_one_worker_computed_another_loads_from_the_server_that_they_share() -> None:
    world, prompt = Told(pool_of(2, 1), stores=servers()), ids(16_000)
    ticket = world.send(prompt, mode=Mode.DISAGGREGATE)
    assert ticket.prefill is not None
    own, other = ticket.prefill.address, "p1" if ticket.prefill.address == "p0" else "p0"
    assert world.hits(prompt) == {own: 15_984}, "not stored before it is computed"
    world.prefilled(ticket, tokens=16_000, cached_tokens=0)
    hits = world.router.scales.hits(Ticket(world.ask(prompt)))
    assert hits.tokens[other] == 15_872, "in whole chunks of 256"
    assert (hits.source(other), hits.below_tokens(other)) == ("cache_server", {"lmcache": 15_872})


def test_servers_are_told_apart_by_a_label_and_a_worker_without_one_has_none() -> None:
    pool = pool_of([*specs("p", 2, labels={"cache": "a"}), *specs("q", 1, labels={"cache": "b"}), *specs("r", 1)], 1)
    stores = servers(label="cache")
    world, prompt = Told(pool, stores=stores), ids(1600)
    stores.stored(world["p0"], TokenChain(array("I", prompt)))
    assert world.hits(prompt) == {"p0": 1536, "p1": 1536}


def test_a_server_that_had_less_than_was_stored_has_lost_it() -> None:
    stores = servers()
    world, prompt = Told(pool_of(1, 1), stores=stores), ids(16_000)
    chain = TokenChain(array("I", prompt))
    stores.stored(world["p0"], chain)
    stores.missed(world["p0"], chain, 1_000, expected_tokens=15_872, now_s=0.0)
    assert world.hits(prompt) == {"p0": 768}


def test_a_directory_is_not_believed_for_a_while_about_what_a_worker_did_not_find_there() -> None:
    """The server is dead, and its coordinator has not noticed yet: the next prompt must not go there for it too."""
    stores = servers(label="cache")
    world, prompt = Told(pool_of([*specs("p", 1, labels={"cache": "a"}), *specs("q", 1, labels={"cache": "b"})], 1)), ids(1600)
    chain, dead, other = TokenChain(array("I", prompt)), world["p0"], world["q0"]
    told = {"*": 1024, "a": 1536}
    assert (stores.held(dead, chain, told, 0.0), stores.held(other, chain, told, 0.0)) == (1536, 1024)
    stores.missed(dead, chain, 600, expected_tokens=1536, now_s=100.0)
    assert stores.held(dead, chain, told, 100.0) == 512
    assert stores.held(other, chain, told, 100.0) == 1024, "of another server nothing was learned"
    longer = TokenChain(array("I", prompt + ids(3200)[1600:]))
    assert stores.held(dead, longer, {"a": 3072}, 129.0) == 512, "another prompt that begins with the same"
    assert stores.held(dead, chain, {"a": 256}, 129.0) == 256
    assert stores.held(dead, chain, told, 130.0) == 1536, "by now the coordinator knows"


def test_the_last_tokens_of_a_prompt_are_computed_anyway_and_are_no_chunk_that_is_not_there() -> None:
    stores = servers()
    world, prompt = Told(pool_of(1, 1)), ids(512)
    chain = TokenChain(array("I", prompt))
    stores.missed(world["p0"], chain, 496, expected_tokens=511, now_s=0.0)
    assert stores.held(world["p0"], chain, {"": 512}, 0.0) == 512


def test_a_reply_that_found_less_than_the_directory_said_is_what_makes_it_doubted() -> None:
    stores = servers()
    world, prompt = Told(pool_of(1, 1), stores=stores), ids(16_000)
    told = {"": 15_872}
    ticket = world.send(prompt, mode=Mode.DISAGGREGATE, stored_tokens=told)
    world.prefilled(ticket, tokens=16_000, cached_tokens=0)
    assert ticket.check is not None
    assert (ticket.check.source, ticket.check.expected_tokens, ticket.check.found_tokens) == ("cache_server", 15_872, 0)
    assert stores.held(world["p0"], TokenChain(array("I", prompt)), told, world.now_s) == 0


def test_what_was_expected_in_the_server_is_kept_with_what_was_found() -> None:
    stores = servers()
    world, prompt = Told(pool_of(1, 1), stores=stores), ids(1600)
    stores.stored(world["p0"], TokenChain(array("I", prompt)))
    world.stores_blocks("p0", prompt)
    ticket = world.send(prompt, mode=Mode.DISAGGREGATE)
    world.prefilled(ticket, tokens=1600, cached_tokens=1584)
    assert ticket.check is not None
    assert (ticket.check.source, ticket.check.expected_tokens, ticket.check.stored_tokens) == ("events", 1584, 1536)


def test_a_server_holds_no_more_than_it_can() -> None:
    stores = servers(capacity_tokens=2_560)
    world = Told(pool_of(1, 1), stores=stores)
    for seed in range(5):
        stores.stored(world["p0"], TokenChain(array("I", ids(1024, seed))))
    assert stores.chunks == 10, "of 256 tokens each"
    assert [bool(world.hits(ids(1024, seed))) for seed in (0, 1, 3, 4)] == [False, False, True, True]


def test_where_a_directory_was_asked_only_its_word_counts() -> None:
    stores = servers()
    world, prompt = Told(pool_of(1, 1), stores=stores), ids(1600)
    stores.stored(world["p0"], TokenChain(array("I", prompt)))
    assert world.hits(prompt, stored_tokens={}) == {}
    assert world.hits(prompt, stored_tokens={"": 512}) == {"p0": 512}


# -- the next turn of a conversation ---------------------------------------------------------------------------------------


def conversation(world: Told) -> list[int]:
    """Its first turn is over: p0 has the prompt, d0 the prompt and the answer. The next turn's prompt."""
    history = ids(20_000)
    world.stores_blocks("p0", history[:16_000])
    world.stores_blocks("d0", history)
    return history + ids(200, 6)


def test_the_next_turn_goes_back_to_the_decode_worker_that_holds_it_when_that_is_idle() -> None:
    world = Told(pool_of(2, 4))
    ticket = world.send(conversation(world))
    assert ticket.decision is not None
    assert (ticket.decision.prefill, ticket.decision.decode) == (None, "d0"), "it computes 200 tokens itself"
    assert (ticket.decision.cached_tokens, ticket.decision.cached_by) == (20_000, "events")


def test_the_next_turn_does_not_go_back_to_a_decode_worker_that_is_full() -> None:
    world = Told(pool_of(2, [*specs("d", 4, max_seqs=2)]))
    prompt = conversation(world)
    for _ in range(2):
        world.router.claim_of_another(world["d0"], next(iter(world["d0"].roles)), tokens=100, work_s=0.0, now_s=world.now_s)
    ticket = world.send(prompt)
    assert ticket.decision is not None
    assert ticket.decision.decode != "d0"
    assert ticket.decision.prefill == "p0", "which holds the most of the rest"


def test_a_tail_that_would_hold_up_many_streams_is_computed_by_the_prefill_worker_that_holds_the_rest() -> None:
    world = Told(pool_of(2, 1), kv_bytes_per_token=1_000.0)
    history = ids(20_000)
    world.stores_blocks("p0", history)
    world.stores_blocks("d0", history)
    alone = world.send(history + ids(2_000, 6))
    assert alone.decision is not None
    assert alone.decision.prefill is None, "nobody else is on d0"
    world.finish(alone)
    for _ in range(60):
        world.router.claim_of_another(world["d0"], next(iter(world["d0"].roles)), tokens=100, work_s=0.0, now_s=world.now_s)
    beside = world.send(history + ids(2_000, 7))
    assert beside.decision is not None
    assert (beside.decision.prefill, beside.decision.decode) == ("p0", "d0")
    assert beside.decision.terms.transfer_s < world.router.costs.transfer_rate(world["d0"]).seconds(2_500 * 1_000.0), "the tail"


@pytest.mark.parametrize("apart", [{"cache_salt": "another tenant"}, {"lora": "an adapter"}])
def test_a_conversation_of_another_salt_or_adapter_does_not_draw_to_the_worker(apart: dict[str, str]) -> None:
    world = Told(pool_of(2, 4))
    prompt = conversation(world)
    ticket = world.send(prompt, **apart)
    assert ticket.decision is not None
    assert (ticket.decision.cached_tokens, ticket.decision.cached_by) == (0, "events")


def test_after_the_answer_was_evicted_the_next_turn_is_a_handoff_again() -> None:
    world = Told(pool_of(2, 4))
    prompt = conversation(world)
    world.evicts("d0", prompt[:20_000])
    ticket = world.send(prompt)
    assert ticket.decision is not None
    assert ticket.decision.prefill == "p0"


# -- truth -----------------------------------------------------------------------------------------------------------------


def wrong_prefills(world: Told, count: int, found: Callable[[int], int]) -> None:
    for number in range(count):
        prompt = ids(1600, 1000 + number)
        world.stores_blocks("p0", prompt)
        ticket = world.send(prompt, mode=Mode.DISAGGREGATE)
        world.prefilled(ticket, tokens=1600, cached_tokens=found(number))
        world.finish(ticket)


def test_a_worker_that_is_wrong_many_times_in_a_row_is_to_be_asked_anew() -> None:
    world = Told(pool_of(1, 1))
    asked: list[str] = []
    assert world.router.known is not None
    world.router.known.truth.on_mistrust = asked.append
    wrong_prefills(world, IN_A_ROW - 1, lambda _: 0)
    assert asked == []
    wrong_prefills(world, 1, lambda _: 0)
    assert asked == ["p0"]


def test_a_worker_that_is_right_now_and_then_is_believed() -> None:
    world = Told(pool_of(1, 1))
    asked: list[str] = []
    assert world.router.known is not None
    world.router.known.truth.on_mistrust = asked.append
    wrong_prefills(world, 4 * IN_A_ROW, lambda number: 0 if number % 4 else 1584)
    assert asked == []


def test_the_check_says_what_was_expected_found_and_by_whose_word() -> None:
    world, prompt = Told(pool_of(1, 1)), ids(1600)
    world.stores_blocks("p0", prompt[:800])
    ticket = world.send(prompt, mode=Mode.DISAGGREGATE)
    world.prefilled(ticket, tokens=1600, cached_tokens=400)
    assert ticket.check is not None
    assert (ticket.check.source, ticket.check.expected_tokens, ticket.check.found_tokens) == ("events", 800, 400)
    assert ticket.check.error_share == 0.25


def test_what_was_expected_and_found_is_counted_by_worker_and_by_whose_word_it_was() -> None:
    world, prompt, metrics = Told(pool_of(1, 1), kv_bytes_per_token=1_000.0), ids(1600), Metrics()
    world.stores_blocks("p0", prompt[:800])
    world.stores_blocks("d0", prompt[:1_200])
    dispatcher = Dispatcher(
        world.router,
        names=Names(Models()),
        metrics=metrics,
        log=make_logger("critical"),
        longest_request_s=1e9,
        clock=lambda: world.now_s,
    )
    ticket = dispatcher.submit(world.ask(prompt, mode=Mode.DISAGGREGATE))
    dispatcher.note(ticket, "r-1")
    dispatcher.prefilled(ticket, tokens=1600, cached_tokens=400, engine_id="e")
    assert metrics.cache_lookups.value("events") == 1
    assert metrics.cache_expected_tokens.value("p0", "events") == 800
    assert metrics.cache_found_tokens.value("p0", "events") == 400
    assert metrics.cache_transfer_bytes.value("d0") == 400 * 1_000.0
    dispatcher.finish(ticket)
    ticket = dispatcher.submit(world.job(1600, mode=Mode.DISAGGREGATE))
    dispatcher.note(ticket, "r-2")
    dispatcher.finish(ticket)
    assert metrics.cache_lookups.value("no_tokens") == 1


# -- explained, and replayed -----------------------------------------------------------------------------------------------


def test_an_explanation_says_whose_word_it_is_and_what_is_loaded_and_changes_nothing() -> None:
    world, prompt = Told(pool_of(2, 1)), ids(10_016)
    world.stores_blocks("p0", prompt[:10_000], Tier.CPU)
    job = world.ask(prompt, mode=Mode.DISAGGREGATE)
    before = len(world.router.known.under_way) if world.router.known else 0
    found = explain(world.router, job, world.now_s)
    chosen = found.candidates[0]
    assert (chosen.prefill, chosen.cached_prefill_tokens) == ("p0", 10_000)
    assert (chosen.cached_by, chosen.below_tokens) == ("events", {"cpu": 10_000})
    assert chosen.terms.load_s > 0
    assert found.decision is not None and found.decision.cached_by == "events"
    assert world.router.known is not None and len(world.router.known.under_way) == before
    placed = world.router.submit(job, world.now_s).decision
    assert placed is not None and (placed.prefill, placed.terms) == (chosen.prefill, chosen.terms)


def test_a_prompt_that_waits_keeps_what_was_known_of_it_in_a_snapshot() -> None:
    world, prompt = Told(pool_of(1, 1)), ids(20_000)
    world.stores_blocks("p0", prompt, Tier.CPU)
    world.send(ids(30_000, 4), mode=Mode.DISAGGREGATE)
    waits = world.send(prompt, mode=Mode.DISAGGREGATE)
    assert waits.decision is None
    again = restore(take(world.router, world.now_s))
    (ticket,) = again._tickets.values()
    assert ticket.hits is not None
    assert ticket.hits.tokens == {"p0": 19_984}
    assert isinstance(ticket.hits.below["p0"], Below) and ticket.hits.source("p0") == "events"


@pytest.mark.parametrize("objective", list(Objective))
def test_every_objective_places_prompts_by_it(objective: Objective) -> None:
    world, prompt = Told(pool_of(3, 2)), ids(1600)
    world.stores_blocks("p1", prompt)
    ticket = world.router.submit(world.ask(prompt, aims=Aims(objective=objective)), world.now_s)
    assert ticket.decision is not None
    world.prefilled(ticket, tokens=1600, cached_tokens=0)
    world.finish(ticket)
    world.assert_empty()
