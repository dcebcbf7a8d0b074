"""The real Envoy learns the workers, pins requests to them, and says who served; with the filter there and without it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from extproc.wire import Immediate
from tests.stack.gateway import TO, Gateway

FILE = {"eds": "file"}
GRPC = {"eds": "grpc"}
STATE_OF_THE_WORLD = {"eds": "grpc", "replace": ("api_type: DELTA_GRPC", "api_type: GRPC")}
OF_ITS_OWN = {
    # A mesh may give each cluster a stream of its own instead of ADS.
    "eds": "grpc",
    "replace": (
        "ads: {}",
        "api_config_source: {api_type: DELTA_GRPC, transport_api_version: V3,"
        " grpc_services: [{envoy_grpc: {cluster_name: extproc}}]}",
    ),
}
WAYS: Any = pytest.mark.parametrize(
    "way", [FILE, GRPC, STATE_OF_THE_WORLD, OF_ITS_OWN], ids=["file", "delta", "state-of-the-world", "eds-stream"]
)


@asynccontextmanager
async def running(*, known: int = 2, **settings: Any) -> AsyncIterator[Gateway]:
    """A gateway that knows the first ``known`` of its two workers."""
    async with Gateway(**settings) as gateway:
        await gateway.start_filter()
        gateway.publish(*[worker.address for worker in gateway.workers[:known]])
        await gateway.start_envoy()
        await gateway.until_served(gateway.workers[0].address)
        for worker in gateway.workers:
            worker.reset()
        gateway.answers.clear()
        yield gateway


@WAYS
async def test_a_worker_that_comes_is_served_and_one_that_goes_finishes_what_it_has(way: dict[str, Any]) -> None:
    async with running(known=1, **way) as gateway:
        first, second = gateway.workers
        assert (await gateway.get(second.address))[0] == 503, "nobody but the named worker, and that one is not known"
        gateway.publish(first.address, second.address)
        await gateway.until_hosts(first.address, second.address)
        assert (await gateway.get(second.address))[0] == 200

        gate = asyncio.Event()

        async def slow(request: web.Request, _: bytes) -> web.StreamResponse:
            response = web.StreamResponse()
            await response.prepare(request)
            await response.write(b"begun ")
            await gate.wait()
            await response.write(b"done")
            return response

        first.answer = slow
        async with gateway.http.get("/version", headers={TO: first.address}) as response:
            gateway.publish(second.address)
            await gateway.until_hosts(second.address)
            gate.set()
            assert await response.text() == "begun done"
        assert (await gateway.get(first.address))[0] == 503
        assert (await gateway.get(second.address))[0] == 200
        gateway.publish()
        await gateway.until_hosts()
        assert (await gateway.get(second.address))[0] == 503


async def test_envoy_starts_without_the_filter_and_finds_it_later() -> None:
    async with Gateway(**GRPC) as gateway:
        await gateway.start_envoy()
        status, text, _ = await gateway.get(gateway.workers[0].address)
        assert (status, "filter_unavailable" in text) == (503, True)
        await gateway.start_filter()
        gateway.publish(gateway.workers[0].address)
        await gateway.until_served(gateway.workers[0].address)


async def test_envoy_keeps_its_workers_while_the_filter_restarts_and_hears_what_changed() -> None:
    async with running(known=1, **GRPC) as gateway:
        first, second = gateway.workers
        await gateway.stop_filter()
        await asyncio.sleep(0.5)
        assert await gateway.hosts() == [first.address]
        await gateway.start_filter()
        gateway.publish(first.address, second.address)
        await gateway.until_hosts(first.address, second.address)
        await gateway.until_served(second.address)


@pytest.mark.parametrize("way", [GRPC, STATE_OF_THE_WORLD], ids=["delta", "state-of-the-world"])
async def test_endpoints_that_envoy_refuses_are_counted_and_change_nothing(way: dict[str, Any]) -> None:
    async with running(known=1, **way) as gateway:
        first, second = gateway.workers
        gateway.publish("not-an-address:1")
        async with asyncio.timeout(10):
            while not gateway.nacks:
                await asyncio.sleep(0.02)
        assert await gateway.hosts() == [first.address]
        await asyncio.sleep(0.3)
        assert gateway.nacks == 1, "what was refused is not sent again"
        gateway.publish(second.address)
        await gateway.until_hosts(second.address)


@pytest.mark.parametrize("way", [FILE, {"pin": "original_dst"}], ids=["exact", "original_dst"])
async def test_the_filter_learns_who_served(way: dict[str, Any]) -> None:
    async with running(**way) as gateway:
        for worker in (*gateway.workers, gateway.workers[0]):
            status, text, _ = await gateway.get(worker.address)
            assert (status, worker.name in text) == (200, True)
            assert (gateway.answers[-1].status, gateway.answers[-1].served) == (200, worker.address)


async def test_nobody_served_what_nobody_could_take() -> None:
    async with running(known=1, **FILE) as gateway:
        status, _, _ = await gateway.get(gateway.workers[1].address)
        assert (status, gateway.answers[-1].status, gateway.answers[-1].served) == (503, 503, None)


@pytest.mark.parametrize("settings", [FILE, {"pin": "original_dst"}], ids=["exact", "original_dst"])
async def test_a_client_cannot_name_a_worker(settings: dict[str, Any]) -> None:
    async with running(**settings) as gateway:
        address = gateway.workers[0].address
        async with gateway.http.get("/version", headers={"x-gateway-destination-endpoint": address}) as response:
            assert response.status == 503
        assert gateway.workers[0].received == []


async def test_filter_says_when_to_try_again_and_why_it_chose() -> None:
    async with running(**FILE) as gateway:
        gateway.answer_headers = {"x-baton-decision": "decode=127.0.0.1:1;ttft_ms=12"}
        status, _, headers = await gateway.get(gateway.workers[0].address)
        assert (status, headers["x-baton-decision"]) == (200, "decode=127.0.0.1:1;ttft_ms=12")
        gateway.instead = Immediate(429, b'{"error":{}}', "shed", headers={"retry-after": "7", "x-baton-decision": "shed"})
        status, text, headers = await gateway.get()
        assert (status, text) == (429, '{"error":{}}')
        assert (headers["retry-after"], headers["x-baton-decision"]) == ("7", "shed")
        assert headers["content-type"] == "application/json"


async def test_more_requests_than_the_circuit_breaker_lets_through_are_refused_at_once() -> None:
    async with running(known=1, max_requests=1, **FILE) as gateway:
        [worker, _] = gateway.workers
        gate = asyncio.Event()

        async def held(request: web.Request, _: bytes) -> web.StreamResponse:
            await gate.wait()
            return web.Response()

        worker.answer = held
        first = asyncio.create_task(gateway.get(worker.address))
        async with asyncio.timeout(10):
            while not worker.received:
                await asyncio.sleep(0.01)
        status, text, _ = await gateway.get(worker.address)
        assert (status, "upstream_unavailable" in text) == (503, True)
        gate.set()
        assert (await first)[0] == 200
