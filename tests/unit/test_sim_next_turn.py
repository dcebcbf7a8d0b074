"""Simulated engines that keep the blocks of their answers for the next turn: what is right, and what a router may never do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from tests.unit.test_sim_handoff import MODEL, NAME, OPTIONS, WORDS, kinds, post, prefill, until
from workers.sim.local import running
from workers.sim.prompts import expected_answer
from workers.sim.worker import Worker

BOTH_WAYS = replace(OPTIONS, bidirectional_kv_xfer=True, mean_answer_tokens=0)
PATH = "/v1/completions"
PROMPT = list(range(1000, 1160))
MORE = list(range(2000, 2040))


@pytest.fixture
async def pair(http: aiohttp.ClientSession) -> AsyncIterator[list[Worker]]:
    async with running(BOTH_WAYS) as workers:
        yield workers


async def turn(http: aiohttp.ClientSession, pair: list[Worker], prompt: list[int] = PROMPT) -> tuple[Any, list[int]]:
    """The first one: what its answer says of its blocks, and its token ids."""
    first, second = pair
    body = {"prompt": prompt, "max_tokens": 100, "return_token_ids": True}
    params = await prefill(http, first, body)
    status, answer = await post(http, second, PATH, {**body, "kv_transfer_params": params})
    assert status == 200
    assert answer["choices"][0]["text"] == expected_answer(PATH, {"model": NAME, **body}, MODEL)
    kept = answer["kv_transfer_params"]
    assert kept["do_remote_decode"] and not kept["do_remote_prefill"]
    return kept, answer["choices"][0]["token_ids"]


async def next_turn(http: aiohttp.ClientSession, pair: list[Worker], prompt: list[int], kept: Any) -> bool:
    """The second one, its prefill with blocks to read: whether the text is right. It is also where the decode worker holds all
    of it by itself."""
    first, second = pair
    body = {"prompt": prompt, "max_tokens": 20}
    status, answer = await post(http, first, PATH, {**body, "max_tokens": 1, "kv_transfer_params": kept})
    assert status == 200, answer
    status, answer = await post(http, second, PATH, {**body, "kv_transfer_params": answer["kv_transfer_params"]})
    assert status == 200
    return bool(answer["choices"][0]["text"] == expected_answer(PATH, {"model": NAME, **body}, MODEL))


@pytest.mark.parametrize("cached", [True, False])
async def test_the_next_turn_reads_what_its_prefill_worker_has_not(
    http: aiohttp.ClientSession, pair: list[Worker], cached: bool
) -> None:
    kept, answer = await turn(http, pair)
    assert kept["remote_num_tokens"] == 259, "the last token has no KV yet"
    if not cached:
        await pair[0].restart()
    assert await next_turn(http, pair, PROMPT + answer + MORE, kept)
    read = pair[0].engine.core.counters.pulled_tokens
    assert read == (259 - 160 if cached else 259)
    assert kinds(pair[0]) == kinds(pair[1]) == {}
    assert kept["remote_request_id"] not in pair[1].engine.handoffs.pinned, "read, so let go"


async def test_a_prefill_says_that_what_it_read_was_not_computed(http: aiohttp.ClientSession, pair: list[Worker]) -> None:
    kept, answer = await turn(http, pair)
    body = {"prompt": PROMPT + answer + MORE, "max_tokens": 1, "kv_transfer_params": kept}
    _, reply = await post(http, pair[0], PATH, body)
    assert reply["kv_transfer_params"]["remote_prefill_cached_tokens"] == 259


@pytest.mark.parametrize("at", [0, 63, 170, 200, 258])
async def test_a_prompt_that_does_not_begin_with_their_tokens_gets_wrong_text_and_is_counted(
    http: aiohttp.ClientSession, pair: list[Worker], at: int
) -> None:
    """Also where the other token stands before what is read: KV covers all before it."""
    kept, answer = await turn(http, pair)
    prompt = PROMPT + answer + MORE
    prompt[at] += 1
    assert not await next_turn(http, pair, prompt, kept)
    assert kinds(pair[0]) == {"other_beginning": 1}
    assert pair[0].violations.report()["count"] == 1


async def test_a_block_too_many_shifts_all_of_them_and_is_counted(http: aiohttp.ClientSession, pair: list[Worker]) -> None:
    kept, answer = await turn(http, pair)
    kept["remote_num_tokens"] = 240  # 15 of the 17 blocks; the last ones are taken
    await next_turn(http, pair, PROMPT + answer + MORE, kept)
    assert kinds(pair[0]) == {"other_beginning": 1}


async def test_blocks_are_read_once(http: aiohttp.ClientSession, pair: list[Worker]) -> None:
    kept, answer = await turn(http, pair)
    assert await next_turn(http, pair, PROMPT + answer + MORE, kept)
    await pair[0].restart()
    await next_turn(http, pair, PROMPT + answer + MORE, kept)
    assert kinds(pair[0]) == {"second_use": 1}


async def test_blocks_are_read_in_time(http: aiohttp.ClientSession) -> None:
    async with running(replace(BOTH_WAYS, decoder_kv_blocks_ttl_s=0.2)) as pair:
        kept, answer = await turn(http, pair)
        await until(lambda: not pair[1].engine.handoffs.pinned)
        assert pair[1].violations.counts == {"turn_unused": 1} and pair[1].violations.report()["count"] == 0
        assert not await next_turn(http, pair, PROMPT + answer + MORE, kept)
        assert kinds(pair[0]) == {"use_after_expiry": 1}


async def test_a_prefill_worker_that_cannot_read_never_answers(http: aiohttp.ClientSession, pair: list[Worker]) -> None:
    kept, answer = await turn(http, pair)
    async with running(replace(BOTH_WAYS, workers=1, bidirectional_kv_xfer=False)) as (other,):
        body = {"prompt": PROMPT + answer + MORE, "max_tokens": 1, "kv_transfer_params": kept}
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await post(http, other, PATH, body)
        assert kinds(other) == {"turn_stuck": 1}


async def test_a_prefill_that_would_save_little_reads_nothing_and_gives_back(
    http: aiohttp.ClientSession, pair: list[Worker]
) -> None:
    kept, answer = await turn(http, pair)
    kept["remote_num_tokens"] = 200  # 40 more than it has
    assert await next_turn(http, pair, PROMPT + answer + MORE, kept)
    await until(lambda: kept["remote_request_id"] not in pair[1].engine.handoffs.pinned)
    assert pair[0].engine.core.counters.pulled_tokens == 0 and kinds(pair[0]) == kinds(pair[1]) == {}


async def test_a_request_that_is_turned_down_gives_them_back(http: aiohttp.ClientSession, pair: list[Worker]) -> None:
    kept, _ = await turn(http, pair)
    body = {"model": "nobody", "prompt": "x", "max_tokens": 1}
    given = {**kept, "do_remote_decode": False, "do_remote_prefill": True}
    status, _ = await post(http, pair[0], PATH, {**body, "kv_transfer_params": given})
    assert status == 404
    await until(lambda: not pair[1].engine.handoffs.pinned)
    assert kinds(pair[0]) == kinds(pair[1]) == {}


async def test_only_answers_to_handoffs_are_kept(http: aiohttp.ClientSession, pair: list[Worker]) -> None:
    _, answer = await post(http, pair[1], PATH, {"prompt": WORDS * 5, "max_tokens": 20})
    assert answer["kv_transfer_params"] is None and not pair[1].engine.handoffs.pinned
    async with running(replace(BOTH_WAYS, bidirectional_kv_xfer=False)) as (first, second):
        params = await prefill(http, first, {"prompt": PROMPT})
        _, answer = await post(http, second, PATH, {"prompt": PROMPT, "max_tokens": 20, "kv_transfer_params": params})
        assert answer["kv_transfer_params"] is None and not second.engine.handoffs.pinned
