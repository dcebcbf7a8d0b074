"""Endpoints over gRPC: each rule of Envoy's discovery protocol, first by itself, then on real streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from envoy_data_plane.envoy.config.core.v3 import Node
from envoy_data_plane.envoy.config.endpoint.v3 import ClusterLoadAssignment
from envoy_data_plane.envoy.service.discovery.v3 import (
    DeltaDiscoveryRequest,
    DeltaDiscoveryResponse,
    DiscoveryRequest,
    DiscoveryResponse,
)
from envoy_data_plane.google.rpc import Status

from extproc.observe.logs import make_logger
from extproc.xds import ENDPOINTS_TYPE, assignment
from extproc.xds_server import MAX_NAMES, MAX_TYPES, Delta, EndpointServer, RefusedError, Snapshot, StateOfTheWorld

CLUSTERS = "type.googleapis.com/envoy.config.cluster.v3.Cluster"
ONE = {"decode": ["10.0.0.1:1"], "prefill": ["10.0.0.9:1"]}
TWO = {"decode": ["10.0.0.1:1", "10.0.0.2:1"], "prefill": ["10.0.0.9:1"]}


def snapshot(clusters: dict[str, list[str]]) -> Snapshot:
    found = {name: assignment(name, endpoints) for name, endpoints in clusters.items()}
    return Snapshot("-".join(item.version for item in found.values()), found)


def ask(*names: str, nonce: str = "", version: str = "", kind: str = ENDPOINTS_TYPE, error: str = "") -> DiscoveryRequest:
    return DiscoveryRequest(
        node=Node(id="envoy-1"),
        type_url=kind,
        resource_names=list(names),
        response_nonce=nonce,
        version_info=version,
        error_detail=Status(code=3, message=error) if error else None,
    )


def ask_delta(
    *subscribe: str,
    unsubscribe: list[str] | None = None,
    has: dict[str, str] | None = None,
    kind: str = ENDPOINTS_TYPE,
    nonce: str = "",
    error: str = "",
) -> DeltaDiscoveryRequest:
    return DeltaDiscoveryRequest(
        type_url=kind,
        resource_names_subscribe=list(subscribe),
        resource_names_unsubscribe=unsubscribe or [],
        initial_resource_versions=has or {},
        response_nonce=nonce,
        error_detail=Status(code=3, message=error) if error else None,
    )


def content(reply: DiscoveryResponse) -> dict[str, list[str]]:
    return dict(map(_endpoints, (resource.value for resource in reply.resources)))


def delta_content(reply: DeltaDiscoveryResponse) -> dict[str, list[str]]:
    return dict(_endpoints(resource.resource.value) for resource in reply.resources if resource.resource)


def _endpoints(encoded: bytes) -> tuple[str, list[str]]:
    found = ClusterLoadAssignment.parse(encoded)
    sockets = [target.endpoint.address.socket_address for locality in found.endpoints for target in locality.lb_endpoints]
    return found.cluster_name, [f"{socket.address}:{socket.port_value}" for socket in sockets]


class Talk:
    """One conversation: what was said last is answered at once, as on a stream."""

    def __init__(self, rules: StateOfTheWorld | Delta, clusters: dict[str, list[str]]) -> None:
        self.rules = rules
        self.clusters = clusters

    def say(self, request: Any) -> list[Any]:
        self.nack = self.rules.hear(request)
        return self.news()

    def news(self) -> list[Any]:
        return list(self.rules.replies(snapshot(self.clusters)))


# --- state of the world -------------------------------------------------------------------------------------------------


@pytest.fixture
def world() -> Talk:
    return Talk(StateOfTheWorld(only=None), ONE)


def test_first_request_is_answered_and_its_acknowledgement_is_not(world: Talk) -> None:
    [reply] = world.say(ask("decode"))
    assert (content(reply), reply.type_url) == ({"decode": ["10.0.0.1:1"]}, ENDPOINTS_TYPE)
    assert world.say(ask("decode", nonce=reply.nonce, version=reply.version_info)) == []
    assert world.news() == []


def test_a_new_stream_is_answered_whatever_version_it_brings(world: Talk) -> None:
    version = snapshot({"decode": ONE["decode"]}).version
    [reply] = world.say(ask("decode", nonce="77", version=version))
    assert content(reply) == {"decode": ["10.0.0.1:1"]}


def test_a_change_is_pushed_once_with_a_new_nonce_and_version(world: Talk) -> None:
    [first] = world.say(ask("decode"))
    world.clusters = TWO
    [second] = world.news()
    assert content(second) == {"decode": ["10.0.0.1:1", "10.0.0.2:1"]}
    assert second.nonce != first.nonce
    assert second.version_info != first.version_info
    assert world.news() == []


def test_a_change_of_a_cluster_that_was_not_asked_for_is_not_sent(world: Talk) -> None:
    world.say(ask("prefill"))
    world.clusters = TWO
    assert world.news() == []


def test_envoy_asks_for_its_clusters_one_after_the_other(world: Talk) -> None:
    [first] = world.say(ask("decode"))
    [second] = world.say(ask("decode", "prefill", nonce=first.nonce, version=first.version_info))
    assert set(content(second)) == {"decode", "prefill"}
    assert world.say(ask("prefill", nonce=second.nonce, version=second.version_info)) != [], "one resource fewer is news"


def test_no_names_mean_everything_until_names_were_given(world: Talk) -> None:
    [everything] = world.say(ask())
    assert set(content(everything)) == {"decode", "prefill"}
    [one] = world.say(ask("decode", nonce=everything.nonce))
    assert set(content(one)) == {"decode"}
    [none] = world.say(ask(nonce=one.nonce))
    assert content(none) == {}


def test_a_star_means_everything(world: Talk) -> None:
    [everything] = world.say(ask("*"))
    assert set(content(everything)) == {"decode", "prefill"}
    [none] = world.say(ask(nonce=everything.nonce))
    assert content(none) == {}


def test_a_refusal_is_told_and_the_same_thing_is_not_sent_again(world: Talk) -> None:
    [reply] = world.say(ask("decode"))
    assert world.say(ask("decode", nonce=reply.nonce, version="", error="bad endpoint")) == []
    assert world.nack is not None
    assert (world.nack.node, world.nack.error) == ("envoy-1", "bad endpoint")
    world.clusters = TWO
    assert len(world.news()) == 1


def test_a_request_about_an_older_reply_is_ignored(world: Talk) -> None:
    [first] = world.say(ask("decode"))
    world.clusters = TWO
    [second] = world.news()
    assert world.say(ask("decode", "prefill", nonce=first.nonce)) == []
    [third] = world.say(ask("decode", "prefill", nonce=second.nonce))
    assert set(content(third)) == {"decode", "prefill"}


def test_a_cluster_that_is_not_there_yet_comes_when_it_is(world: Talk) -> None:
    [reply] = world.say(ask("later"))
    assert content(reply) == {}
    world.clusters = {**ONE, "later": []}
    [reply] = world.news()
    assert content(reply) == {"later": []}


def test_other_kinds_are_answered_with_nothing_and_once(world: Talk) -> None:
    [reply] = world.say(ask(kind=CLUSTERS))
    assert (reply.type_url, reply.resources) == (CLUSTERS, [])
    assert world.say(ask(kind=CLUSTERS, nonce=reply.nonce)) == []
    world.clusters = TWO
    assert world.news() == []


@pytest.mark.parametrize("rules", [StateOfTheWorld, Delta])
def test_what_no_stream_may_ask_for(rules: type[StateOfTheWorld] | type[Delta]) -> None:
    request = ask if rules is StateOfTheWorld else ask_delta
    with pytest.raises(RefusedError, match="without type_url"):
        rules(only=None).hear(request(kind=""))
    with pytest.raises(RefusedError, match="on a stream for"):
        rules(only=ENDPOINTS_TYPE).hear(request(kind=CLUSTERS))
    with pytest.raises(RefusedError, match="resource names"):
        rules(only=None).hear(request(*(str(i) for i in range(MAX_NAMES + 1))))
    greedy = rules(only=None)
    for i in range(MAX_TYPES):
        greedy.hear(request(kind=str(i)))
    with pytest.raises(RefusedError, match="kinds of resources"):
        greedy.hear(request(kind="one more"))


# --- delta --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def delta() -> Talk:
    return Talk(Delta(only=None), ONE)


def test_delta_sends_only_what_changed(delta: Talk) -> None:
    [first] = delta.say(ask_delta("decode", "prefill"))
    assert set(delta_content(first)) == {"decode", "prefill"}
    assert delta.say(ask_delta(nonce=first.nonce)) == []
    delta.clusters = TWO
    [second] = delta.news()
    assert delta_content(second) == {"decode": ["10.0.0.1:1", "10.0.0.2:1"]}
    assert second.removed_resources == []
    assert second.nonce != first.nonce
    assert delta.news() == []


def test_delta_after_a_reconnect_sends_only_what_envoy_does_not_have(delta: Talk) -> None:
    has = {"decode": assignment("decode", ["10.0.0.7:1"]).version, "prefill": assignment("prefill", ONE["prefill"]).version}
    [reply] = delta.say(ask_delta("decode", "prefill", has=has))
    assert delta_content(reply) == {"decode": ["10.0.0.1:1"]}


def test_delta_after_a_reconnect_removes_what_is_gone(delta: Talk) -> None:
    [reply] = delta.say(ask_delta(has={"old": "1"}))
    assert reply.removed_resources == ["old"]
    assert set(delta_content(reply)) == {"decode", "prefill"}
    assert delta.news() == []


def test_delta_says_once_that_a_resource_does_not_exist_and_sends_it_when_it_does(delta: Talk) -> None:
    [reply] = delta.say(ask_delta("later"))
    assert (delta_content(reply), reply.removed_resources) == ({}, ["later"])
    assert delta.news() == []
    delta.clusters = {**ONE, "later": ["10.0.0.3:1"]}
    [reply] = delta.news()
    assert delta_content(reply) == {"later": ["10.0.0.3:1"]}
    delta.clusters = ONE
    [reply] = delta.news()
    assert reply.removed_resources == ["later"]
    assert delta.news() == []


def test_delta_wildcard_follows_what_comes_and_goes(delta: Talk) -> None:
    [reply] = delta.say(ask_delta("*"))
    assert set(delta_content(reply)) == {"decode", "prefill"}
    delta.clusters = {"decode": ONE["decode"], "new": []}
    [reply] = delta.news()
    assert (delta_content(reply), reply.removed_resources) == ({"new": []}, ["prefill"])
    delta.say(ask_delta("decode"))
    assert delta.say(ask_delta(unsubscribe=["*"])) == []
    delta.clusters = {"decode": [], "new": ["10.0.0.5:1"]}
    [reply] = delta.news()
    assert delta_content(reply) == {"decode": []}


def test_delta_no_names_at_first_mean_everything_and_later_nothing_new(delta: Talk) -> None:
    [reply] = delta.say(ask_delta())
    assert set(delta_content(reply)) == {"decode", "prefill"}
    explicit = Talk(Delta(only=None), ONE)
    explicit.say(ask_delta("decode"))
    assert explicit.say(ask_delta()) == []


def test_delta_what_was_unsubscribed_is_not_sent_and_not_removed(delta: Talk) -> None:
    delta.say(ask_delta("decode", "prefill"))
    assert delta.say(ask_delta(unsubscribe=["decode"])) == []
    delta.clusters = TWO
    assert delta.news() == []
    [again] = delta.say(ask_delta("decode"))
    assert delta_content(again) == {"decode": TWO["decode"]}


def test_delta_what_is_asked_for_again_is_sent_again(delta: Talk) -> None:
    delta.say(ask_delta("decode"))
    [again] = delta.say(ask_delta("decode"))
    assert delta_content(again) == {"decode": ONE["decode"]}


def test_delta_refusal_is_told_and_the_same_thing_is_not_sent_again(delta: Talk) -> None:
    [reply] = delta.say(ask_delta("decode"))
    assert delta.say(ask_delta(nonce=reply.nonce, error="no")) == []
    assert delta.nack is not None
    assert delta.nack.error == "no"
    assert delta.news() == []


def test_delta_other_kinds_do_not_exist(delta: Talk) -> None:
    [reply] = delta.say(ask_delta("x", kind=CLUSTERS))
    assert (reply.type_url, reply.resources, reply.removed_resources) == (CLUSTERS, [], ["x"])
    assert delta.news() == []


# --- on real streams ----------------------------------------------------------------------------------------------------


class Served:
    """An EndpointServer on a port."""

    def __init__(self) -> None:
        self.nacks = 0
        self.endpoints = EndpointServer(make_logger("critical"), on_nack=self._count, max_streams=2)
        self.endpoints.publish(ONE)

    def _count(self) -> None:
        self.nacks += 1

    async def __aenter__(self) -> Served:
        self.server = grpc.aio.server()
        self.endpoints.register(self.server)
        port = self.server.add_insecure_port("127.0.0.1:0")
        await self.server.start()
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()
        await self.server.stop(None)

    def open(self, method: str) -> Any:
        reply = DeltaDiscoveryResponse if "Delta" in method else DiscoveryResponse
        return self.channel.stream_stream(method, request_serializer=bytes, response_deserializer=reply.parse)()


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with Served() as running:
        yield running


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


ADS = "/envoy.service.discovery.v3.AggregatedDiscoveryService/StreamAggregatedResources"
DELTA_ADS = "/envoy.service.discovery.v3.AggregatedDiscoveryService/DeltaAggregatedResources"
EDS = "/envoy.service.endpoint.v3.EndpointDiscoveryService/StreamEndpoints"
DELTA_EDS = "/envoy.service.endpoint.v3.EndpointDiscoveryService/DeltaEndpoints"


@pytest.mark.parametrize("method", [ADS, EDS])
async def test_state_of_the_world_on_a_stream(served: Served, method: str) -> None:
    call = served.open(method)
    await call.write(ask("decode", kind=ENDPOINTS_TYPE if method == ADS else ""))
    assert content(await call.read()) == {"decode": ["10.0.0.1:1"]}
    served.endpoints.publish(TWO)
    reply = await call.read()
    assert content(reply) == {"decode": TWO["decode"]}
    await call.write(ask("decode", nonce=reply.nonce, error="no"))
    await until(lambda: served.nacks == 1)
    call.cancel()


@pytest.mark.parametrize("method", [DELTA_ADS, DELTA_EDS])
async def test_delta_on_a_stream(served: Served, method: str) -> None:
    call = served.open(method)
    await call.write(ask_delta("decode", kind=ENDPOINTS_TYPE if method == DELTA_ADS else ""))
    assert delta_content(await call.read()) == {"decode": ["10.0.0.1:1"]}
    served.endpoints.publish(TWO)
    assert delta_content(await call.read()) == {"decode": TWO["decode"]}
    call.cancel()


async def test_a_burst_of_changes_ends_with_the_last_one(served: Served) -> None:
    call = served.open(ADS)
    await call.write(ask("decode"))
    await call.read()
    for i in range(200):
        served.endpoints.publish({"decode": [f"10.0.1.{i}:1"], "prefill": []})
    reply, replies = await call.read(), 1
    while content(reply) != {"decode": ["10.0.1.199:1"]}:
        reply, replies = await call.read(), replies + 1
    assert replies < 200, "changes that nobody could take in time are skipped"
    call.cancel()


async def test_the_number_of_streams_is_bounded_and_ends_are_noticed(served: Served) -> None:
    first, second = served.open(ADS), served.open(DELTA_ADS)
    await first.write(ask("decode"))
    await second.write(ask_delta("decode"))
    await first.read()
    await second.read()
    assert served.endpoints.status()["streams"] == 2
    third = served.open(ADS)
    assert await third.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    first.cancel()
    await until(lambda: served.endpoints.status()["streams"] == 1)
    await second.done_writing()
    assert await second.code() is grpc.StatusCode.OK
    await until(lambda: served.endpoints.status()["streams"] == 0)


async def test_what_no_stream_may_ask_for_ends_it_with_the_reason(served: Served) -> None:
    call = served.open(EDS)
    await call.write(ask(kind=CLUSTERS))
    assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "on a stream for" in await call.details()


async def test_a_server_that_drains_is_not_held_up_by_discovery(served: Served) -> None:
    call = served.open(ADS)
    await call.write(ask("decode"))
    await call.read()
    served.endpoints.close()
    async with asyncio.timeout(5):
        await served.server.stop(60)
    assert await call.read() is grpc.aio.EOF


async def test_a_closed_server_takes_no_new_stream(served: Served) -> None:
    served.endpoints.close()
    assert await served.open(ADS).code() is grpc.StatusCode.UNAVAILABLE
