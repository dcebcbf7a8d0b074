"""Handoffs between simulated workers over HTTP and their side channel: what is right, what is wrong, what is counted."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from workers.sim.local import running
from workers.sim.options import SimOptions
from workers.sim.prompts import Model, expected_answer
from workers.sim.worker import Worker

OPTIONS = SimOptions(
    port=0, workers=2, speed=0, num_blocks=600, max_model_len=4096, enable_scale_out=True, side_channel_timeout_s=1.0
)
MODEL = Model(max_model_len=4096)
NAME = MODEL.names[0]
WORDS = "A man walks into a library and asks for a book about time travel. "
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


@pytest.fixture
async def pair(http: aiohttp.ClientSession) -> AsyncIterator[list[Worker]]:
    async with running(OPTIONS) as workers:
        yield workers


async def post(http: aiohttp.ClientSession, worker: Worker, path: str, body: object, **more: Any) -> tuple[int, Any]:
    async with http.post(worker.url + path, json=body, **more) as response:
        return response.status, await response.json(content_type=None)


async def prefill(http: aiohttp.ClientSession, worker: Worker, body: dict[str, Any], path: str = "/v1/completions") -> Any:
    cap = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    status, answer = await post(http, worker, path, {**body, cap: 1, "kv_transfer_params": PREFILL})
    assert status == 200, answer
    return answer["kv_transfer_params"]


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


def kinds(worker: Worker) -> dict[str, int]:
    return dict(worker.violations.counts)


def text_of(path: str, answer: Any) -> str:
    if path == "/v1/completions":
        return answer["choices"][0]["text"]
    if path == "/v1/chat/completions":
        return answer["choices"][0]["message"]["content"]
    if path == "/v1/responses":
        return answer["output"][0]["content"][0]["text"]
    return answer["content"][0]["text"]


CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": WORDS * 5}]
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": WORDS * 5, "max_tokens": 12}),
    ("/v1/completions", {"prompt": list(range(1000, 1111)), "max_tokens": 12, "ignore_eos": True}),
    ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 12}),
    ("/v1/responses", {"input": WORDS * 5, "instructions": "Be brief.", "max_output_tokens": 12}),
    ("/v1/messages", {"model": NAME, "messages": CHAT[1:], "system": "Be brief.", "max_tokens": 12}),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_a_correct_handoff_gives_the_text_of_a_single_worker(
    http: aiohttp.ClientSession, pair: list[Worker], path: str, body: dict[str, Any]
) -> None:
    first, second = pair
    params = await prefill(http, first, body, path)
    assert first.engine.pool.free_blocks < 599
    status, answer = await post(http, second, path, {**body, "kv_transfer_params": params})
    assert status == 200
    text = text_of(path, answer)
    assert text == expected_answer(path, body, MODEL) and len(text) > 20
    _, alone = await post(http, first, path, body)
    assert text_of(path, alone) == text
    assert first.engine.pool.free_blocks == second.engine.pool.free_blocks == 599
    assert kinds(first) == kinds(second) == {}
    assert second.engine.core.counters.pulled_tokens > 0


async def test_a_handoff_through_generate(http: aiohttp.ClientSession, pair: list[Worker]) -> None:
    body = {"token_ids": list(range(500, 600)), "sampling_params": {"max_tokens": 7}, "output_mode": "text"}
    once = {**body, "sampling_params": {"max_tokens": 1}, "kv_transfer_params": PREFILL}
    _, answer = await post(http, pair[0], "/inference/v1/generate", once)
    full = {**body, "kv_transfer_params": answer["kv_transfer_params"]}
    _, answer = await post(http, pair[1], "/inference/v1/generate", full)
    assert answer["choices"][0]["text"] == expected_answer("/inference/v1/generate", body, MODEL)
    assert len(answer["choices"][0]["token_ids"]) == 7


async def test_a_second_use_is_200_with_wrong_text_and_is_counted(http: aiohttp.ClientSession, pair: list[Worker]) -> None:
    path, body = BODIES[0]
    params = await prefill(http, pair[0], body)
    # Without a prefix cache hit, as another decode worker would be.
    await post(http, pair[1], path, {**body, "kv_transfer_params": params})
    await pair[1].restart()
    status, answer = await post(http, pair[1], path, {**body, "kv_transfer_params": params})
    assert status == 200 and text_of(path, answer) != expected_answer(path, body, MODEL)
    async with http.get(pair[1].url + "/sim/violations") as response:
        report = await response.json()
    assert report["count"] == 1 and report["counts"] == {"second_use": 1}
    assert report["violations"][0]["request_id"].startswith("cmpl-")
    assert params["remote_request_id"] in report["violations"][0]["detail"]


async def test_a_use_after_the_lease_is_200_with_wrong_text_and_is_counted(http: aiohttp.ClientSession) -> None:
    path, body = BODIES[0]
    async with running(replace(OPTIONS, kv_lease_duration_s=0.2)) as (first, second):
        params = await prefill(http, first, body)
        await until(lambda: not first.engine.handoffs.pinned)
        assert kinds(first) == {"leaked_blocks": 1} and first.engine.core.counters.expired == 1
        for number in range(20):  # other prompts take the blocks
            await post(http, first, path, {**body, "prompt": [number] * 500})
        status, answer = await post(http, second, path, {**body, "kv_transfer_params": params})
        assert status == 200 and text_of(path, answer) != expected_answer(path, body, MODEL)
        assert kinds(second) == {"use_after_expiry": 1}
        assert first.engine.core.counters.late_notifications == 1


async def test_a_handoff_for_another_prompt_is_counted(http: aiohttp.ClientSession, pair: list[Worker]) -> None:
    path, body = BODIES[0]
    params = await prefill(http, pair[0], body)
    other = {**body, "prompt": WORDS * 4 + "Somebody walks into a bar and asks for a book about cooking. "}
    status, answer = await post(http, pair[1], path, {**other, "kv_transfer_params": params})
    assert status == 200 and text_of(path, answer) != expected_answer(path, other, MODEL)
    assert kinds(pair[1]) == {"other_prompt": 1}


async def test_a_leg_that_drops_the_tools_is_found_out(http: aiohttp.ClientSession, pair: list[Worker]) -> None:
    path, body = BODIES[2]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    params = await prefill(http, pair[0], body, path)
    full = {**body, "tools": tools}
    _, answer = await post(http, pair[1], path, {**full, "kv_transfer_params": params})
    assert text_of(path, answer) != expected_answer(path, full, MODEL)
    assert kinds(pair[1]) == {"other_prompt": 1}


@pytest.mark.parametrize("wrong", [{"model": "nope"}, {"prompt": [1] * 5000}, {"max_tokens": 0}, {"n": 0}])
async def test_a_refused_decode_gives_the_blocks_back_at_once(
    http: aiohttp.ClientSession, pair: list[Worker], wrong: dict[str, Any]
) -> None:
    path, body = BODIES[0]
    params = await prefill(http, pair[0], body)
    status, _ = await post(http, pair[1], path, {**body, **wrong, "kv_transfer_params": params})
    assert status in (400, 404)
    await until(lambda: pair[0].engine.pool.free_blocks == 599, 1.0)
    assert kinds(pair[0]) == kinds(pair[1]) == {} and pair[0].engine.core.counters.expired == 0
    status, answer = await post(http, pair[1], path, {**body, "kv_transfer_params": params})
    assert text_of(path, answer) != expected_answer(path, body, MODEL)
    assert kinds(pair[1]) == {"use_after_release": 1}


async def test_a_body_that_fails_validation_gives_nothing_back(http: aiohttp.ClientSession, pair: list[Worker]) -> None:
    path, body = BODIES[0]
    params = await prefill(http, pair[0], body)
    wrong = {**body, "stream_options": {"include_usage": True}, "kv_transfer_params": params}
    assert (await post(http, pair[1], path, wrong))[0] == 400
    await asyncio.sleep(0.1)
    assert pair[0].engine.pool.free_blocks < 599


async def test_a_client_that_leaves_during_the_prefill_frees_the_blocks(http: aiohttp.ClientSession) -> None:
    path, body = BODIES[0]
    async with running(replace(OPTIONS, speed=0.05)) as (first, _):
        call = asyncio.create_task(prefill(http, first, body, path))
        await until(lambda: len(first.engine.core.running) == 1)
        call.cancel()
        await until(lambda: first.engine.pool.free_blocks == 599)
        assert first.engine.handoffs.pinned == {} and first.serving.in_flight == 0


async def test_a_client_that_leaves_the_decode_queue_frees_the_prefill_workers_blocks(http: aiohttp.ClientSession) -> None:
    path, body = BODIES[0]
    async with running(replace(OPTIONS, max_num_seqs=1, speed=0.5, handshake_s=0.0)) as (first, second):
        params = await prefill(http, first, body)
        busy = asyncio.create_task(post(http, second, path, {"prompt": "x", "max_tokens": 1000, "ignore_eos": True}))
        await until(lambda: len(second.engine.core.running) == 1)
        call = asyncio.create_task(post(http, second, path, {**body, "kv_transfer_params": params}))
        await until(lambda: len(second.engine.core.waiting) == 1)
        call.cancel()
        await until(lambda: first.engine.pool.free_blocks == 599)
        busy.cancel()
        await until(lambda: second.engine.pool.free_blocks == 599)
        assert kinds(first) == kinds(second) == {}


async def test_heartbeats_keep_the_lease_while_the_decode_worker_is_busy(http: aiohttp.ClientSession) -> None:
    path, body = BODIES[0]
    options = replace(OPTIONS, max_num_seqs=1, kv_lease_duration_s=0.4, handshake_s=0.0, speed=1.0)
    async with running(options) as (first, second):
        params = await prefill(http, first, body)
        busy = asyncio.create_task(post(http, second, path, {"prompt": "x", "max_tokens": 100, "ignore_eos": True}))
        await until(lambda: len(second.engine.core.running) == 1)
        status, answer = await post(http, second, path, {**body, "kv_transfer_params": params})
        assert (await busy)[0] == 200
        assert status == 200 and text_of(path, answer) == expected_answer(path, body, MODEL)
        assert kinds(first) == kinds(second) == {} and first.engine.core.counters.expired == 0


async def test_a_streamed_prefill_has_no_handoff_and_leaks(http: aiohttp.ClientSession) -> None:
    path, body = BODIES[0]
    async with running(replace(OPTIONS, kv_lease_duration_s=0.2)) as (first, _):
        async with http.post(
            first.url + path, json={**body, "max_tokens": 1, "stream": True, "kv_transfer_params": PREFILL}
        ) as r:
            assert "remote_block_ids" not in await r.text()
        assert kinds(first) == {"streamed_prefill": 1} and len(first.engine.handoffs.pinned) == 1
        await until(lambda: first.engine.pool.free_blocks == 599)
        assert kinds(first) == {"streamed_prefill": 1, "leaked_blocks": 1}


async def test_what_a_prefill_leg_must_not_carry_is_counted(http: aiohttp.ClientSession, pair: list[Worker]) -> None:
    path, body = BODIES[0]
    status, _ = await post(http, pair[0], path, {**body, "max_tokens": 1, "min_tokens": 5, "kv_transfer_params": PREFILL})
    assert status == 400 and kinds(pair[0]) == {"min_tokens_above_cap": 1}
    _, answer = await post(http, pair[0], path, {**body, "max_tokens": 1, "n": 2, "kv_transfer_params": PREFILL})
    assert len(answer["choices"]) == 2 and len(pair[0].engine.handoffs.pinned) == 2
    two = {**body, "prompt": ["a", "b"], "max_tokens": 1, "kv_transfer_params": PREFILL}
    _, answer = await post(http, pair[0], path, two)
    assert isinstance(answer["kv_transfer_params"], dict) and len(pair[0].engine.handoffs.pinned) == 4
    assert kinds(pair[0]) == {"min_tokens_above_cap": 1, "several_sequences": 2}
    await post(http, pair[0], path, {**body, "vllm_xargs": {"kv_transfer_params": "x"}})
    assert kinds(pair[0])["smuggled_params"] == 1


async def test_several_decodes_of_one_handoff_have_one_right_answer(http: aiohttp.ClientSession, pair: list[Worker]) -> None:
    path, body = BODIES[0]
    params = await prefill(http, pair[0], body)
    _, answer = await post(http, pair[1], path, {**body, "n": 2, "kv_transfer_params": params})
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts.count(expected_answer(path, body, MODEL)) == 1
    assert kinds(pair[1]) == {"several_sequences": 1, "second_use": 1}


async def test_params_of_an_engine_that_never_was_fail_and_are_counted(http: aiohttp.ClientSession, pair: list[Worker]) -> None:
    path, body = BODIES[0]
    params = await prefill(http, pair[0], body)
    status, answer = await post(http, pair[1], path, {**body, "kv_transfer_params": {**params, "remote_engine_id": "made-up"}})
    assert status == 500
    assert answer["error"] == {
        "message": "Internal server error",
        "type": "InternalServerError",
        "param": None,
        "code": 500,
    }
    assert kinds(pair[1]) == {"unknown_engine": 1} and pair[1].engine.pool.free_blocks == 599
    params = {**params, "remote_request_id": "made-up"}
    status, answer = await post(http, pair[1], path, {**body, "kv_transfer_params": params})
    assert status == 200 and text_of(path, answer) != expected_answer(path, body, MODEL)
    assert kinds(pair[1]) == {"unknown_engine": 1, "unknown_request": 1}


async def test_foreign_blocks_read_wrong(http: aiohttp.ClientSession, pair: list[Worker]) -> None:
    path, body = BODIES[0]
    params = await prefill(http, pair[0], body)
    blocks = params["remote_block_ids"][0]
    moved = {**params, "remote_block_ids": [[*blocks[:-1], 599]]}
    status, answer = await post(http, pair[1], path, {**body, "kv_transfer_params": moved})
    assert status == 200 and text_of(path, answer) != expected_answer(path, body, MODEL)
    assert kinds(pair[1]) == {"foreign_blocks": 1}


@pytest.mark.parametrize("key", ["remote_block_ids", "remote_request_id", "remote_engine_id", "remote_host", "remote_port"])
async def test_incomplete_params_fail_and_are_counted(http: aiohttp.ClientSession, pair: list[Worker], key: str) -> None:
    path, body = BODIES[0]
    params = await prefill(http, pair[0], body)
    del params[key]
    assert (await post(http, pair[1], path, {**body, "kv_transfer_params": params}))[0] == 500
    assert kinds(pair[1]) == {"incomplete_params": 1}


@pytest.mark.parametrize("blocks", [[], [[]], {}, "abc", [["a"]], [[1 << 70]]])
async def test_block_ids_that_are_none_fail_only_their_request(
    http: aiohttp.ClientSession, pair: list[Worker], blocks: object
) -> None:
    path, body = BODIES[0]
    params = {**await prefill(http, pair[0], body), "remote_block_ids": blocks}
    assert (await post(http, pair[1], path, {**body, "kv_transfer_params": params}))[0] == 500
    assert not pair[1].engine.dead and pair[1].engine.pool.free_blocks == 599


async def test_params_without_a_tp_size_get_no_heartbeats(http: aiohttp.ClientSession) -> None:
    path, body = BODIES[0]
    async with running(replace(OPTIONS, max_num_seqs=1, kv_lease_duration_s=0.3, handshake_s=0.0, speed=1.0)) as (
        first,
        second,
    ):
        params = await prefill(http, first, body)
        del params["tp_size"]
        busy = asyncio.create_task(post(http, second, path, {"prompt": "x", "max_tokens": 60, "ignore_eos": True}))
        await until(lambda: len(second.engine.core.running) == 1)
        status, answer = await post(http, second, path, {**body, "kv_transfer_params": params})
        assert (await busy)[0] == status == 200
        assert text_of(path, answer) != expected_answer(path, body, MODEL)
        assert kinds(second) == {"use_after_expiry": 1}


async def test_one_worker_can_be_both_ends_of_a_handoff(http: aiohttp.ClientSession, pair: list[Worker]) -> None:
    path, body = BODIES[0]
    params = await prefill(http, pair[0], body)
    _, answer = await post(http, pair[0], path, {**body, "kv_transfer_params": params})
    assert text_of(path, answer) == expected_answer(path, body, MODEL)
    assert kinds(pair[0]) == {} and pair[0].engine.pool.free_blocks == 599


async def test_incomplete_params_kill_a_strict_engine_even_through_a_refused_request(http: aiohttp.ClientSession) -> None:
    path, body = BODIES[0]
    async with running(replace(OPTIONS, strict_crash=True)) as (first, _):
        wrong = {"model": "nope", "prompt": "x", "kv_transfer_params": {"do_remote_prefill": True}}
        assert (await post(http, first, path, wrong))[0] == 404
        await until(lambda: first.engine.dead)
        status, answer = await post(http, first, path, body)
        assert status == 500 and answer["error"]["message"].startswith("EngineCore encountered an issue.")
        async with http.get(first.url + "/health") as response:
            assert response.status == 503


async def test_a_bug_in_the_engine_is_an_error_and_not_a_silence(
    http: aiohttp.ClientSession, pair: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(pair[0].engine.core, "commit", broken)
    status, answer = await post(http, pair[0], *BODIES[0])
    assert status == 500 and answer["error"]["type"] == "InternalServerError" and pair[0].engine.dead


async def test_a_dead_side_channel_fails_the_decode_or_is_recomputed(http: aiohttp.ClientSession) -> None:
    path, body = BODIES[0]
    for policy, status_wanted in (("fail", 500), ("recompute", 200)):
        async with running(replace(OPTIONS, kv_load_failure_policy=policy)) as (first, second):
            params = await prefill(http, first, body)
            await post(http, first, "/sim/faults", {"kind": "side_channel_dead"})
            status, answer = await post(http, second, path, {**body, "kv_transfer_params": params})
            assert status == status_wanted
            if status == 200:
                assert text_of(path, answer) == expected_answer(path, body, MODEL)
            assert kinds(second) == {} and second.engine.transfers.failed == 1


async def test_a_streamed_decode_that_fails_says_so_in_the_stream(http: aiohttp.ClientSession, pair: list[Worker]) -> None:
    path, body = BODIES[0]
    params = await prefill(http, pair[0], body)
    await post(http, pair[0], "/sim/faults", {"kind": "side_channel_dead"})
    async with http.post(pair[1].url + path, json={**body, "stream": True, "kv_transfer_params": params}) as response:
        assert response.status == 200
        lines = (await response.text()).strip().split("\n\n")
    assert json.loads(lines[0][6:])["error"]["code"] == 500 and lines[1:] == ["data: [DONE]"]


async def test_a_restarted_engine_is_known_as_gone(http: aiohttp.ClientSession, pair: list[Worker]) -> None:
    path, body = BODIES[0]
    params = await prefill(http, pair[0], body)
    old = pair[0].engine.engine_id
    await post(http, pair[0], "/sim/faults", {"kind": "restart"})
    await until(lambda: pair[0].engine.engine_id != old and pair[0].up)
    assert (await post(http, pair[1], path, {**body, "kv_transfer_params": params}))[0] == 500
    assert pair[1].violations.report()["count"] == 0 and kinds(pair[1]) == {"engine_gone": 1}
    params = await prefill(http, pair[0], body)
    _, answer = await post(http, pair[1], path, {**body, "kv_transfer_params": params})
    assert text_of(path, answer) == expected_answer(path, body, MODEL)


async def test_token_ids_of_the_prefill_can_be_used_by_the_decode(http: aiohttp.ClientSession, pair: list[Worker]) -> None:
    path, body = BODIES[2]
    once = {**body, "max_tokens": 1, "return_token_ids": True, "kv_transfer_params": PREFILL}
    _, answer = await post(http, pair[0], path, once)
    params = {**answer["kv_transfer_params"], "prompt_token_ids": answer["prompt_token_ids"]}
    bogus = {**body, "messages": [{"role": "user", "content": "never read"}], "kv_transfer_params": params}
    _, answer = await post(http, pair[1], path, bogus)
    assert text_of(path, answer) == expected_answer(path, body, MODEL) and kinds(pair[1]) == {}
    for wrong in ([], [-1], ["a"], "x", [True]):
        status, answer = await post(http, pair[1], path, {**body, "kv_transfer_params": {"prompt_token_ids": wrong}})
        assert status == 400 and answer["error"]["param"] == "kv_transfer_params.prompt_token_ids"


async def test_the_cached_tokens_of_a_decode_are_those_of_its_prefill(http: aiohttp.ClientSession) -> None:
    path, body = BODIES[0]
    async with running(replace(OPTIONS, enable_prompt_tokens_details=True)) as (first, second):
        await post(http, first, path, body)
        params = await prefill(http, first, body)
        assert params["remote_prefill_cached_tokens"] > 0
        _, answer = await post(http, second, path, {**body, "kv_transfer_params": params})
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": params["remote_prefill_cached_tokens"]}


async def test_a_reset_forgets_handoffs_and_violations(http: aiohttp.ClientSession, pair: list[Worker]) -> None:
    _, body = BODIES[0]
    await prefill(http, pair[0], body)
    pair[0].engine.violate("second_use", "x", "y")
    async with http.get(pair[0].url + "/sim/state") as response:
        state = await response.json()
    assert state["pinned_blocks"] == len(pair[0].engine.handoffs.pinned[state["handoffs"][0]["request_id"]].blocks) > 0
    assert state["free_blocks"] + state["pinned_blocks"] == state["total_blocks"] == 599
    await post(http, pair[0], "/sim/reset", None)
    async with http.get(pair[0].url + "/sim/violations") as response:
        assert (await response.json())["count"] == 0
    assert pair[0].engine.pool.free_blocks == 599


async def test_workers_in_two_processes_hand_over(http: aiohttp.ClientSession) -> None:
    command = [sys.executable, "-m", "workers.sim", "--port", "0", "--speed", "0", "--num-blocks", "600"]
    processes = [
        await asyncio.create_subprocess_exec(*command, "--max-model-len", "4096", stdout=asyncio.subprocess.PIPE)
        for _ in range(2)
    ]
    try:
        urls = []
        for process in processes:
            assert process.stdout is not None
            urls.append(json.loads(await process.stdout.readline())["ready"][0]["url"])
        body = BODIES[0][1]
        async with http.post(
            f"{urls[0]}/v1/completions", json={**body, "max_tokens": 1, "kv_transfer_params": PREFILL}
        ) as response:
            params = (await response.json())["kv_transfer_params"]
        async with http.post(f"{urls[1]}/v1/completions", json={**body, "kv_transfer_params": params}) as response:
            assert text_of("/v1/completions", await response.json()) == expected_answer("/v1/completions", body, MODEL)
    finally:
        for process in processes:
            process.terminate()
        statuses = [await process.wait() for process in processes]
    assert statuses == [0, 0]
