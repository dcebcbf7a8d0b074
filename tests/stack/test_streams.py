"""Clients that leave, processes that stop, and many requests at once."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import struct
import time

import aiohttp
import grpc
import pytest
from aiohttp import web
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.stack.fake_worker import when
from tests.stack.harness import Stack
from tests.stack.test_errors import PROMPT, error_of
from tests.stack.test_legs import post


async def until(condition, timeout_s: float = 20.0) -> float:
    """Wait for it; the time (monotonic) when it held."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)
    return time.monotonic()


async def connect(stack: Stack) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", int(stack.base.rpartition(":")[2]))


def request_bytes(body: bytes) -> bytes:
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


async def hang(_: web.Request, __: bytes) -> web.StreamResponse:
    await asyncio.sleep(60)
    raise AssertionError("nobody cancelled")


@pytest.mark.parametrize("how", ["fin", "reset"])
async def test_a_client_that_leaves_during_the_prefill_cancels_the_call_at_once(stack: Stack, how: str) -> None:
    stack.prefill[0].answer = hang
    _, writer = await connect(stack)
    writer.write(request_bytes(PROMPT))
    await until(lambda: stack.prefill[0].received)
    await asyncio.sleep(0.1)
    assert stack.prefill[0].last.gone_at is None
    if how == "reset":
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    left_at = time.monotonic()
    writer.close()
    await until(lambda: stack.prefill[0].last.gone_at is not None)
    gone_at = stack.prefill[0].last.gone_at
    assert gone_at is not None and gone_at - left_at < 0.2
    assert stack.decode_received == []
    metrics = await stack.metrics()
    assert metrics[f'baton_endpoint_in_flight{{endpoint="{stack.prefill[0].address}",role="prefill"}}'] == 0
    assert metrics["baton_prefills_in_flight"] == 0


async def test_a_client_that_leaves_during_the_answer_ends_it_on_the_worker(stack: Stack) -> None:
    async def endless(request: web.Request, _: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        while True:
            await response.write(b"data: x\n\n")
            await asyncio.sleep(0.01)

    for worker in stack.decode:
        worker.answer = endless
    reader, writer = await connect(stack)
    writer.write(request_bytes(PROMPT))
    await reader.readuntil(b"data: x")
    metrics = await stack.metrics()
    assert sum(v for k, v in metrics.items() if k.startswith("baton_endpoint_in_flight") and "decode" in k) == 1
    writer.close()
    async with asyncio.timeout(20):
        while (await stack.metrics())["baton_streams"] != 0:
            await asyncio.sleep(0.02)
    metrics = await stack.metrics()
    assert sum(v for k, v in metrics.items() if k.startswith("baton_endpoint_in_flight")) == 0


async def test_tokens_reach_the_client_one_by_one_and_the_decode_count_lasts_as_long(stack: Stack) -> None:
    gate = asyncio.Event()

    async def gated(request: web.Request, _: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        await gate.wait()
        await response.write(b"data: 2\n\n")
        return response

    for worker in stack.decode:
        worker.answer = gated
    async with stack.http.post("/v1/completions", json={"model": "m", "prompt": "a", "stream": True}) as response:
        assert await response.content.readany() == b"data: 1\n\n"
        metrics = await stack.metrics()
        assert sum(v for k, v in metrics.items() if k.startswith("baton_endpoint_in_flight") and "decode" in k) == 1
        assert sum(v for k, v in metrics.items() if k.startswith("baton_endpoint_in_flight") and "prefill" in k) == 0
        gate.set()
        assert await response.content.read() == b"data: 2\n\n"


async def health_of(stack: Stack, service: str) -> int:
    async with grpc.aio.insecure_channel(stack.config.listen) as channel:
        reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
        return reply.status


SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
EXT_PROC = "envoy.service.ext_proc.v3.ExternalProcessor"


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_readiness_needs_a_live_worker_of_both_roles(stack: Stack, role: str) -> None:
    async def readiness_is(status: int) -> None:
        async with asyncio.timeout(20):
            while await health_of(stack, "readiness") != status or await health_of(stack, "") != status:
                await asyncio.sleep(0.05)

    await readiness_is(SERVING)
    for worker in getattr(stack, role):
        worker.healthy = False
    await readiness_is(NOT_SERVING)
    assert await health_of(stack, "liveness") == SERVING
    status, answer, _ = await post(stack, "/v1/completions", PROMPT)
    assert status == 503 and error_of(answer)["code"] == f"no_{role}_worker"
    for worker in getattr(stack, role):
        worker.healthy = True
    await readiness_is(SERVING)
    status, _, _ = await post(stack, "/v1/completions", PROMPT)
    assert status == 200


async def test_a_worker_that_is_not_live_gets_nothing(stack: Stack) -> None:
    stack.decode[0].healthy = False
    name = f'baton_endpoint_live{{endpoint="{stack.decode[0].address}",role="decode"}}'
    async with asyncio.timeout(20):
        while (await stack.metrics())[name] != 0:
            await asyncio.sleep(0.02)
    for _ in range(4):
        status, answer, _ = await post(stack, "/v1/completions", PROMPT)
        assert status == 200 and json.loads(answer)["served_by"] == "decode-1"
    stack.decode[0].healthy = True
    async with asyncio.timeout(20):
        while (await stack.metrics())[name] != 1:
            await asyncio.sleep(0.02)


async def test_at_sigterm_health_goes_off_open_requests_finish_and_then_the_filter_ends() -> None:
    async with Stack(decode=1) as stack:
        prefill_gate, decode_gate = asyncio.Event(), asyncio.Event()

        async def slow_stream(request: web.Request, _: bytes) -> web.StreamResponse:
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            await response.write(b"data: first\n\n")
            await decode_gate.wait()
            await response.write(b"data: last\n\n")
            return response

        stack.decode[0].answer = slow_stream
        streaming = asyncio.create_task(post(stack, "/v1/completions", PROMPT))
        await until(lambda: stack.decode[0].received)
        stack.prefill[0].answer = when(prefill_gate)
        prefilling = asyncio.create_task(post(stack, "/v1/completions", PROMPT))
        await until(lambda: len(stack.prefill[0].received) == 2)

        stack.signal_filter(signal.SIGTERM)
        async with asyncio.timeout(10):
            while await health_of(stack, EXT_PROC) != NOT_SERVING:
                await asyncio.sleep(0.02)
        assert await health_of(stack, "readiness") == NOT_SERVING
        await asyncio.sleep(1.0)  # longer than drain.delay_s
        assert stack.filter.poll() is None
        prefill_gate.set()
        await until(lambda: len(stack.decode[0].received) == 2)
        decode_gate.set()
        for task in (streaming, prefilling):
            status, answer, _ = await task
            assert (status, answer) == (200, b"data: first\n\ndata: last\n\n")
        await until(lambda: stack.filter.poll() is not None, 10)
        assert stack.filter.poll() == 0
        assert stack.log_lines()[-1]["event"] == "stopped"


async def test_a_second_sigterm_does_not_wait_for_open_requests() -> None:
    async with Stack(decode=1) as stack:
        stack.prefill[0].answer = hang
        held = asyncio.create_task(post(stack, "/v1/completions", PROMPT))
        await until(lambda: stack.prefill[0].received)
        stack.signal_filter(signal.SIGTERM)
        await asyncio.sleep(0.2)
        stack.signal_filter(signal.SIGTERM)
        await until(lambda: stack.filter.poll() is not None, 5)
        status, _, _ = await held
        assert status == 503


@pytest.mark.timeout(180)
async def test_three_thousand_requests_held_in_prefill_are_no_error(stack: Stack) -> None:
    """Envoy's circuit breakers (1,024) and gRPC's own overload guard would refuse most of them."""
    many = 3000
    gate = asyncio.Event()

    stack.prefill[0].answer = when(gate)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(stack.base, connector=connector, timeout=aiohttp.ClientTimeout(total=150)) as http:

        async def one() -> int:
            async with http.post("/v1/completions", data=PROMPT, headers={"content-type": "application/json"}) as response:
                await response.read()
                return response.status

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one()) for _ in range(many)]
            await until(lambda: len(stack.prefill[0].received) == many or any(task.done() for task in tasks), 120)
            early = next((task.result() for task in tasks if task.done()), None)
            in_flight = (await stack.metrics())["baton_prefills_in_flight"]
            gate.set()
    assert (early, in_flight) == (None, many)
    assert [task.result() for task in tasks] == [200] * many
    assert sum(len(worker.received) for worker in stack.decode) == many
