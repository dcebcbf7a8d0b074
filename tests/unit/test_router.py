"""The whole decision, from submit() to finish(): what is counted, given back and learned, whatever happens in between."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.routing.endpoint_spec import EndpointSet, EndpointSpec
from extproc.routing.job import Late, Mode, Objective
from extproc.routing.picker import NoEndpointError
from extproc.routing.ticket import RejectedError, State, Ticket
from tests.unit.routing_world import World, placed, pool_of, prefills, specs

STEP = 8000


# -- the ledger ------------------------------------------------------------------------------------------------------------


def test_prefill_is_given_back_at_the_reply_and_decode_at_the_end() -> None:
    w = World(pool_of(1, 1))
    ticket = w.apart(STEP, answer_tokens=100)
    prefill, decode = w["p0"].prefill, w["d0"].decode
    assert (prefill.requests, prefill.tokens, decode.requests, decode.tokens) == (1, STEP, 1, STEP + 100)
    w.router.prefill_done(ticket, w.now_s)
    assert (prefill.requests, prefill.tokens, decode.requests, decode.tokens) == (0, 0, 1, STEP + 100)
    w.router.answered(ticket, w.now_s, ok=True)
    assert decode.requests == 1
    w.finish(ticket)
    w.assert_empty()


def test_prefill_counts_what_must_be_computed_not_what_is_cached() -> None:
    w = World(pool_of(1, 1))
    w.warm("p0", "talk", 6400)
    w.apart(STEP, "talk")
    assert w["p0"].prefill.tokens == STEP - 6400


def test_everything_may_be_said_twice() -> None:
    w = World(pool_of(1, 1))
    ticket, other = w.apart(3000), w.apart(3000)
    for _ in range(2):
        w.router.prefill_done(ticket, w.now_s)
        w.router.prefill_failed(ticket, w.now_s, blame=True)
    assert (w["p0"].prefill.requests, w["p0"].prefill.failures) == (1, 0)
    w.finish(ticket, ticket)
    assert (w["p0"].prefill.requests, w["d0"].decode.requests) == (1, 1)
    w.finish(other)
    w.assert_empty()


def test_a_reply_after_the_end_changes_nothing() -> None:
    w = World(pool_of(1, 1))
    ticket = w.apart()
    w.finish(ticket)
    w.router.prefill_done(ticket, w.now_s)
    w.router.prefill_failed(ticket, w.now_s, blame=True)
    assert w["p0"].prefill.failures == 0
    w.assert_empty()


def test_a_claim_that_leaked_is_given_back_after_the_longest_request_and_only_once() -> None:
    w = World(pool_of(1, 1))
    lost = w.apart(STEP)
    waiting = w.apart(STEP)
    w.now_s += 1000
    assert w.pool.expire(w.now_s - 900, w.now_s) == 2
    w.finish(lost, waiting)
    w.assert_empty()


# -- other workers ---------------------------------------------------------------------------------------------------------


def test_prefill_again_takes_another_worker_and_keeps_the_decode_worker() -> None:
    w = World(pool_of(3, 2))
    ticket = w.apart()
    first, decode = ticket.prefill, ticket.decode
    w.router.prefill_failed(ticket, w.now_s, blame=True)
    second = w.router.prefill_again(ticket, w.now_s, [first.address])
    assert second is ticket.prefill is not first
    assert (first.prefill.requests, second.prefill.requests) == (0, 1)
    assert (ticket.decode, ticket.decision.prefill, ticket.decision.reason) == (decode, second.address, "retry")
    w.router.prefill_failed(ticket, w.now_s, blame=True)
    third = w.router.prefill_again(ticket, w.now_s, [first.address, second.address])
    with pytest.raises(NoEndpointError):
        w.router.prefill_again(ticket, w.now_s, [each.address for each in (first, second, third)])
    w.finish(ticket)
    w.assert_empty()


def test_decode_again_takes_another_worker_and_moves_the_count() -> None:
    w = World(pool_of(1, 2))
    ticket = w.apart()
    gone = ticket.decode
    w.pool.set_live(gone, False)
    other = w.router.decode_again(ticket, w.now_s)
    assert other is ticket.decode is not gone
    assert (gone.decode.requests, other.decode.requests) == (0, 1)
    assert ticket.decision.decode == other.address
    w.pool.set_live(other, False)
    with pytest.raises(NoEndpointError, match="no decode worker"):
        w.router.decode_again(ticket, w.now_s)
    w.finish(ticket)
    w.assert_empty()


# -- what is learned -------------------------------------------------------------------------------------------------------


def test_where_a_prompt_went_its_continuation_is_expected_to_hit() -> None:
    w = World(pool_of(3, 3))
    first = w.apart(6400, "talk")
    w.prefilled(first)
    w.finish(first)
    again = w.apart(9600, "talk")
    assert again.prefill is first.prefill
    assert again.decision.cached_tokens == 6400


def test_a_prefill_that_failed_left_nothing_in_the_cache() -> None:
    w = World(pool_of(1, 1))
    first = w.apart(6400, "talk")
    w.router.prefill_failed(first, w.now_s, blame=True)
    assert w.apart(6400, "talk").decision.cached_tokens == 0


def test_predicted_and_reported_hits_are_both_counted() -> None:
    w = World(pool_of(1, 1))
    w.prefilled(w.apart(6400, "talk"), cached_tokens=0)
    w.prefilled(w.apart(9600, "talk"), cached_tokens=6000)
    assert (w.router.predicted_tokens, w.router.reported_tokens) == (6400, 6000)


def test_a_restart_clears_the_index_and_the_pairs_for_those_that_wait_too() -> None:
    w = World(pool_of(1, 1), step_tokens=STEP)
    first = w.apart(STEP, "talk")
    w.router.answered(first, w.now_s, ok=True)
    waiting = w.apart(16_000, "talk")
    assert w.router.costs.pairs.handshake_s("p0", "d0") == 0
    w.reports("p0", restarted=True)
    assert w.router.index.held("p0") == 0
    assert w.router.index.held("d0") > 0
    assert w.router.costs.pairs.handshake_s("p0", "d0") > 0
    w.prefilled(first)
    assert waiting.decision.cached_tokens == 0


def test_a_report_of_the_cache_size_limits_what_a_worker_is_taken_to_hold_unless_the_operator_said_so() -> None:
    w = World(pool_of([*specs("p", 1), *specs("q", 1, kv_tokens=64_000)], 1))
    for address in ("p0", "q0"):
        w.warm(address, "talk", 32_000)
        w.reports(address, kv_tokens=6400)
    assert (w.router.index.held("p0"), w.router.index.held("q0")) == (100, 500)
    assert (w["p0"].kv_tokens, w["q0"].kv_tokens) == (6400, 64_000)


def test_a_report_from_a_worker_that_is_not_in_the_pool_is_not_news() -> None:
    World().reports("10.9.9.9:1", running=1, restarted=True)


def test_own_requests_in_a_report_are_not_counted_as_those_of_others() -> None:
    w = World(pool_of(1, 1))
    tickets = [w.apart(1000) for _ in range(3)]
    w.reports("p0", running=2, waiting=1)
    w.reports("d0", running=3)
    assert (w["p0"].prefill.external_requests, w["d0"].decode.external_requests) == (0, 0)
    for ticket in tickets:
        w.router.prefill_done(ticket, w.now_s)
        w.router.finish(ticket, w.now_s)
    w.reports("p0", running=3)
    assert w["p0"].prefill.external_requests == 0, "what the report counts may have ended since"
    w.now_s += 1.0
    w.reports("p0", running=3)
    assert w["p0"].prefill.external_requests == 3


# -- the pool changes ------------------------------------------------------------------------------------------------------


def test_a_worker_that_comes_takes_from_the_queue() -> None:
    w = World(pool_of(1, 1), step_tokens=STEP)
    w.apart(STEP)
    waiting = w.apart(STEP)
    w.pool.replace(EndpointSet(prefill=specs("p", 2), decode=specs("d", 1)))
    w.router.sync()
    assert w.poll() == []
    w.pool.set_live(w["p1"], True)
    assert w.poll() == [waiting]
    assert prefills([waiting]) == ["p1"]


def test_workers_that_go_while_prompts_wait_for_them_lose_nobody() -> None:
    w = World(pool_of(2, 1), step_tokens=STEP)
    running = [w.apart(STEP) for _ in range(2)]
    waiting = [w.apart(STEP, max_wait_s=10.0) for _ in range(2)]
    w.pool.replace(EndpointSet(prefill=(EndpointSpec(address="p1"),), decode=specs("d", 1)))
    w.router.sync()
    on_p1 = next(ticket for ticket in running if ticket.prefill.address == "p1")
    assert w.prefilled(on_p1) == [waiting[0]]
    assert prefills(waiting[:1]) == ["p1"]
    w.pool.set_live(w["p1"], False)
    assert w.prefilled(waiting[0]) == []
    assert w.wait(10.0) == [waiting[1]]
    assert waiting[1].state is State.REJECTED
    w.finish(*running, *waiting)
    assert w.router.sweep() == ["p0"]
    w.assert_empty()


def test_what_is_forgotten_of_a_worker_that_went_is_all_of_it() -> None:
    w = World(pool_of(2, 1))
    w.warm("p1", "talk", 6400)
    w.router.costs.pairs.succeeded("p1", "d0")
    ticket = w.apart(6400, "talk")
    w.pool.replace(EndpointSet(prefill=specs("p", 1), decode=specs("d", 1)))
    w.prefilled(ticket)
    w.finish(ticket)
    assert w.router.sweep() == ["p1"]
    assert (w.router.index.held("p1"), w.router.costs.pairs.handshake_s("p1", "d0") > 0) == (0, True)


def test_an_idle_worker_that_goes_is_forgotten_at_once_so_that_the_next_one_at_its_address_counts_as_new() -> None:
    w = World(pool_of(2, 1))
    w.warm("p1", "talk", 6400)
    w.router.costs.pairs.succeeded("p1", "d0")
    w.reports("p1", running=0)
    for count in (1, 2):
        w.pool.replace(EndpointSet(prefill=specs("p", count), decode=specs("d", 1)))
        w.router.sync()
    assert (w.router.index.held("p1"), w.router.costs.pairs.handshake_s("p1", "d0") > 0) == (0, True)
    assert w.router.index.addresses() == ["p0", "d0", "p1"]


# -- time ------------------------------------------------------------------------------------------------------------------


def test_next_wake_is_none_while_nobody_waits() -> None:
    w = World()
    assert w.router.next_wake_s() is None
    w.apart()
    assert w.router.next_wake_s() is None


@pytest.mark.parametrize("late", Late)
def test_polling_at_the_wake_time_either_changes_something_or_moves_on_so_there_is_no_busy_loop(late: Late) -> None:
    w = World(pool_of(1, 1), step_tokens=STEP, queue_wait_s=20.0)
    stuck = w.apart(STEP)
    for number in range(20):
        w.submit(STEP, mode=Mode.DISAGGREGATE, late=late, ttft_slo_s=5.0 + number, tenant=str(number % 3))
    polls = changes = 0
    while (wake_s := w.router.next_wake_s()) is not None:
        w.now_s = max(w.now_s, wake_s)
        changed = w.poll()
        polls += 1
        changes += len(changed)
        after_s = w.router.next_wake_s()
        assert after_s is None or changed or after_s >= w.now_s + 0.1
        assert after_s is None or after_s > w.now_s
        assert polls < 300
    assert w.now_s <= 120.0 + 1e-6
    w.finish(stuck)


# -- everything at once ----------------------------------------------------------------------------------------------------

STEPS = st.lists(
    st.tuples(
        st.sampled_from("submit submit submit poll done failed again decode answered finish report live".split()),
        st.integers(0, 1 << 30),
        st.sampled_from((0.0, 0.0, 0.01, 0.3, 4.0, 40.0)),
    ),
    max_size=80,
)


def _submit(w: World, rng: random.Random) -> Ticket | None:
    try:
        return w.submit(
            rng.choice((10, 3000, 8000, 20_000)),
            rng.choice((None, "a", "b")),
            mode=rng.choice(list(Mode)),
            objective=rng.choice(list(Objective)),
            held=rng.random() < 0.8,
            ttft_slo_s=rng.choice((None, 0.5, 3.0)),
            itl_slo_s=rng.choice((None, 0.05)),
            late=rng.choice(list(Late)),
            max_wait_s=rng.choice((1.0, 60.0)),
            max_in_flight=rng.choice((None, 8)),
            policy=rng.choice(("x", "y")),
            tenant=rng.choice(("", "t", "u")),
            session=rng.choice(("", "s")),
            priority=rng.choice((0, 0, 1)),
            size_bytes=rng.choice((0, 10)),
            handoff=rng.random() < 0.9,
            model=rng.choice((None, "m")),
        )
    except (RejectedError, NoEndpointError):
        return None


def _step(w: World, what: str, ticket: Ticket, rng: random.Random) -> None:
    router, now_s = w.router, w.now_s
    endpoint = rng.choice(w.pool.endpoints)
    if what == "report":
        w.reports(endpoint.address, running=rng.choice((0, 1, 5)), waiting=0, restarted=rng.random() < 0.1)
    elif what == "live":
        w.pool.set_live(endpoint, rng.random() < 0.7)
    elif what == "finish":
        router.finish(ticket, now_s)
    elif ticket.state is not State.PLACED:
        return
    elif what == "done":
        router.prefill_done(ticket, now_s, cached_tokens=rng.choice((None, 0, 64)))
    elif what == "failed":
        router.prefill_failed(ticket, now_s, blame=rng.random() < 0.5)
    elif what == "answered":
        router.answered(ticket, now_s, ok=rng.random() < 0.5, pair_fault=rng.random() < 0.5)
    else:
        try:
            if what == "again" and ticket.decision.prefill is not None:
                router.prefill_again(ticket, now_s, [ticket.decision.prefill] if rng.random() < 0.5 else [])
            elif what == "decode":
                router.decode_again(ticket, now_s)
        except NoEndpointError:
            pass


@settings(max_examples=150, deadline=None)
@given(STEPS, st.sampled_from(((1, 1, 0), (2, 2, 0), (0, 0, 2), (1, 1, 1))))
def test_whatever_happens_nothing_is_lost_counted_twice_or_left_over(steps, roles) -> None:
    w = World(
        pool_of(roles[0], specs("d", roles[1], max_seqs=3), specs("b", roles[2], max_seqs=3)),
        step_tokens=STEP,
        queue_requests=6,
        queue_bytes=40,
        breaker_failures=2,
    )
    tickets: list[Ticket] = []
    settled: set[Ticket] = set()
    for what, seed, passed_s in steps:
        w.now_s += passed_s
        rng = random.Random(seed)
        if what == "submit":
            ticket = _submit(w, rng)
            tickets += [ticket] if ticket is not None else []
        elif what == "poll":
            settled.update(w.poll())
        elif tickets:
            _step(w, what, rng.choice(tickets), rng)
        for endpoint in w.pool.endpoints:
            for leg in (endpoint.prefill, endpoint.decode):
                assert leg.tokens == sum(claim.tokens for claim in leg.claims) >= 0
        waiting = [ticket for ticket in tickets if ticket.state is State.WAITING]
        assert len(w.router.queue) == len(waiting) <= 6
        assert w.router.queue.bytes == sum(ticket.job.size_bytes for ticket in waiting) <= 40
    # Time alone settles whoever waits: a place, or a refusal with its reason.
    while (wake_s := w.router.next_wake_s()) is not None:
        w.now_s = max(w.now_s, wake_s)
        settled.update(w.poll())
    for ticket in tickets:
        assert ticket.state is not State.WAITING
        if ticket.waiting is not None and ticket.state is State.PLACED:
            assert ticket in settled, "who waited is told"
        assert (ticket.error is not None) == (ticket.state is State.REJECTED)
        if ticket.decision is not None:
            assert math.isfinite(ticket.decision.candidates[0].cost)
            assert ticket.decision.queued_s <= 60.0 + 1e-6
    w.finish(*tickets)
    w.assert_empty()


def test_the_same_prompts_at_the_same_times_are_placed_the_same() -> None:
    def run() -> list[tuple[str | None, str | None]]:
        w, rng = World(pool_of(3, 3), step_tokens=STEP), random.Random(3)
        tickets: list[Ticket] = []
        for _ in range(200):
            w.now_s += rng.random() / 4
            tickets.append(w.submit(rng.choice((100, 4000, 16_000)), rng.choice("abcdef")))
            for ticket in tickets:
                if placed(ticket) and ticket.sent_s < w.now_s - 1:
                    w.router.prefill_done(ticket, w.now_s)
            w.poll()
        return [(None if t.decision is None else t.decision.prefill, t.decode and t.decode.address) for t in tickets]

    assert run() == run()
