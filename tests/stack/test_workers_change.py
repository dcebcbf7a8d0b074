"""Workers that come and go under a running filter and Envoy: no request is lost, and nobody new gets to one that goes."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.stack.fake_worker import FakeWorker, Received, begun_until, decode_answer
from tests.stack.harness import Stack
from tests.stack.test_errors import PROMPT
from tests.stack.test_legs import post
from tests.stack.test_streams import until

WAYS: Any = pytest.mark.parametrize("eds", ["file", "grpc"])


def write(stack: Stack, *decode: FakeWorker) -> None:
    listing = {"prefill": [worker.address for worker in stack.prefill], "decode": [{"address": w.address} for w in decode]}
    new = workers_file(stack).with_suffix(".new")
    new.write_text(json.dumps(listing))
    new.replace(workers_file(stack))


def workers_file(stack: Stack) -> Path:
    return stack.directory / "workers.yaml"


@asynccontextmanager
async def following(eds: str, *, known: int) -> AsyncIterator[Stack]:
    """A stack whose workers stand in a watched file: at first ``known`` of its two decode workers."""
    stack = Stack(decode=2)
    stack.configure(workers={"prefill": [], "decode": [], "file": str(workers_file(stack))})
    if eds == "grpc":
        stack.configure(envoy={"eds": "grpc", "eds_dir": None})
    write(stack, *stack.decode[:known])
    async with stack:
        yield stack


async def envoy_hosts(stack: Stack) -> set[str]:
    async with aiohttp.ClientSession() as session, session.get(f"{stack.envoy_admin}/clusters?format=json") as response:
        clusters = {c["name"]: c for c in (await response.json(content_type=None))["cluster_statuses"]}
    sockets = [host["address"]["socket_address"] for host in clusters["decode"].get("host_statuses", [])]
    return {f"{socket['address']}:{socket['port_value']}" for socket in sockets}


def asked(worker: FakeWorker) -> list[Received]:
    """What came through Envoy. The filter itself gives blocks back, where Envoy's log says too late that they were fetched."""
    return [received for received in worker.received if "x-request-id" in received.headers]


async def until_hosts(stack: Stack, *workers: FakeWorker) -> None:
    async with asyncio.timeout(20):
        while await envoy_hosts(stack) != {worker.address for worker in workers}:
            await asyncio.sleep(0.02)


async def status(stack: Stack) -> dict[str, Any]:
    async with aiohttp.ClientSession() as session, session.get(f"{stack.admin}/healthz") as response:
        return await response.json()


async def until_live(stack: Stack, *workers: FakeWorker) -> None:
    async with asyncio.timeout(20):
        while set((await status(stack))["live"]["decode"]) != {worker.address for worker in workers}:
            await asyncio.sleep(0.02)


@WAYS
async def test_a_new_worker_gets_traffic_and_a_removed_one_finishes_what_it_has(eds: str) -> None:
    async with following(eds, known=1) as stack:
        old, new = stack.decode
        await until_hosts(stack, old)
        assert (await post(stack, "/v1/completions", PROMPT))[0] == 200
        assert [len(asked(worker)) for worker in stack.decode] == [1, 0]

        write(stack, old, new)
        await until_hosts(stack, old, new)
        await until_live(stack, old, new)
        answers = [await post(stack, "/v1/completions", PROMPT) for _ in range(8)]
        assert [code for code, _, _ in answers] == [200] * 8
        assert [len(asked(worker)) for worker in stack.decode] == [5, 4]

        gate = asyncio.Event()
        old.answer = new.answer = begun_until(gate)
        requests = [asyncio.create_task(post(stack, "/v1/completions", PROMPT)) for _ in range(2)]
        await until(lambda: len(asked(old)) == 6 and len(asked(new)) == 5)
        write(stack, new)
        await until_live(stack, new)
        assert (await status(stack))["leaving"] == [old.address]
        new.answer = decode_answer
        answers = [await post(stack, "/v1/completions", PROMPT) for _ in range(4)]
        assert [code for code, _, _ in answers] == [200] * 4
        assert len(asked(old)) == 6, "no new request for a worker that goes"
        assert await envoy_hosts(stack) == {old.address, new.address}, "Envoy keeps it until it is done"
        gate.set()
        assert [(code, text) for code, text, _ in await asyncio.gather(*requests)] == [(200, b"begun done")] * 2
        await until_hosts(stack, new)
        assert (await status(stack))["leaving"] == []


@WAYS
async def test_a_faulty_file_changes_nothing_and_is_seen(eds: str) -> None:
    async with following(eds, known=2) as stack:
        await until_live(stack, *stack.decode)
        good = workers_file(stack).read_text()
        workers_file(stack).write_text("decode:\n- nonsense\n")
        name = 'baton_discovery_reloads_total{outcome="failed",source="file"}'
        async with asyncio.timeout(20):
            while not (await stack.metrics()).get(name):
                await asyncio.sleep(0.05)
        [shown] = [source for source in (await status(stack))["discovery"] if source["source"] == "file"]
        assert shown["error"] == (
            f"{workers_file(stack)}:2: decode[0]: 'nonsense': a worker is ip:port, not a name or a unix socket"
        )
        assert (await post(stack, "/v1/completions", PROMPT))[0] == 200
        workers_file(stack).write_text(good)
        async with asyncio.timeout(20):
            while [source["error"] for source in (await status(stack))["discovery"]] != [None, None]:
                await asyncio.sleep(0.05)
        assert set((await status(stack))["live"]["decode"]) == {worker.address for worker in stack.decode}


async def test_discovery_streams_do_not_hold_up_the_end_of_the_filter() -> None:
    async with following("grpc", known=1) as stack:
        await until_hosts(stack, stack.decode[0])
        began = time.monotonic()
        stack.signal_filter(signal.SIGTERM)
        async with asyncio.timeout(15):
            while stack.filter.poll() is None:
                await asyncio.sleep(0.05)
        assert stack.filter.poll() == 0
        assert time.monotonic() - began < 10, "drain.timeout_s is 20 s here"
        assert await envoy_hosts(stack) == {stack.decode[0].address}, "Envoy keeps what it has"
