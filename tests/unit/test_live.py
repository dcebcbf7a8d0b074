"""`/live` says what the router knows, in a document of bounded size, and makes it seldom."""

from __future__ import annotations

import msgspec
import pytest

from extproc import live_document as doc
from extproc.live import Live
from extproc.observe.logs import make_logger
from extproc.routing.endpoint_spec import EndpointSet, EndpointSpec
from extproc.routing.job import Mode
from extproc.routing.load import Load
from tests.page.world import World, spec


class Clock:
    def __init__(self, world: World) -> None:
        self.now_s = 5000.0
        world.now_s = self
        world.dispatcher._clock = self
        world.recent._clock = self
        world.recent._started_s = self.now_s - 100
        world.live._clock = self

    def __call__(self) -> float:
        return self.now_s


def worker(found: doc.Live, address: str) -> doc.WorkerNow:
    return next(each for each in found.workers if each.address == address)


async def test_workers_show_what_is_in_flight_on_them_and_what_they_reported() -> None:
    world = World(1, 1)
    clock = Clock(world)
    world.dispatcher.on_load("10.0.1.1:8200", Load(running=5.0, waiting=2.0, kv_usage=0.42, kv_tokens=400_000, itl_s=0.021))
    ticket = world.prompt(tokens=2_000, mode=Mode.DISAGGREGATE)
    clock.now_s += 3
    found = world.live.document()
    prefill, decode = worker(found, "10.0.0.1:8100"), worker(found, "10.0.1.1:8200")
    assert (prefill.roles, prefill.state, prefill.prefill_requests, prefill.prefill_tokens) == (["prefill"], "live", 1, 2_000)
    assert (decode.roles, decode.decode_requests, decode.prefill_requests) == (["decode"], 1, 0)
    assert decode.decode_tokens == world["10.0.1.1:8200"].decode.tokens > 2_000
    assert (decode.running, decode.waiting, decode.kv_usage, decode.itl_s) == (5.0, 2.0, 0.42, 0.021)
    assert (decode.other_requests, decode.report_age_s) == (7.0, 3.0)
    assert prefill.report_age_s is None, "it never reported"
    assert (prefill.handoffs, decode.handoffs) == (1, 1)
    world.dispatcher.prefilled(ticket, tokens=None, cached_tokens=None, engine_id=None)
    world.dispatcher.finish(ticket)
    found = world.live.document()
    assert [(each.prefill_requests, each.decode_requests) for each in found.workers] == [(0, 0), (0, 0)]


async def test_backlog_is_the_time_until_the_prefills_are_expected_to_be_done() -> None:
    world = World(1, 1)
    clock = Clock(world)
    ticket = world.prompt(tokens=8_000, mode=Mode.DISAGGREGATE)
    assert ticket.prefill_claim is not None
    expected_s = ticket.prefill_claim.work_s
    assert worker(world.live.document(), "10.0.0.1:8100").backlog_s == pytest.approx(expected_s, abs=0.001)
    clock.now_s += expected_s + 1
    assert worker(world.live.document(), "10.0.0.1:8100").backlog_s == 0


async def test_every_state_of_a_worker_has_its_word_and_its_reason() -> None:
    world = World(2, 4)
    clock = Clock(world)
    world.pool.set_live(world["10.0.1.1:8200"], False)
    world.pool.set_warming(world["10.0.1.2:8200"], True)
    world.state["warm_up"]["warming"] = {"10.0.1.2:8200": "with 10.0.0.1:8100: it answered 500"}
    leg = world["10.0.1.3:8200"].decode
    leg.failures, leg.blocked_until_s = 4, clock.now_s + 9
    kept = world["10.0.0.2:8100"].prefill.claim(tokens=1, work_s=0.1, now_s=clock.now_s, turn=1)
    world.pool.replace(EndpointSet((spec("prefill", 0),), tuple(spec("decode", number) for number in range(4))))
    states = {each.address: (each.state, each.why) for each in world.live.document().workers}
    assert states["10.0.1.1:8200"][0] == "down"
    assert states["10.0.1.2:8200"] == ("warming", "with 10.0.0.1:8100: it answered 500")
    assert states["10.0.1.3:8200"] == ("failing", "4 failures in a row; left alone for 9.0 s")
    assert states["10.0.0.2:8100"][0] == "leaving"
    assert states["10.0.1.4:8200"] == ("live", None)
    kept.release(clock.now_s)


async def test_rates_are_the_events_of_the_last_seconds() -> None:
    world = World(2, 2)
    clock = Clock(world)
    for _ in range(20):
        world.prompt(tokens=400, mode=Mode.DISAGGREGATE)
    world.recent.answered(429)
    world.recent.answered(503)
    clock.now_s += 2
    rates = world.live.document().rates
    handed_over = sum(each.count for each in world.live.document().pairs)
    assert (rates.requests_per_s, rates.refused_per_s, rates.errors_per_s) == (2.0, 0.1, 0.1)
    assert rates.handoffs_per_s == handed_over / 10


async def test_the_queue_is_as_long_as_the_routers_and_says_who_waits_longest() -> None:
    world = World(1, 1)
    clock = Clock(world)
    for _ in range(4):
        world.prompt(tokens=14_000, mode=Mode.DISAGGREGATE)
    clock.now_s += 1.5
    queue = world.live.document().queue
    waiting = world.router.queue
    assert queue.requests == len(waiting) > 0
    assert queue.work_s == pytest.approx(waiting.queued_s, abs=0.001)
    assert queue.longest_wait_s == 1.5


async def test_a_decision_has_every_candidate_with_its_terms_and_why_it_lost() -> None:
    world = World(3, 3)
    Clock(world)
    world.prompt(tokens=6_000, request_id="a-request")
    (decision,) = world.live.document().decisions
    assert (decision.request_id, decision.policy, decision.prompt_tokens) == ("a-request", "interactive", 6_000)
    first, *others = world.dispatcher.decisions(1)[0]["decision"]["candidates"]
    pair = first["prefill"], first["decode"]
    noted = [first, *(each for each in others if (each["prefill"], each["decode"]) != pair)]
    assert [(each.prefill, each.decode) for each in decision.candidates] == [
        (each["prefill"], each["decode"]) for each in noted
    ]
    assert decision.candidates[0].why is None
    assert len(decision.candidates) > 1
    assert all(each.why for each in decision.candidates[1:])
    for shown, kept in zip(decision.candidates, noted, strict=True):
        for name, value in kept["terms"].items():
            assert shown.terms_ms.get(name.removesuffix("_s"), 0.0) == pytest.approx(value * 1e3, abs=0.006)


async def test_a_second_try_shows_in_a_decision_that_was_shown_before() -> None:
    world = World(2, 1)
    Clock(world)
    ticket = world.prompt(tokens=2_000, mode=Mode.DISAGGREGATE)
    first = world.live.document().decisions[0].prefill
    assert first is not None
    world.dispatcher.prefill_failed(ticket, blame=True)
    world.dispatcher.prefill_again(ticket, [first])
    again = world.live.document().decisions[0]
    assert (again.prefill != first, again.reason) == (True, "retry")


async def test_the_times_of_clients_are_shown_and_without_them_the_engines_own() -> None:
    world = World(1, 2)
    Clock(world)
    assert world.live.document().times == doc.TimesNow(window_s=60.0)
    world.dispatcher.on_load("10.0.1.1:8200", Load(running=3.0, itl_s=0.02))
    world.dispatcher.on_load("10.0.1.2:8200", Load(running=1.0, itl_s=0.04))
    itl = world.live.document().times.itl
    assert itl is not None
    assert (itl.source, itl.mean_s) == ("engines", pytest.approx(0.025))
    some = {"p50_s": 0.2, "p90_s": 0.4, "p99_s": 0.9, "samples": 70}
    world.times = {
        "window_s": 60.0,
        "source": "envoy access log",
        "ttft": some,
        "itl": {**some, "p50_s": 0.021},
        "by": [
            {
                "source": "envoy access log",
                "model": "m",
                "policy": "interactive",
                "mode": "disaggregate",
                "answers": answers,
                "ttft": some,
                "itl": None,
            }
            for answers in range(40)
        ],
    }
    times = world.live.document().times
    assert times.ttft is not None and times.itl is not None
    assert (times.ttft.source, times.ttft.p99_s, times.ttft.samples) == ("envoy access log", 0.9, 70)
    assert times.itl.p50_s == 0.021
    assert [each.answers for each in times.by] == list(range(39, 19, -1)), "bounded, those with the most answers"


async def test_the_history_is_five_minutes_however_long_the_filter_runs() -> None:
    world = World(1, 1)
    Clock(world)
    for _ in range(500):
        world.live.note()
    history = world.live.document().history
    assert history.step_s * len(history.queue_requests) == 300
    assert {len(getattr(history, name)) for name in doc.History.__struct_fields__ if name != "step_s"} == {150}


async def test_the_document_is_made_at_most_twice_a_second_however_many_look() -> None:
    world = World(1, 1)
    clock = Clock(world)
    made = []
    make = world.live.document
    world.live.document = lambda: made.append(1) or make()  # type: ignore[method-assign, func-returns-value]
    for _ in range(100):
        world.live.render()
        clock.now_s += 0.01
    assert len(made) == 2


async def test_the_document_is_bounded_with_more_of_everything_than_it_may_hold() -> None:
    long = "x" * 5_000
    specs = EndpointSet(
        tuple(EndpointSpec(address=f"p{n}", labels={f"{n} {long}": long for n in range(30)}) for n in range(700)),
        tuple(EndpointSpec(address=f"d{n}", models=[long] * 50) for n in range(700)),
    )
    world = World(specs=specs)
    clock = Clock(world)
    for number in range(2_000):
        world.recent.handed_over(f"p{number % 700}", f"d{number}")
    for _ in range(100):
        world.prompt(tokens=300, request_id=long, mode=Mode.DISAGGREGATE)
    world.state["why"] = long
    world.state["discovery"] = [{"source": "dns", "name": long, "endpoints": None, "error": long}] * 500
    world.state["cache_servers"] = {f"c{number}": {"up": False, "fault": long} for number in range(500)}
    world.state["warm_up"]["failing"] = [{"prefill": "p", "decode": "d", "reason": long}] * 500
    clock.now_s += 1
    body = world.live.render()
    found = msgspec.json.decode(body, type=doc.Live)
    assert (len(found.workers), found.workers_left_out) == (doc.WORKERS_MOST, 400)
    assert len(found.pairs) == doc.PAIRS_MOST
    assert found.pairs_left_out == len(world.recent.pairs()) - doc.PAIRS_MOST
    assert len(found.decisions) == doc.DECISIONS_MOST
    assert len(body) < 6 << 20


async def test_nothing_of_a_request_but_its_id_is_in_the_document() -> None:
    world = World(2, 2)
    Clock(world)
    world.prompt(tokens=900, tenant="tenant-secret", session="session-secret")
    body = world.live.render().decode()
    assert "request-000001" in body
    assert "secret" not in body


def test_a_filter_without_workers_says_so() -> None:
    world = World(specs=EndpointSet())
    world.state["why"] = "a role has no live worker"
    found = Live(
        world.config, world.dispatcher, world.recent, lambda: (False, world.state), log=make_logger("error")
    ).document()
    assert (found.filter.ready, found.filter.why, found.workers) == (False, "a role has no live worker", [])
