"""Prompts that wait: who goes next, to which worker, and who is turned away."""

from __future__ import annotations

import math

import pytest

from extproc.routing.endpoint_spec import EndpointSpec
from extproc.routing.job import Late, Mode
from extproc.routing.ticket import RejectedError, State, Ticket
from tests.unit.routing_world import World, chain, placed, pool_of, prefills, specs, tailed

STEP = 8000
WORK_S = 0.8
"""What a prompt of one step takes at first guess."""


def one_worker(**settings) -> World:
    """One prefill worker that computes 10,000 tokens/s."""
    return World(pool_of(1, 2), **{"step_tokens": STEP} | settings)


def serve(w: World, open_: list[Ticket], seconds: float, work_s: float = WORK_S) -> list[Ticket]:
    """The workers reply ``work_s`` after each was sent, in turn, for so long; who was placed, in order."""
    served = []
    until_s = w.now_s + seconds
    while True:
        sent = [ticket for ticket in open_ if placed(ticket) and ticket.prefill is not None and ticket.prefill_claim.leg]
        ready_s = min((ticket.sent_s + work_s for ticket in sent), default=math.inf)
        wake_s = w.router.next_wake_s() or math.inf
        w.now_s = max(w.now_s, min(ready_s, wake_s))
        if w.now_s > until_s:
            w.now_s = until_s
            return served
        for ticket in sent:
            if ticket.sent_s + work_s <= w.now_s:
                w.router.prefill_done(ticket, w.now_s)
                w.router.finish(ticket, w.now_s)
        served += [ticket for ticket in w.poll() if placed(ticket)]


# -- waiting at all --------------------------------------------------------------------------------------------------------


def test_an_idle_pool_makes_nobody_wait() -> None:
    w = World()
    ticket = w.apart(STEP)
    assert placed(ticket)
    assert (ticket.decision.queued_s, ticket.waiting, w.router.next_wake_s()) == (0.0, None, None)


def test_a_worker_gets_the_next_prompt_when_its_step_has_room_not_before() -> None:
    w = one_worker()
    first, second, third = (w.apart(3000) for _ in range(3))
    assert [placed(ticket) for ticket in (first, second, third)] == [True, True, False]
    assert w.prefilled(first) == [third]
    assert placed(third)


def test_a_prompt_larger_than_a_step_goes_to_a_worker_that_has_nothing_else() -> None:
    w = one_worker()
    first = w.apart(100)
    large = w.apart(50_000)
    assert not placed(large)
    assert w.prefilled(first) == [large]


def test_a_workers_own_step_counts_before_the_setting() -> None:
    w = World(pool_of(specs("p", 1, max_batched_tokens=2000), 1), step_tokens=STEP)
    assert [placed(w.apart(1500)) for _ in range(2)] == [True, False]


def test_dispatch_immediate_holds_nobody_by_setting_or_by_policy() -> None:
    assert all(placed(one.apart(STEP)) for one in [one_worker(dispatch="immediate")] for _ in range(5))
    assert all(placed(one.apart(STEP, held=False)) for one in [one_worker()] for _ in range(5))


def test_the_decision_says_how_long_it_waited_and_behind_how_many() -> None:
    w = one_worker()
    first = w.apart(STEP)
    second, third = w.apart(STEP), w.apart(STEP)
    w.now_s += 0.75
    w.prefilled(first)
    w.now_s += 0.75
    w.prefilled(second)
    assert (third.decision.queued_s, third.decision.position) == (1.5, 1)
    assert ";queued-ms=1500.0;position=1;" in third.decision.header()
    assert "position" not in first.decision.header()


def test_a_hung_worker_does_not_hold_up_the_queue_for_the_others() -> None:
    w = World(pool_of(2, 1), step_tokens=STEP)
    hung, well = w.apart(STEP), w.apart(STEP)
    waiting = [w.apart(STEP) for _ in range(3)]
    assert not any(map(placed, waiting))
    w.now_s += 1.0
    w.prefilled(well)
    for ticket in waiting:
        assert placed(ticket)
        assert ticket.prefill is well.prefill is not hung.prefill
        w.now_s += 1.0
        w.prefilled(ticket)


def test_requests_of_others_on_the_worker_count_while_their_report_is_fresh() -> None:
    w = one_worker(stale_s=3.0)
    w.reports("p0", running=40, waiting=0)
    ticket = w.apart(STEP)
    assert not placed(ticket)
    w.wait(2.0)
    assert not placed(ticket)
    w.wait(2.0)
    assert placed(ticket)


# -- order -----------------------------------------------------------------------------------------------------------------


def test_those_on_time_go_in_the_order_in_which_they_came() -> None:
    w = one_worker()
    open_ = [w.apart(STEP, ttft_slo_s=1000.0) for _ in range(6)]
    assert serve(w, open_, 6.0) == open_[1:]


def test_who_can_still_make_it_goes_before_who_cannot() -> None:
    w = one_worker()
    first = w.apart(STEP)
    late = w.apart(STEP, ttft_slo_s=0.5)
    on_time = w.apart(STEP, ttft_slo_s=5.0)
    assert serve(w, [first, late, on_time], 3.0) == [on_time, late]


def test_a_prompt_becomes_late_while_it_waits() -> None:
    w = one_worker()
    first = w.apart(STEP)
    patient = w.apart(STEP, ttft_slo_s=1.8)
    w.now_s += 2.0
    fresh = w.apart(STEP, ttft_slo_s=2.5)
    w.prefilled(first)
    assert (placed(fresh), placed(patient)) == (True, False)


def test_a_lower_priority_number_goes_first_even_if_it_is_late() -> None:
    w = one_worker()
    first = w.apart(STEP)
    usual = w.apart(STEP, ttft_slo_s=100.0)
    urgent = w.apart(STEP, priority=-1, ttft_slo_s=0.1)
    assert serve(w, [first, usual, urgent], 3.0) == [urgent, usual]


def test_the_oldest_late_one_gets_a_share_so_that_nobody_starves_behind_a_stream_of_others() -> None:
    w = one_worker(queue_wait_s=30.0)
    open_ = [w.apart(STEP)]
    late = w.apart(STEP, ttft_slo_s=0.5)
    open_.append(late)
    while not placed(late) and w.now_s < 140:
        # Always someone who can still make it.
        open_.append(w.apart(STEP, ttft_slo_s=5.0))
        serve(w, open_, WORK_S)
    assert placed(late)
    assert late.decision.queued_s < 30.0 * 0.5


# -- the owner of a prefix -------------------------------------------------------------------------------------------------


def test_a_prompt_waits_a_little_for_the_worker_that_holds_its_prefix() -> None:
    w = World(pool_of(2, 1), step_tokens=STEP)
    w.warm("p0", "talk", 20_000)
    owner_busy = w.apart(STEP, text="talk")
    assert prefills([owner_busy]) == ["p0"]
    w["p0"].prefill.claim(tokens=STEP, work_s=0.5, now_s=w.now_s, turn=0)
    ticket = w.apart(20_000, "talk")
    assert not placed(ticket), "p1 is idle, but would need two seconds"


def test_it_does_not_wait_for_an_owner_that_is_busy_for_long() -> None:
    w = World(pool_of(2, 1), step_tokens=STEP)
    w.warm("p0", "talk", 20_000)
    w["p0"].prefill.claim(tokens=200_000, work_s=20.0, now_s=w.now_s, turn=0)
    assert prefills([w.apart(20_000, "talk")]) == ["p1"]


def test_the_next_in_line_does_not_wait_for_somebody_elses_owner() -> None:
    w = World(pool_of(2, 1), step_tokens=STEP)
    w.warm("p0", "talk", 20_000)
    w["p0"].prefill.claim(tokens=STEP, work_s=1.0, now_s=w.now_s, turn=0)
    waits = w.apart(20_000, "talk")
    other = w.apart(STEP)
    assert (placed(waits), prefills([other])) == (False, ["p1"])


def test_a_prompt_that_waits_learns_that_another_one_brought_its_prefix_to_a_worker() -> None:
    w = World(pool_of(1, 1), step_tokens=STEP)
    first = w.apart(STEP, chain=tailed("system", 4000, "a", STEP))
    second = w.apart(STEP, chain=tailed("system", 4000, "b", STEP))
    third = w.apart(16_000, chain=chain("system", 16_000))
    w.prefilled(first)
    assert second.decision.cached_tokens == pytest.approx(4000, abs=64)
    w.prefilled(second)
    assert third.decision.cached_tokens == pytest.approx(4000, abs=64)


# -- tenants ---------------------------------------------------------------------------------------------------------------


def two_tenants(weights: tuple[float, float], seconds: float = 60.0) -> tuple[World, list[Ticket]]:
    """``flood`` has 200 prompts in the queue from the beginning, ``modest`` sends one every two seconds."""
    w = one_worker(queue_wait_s=1000.0, aged_share=0.1)
    fields = {"max_wait_s": 1000.0, "ttft_slo_s": 2.5}
    open_ = [w.apart(STEP, tenant="flood", weight=weights[0], **fields) for _ in range(200)]
    for _ in range(int(seconds / 2)):
        open_.append(w.apart(STEP, tenant="modest", weight=weights[1], **fields))
        serve(w, open_, 2.0)
    return w, open_


def test_a_modest_tenant_hardly_notices_that_another_floods() -> None:
    _, open_ = two_tenants((1.0, 1.0))
    modest = [ticket for ticket in open_ if ticket.job.tenant == "modest"]
    waits_s = [ticket.decision.queued_s for ticket in modest if ticket.decision is not None]
    assert len(waits_s) >= len(modest) - 2
    assert max(waits_s) < 10.0, "the one that came with the flood: the other tenant has 160 s of work in the queue"
    assert max(waits_s[1:]) < 1.7, "all the others are on time"


@pytest.mark.parametrize("weights", [(1.0, 1.0), (3.0, 1.0), (1.0, 2.0)])
def test_shares_of_the_work_approach_the_weights_where_both_want_more_than_they_get(weights: tuple[float, float]) -> None:
    w = one_worker(queue_wait_s=10_000.0, tenant_quantum_s=1.0)
    fields = {"max_wait_s": 10_000.0, "deadline_s": 1e6}
    open_ = [
        w.apart(STEP, tenant=tenant, weight=weight, **fields)
        for _ in range(100)
        for tenant, weight in zip("ab", weights, strict=True)
    ]
    served = serve(w, open_, 64.0)
    share = sum(ticket.job.tenant == "a" for ticket in served) / len(served)
    assert len(served) > 70
    assert share == pytest.approx(weights[0] / sum(weights), abs=0.08)


def test_who_asked_for_nothing_has_saved_nothing_up() -> None:
    w = one_worker(queue_wait_s=10_000.0)
    fields = {"max_wait_s": 10_000.0, "deadline_s": 1e6}
    open_ = [w.apart(STEP, tenant="a", **fields)]
    open_.append(w.apart(STEP, tenant="b", **fields))  # known, then silent
    open_ += [w.apart(STEP, tenant="a", **fields) for _ in range(150)]
    serve(w, open_, 60.0)
    late_comers = [w.apart(STEP, tenant="b", **fields) for _ in range(50)]
    served = serve(w, open_ + late_comers, 16.0)
    assert 0.3 < sum(ticket in late_comers for ticket in served) / len(served) < 0.75


def test_tenants_share_within_a_priority_not_across() -> None:
    w = one_worker()
    open_ = [w.apart(STEP, tenant="a")]
    open_ += [w.apart(STEP, tenant="a", priority=0, ttft_slo_s=100.0) for _ in range(3)]
    open_ += [w.apart(STEP, tenant="b", priority=1, ttft_slo_s=100.0) for _ in range(3)]
    assert [ticket.job.tenant for ticket in serve(w, open_, 5.5)] == list("aaabbb")


# -- several models ---------------------------------------------------------------------------------------------------------


def two_models(**settings) -> World:
    """Each model has a prefill worker and a decode worker of its own."""

    def of(letter: str) -> list[EndpointSpec]:
        return [EndpointSpec(address=f"{letter}-{name}", models=[name]) for name in "ab"]

    return World(pool_of(of("p"), of("d")), **{"step_tokens": STEP} | settings)


@pytest.mark.parametrize("slo_s", [1000.0, 0.1])
def test_however_many_wait_for_one_model_the_next_one_for_another_is_found(slo_s: float) -> None:
    w = two_models(window=8)
    first = w.apart(STEP, model="b")
    flood = [w.apart(STEP, model="a", ttft_slo_s=slo_s) for _ in range(50)]
    waiting = w.apart(STEP, model="b", ttft_slo_s=slo_s)
    assert [placed(each) for each in (first, flood[0], waiting)] == [True, True, False]
    w.poll()  # says who was placed by a submit
    assert w.prefilled(first) == [waiting]
    assert waiting.prefill is w["p-b"]
    w.prefilled(waiting)
    assert placed(w.apart(STEP, model="b")), "its worker has nothing to do"


def test_work_that_waits_for_one_model_does_not_count_as_a_wait_for_another() -> None:
    w = two_models()
    for _ in range(4):  # streams, which a prompt done whole beside them would hold up
        stream = w.apart(100, model="b")
        w.prefilled(stream)
    before = w.submit(STEP, model="b")
    w.prefilled(before)
    flood = [w.apart(STEP, model="a") for _ in range(50)]
    after = w.submit(STEP, model="b")
    assert (prefills([before, after]), placed(flood[-1])) == (["p-b", "p-b"], False)


def test_who_is_turned_away_is_told_of_the_wait_for_its_own_model_only() -> None:
    w = two_models(queue_requests=21)
    w.apart(STEP, model="b")
    for _ in range(21):
        w.apart(STEP, model="a")
    w.apart(STEP, model="b")
    retry_after_s = {}
    for model in "ab":
        with pytest.raises(RejectedError) as caught:
            w.apart(STEP, model=model)
        retry_after_s[model] = caught.value.retry_after_s
    assert retry_after_s == {"a": pytest.approx(20 * WORK_S), "b": 1.0}


def test_an_old_late_prompt_gets_its_share_although_the_worker_of_another_model_hangs() -> None:
    w = two_models(queue_wait_s=30.0)
    for _ in range(2):
        w.apart(STEP, model="a", ttft_slo_s=0.1)  # the first hangs, and the second is the oldest of all that wait
    open_ = [w.apart(STEP, model="b")]
    late = w.apart(STEP, model="b", ttft_slo_s=0.5)
    open_.append(late)
    while not placed(late) and w.now_s < 140:
        open_.append(w.apart(STEP, model="b", ttft_slo_s=5.0))
        serve(w, open_, WORK_S)
    assert placed(late)
    assert late.decision.queued_s < 30.0 * 0.5


def test_an_adapter_and_its_base_share_workers_and_so_their_turns() -> None:
    w = World(pool_of(specs("p", 1, models=["base", "lora"]), specs("d", 2, models=["base", "lora"])), step_tokens=STEP)
    open_ = []
    for model in ("base", "base", "lora", "base", "lora"):
        open_.append(w.apart(STEP, model=model, ttft_slo_s=1000.0))
        w.now_s += 0.001
    assert w.router.scales.ahead_s(w.job(model="lora")) == pytest.approx(4 * WORK_S)
    assert serve(w, open_, 5.0) == open_[1:]


def test_labels_that_pin_prompts_to_other_workers_make_another_queue() -> None:
    gold = [EndpointSpec(address=f"p-{tier}", labels={"tier": tier}) for tier in ("gold", "free")]
    w = World(pool_of(gold, 2), step_tokens=STEP, window=8)
    for _ in range(50):
        w.apart(STEP, prefill_labels={"tier": "free"}, ttft_slo_s=1000.0)
    ticket = w.apart(STEP, prefill_labels={"tier": "gold"})
    assert (placed(ticket), ticket.prefill) == (True, w["p-gold"])


# -- limits ----------------------------------------------------------------------------------------------------------------


def test_the_queue_has_a_hard_limit_on_prompts_and_says_so() -> None:
    w = one_worker(queue_requests=3)
    for _ in range(4):
        w.apart(STEP)
    with pytest.raises(RejectedError, match="3 prompts wait already") as caught:
        w.apart(STEP)
    assert caught.value.reason == "queue_full"
    assert caught.value.retry_after_s > 0


def test_the_queue_has_a_hard_limit_on_bytes_that_counts_what_waits_only() -> None:
    w = one_worker(queue_bytes=1000)
    first = w.apart(STEP, size_bytes=900)
    second = w.apart(STEP, size_bytes=900)
    with pytest.raises(RejectedError, match=r"routing\.queue_bytes") as caught:
        w.apart(STEP, size_bytes=101)
    assert caught.value.reason == "queue_full"
    w.prefilled(first)
    assert placed(second)
    assert not placed(w.apart(STEP, size_bytes=1000))


@pytest.mark.parametrize(("limit", "setting", "waits_s"), [(5.0, 60.0, 5.0), (60.0, 7.0, 7.0)])
def test_nobody_waits_past_the_limit_of_the_policy_or_of_the_queue(limit: float, setting: float, waits_s: float) -> None:
    w = one_worker(queue_wait_s=setting)
    w.apart(STEP)
    ticket = w.apart(STEP, max_wait_s=limit)
    assert w.wait(waits_s - 0.01) == []
    assert w.wait(0.02) == [ticket]
    assert ticket.state is State.REJECTED
    assert isinstance(ticket.error, RejectedError)
    assert (ticket.error.reason, ticket.error.retry_after_s > 0) == ("queue_wait", True)


def test_no_prefill_begins_after_the_clients_patience() -> None:
    w = one_worker()
    first = w.apart(STEP)
    ticket = w.apart(STEP, deadline_s=w.now_s + 1.0)
    w.now_s += 1.5
    assert w.prefilled(first) == [ticket]
    assert isinstance(ticket.error, RejectedError)
    assert (ticket.error.reason, w["p0"].prefill.requests) == ("deadline", 0)


def test_a_policy_may_limit_how_many_of_its_requests_are_open_waiting_ones_included() -> None:
    w = one_worker()
    limited = {"policy": "free", "max_in_flight": 2}
    first, second = w.apart(STEP, **limited), w.apart(STEP, **limited)
    with pytest.raises(RejectedError, match="2 requests of policy 'free' are open") as caught:
        w.apart(STEP, **limited)
    assert (caught.value.reason, caught.value.retry_after_s > 0) == ("max_in_flight", True)
    w.apart(STEP, policy="paid")
    w.finish(second)
    third = w.apart(STEP, **limited)
    assert third.state is State.WAITING
    w.finish(first)
    w.finish(first)
    w.apart(STEP, **limited)
    with pytest.raises(RejectedError):
        w.apart(STEP, **limited)


def test_a_request_that_was_turned_away_counts_once_however_often_it_ends() -> None:
    w = one_worker()
    limited = {"policy": "free", "max_in_flight": 3}
    first = w.apart(STEP, **limited)
    tired = [w.apart(STEP, max_wait_s=1.0, **limited) for _ in range(2)]
    w.wait(1.0)
    assert [ticket.state for ticket in tired] == [State.REJECTED] * 2
    w.finish(*tired, *tired)
    assert w.router._in_flight == {"free": 1}
    w.finish(first)
    w.assert_empty()


# -- late ------------------------------------------------------------------------------------------------------------------


def test_late_reject_turns_away_at_once_who_cannot_make_it_and_says_what_to_expect() -> None:
    w = one_worker()
    w.apart(5 * STEP)
    with pytest.raises(RejectedError, match="the TTFT SLO is 2 s") as caught:
        w.apart(STEP, ttft_slo_s=2.0, late=Late.REJECT)
    assert (caught.value.reason, caught.value.retry_after_s > 0) == ("late", True)
    assert w.router._in_flight == {"default": 1}


def test_late_reject_turns_away_who_can_make_it_no_longer() -> None:
    w = one_worker()
    w.apart(STEP)
    ticket = w.apart(STEP, ttft_slo_s=3.0, late=Late.REJECT)
    assert ticket.state is State.WAITING
    rejected = [(each, round(w.now_s, 1)) for _ in range(20) for each in w.wait(0.2)]
    assert len(rejected) == 1
    assert rejected[0][0] is ticket
    assert 101 < rejected[0][1] < 103, "when it could not make it any more, not when its SLO was over"
    assert isinstance(ticket.error, RejectedError)
    assert ticket.error.reason == "late"


@pytest.mark.parametrize("at_once", [True, False])
def test_late_aggregate_lets_a_decode_worker_do_it_all(at_once: bool) -> None:
    w = one_worker()
    w.apart((5 if at_once else 1) * STEP)
    ticket = w.apart(STEP, ttft_slo_s=2.5, late=Late.AGGREGATE)
    if not at_once:
        assert ticket.state is State.WAITING
        for _ in range(20):
            w.wait(0.2)
    assert placed(ticket)
    assert (ticket.decision.prefill, ticket.decision.reason) == (None, "late")


def test_late_wait_waits() -> None:
    w = one_worker()
    w.apart(5 * STEP)
    ticket = w.apart(STEP, ttft_slo_s=2.0, late=Late.WAIT)
    w.wait(10.0)
    assert ticket.state is State.WAITING


# -- leaving ---------------------------------------------------------------------------------------------------------------


def test_a_cancelled_request_leaves_the_queue_at_once() -> None:
    w = one_worker()
    first = w.apart(STEP)
    gone, next_ = w.apart(STEP, size_bytes=5), w.apart(STEP, size_bytes=7)
    w.router.finish(gone, w.now_s)
    assert (len(w.router.queue), w.router.queue.bytes) == (1, 7)
    assert w.prefilled(first) == [next_]
    w.finish(first, next_, gone)
    w.assert_empty()
    assert w.router.next_wake_s() is None


# -- decode workers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [{"max_seqs": 1}, {"kv_tokens": 10_000}])
@pytest.mark.parametrize("mode", [Mode.DISAGGREGATE, Mode.AGGREGATE, Mode.AUTO])
def test_full_decode_workers_hold_the_queue_and_it_goes_on_when_one_ends(limit: dict[str, int], mode: Mode) -> None:
    w = World(pool_of(4, specs("d", 2, **limit)))
    running = [w.submit(STEP, mode=mode) for _ in range(2)]
    for ticket in running:
        w.router.prefill_done(ticket, w.now_s)
    waiting = [w.submit(STEP, mode=mode) for _ in range(3)]
    assert w.wait(1.0) == []
    assert not any(map(placed, waiting))
    assert w.finish(running[0]) == [waiting[0]]
    assert waiting[0].decode is running[0].decode


def test_kv_in_use_that_is_not_ours_keeps_prompts_away_from_a_decode_worker_while_its_report_is_fresh() -> None:
    w = World(pool_of(2, specs("d", 1, kv_tokens=100_000, max_seqs=100)), stale_s=3.0)
    w.reports("d0", running=20, waiting=0, kv_usage=0.9)  # another filter's
    ticket = w.apart(STEP)
    assert not placed(ticket)
    w.reports("d0", running=10, waiting=0, kv_usage=0.5)
    assert w.poll() == [ticket]
    w.reports("d0", running=20, waiting=0, kv_usage=0.99)
    other = w.apart(STEP)
    assert w.wait(2.5) == []
    assert w.wait(1.0) == [other]


def test_kv_in_use_that_we_count_ourselves_is_not_counted_again() -> None:
    w = World(pool_of(2, specs("d", 1, kv_tokens=100_000, max_seqs=100)))
    for _ in range(5):
        w.prefilled(w.apart(STEP))
    w.reports("d0", running=5, waiting=0, kv_usage=0.4)
    assert w.router.costs.held_tokens(w["d0"], w.now_s) == w["d0"].decode.tokens
    assert placed(w.apart(STEP))


def test_a_short_prompt_that_had_to_wait_for_a_decode_worker_is_not_handed_over_either() -> None:
    w = World(pool_of(2, specs("d", 1, max_seqs=1)))
    running = w.submit(100)
    waiting = w.submit(100)
    assert not placed(waiting)
    w.finish(running)
    assert placed(waiting)
    assert waiting.decision.prefill is None


def test_immediate_prompts_do_not_wait_for_room_on_decode_workers() -> None:
    w = World(pool_of(2, specs("d", 1, max_seqs=1)))
    assert all(placed(w.apart(100, held=False)) for _ in range(4))


def test_a_late_prompt_gets_every_worker_of_its_model_while_prompts_for_other_models_keep_coming() -> None:
    workers = [*specs("p", 3, models=["slow"]), *specs("q", 3, models=["busy"])]
    w = World(pool_of(workers, specs("d", 2)), step_tokens=STEP)
    first = [w.apart(20_000, model="slow") for _ in range(9)]
    for _ in range(400):
        w.now_s += 0.01
        w.router.scales.arrivals.note("busy", w.now_s)
    for ticket in first[:3]:
        w.router.prefill_done(ticket, w.now_s)
    w.poll()
    assert on_prompts(w) == 3
    for _ in range(100):  # some that share the workers
        w.router.scales.arrivals.note("slow", w.now_s)
        w.now_s += 0.01
    for ticket in [ticket for ticket in first if placed(ticket) and ticket.prefill_claim.leg]:
        w.router.prefill_done(ticket, w.now_s)
    w.poll()
    assert on_prompts(w) == 1


def when_three_workers_get_free(*, others_come: bool) -> World:
    """Three workers, and nine prompts of two seconds at once: when the first three are done, the others are late."""
    w = World(pool_of(3, 2), step_tokens=STEP, prefill_tokens_per_s=10_000.0)
    first = [w.apart(20_000) for _ in range(9)]
    for _ in range(400):
        w.now_s += 0.01
        if others_come:
            w.router.scales.arrivals.note(None, w.now_s)
    for ticket in first[:3]:
        w.router.prefill_done(ticket, w.now_s)
    w.poll()
    return w


def on_prompts(w: World) -> int:
    return sum(bool(each.prefill.claims) for each in w.pool.endpoints)


def test_late_prompts_leave_workers_to_those_that_come_and_can_make_it() -> None:
    w = when_three_workers_get_free(others_come=True)
    assert on_prompts(w) == 1
    assert placed(w.apart(4000))


def test_late_prompts_get_every_worker_when_nobody_else_comes() -> None:
    """A burst, then silence: workers that are kept free for nobody would only make the burst wait longer."""
    assert on_prompts(when_three_workers_get_free(others_come=False)) == 3
