"""Several data-parallel engines behind one address: which of them a request names, and what is expected where none is named."""

from __future__ import annotations

import random
from array import array
from functools import partial
from typing import Any

import msgspec
import pytest

from extproc.config import Config
from extproc.dispatcher import Dispatcher, rank_of
from extproc.inference import parse as parse_body
from extproc.intake import Intake
from extproc.models import Models, Names
from extproc.observe.load import parse
from extproc.observe.logs import make_logger
from extproc.observe.metrics import Metrics
from extproc.paths import Treatment
from extproc.prompt import BytesPerToken
from extproc.routing.explain import explain
from extproc.routing.holdings import Held, Holdings, Tier
from extproc.routing.job import Job, Mode
from extproc.routing.pool import Role
from extproc.routing.ranks import cut, spread
from extproc.routing.router import Router
from extproc.routing.settings import Routing
from extproc.routing.stores import Stores
from extproc.routing.ticket import Ticket
from extproc.routing.token_chain import TokenChain
from extproc.routing.truth import IN_A_ROW
from tests.unit.routing_world import World, pool_of

BLOCK = 16
RECEIVER = {"host": "h", "init_ports": [1], "alloc_ports": [2]}


def ids(tokens: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(150_000) for _ in range(tokens)]


class Ranked(World):
    """A world in which p0 and d0 have two engines each, and tell what these hold."""

    def __init__(self, *args: Any, ranks: tuple[int, ...] = (0, 1), stores: Stores | None = None, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.holdings = Holdings(100_000)
        self.router = Router(self.pool, Routing(**settings), holdings=self.holdings, stores=stores)
        for endpoint in self.pool.endpoints:
            for rank in ranks if endpoint.address in ("p0", "d0") else (0,):
                self.holdings.source(endpoint.address, rank).cleared()
                self.stores_blocks(endpoint.address, ids(BLOCK, 99), rank)  # by which the size of its blocks is known

    def stores_blocks(self, address: str, tokens: list[int], rank: int = 0, tier: Tier = Tier.GPU) -> None:
        """Events of one of its engines come."""
        names = [hash(tuple(tokens[: (block + 1) * BLOCK])) & (1 << 63) - 1 for block in range(len(tokens) // BLOCK)]
        self.holdings.source(address, rank).stored(names, None, tokens, BLOCK, tier=tier.number)

    def ask(self, tokens: list[int], **fields: Any) -> Job:
        fields.setdefault("takes_rank", True)
        return self.job(len(tokens), token_chain=TokenChain(array("I", tokens)), **fields)

    def send(self, tokens: list[int], **fields: Any) -> Ticket:
        fields.setdefault("mode", Mode.DISAGGREGATE)
        return self.router.submit(self.ask(tokens, **fields), self.now_s)


def chosen(ticket: Ticket) -> tuple[str | None, int | None, int, str]:
    """The prefill worker, its engine, and the tokens that are expected there by whose word."""
    decision = ticket.decision
    assert decision is not None
    assert (decision.prefill_rank, decision.decode_rank) == (ticket.prefill_rank, ticket.decode_rank)
    return decision.prefill, decision.prefill_rank, decision.cached_tokens, decision.cached_by


# -- which is named --------------------------------------------------------------------------------------------------------


def test_the_engine_that_holds_the_prompt_is_named_where_that_saves_enough_and_its_tokens_are_expected() -> None:
    world, prompt = Ranked(pool_of(1, 1)), ids(16_000)
    world.stores_blocks("p0", prompt[:8_000], rank=1)
    ticket = world.send(prompt)
    assert chosen(ticket) == ("p0", 1, 8_000, "events"), "0.4 s less than the mean of the two"
    assert ticket.decision is not None
    assert 'prefill="p0";prefill-rank=1;decode="d0";reason' in ticket.decision.header()


def test_a_small_gain_names_nobody_and_the_mean_is_expected() -> None:
    world, prompt = Ranked(pool_of(1, 1)), ids(16_000)
    world.stores_blocks("p0", prompt[:1_600], rank=1)
    ticket = world.send(prompt)
    assert chosen(ticket) == ("p0", None, 800, "ranks"), "0.08 s: whichever engine has less to do"
    assert ticket.decision is not None
    assert "rank" not in ticket.decision.header().replace("cached-by=ranks", "")


def test_what_all_engines_hold_is_there_whichever_is_taken() -> None:
    world, prompt = Ranked(pool_of(1, 1)), ids(16_000)
    for rank in (0, 1):
        world.stores_blocks("p0", prompt[:8_000], rank=rank)
    assert chosen(world.send(prompt)) == ("p0", None, 8_000, "events")


def test_an_api_that_takes_no_rank_gets_the_mean() -> None:
    world, prompt = Ranked(pool_of(1, 1)), ids(16_000)
    world.stores_blocks("p0", prompt[:8_000], rank=1)
    assert chosen(world.send(prompt, takes_rank=False)) == ("p0", None, 4_000, "ranks")


def test_never_where_the_configuration_says_so() -> None:
    world, prompt = Ranked(pool_of(1, 1), rank_gain_s=1e9), ids(16_000)
    world.stores_blocks("p0", prompt, rank=1)
    assert chosen(world.send(prompt))[1] is None


@pytest.mark.parametrize(
    ("handoff", "epp", "api", "takes"),
    [
        ({}, {}, Treatment.CHAT, True),
        ({}, {}, Treatment.RESPONSES, False),  # vLLM does not read the header there
        ({}, {"enabled": True}, Treatment.CHAT, True),
        ({}, {"enabled": True, "fallback_endpoints": 1}, Treatment.CHAT, False),  # another worker may get it
        ({"connector": "llmd_sidecar"}, {}, Treatment.CHAT, False),  # another makes the prefill leg
        ({"connector": "lmcache", "lmcache": {"10.0.0.2:80": RECEIVER}}, {}, Treatment.CHAT, False),  # of one engine
        ({"connector": "nixl_push", "nixl_push": {"10.0.0.1:80": {"engine_id": "e", "host": "h"}}}, {}, Treatment.CHAT, False),
    ],
)
def test_only_for_legs_that_we_make_and_that_no_other_engine_is_bound_to(
    handoff: dict[str, Any], epp: dict[str, Any], api: Treatment, takes: bool
) -> None:
    workers = {"prefill": ["10.0.0.1:80"], "decode": ["10.0.0.2:80"]}
    made = msgspec.convert({"workers": workers, "handoff": handoff, "epp": epp}, Config)
    body = b'{"model": "m", "messages": [{"role": "user", "content": "Hello"}], "input": "Hello"}'
    asked = Intake(made, BytesPerToken()).read(
        parse_body(body, api), headers={}, path="/", size_bytes=len(body), request_id="r", arrived_s=0.0, deadline_s=1.0
    )
    assert asked.job.takes_rank is takes


def test_a_worker_with_one_engine_is_asked_for_none() -> None:
    world, prompt = Ranked(pool_of(2, 1)), ids(16_000)
    world.stores_blocks("p1", prompt[:8_000])
    assert chosen(world.send(prompt)) == ("p1", None, 8_000, "events")


def test_engines_of_a_later_node_are_counted_from_0() -> None:
    world, prompt = Ranked(pool_of(1, 1), ranks=(8, 9)), ids(16_000)
    world.stores_blocks("p0", prompt, rank=9)
    assert chosen(world.send(prompt))[1] == 1, "hybrid load balancing: vLLM takes places among the server's own engines"


def test_an_engine_whose_worker_is_not_in_step_is_not_named() -> None:
    world, prompt = Ranked(pool_of(1, 1)), ids(16_000)
    world.stores_blocks("p0", prompt, rank=1)
    world.holdings.source("p0", 0).lost()
    assert chosen(world.send(prompt)) == ("p0", None, 7_992, "ranks"), "at least the mean of what is known"


def test_of_two_workers_the_one_whose_engine_holds_more_is_chosen_for_that_engine() -> None:
    world, prompt = Ranked(pool_of(2, 1)), ids(16_000)
    world.stores_blocks("p0", prompt, rank=1)
    world.stores_blocks("p1", prompt[:10_000])
    assert chosen(world.send(prompt)) == ("p0", 1, 15_984, "events")
    assert chosen(world.send(prompt, takes_rank=False))[0] == "p1", "any engine of p0 is to be expected to have half of it"


def test_what_a_cache_server_has_for_every_engine_is_no_reason_to_name_one() -> None:
    stores = Stores(label=None, chunk_tokens=256, capacity_tokens=1_000_000)
    world, prompt = Ranked(pool_of(1, 1), stores=stores, lmcache_bytes_per_s=1e12), ids(16_000)
    world.stores_blocks("p0", prompt, rank=1)
    stores.stored(world["p0"], TokenChain(array("I", prompt)))
    prefill, rank, tokens, by = chosen(world.send(prompt))
    assert (prefill, rank, by) == ("p0", None, "cache_server") and tokens > 15_000
    slow = Ranked(pool_of(1, 1), stores=stores, lmcache_bytes_per_s=2e9)
    slow.stores_blocks("p0", prompt, rank=1)
    assert chosen(slow.send(prompt))[1] == 1, "here loading takes a second"


def test_tiers_of_the_named_engine_are_loaded_from() -> None:
    world, prompt = Ranked(pool_of(1, 1)), ids(16_000)
    world.stores_blocks("p0", prompt[:4_000], rank=1)
    world.stores_blocks("p0", prompt, rank=1, tier=Tier.CPU)
    ticket = world.send(prompt)
    assert chosen(ticket) == ("p0", 1, 15_984, "events")
    assert ticket.decision is not None and ticket.decision.below_tokens == {"cpu": 11_984}


# -- load ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("running", "waiting", "named"),
    [
        ((0.0, 0.0), (0.0, 0.0), True),
        ((5.0, 5.0), (0.0, 0.0), True),  # not busier than the other
        ((0.0, 1.0), (0.0, 0.0), True),  # one typical prompt, 0.2 s, against 0.8 s
        ((0.0, 5.0), (0.0, 0.0), False),  # 1.0 s
        ((9.0, 0.0), (0.0, 0.0), True),
        ((9.0, 0.0), (0.0, 1.0), False),  # it waits there, and not at the other
        ((9.0, 9.0), (3.0, 2.0), True),  # it waits everywhere
    ],
)
def test_an_engine_with_more_to_do_is_named_only_where_its_hit_saves_more(
    running: tuple[float, float], waiting: tuple[float, float], named: bool
) -> None:
    world, prompt = Ranked(pool_of(1, 1)), ids(16_000)
    world.stores_blocks("p0", prompt, rank=1)
    world.reports("p0", running=0.0, waiting=0.0, rank_running=running, rank_waiting=waiting)
    assert (chosen(world.send(prompt))[1] == 1) is named


def test_what_was_sent_since_the_report_counts_so_a_burst_does_not_all_go_to_one_engine() -> None:
    world, prompt = Ranked(pool_of(1, 1), dispatch="immediate"), ids(16_000)
    world.stores_blocks("p0", prompt, rank=1)
    world.reports("p0", running=0.0, waiting=0.0, rank_running=(0.0, 0.0), rank_waiting=(0.0, 0.0))
    tickets = [world.send(prompt) for _ in range(12)]
    named = [chosen(each)[1] for each in tickets]
    count = named.count(1)
    assert named == [1] * count + [None] * (12 - count)
    assert count == 4, "0.8 s are saved, and each that is there already takes 0.2 s of them"
    for each in tickets[:count]:
        world.router.prefill_done(each, world.now_s, tokens=16_000, cached_tokens=15_984)
    assert chosen(world.send(prompt))[1] == 1, "they are through: there is room again"
    world.finish(*tickets)


def test_a_decode_worker_is_weighed_by_what_a_stream_more_costs_the_answer() -> None:
    world, prompt = Ranked(pool_of(1, 1)), ids(16_000)
    world.stores_blocks("d0", prompt, rank=1)
    for streams, named in ((4.0, 1), (60.0, None)):
        world.reports("d0", running=streams, waiting=0.0, rank_running=(0.0, streams), rank_waiting=(0.0, 0.0))
        ticket = world.send(prompt, mode=Mode.AGGREGATE, held=False)
        assert ticket.decode_rank == named, "256 tokens of answer, 0.3 ms each for every stream more, against 0.8 s"
        world.finish(ticket)


# -- legs ------------------------------------------------------------------------------------------------------------------


def test_a_decode_worker_that_does_it_all_is_named_for_the_computing_that_its_engine_saves() -> None:
    world, prompt = Ranked(pool_of(1, 1)), ids(16_000)
    world.stores_blocks("d0", prompt, rank=1)
    ticket = world.send(prompt, mode=Mode.AGGREGATE)
    assert chosen(ticket) == (None, None, 15_984, "events")
    assert ticket.decision is not None and ticket.decision.decode_rank == 1


@pytest.mark.parametrize(("bytes_per_s", "named"), [(1e9, 1), (100e9, None)])
def test_with_a_handoff_the_decode_leg_is_named_for_the_transfer_alone(bytes_per_s: float, named: int | None) -> None:
    world, prompt = Ranked(pool_of(1, 1), transfer_bytes_per_s=bytes_per_s), ids(16_000)
    world.stores_blocks("d0", prompt, rank=1)
    ticket = world.send(prompt)
    assert ticket.decision is not None and ticket.decision.prefill == "p0"
    assert ticket.decode_rank == named, "8,000 tokens more than the mean, 131,072 bytes each"


def test_another_worker_never_gets_the_rank_of_the_first() -> None:
    world, prompt = Ranked(pool_of(2, 2)), ids(16_000)
    world.stores_blocks("p0", prompt, rank=1)
    world.stores_blocks("d0", prompt, rank=1)
    ticket = world.send(prompt)
    assert chosen(ticket)[:2] == ("p0", 1)
    world.router.prefill_failed(ticket, world.now_s, blame=True)
    assert world.router.prefill_again(ticket, world.now_s, ["p0"]) is world["p1"]
    assert chosen(ticket)[:2] == ("p1", None)
    whole = world.send(prompt, mode=Mode.AGGREGATE)
    assert (whole.decode, whole.decode_rank) == (world["d0"], 1)
    assert world.router.decode_again(whole, world.now_s) is world["d1"]
    assert whole.decode_rank is None
    world.finish(ticket, whole)


def test_a_worker_that_envoy_took_instead_was_sent_no_rank() -> None:
    world, prompt = Ranked(pool_of(1, 2)), ids(16_000)
    world.stores_blocks("d0", prompt, rank=1)
    first = world.send(prompt, mode=Mode.AGGREGATE)
    assert world.router.served_by(first, "d1", world.now_s) is world["d1"]
    assert first.decode_rank is None and first.decision is not None and first.decision.decode_rank is None


def test_what_was_sent_to_an_engine_counts_there_at_once_and_what_any_may_have_as_a_mean() -> None:
    world, prompt, other = Ranked(pool_of(1, 1), dispatch="immediate"), ids(16_000), ids(16_000, 5)
    world.stores_blocks("p0", prompt[:8_000], rank=1)
    assert chosen(world.send(prompt))[1] == 1
    assert chosen(world.send(prompt)) == ("p0", 1, 15_984, "placed")
    assert chosen(world.send(other))[1] is None
    again = world.send(other)
    assert chosen(again) == ("p0", None, 15_984 // 2, "ranks"), "nobody knows which engine has it"


def test_of_prompts_that_wait_together_the_second_expects_what_any_engine_may_have_of_the_first() -> None:
    """Not all of it, by the word of the events: the worker's own balancing takes the engine that has nothing to do."""
    world, prompt = Ranked(pool_of(1, 1)), ids(16_000)
    busy = [world.send(ids(16_000, seed)) for seed in (7, 8)]
    first, second = (world.send(prompt, text="the same") for _ in range(2))
    assert first.decision is None and second.decision is None
    for each in (*busy, first):
        world.prefilled(each, tokens=16_000, cached_tokens=0)
        world.finish(each)
    assert chosen(first) == ("p0", None, 0, "events")
    assert chosen(second) == ("p0", None, 15_984 // 2, "ranks")


def test_explain_says_which_engine() -> None:
    world, prompt = Ranked(pool_of(1, 1)), ids(16_000)
    world.stores_blocks("p0", prompt, rank=1)
    found = explain(world.router, world.ask(prompt, mode=Mode.DISAGGREGATE), world.now_s)
    assert found.decision is not None and found.decision.prefill_rank == 1
    assert [(each.prefill, each.rank) for each in found.candidates if each.chosen] == [("p0", 1)]


# -- is it true ------------------------------------------------------------------------------------------------------------


def test_a_worker_whose_own_balancing_chooses_is_not_mistrusted_for_what_it_happens_to_find() -> None:
    world, prompt = Ranked(pool_of(1, 1)), ids(16_000)
    world.stores_blocks("p0", prompt[:8_000], rank=1)
    assert world.router.known is not None
    for turn in range(3 * IN_A_ROW):
        ticket = world.send(prompt, takes_rank=False)
        world.prefilled(ticket, tokens=16_000, cached_tokens=8_000 * (turn % 2))
        assert ticket.check is not None and ticket.check.wrong and ticket.check.source == "ranks"
        world.finish(ticket)
        world.wait(1.0)
    assert world.router.known.truth.mistrusted == 0


def test_a_named_engine_that_does_not_have_it_again_and_again_is_mistrusted() -> None:
    world, prompt = Ranked(pool_of(1, 1)), ids(16_000)
    world.stores_blocks("p0", prompt[:8_000], rank=1)
    assert world.router.known is not None
    for _ in range(IN_A_ROW):
        ticket = world.send(prompt)
        assert chosen(ticket) == ("p0", 1, 8_000, "events")
        world.prefilled(ticket, tokens=16_000, cached_tokens=0)
        world.finish(ticket)
        world.wait(1.0)
    assert world.router.known.truth.mistrusted == 1


def test_a_spread_is_between_what_its_engines_hold() -> None:
    draw = random.Random(7)
    amount = partial(draw.randrange, 200)
    for _ in range(500):
        ranks = sorted(draw.sample(range(20), draw.randrange(2, 5)))
        told = [Held(amount(), amount(), amount(), amount(), rank) for rank in ranks if draw.random() < 0.7]
        held = told[0]._replace(others=tuple(told[1:])) if told else None
        places = draw.sample(range(len(ranks)), draw.randrange(len(ranks)))
        placed: dict[int | None, int] = {place: draw.randrange(400) for place in places}
        most = draw.randrange(1, 700)
        found = spread(ranks, held, placed, most)
        by_rank = {each.rank: each for each in told}
        for place, each in enumerate(found.each):
            events = min(by_rank[ranks[place]].tokens, most) if ranks[place] in by_rank else 0
            assert each.tokens == max(events, min(placed.get(place, 0), most))
        amounts = [each.tokens for each in found.each]
        assert found.each[found.best].tokens == max(amounts)
        assert sum(amounts) / len(ranks) - 4 < found.any_of_them.tokens <= sum(amounts) / len(ranks)
        assert found.even == (len({each[:4] for each in found.each}) == 1)


def test_what_is_cut_off_is_the_slowest() -> None:
    held = Held(10, 20, 30, 40)
    assert [cut(held, most)[:4] for most in (5, 25, 70, 100)] == [(5, 0, 0, 0), (10, 15, 0, 0), (10, 20, 30, 10), held[:4]]


# -- who is there ----------------------------------------------------------------------------------------------------------


def test_a_page_of_several_engines_says_what_each_has_to_do_in_the_order_of_their_numbers() -> None:
    page = b"".join(
        b'vllm:num_requests_%s{engine="%d",model_name="m"} %d.0\n' % (name, engine, count)
        for name, counts in ((b"running", {10: 3, 9: 1}), (b"waiting", {10: 0, 9: 2}))
        for engine, count in counts.items()
    )
    scrape = parse(page)
    assert (scrape.running, scrape.waiting) == (4.0, 2.0)
    load = scrape.load(None)
    assert (load.rank_running, load.rank_waiting) == ((1.0, 3.0), (2.0, 0.0))


@pytest.mark.parametrize("left_out", [b'engine="1"', b"waiting"])
def test_a_page_that_does_not_say_it_of_all_engines_says_nothing_of_them(left_out: bytes) -> None:
    lines = [
        b'vllm:num_requests_%s{engine="%d"} 1.0\n' % (name, engine) for name in (b"running", b"waiting") for engine in (0, 1)
    ]
    scrape = parse(b"".join(line for line in lines if left_out not in line))
    assert (scrape.rank_running, scrape.rank_waiting) == ((), ())


def test_a_page_of_more_engines_than_one_can_have_says_nothing_of_them() -> None:
    """It would be told to all processes, in one datagram."""
    lines = (
        b'vllm:num_requests_%s{engine="%d"} 1.0\n' % (name, engine) for name in (b"running", b"waiting") for engine in range(65)
    )
    scrape = parse(b"".join(lines))
    assert (scrape.running, scrape.rank_running, scrape.rank_waiting) == (65.0, (), ())


@pytest.mark.parametrize(
    ("engine", "rank"), [("5f2c_dp0", "0"), ("5f2c_dp12", "12"), ("5f2c", ""), ("a_dp1_b", ""), ("a_dp12345", "")]
)
def test_the_rank_in_the_id_of_an_engine(engine: str, rank: str) -> None:
    assert rank_of(engine) == rank


class Seen:
    """A dispatcher over a world, and who it says was restarted."""

    def __init__(self, world: Ranked) -> None:
        names, self.metrics = Names(Models()), Metrics()
        log = make_logger("critical")
        self.world = world
        self.dispatcher = Dispatcher(
            world.router, names=names, metrics=self.metrics, log=log, longest_request_s=60.0, clock=lambda: world.now_s
        )
        self.restarted: list[str] = []
        self.dispatcher.on_restart = self._suspect

    def _suspect(self, address: str) -> None:
        """As the subscriber of KV events does."""
        self.restarted.append(address)
        for source in self.world.holdings.sources(address):
            source.suspect = True

    def replies(self, tokens: list[int], engine_id: str) -> int:
        """A prompt is answered by an engine; tokens that were expected there."""
        ticket = self.dispatcher.submit(self.world.ask(tokens, mode=Mode.DISAGGREGATE, held=False))
        self.dispatcher.note(ticket, "request")
        assert ticket.decision is not None
        self.dispatcher.prefilled(ticket, tokens=len(tokens), cached_tokens=None, engine_id=engine_id)
        self.dispatcher.finish(ticket)
        return ticket.decision.cached_tokens


def test_a_worker_that_calls_its_engine_by_another_rank_each_time_fills_no_memory() -> None:
    seen = Seen(Ranked(pool_of(1, 1)))
    for number in range(0, 10_000_000, 7_919):
        seen.dispatcher.engine_told("p0", f"{number}_dp{number}")
    assert len(seen.dispatcher._engines["p0"]) <= 3


def test_a_leg_that_is_made_again_is_counted_if_it_names_an_engine() -> None:
    world, prompt = Ranked(pool_of(1, 1)), ids(16_000)
    world.stores_blocks("p0", prompt, rank=1)
    seen = Seen(world)
    ticket = seen.dispatcher.submit(world.ask(prompt, mode=Mode.DISAGGREGATE, held=False))
    seen.dispatcher.note(ticket, "request")
    assert seen.metrics.ranks_named.value("prefill") == 1
    seen.dispatcher.prefill_failed(ticket, blame=False)
    seen.dispatcher.prefill_again(ticket, ())
    assert (ticket.prefill_rank, seen.metrics.ranks_named.value("prefill")) == (1, 2)


def test_replies_of_several_engines_are_no_restarts() -> None:
    seen = Seen(Ranked(pool_of(1, 1)))
    for engine in ("one_dp0", "one_dp1", "one_dp0", "one_dp1"):
        seen.replies(ids(400), engine)
    assert seen.restarted == []


def test_another_engine_is_one_restart_whichever_of_its_ranks_answer_then() -> None:
    seen = Seen(Ranked(pool_of(1, 1)))
    for engine in ("one_dp0", "one_dp1", "two_dp1", "two_dp0", "two_dp1"):
        seen.replies(ids(400), engine)
    assert seen.restarted == ["p0"]
    seen.dispatcher.engine_told("p0", "two_dp0")
    assert seen.restarted == ["p0"]
    seen.dispatcher.engine_told("p0", "three_dp0")
    assert seen.restarted == ["p0", "p0"], "another process has had a reply of it"


def test_a_restart_that_something_else_has_shown_is_not_shown_again_by_the_next_reply() -> None:
    seen = Seen(Ranked(pool_of(1, 1)))
    for engine in ("one_dp0", "one_dp1"):
        seen.replies(ids(400), engine)
    [endpoint] = seen.world.router.pool.live(Role.PREFILL)
    seen.dispatcher.restarted(endpoint)  # its metrics say so, or discovery
    for engine in ("two_dp0", "two_dp1"):
        seen.replies(ids(400), engine)
    assert seen.restarted == ["p0"]


def test_a_worker_that_left_and_its_address_are_forgotten() -> None:
    seen = Seen(Ranked(pool_of(1, 1)))
    seen.replies(ids(400), "one")
    seen.dispatcher.gone(["p0", "never_there"])
    assert seen.dispatcher._engines == {}
    seen.replies(ids(400), "two")
    assert seen.restarted == []


def test_a_restart_that_a_reply_shows_ends_at_once_what_its_events_had_said() -> None:
    world, prompt = Ranked(pool_of(1, 1), ranks=(0,)), ids(16_000)
    seen = Seen(world)
    world.stores_blocks("p0", prompt[:8_000])
    assert seen.replies(ids(400, 3), "one") == 0
    assert seen.replies(prompt, "one") == 8_000
    world.wait(1.0)
    assert seen.replies(ids(400, 3), "two") == 0
    assert seen.restarted == ["p0"]
    assert seen.replies(prompt, "two") == 0, "nothing of the engine before it is expected"


def test_legs_that_name_an_engine_are_counted() -> None:
    world, prompt = Ranked(pool_of(1, 1)), ids(16_000)
    seen = Seen(world)
    world.stores_blocks("p0", prompt, rank=1)
    seen.replies(prompt, "one_dp1")
    values = {
        sample.labels["role"]: sample.value
        for family in seen.metrics.registry.collect()
        for sample in family.samples
        if sample.name == "baton_ranks_named_total"
    }
    assert values == {"prefill": 1.0, "decode": 0.0}
