"""The turn before, read from its decode worker: the real Envoy, the filter, and simulated engines that forgive nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from tests.stack.harness import BODY_MODE, READY_S, Stack, beside
from workers.sim.local import running
from workers.sim.options import SimOptions
from workers.sim.prompts import Model, expected_answer
from workers.sim.worker import Worker

MODEL = "sim-llama-70b"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SYSTEM = "You are the keeper of a very long list of rules, and you follow all of them. " * 12
OPTIONS = SimOptions(speed=20, mean_answer_tokens=0, handshake_s=0.0, bidirectional_kv_xfer=True)
SHOWN = {"body_mode": "buffered" if BODY_MODE == "full_duplex" else BODY_MODE}
"""With `full_duplex` Envoy cannot show the body of an answer, and the configuration is refused."""
TURN = {"enabled": True, "ttl_s": 60.0, "margin_s": 1.0}
SECTIONS: dict[str, Any] = {
    "tokens": {"ask_workers": "tokenize", "timeout_ms": 5_000},
    "policies": [{"name": "default", "mode": "disaggregate"}],
    "routing": {"handshake_s": 0.0, "prefill_tokens_per_s": 100.0},
    "scrape": {"interval_s": 0.2},
    "handoff": {"next_turn": TURN},
    "envoy": SHOWN,
}


class World:
    """A stack and its engines: one that prefills, and those that decode."""

    def __init__(self, stack: Stack, engines: list[Worker]) -> None:
        self.stack = stack
        self.prefill, *self.decodes = engines
        self.engines = engines

    async def ask(self, path: str, body: dict[str, Any], **more: Any) -> dict[str, Any]:
        async with self.stack.http.post(path, json={"model": MODEL, **body}, **more) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def chat(self, messages: list[dict[str, str]], **body: Any) -> str:
        """One turn, with the right answer and not a word of blocks or token ids."""
        asked = {"messages": messages, "max_tokens": 96}
        answer = await self.ask(CHAT, {**asked, **body})
        assert answer["kv_transfer_params"] is None and answer["prompt_token_ids"] is None
        assert answer["choices"][0]["token_ids"] is None
        text = str(answer["choices"][0]["message"]["content"])
        assert text == expected_answer(CHAT, {"model": MODEL, **asked}, Model())
        return text

    async def outcomes(self) -> dict[str, float]:
        start = 'baton_next_turn_total{outcome="'
        metrics = await self.stack.metrics()
        return {name[len(start) : -2]: value for name, value in metrics.items() if name.startswith(start) and value}

    async def until(self, **wanted: float) -> None:
        """Wait until that, and nothing else, has become of the blocks that were kept."""
        seen: dict[str, float] = {}
        async with asyncio.timeout(READY_S):
            while seen != wanted:
                seen = await self.outcomes()
                await asyncio.sleep(0.05)

    async def nothing_kept(self) -> None:
        """Wait until no engine keeps blocks for anybody."""
        async with asyncio.timeout(READY_S):
            while any(engine.engine.handoffs.pinned for engine in self.engines):
                await asyncio.sleep(0.05)

    def assert_nothing_wrong(self) -> None:
        assert [engine.violations.report()["counts"] for engine in self.engines] == [{}] * len(self.engines)

    @property
    def read_tokens(self) -> int:
        """By the prefill worker, from others."""
        return self.prefill.engine.core.counters.pulled_tokens


@asynccontextmanager
async def turns(*, decodes: int = 1, options: SimOptions = OPTIONS, **settings: Any) -> AsyncIterator[World]:
    async with AsyncExitStack() as parts:
        engines = await parts.enter_async_context(running(replace(options, port=0, workers=1 + decodes)))
        addresses = [engine.address for engine in engines]
        stack = beside(
            {"prefill": addresses[:1], "decode": addresses[1:]},
            **SECTIONS | settings,
        )
        await parts.enter_async_context(stack)
        world = World(stack, engines)
        await scraped(stack)
        yield world


async def scraped(stack: Stack, times: float = 4) -> None:
    """Until every worker has said how large its blocks are."""
    async with asyncio.timeout(READY_S):
        while (await stack.metrics()).get('baton_scrapes_total{outcome="ok"}', 0) < times:
            await asyncio.sleep(0.05)


def said(*turns: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": "system", "content": SYSTEM}, *({"role": roles[n % 2], "content": turn} for n, turn in enumerate(turns))]


async def test_each_turn_reads_the_one_before_from_its_decode_worker() -> None:
    async with turns() as world:
        talk = ["What is the first rule?"]
        for turn in range(4):
            before = world.read_tokens
            talk.append(await world.chat(said(*talk)))
            read = world.read_tokens - before
            assert read == 0 if not turn else read >= 64, "what the answer before has added"
            talk.append(f"And what is rule {turn + 2}?")
        await world.until(kept=4, read=3)
        world.assert_nothing_wrong()


async def test_a_prompt_that_is_no_exact_continuation_never_gets_the_blocks() -> None:
    """It begins with all of the turn before but one token, or is of another salt: it is computed, and its text is right."""
    async with turns() as world:
        answer = await world.chat(said("What is the first rule?"))
        words = answer.split(" ")
        for other in (
            " ".join([words[0], "Otherwise", *words[2:]]),
            " ".join(words[:20]),
            answer.upper(),
            "",
        ):
            await world.chat(said("What is the first rule?", other, "And the second?"))
        assert world.read_tokens == 0, "the answer was changed"
        await world.chat(said("What is the first rule, then?", answer, "And the second?"))
        assert world.read_tokens == 0, "the question was changed"
        await world.chat(said("What is the first rule?", answer, "And the second?"), cache_salt="mine")
        assert world.read_tokens == 0, "another salt"
        found = await world.outcomes()
        assert found["kept"] == 7 and found["diverged"] >= 4 and "read" not in found
        await world.chat(said("What is the first rule?", answer, "And the second?"))
        assert world.read_tokens > 0, "the true one, after all of them"
        assert (await world.outcomes())["read"] == 1
        world.assert_nothing_wrong()


async def test_blocks_are_read_once_and_by_one_prompt_of_two_that_come_together() -> None:
    async with turns() as world:
        answer = await world.chat(said("What is the first rule?"))
        follow = said("What is the first rule?", answer, "And the second?")
        await asyncio.gather(*(world.chat(follow) for _ in range(3)))
        found = await world.outcomes()
        assert found["read"] == 1 and found["kept"] == 4
        world.assert_nothing_wrong()


async def test_token_ids_go_to_a_client_that_asks_for_them_and_the_completions_api_reads_too() -> None:
    async with turns() as world:
        prompt = SYSTEM
        for turn in range(3):
            body = {"prompt": prompt, "max_tokens": 80, "return_token_ids": bool(turn)}
            answer = await world.ask(TEXT, body)
            choice = answer["choices"][0]
            assert choice["text"] == expected_answer(TEXT, {"model": MODEL, **body}, Model())
            assert answer["kv_transfer_params"] is None
            assert bool(choice["token_ids"]) == bool(choice["prompt_token_ids"]) == bool(turn)
            prompt += choice["text"] + " And then there was one more rule, which nobody had ever read."
        await world.until(kept=3, read=2)
        world.assert_nothing_wrong()


async def test_a_streamed_answer_keeps_nothing_that_could_be_used() -> None:
    async with turns(options=replace(OPTIONS, decoder_kv_blocks_ttl_s=1.0)) as world:
        asked = {"messages": said("What is the first rule?"), "max_tokens": 96, "model": MODEL, "stream": True}
        async with world.stack.http.post(CHAT, json=asked) as response:
            text = await response.text()
        assert 'token_ids":[' not in text and "kv_transfer_params" not in text
        answer = expected_answer(CHAT, asked, Model())
        await world.chat(said("What is the first rule?", answer, "And the second?"))
        await world.until(streamed=1, kept=1)
        assert world.read_tokens == 0
        await world.nothing_kept()
        assert [each.violations.counts for each in world.decodes] == [{"turn_unused": 2}], "to the end of their time"


@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_responses_api_says_of_blocks_stays_here_and_they_are_given_back(stream: bool) -> None:
    """It tells no token ids, so that nobody could know what is in them."""
    async with turns() as world:
        body = {"model": MODEL, "input": SYSTEM, "max_output_tokens": 90, "stream": stream}
        async with world.stack.http.post("/v1/responses", json=body) as response:
            text = await response.text()
        assert response.status == 200 and expected_answer("/v1/responses", body, Model()) in text
        assert "remote_" not in text and '"kv_transfer_params":null' in text
        await world.until(no_ids=1, **({"streamed": 1} if stream else {}))
        await world.nothing_kept()
        world.assert_nothing_wrong()
        assert all(not each.violations.counts for each in world.decodes), "given back, not left to their time"


async def test_nobody_comes_in_time() -> None:
    settings = {"handoff": {"next_turn": {**TURN, "ttl_s": 1.5}}}
    async with turns(options=replace(OPTIONS, decoder_kv_blocks_ttl_s=1.5), **settings) as world:
        answer = await world.chat(said("What is the first rule?"))
        await world.nothing_kept()
        await world.chat(said("What is the first rule?", answer, "And the second?"))
        assert world.read_tokens == 0
        await world.until(kept=2, expired=1)
        world.assert_nothing_wrong()


async def test_the_decode_worker_was_started_again() -> None:
    async with turns() as world:
        answer = await world.chat(said("What is the first rule?"))
        (decode,) = world.decodes
        await scraped(world.stack, 4 + (await world.stack.metrics())['baton_scrapes_total{outcome="ok"}'])
        await decode.restart()
        await world.until(kept=1, gone=1)
        await world.chat(said("What is the first rule?", answer, "And the second?"))
        assert world.read_tokens == 0
        world.assert_nothing_wrong()


async def test_a_decode_worker_that_went_a_moment_ago_costs_the_client_nothing() -> None:
    """Nobody has noticed yet that its engine is a new one: the prefill cannot read, fails, and is tried again without."""
    async with turns(decodes=2) as world:
        answer = await world.chat(said("What is the first rule?"))
        kept = next(each for each in world.decodes if each.engine.handoffs.pinned)
        await kept.engine.server.close()  # its blocks cannot be read any more; nothing else shows it
        await world.chat(said("What is the first rule?", answer, "And the second?"))
        found = await world.outcomes()
        assert found["kept"] >= 1 and found["failed"] == 1 and "read" not in found
        world.assert_nothing_wrong()


async def test_what_costs_more_to_read_than_to_compute_is_computed_and_given_back() -> None:
    async with turns(routing={"handshake_s": 0.0, "prefill_tokens_per_s": 1e9, "transfer_bytes_per_s": 1e3}) as world:
        answer = await world.chat(said("What is the first rule?"))
        await world.chat(said("What is the first rule?", answer, "And the second?"))
        assert world.read_tokens == 0
        await world.until(kept=2, not_worth=1)
        world.assert_nothing_wrong()


async def test_going_back_to_the_decode_worker_gives_its_blocks_back() -> None:
    async with turns(
        policies=[
            {"name": "first", "match": {"headers": {"x-turn": {"exact": "first"}}}, "mode": "disaggregate"},
            {"name": "default", "mode": "aggregate"},
        ],
        handoff={"next_turn": TURN, "release_delay_s": 0.2},
    ) as world:
        asked = {"messages": said("What is the first rule?"), "max_tokens": 96}
        answer = (await world.ask(CHAT, asked, headers={"x-turn": "first"}))["choices"][0]["message"]["content"]
        await world.chat(said("What is the first rule?", answer, "And the second?"))
        await world.until(kept=1, went_back=1)
        await world.nothing_kept()
        world.assert_nothing_wrong()
        assert all(not each.violations.counts for each in world.decodes)


async def test_more_conversations_than_are_remembered() -> None:
    async with turns(handoff={"next_turn": {**TURN, "max_conversations": 2}}) as world:
        for number in range(3):
            await world.chat(said(f"{number}: what is the first rule?"))
        await world.until(kept=3, evicted=1)
        async with asyncio.timeout(READY_S):
            while len(world.decodes[0].engine.handoffs.pinned) != 2:
                await asyncio.sleep(0.05)
        world.assert_nothing_wrong()


async def test_a_worker_without_it_is_asked_once_and_then_left_alone() -> None:
    """A prefill worker without `bidirectional_kv_xfer` never answers a prefill with blocks. That costs one attempt."""
    async with AsyncExitStack() as parts:
        engines: list[Worker] = []
        for both_ways in (False, True):
            engines += await parts.enter_async_context(running(replace(OPTIONS, port=0, bidirectional_kv_xfer=both_ways)))
        stack = beside(
            {"prefill": [engines[0].address], "decode": [engines[1].address]},
            prefill={"attempt_timeout_s": 1.0, "fallback": "aggregate"},
            **SECTIONS,
        )
        world = World(await parts.enter_async_context(stack), engines)
        await scraped(stack)
        talk = ["What is the first rule?"]
        for turn in range(3):
            talk.append(await world.chat(said(*talk)))
            talk.append(f"And what is rule {turn + 2}?")
        found = await world.outcomes()
        assert found["failed"] == 1 and "read" not in found
        assert engines[0].violations.report()["counts"] == {"turn_stuck": 1}, "asked once"


async def test_no_client_can_send_blocks_of_its_own_and_no_log_has_any() -> None:
    async with turns() as world:
        stolen = {"do_remote_decode": True, "remote_block_ids": [[1]], "remote_engine_id": "x", "remote_num_tokens": 500}
        await world.chat(said("What is the first rule?"), kv_transfer_params=stolen)
        more = {"messages": said("What is the first rule?"), "max_tokens": 96, "vllm_xargs": {"kv_transfer_params": stolen}}
        await world.ask(CHAT, more)
        assert world.read_tokens == 0
        kept = list(world.decodes[0].engine.handoffs.pinned)
        assert len(kept) == 2
        log = world.stack.filter.log.read_text()
        assert "remote_block_ids" not in log and not any(name in log for name in kept)
        world.assert_nothing_wrong()


async def test_what_explain_says_of_a_turn_that_could_be_read() -> None:
    async with turns() as world:
        answer = await world.chat(said("What is the first rule?"))
        question = {
            "path": CHAT,
            "body": {"model": MODEL, "messages": said("What is the first rule?", answer, "And the second?"), "max_tokens": 9},
        }
        async with aiohttp.ClientSession() as session, session.post(world.stack.admin + "/debug/explain", json=question) as got:
            report = await got.json()
        first = report["decision"]["candidates"][0]
        assert first["below_tokens"]["decode"] >= 64 and first["terms"]["load_s"] > 0
        assert await world.outcomes() == {"kept": 1.0}, "nothing has changed"


async def test_without_the_setting_blocks_are_named_to_the_client_and_stay_to_their_end() -> None:
    """So workers have it on where the filter has, and nowhere else."""
    async with turns(options=replace(OPTIONS, decoder_kv_blocks_ttl_s=1.0), handoff={"next_turn": {"enabled": False}}) as world:
        answer = await world.ask(CHAT, {"messages": said("What is the first rule?"), "max_tokens": 9})
        assert answer["kv_transfer_params"]["remote_block_ids"]
        await world.nothing_kept()
        assert world.decodes[0].violations.counts == {"turn_unused": 1}
        assert await world.outcomes() == {}


async def test_the_filters_own_handoffs_leave_nothing_behind() -> None:
    async with turns(decodes=2, warm_up={"enabled": True}) as world:
        async with asyncio.timeout(READY_S):
            while (await world.stack.metrics()).get('baton_warm_up_total{outcome="ok"}') != 2:
                await asyncio.sleep(0.05)
        await world.nothing_kept()
        world.assert_nothing_wrong()
        assert all(not each.violations.counts for each in world.engines)


async def test_a_long_conversation_is_remembered_beside_the_event_loop() -> None:
    async with turns() as world:
        rules = SYSTEM * 20
        body = {"messages": [{"role": "user", "content": rules}], "max_tokens": 2000}
        answer = (await world.ask(CHAT, body))["choices"][0]["message"]["content"]
        await world.until(kept=1)
        more = [*body["messages"], {"role": "assistant", "content": answer}, {"role": "user", "content": "Go on."}]
        await world.chat(more)
        assert world.read_tokens > 1900
        await world.until(kept=2, read=1)
        world.assert_nothing_wrong()
