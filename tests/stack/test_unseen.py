"""Good answers that Envoy does not show to the filter: its log tells of them, and everything else stays as it is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from tests.stack.fake_worker import decode_answer
from tests.stack.harness import Stack

BODY = {"model": "m", "messages": [{"role": "user", "content": "Where do the wagons go?"}], "max_tokens": 8}
pytestmark = pytest.mark.asyncio(loop_scope="session")


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(15):
        while not await condition():
            await asyncio.sleep(0.05)


async def ask(stack: Stack, **more: Any) -> int:
    async with stack.http.post("/v1/chat/completions", json={**BODY, **more}) as answer:
        await answer.read()
        return answer.status


async def messages(stack: Stack) -> float:
    """From Envoy to the filter."""
    async with stack.http.get(f"{stack.envoy_admin}/stats?filter=ext_proc.stream_msgs_sent&format=json") as answer:
        found = (await answer.json(content_type=None))["stats"]
    return sum(float(each["value"]) for each in found if "watch" not in each["name"])


async def lines(stack: Stack) -> float:
    return (await stack.metrics()).get("baton_access_log_lines_total", 0.0)


async def connected(stack: Stack) -> None:
    """The filter hears of requests from Envoy's log."""
    before = await lines(stack)
    assert await ask(stack) == 200

    async def more() -> bool:
        return await lines(stack) > before

    await until(more)


def status(code: int) -> Callable[[web.Request, bytes], Awaitable[web.StreamResponse]]:
    async def answer(_request: web.Request, _body: bytes) -> web.StreamResponse:
        return web.json_response({"error": {"message": "no"}}, status=code)

    return answer


async def test_a_good_answer_is_shown_only_while_the_log_is_silent() -> None:
    async with Stack() as stack:
        before = await messages(stack)
        assert await ask(stack) == 200
        assert await messages(stack) - before == 3  # headers, body, headers of the answer
        await connected(stack)
        before = await messages(stack)
        assert await ask(stack) == 200
        assert await messages(stack) - before == 2


async def test_a_quick_good_answer_gives_nothing_back_and_counts_as_answered() -> None:
    """It is over sooner than a request that Envoy may never have sent on."""
    settings = {"handoff": {"release_delay_s": 2.0}}
    async with Stack(decode=1, settings=settings) as stack:
        await connected(stack)
        for _ in range(5):
            assert await ask(stack) == 200
        await asyncio.sleep(3.0)  # longer than the delay
        assert [received.json.get("model") for received in stack.decode[0].received] == ["m"] * 6
        assert sum(value for name, value in (await stack.metrics()).items() if name.startswith("baton_releases_total")) == 0


async def test_an_answer_that_is_an_error_is_shown_at_once_and_its_blocks_are_given_back() -> None:
    async with Stack(decode=1) as stack:
        await connected(stack)
        stack.decode[0].answer = status(404)
        assert await ask(stack) == 404

        async def released() -> bool:
            return (await stack.metrics()).get('baton_releases_total{outcome="released"}', 0.0) == 1

        await until(released)


async def test_a_worker_that_failed_is_watched_until_an_answer_is_good() -> None:
    async with Stack(decode=1) as stack:
        await connected(stack)

        stack.decode[0].answer = status(500)
        assert await ask(stack) == 500
        stack.decode[0].answer = decode_answer
        before = await messages(stack)
        assert await ask(stack) == 200
        assert await messages(stack) - before == 3
        before = await messages(stack)
        assert await ask(stack) == 200
        assert await messages(stack) - before == 2
