"""The workers and the ledger: what is in flight is counted once, given back once, and never below nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.routing.endpoint_spec import EndpointSet, EndpointSpec
from extproc.routing.pool import Claim, Leg, Pool, Role, addresses, matches
from tests.unit.routing_world import pool_of, specs


def claimed(leg: Leg, tokens: int = 100, work_s: float = 1.0, now_s: float = 0.0) -> Claim:
    return leg.claim(tokens=tokens, work_s=work_s, now_s=now_s, turn=1)


def test_a_claim_counts_until_it_is_given_back_and_is_given_back_once() -> None:
    leg = Leg()
    claim = claimed(leg)
    assert (leg.requests, leg.tokens) == (1, 100)
    assert claim.release(0.5)
    assert not claim.release(0.6)
    assert (leg.requests, leg.tokens) == (0, 0)


def test_work_queues_up_behind_other_work() -> None:
    leg = Leg()
    claimed(leg, work_s=1.0)
    claimed(leg, work_s=2.0)
    assert leg.busy_until_s == 3.0
    claimed(leg, work_s=1.0, now_s=10.0)
    assert leg.busy_until_s == 11.0, "an idle time is not worked off later"


def test_when_one_is_done_the_rest_begins_now() -> None:
    leg = Leg()
    first = claimed(leg, work_s=1.0)
    claimed(leg, work_s=2.0)
    first.release(5.0)
    assert leg.busy_until_s == 7.0


def test_a_report_may_count_what_ended_while_it_was_under_way_but_not_what_ended_long_before() -> None:
    leg = Leg()
    claims = [claimed(leg) for _ in range(3)]
    claims[0].release(1.0)
    claims[1].release(5.0)
    assert [leg.reported(now_s) for now_s in (5.05, 5.5)] == [2, 1]


def test_the_leak_guard_gives_back_what_is_too_old_and_says_how_many() -> None:
    pool = pool_of(1, 1)
    prefill, decode = pool.endpoints[0].prefill, pool.endpoints[1].decode
    old = [claimed(prefill, now_s=0.0), claimed(decode, now_s=1.0)]
    young = claimed(decode, now_s=50.0)
    assert pool.expire(10.0, 60.0) == 2
    assert (prefill.requests, decode.requests) == (0, 1)
    assert not any(claim.release(61.0) for claim in old)
    assert young.release(61.0)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.floats(0, 10), st.integers(0, 1000))))
def test_whatever_the_order_the_ledger_is_the_sum_of_what_is_open(steps: list[tuple[bool, int, float, int]]) -> None:
    leg, claims, now_s = Leg(), [], 0.0
    for claiming, which, passed_s, tokens in steps:
        now_s += passed_s
        if claiming or not claims:
            claims.append(claimed(leg, tokens, passed_s, now_s))
        else:
            claims[which % len(claims)].release(now_s)
        left = [claim for claim in claims if claim.leg is not None]
        assert (leg.requests, leg.tokens) == (len(left), sum(claim.tokens for claim in left))
    for claim in claims * 2:
        claim.release(now_s)
    assert (leg.requests, leg.tokens) == (0, 0)
    assert leg.busy_until_s <= now_s


def test_a_worker_may_have_both_roles_however_that_is_said() -> None:
    both = EndpointSpec(address="x")
    for pool in (Pool(EndpointSet(both=(both,))), Pool(EndpointSet(prefill=(both,), decode=(both,)))):
        assert [endpoint.roles for endpoint in pool.endpoints] == [frozenset(Role)]


def test_a_worker_is_not_live_until_a_probe_says_so() -> None:
    pool = Pool(EndpointSet(prefill=specs("p", 1), decode=specs("d", 1)))
    assert not pool.ready()
    for endpoint in pool.endpoints:
        pool.set_live(endpoint, True)
    assert pool.ready()
    pool.set_live(pool.endpoints[0], False)
    assert not pool.ready()


def test_what_stays_keeps_its_ledger_and_takes_what_is_new_about_it() -> None:
    pool = pool_of(2, 1)
    kept = pool.endpoints[0]
    claimed(kept.prefill)
    pool.replace(EndpointSet(prefill=(EndpointSpec(address="p0", labels={"tier": "gold"}, max_seqs=7),), decode=specs("d", 1)))
    assert pool.get("p0") is kept
    assert (kept.prefill.requests, kept.labels, kept.max_seqs, kept.live) == (1, {"tier": "gold"}, 7, True)
    assert pool.get("p1") is None, "it had nothing to do: gone at once"


def test_a_worker_that_leaves_finishes_what_it_has_and_gets_nothing_new() -> None:
    pool = pool_of(1, 2)
    leaving = pool.get("d1")
    assert leaving is not None
    claim = claimed(leaving.decode)
    pool.replace(EndpointSet(prefill=specs("p", 1), decode=specs("d", 1)))
    assert leaving.leaving
    assert addresses(pool.live(Role.DECODE)) == ["d0"]
    assert pool.sweep() == []
    claim.release(1.0)
    assert pool.sweep() == ["d1"]
    assert pool.get("d1") is None


def test_a_worker_that_comes_back_while_it_leaves_is_used_again() -> None:
    pool = pool_of(1, 1)
    endpoint = pool.endpoints[1]
    claimed(endpoint.decode)
    pool.replace(EndpointSet(prefill=specs("p", 1)))
    pool.replace(EndpointSet(prefill=specs("p", 1), decode=specs("d", 1)))
    assert pool.live(Role.DECODE) == [endpoint]
    assert pool.sweep() == []


def test_whatever_changes_who_may_be_chosen_changes_the_version() -> None:
    pool = pool_of()
    versions = [pool.version]
    pool.set_live(pool.endpoints[0], False)
    versions.append(pool.version)
    pool.set_models(pool.endpoints[0], {"a": b"{}"})
    versions.append(pool.version)
    pool.replace(EndpointSet(prefill=specs("p", 1)))
    versions.append(pool.version)
    assert len(set(versions)) == 4


@pytest.mark.parametrize(
    ("configured", "listed", "serves"),
    [
        (None, None, True),
        (None, ["m", "lora"], True),
        (None, ["other"], False),
        (["m"], ["other"], True),
        (["other"], ["m"], False),
    ],
)
def test_the_configuration_says_what_a_worker_serves_before_its_own_list_and_ignorance_excludes_nobody(
    configured: list[str] | None, listed: list[str] | None, serves: bool
) -> None:
    endpoint = Pool(EndpointSet(prefill=(EndpointSpec(address="x", models=configured),))).endpoints[0]
    endpoint.models = None if listed is None else dict.fromkeys(listed, b"{}")
    assert endpoint.serves("m") is serves
    assert endpoint.serves(None)


def test_the_pool_lists_the_models_of_live_workers_as_the_first_of_them_describes_it() -> None:
    pool = pool_of(3, 0)
    for endpoint, models in zip(pool.endpoints, ({"a": b"1"}, {"a": b"2", "b": b"2"}, {"c": b"3"}), strict=True):
        pool.set_models(endpoint, models)
    pool.set_live(pool.endpoints[2], False)
    assert pool.models() == {"a": b"1", "b": b"2"}


def test_labels_match_when_every_wanted_one_is_there() -> None:
    assert matches({"tier": "gold", "zone": "a"}, {"tier": "gold"})
    assert not matches({"tier": "gold"}, {"tier": "gold", "zone": "a"})
    assert matches({}, {})


def lives(*instances: str | None) -> Pool:
    """A pool that had a decode worker at one address in each of these lives, one after the other."""
    pool = Pool(EndpointSet())
    for instance in instances:
        pool.replace(EndpointSet(decode=(EndpointSpec(address="10.0.0.1:8000", instance=instance),)))
        [endpoint] = pool.endpoints
        endpoint.models = {"m": b"{}"}
        pool.set_live(endpoint, True)
    return pool


def test_another_worker_at_an_address_is_told_of_and_has_to_show_that_it_lives() -> None:
    pool = lives("uid-1/0")
    [before] = pool.endpoints
    claim = claimed(before.decode)
    spec = EndpointSpec(address="10.0.0.1:8000", instance="uid-2/0")
    assert pool.replace(EndpointSet(decode=(spec,))) == [before]
    assert (before.live, before.models, before.spec) == (False, None, spec)
    assert before.decode.requests == 1, "requests to the one before end by themselves"
    assert claim.release(1.0)
    assert pool.replace(EndpointSet(decode=(spec,))) == []


@pytest.mark.parametrize(("before", "after"), [(None, "uid-1/0"), ("uid-1/0", None), ("uid-1/0", "uid-1/0")])
def test_where_nobody_says_so_it_is_the_same_worker(before: str | None, after: str | None) -> None:
    pool = lives(before)
    spec = EndpointSpec(address="10.0.0.1:8000", instance=after)
    assert pool.replace(EndpointSet(decode=(spec,))) == []
    assert pool.endpoints[0].live


def test_a_worker_that_comes_back_in_another_life_while_it_leaves_is_another_one() -> None:
    pool = lives("uid-1/0")
    [endpoint] = pool.endpoints
    claimed(endpoint.decode)
    assert pool.replace(EndpointSet()) == []
    assert endpoint.leaving
    assert pool.replace(EndpointSet(decode=(EndpointSpec(address="10.0.0.1:8000", instance="uid-1/1"),))) == [endpoint]
    assert not endpoint.leaving
