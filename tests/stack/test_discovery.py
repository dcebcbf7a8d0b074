"""The real Envoy learns the workers, pins requests to them, and says who served; with the filter there and without it."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from extproc.wire import Immediate, Mutation
from tests.stack.fake_worker import begun_until
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
        first.answer = begun_until(gate)
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


# --- while no filter is there -------------------------------------------------------------------------------------------

OPEN = {"filter_down": "round_robin"}
PROMPT = b'{"model":"m","prompt":"Wie geht\'s \\u00e9 \\n","max_tokens":3}'


async def post(
    gateway: Gateway, body: bytes = PROMPT, path: str = "/v1/completions", kind: str = "application/json", **headers: str
) -> tuple[int, str]:
    sent = {"content-type": kind, **{name.replace("_", "-"): value for name, value in headers.items()}}
    async with gateway.http.post(path, data=io.BytesIO(body), headers=sent) as response:
        return response.status, await response.text()


@pytest.fixture(scope="module")
async def orphan() -> AsyncIterator[Gateway]:
    """An Envoy that lets prompts through and whose filter went away."""
    async with running(**FILE, **OPEN) as gateway:
        await gateway.stop_filter()
        yield gateway


@pytest.fixture
def alone(orphan: Gateway) -> Gateway:
    for worker in orphan.workers:
        worker.reset()
    return orphan


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses?x=1", "/v1/messages"])
async def test_prompts_go_to_decode_workers_in_turn(alone: Gateway, path: str) -> None:
    for _ in range(4):
        assert (await post(alone, path=path, kind="Application/JSON; charset=utf-8"))[0] == 200
    assert [len(worker.received) for worker in alone.workers] == [2, 2]
    received = alone.workers[0].last
    assert (received.body, received.path) == (PROMPT, path)
    assert "x-baton-filter-down" not in received.headers


async def test_a_prompt_of_megabytes_goes_through_whole(alone: Gateway) -> None:
    body = b'{"prompt":"' + b"word " * 1_000_000 + b'"}'
    assert (await post(alone, body))[0] == 200
    assert [worker.last.body == body for worker in alone.workers if worker.received] == [True]


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt":"a","kv_transfer_params":{"do_remote_prefill":true}}',
        b'{"prompt":"a","ec_transfer_params":{}}',
        b'{"prompt":"a","vllm_xargs":{}}',
        b'{"prompt":"a","sampling_params":{"extra_args":{}}}',
        b'{"prompt":"a","\\u006bv_transfer_params":{}}',
        b'{"prompt":"a","kv\\u005Ftransfer_params":{}}',
        b'{"prompt":"a","vllm_xarg\\u0073":{}}',
        '{"prompt":"a","kv_transfer_params":{}}'.encode("utf-16"),
        '{"prompt":"a","kv_transfer_params":{}}'.encode("utf-16-be"),
        '{"prompt":"a","kv_transfer_params":{}}'.encode("utf-32-le"),
        b'{"prompt":"' + b"word " * 500_000 + b'","kv_transfer_params":{}}',
    ],
)
async def test_a_body_that_could_hold_transfer_keys_reaches_nobody(alone: Gateway, body: bytes) -> None:
    status, text = await post(alone, body)
    assert (status, "filter_unavailable" in text) == (503, True)
    assert all(worker.received == [] for worker in alone.workers)


@pytest.mark.parametrize(
    ("path", "kind", "headers"),
    [
        ("/sleep", "application/json", {}),
        ("/v1/load_lora_adapter", "application/json", {}),
        ("/v1/embeddings", "application/json", {}),
        ("/inference/v1/generate", "application/json", {}),
        ("/v1/completions/", "application/json", {}),
        ("/v1/completions", "multipart/form-data; boundary=x", {}),
        ("/v1/completions", "application/vnd.api+json", {}),
        ("/v1/completions", "application/json", {"content_encoding": "gzip"}),
        ("/sleep", "application/json", {"x_baton_filter_down": "1"}),
        ("/sleep", "application/json", {"x_gateway_destination_endpoint": "127.0.0.1:1"}),
    ],
)
async def test_nothing_but_prompts_reaches_anybody(alone: Gateway, path: str, kind: str, headers: dict[str, str]) -> None:
    assert (await post(alone, path=path, kind=kind, **headers))[0] == 503
    assert all(worker.received == [] for worker in alone.workers)


async def test_control_endpoints_stay_out_of_reach_with_any_method(alone: Gateway) -> None:
    for path in ("/metrics", "/health", "/server_info"):
        assert (await alone.get(path=path))[0] == 503
    assert all(worker.received == [] for worker in alone.workers)


@pytest.mark.parametrize("marked", [{}, {"x_baton_filter_down": "1"}], ids=["plain", "marked by the client"])
async def test_with_the_filter_back_it_decides_again(marked: dict[str, str]) -> None:
    async with running(known=1, **FILE, **OPEN) as gateway:
        first, second = gateway.workers
        assert (await post(gateway, x_test_to=first.address, **marked))[0] == 200
        assert (await post(gateway, x_test_to=second.address, **marked))[0] == 503, "a pin is exact, also here"
        assert await gateway.stat("http.front.ext_proc.failure_mode_allowed") == 0
        # What the filter names a worker for may hold the keys: they are its own.
        assert (await post(gateway, b'{"kv_transfer_params":{}}', x_test_to=first.address))[0] == 200
        await gateway.stop_filter()
        assert (await post(gateway))[0] == 200
        assert await gateway.stat("http.front.ext_proc.failure_mode_allowed") == 1


async def test_a_filter_that_dies_with_a_request_in_its_hands_loses_nothing() -> None:
    async with running(known=1, **FILE, **OPEN) as gateway:
        gateway.hold = True
        request = asyncio.create_task(post(gateway))
        async with asyncio.timeout(10):
            while not gateway.holding:
                await asyncio.sleep(0.01)
        await gateway.stop_filter()
        assert (await request)[0] == 200
        assert gateway.workers[0].last.body == PROMPT


async def test_a_reply_of_the_filter_that_envoy_refuses_lets_nothing_through() -> None:
    async with running(known=1, **FILE, **OPEN) as gateway:
        worker = gateway.workers[0]
        gateway.on_body = Mutation(body=b"{}", destination=worker.address)
        assert (await post(gateway, b'{"prompt":"a","kv_transfer_params":{}}'))[0] == 200
        gateway.on_body = Mutation(body=b"{}", destination=worker.address, set_headers={"x-forbidden": "1"})
        assert (await post(gateway, b'{"prompt":"a","kv_transfer_params":{}}'))[0] == 503
        assert [received.body for received in worker.received] == [b"{}"]
