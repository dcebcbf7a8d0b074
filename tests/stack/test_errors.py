"""What the client is told, and that it is told in the shape of the OpenAI API, whoever answers: filter, Envoy or worker."""

from __future__ import annotations

import asyncio
import io
import json

import pytest
from aiohttp import web

from tests.stack.fake_worker import PARAMS, when
from tests.stack.harness import Stack
from tests.stack.test_legs import post

PROMPT = b'{"model":"m","prompt":"a"}'


def error_of(answer: bytes) -> dict[str, object]:
    error = json.loads(answer)["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return error


@pytest.mark.parametrize(
    "path",
    [
        "/scale_elastic_ep",
        "/is_scaling_elastic_ep",
        "/sleep",
        "/collective_rpc",
        "/fault_tolerance/apply",
        "/v1/load_lora_adapter",
        "/inference/v1/abort_requests",
        "/metrics",
        "//scale_elastic_ep",
        "/v1/../scale_elastic_ep",
        "/scale_elastic_ep/",
        "/%73cale_elastic_ep",
        "/scale_elastic_ep?x=/v1/models",
    ],
)
async def test_control_endpoints_are_refused_in_every_spelling(stack: Stack, path: str) -> None:
    # yarl would tidy the path up; what goes out must be what stands here.
    reader, writer = await asyncio.open_connection("127.0.0.1", int(stack.base.rpartition(":")[2]))
    writer.write(f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{{}}".encode())
    raw = await reader.read()
    writer.close()
    status = int(raw.split(b" ")[1])
    assert status == 404
    body = raw.partition(b"\r\n\r\n")[2]
    assert error_of(body)["code"] == "not_found"
    assert stack.decode_received == [] and stack.prefill[0].received == []


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "empty_body"),
        (b"{", "invalid_json"),
        (b'{"prompt":"a",}', "invalid_json"),
        (b'{"prompt":NaN}', "invalid_json"),
        (b'{"prompt":"\xff"}', "invalid_json"),
        (b'{"prompt":' + b"[" * 10_000 + b"]" * 10_000 + b"}", "invalid_json"),
        (b"[]", "not_an_object"),
        (b'"text"', "not_an_object"),
        ('{"prompt":"a"}'.encode("utf-16"), "invalid_json"),
    ],
)
async def test_what_is_no_json_object_is_refused_before_any_worker(stack: Stack, body: bytes, code: str) -> None:
    status, answer, headers = await post(stack, "/v1/chat/completions", body)
    assert status == 400 and headers["content-type"] == "application/json"
    error = error_of(answer)
    assert error["code"] == code and error["type"] == "invalid_request_error"
    assert stack.decode_received == [] and stack.prefill[0].received == []
    assert '"internal_error"' not in stack.filter.log.read_text()


@pytest.mark.parametrize("kind", ["text/plain", "text/json", "application/jsonl", "application/vnd.api+json", ""])
async def test_a_prompt_that_is_not_declared_json_is_refused(stack: Stack, kind: str) -> None:
    status, answer, _ = await post(stack, "/v1/completions", PROMPT, **{"content-type": kind})
    assert status == 415 and error_of(answer)["code"] == "unsupported_media_type"


async def test_json_that_no_parser_of_ours_reads_never_passes(stack: Stack) -> None:
    # The engine's JSON reader takes UTF-16 as well: passed on unread, this would carry transfer keys past the filter.
    body = '{"kv_transfer_params":{"do_remote_prefill":true}}'.encode("utf-16")
    status, answer, _ = await post(stack, "/v1/embeddings", body)
    assert status == 400 and error_of(answer)["code"] == "invalid_json"
    assert stack.decode_received == []


def answering(status: int, body: bytes = b"{}", content_type: str = "application/json"):
    async def answer(_: web.Request, __: bytes) -> web.StreamResponse:
        return web.Response(status=status, body=body, content_type=content_type)

    return answer


@pytest.mark.parametrize("status", [500, 503, 429, 302])
async def test_a_prefill_that_fails_is_a_502(stack: Stack, status: int) -> None:
    stack.prefill[0].answer = answering(status)
    got, answer, _ = await post(stack, "/v1/completions", PROMPT)
    assert got == 502
    error = error_of(answer)
    assert error["code"] == "prefill_failed" and error["type"] == "server_error"
    assert stack.decode_received == []


@pytest.mark.parametrize("status", [400, 404, 422])
async def test_what_the_prefill_worker_refuses_the_client_is_told_as_it_is(stack: Stack, status: int) -> None:
    body = b'{"error":{"message":"maximum context length is 4096 tokens","type":"BadRequestError","param":null,"code":400}}'
    stack.prefill[0].answer = answering(status, body, "application/problem+json")
    got, answer, headers = await post(stack, "/v1/completions", PROMPT)
    assert (got, answer, headers["content-type"]) == (status, body, "application/problem+json")
    assert stack.decode_received == []


@pytest.mark.parametrize(
    "reply",
    [
        b"not json",
        b"{}",
        b'{"kv_transfer_params":null}',
        json.dumps({"kv_transfer_params": {**PARAMS, "remote_block_ids": []}}).encode(),
        json.dumps({"kv_transfer_params": {k: v for k, v in PARAMS.items() if k != "remote_request_id"}}).encode(),
        json.dumps({"kv_transfer_params": {k: v for k, v in PARAMS.items() if k != "remote_block_ids"}}).encode(),
    ],
)
async def test_params_that_would_kill_a_decode_engine_stop_here(stack: Stack, reply: bytes) -> None:
    stack.prefill[0].answer = answering(200, reply)
    status, answer, _ = await post(stack, "/v1/completions", PROMPT)
    assert status == 502 and error_of(answer)["code"] == "handoff_invalid"
    assert stack.decode_received == []


async def test_a_decode_workers_error_reaches_the_client_unchanged(stack: Stack) -> None:
    body = b'{"error":{"message":"boom","type":"InternalServerError","param":null,"code":500}}'
    for worker in stack.decode:
        worker.answer = answering(500, body)
    status, answer, _ = await post(stack, "/v1/completions", PROMPT)
    assert (status, answer) == (500, body)


LIMIT = 256 << 10


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("over", [False, True])
async def test_the_body_limit_is_a_413_and_a_body_just_under_it_works(chunked: bool, over: bool) -> None:
    async with Stack(decode=1, settings={"limits": {"max_body_bytes": LIMIT}}) as stack:
        frame = len(b'{"model":"m","prompt":""}')
        body = b'{"model":"m","prompt":"' + b"x" * (LIMIT - frame + (1 if over else 0)) + b'"}'
        assert len(body) == LIMIT + (1 if over else 0)

        async def pieces():
            for start in range(0, len(body), 16384):
                yield body[start : start + 16384]

        headers = {"content-type": "application/json"}
        async with stack.http.post("/v1/completions", data=pieces() if chunked else body, headers=headers) as response:
            answer = await response.read()
        if over:
            assert response.status == 413
            assert error_of(answer)["code"] == "request_too_large"
            assert response.headers["content-type"] == "application/json"
            assert stack.decode_received == [] and stack.prefill[0].received == []
        else:
            assert response.status == 200
            assert len(stack.prefill[0].last.body) > LIMIT and len(stack.decode[0].last.body) > LIMIT


async def test_a_body_of_the_default_limit_works_and_one_over_it_does_not(stack: Stack) -> None:
    limit = 64 << 20
    frame = len(b'{"model":"m","prompt":""}')
    for over, expected in ((0, 200), (1, 413)):
        body = io.BytesIO(b'{"model":"m","prompt":"' + b"x" * (limit - frame + over) + b'"}')
        async with stack.http.post("/v1/completions", data=body, headers={"content-type": "application/json"}) as response:
            answer = await response.read()
        assert response.status == expected
    assert error_of(answer)["code"] == "request_too_large"
    assert [len(worker.received) for worker in stack.prefill] == [1]
    assert len(stack.prefill[0].last.body) > limit


async def test_bodies_that_wait_are_bounded_together() -> None:
    limits = {"max_body_bytes": 1 << 16, "max_held_bytes": 1 << 17}
    async with Stack(decode=1, settings={"limits": limits}) as stack:
        gate = asyncio.Event()

        stack.prefill[0].answer = when(gate)
        body = b'{"model":"m","prompt":"' + b"x" * 40_000 + b'"}'
        held = [asyncio.create_task(post(stack, "/v1/completions", body)) for _ in range(3)]
        while len(stack.prefill[0].received) < 3:
            await asyncio.sleep(0.01)
        status, answer, _ = await post(stack, "/v1/completions", body)
        assert status == 429 and error_of(answer)["code"] == "too_many_requests"
        gate.set()
        assert [status for status, _, _ in await asyncio.gather(*held)] == [200] * 3
        assert (await post(stack, "/v1/completions", body))[0] == 200  # given back


async def test_more_requests_than_may_be_open_are_told_so() -> None:
    async with Stack(decode=1, settings={"limits": {"max_streams": 2}}) as stack:
        gate = asyncio.Event()

        stack.prefill[0].answer = when(gate)
        held = [asyncio.create_task(post(stack, "/v1/completions", PROMPT)) for _ in range(2)]
        while len(stack.prefill[0].received) < 2:
            await asyncio.sleep(0.01)
        status, answer, _ = await post(stack, "/v1/completions", PROMPT)
        assert status == 429 and error_of(answer)["type"] == "rate_limit_error"
        gate.set()
        assert [status for status, _, _ in await asyncio.gather(*held)] == [200] * 2


async def test_more_prefills_than_may_be_in_flight_are_told_so() -> None:
    async with Stack(prefill=2, decode=1, settings={"prefill": {"max_concurrent": 1, "fallback": "aggregate"}}) as stack:
        gate = asyncio.Event()

        for worker in stack.prefill:
            worker.answer = when(gate)
        held = asyncio.create_task(post(stack, "/v1/completions", PROMPT))
        while not any(worker.received for worker in stack.prefill):
            await asyncio.sleep(0.01)
        status, answer, _ = await post(stack, "/v1/completions", PROMPT)
        assert status == 429 and error_of(answer)["code"] == "too_many_requests"
        gate.set()
        assert (await held)[0] == 200


async def test_a_prefill_reply_of_unreasonable_size_is_an_error() -> None:
    async with Stack(decode=1, settings={"prefill": {"max_reply_bytes": 4096, "retries": 0}}) as stack:
        stack.prefill[0].answer = answering(200, b'{"x":"' + b"y" * 8192 + b'"}')
        status, answer, _ = await post(stack, "/v1/completions", PROMPT)
        assert status == 502 and error_of(answer)["code"] == "prefill_failed"


async def test_a_prefill_worker_that_is_gone_is_a_502_then_a_503() -> None:
    async with Stack(decode=1, settings={"health": {"interval_s": 0.5, "unhealthy_threshold": 2}}) as stack:
        await stack.prefill[0].__aexit__()
        status, answer, _ = await post(stack, "/v1/completions", PROMPT)
        assert status == 502 and error_of(answer)["code"] == "prefill_unreachable"
        async with asyncio.timeout(10):
            while status != 503:
                await asyncio.sleep(0.1)
                status, answer, _ = await post(stack, "/v1/completions", PROMPT)
        assert error_of(answer)["code"] == "no_prefill_worker"
        # What needs no prefill is served all the while.
        async with stack.http.get("/v1/models") as response:
            assert response.status == 200


async def test_a_prefill_over_its_deadline_is_a_504() -> None:
    async with Stack(decode=1, settings={"prefill": {"timeout_s": 0.5}}) as stack:
        gone = asyncio.Event()

        async def hang(_: web.Request, __: bytes) -> web.StreamResponse:
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                gone.set()
                raise
            raise AssertionError("never")

        stack.prefill[0].answer = hang
        status, answer, _ = await post(stack, "/v1/completions", PROMPT)
        assert status == 504 and error_of(answer)["code"] == "prefill_timeout"
        await asyncio.wait_for(gone.wait(), 10)  # the worker is not left computing


async def test_without_any_worker_the_client_gets_a_503_and_readiness_is_off() -> None:
    async with Stack(started=False) as stack:
        status, answer, _ = await post(stack, "/v1/completions", PROMPT)
        assert status == 503 and error_of(answer)["code"] == "no_decode_worker"
        async with stack.http.get(f"{stack.admin}/healthz") as response:
            assert response.status == 503
            status_page = await response.json()
        assert (status_page["ready"], status_page["draining"]) == (False, False)
        assert status_page["live"] == {"prefill": [], "decode": []}


async def test_without_the_filter_the_client_gets_a_503_of_the_same_shape() -> None:
    async with Stack(decode=1) as stack:
        await asyncio.to_thread(stack.filter.stop)
        status, answer, headers = await post(stack, "/v1/completions", PROMPT)
        assert status == 503 and error_of(answer)["type"] == "server_error"
        assert headers["content-type"] == "application/json"
        assert stack.decode_received == [] and stack.prefill[0].received == []
