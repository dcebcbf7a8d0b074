"""Who is picked, and that counts go back to where they were."""

from __future__ import annotations

import pytest

from extproc.routing.picker import NoEndpointError, RoundRobin
from extproc.routing.pool import Pool, Role


def pool(prefill: int = 2, decode: int = 3, *, live: bool = True) -> Pool:
    made = Pool([f"10.0.0.{i}:1" for i in range(prefill)], [f"10.0.1.{i}:1" for i in range(decode)])
    for endpoint in made.endpoints:
        endpoint.live = live
    return made


def test_each_role_has_turns_of_its_own() -> None:
    p, picker = pool(), RoundRobin()
    pairs = [(picker.pick(p, Role.DECODE).address, picker.pick(p, Role.PREFILL).address) for _ in range(6)]
    assert [decode for decode, _ in pairs] == [f"10.0.1.{i % 3}:1" for i in range(6)]
    assert [prefill for _, prefill in pairs] == [f"10.0.0.{i % 2}:1" for i in range(6)]


def test_a_worker_that_is_not_live_is_never_picked() -> None:
    p, picker = pool(), RoundRobin()
    p.endpoints[0].live = False
    assert {picker.pick(p, Role.PREFILL).address for _ in range(5)} == {"10.0.0.1:1"}


@pytest.mark.parametrize("role", Role)
def test_an_empty_role_is_an_error_that_names_it(role: Role) -> None:
    with pytest.raises(NoEndpointError, match=f"no {role.value} worker is live") as caught:
        RoundRobin().pick(pool(live=False), role)
    assert caught.value.role is role


def test_ready_needs_both_roles() -> None:
    p = pool(1, 1)
    assert p.ready()
    p.endpoints[0].live = False
    assert not p.ready()


def test_a_count_is_given_back_on_every_way_out() -> None:
    endpoint = pool().endpoints[0]
    with endpoint.busy():
        assert endpoint.in_flight == 1
    with pytest.raises(RuntimeError), endpoint.busy():
        raise RuntimeError
    assert endpoint.in_flight == 0


def test_a_worker_gets_only_models_that_it_serves() -> None:
    p, picker = pool(2, 1), RoundRobin()
    p.endpoints[0].models = {"a": b"{}"}
    assert {picker.pick(p, Role.PREFILL, model="a").address for _ in range(4)} == {"10.0.0.0:1", "10.0.0.1:1"}
    assert {picker.pick(p, Role.PREFILL, model="b").address for _ in range(4)} == {"10.0.0.1:1"}
    p.endpoints[1].models = {"c": b"{}"}
    with pytest.raises(NoEndpointError, match="no prefill worker serves the model 'b'") as caught:
        picker.pick(p, Role.PREFILL, model="b")
    assert caught.value.model == "b"


def test_a_worker_that_was_tried_is_not_picked_again() -> None:
    p, picker = pool(), RoundRobin()
    assert {picker.pick(p, Role.PREFILL, exclude=["10.0.0.0:1"]).address for _ in range(4)} == {"10.0.0.1:1"}
    with pytest.raises(NoEndpointError) as caught:
        picker.pick(p, Role.PREFILL, exclude=["10.0.0.0:1", "10.0.0.1:1"])
    assert caught.value.model is None


def test_a_second_try_takes_no_turn() -> None:
    p, picker = pool(), RoundRobin()
    first = [picker.pick(p, Role.PREFILL).address for _ in range(4) if picker.pick(p, Role.PREFILL, exclude=["x"])]
    assert first == ["10.0.0.0:1", "10.0.0.1:1"] * 2


def test_models_of_the_pool_are_those_of_live_workers_each_once() -> None:
    p = pool(1, 2)
    p.endpoints[0].models = {"a": b'{"id":"a","n":1}'}
    p.endpoints[1].models = {"a": b'{"id":"a","n":2}', "b": b'{"id":"b"}'}
    p.endpoints[2].models = {"c": b'{"id":"c"}'}
    p.endpoints[2].live = False
    assert p.models() == {"a": b'{"id":"a","n":1}', "b": b'{"id":"b"}'}
