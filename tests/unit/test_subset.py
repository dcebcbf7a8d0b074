"""A gateway's subset hint: only decode workers of it are chosen, whatever speaks for others."""

from __future__ import annotations

from typing import Any

import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from google.protobuf import struct_pb2

from extproc import wire
from extproc.dispatcher import as_api_error
from extproc.routing import snapshot
from extproc.routing.job import Mode, Objective
from extproc.routing.picker import NoEndpointError
from extproc.routing.ticket import State
from tests.unit.routing_world import World, pool_of

NAMESPACE, KEY = "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset"


def headers_event(hint: Any = None, *, namespace: str = NAMESPACE, key: str = KEY) -> wire.RequestHeaders:
    request = pb.ProcessingRequest()
    request.request_headers.end_of_stream = True
    if hint is not None:
        held = struct_pb2.Struct()
        held.update({key: hint})
        request.metadata_context.filter_metadata[namespace].CopyFrom(held)
    event = wire.read_event(pb.ProcessingRequest.FromString(request.SerializeToString()))
    assert isinstance(event, wire.RequestHeaders)
    return event


@pytest.mark.parametrize(
    ("hint", "read"),
    [
        (None, None),
        (["10.0.0.1:8000", "10.0.0.2:8000"], {"10.0.0.1:8000", "10.0.0.2:8000"}),
        ([], set()),
        (["10.0.0.1:8000", 7, ""], {"10.0.0.1:8000"}),
        ("10.0.0.1:8000, 10.0.0.2:8000", {"10.0.0.1:8000", "10.0.0.2:8000"}),
        (7, set()),
        ({"a": 1}, set()),
    ],
)
def test_the_hint_is_read_from_the_metadata_and_what_is_no_list_allows_nobody(hint: Any, read: set[str] | None) -> None:
    assert headers_event(hint).subset == read


def test_other_metadata_is_no_hint() -> None:
    assert headers_event(["10.0.0.1:8000"], namespace="envoy.lb").subset is None
    assert headers_event(["10.0.0.1:8000"], key="x-other").subset is None


@pytest.mark.parametrize("objective", list(Objective))
@pytest.mark.parametrize("mode", list(Mode))
def test_every_objective_and_mode_keeps_to_it(objective: Objective, mode: Mode) -> None:
    world = World(pool_of(prefill=3, decode=6))
    only = frozenset(("d1", "d4"))
    for _ in range(30):
        ticket = world.submit(only=only, objective=objective, mode=mode, held=False)
        assert ticket.decode is not None
        assert ticket.decode.address in only


def test_prefill_workers_are_not_restricted() -> None:
    world = World(pool_of(prefill=2, decode=3))
    found = {world.apart(only=frozenset(("d0",)), held=False).prefill for _ in range(20)}
    assert {each.address for each in found if each is not None} == {"p0", "p1"}


def test_neither_a_warm_cache_nor_a_conversation_speaks_for_others() -> None:
    world = World(pool_of(prefill=2, decode=3))
    first = world.whole(text="long talk", session="s", only=frozenset(("d2",)))
    assert first.decode is world["d2"]
    second = world.whole(text="long talk", session="s", only=frozenset(("d0", "d1")))
    assert second.decode in (world["d0"], world["d1"])
    third = world.whole(text="long talk", session="s")
    assert third.decode is second.decode, "the conversation is where it went last"


@pytest.mark.parametrize("only", [frozenset(), frozenset(("10.9.9.9:1",)), frozenset(("p0",))])
@pytest.mark.parametrize("mode", list(Mode))
def test_a_hint_without_a_decode_worker_of_ours_is_503_at_once(only: frozenset[str], mode: Mode) -> None:
    """Also while others wait: it does not queue up."""
    world = World(pool_of(prefill=1, decode=2))
    world.apart()
    world.apart()
    with pytest.raises(NoEndpointError) as caught:
        world.submit(only=only, mode=mode)
    error = as_api_error(caught.value, ["m"])
    assert (error.status, error.code) == (503, "no_subset_worker")


def test_a_worker_of_the_hint_that_is_not_live_is_none() -> None:
    world = World(pool_of(prefill=1, decode=2))
    world.pool.set_live(world["d1"], False)
    with pytest.raises(NoEndpointError) as caught:
        world.whole(only=frozenset(("d1",)))
    assert caught.value.subset


def test_a_model_that_only_others_serve_is_503_and_one_that_nobody_serves_404() -> None:
    world = World(pool_of(prefill=1, decode=2))
    world.pool.set_models(world["d0"], {"a": b"{}"})
    world.pool.set_models(world["d1"], {"b": b"{}"})
    world.pool.set_models(world["p0"], {"a": b"{}", "b": b"{}"})
    with pytest.raises(NoEndpointError) as caught:
        world.whole(model="b", only=frozenset(("d0",)))
    assert as_api_error(caught.value, []).status == 503
    with pytest.raises(NoEndpointError) as caught:
        world.whole(model="c", only=frozenset(("d0",)))
    assert as_api_error(caught.value, []).status == 404


def test_the_hint_comes_before_warmth() -> None:
    """A worker that has yet to make its first handoff is better than one that the gateway would not reach."""
    world = World(pool_of(prefill=1, decode=2))
    world.pool.set_warming(world["d1"], True)
    assert world.apart(only=frozenset(("d1",))).decode is world["d1"]
    assert world.apart().decode is world["d0"]


def test_prompts_that_wait_keep_their_hints() -> None:
    """One that waits for its worker is not let go by room elsewhere, and does not hold up those that may go there."""
    world = World(pool_of(prefill=4, decode=2), worker_max_seqs=1)
    full = world.apart(only=frozenset(("d0",)))
    waits = world.apart(only=frozenset(("d0",)))
    assert waits.state is State.WAITING
    other = world.apart(only=frozenset(("d1",)))
    assert other.decode is world["d1"]
    world.prefilled(full)
    world.finish(full)
    assert waits.state is State.PLACED
    assert waits.decode is world["d0"]


def test_another_decode_worker_than_was_chosen_is_one_of_the_hint_too() -> None:
    world = World(pool_of(prefill=1, decode=4))
    only = frozenset(("d1", "d3"))
    ticket = world.apart(only=only)
    chosen = ticket.decode
    assert chosen is not None
    world.pool.set_live(chosen, False)
    assert world.router.decode_again(ticket, world.now_s).address in only - {chosen.address}


def test_a_snapshot_decides_the_same() -> None:
    world = World(pool_of(prefill=1, decode=2), worker_max_seqs=1)
    world.apart(only=frozenset(("d0",)))
    world.apart(only=frozenset(("d0",)))
    taken = snapshot.take(world.router, world.now_s)
    assert [each.only for each in taken.queue.waiting] == [["d0"]]
    waiting = [each.job.only for each in snapshot.restore(taken)._tickets]
    assert waiting == [frozenset(("d0",))]


# -- who takes over ----------------------------------------------------------------------------------------------------------


def test_alternatives_are_other_decode_workers_that_are_allowed_and_have_not_failed() -> None:
    world = World(pool_of(prefill=1, decode=5), breaker_failures=1)
    ticket = world.whole(only=frozenset(("d0", "d1", "d2", "d3")))
    assert ticket.decode is not None
    failing = next(each for each in ("d0", "d1", "d2", "d3") if each != ticket.decode.address)
    bad = world.whole(only=frozenset((failing,)))
    world.router.answered(bad, world.now_s, ok=False)
    found = world.router.alternatives(ticket, 8, world.now_s)
    assert set(found) == {"d0", "d1", "d2", "d3"} - {ticket.decode.address, failing}
    assert len(world.router.alternatives(ticket, 1, world.now_s)) == 1


def test_the_ledger_and_the_index_follow_a_request_that_another_worker_serves() -> None:
    world = World(pool_of(prefill=1, decode=2))
    ticket = world.whole(text="a prompt", only=frozenset(("d0",)))
    chain = ticket.job.chain
    assert "d0" in world.router.index.lookup(chain, 9)
    assert world.router.served_by(ticket, "d1", world.now_s) is world["d1"]
    assert world["d0"].decode.requests == 0
    assert world["d1"].decode.requests == 1
    held = world.router.index.lookup(chain, 9)
    assert "d0" not in held
    assert "d1" in held
    world.finish(ticket)
    world.assert_empty()


def test_what_the_chosen_worker_held_before_it_holds_still() -> None:
    world = World(pool_of(prefill=1, decode=2))
    world.warm("d0", "a prompt", 2048)
    ticket = world.whole(tokens=4096, text="a prompt", only=frozenset(("d0",)))
    world.router.served_by(ticket, "d1", world.now_s)
    held = world.router.index.lookup(ticket.job.chain, 9)
    assert held["d0"] == 2048 // 64


@pytest.mark.parametrize("served", ["p0", "10.9.9.9:1"])
def test_nobody_is_counted_or_judged_for_a_request_that_a_stranger_serves(served: str) -> None:
    world = World(pool_of(prefill=1, decode=2), breaker_failures=1)
    ticket = world.apart(only=frozenset(("d0",)))
    world.prefilled(ticket)
    assert world.router.served_by(ticket, served, world.now_s) is None
    assert world["d0"].decode.requests == 0
    world.router.answered(ticket, world.now_s, ok=False)
    assert world["d0"].decode.failures == 0
    world.finish(ticket)
    world.assert_empty()


# -- header and metadata -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("destination", ["10.0.0.1:8000", "10.0.0.1:8000,10.0.0.2:8000", "[fd00::1]:8000"])
@pytest.mark.parametrize("reply", [wire.headers_reply, wire.body_reply])
def test_header_and_metadata_say_the_same(reply: Any, destination: str) -> None:
    """Endpoint picker protocol: both are set, with equal values."""
    mutation = wire.Mutation(destination=destination, tags={"mode": "none"}, remove_headers=("x-gateway-destination-endpoint",))
    made = pb.ProcessingResponse.FromString(reply(mutation))
    phase = made.request_headers if made.WhichOneof("response") == "request_headers" else made.request_body
    set_headers = {each.header.key: each.header.raw_value.decode() for each in phase.response.header_mutation.set_headers}
    metadata = made.dynamic_metadata.fields["envoy.lb"].struct_value.fields["x-gateway-destination-endpoint"].string_value
    assert set_headers["x-gateway-destination-endpoint"] == metadata == destination
