"""The manifests for Istio and Envoy Gateway, as their control planes put them into Envoy, with real requests."""

from __future__ import annotations

import asyncio
import copy
import io
import json
from collections.abc import AsyncIterator
from functools import partial

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from extproc.headers import ROUTING_HEADERS
from tests.stack.fake_worker import PARAMS_BYTES, FakeWorker, Received, begun_until
from tests.stack.mesh import envoy_gateway, istio
from tests.stack.mesh.manifests import load, of_kind
from tests.stack.mesh.stack import Build, MeshStack

ISTIO = "istio"
SHAPES: dict[str, Build] = {
    ISTIO: partial(istio.configuration, load("envoy/istio/envoyfilter.yaml")),
    "gateway-buffered": partial(envoy_gateway.configuration, load("envoy/gateway/buffered.yaml")),
    # The newest releases, which have it in the route.
    "gateway-in-route": partial(envoy_gateway.configuration, load("envoy/gateway/buffered.yaml"), in_route=True),
    "gateway-full-duplex": partial(envoy_gateway.configuration, load("envoy/gateway/full-duplex.yaml")),
    "gateway-exact-pin": partial(envoy_gateway.configuration, load("envoy/gateway/exact-pin.yaml")),
}
EXACT = (ISTIO, "gateway-exact-pin")

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=SHAPES)
async def running(request: pytest.FixtureRequest) -> AsyncIterator[tuple[str, MeshStack]]:
    async with MeshStack(SHAPES[request.param]) as stack:
        yield request.param, stack


@pytest_asyncio.fixture(loop_scope="module")
async def mesh(running: tuple[str, MeshStack]) -> MeshStack:
    running[1].reset()
    return running[1]


async def ask(mesh: MeshStack, body: bytes, **headers: str) -> tuple[int, bytes]:
    sent = {"content-type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    async with mesh.http.post("/v1/completions", data=io.BytesIO(body), headers=sent) as response:
        return response.status, await response.read()


def by_gateway(*workers: FakeWorker) -> list[Received]:
    """What came through Envoy: the filter itself asks workers to give blocks back."""
    return [received for worker in workers for received in worker.received if "x-forwarded-for" in received.headers]


async def test_prompt_is_prefilled_by_one_worker_and_streamed_by_the_one_that_was_named(mesh: MeshStack) -> None:
    for _ in range(4):
        status, answer = await ask(mesh, b'{"model":"m","prompt":"hello","stream":true}')
        assert status == 200 and answer.endswith(b"data: [DONE]\n\n") and answer.count(b"data: ") == 4
    assert len(mesh.prefill.received) == 4
    assert [len(worker.received) for worker in mesh.decode] == [2, 2], "the pin did not hold: round robin was chosen"
    for worker in mesh.decode:
        for received in worker.received:
            assert PARAMS_BYTES in received.body
            assert received.headers["x-gateway-destination-endpoint"] == worker.address


@pytest.mark.parametrize("size", [40_000, 1_500_000, 5_000_000])
async def test_body_larger_than_the_meshs_own_buffers_reaches_both_workers_whole(mesh: MeshStack, size: int) -> None:
    prompt = "word " * (size // 5)
    status, _ = await ask(mesh, json.dumps({"model": "m", "prompt": prompt}).encode())
    assert status == 200
    (received,) = [each for worker in mesh.decode for each in worker.received]
    assert received.json["prompt"] == prompt and mesh.prefill.last.json["prompt"] == prompt


async def test_clients_routing_headers_steer_nothing_and_reach_no_worker(mesh: MeshStack) -> None:
    evil = dict.fromkeys(ROUTING_HEADERS, mesh.outside.address)
    status, _ = await ask(mesh, b'{"model":"m","prompt":"hello"}', **evil)
    assert status == 200
    assert not by_gateway(mesh.outside)
    for worker in (mesh.prefill, *mesh.decode):
        for received in worker.received:
            assert mesh.outside.address not in received.headers.values()


async def test_clients_transfer_parameters_reach_no_worker(mesh: MeshStack) -> None:
    body = b'{"model":"m","prompt":"hello","kv_transfer_params":{"remote_host":"10.9.9.9","do_remote_prefill":true}}'
    status, _ = await ask(mesh, body)
    assert status == 200
    for worker in (mesh.prefill, *mesh.decode):
        assert all(b"10.9.9.9" not in received.body for received in worker.received)


async def test_end_of_an_answer_frees_the_worker(mesh: MeshStack) -> None:
    gate = asyncio.Event()
    for worker in mesh.decode:
        worker.answer = begun_until(gate)
    body = {"model": "m", "prompt": "hello", "stream": True}
    async with asyncio.timeout(20), mesh.http.post("/v1/completions", json=body) as response:
        await response.content.readexactly(len(b"begun "))
        assert await mesh.gauge("baton_endpoint_in_flight") == 1, "while tokens come"
        gate.set()
        assert await response.read() == b"done"
        while await mesh.gauge("baton_endpoint_in_flight"):
            await asyncio.sleep(0.02)


async def test_what_runs_behind_the_gateway_already_is_not_read_by_the_filter(mesh: MeshStack) -> None:
    body = b'{"not":"for us","kv_transfer_params":{"kept":true}}'
    async with mesh.http.post("/anything", data=body, headers={"host": "other.test", "x-of-theirs": "kept"}) as response:
        assert response.status == 200
    assert mesh.other.last.body == body and mesh.other.last.headers["x-of-theirs"] == "kept"
    assert not mesh.prefill.received and not by_gateway(*mesh.decode)


async def test_no_time_limit_and_no_retry_is_on_the_route(mesh: MeshStack) -> None:
    async with aiohttp.ClientSession() as session, session.get(f"{mesh.envoy_admin}/config_dump") as response:
        dump = await response.json(content_type=None)
    routes = [
        route
        for section in dump["configs"]
        for each in section.get("static_route_configs", [])
        for host in each["route_config"]["virtual_hosts"]
        for route in host["routes"]
        if "*" in host["domains"]
    ]
    (route,) = routes
    assert route["route"]["timeout"] == "0s"
    assert route["route"].get("retry_policy", {}).get("num_retries", 0) == 0


async def test_failing_worker_is_asked_once(mesh: MeshStack) -> None:
    async def fails(_: web.Request, __: bytes) -> web.StreamResponse:
        return web.Response(status=503, text="no")

    for worker in mesh.decode:
        worker.answer = fails
    status, _ = await ask(mesh, b'{"model":"m","prompt":"hello"}')
    assert status == 503
    assert len(by_gateway(*mesh.decode)) == 1, "KV blocks are good for one attempt"


async def test_without_the_filter_nothing_reaches_a_worker(running: tuple[str, MeshStack], mesh: MeshStack) -> None:
    shape, _ = running
    await mesh.stop_filter()
    try:
        status, answer = await ask(mesh, b'{"model":"m","prompt":"hello"}')
        if shape == ISTIO:
            assert status == 503 and json.loads(answer)["error"]["code"] == "filter_unavailable"
        else:
            assert status == 500, "ext_proc's own answer: Envoy Gateway says nothing else"
        assert not mesh.prefill.received and not by_gateway(*mesh.decode)
        async with mesh.http.post("/anything", data=b"x", headers={"host": "other.test"}) as response:
            assert response.status == 200, "and others are served as ever"
    finally:
        await mesh.start_filter()


async def test_filter_that_dies_cuts_answers_only_where_the_mesh_cannot_say_otherwise(
    running: tuple[str, MeshStack], mesh: MeshStack
) -> None:
    shape, _ = running
    gate = asyncio.Event()
    for worker in mesh.decode:
        worker.answer = begun_until(gate)
    body = {"model": "m", "prompt": "hello", "stream": True}
    try:
        async with asyncio.timeout(20), mesh.http.post("/v1/completions", json=body) as response:
            await response.content.readexactly(len(b"begun "))
            await mesh.kill_filter()
            gate.set()
            if shape == ISTIO:
                assert await response.read() == b"done"
            else:
                with pytest.raises(aiohttp.ClientPayloadError):
                    await response.read()
    finally:
        await mesh.start_filter()


async def test_istio_uses_a_filter_that_came_back_as_soon_as_its_health_check_is_good() -> None:
    """By default, Envoy's load balancer may hear of it a second later: one restart in four was a second of errors longer."""
    patches = [
        patch["patch"]["value"]["common_lb_config"]
        for each in of_kind(load("envoy/istio/envoyfilter.yaml"), "EnvoyFilter")
        for patch in each["spec"]["configPatches"]
        if "health_checks" in patch["patch"].get("value", {})
    ]
    assert [each["update_merge_window"] for each in patches] == ["0s"]


@pytest.mark.parametrize("shape", SHAPES)
async def test_worker_that_the_mesh_does_not_know_is_never_connected_to(shape: str) -> None:
    """The filter itself names it: a worker that the gateway's Service has dropped, or never had."""
    async with MeshStack(SHAPES[shape], decode_from="outside") as stack:
        status, _ = await ask(stack, b'{"model":"m","prompt":"hello"}')
        assert not by_gateway(stack.outside)
        if shape in EXACT:
            assert status == 503 and not by_gateway(*stack.decode), "nobody else takes it"
        else:
            assert status == 200 and len(by_gateway(*stack.decode)) == 1, "another one of the pool takes it"


async def test_istio_speaks_tls_to_a_filter_with_a_certificate_of_its_own() -> None:
    """`filter.tls.mode: self_signed`: what the chart then adds to the DestinationRule."""
    objects = copy.deepcopy(load("envoy/istio/envoyfilter.yaml"))
    (rule,) = [each for each in of_kind(objects, "DestinationRule") if each["metadata"]["name"] == "baton-filter"]
    rule["spec"]["trafficPolicy"]["tls"] = {"mode": "SIMPLE", "insecureSkipVerify": True}
    async with MeshStack(partial(istio.configuration, objects), tls="self_signed") as stack:
        status, _ = await ask(stack, b'{"model":"m","prompt":"hello"}')
        assert status == 200
        assert len(by_gateway(*stack.decode)) == 1 and len(stack.prefill.received) == 1
