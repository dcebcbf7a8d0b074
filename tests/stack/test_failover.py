"""When the prefill fails, when a handoff is too old, and when nobody comes for it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import psutil
import pytest
from aiohttp import web

from tests.stack.fake_worker import PARAMS, Received, prefill_answer, when
from tests.stack.harness import Stack
from tests.stack.test_errors import PROMPT, answering, error_of
from tests.stack.test_legs import post
from tests.stack.test_streams import connect, hang, request_bytes, until


async def drop(request: web.Request, _: bytes) -> web.StreamResponse:
    """Close the connection without an answer."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def fallbacks(stack: Stack, kind: str) -> float:
    return (await stack.metrics()).get(f'baton_fallbacks_total{{kind="{kind}"}}', 0.0)


@pytest.mark.parametrize("fault", [answering(500), answering(503), answering(200, b"{}"), drop])
async def test_another_prefill_worker_is_tried_after_a_failure(fault) -> None:
    async with Stack(prefill=2, decode=1) as stack:
        for worker in stack.prefill:
            worker.answer = fault
        stack.prefill[1].answer = prefill_answer
        for _ in range(2):  # whichever has its turn first
            status, _, _ = await post(stack, "/v1/completions", PROMPT)
            assert status == 200
        bad, good = stack.prefill
        assert (len(bad.received), len(good.received)) == (1, 2)
        assert await fallbacks(stack, "retry") == 1
        # Every attempt has an id of its own: the engine names its blocks by it.
        ids = [received.headers["x-request-id"] for worker in stack.prefill for received in worker.received]
        assert len(set(ids)) == 3
        assert stack.decode[0].last.headers["x-kv-transfer"].startswith(f'nixl;prefill="{good.address}"')


async def test_a_worker_that_says_it_is_busy_is_passed_over_for_the_request_and_not_held_to_have_failed() -> None:
    settings = {"routing": {"breaker_failures": 1, "breaker_pause_s": 60.0}}
    async with Stack(prefill=2, decode=1, settings=settings) as stack:
        busy, free = stack.prefill
        busy.answer = answering(429)
        for _ in range(2):  # whichever has its turn first
            assert (await post(stack, "/v1/completions", PROMPT))[0] == 200
        assert (len(busy.received), len(free.received)) == (1, 2)
        assert await fallbacks(stack, "retry") == 1
        assert await prefill_failures(stack) == [0, 0]


async def prefill_failures(stack: Stack) -> list[int]:
    """In a row, of each prefill worker, as the decision counts them."""
    async with aiohttp.ClientSession() as session, session.get(f"{stack.admin}/debug/snapshot") as answer:
        legs = {each["address"]: each["prefill"] for each in (await answer.json())["endpoints"]}
    return [legs[worker.address]["failures"] for worker in stack.prefill]


async def test_a_client_that_gives_its_request_no_time_does_not_make_workers_count_as_failing() -> None:
    settings = {"prefill": {"retries": 1, "timeout_s": 30.0}, "routing": {"breaker_failures": 1, "breaker_pause_s": 60.0}}
    async with Stack(prefill=2, decode=1, settings=settings) as stack:
        for worker in stack.prefill:
            worker.answer = hang
        for timeout_ms in ("1", "20", "300"):
            status, answer, _ = await post(stack, "/v1/completions", PROMPT, **{"x-request-timeout-ms": timeout_ms})
            assert status == 504 and error_of(answer)["code"] == "prefill_timeout"
        assert await prefill_failures(stack) == [0, 0]
        assert await fallbacks(stack, "retry") == 0, "there was no time for another one"
        stack.prefill[0].answer = stack.prefill[1].answer = prefill_answer
        assert (await post(stack, "/v1/completions", PROMPT))[0] == 200


async def test_a_worker_that_used_up_the_deadline_has_failed_and_one_that_was_not_asked_has_not() -> None:
    settings = {"prefill": {"retries": 1, "timeout_s": 0.6}, "routing": {"breaker_failures": 1, "breaker_pause_s": 60.0}}
    async with Stack(prefill=2, decode=1, settings=settings) as stack:
        for worker in stack.prefill:
            worker.answer = hang
        assert (await post(stack, "/v1/completions", PROMPT))[0] == 504
        assert [len(worker.received) for worker in stack.prefill] == await prefill_failures(stack)
        assert sorted(await prefill_failures(stack)) == [0, 1]


async def test_no_more_workers_are_tried_than_the_configuration_says() -> None:
    async with Stack(prefill=4, decode=1, settings={"prefill": {"retries": 2}}) as stack:
        for worker in stack.prefill:
            worker.answer = answering(500)
        status, answer, _ = await post(stack, "/v1/completions", PROMPT)
        assert status == 502 and error_of(answer)["code"] == "prefill_failed"
        assert sorted(len(worker.received) for worker in stack.prefill) == [0, 1, 1, 1]
        assert stack.decode_received == []


async def test_retries_can_be_forbidden() -> None:
    async with Stack(prefill=2, decode=1, settings={"prefill": {"retries": 0}}) as stack:
        for worker in stack.prefill:
            worker.answer = answering(500)
        assert (await post(stack, "/v1/completions", PROMPT))[0] == 502
        assert sum(len(worker.received) for worker in stack.prefill) == 1
        assert await fallbacks(stack, "retry") == 0


async def test_a_4xx_about_the_request_is_never_tried_again() -> None:
    async with Stack(prefill=2, decode=1, settings={"prefill": {"fallback": "aggregate"}}) as stack:
        for worker in stack.prefill:
            worker.answer = answering(400, b'{"error":"no"}')
        status, answer, _ = await post(stack, "/v1/completions", PROMPT)
        assert (status, answer) == (400, b'{"error":"no"}')
        assert sum(len(worker.received) for worker in stack.prefill) == 1
        assert stack.decode_received == []


@pytest.mark.parametrize("fault", [answering(500), drop, answering(200, b"{}")])
async def test_the_decode_worker_does_it_all_where_the_policy_says_so(fault) -> None:
    async with Stack(decode=1, settings={"prefill": {"fallback": "aggregate"}}) as stack:
        stack.prefill[0].answer = fault
        status, _, headers = await post(stack, "/v1/completions", PROMPT)
        assert status == 200
        assert stack.decode[0].last.body == PROMPT
        assert "x-kv-transfer" not in stack.decode[0].last.headers and "x-kv-transfer" not in headers
        assert await fallbacks(stack, "aggregate") == 1
        # Not live at all is one more way to fail.
        stack.prefill[0].healthy = False
        await until_async(lambda: live_is(stack, "prefill", 0))
        assert (await post(stack, "/v1/completions", PROMPT))[0] == 200
        assert await fallbacks(stack, "aggregate") == 2


async def live_is(stack: Stack, role: str, count: int) -> bool:
    metrics = await stack.metrics()
    live = sum(value for name, value in metrics.items() if name.startswith("baton_endpoint_live") and role in name)
    return live == count


async def until_async(condition, timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not await condition():
            await asyncio.sleep(0.02)


async def test_one_deadline_covers_all_attempts() -> None:
    async with Stack(prefill=3, decode=1, settings={"prefill": {"retries": 2, "attempt_timeout_s": 0.4}}) as stack:
        for worker in stack.prefill:
            worker.answer = hang
        started = time.monotonic()
        status, answer, _ = await post(stack, "/v1/completions", PROMPT, **{"x-request-timeout-ms": "600"})
        took = time.monotonic() - started
        assert status == 504 and error_of(answer)["code"] == "prefill_timeout"
        assert 0.55 < took < 2.0
        assert sum(len(worker.received) for worker in stack.prefill) == 2  # 0.4 s, then the 0.2 s that are left


@pytest.mark.parametrize("value", ["0", "-1", "soon", "nan", "inf", ""])
async def test_a_timeout_that_is_no_time_is_refused(stack: Stack, value: str) -> None:
    status, answer, _ = await post(stack, "/v1/completions", PROMPT, **{"x-request-timeout-ms": value})
    assert status == 400 and error_of(answer)["code"] == "bad_timeout"


async def test_a_slow_worker_does_not_use_up_the_deadline_of_a_quick_one() -> None:
    async with Stack(prefill=2, decode=1, settings={"prefill": {"attempt_timeout_s": 0.3}}) as stack:
        stack.prefill[0].answer = hang
        for _ in range(2):
            assert (await post(stack, "/v1/completions", PROMPT))[0] == 200
        assert len(stack.prefill[1].received) == 2


# --- handoffs that nobody fetches ---


def is_release(received: Received) -> bool:
    return b"baton-release" in received.body


async def not_found(_: web.Request, __: bytes) -> web.StreamResponse:
    return web.json_response({"error": {"message": "no such model", "code": 404}}, status=404)


@asynccontextmanager
async def filter_stopped(stack: Stack) -> AsyncIterator[None]:
    """The filter stands still: what comes in over its sockets waits there."""
    (pid,) = [pid for pid in stack.filter.pids() if "guard.py" not in " ".join(psutil.Process(pid).cmdline())]
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@asynccontextmanager
async def prefill_under_way(stack: Stack) -> AsyncIterator[tuple[asyncio.StreamWriter, asyncio.Event]]:
    """A request whose prefill answers when the event is set."""
    gate = asyncio.Event()

    stack.prefill[0].answer = when(gate)
    _, writer = await connect(stack)
    writer.write(request_bytes(PROMPT))
    await until(lambda: stack.prefill[0].received)
    try:
        yield writer, gate
    finally:
        writer.close()


async def test_a_client_that_leaves_as_the_prefill_ends_leaves_no_blocks_behind() -> None:
    async with Stack(decode=1) as stack:
        stack.decode[0].answer = not_found
        async with prefill_under_way(stack) as (writer, gate):
            async with filter_stopped(stack):
                gate.set()
                await asyncio.sleep(0.2)
                writer.close()
                await asyncio.sleep(0.2)
            await until(lambda: stack.decode[0].received, 3)
        (received,) = stack.decode[0].received
        assert is_release(received) and received.path == "/v1/completions"
        assert received.json["kv_transfer_params"] == PARAMS
        await until_async(lambda: counted(stack, 'baton_releases_total{outcome="released"}', 1))


async def counted(stack: Stack, name: str, value: float) -> bool:
    return (await stack.metrics()).get(name, 0.0) == value


async def test_a_handoff_older_than_its_share_of_the_lease_is_never_used() -> None:
    """The filter stood still between the prefill's answer and its reading: by the clock of the engine the lease runs out."""
    settings = {"handoff": {"lease_s": 2.0, "max_age_share": 0.5, "release_delay_s": 1.0}}
    async with Stack(decode=1, settings=settings) as stack:
        async with prefill_under_way(stack) as (_, gate):
            async with filter_stopped(stack):
                gate.set()
                await asyncio.sleep(1.5)
            await until(lambda: [r for r in stack.decode[0].received if not is_release(r)])
        assert len(stack.prefill[0].received) == 2  # prefilled again
        assert await fallbacks(stack, "stale") == 1
        await until(lambda: [r for r in stack.decode[0].received if is_release(r)])
        assert len(stack.decode[0].received) == 2


async def test_a_reply_that_came_before_its_timeout_was_noticed_is_not_lost() -> None:
    """The filter stood still: when it goes on, the timeout is due before the reply is read, but the reply is there."""
    settings = {"handoff": {"lease_s": 30.0}, "prefill": {"attempt_timeout_s": 0.8}}
    async with Stack(prefill=2, decode=1, settings=settings) as stack:
        stack.prefill[1].answer = prefill_answer
        async with prefill_under_way(stack) as (_, gate):
            async with filter_stopped(stack):
                gate.set()
                await asyncio.sleep(1.2)
            await until(lambda: stack.decode[0].received)
        assert sum(len(worker.received) for worker in stack.prefill) == 1
        assert await fallbacks(stack, "retry") == 0


async def test_handoffs_that_are_always_too_old_end_in_an_error_not_in_a_loop() -> None:
    settings = {"handoff": {"lease_s": 0.02, "max_age_share": 0.05, "release_delay_s": 0.01}}  # 1 ms

    async def slow(request: web.Request, body: bytes) -> web.StreamResponse:
        await asyncio.sleep(0.3)
        return await prefill_answer(request, body)

    async with Stack(decode=1, settings=settings) as stack:
        stack.prefill[0].answer = slow
        status, answer, _ = await post(stack, "/v1/completions", PROMPT)
        assert status == 503 and error_of(answer)["code"] == "handoff_stale"
        assert len(stack.prefill[0].received) == 3
        assert [r for r in stack.decode[0].received if not is_release(r)] == []


async def test_a_young_handoff_is_used_once_and_its_age_is_known(stack: Stack) -> None:
    before = await stack.metrics()
    await post(stack, "/v1/completions", PROMPT)
    after = await stack.metrics()
    assert after["baton_handoff_age_seconds_count"] - before.get("baton_handoff_age_seconds_count", 0) == 1
    assert after["baton_handoff_age_seconds_sum"] - before.get("baton_handoff_age_seconds_sum", 0) < 1.0
    assert len(stack.decode_received) == 1 and len(stack.prefill[0].received) == 1


async def test_when_the_decode_worker_goes_during_the_prefill_another_one_fetches() -> None:
    async with Stack(decode=2) as stack:
        async with prefill_under_way(stack) as (_, gate):
            picked = next(
                name for name, value in (await stack.metrics()).items()
                if name.startswith("baton_endpoint_in_flight") and 'role="decode"' in name and value == 1
            )  # fmt: skip
            gone, other = stack.decode if stack.decode[0].address in picked else stack.decode[::-1]
            gone.healthy = False
            await until_async(lambda: live_is(stack, "decode", 1))
            gate.set()
            await until(lambda: other.received)
        assert not gone.received
        assert other.last.json["kv_transfer_params"] == PARAMS
        assert await fallbacks(stack, "decode") == 1


async def test_when_all_decode_workers_go_during_the_prefill_the_client_is_told(stack: Stack) -> None:
    gate = asyncio.Event()

    stack.prefill[0].answer = when(gate)
    asked = asyncio.create_task(post(stack, "/v1/completions", PROMPT))
    await until(lambda: stack.prefill[0].received)
    for worker in stack.decode:
        worker.healthy = False
    await until_async(lambda: live_is(stack, "decode", 0))
    gate.set()
    status, answer, _ = await asked
    assert status == 503 and error_of(answer)["code"] == "no_decode_worker"
    for worker in stack.decode:
        worker.healthy = True
    await until_async(lambda: live_is(stack, "decode", 2))


async def test_a_client_that_leaves_as_the_decode_leg_goes_out_leaves_no_blocks_behind() -> None:
    """Envoy may drop the request before it has read our reply, and nothing tells. It is released, but not at once: if a
    decode worker did get it, that one must have the time to finish."""
    async with Stack(decode=1, settings={"handoff": {"release_delay_s": 0.5}}) as stack:

        async def hang_but_not_found(request: web.Request, body: bytes) -> web.StreamResponse:
            return await (not_found if b"baton-release" in body else hang)(request, body)

        stack.decode[0].answer = hang_but_not_found
        async with prefill_under_way(stack) as (writer, gate):
            gate.set()
            await until(lambda: stack.decode[0].received)
            writer.close()
            left_s = time.monotonic()
            await until(lambda: any(is_release(received) for received in stack.decode[0].received))
            assert time.monotonic() - left_s > 0.4


async def test_a_client_that_leaves_during_a_long_decode_needs_no_release(stack: Stack) -> None:
    for worker in stack.decode:
        worker.answer = hang
    before = await stack.metrics()
    _, writer = await connect(stack)
    writer.write(request_bytes(PROMPT))
    await until(lambda: stack.decode_received)
    await asyncio.sleep(0.5)
    writer.close()
    await until(lambda: all(received.gone_at for received in stack.decode_received))
    await asyncio.sleep(0.2)
    after = await stack.metrics()
    names = [name for name in after if name.startswith("baton_releases_total")]
    assert [after[name] for name in names] == [before.get(name, 0.0) for name in names]
    assert len(stack.decode_received) == 1


@pytest.mark.parametrize("status", [400, 422, 500, 503])
async def test_blocks_of_a_decode_leg_that_is_refused_are_given_back(stack: Stack, status: int) -> None:
    """The engine gives them back by itself only where its handler turns a request down, not where its validation does."""

    async def refuse(_: web.Request, body: bytes) -> web.StreamResponse:
        return web.json_response({"error": {}}, status=404 if b"baton-release" in body else status)

    for worker in stack.decode:
        worker.answer = refuse
    assert (await post(stack, "/v1/completions", PROMPT))[0] == status
    await until(lambda: any(is_release(received) for received in stack.decode_received))
    assert len(stack.decode_received) == 2


async def test_blocks_are_given_back_when_envoy_does_not_reach_the_decode_worker() -> None:
    async with Stack(decode=2, settings={"health": {"interval_s": 60.0}}) as stack:
        for worker in stack.decode:
            worker.answer = not_found
        await stack.decode[0]._runner.cleanup()
        statuses = [(await post(stack, "/v1/completions", PROMPT))[0] for _ in range(2)]
        assert sorted(statuses) == [404, 503]
        await until(lambda: any(is_release(received) for received in stack.decode[1].received))


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_decode_attempt_that_broke_is_not_repeated(stack: Stack, when: str) -> None:
    """Blocks are good for one attempt: once a worker may have read the request, a second attempt would read others' KV."""
    for worker in stack.decode:
        worker.answer = drop
    if when == "before":
        for worker in stack.decode:
            await worker._runner.cleanup()
    status, answer, _ = await post(stack, "/v1/completions", PROMPT)
    assert status == 503 and error_of(answer)["code"] == "upstream_unavailable"
    assert len(stack.prefill[0].received) == 1
    attempts = [received for received in stack.decode_received if not is_release(received)]
    assert len(attempts) == (0 if when == "before" else 1)
    if when == "before":
        for worker in stack.decode:
            await worker.__aenter__()
        await until_async(lambda: live_is(stack, "decode", 2))


async def test_many_unused_handoffs_are_released_or_counted_as_dropped() -> None:
    settings = {"handoff": {"release_queue": 4}}
    async with Stack(decode=1, settings=settings) as stack:
        slow = asyncio.Event()

        stack.decode[0].answer = when(slow, not_found)
        gate = asyncio.Event()

        stack.prefill[0].answer = when(gate)
        writers = []
        for _ in range(20):
            _, writer = await connect(stack)
            writer.write(request_bytes(PROMPT))
            writers.append(writer)
        await until(lambda: len(stack.prefill[0].received) == 20)
        async with filter_stopped(stack):
            # All of it must be with the filter before it goes on, however slow Envoy is on a busy machine: a reply that is not
            # there yet when its client's leaving is read ends with its call, and its blocks with their lease.
            gate.set()
            await until_async(lambda: nothing_open(stack, "prefill_loop"))
            for writer in writers:
                writer.close()
            await until_async(lambda: nothing_open(stack, "front"))
        # Eight calls wait for their answers, at most four more handoffs for a call.
        await until_async(lambda: released(stack, "dropped", at_least=8))
        slow.set()
        await until_async(lambda: released(stack, at_least=20))
        metrics = await stack.metrics()
        dropped = metrics['baton_releases_total{outcome="dropped"}']
        assert metrics['baton_releases_total{outcome="released"}'] == 20 - dropped >= 4
        assert [is_release(received) for received in stack.decode[0].received] == [True] * int(20 - dropped)
        assert stack.decode[0].last.json["model"].startswith("baton-release")


async def released(stack: Stack, *outcomes: str, at_least: float) -> bool:
    """Whether so many handoffs that nobody used ended in one of these ways; none named: in any."""
    found = await stack.metrics()
    names = [name for name in found if name.startswith("baton_releases_total")]
    wanted = [name for name in names if not outcomes or any(f'"{each}"' in name for each in outcomes)]
    return sum(found[name] for name in wanted) >= at_least


async def nothing_open(stack: Stack, listener: str) -> bool:
    """Whether Envoy has passed on all answers of a listener, and seen all of its clients leave that have left."""
    name = f"http.{listener}.downstream_rq_active"
    async with aiohttp.ClientSession() as session, session.get(f"{stack.envoy_admin}/stats?filter=^{name}$") as answer:
        return (await answer.text()).strip() == f"{name}: 0"
