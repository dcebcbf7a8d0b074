"""The simulated engine's HTTP surface: shapes, streams, ids and errors, as vLLM 0.32 has them."""

from __future__ import annotations

import base64
import copy
import json
import struct
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.sim import api_pooling, api_tokens, prompts, tokens
from workers.sim import fields as checks
from workers.sim.errors import ApiError
from workers.sim.local import running
from workers.sim.options import SimOptions
from workers.sim.prompts import Model, expected_answer
from workers.sim.serving import audit
from workers.sim.worker import Worker

OPTIONS = SimOptions(port=0, speed=0, num_blocks=600, max_model_len=4096, lora_modules=("ada=/loras/ada",))
MODEL = Model(max_model_len=4096, adapters={"ada": "/loras/ada"})
NAME = MODEL.names[0]
USER = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.fixture(scope="module")
async def worker() -> AsyncIterator[Worker]:
    async with running(OPTIONS) as workers:
        yield workers[0]


async def post(http: aiohttp.ClientSession, worker: Worker, path: str, body: object, **more: Any) -> tuple[int, Any]:
    async with http.post(worker.url + path, json=body, **more) as response:
        return response.status, await response.json(content_type=None)


async def events(http: aiohttp.ClientSession, worker: Worker, path: str, body: dict[str, Any]) -> list[tuple[str, Any]]:
    """(event name, data) of a stream."""
    async with http.post(worker.url + path, json={**body, "stream": True}) as response:
        assert response.status == 200 and response.headers["content-type"] == "text/event-stream; charset=utf-8"
        found = []
        for block in (await response.text()).strip().split("\n\n"):
            lines = dict(line.split(": ", 1) for line in block.split("\n"))
            data = lines["data"]
            found.append((lines.get("event", ""), data if data == "[DONE]" else json.loads(data)))
        return found


async def test_a_completion_has_every_field_of_vllms(http: aiohttp.ClientSession, worker: Worker) -> None:
    body = {"prompt": "hello", "max_tokens": 3}
    _, answer = await post(http, worker, "/v1/completions", body, headers={"x-request-id": "abc"})
    assert isinstance(answer.pop("created"), int) and answer.pop("system_fingerprint").startswith("vllm-0.32.0-")
    assert answer == {
        "id": "cmpl-abc",
        "object": "text_completion",
        "model": NAME,
        "choices": [
            {
                "index": 0,
                "text": expected_answer("/v1/completions", body, MODEL),
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
                "token_ids": None,
                "prompt_logprobs": None,
                "prompt_token_ids": None,
                "routed_experts": None,
            }
        ],
        "service_tier": None,
        "usage": {
            "prompt_tokens": 3,
            "total_tokens": 6,
            "completion_tokens": 3,
            "prompt_tokens_details": None,
            "completion_tokens_details": None,
        },
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
    }


async def test_a_chat_completion_has_every_field_of_vllms(http: aiohttp.ClientSession, worker: Worker) -> None:
    body = {"messages": USER, "max_tokens": 3, "return_token_ids": True}
    _, answer = await post(http, worker, "/v1/chat/completions", body, headers={"x-request-id": "abc"})
    choice = answer["choices"][0]
    assert answer["id"] == "chatcmpl-abc" and answer["object"] == "chat.completion"
    assert list(answer) == [
        *("id", "object", "created", "model", "choices", "service_tier", "system_fingerprint", "usage", "prompt_logprobs"),
        *("prompt_token_ids", "prompt_text", "kv_transfer_params", "ec_transfer_params", "metrics"),
    ]
    assert choice["message"] == {
        "role": "assistant",
        "content": expected_answer("/v1/chat/completions", body, MODEL),
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "reasoning": None,
    }
    assert tokens.decode(choice["token_ids"]) == choice["message"]["content"]
    assert len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]


async def test_a_stream_of_a_completion(http: aiohttp.ClientSession, worker: Worker) -> None:
    body = {"prompt": "hello", "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}
    found = await events(http, worker, "/v1/completions", body)
    assert found[-1] == ("", "[DONE]")
    chunks = [data for _, data in found[:-1]]
    assert "".join(c["choices"][0]["text"] for c in chunks[:-1]) == expected_answer("/v1/completions", body, MODEL)
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None, None, "length"]
    assert list(chunks[0]) == ["id", "object", "created", "model", "choices"]
    assert list(chunks[0]["choices"][0]) == [
        *("index", "text", "logprobs", "finish_reason", "stop_reason", "prompt_token_ids", "token_ids"),
    ]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {"prompt_tokens": 3, "total_tokens": 6, "completion_tokens": 3}


async def test_a_stream_of_a_chat_starts_with_the_role(http: aiohttp.ClientSession, worker: Worker) -> None:
    body = {"messages": USER, "max_tokens": 2}
    found = await events(http, worker, "/v1/chat/completions", body)
    chunks = [data for _, data in found[:-1]]
    assert chunks[0]["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    text = "".join(c["choices"][0]["delta"]["content"] for c in chunks)
    assert text == expected_answer("/v1/chat/completions", body, MODEL)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length" and "stop_reason" in chunks[-1]["choices"][0]
    assert all("usage" not in chunk for chunk in chunks) and len({chunk["id"] for chunk in chunks}) == 1
    assert "system_fingerprint" in chunks[-1] and "system_fingerprint" not in chunks[1]


async def test_continuous_usage_counts_up(http: aiohttp.ClientSession, worker: Worker) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for path, body in (
        ("/v1/completions", {"prompt": "hello", "max_tokens": 3}),
        ("/v1/chat/completions", {"messages": USER, "max_tokens": 3}),
    ):
        found = await events(http, worker, path, {**body, "stream_options": options})
        counts = [data["usage"]["completion_tokens"] for _, data in found[:-1]]
        assert counts == ([0] if path.endswith("chat/completions") else []) + [1, 2, 3, 3]


async def test_several_choices_and_prompts(http: aiohttp.ClientSession, worker: Worker) -> None:
    body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 3}
    _, answer = await post(http, worker, "/v1/completions", body)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts[0] == texts[1] != texts[2] == texts[3]
    assert answer["usage"]["prompt_tokens"] == 4 and answer["usage"]["completion_tokens"] == 12
    found = await events(http, worker, "/v1/completions", body)
    streamed = ["", "", "", ""]
    for _, data in found[:-1]:
        streamed[data["choices"][0]["index"]] += data["choices"][0]["text"]
    assert streamed == texts


async def test_echo_logprobs_and_token_ids(http: aiohttp.ClientSession, worker: Worker) -> None:
    body = {"prompt": "hello", "max_tokens": 2, "echo": True, "logprobs": 1}
    _, answer = await post(http, worker, "/v1/completions", body)
    choice = answer["choices"][0]
    assert choice["text"] == expected_answer("/v1/completions", body, MODEL) and choice["text"].startswith("hello ")
    assert len(choice["logprobs"]["tokens"]) == 5 == len(choice["logprobs"]["text_offset"])
    _, answer = await post(http, worker, "/v1/completions", {"prompt": "hello", "max_tokens": 0, "echo": True})
    assert answer["choices"][0]["text"] == "hello"
    _, answer = await post(http, worker, "/v1/completions", {"prompt": "hello", "max_tokens": 2, "return_token_ids": True})
    choice = answer["choices"][0]
    assert choice["prompt_token_ids"] == [tokens.BOS, *tokens.encode("hello")] and len(choice["token_ids"]) == 2


async def test_prompt_logprobs_cover_the_whole_prompt(http: aiohttp.ClientSession, worker: Worker) -> None:
    body = {"prompt": list(range(500, 540)), "max_tokens": 1, "prompt_logprobs": 1}
    await post(http, worker, "/v1/completions", {**body, "prompt_logprobs": None})
    hits = worker.engine.core.counters.prefix_hits
    _, answer = await post(http, worker, "/v1/completions", body)
    entries = answer["choices"][0]["prompt_logprobs"]
    assert entries[0] is None and len(entries) == 40 and entries[1]["501"]["logprob"] == 0.0
    assert worker.engine.core.counters.prefix_hits == hits
    _, chat = await post(http, worker, "/v1/chat/completions", {"messages": USER, "max_tokens": 1, "prompt_logprobs": 0})
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


async def test_adapters_show_in_the_metrics(http: aiohttp.ClientSession, worker: Worker) -> None:
    async with http.get(worker.url + "/metrics") as response:
        text = await response.text()
    assert 'vllm:lora_requests_info{max_lora="1",running_lora_adapters="",waiting_lora_adapters=""}' in text


async def test_a_stop_string_and_eos_give_their_reasons(http: aiohttp.ClientSession, worker: Worker) -> None:
    whole = expected_answer("/v1/completions", {"prompt": "hello", "max_tokens": 30}, MODEL)
    stop = whole[10:14]
    _, answer = await post(http, worker, "/v1/completions", {"prompt": "hello", "max_tokens": 30, "stop": stop})
    choice = answer["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert choice["text"] == whole[: whole.index(stop)]
    _, answer = await post(http, worker, "/v1/completions", {"prompt": "hello", "max_tokens": 1000})
    choice = answer["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)


async def test_the_engines_request_ids(http: aiohttp.ClientSession, worker: Worker) -> None:
    prefill = {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    header = {"x-request-id": "r1"}
    for path, body, start in (
        ("/v1/completions", {"prompt": "x"}, "cmpl-r1-0-"),
        ("/v1/chat/completions", {"messages": USER}, "chatcmpl-r1-"),
        ("/v1/messages", {"messages": USER, "model": NAME}, "chatcmpl-r1-"),
    ):
        _, answer = await post(http, worker, path, {**body, **prefill}, headers=header)
        name = answer["kv_transfer_params"]["remote_request_id"]
        assert name.startswith(start) and len(name) == len(start) + 8
    body = {"input": "x", "max_output_tokens": 1, "request_id": "mine", "kv_transfer_params": {"do_remote_decode": True}}
    _, answer = await post(http, worker, "/v1/responses", body, headers=header)
    assert answer["id"] == "mine" and answer["kv_transfer_params"]["remote_request_id"].startswith("mine-")
    await worker.reset()


async def test_a_response(http: aiohttp.ClientSession, worker: Worker) -> None:
    body = {"input": "hi", "max_output_tokens": 3}
    _, answer = await post(http, worker, "/v1/responses", body)
    assert answer["object"] == "response" and answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    text = expected_answer("/v1/responses", body, MODEL)
    assert answer["output"][0]["content"] == [{"annotations": [], "text": text, "type": "output_text", "logprobs": None}]
    assert answer["usage"]["output_tokens"] == 3 and answer["kv_transfer_params"] is None
    found = await events(http, worker, "/v1/responses", body)
    names = [name for name, _ in found]
    assert names == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * 3,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [data["sequence_number"] for _, data in found] == list(range(len(found)))
    assert "".join(data["delta"] for name, data in found if name.endswith(".delta")) == text
    assert found[-1][1]["response"]["output"][0]["content"][0]["text"] == text


async def test_a_message(http: aiohttp.ClientSession, worker: Worker) -> None:
    body = {"model": NAME, "messages": USER, "max_tokens": 3}
    text = expected_answer("/v1/messages", body, MODEL)
    _, answer = await post(http, worker, "/v1/messages", body, headers={"x-request-id": "a"})
    count = answer["usage"]["input_tokens"]
    assert answer == {
        "id": "chatcmpl-a",
        "type": "message",
        "role": "assistant",
        "content": [{"type": "text", "text": text}],
        "model": NAME,
        "stop_reason": "max_tokens",
        "usage": {"input_tokens": count, "output_tokens": 3},
    }
    found = await events(http, worker, "/v1/messages", body)
    assert [name for name, _ in found] == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * 3,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert "".join(data["delta"]["text"] for name, data in found if name == "content_block_delta") == text
    assert found[-2][1] == {
        "type": "message_delta",
        "delta": {"stop_reason": "max_tokens", "stop_sequence": None},
        "usage": {"input_tokens": count, "output_tokens": 3},
    }
    _, answer = await post(http, worker, "/v1/messages/count_tokens", {"model": NAME, "messages": USER})
    assert answer["input_tokens"] == count
    status, answer = await post(http, worker, "/v1/messages", {**body, "model": "nope"})
    assert status == 404 and answer["type"] == "error" and answer["error"]["type"] == "NotFoundError"


async def test_tokenize_and_back(http: aiohttp.ClientSession, worker: Worker) -> None:
    _, answer = await post(http, worker, "/tokenize", {"prompt": "hello wörld", "return_token_strs": True})
    assert answer["tokens"] == [tokens.BOS, *tokens.encode("hello wörld")] and answer["max_model_len"] == 4096
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert await post(http, worker, "/detokenize", {"tokens": answer["tokens"]}) == (200, {"prompt": "hello wörld"})
    _, answer = await post(http, worker, "/tokenize", {"messages": USER})
    body = {"messages": USER, "max_tokens": 1, "return_token_ids": True}
    _, chat = await post(http, worker, "/v1/chat/completions", body)
    assert answer["tokens"] == chat["prompt_token_ids"]


async def test_embeddings(http: aiohttp.ClientSession, worker: Worker) -> None:
    _, answer = await post(http, worker, "/v1/embeddings", {"input": ["a", "b"]})
    first, second = (entry["embedding"] for entry in answer["data"])
    assert first != second and sum(x * x for x in first) == pytest.approx(1)
    assert answer["object"] == "list" and answer["usage"]["prompt_tokens"] == 4
    _, packed = await post(http, worker, "/v1/embeddings", {"input": "a", "encoding_format": "base64"})
    raw = base64.b64decode(packed["data"][0]["embedding"])
    assert struct.unpack(f"<{len(raw) // 4}f", raw) == pytest.approx(first)


async def test_scores_and_ranks(http: aiohttp.ClientSession, worker: Worker) -> None:
    body = {"queries": "tea", "documents": ["coffee", "tea"]}
    _, answer = await post(http, worker, "/v1/score", body)
    assert answer["data"][1]["score"] == pytest.approx(1) and answer["data"][0]["score"] < 1
    _, answer = await post(http, worker, "/v1/rerank", {"query": "tea", "documents": ["coffee", "tea"], "top_n": 1})
    assert [result["index"] for result in answer["results"]] == [1]
    status, _ = await post(http, worker, "/v1/score", {"queries": ["a", "b"], "documents": ["a", "b", "c"]})
    assert status == 400


async def test_a_batch_of_conversations(http: aiohttp.ClientSession, worker: Worker) -> None:
    other = [{"role": "user", "content": "bye"}]
    _, answer = await post(http, worker, "/v1/chat/completions/batch", {"messages": [USER, other], "max_tokens": 4})
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert texts == [
        expected_answer("/v1/chat/completions", {"messages": messages, "max_tokens": 4}, MODEL) for messages in (USER, other)
    ]
    status, _ = await post(http, worker, "/v1/chat/completions/batch", {"messages": [USER], "n": 2})
    assert status == 400


async def test_a_rank_that_is_not_there(http: aiohttp.ClientSession, worker: Worker) -> None:
    body = {"prompt": "x", "max_tokens": 1}
    assert (await post(http, worker, "/v1/completions", body, headers={"x-data-parallel-rank": "0"}))[0] == 200
    status, answer = await post(http, worker, "/v1/completions", body, headers={"x-data-parallel-rank": "1"})
    assert status == 400 and answer["error"]["message"] == "data_parallel_rank 1 is out of range [0, 1)."


async def test_a_load_report_comes_with_the_answer(http: aiohttp.ClientSession, worker: Worker) -> None:
    body = {"prompt": "x", "max_tokens": 1}
    for wanted, start in (("text", "TEXT named_metrics.kv_cache_usage_perc="), ("json", 'JSON {"named_metrics": {"kv_cache')):
        headers = {"endpoint-load-metrics-format": wanted}
        async with http.post(worker.url + "/v1/completions", json=body, headers=headers) as response:
            assert response.headers["endpoint-load-metrics"].startswith(start)


async def test_a_previous_response_is_not_found(http: aiohttp.ClientSession, worker: Worker) -> None:
    status, answer = await post(http, worker, "/v1/responses", {"input": "x", "previous_response_id": "resp_1"})
    assert (status, answer["error"]["param"]) == (404, "response_id")


async def test_what_asks_about_the_server(http: aiohttp.ClientSession, worker: Worker) -> None:
    async with http.get(worker.url + "/health") as response:
        assert response.status == 200 and await response.read() == b""
    async with http.get(worker.url + "/version") as response:
        assert await response.json() == {"version": "0.32.0"}
    async with http.get(worker.url + "/load") as response:
        assert await response.json() == {"server_load": 0}
    async with http.get(worker.url + "/v1/models") as response:
        base, adapter = (await response.json())["data"]
    assert (base["id"], base["max_model_len"], base["owned_by"], base["parent"]) == (NAME, 4096, "vllm", None)
    assert (adapter["id"], adapter["root"], adapter["parent"]) == ("ada", "/loras/ada", NAME)
    async with http.get(worker.url + "/nope") as response:
        assert (response.status, await response.json()) == (404, {"detail": "Not Found"})
    async with http.get(worker.url + "/v1/completions") as response:
        assert (response.status, await response.json()) == (405, {"detail": "Method Not Allowed"})


async def test_an_adapter_answers_under_its_own_name(http: aiohttp.ClientSession, worker: Worker) -> None:
    body = {"model": "ada", "prompt": "hello", "max_tokens": 3}
    _, answer = await post(http, worker, "/v1/completions", body)
    assert answer["model"] == "ada" and answer["choices"][0]["text"] == expected_answer("/v1/completions", body, MODEL)
    assert answer["choices"][0]["text"] != expected_answer("/v1/completions", {**body, "model": NAME}, MODEL)


INT = "Input should be a valid integer, unable to parse string as an integer"
ERRORS: list[tuple[str, Any, int, str, str, str | None]] = [
    # path, body, status, type, a part of the message, param. All as printed by vLLM 0.32.
    ("completions", {}, 400, "BadRequestError", "Either prompt or prompt_embeds must be provided and non-empty.", "prompt"),
    ("completions", {"prompt": 5}, 400, "Bad Request", "4 validation errors:\n  {'type': 'list_type'", "body.prompt"),
    (
        "completions",
        {"prompt": "x", "max_tokens": "five"},
        400,
        "Bad Request",
        f"1 validation error:\n  {{'type': 'int_parsing', 'loc': 'body.max_tokens', 'msg': '{INT}', 'input': 'five'}}",
        "body.max_tokens",
    ),
    ("completions", {"prompt": "x", "max_tokens": 1.5}, 400, "Bad Request", "'int_from_float'", "body.max_tokens"),
    ("completions", {"prompt": "x", "max_tokens": 0}, 400, "BadRequestError", "must be at least 1, got 0.", "max_tokens"),
    ("completions", {"prompt": "x", "n": None}, 400, "Bad Request", "'int_type'", "body.n"),
    ("completions", {"prompt": "x", "n": 0}, 400, "BadRequestError", "n must be at least 1, got 0.", None),
    ("completions", {"prompt": "x", "stream": "maybe"}, 400, "Bad Request", "'bool_parsing'", "body.stream"),
    ("completions", {"prompt": "x", "temperature": "hot"}, 400, "Bad Request", "'float_parsing'", "body.temperature"),
    (
        "completions",
        {"prompt": "x", "temperature": 3},
        400,
        "BadRequestError",
        "temperature must be in [0, 2], got 3.0. (parameter=temperature, value=3.0)",
        "temperature",
    ),
    (
        "completions",
        {"prompt": "x", "max_tokens": 2, "min_tokens": 3},
        400,
        "BadRequestError",
        "min_tokens must be less than or equal to max_tokens=2, got 3.",
        None,
    ),
    (
        "completions",
        {"prompt": "x", "stream_options": {"include_usage": True}},
        400,
        "BadRequestError",
        "Stream options can only be defined when `stream=True`. (parameter=stream_options)",
        "stream_options",
    ),
    ("completions", {"prompt": "x", "logprobs": "1"}, 400, "BadRequestError", "`logprobs` must be an integer.", "logprobs"),
    ("completions", {"prompt": "x", "cache_salt": ""}, 400, "BadRequestError", "must be a non-empty string", "cache_salt"),
    ("completions", {"prompt": "x", "cache_salt": "a/b"}, 400, "BadRequestError", "at most 128 characters", "cache_salt"),
    ("completions", {"prompt": "x", "kv_transfer_params": []}, 400, "Bad Request", "'dict_type'", "body.kv_transfer_params"),
    ("completions", {"prompt": "x", "stop": ["a"] * 5}, 400, "Bad Request", "at most 4 items", "body.stop"),
    ("completions", {"prompt": "x", "seed": 1 << 70}, 400, "Bad Request", "'less_than_equal'", "body.seed"),
    ("completions", {"prompt": "x", "vllm_xargs": {"a": {}}}, 400, "Bad Request", "4 validation errors", "body.vllm_xargs.a"),
    (
        "completions",
        {"prompt": [7] * 4097},
        400,
        "BadRequestError",
        "This model's maximum context length is 4096 tokens. However, your prompt contains 4097 input tokens",
        "input_tokens",
    ),
    ("completions", {"prompt": [1 << 31]}, 400, "BadRequestError", "Token id 2147483648 is out of vocabulary", None),
    (
        "completions",
        {"prompt": "x", "model": "nope"},
        404,
        "NotFoundError",
        f"The model `nope` does not exist. Valid aliases: {NAME}.",
        "model",
    ),
    ("completions", [], 400, "Bad Request", "'model_attributes_type', 'loc': 'body'", "body"),
    ("chat/completions", {}, 400, "Bad Request", "{'type': 'missing', 'loc': 'body.messages'", "body.messages"),
    ("chat/completions", {"messages": None}, 400, "BadRequestError", "'NoneType' object is not iterable", None),
    ("chat/completions", {"messages": "x"}, 400, "Bad Request", "'list_type', 'loc': 'body.messages'", "body.messages"),
    ("chat/completions", {"messages": USER, "tools": []}, 400, "BadRequestError", "must not be an empty array", "tools"),
    (
        "chat/completions",
        {"messages": USER, "tool_choice": "auto"},
        400,
        "BadRequestError",
        "When using `tool_choice`, `tools` must be set.",
        "tool_choice",
    ),
    (
        "chat/completions",
        {"messages": USER, "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}},
        400,
        "BadRequestError",
        "The tool specified in `tool_choice` does not match any of the specified `tools`",
        "tool_choice",
    ),
    ("chat/completions", {"messages": USER, "top_logprobs": 2}, 400, "BadRequestError", "`logprobs` must be", "top_logprobs"),
    (
        "chat/completions",
        {"messages": USER, "continue_final_message": True, "add_generation_prompt": True},
        400,
        "BadRequestError",
        "Cannot set both",
        None,
    ),
    (
        "chat/completions",
        {"messages": USER, "response_format": {"type": "json_schema"}},
        400,
        "BadRequestError",
        "the 'json_schema' field must be provided.",
        "response_format",
    ),
    (
        "chat/completions",
        {"messages": USER, "reasoning_effort": "silly"},
        400,
        "Bad Request",
        "Input should be 'none', 'minimal', 'low', 'medium', 'high', 'xhigh' or 'max'",
        "body.reasoning_effort",
    ),
    ("responses", {}, 400, "Bad Request", "'missing', 'loc': 'body.input'", "body.input"),
    ("responses", {"input": 5}, 400, "Bad Request", "2 validation errors", "body.input"),
    (
        "responses",
        {"input": "x", "background": True, "store": False},
        400,
        "BadRequestError",
        "background can only be used when `store` is true",
        "background",
    ),
    ("messages", {}, 400, "Bad Request", "3 validation errors:\n  {'type': 'missing', 'loc': 'body.model'", "body.model"),
    (
        "messages",
        {"model": NAME, "messages": USER, "max_tokens": 0},
        400,
        "Bad Request",
        "Value error, max_tokens must be positive",
        "body.max_tokens",
    ),
    (
        "messages",
        {"model": NAME, "messages": USER, "max_tokens": 5, "thinking": {"type": "enabled", "budget_tokens": 2000}},
        400,
        "Bad Request",
        "Value error, thinking.budget_tokens must be less than max_tokens",
        "body",
    ),
]


@pytest.mark.parametrize(("path", "body", "status", "kind", "message", "param"), ERRORS)
async def test_an_error_is_vllms(
    http: aiohttp.ClientSession,
    worker: Worker,
    path: str,
    body: Any,
    status: int,
    kind: str,
    message: str,
    param: str | None,
) -> None:
    got, answer = await post(http, worker, f"/v1/{path}", body)
    error = answer["error"]
    assert (got, error["code"], error["type"], error["param"]) == (status, status, kind, param), error
    assert message in error["message"]


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "1 validation error:\n  {'type': 'missing', 'loc': 'body', 'msg': 'Field required', 'input': 'None'}"),
        (b"null", "'missing', 'loc': 'body'"),
        (b"{", "Expecting property name enclosed in double quotes"),
        (b"[" * 20_000, "There was an error parsing the body"),
        (b'{"prompt":"\xff"}', "There was an error parsing the body"),
    ],
)
async def test_a_body_that_is_no_json(http: aiohttp.ClientSession, worker: Worker, raw: bytes, message: str) -> None:
    headers = {"content-type": "application/json"}
    async with http.post(worker.url + "/v1/completions", data=raw, headers=headers) as response:
        answer = await response.json()
        assert response.status == 400
        assert message in (answer.get("detail") or answer["error"]["message"])


KEYS = frozenset(
    (
        *checks.COMPLETION,
        *checks.CHAT,
        *prompts.RESPONSES,
        *prompts.MESSAGES,
        *prompts.GENERATE,
        *("input", "system", "role", "content", "type", "text", "function", "name", "tool_calls", "query", "documents"),
        *("queries", "include_usage", "prompt_token_ids", "budget_tokens", "output_config", "effort", "item", "tokens"),
    )
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 1 << 70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(sorted(KEYS)), inner, max_size=4),
    max_leaves=12,
)
VALID: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 2},
    "/v1/chat/completions": {"messages": USER, "max_tokens": 2},
    "/v1/chat/completions/batch": {"messages": [USER], "max_tokens": 2},
    "/v1/responses": {"input": [{"role": "user", "content": "x"}], "max_output_tokens": 2},
    "/v1/messages": {"model": NAME, "messages": USER, "max_tokens": 2},
    "/inference/v1/generate": {"token_ids": [5], "sampling_params": {"max_tokens": 2}},
}


@pytest.mark.parametrize("path", VALID)
@given(changes=st.dictionaries(st.sampled_from(sorted(KEYS)), JSON, max_size=4))
@settings(max_examples=60, deadline=None)
def test_any_body_is_answered_or_refused(path: str, changes: dict[str, Any]) -> None:
    check, prepare = prompts.ENDPOINTS[path]
    for body in (changes, {**VALID[path], **changes}):
        try:
            prepared = prepare(check(copy.deepcopy(body)), MODEL)
        except ApiError as error:
            assert error.status in (400, 404)
            json.dumps(error.body())
        else:
            assert prepared.rules and all(rules.max_tokens > 0 for rules in prepared.rules)
            audit(body, lambda kind, _: None)


@pytest.mark.parametrize(
    ("work", "valid"),
    [
        (api_tokens.tokenize, {"prompt": "x"}),
        (api_tokens.detokenize, {"tokens": [5]}),
        (api_pooling.embeddings, {"input": "x"}),
        (api_pooling.score, {"queries": "x", "documents": ["y"]}),
        (api_pooling.rerank, {"query": "x", "documents": ["y"]}),
    ],
)
@given(changes=st.dictionaries(st.sampled_from(sorted(KEYS)), JSON, max_size=4))
@settings(max_examples=60, deadline=None)
def test_any_body_is_answered_or_refused_where_nothing_is_generated(
    work: api_tokens.Work, valid: dict[str, Any], changes: dict[str, Any]
) -> None:
    stub = cast("Worker", SimpleNamespace(model=MODEL))
    for body in (changes, {**valid, **changes}):
        try:
            json.dumps(work(stub, copy.deepcopy(body)))
        except ApiError as error:
            assert error.status in (400, 404)


async def test_another_content_type_is_refused(http: aiohttp.ClientSession, worker: Worker) -> None:
    headers = {"content-type": "text/plain"}
    async with http.post(worker.url + "/v1/completions", data=b"{}", headers=headers) as response:
        answer = await response.json()
    assert response.status == 400 and answer["error"]["message"].endswith("Only 'application/json' is allowed")


@pytest.mark.parametrize("value", ["5", 5.0, 5, True])
async def test_numbers_are_taken_as_freely_as_vllm_takes_them(
    http: aiohttp.ClientSession, worker: Worker, value: object
) -> None:
    _, answer = await post(http, worker, "/v1/completions", {"prompt": "x", "max_tokens": value, "temperature": "0.5"})
    assert answer["usage"]["completion_tokens"] == int(value)  # type: ignore[call-overload]


async def test_max_completion_tokens_wins(http: aiohttp.ClientSession, worker: Worker) -> None:
    body = {"messages": USER, "max_tokens": 1, "max_completion_tokens": 6}
    _, answer = await post(http, worker, "/v1/chat/completions", body)
    assert answer["usage"]["completion_tokens"] == 6


async def test_generate_is_forbidden_unless_enabled(http: aiohttp.ClientSession, worker: Worker) -> None:
    body = {"token_ids": [1], "sampling_params": {}}
    status, answer = await post(http, worker, "/inference/v1/generate", body)
    assert status == 403 and answer["error"]["type"] == "PermissionDeniedError"


async def test_a_prompt_is_truncated_on_the_left(http: aiohttp.ClientSession, worker: Worker) -> None:
    body = {"prompt": list(range(100, 120)), "max_tokens": 4, "truncate_prompt_tokens": 5}
    _, answer = await post(http, worker, "/v1/completions", body)
    assert answer["usage"]["prompt_tokens"] == 5
    whole = {"prompt": list(range(115, 120)), "max_tokens": 4}
    assert answer["choices"][0]["text"] == expected_answer("/v1/completions", whole, MODEL)


async def test_the_answer_fills_the_context_and_no_more(http: aiohttp.ClientSession, worker: Worker) -> None:
    body = {"prompt": [5] * 4090, "max_tokens": 100, "ignore_eos": True}
    _, answer = await post(http, worker, "/v1/completions", body)
    assert answer["usage"]["completion_tokens"] == 6 and answer["choices"][0]["finish_reason"] == "length"
