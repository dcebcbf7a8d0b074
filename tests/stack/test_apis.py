"""Responses, Anthropic messages, models, and token ids: what each API adds to the two legs."""

from __future__ import annotations

import json

import pytest
from aiohttp import web

from tests.stack.fake_worker import PARAMS_BYTES
from tests.stack.harness import Stack
from tests.stack.test_errors import answering, error_of
from tests.stack.test_legs import post

ASK = b'"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false}}'


async def test_responses_legs(stack: Stack) -> None:
    sent = b'{"model":"m","input":[ {"role":"user"} ],"stream":true,"max_output_tokens":9,"include":["x"],"request_id":"mine"}'
    status, _, _ = await post(stack, "/v1/responses", sent)
    assert status == 200
    prefill = stack.prefill[0].last
    assert prefill.path == "/v1/responses"
    assert prefill.body == (
        b'{"model":"m","input":[ {"role":"user"} ],"stream":false,"max_output_tokens":1,"ignore_eos":true,"store":false,' + ASK
    )
    (decode,) = stack.decode_received
    assert decode.body == sent[:-1] + b',"kv_transfer_params":' + PARAMS_BYTES + b"}"


async def test_messages_legs(stack: Stack) -> None:
    sent = b'{"model":"m","max_tokens":64,"messages":[ 1 ],"system":"s","stream":true,"stop_sequences":["\\n"],"tools":[]}'
    status, _, _ = await post(stack, "/v1/messages", sent)
    assert status == 200
    assert stack.prefill[0].last.body == (
        b'{"model":"m","messages":[ 1 ],"system":"s","stream":false,"tools":[],"max_tokens":1,' + ASK
    )
    (decode,) = stack.decode_received
    assert decode.body == sent[:-1] + b',"kv_transfer_params":' + PARAMS_BYTES + b"}"


@pytest.mark.parametrize(
    ("body", "status", "kind", "code"),
    [
        (b"{", 400, "invalid_request_error", "invalid_json"),
        (b'{"max_tokens":5}', 400, "invalid_request_error", "model_missing"),
        (b'{"model":"other","max_tokens":5}', 404, "not_found_error", "model_not_found"),
    ],
)
async def test_errors_of_messages_have_anthropics_shape(stack: Stack, body: bytes, status: int, kind: str, code: str) -> None:
    got, answer, _ = await post(stack, "/v1/messages", body)
    assert got == status
    decoded = json.loads(answer)
    assert decoded["type"] == "error" and decoded["error"]["type"] == kind and decoded["error"]["code"] == code
    assert decoded["error"]["message"]


def with_ids(body: str):
    async def answer(_: web.Request, __: bytes) -> web.StreamResponse:
        text = body.encode() + b',"kv_transfer_params":' + PARAMS_BYTES + b"}"
        return web.Response(body=text, content_type="application/json")

    return answer


async def test_chat_decode_gets_the_token_ids_of_the_prefill(stack: Stack) -> None:
    stack.prefill[0].answer = with_ids('{"choices":[{"message":{}}],"prompt_token_ids":[5, 6,7]')
    await post(stack, "/v1/chat/completions", b'{"model":"m","messages":[]}')
    (decode,) = stack.decode_received
    assert decode.body == (
        b'{"model":"m","messages":[],"kv_transfer_params":' + PARAMS_BYTES[:-1] + b',"prompt_token_ids":[5, 6,7]}}'
    )


async def test_completions_decode_gets_the_token_ids_as_its_prompt(stack: Stack) -> None:
    stack.prefill[0].answer = with_ids('{"choices":[{"text":"","prompt_token_ids":[5, 6,7]}]')
    await post(stack, "/v1/completions", b'{"model":"m","prompt":"hello","max_tokens":3}')
    (decode,) = stack.decode_received
    assert decode.body == b'{"model":"m","prompt":[5, 6,7],"max_tokens":3,"kv_transfer_params":' + PARAMS_BYTES + b"}"


async def test_tokenise_once_can_be_switched_off() -> None:
    async with Stack(decode=1, settings={"prefill": {"tokenise_once": False}}) as stack:
        stack.prefill[0].answer = with_ids('{"choices":[{"text":"","prompt_token_ids":[5, 6,7]}]')
        await post(stack, "/v1/completions", b'{"model":"m","prompt":"hello"}')
        assert "return_token_ids" not in stack.prefill[0].last.json
        assert stack.decode[0].last.json["prompt"] == "hello"


async def test_token_ids_that_do_not_fit_are_left_out() -> None:
    """Envoy holds its limit against the body that the filter gives back, too."""
    limits = {"max_body_bytes": 1 << 20}
    async with Stack(decode=1, settings={"limits": limits}) as stack:
        ids = ",".join(["12345"] * 400_000)
        stack.prefill[0].answer = with_ids(f'{{"choices":[{{"message":{{}}}}],"prompt_token_ids":[{ids}]')
        sent = b'{"model":"m","messages":["' + b"x" * 600_000 + b'"]}'
        assert (await post(stack, "/v1/chat/completions", sent))[0] == 200
        assert stack.decode[0].last.body == sent[:-1] + b',"kv_transfer_params":' + PARAMS_BYTES + b"}"


async def test_models_are_those_of_the_whole_pool_each_once(stack: Stack) -> None:
    async with stack.http.get("/v1/models") as response:
        assert response.status == 200
        listed = await response.json()
    assert listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == ["m"]
    assert stack.decode_received == []


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b'{"prompt":"a"}', 400, "model_missing"),
        (b'{"model":null,"prompt":"a"}', 400, "model_missing"),
        (b'{"model":{"a":1},"prompt":"a"}', 400, "model_missing"),
        (b'{"model":"nope","prompt":"a"}', 404, "model_not_found"),
        (b'{"model":"m","prompt":"a","model":"m"}', 400, "duplicate_key"),
    ],
)
async def test_a_request_for_no_model_of_the_pool_reaches_no_worker(stack: Stack, body: bytes, status: int, code: str) -> None:
    got, answer, _ = await post(stack, "/v1/completions", body)
    assert got == status and error_of(answer)["code"] == code
    assert stack.decode_received == [] and stack.prefill[0].received == []


async def test_a_model_goes_to_the_workers_that_serve_it() -> None:
    stack = Stack(prefill=2, decode=2)
    for one, two in (stack.prefill, stack.decode):
        one.models, two.models = ("a",), ("b",)
    async with stack:
        async with stack.http.get("/v1/models") as response:
            assert [card["id"] for card in (await response.json())["data"]] == ["a", "b"]
        for _ in range(4):
            assert (await post(stack, "/v1/completions", b'{"model":"b","prompt":"x"}'))[0] == 200
        assert [len(worker.received) for worker in (*stack.prefill, *stack.decode)] == [0, 4, 0, 4]


async def test_the_prefills_own_4xx_on_messages_is_passed_on(stack: Stack) -> None:
    body = b'{"type":"error","error":{"type":"invalid_request_error","message":"too long"}}'
    stack.prefill[0].answer = answering(400, body)
    got, answer, _ = await post(stack, "/v1/messages", b'{"model":"m","max_tokens":5,"messages":[]}')
    assert (got, answer) == (400, body)
