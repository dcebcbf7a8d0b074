"""What a choice costs, term by term, and that looking at many workers at once says the same as looking at each."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.routing.cost import Costs
from extproc.routing.decision import Terms
from extproc.routing.job import Aims, Objective
from extproc.routing.load import Load
from extproc.routing.settings import Routing
from tests.unit.routing_world import World, pool_of, specs

TOKENS = 10_000


def world(**settings) -> World:
    return World(
        pool_of(2, 2),
        **{"prefill_tokens_per_s": 10_000.0, "kv_bytes_per_token": 1e5, "transfer_bytes_per_s": 1e9, "handshake_s": 0.25}
        | settings,
    )


def apart(w: World, cached_prefill: int = 0, cached_decode: int = 0, **fields) -> Terms:
    return w.router.costs.apart(w.job(TOKENS, **fields), w["p0"], w["d0"], cached_prefill, cached_decode, w.now_s)


def whole(w: World, cached: int = 0, **fields) -> Terms:
    return w.router.costs.whole(w.job(TOKENS, **fields), w["d0"], cached, w.now_s)


def busy(w: World, address: str, sequences: int, tokens: int = 100) -> None:
    for _ in range(sequences):
        w[address].decode.claim(tokens=tokens, work_s=0.0, now_s=w.now_s, turn=0)


def test_prefill_costs_what_the_prefill_worker_does_not_hold() -> None:
    assert apart(world()).prefill_s == pytest.approx(1.0)
    assert apart(world(), cached_prefill=9000).prefill_s == pytest.approx(0.1)


def test_transfer_costs_only_what_the_decode_worker_lacks() -> None:
    assert apart(world()).transfer_s == pytest.approx(1.0)
    assert apart(world(), cached_decode=9000).transfer_s == pytest.approx(0.1)
    assert apart(world(), cached_prefill=9000).transfer_s == pytest.approx(1.0), "what the prefill worker holds travels too"


def test_a_pair_pays_for_its_first_meeting_and_for_its_past() -> None:
    w = world()
    assert (apart(w).handshake_s, apart(w).penalty_s) == (0.25, 0.0)
    w.router.costs.pairs.succeeded("p0", "d0")
    assert apart(w).handshake_s == 0.0
    w.router.costs.pairs.failed("p0", "d0", w.now_s)
    assert apart(w).penalty_s > 1.0


def test_who_does_it_whole_transfers_nothing_but_holds_up_its_streams() -> None:
    w = world()
    busy(w, "d0", 4)
    terms = whole(w)
    assert (terms.transfer_s, terms.handshake_s, terms.overhead_s, terms.queue_prefill_s) == (0.0, 0.0, 0.0, 0.0)
    assert terms.stall_s == pytest.approx(4 * terms.prefill_s)


def test_the_queue_at_a_worker_is_what_is_in_flight_there_and_shrinks_with_time() -> None:
    w = world()
    w["p0"].prefill.claim(tokens=20_000, work_s=2.0, now_s=w.now_s, turn=0)
    assert apart(w).queue_prefill_s == pytest.approx(2.0)
    w.now_s += 1.5
    assert apart(w).queue_prefill_s == pytest.approx(0.5)


def test_what_is_overdue_is_expected_to_take_as_long_again() -> None:
    w = world()
    claim = w["p0"].prefill.claim(tokens=20_000, work_s=2.0, now_s=w.now_s, turn=0)
    w.now_s += 12.0
    assert w.router.costs.backlog_s(w["p0"], w.now_s) == pytest.approx(10.0)
    claim.release(w.now_s)
    assert w.router.costs.backlog_s(w["p0"], w.now_s) == 0.0


def test_requests_of_others_count_as_typical_ones_and_only_while_the_report_is_fresh() -> None:
    w = world(stale_s=5.0)
    w.reports("p0", running=2, waiting=1)
    w.reports("d0", running=10)
    costs = w.router.costs
    assert costs.backlog_s(w["p0"], w.now_s) == pytest.approx(3 * costs.prefill_rate(w["p0"]).seconds(2048), rel=0.01)
    assert costs.outstanding_tokens(w["p0"], w.now_s) == pytest.approx(3 * 2048)
    assert costs.sequences(w["d0"], w.now_s) == 10
    w.now_s += 5.1
    assert costs.backlog_s(w["p0"], w.now_s) == costs.outstanding_tokens(w["p0"], w.now_s) == 0
    assert costs.sequences(w["d0"], w.now_s) == 0


def test_a_worker_has_been_at_the_requests_of_others_since_it_reported_them() -> None:
    w = world(stale_s=5.0)
    w.reports("p0", running=3)
    each_s = w.router.costs.prefill_rate(w["p0"]).seconds(2048)
    w.now_s += 2 * each_s
    assert w.router.costs.backlog_s(w["p0"], w.now_s) == pytest.approx(each_s)
    assert w.router.costs.outstanding_tokens(w["p0"], w.now_s) == pytest.approx(2048)
    w.now_s += 2 * each_s
    assert w.router.costs.backlog_s(w["p0"], w.now_s) == w.router.costs.outstanding_tokens(w["p0"], w.now_s) == 0


def test_a_decode_worker_is_full_by_sequences_or_by_kv_tokens() -> None:
    w = World(pool_of(1, specs("d", 2, max_seqs=4, kv_tokens=10_000)), kv_headroom=0.9)
    costs = w.router.costs
    busy(w, "d0", 3)
    assert not costs.full(w["d0"], 100, w.now_s)
    busy(w, "d0", 1)
    assert costs.full(w["d0"], 100, w.now_s)
    busy(w, "d1", 1, tokens=8000)
    assert not costs.full(w["d1"], 1000, w.now_s)
    assert costs.full(w["d1"], 1001, w.now_s)


def test_an_empty_decode_worker_takes_what_no_worker_has_room_for_so_that_the_engine_can_say_so() -> None:
    w = World(pool_of(1, specs("d", 1, kv_tokens=1000)))
    assert not w.router.costs.full(w["d0"], 1_000_000, w.now_s)


def test_an_answer_costs_more_where_the_batch_is_larger_and_more_still_where_it_does_not_fit() -> None:
    w = World(pool_of(1, specs("d", 1, max_seqs=8)))
    lonely = whole(w)
    busy(w, "d0", 7)
    fits = whole(w)
    busy(w, "d0", 5)
    waits = whole(w)
    assert lonely.generation_s < fits.generation_s < waits.generation_s
    assert lonely.queue_decode_s == fits.queue_decode_s == 0.0 < waits.queue_decode_s


def test_a_request_that_caps_its_answer_is_expected_to_be_as_long_as_that_but_not_for_ever() -> None:
    w = world()
    costs = w.router.costs
    assert costs.answer_tokens(w.job(answer_tokens=10)) == 10
    assert costs.answer_tokens(w.job()) == 256
    assert costs.answer_tokens(w.job(answer_tokens=1_000_000)) == 1024


def test_the_longest_stall_is_one_step_of_the_prefill_not_all_of_it() -> None:
    w = world(step_tokens=2000)
    busy(w, "d0", 1)
    stall_s = w.router.costs.longest_stall_s(w.job(TOKENS), w["d0"], 0, w.now_s)
    assert stall_s == pytest.approx(0.2 + w.router.costs.decode_rate(w["d0"]).itl_s(1, w["d0"].decode.tokens))


def test_ttft_counts_only_the_requests_own_time_throughput_only_work_balanced_both() -> None:
    terms = Terms(queue_prefill_s=5.0, prefill_s=1.0, transfer_s=0.5, stall_s=3.0, generation_s=2.0)
    costs = Costs(Routing(hold=2.0))
    assert costs.total(Aims(objective=Objective.TTFT), terms, pressure=1.0) == pytest.approx(6.5)
    throughput = costs.total(Aims(objective=Objective.THROUGHPUT), terms, pressure=1.0)
    assert throughput == pytest.approx(6.5, abs=0.1)
    assert costs.total(Aims(), terms, pressure=0.0) == pytest.approx(11.5)
    assert costs.total(Aims(), terms, pressure=1.0) == pytest.approx(13.5), "work counts more while the pool is busy"


def test_a_worker_that_never_prefilled_counts_as_fast_as_one_that_did_unless_the_operator_said_so() -> None:
    w = World(pool_of([*specs("p", 2), *specs("q", 1, prefill_tokens_per_s=5000.0)], 1), prefill_tokens_per_s=10_000.0)
    costs = w.router.costs
    for worker in ("p0", "p1", "d0", "q0"):
        costs.prefill_rate(w[worker])  # to have been asked about is not to have been seen
    for second in range(200):
        costs.prefilled(w["p0"], sent_s=second, now_s=second + 0.5, uncached=1000, cached=0)
    assert costs.prefill_rate(w["p1"]).seconds(1000) == pytest.approx(0.5, rel=0.1)
    assert costs.prefill_rate(w["d0"]).seconds(1000) == pytest.approx(0.5, rel=0.1)
    assert costs.prefill_rate(w["q0"]).seconds(1000) == pytest.approx(0.2, rel=0.1)
    costs.forget(["p0"])
    assert costs.prefill_rate(w["p0"]).seconds(1000) == pytest.approx(0.5, rel=0.1)


def test_reports_teach_the_speed_of_decoding_and_of_transfers() -> None:
    w = world()
    for _ in range(200):
        w.router.costs.reported(w["d0"], Load(running=1, itl_s=0.1, transfer_s=0.1, transfer_bytes=1e9))
    assert w.router.costs.decode_rate(w["d0"]).itl_s(1) == pytest.approx(0.1, rel=0.05)
    assert w.router.costs.transfer_rate(w["d0"]).seconds(1e9) == pytest.approx(0.1, rel=0.1)
    assert w.router.costs.transfer_rate(w["d1"]).seconds(1e9) == pytest.approx(1.0)


LEGS = st.lists(
    st.tuples(
        st.integers(0, 5),  # claims
        st.floats(0, 3),  # work of each
        st.sampled_from((0.0, 0.0, 1.0, 2.5)),  # requests of others
        st.floats(0, 10),  # since the report
        st.sampled_from((None, 2, 4)),  # max_seqs
        st.sampled_from((None, 500)),  # kv_tokens
    ),
    min_size=1,
    max_size=8,
)


@given(LEGS, st.floats(0, 10), st.integers(1, 1000))
def test_many_workers_looked_at_together_are_judged_as_each_alone(legs, passed_s: float, need: int) -> None:
    w = World(pool_of(len(legs), len(legs)))
    for number, (claims, work_s, others, since_s, max_seqs, kv_tokens) in enumerate(legs):
        prefill, decode = w[f"p{number}"], w[f"d{number}"]
        decode.max_seqs, decode.kv_tokens = max_seqs, kv_tokens
        for leg in (prefill.prefill, decode.decode):
            for turn in range(claims):
                leg.claim(tokens=100, work_s=work_s, now_s=w.now_s, turn=turn)
            leg.external_requests, leg.external_s = others, w.now_s + passed_s - since_s
    now_s, costs = w.now_s + passed_s, w.router.costs
    prefills = [w[f"p{number}"] for number in range(len(legs))]
    assert costs.with_backlog(prefills, now_s) == [
        (costs.backlog_s(each, now_s), each.prefill.turn, number, each) for number, each in enumerate(prefills)
    ]
    decodes = [w[f"d{number}"] for number in range(len(legs))]
    looked_at = [(costs.sequences(each, now_s), each.decode.turn, number, each) for number, each in enumerate(decodes)]
    assert costs.with_room(decodes, None, now_s) == looked_at
    assert costs.with_room(decodes, need, now_s) == [each for each in looked_at if not costs.full(each[-1], need, now_s)]


def test_what_a_worker_reports_is_about_a_pair_only_if_nobody_else_sent_to_it() -> None:
    w = world()
    costs, report = w.router.costs, Load(transfer_s=2.0, transfer_bytes=1e9)
    costs.handed_over("p0", "d0")
    costs.handed_over("p1", "d0")
    costs.reported(w["d0"], report)
    assert costs.pairs.transfer_rate("p0", "d0") is None
    costs.handed_over("p0", "d0")
    costs.reported(w["d0"], report)
    assert costs.pairs.transfer_rate("p0", "d0") is not None
    assert costs.pairs.transfer_rate("p1", "d0") is None
    costs.reported(w["d0"], report)  # nothing was handed over since
    assert costs.pairs.transfer_rate("p1", "d0") is None
