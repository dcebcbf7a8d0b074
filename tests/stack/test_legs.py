"""What both legs receive, and what the client gets: exact bodies through the real Envoy."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest

from tests.stack.fake_worker import ENGINE_ID, PARAMS, PARAMS_BYTES
from tests.stack.harness import BODY_MODE, Stack

MESSAGES = b'[ {"role" : "user",\n "content":"caf\\u00e9 \\ud83d\\ude00 \xc3\xa9"} ]'


async def post(stack: Stack, path: str, body: bytes, **headers: str) -> tuple[int, bytes, dict[str, str]]:
    async with stack.http.post(path, data=body, headers={"content-type": "application/json", **headers}) as response:
        return response.status, await response.read(), {k.lower(): v for k, v in response.headers.items()}


async def test_chat_legs_get_the_clients_bytes_and_the_handoff(stack: Stack) -> None:
    body = (
        b'{"model": "m", "messages":' + MESSAGES + b', "stream":true,"stream_options":{"include_usage":true},'
        b'"max_completion_tokens":64,"max_tokens":32,"min_tokens":4,"stop":["\\n"],"temperature":0.0,'
        b'"tools":[{"type":"function","function":{"parameters":{"z":1,"a":2},"name":"f"}}],"logprobs":true,"top_logprobs":2}'
    )
    status, answer, headers = await post(stack, "/v1/chat/completions", body, authorization="Bearer s3cret")
    assert status == 200
    assert answer.endswith(b"data: [DONE]\n\n") and answer.count(b"data: ") == 4

    prefill = stack.prefill[0].last
    assert prefill.path == "/v1/chat/completions"
    assert prefill.body == (
        b'{"model":"m","messages":' + MESSAGES + b',"stream":false,"temperature":0.0,'
        b'"tools":[{"type":"function","function":{"parameters":{"z":1,"a":2},"name":"f"}}],'
        b'"max_completion_tokens":1,"n":1,"ignore_eos":true,"return_token_ids":true,'
        b'"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false}}'
    )
    assert prefill.headers["authorization"] == "Bearer s3cret"

    (decode,) = stack.decode_received
    assert decode.body == (
        b'{"model":"m","messages":' + MESSAGES + b',"stream":true,"stream_options":{"include_usage":true},'
        b'"max_completion_tokens":64,"max_tokens":32,"min_tokens":4,"stop":["\\n"],"temperature":0.0,'
        b'"tools":[{"type":"function","function":{"parameters":{"z":1,"a":2},"name":"f"}}],"logprobs":true,"top_logprobs":2,'
        b'"kv_transfer_params":' + PARAMS_BYTES + b"}"
    )
    # In pieces, nobody knows the length when the headers go out.
    length = decode.headers.get("content-length")
    assert length == str(len(decode.body)) if BODY_MODE == "buffered" else decode.headers["transfer-encoding"] == "chunked"
    assert decode.headers["authorization"] == "Bearer s3cret"
    assert decode.headers["x-kv-transfer"] == (
        f'nixl;prefill="{stack.prefill[0].address}";engine="{ENGINE_ID}";request="{PARAMS["remote_request_id"]}"'
        ";blocks=3;tokens=334"
    )
    served = next(worker for worker in stack.decode if worker.received)
    assert decode.headers["x-gateway-destination-endpoint"] == served.address
    assert headers["x-decode-endpoint"] == served.address
    assert headers["x-kv-transfer"] == decode.headers["x-kv-transfer"]


async def test_completions_legs_without_a_cap_or_stream(stack: Stack) -> None:
    status, answer, _ = await post(stack, "/v1/completions", b'{"model":"m","prompt":"hello"}')
    assert status == 200 and json.loads(answer)["served_by"].startswith("decode-")
    assert stack.prefill[0].last.body == (
        b'{"model":"m","prompt":"hello","max_tokens":1,"stream":false,"n":1,"ignore_eos":true,"return_token_ids":true,'
        b'"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false}}'
    )
    (decode,) = stack.decode_received
    assert decode.body == b'{"model":"m","prompt":"hello","kv_transfer_params":' + PARAMS_BYTES + b"}"


async def test_requests_go_round_and_exactly_where_the_filter_says(stack: Stack) -> None:
    for _ in range(10):
        status, answer, headers = await post(stack, "/v1/completions", b'{"model":"m","prompt":"hello"}')
        assert status == 200
        name = json.loads(answer)["served_by"]
        worker = next(worker for worker in stack.decode if worker.name == name)
        assert headers["x-decode-endpoint"] == worker.address
        assert worker.last.headers["x-gateway-destination-endpoint"] == worker.address
    assert [len(worker.received) for worker in stack.decode] == [5, 5]
    assert len(stack.prefill[0].received) == 10


@pytest.mark.parametrize(
    ("sent", "received"),
    [
        (
            b'{"model":"m","prompt":"a","kv_transfer_params":{"do_remote_prefill":true},"ec_transfer_params":{},"n":2}',
            b'{"model":"m","prompt":"a","n":2}',
        ),
        (  # the same key, spelt with an escape
            b'{"model":"m","prompt":"a","kv_transfer_\\u0070arams":{"x":1},"n":2}',
            b'{"model":"m","prompt":"a","n":2}',
        ),
        (
            b'{"model":"m","prompt":"a","vllm_xargs":{"kv_transfer_params":"x","mine":1},"n":2}',
            b'{"model":"m","prompt":"a","vllm_xargs":{"mine":1},"n":2}',
        ),
    ],
)
async def test_a_clients_transfer_keys_never_reach_an_engine(stack: Stack, sent: bytes, received: bytes) -> None:
    status, _, _ = await post(stack, "/v1/completions", sent)  # n=2 goes whole: one leg to look at
    assert status == 200
    assert [r.body for r in stack.decode_received] == [received]
    assert stack.prefill[0].received == []


async def test_a_clients_transfer_keys_are_replaced_by_ours_on_both_legs(stack: Stack) -> None:
    sent = b'{"kv_transfer_params":{"remote_host":"evil","do_remote_prefill":true},"model":"m","prompt":"a"}'
    await post(stack, "/v1/completions", sent)
    assert stack.prefill[0].last.json["kv_transfer_params"] == {"do_remote_decode": True, "do_remote_prefill": False}
    (decode,) = stack.decode_received
    assert decode.body.count(b"kv_transfer_params") == 1 and b"evil" not in decode.body
    assert decode.json["kv_transfer_params"] == PARAMS


@pytest.mark.parametrize("path", ["/v1/embeddings", "/tokenize", "/invocations", "/v1/messages/count_tokens", "/something/new"])
async def test_transfer_keys_are_removed_on_every_path(stack: Stack, path: str) -> None:
    await post(stack, path, b'{"input":[1, 2],"kv_transfer_params":{"do_remote_prefill":true}}')
    assert [r.body for r in stack.decode_received] == [b'{"input":[1, 2]}']


async def test_generate_has_its_transfer_keys_removed_from_the_sampling_params(stack: Stack) -> None:
    sent = b'{"token_ids":[1],"sampling_params":{"max_tokens":4,"extra_args":{"kv_transfer_params":{"a":1},"b":2}}}'
    await post(stack, "/inference/v1/generate", sent)
    assert [r.body for r in stack.decode_received] == [
        b'{"token_ids":[1],"sampling_params":{"max_tokens":4,"extra_args":{"b":2}}}'
    ]


async def test_a_form_that_could_carry_transfer_keys_is_refused_and_others_pass(stack: Stack) -> None:
    for field, expected in (("vllm_xargs", 400), ("language", 200)):
        form = aiohttp.FormData({field: '{"kv_transfer_params":"x"}', "model": "m"})
        form.add_field("file", b"\x00\x01 sound", filename="a.wav", content_type="audio/wav")
        async with stack.http.post("/v1/audio/transcriptions", data=form) as response:
            assert response.status == expected
    assert len(stack.decode_received) == 1


@pytest.mark.parametrize("path", ["/v1/completions", "/version"])
async def test_a_clients_routing_headers_are_removed(stack: Stack, path: str) -> None:
    headers = {
        "x-gateway-destination-endpoint": stack.prefill[0].address,
        "x-kv-transfer": "nixl;prefill=evil",
        "x-prefiller-host-port": "10.1.2.3:80",
        "x-data-parallel-rank": "3",
        "x-other": "kept",
    }
    if path == "/version":
        async with stack.http.get(path, headers=headers) as response:
            assert response.status == 200
        (received,) = stack.decode_received
        assert "x-kv-transfer" not in received.headers
    else:
        await post(stack, path, b'{"model":"m","prompt":"a"}', **headers)
        (received,) = stack.decode_received
        assert received.headers["x-kv-transfer"].startswith(f'nixl;prefill="{stack.prefill[0].address}"')
        for name in ("x-prefiller-host-port", "x-data-parallel-rank", "x-other"):
            assert name not in stack.prefill[0].last.headers
    assert received.headers["x-gateway-destination-endpoint"] in [worker.address for worker in stack.decode]
    assert "x-prefiller-host-port" not in received.headers and "x-data-parallel-rank" not in received.headers
    assert received.headers["x-other"] == "kept"


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v1/responses/resp_1", b""),
        ("GET", "/health", b""),
        ("GET", "/version", b""),
        ("POST", "/tokenize", b'{ "prompt" : "a" }'),
        ("POST", "/v1/embeddings", b'{"input": ["a",  "b"]}'),
        ("POST", "/v1/audio/transcriptions", b"\x00\x01\xff binary"),
        ("POST", "/v1/rerank?top=3", b"[1,  2]"),
    ],
)
async def test_other_paths_pass_to_one_worker_unchanged(stack: Stack, method: str, path: str, body: bytes) -> None:
    kind = "application/json" if body[:1] in (b"{", b"[") else "audio/wav"
    headers = {"content-type": kind, "x-client": "1"} if body else {"x-client": "1"}
    async with stack.http.request(method, path, data=body or None, headers=headers) as response:
        assert response.status == 200
    (received,) = stack.decode_received
    assert (received.method, received.path, received.body) == (method, path, body)
    assert stack.prefill[0].received == []


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"model":"m","prompt":"a","n":2}', "n"),
        (b'{"model":"m","prompt":["a","b"]}', "prompt_list"),
        (b'{"model":"m","prompt":"a","best_of":3}', "best_of"),
        (b'{"model":"m","prompt":"a","use_beam_search":true}', "beam_search"),
        (b'{"model":"m","prompt":"a","prompt_logprobs":0}', "prompt_logprobs"),
        (b'{"model":"m","prompt":"a","echo":true}', "echo"),
        (b'{"model":"m","prompt":"a","max_tokens":1}', "one_token"),
    ],
)
async def test_what_cannot_be_handed_over_once_goes_whole_and_is_counted(stack: Stack, body: bytes, reason: str) -> None:
    name = f'baton_whole_requests_total{{reason="{reason}"}}'
    before = (await stack.metrics()).get(name, 0.0)
    status, _, _ = await post(stack, "/v1/completions", body)
    assert status == 200
    assert stack.prefill[0].received == []
    assert [r.body for r in stack.decode_received] == [body]
    assert (await stack.metrics())[name] == before + 1


async def test_a_prompt_of_token_ids_is_one_prompt(stack: Stack) -> None:
    await post(stack, "/v1/completions", b'{"model":"m","prompt":[1, 2,3]}')
    assert stack.prefill[0].last.body.startswith(b'{"model":"m","prompt":[1, 2,3],')


async def test_the_log_names_the_request_and_never_its_prompt(stack: Stack) -> None:
    await post(stack, "/v1/completions", b'{"model":"m","prompt":"a secret prompt"}', **{"x-request-id": "trace-me-7"})
    # The line is written at the end of the stream, which Envoy announces after the client has its answer.
    for _ in range(100):
        lines = [line for line in stack.log_lines() if line.get("request_id") == "trace-me-7"]
        if lines:
            break
        await asyncio.sleep(0.02)
    (line,) = lines
    assert line["outcome"] == "handoff" and line["prefill"] == stack.prefill[0].address
    assert line["blocks"] == 3 and line["tokens"] == 334
    text = stack.filter.log.read_text()
    assert "secret" not in text and "s3cret" not in text
