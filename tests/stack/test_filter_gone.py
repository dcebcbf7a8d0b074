"""What a client sees of a filter that goes before its request, while it is held, or during the answer."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import psutil
import pytest

from extproc import envoy_config
from tests.stack.fake_worker import begun_until, when
from tests.stack.harness import READY_S, Stack
from tests.stack.test_errors import PROMPT
from tests.stack.test_streams import until

SMUGGLED = b'{"model":"m","prompt":"a","kv_transfer_params":{"do_remote_prefill":true,"remote_host":"10.0.0.1"}}'
REFUSED = (503, "filter_unavailable")
SERVED, CUT = (200, "whole"), (200, "cut")
WAYS = [(down, mode) for down in ("refuse", "round_robin") for mode in ("buffered", "full_duplex", "full_duplex_both")]
SLOW_S = 3.0
"""How long the filter may wait for a prefill, where Envoy waits a second."""

pytestmark = pytest.mark.timeout(120)


@asynccontextmanager
async def stack_of(down: str, mode: str) -> AsyncIterator[Stack]:
    async with Stack(prefill=1, decode=2, settings={"envoy": {"filter_down": down, "body_mode": mode}}) as stack:
        yield stack


async def kill(stack: Stack) -> None:
    [pid] = [pid for pid in stack.filter.pids() if "guard.py" not in " ".join(psutil.Process(pid).cmdline())]
    os.kill(pid, signal.SIGKILL)
    await until(lambda: stack.filter.poll() is not None, READY_S)


async def noticed(stack: Stack) -> None:
    """Until Envoy's health check has found it gone."""
    async with asyncio.timeout(READY_S), aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"{stack.envoy_admin}/clusters?format=json") as response:
                clusters = {c["name"]: c for c in (await response.json(content_type=None))["cluster_statuses"]}
            if all(h["health_status"].get("failed_active_health_check") for h in clusters["extproc"]["host_statuses"]):
                return
            await asyncio.sleep(0.05)


async def lost(stack: Stack) -> None:
    """Until Envoy has no connection to it any more: it knows that the streams are over."""
    async with asyncio.timeout(READY_S), aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"{stack.envoy_admin}/stats?filter=^cluster.extproc.upstream_rq_active$") as response:
                if (await response.text()).strip().endswith(": 0"):
                    return
            await asyncio.sleep(0.02)


async def ask(stack: Stack, body: bytes = PROMPT, **headers: str) -> tuple[int, str]:
    """Status, and the error's code, or `whole`, or `cut` for an answer that broke off."""
    sent = {"content-type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    async with asyncio.timeout(30), stack.http.post("/v1/completions", data=body, headers=sent) as response:
        try:
            text = await response.read()
        except aiohttp.ClientError:
            return response.status, "cut"
    return response.status, "whole" if response.status == 200 else json.loads(text)["error"]["code"]


@pytest.mark.parametrize(("down", "mode"), WAYS)
async def test_a_request_that_the_filter_holds_when_it_dies_and_those_after_it(down: str, mode: str) -> None:
    opens = down == "round_robin"
    async with stack_of(down, mode) as stack:
        gate = asyncio.Event()
        stack.prefill[0].answer = when(gate)
        held = asyncio.create_task(ask(stack))
        await until(lambda: stack.prefill[0].received)
        await kill(stack)
        # Envoy has shown the filter a part of a full-duplex body, and cannot go on with it by itself.
        assert await held == (SERVED if opens and mode == "buffered" else REFUSED)
        await noticed(stack)
        stack.reset()
        assert await ask(stack) == (SERVED if opens else REFUSED)
        assert [received.body for received in stack.decode_received] == ([PROMPT] if opens else [])
        stack.reset()
        # Whatever lets requests through lets nothing through that only the filter may say.
        assert await ask(stack, SMUGGLED) == REFUSED
        assert stack.decode_received == []
        for _ in range(2):
            await ask(stack, x_gateway_destination_endpoint=stack.decode[0].address, x_baton_filter_down="1")
        served = [len(worker.received) for worker in stack.decode]
        assert served == ([1, 1] if opens else [0, 0]), "it is no choice of the client's"
        for received in stack.decode_received:
            assert not {"x-gateway-destination-endpoint", "x-baton-filter-down", "x-kv-transfer"} & received.headers.keys()
        gate.set()


@pytest.mark.parametrize(("down", "mode"), WAYS)
async def test_a_request_that_the_filter_holds_for_longer_than_envoy_waits(
    down: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The filter lives, so there is only Envoy's patience, which is longer than the filter's in real life. With bodies in
    pieces it has none, and the filter's own limit ends it."""
    monkeypatch.setattr(envoy_config, "_EXTPROC_SLACK_S", 1.0 - SLOW_S)
    opens = down == "round_robin"
    settings = {"envoy": {"filter_down": down, "body_mode": mode}, "prefill": {"timeout_s": SLOW_S}}
    async with Stack(prefill=1, decode=2, settings=settings) as stack:
        gate = asyncio.Event()
        for body in (PROMPT, SMUGGLED):
            stack.reset()
            stack.prefill[0].answer = when(gate)
            seen = await ask(stack, body)
            late = REFUSED if mode == "buffered" else (504, "prefill_timeout")
            served = opens and mode == "buffered" and body is PROMPT
            assert seen == (SERVED if served else late)
            assert [received.body for received in stack.decode_received] == ([PROMPT] if served else [])
            for received in stack.decode_received:
                assert not {"x-gateway-destination-endpoint", "x-baton-filter-down", "x-kv-transfer"} & received.headers.keys()
        async with asyncio.timeout(10):  # and the filter holds nothing for a client that has gone
            while (await stack.metrics())["baton_streams"]:
                await asyncio.sleep(0.02)
        gate.set()
        stack.reset()
        assert await ask(stack) == SERVED
        asked = [each for each in stack.decode_received if "x-request-id" in each.headers]  # the others give blocks back
        assert asked and all("x-gateway-destination-endpoint" in each.headers for each in asked), "by the filter's choice again"


@pytest.mark.parametrize(("down", "mode"), WAYS)
async def test_an_answer_that_is_under_way_when_the_filter_dies(down: str, mode: str) -> None:
    async with stack_of(down, mode) as stack:
        gate = asyncio.Event()
        for worker in stack.decode:
            worker.answer = begun_until(gate)
        asked = asyncio.create_task(ask(stack))
        await until(lambda: stack.decode_received)
        async with asyncio.timeout(10):  # the first bytes are with the client
            while (await stack.metrics())["baton_streams"] != 1:
                await asyncio.sleep(0.02)
        await asyncio.sleep(0.2)
        await kill(stack)
        await lost(stack)
        gate.set()
        assert await asked == (SERVED if mode == "buffered" else CUT)
