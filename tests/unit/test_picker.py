"""Which workers are chosen, said in words, each by itself; prompts go at once here (what waits is in test_queue.py)."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.routing.decision import Candidate, Terms
from extproc.routing.endpoint_spec import EndpointSpec
from extproc.routing.hits import Hits
from extproc.routing.job import Mode, Objective
from extproc.routing.picker import NoEndpointError, _idlest_and_warmest, decision
from extproc.routing.pool import Role
from extproc.routing.prefix import Chain
from extproc.routing.ticket import Ticket
from tests.unit.routing_world import World, decodes, pool_of, prefills, specs, tailed


def at_once(w: World, tokens: int = 4000, text: str | None = None, **fields) -> Ticket:
    return w.submit(tokens, text, **{"held": False, "mode": Mode.DISAGGREGATE} | fields)


def busy_decode(w: World, address: str, sequences: int, tokens: int = 100) -> None:
    for _ in range(sequences):
        w[address].decode.claim(tokens=tokens, work_s=0.0, now_s=w.now_s, turn=0)


def busy_prefill(w: World, address: str, work_s: float) -> None:
    w[address].prefill.claim(tokens=int(work_s * 10_000), work_s=work_s, now_s=w.now_s, turn=0)


# -- the prefill worker ----------------------------------------------------------------------------------------------------


def test_of_two_idle_workers_the_warm_one_wins() -> None:
    w = World()
    w.warm("p1", "talk", 8000)
    assert prefills([at_once(w, 8000, "talk")]) == ["p1"]


def test_a_warm_worker_far_busier_than_a_cold_one_loses() -> None:
    w = World()
    w.warm("p1", "talk", 8000)
    busy_prefill(w, "p1", 10.0)
    assert prefills([at_once(w, 8000, "talk")]) == ["p0"]


def test_a_warm_worker_that_is_a_little_busier_wins() -> None:
    w = World()
    w.warm("p1", "talk", 8000)
    busy_prefill(w, "p1", 0.3)
    assert prefills([at_once(w, 8000, "talk")]) == ["p1"]


def test_equal_prefixes_in_a_burst_spread() -> None:
    w = World(pool_of(4, 4))
    tickets = [at_once(w, 8000, chain=tailed("system", 2000, f"tail {number}", 8000)) for number in range(16)]
    counts = [prefills(tickets).count(f"p{number}") for number in range(4)]
    assert min(counts) >= 3, "the first one to get it is warm from then on, but not for everybody"
    assert sorted(decodes(tickets).count(f"d{number}") for number in range(4)) == [4, 4, 4, 4]


def test_a_stale_scrape_does_not_herd() -> None:
    w = World(pool_of(4, 4))
    for number in range(4):
        w.reports(f"p{number}", running=0 if number == 2 else 1, waiting=0)
        w.reports(f"d{number}", running=0 if number == 2 else 3, waiting=0)
    tickets = [at_once(w, 6000) for _ in range(12)]
    assert prefills(tickets)[0] == "p2"
    assert max(prefills(tickets).count(f"p{number}") for number in range(4)) <= 5
    assert max(decodes(tickets).count(f"d{number}") for number in range(4)) <= 6


def test_ties_rotate() -> None:
    w = World(pool_of(3, 3))
    seen = []
    for _ in range(6):
        ticket = at_once(w, 1000)
        seen.append((ticket.prefill.address, ticket.decode.address))
        w.router.prefill_done(ticket, w.now_s)
        w.finish(ticket)
    assert [prefill for prefill, _ in seen] == ["p0", "p1", "p2"] * 2
    assert [decode for _, decode in seen] == ["d0", "d1", "d2"] * 2


# -- the decode worker -----------------------------------------------------------------------------------------------------


def test_a_decode_worker_with_fewer_sequences_wins() -> None:
    w = World()
    busy_decode(w, "d0", 20)
    assert decodes([at_once(w)]) == ["d1"]


def test_a_decode_worker_that_holds_the_prompt_wins_because_nothing_must_be_moved() -> None:
    w = World(transfer_bytes_per_s=1e9)
    w.warm("d1", "talk", 30_000)
    busy_decode(w, "d1", 2)
    assert decodes([at_once(w, 30_000, "talk")]) == ["d1"]


def test_a_pair_that_failed_is_avoided_for_a_while_and_then_tried_again() -> None:
    w = World(pool_of(1, 2))
    first = at_once(w)
    bad = first.decode.address
    w.router.answered(first, w.now_s, ok=False, pair_fault=True)
    w.finish(first)
    w.router.costs.pairs.succeeded("p0", "d0" if bad == "d1" else "d1")
    assert all(address != bad for address in decodes(at_once(w) for _ in range(6)))
    w.now_s += 120
    assert bad in decodes(at_once(w) for _ in range(8))


def test_with_an_itl_slo_a_slow_decode_worker_gets_nothing_while_others_can_keep_it() -> None:
    w = World()
    for _ in range(50):
        w.reports("d0", itl_s=0.2)
    assert decodes(at_once(w, itl_slo_s=0.05) for _ in range(4)) == ["d1"] * 4
    for _ in range(50):
        w.reports("d1", itl_s=0.2)
    assert at_once(w, itl_slo_s=0.05).decode is not None, "where nobody can keep it, somebody serves all the same"


def test_a_busy_prompt_of_its_own_keeps_streams_away_from_a_decode_worker() -> None:
    w = World()
    busy_prefill(w, "d0", 5.0)
    assert decodes(at_once(w) for _ in range(3)) == ["d1"] * 3


# -- who may at all --------------------------------------------------------------------------------------------------------


def test_labels_pin_each_role() -> None:
    gold = {"labels": {"tier": "gold"}}
    w = World(pool_of([*specs("p", 2), *specs("pg", 1, **gold)], [*specs("d", 2), *specs("dg", 1, **gold)]))
    tickets = [at_once(w, prefill_labels={"tier": "gold"}, decode_labels={"tier": "gold"}) for _ in range(3)]
    assert set(prefills(tickets)) == {"pg0"}
    assert set(decodes(tickets)) == {"dg0"}
    with pytest.raises(NoEndpointError, match=r"no decode worker has the labels \{'tier': 'silver'\}"):
        at_once(w, decode_labels={"tier": "silver"})
    w.finish(*tickets)
    w.assert_empty()


def test_the_model_picks_the_workers_and_a_lora_name_is_a_model() -> None:
    w = World(pool_of(2, 2))
    for address, names in (("p0", "m"), ("d0", "m"), ("p1", "m lora"), ("d1", "m lora")):
        w.pool.set_models(w[address], dict.fromkeys(names.split(), b"{}"))
    tickets = [at_once(w, model="lora") for _ in range(3)]
    assert (set(prefills(tickets)), set(decodes(tickets))) == ({"p1"}, {"d1"})
    assert set(prefills(at_once(w, model="m") for _ in range(4))) == {"p0", "p1"}
    with pytest.raises(NoEndpointError, match="serves the model 'other'") as caught:
        at_once(w, model="other")
    assert caught.value.model == "other"


def test_a_worker_that_is_not_live_is_never_chosen() -> None:
    w = World()
    w.pool.set_live(w["p0"], False)
    w.pool.set_live(w["d1"], False)
    tickets = [at_once(w) for _ in range(4)]
    assert (set(prefills(tickets)), set(decodes(tickets))) == ({"p1"}, {"d0"})


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("held", [True, False])
def test_an_empty_role_is_an_error_that_names_it(role: Role, held: bool) -> None:
    w = World(pool_of(0 if role is Role.PREFILL else 1, 0 if role is Role.DECODE else 1))
    with pytest.raises(NoEndpointError, match=f"no {role.value} worker is live") as caught:
        at_once(w, held=held)
    assert caught.value.role is role
    w.assert_empty()


@pytest.mark.parametrize("fields", [{"mode": Mode.AGGREGATE}, {"handoff": False}, {"mode": Mode.AUTO}])
def test_without_a_decode_worker_nobody_waits_for_one(fields) -> None:
    w = World(pool_of(1, 0))
    with pytest.raises(NoEndpointError, match="no decode worker is live"):
        w.submit(**fields)
    w.assert_empty()


def test_a_worker_with_both_roles_hands_nothing_over_to_itself() -> None:
    w = World(pool_of(0, 0, 2))
    for ticket in (at_once(w, 8000) for _ in range(6)):
        assert ticket.prefill is not ticket.decode


def test_one_worker_with_both_roles_does_it_all() -> None:
    w = World(pool_of(0, 0, 1))
    ticket = w.submit(8000)
    assert (ticket.prefill, ticket.decode.address) == (None, "b0")


# -- sick workers ----------------------------------------------------------------------------------------------------------


def test_a_dead_prefill_worker_is_avoided_then_tried_once_then_used_again() -> None:
    w = World(breaker_failures=2, breaker_pause_s=2.0)
    for _ in range(2):
        sick = next(ticket for ticket in iter(lambda: at_once(w), None) if ticket.prefill.address == "p0")
        w.router.prefill_failed(sick, w.now_s, blame=True)
    assert set(prefills(at_once(w) for _ in range(4))) == {"p1"}
    w.now_s += 2.0
    tried = [at_once(w) for _ in range(6)]
    assert prefills(tried).count("p0") == 1, "one trial at a time"
    trial = next(ticket for ticket in tried if ticket.prefill.address == "p0")
    w.router.prefill_done(trial, w.now_s)
    assert "p0" in prefills(at_once(w) for _ in range(6))


def test_a_decode_worker_that_fails_stays_away_for_its_pause_although_its_requests_are_over() -> None:
    w = World(breaker_failures=2, breaker_pause_s=2.0)
    for _ in range(2):
        sick = next(ticket for ticket in iter(lambda: at_once(w), None) if ticket.decode.address == "d0")
        w.router.answered(sick, w.now_s, ok=False)
        w.finish(sick)
    assert set(decodes(at_once(w) for _ in range(4))) == {"d1"}
    w.now_s += 2.0
    assert decodes(at_once(w) for _ in range(6)).count("d0") == 1


def test_failures_of_one_leg_never_count_against_the_other() -> None:
    w = World(pool_of(0, 0, 2), breaker_failures=1)
    ticket = at_once(w)
    sick = ticket.prefill
    w.router.prefill_failed(ticket, w.now_s, blame=True)
    assert (sick.prefill.failures, sick.decode.failures) == (1, 0)
    assert sick.address not in prefills(at_once(w) for _ in range(3))
    assert sick.address in decodes(at_once(w) for _ in range(3))


def test_what_is_the_clients_fault_never_counts() -> None:
    w = World(pool_of(1, 1), breaker_failures=1)
    for _ in range(5):  # a 4xx or 429 of the prefill worker, or a client that left during the prefill
        ticket = at_once(w)
        w.router.prefill_failed(ticket, w.now_s, blame=False)
        w.finish(ticket)
        cancelled = at_once(w)
        w.finish(cancelled)
        refused = at_once(w)  # a 4xx of the decode worker
        w.router.prefill_done(refused, w.now_s)
        w.router.answered(refused, w.now_s, ok=True)
        w.finish(refused)
    assert (w["p0"].prefill.failures, w["d0"].decode.failures) == (0, 0)
    assert (w["p0"].prefill.blocked_until_s, w["d0"].decode.blocked_until_s) <= (w.now_s, w.now_s)


def test_where_all_failed_all_are_tried_and_it_is_counted() -> None:
    w = World(pool_of(2, 1), breaker_failures=1)
    for _ in range(2):
        w.router.prefill_failed(at_once(w), w.now_s, blame=True)
    assert w.router.picker.panics == 0
    assert at_once(w).prefill is not None
    assert w.router.picker.panics > 0


# -- sessions --------------------------------------------------------------------------------------------------------------


def test_a_conversation_stays_on_its_decode_worker_even_if_another_has_less_to_do() -> None:
    w = World(pool_of(1, 3))
    home = at_once(w, session="s").decode.address
    busy_decode(w, home, 10)
    assert decodes(at_once(w, session="s") for _ in range(3)) == [home] * 3
    assert home not in decodes(at_once(w, session=f"other {number}") for number in range(3))


def test_a_conversation_moves_when_its_home_is_gone_and_stays_at_the_new_one() -> None:
    w = World(pool_of(1, 3))
    home = at_once(w, session="s").decode
    w.pool.set_live(home, False)
    second = at_once(w, session="s").decode.address
    assert second != home.address
    w.pool.set_live(home, True)
    assert decodes([at_once(w, session="s")]) == [second]


def test_a_conversation_moves_when_its_home_is_full() -> None:
    w = World(pool_of(1, specs("d", 2, max_seqs=4)))
    home = at_once(w, session="s").decode.address
    busy_decode(w, home, 3)
    assert at_once(w, session="s").decode.address != home


def test_requests_without_a_session_have_no_home() -> None:
    w = World(pool_of(1, 2))
    assert set(decodes(at_once(w, session="") for _ in range(4))) == {"d0", "d1"}


# -- objectives ------------------------------------------------------------------------------------------------------------


def test_round_robin_rotates_both_roles_whatever_the_load_and_the_cache() -> None:
    w = World(pool_of(3, 2))
    w.warm("p0", "talk", 4000)
    busy_prefill(w, "p1", 60.0)
    busy_decode(w, "d1", 50)
    tickets = [at_once(w, text="talk", objective=Objective.ROUND_ROBIN) for _ in range(6)]
    assert sorted(prefills(tickets[:3])) == ["p0", "p1", "p2"]
    assert prefills(tickets) == prefills(tickets[:3]) * 2
    assert decodes(tickets) == decodes(tickets[:2]) * 3
    assert len(set(decodes(tickets))) == 2


def test_random_is_random_and_the_same_for_the_same_seed() -> None:
    def choices(seed: int) -> list[tuple[str, str]]:
        w = World(pool_of(4, 4), seed=seed)
        tickets = [at_once(w, objective=Objective.RANDOM) for _ in range(40)]
        return list(zip(prefills(tickets), decodes(tickets), strict=True))

    assert choices(1) == choices(1) != choices(2)
    assert len(set(choices(1))) > 8


def test_least_load_looks_at_the_work_in_flight_only() -> None:
    w = World(pool_of(2, 2))
    w.warm("p0", "talk", 8000)
    w.warm("d0", "talk", 8000)
    busy_prefill(w, "p0", 0.01)
    busy_decode(w, "d0", 1)
    ticket = at_once(w, 8000, "talk", objective=Objective.LEAST_LOAD)
    assert (ticket.prefill.address, ticket.decode.address) == ("p1", "d1")


def test_prefix_goes_where_the_prefix_is_whatever_the_load() -> None:
    w = World(pool_of(3, 2))
    w.warm("p1", "talk", 8000)
    busy_prefill(w, "p1", 60.0)
    assert prefills(at_once(w, 8000, "talk", objective=Objective.PREFIX) for _ in range(3)) == ["p1"] * 3
    unknown = [at_once(w, 8000, objective=Objective.PREFIX) for _ in range(6)]
    assert len(set(prefills(unknown))) == 3, "what nobody holds is shared out"


def test_ttft_takes_the_seconds_that_throughput_would_not() -> None:
    def chosen(objective: Objective) -> str:
        w = World()
        w.warm("p1", "talk", 8000)
        busy_prefill(w, "p1", 1.0)  # to wait for the owner costs 1.0 s, to compute it all again 0.8 s
        return at_once(w, 8000, "talk", objective=objective).prefill.address

    assert chosen(Objective.TTFT) == "p0"
    assert chosen(Objective.THROUGHPUT) == "p1"


# -- to hand over or not ---------------------------------------------------------------------------------------------------


def test_a_short_prompt_is_not_handed_over_and_a_long_one_is() -> None:
    w = World()
    busy_decode(w, "d0", 10)
    busy_decode(w, "d1", 10)
    assert w.submit(100).decision.prefill is None
    assert w.submit(20_000).decision.prefill is not None


def test_a_decode_worker_that_holds_most_of_the_prompt_is_not_sent_a_remote_prefill() -> None:
    w = World()
    busy_decode(w, "d0", 2)
    busy_decode(w, "d1", 2)
    w.warm("d1", "talk", 9000)
    ticket = w.submit(10_000, "talk")
    assert (ticket.decision.prefill, ticket.decision.decode) == (None, "d1")
    assert ticket.decision.cached_tokens == pytest.approx(9000, abs=64)


def test_an_itl_slo_forbids_a_prefill_that_streams_would_feel() -> None:
    def prefill_of(slo_s: float | None) -> str | None:
        w = World(pool_of(1, 1), handshake_s=5.0)
        busy_decode(w, "d0", 1)
        return w.submit(4000, itl_slo_s=slo_s).decision.prefill

    assert prefill_of(None) is None, "cheaper, with that handshake"
    assert prefill_of(5.0) is None
    assert prefill_of(0.1) == "p0"


def test_an_itl_slo_does_not_forbid_a_prefill_where_nothing_streams() -> None:
    w = World(pool_of(1, 1), handshake_s=5.0)
    assert w.submit(4000, itl_slo_s=0.1).decision.prefill is None


def test_a_threshold_in_uncached_tokens_decides_instead_of_the_cost() -> None:
    w = World(handshake_s=50.0)
    assert w.submit(2000, threshold_uncached_tokens=2000).decision.prefill is not None
    assert w.submit(1999, threshold_uncached_tokens=2000).decision.prefill is None
    for address in ("d0", "d1"):
        w.warm(address, "talk", 3000)
    assert w.submit(4000, "talk", threshold_uncached_tokens=2000).decision.prefill is None


@pytest.mark.parametrize("tokens", [10, 50_000])
def test_a_policy_may_force_either(tokens: int) -> None:
    w = World()
    assert w.apart(tokens).decision.prefill is not None
    assert w.whole(tokens).decision.prefill is None


def test_what_cannot_be_handed_over_goes_to_a_decode_worker_even_if_the_policy_says_otherwise() -> None:
    w = World()
    ticket = w.apart(50_000, handoff=False)
    assert (ticket.prefill, ticket.decision.prefill, ticket.decision.reason) == (None, None, "cannot_hand_over")


# -- the decision as it is kept --------------------------------------------------------------------------------------------


def test_a_decision_carries_its_alternatives_and_numbers() -> None:
    w = World(pool_of(3, 3))
    w.warm("p1", "talk", 8000)
    decision = w.submit(20_000, "talk", policy="gold").decision
    assert (decision.candidates[0].prefill, decision.candidates[0].decode) == (decision.prefill, decision.decode)
    assert len(decision.candidates) > 3
    assert decision.candidates[0].cost == min(each.cost for each in decision.candidates if each.prefill is not None)
    assert decision.cached_tokens == pytest.approx(8000, abs=64)
    header = decision.header()
    assert header.startswith('disaggregate;prefill="p1";decode="')
    assert ';policy="gold";objective=balanced;tokens=20000;' in header


def test_operators_may_say_how_fast_a_worker_is_before_it_was_seen() -> None:
    fast = EndpointSpec(address="fast", prefill_tokens_per_s=100_000.0)
    w = World(pool_of([*specs("p", 1), fast], 1), prefill_tokens_per_s=5000.0)
    for address in ("p0", "fast"):
        busy_prefill(w, address, 0.5)
    assert prefills([at_once(w, 20_000)]) == ["fast"]


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from((0, 0, 64, 64, 128, 640))), min_size=1, max_size=20))
def test_those_that_are_weighed_are_the_idlest_and_of_the_others_the_warmest(workers: list[tuple[int, int]]) -> None:
    pool = pool_of(len(workers), 0)
    room = [
        (float(load), 0, place, endpoint)
        for place, ((load, _), endpoint) in enumerate(zip(workers, pool.endpoints, strict=True))
    ]
    held = {endpoint.address: tokens for (_, tokens), endpoint in zip(workers, pool.endpoints, strict=True) if tokens}
    idlest = sorted(room)[:3]
    others = [each for each in room if each not in idlest and each[-1].address in held]
    warmest = sorted(others, key=lambda each: (-held[each[-1].address], each[2]))[:3]
    assert _idlest_and_warmest(room, Hits(held)) == [each[-1] for each in idlest + warmest]


@given(st.integers(0, 8), st.integers(0, 8), st.integers(0, 8), st.sampled_from((64.0, 21.3, 512.0)))
def test_what_a_prompt_shares_with_a_placed_one_is_found_as_the_index_finds_it(
    own: int, other: int, held: int, size: float
) -> None:
    shared = min(own, other)
    mine = Chain(array("Q", [*range(shared), *range(100, 100 + own - shared + 1)]), size)
    placed_one = Chain(array("Q", [*range(shared), *range(200, 200 + other - shared + 1)]), size)
    w = World()
    job = w.job(int((own + 2) * size), chain=mine)
    w.router.index.insert("p0", mine, min(held, len(mine.hashes)))
    hits = w.router.scales.hits(Ticket(job))
    before = hits.tokens.get("p0", 0)
    w.router.index.insert("p0", placed_one)
    assert hits.learned(job, "p0", placed_one) is (hits.tokens.get("p0", 0) > before)
    assert hits.tokens == w.router.scales.hits(Ticket(job)).tokens


def test_what_is_kept_of_a_decision_has_both_kinds_and_no_pair_twice() -> None:
    def weighed(prefill: str | None, number: int) -> Candidate:
        return Candidate(prefill=prefill, decode=f"d{number}", cost=float(number), terms=Terms())

    job = World().job(4000)
    pairs = [weighed("p0", number) for number in range(12)]
    alone = [weighed(None, 20), weighed(None, 21)]
    kept = decision(job, weighed("p0", 3), "cost", [*pairs, *alone]).candidates
    assert [(each.prefill, each.decode) for each in kept] == [("p0", f"d{number}") for number in (3, 0, 1, 2, 4, 5, 6)] + [
        (None, "d20")
    ]
    assert [each.decode for each in decision(job, alone[0], "cost", alone).candidates] == ["d20", "d21"]
