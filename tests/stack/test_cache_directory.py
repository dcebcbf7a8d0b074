"""LMCache's own coordinator, started by ``baton cache-coordinator``, tells the filter what cache servers hold. The servers are
played: what they would report is posted. With real ones: ``tests/engine/test_lmcache.py``."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp

from tests.stack.harness import READY_S, Stack, beside
from tests.stack.test_precise import MODEL, all_in_step, until
from workers.process import Child
from workers.ready import free_ports, wait_ready
from workers.sim.options import SimOptions, worker_options
from workers.sim.worker import Worker

ROOT = MODEL
"""What the simulated engines say that they were started with."""


class Coordinator:
    """A process that goes on from its checkpoint when it is started again."""

    def __init__(self, port: int, folder: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._log = folder / "coordinator.log"
        self._command = [sys.executable, "-m", "extproc", "cache-coordinator", "--port", str(port)]
        self._command += ["--checkpoint", str(folder / "directory.ckpt")]

    async def start(self) -> None:
        self._child = Child("coordinator", self._command, log=self._log)
        await asyncio.to_thread(wait_ready, self._child, f"{self.url}/healthz", READY_S)

    def stop(self) -> None:
        self._child.stop()


class Directory:
    """The coordinator, and servers that report to it."""

    def __init__(self, coordinator: Coordinator, http: aiohttp.ClientSession) -> None:
        self.coordinator = coordinator
        self._url = coordinator.url
        self._http = http
        self._numbers: dict[str, int] = {}
        self._there: set[str] = set()

    async def live(self) -> None:
        """Servers that have joined say that they are there, until cancelled; if the coordinator does not know one, it joins."""
        while True:
            for server in sorted(self._there):
                with suppress(aiohttp.ClientError):  # the coordinator may be away
                    async with self._http.put(f"{self._url}/instances/{server}/heartbeat") as response:
                        known = response.status == 200
                    if not known and server in self._there:
                        await self.join(server)
            await asyncio.sleep(1)

    async def join(self, server: str) -> None:
        self._there.add(server)
        async with self._http.post(
            f"{self._url}/instances", json={"instance_id": server, "ip": "127.0.0.1", "http_port": 1}
        ) as response:
            assert response.status == 200, await response.text()

    async def leave(self, server: str) -> None:
        self._there.discard(server)
        async with self._http.delete(f"{self._url}/instances/{server}") as response:
            assert response.status == 204

    async def found(self, prompt: list[int]) -> Any:
        """LMCache's answer about a prompt, its names of the chunks included."""
        question = {"token_ids": prompt, "model_name": ROOT, "world_size": 1}
        async with self._http.post(f"{self._url}/directory/lookup", json=question) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def report(
        self, server: str, kind: str, prompt: list[int], *, tier: str = "l1", first: int = 0, shared: bool = False
    ) -> None:
        """A server has stored (`store`) or dropped (`delete`) the chunks of a prompt from the ``first`` on."""
        keys = [each["key"] for each in (await self.found(prompt))["results"]]
        number = self._numbers[server] = self._numbers.get(server, 0) + 1
        batch = {
            "instance_id": server,
            "incarnation": 1,
            "seq": number,
            "event_type": kind,
            "tier": tier,
            "backend": "dram" if tier == "l1" else "fs_native",
            "entries": [{"key": key, "size_bytes": 4096} for key in keys[first:]],
            "shared": shared,
            "ts": time.time(),
        }
        async with self._http.post(f"{self._url}/events", json={"batches": [batch]}) as response:
            assert await response.json() == {"applied": 1, "duplicates": 0, "stale": 0}


@asynccontextmanager
async def directed(folder: Path) -> AsyncIterator[tuple[Stack, Directory]]:
    """Two prefill workers, of the cache servers `a` and `b`, and two decode workers."""
    own_port, *ports = free_ports(13)
    options = SimOptions(speed=20, enable_prompt_tokens_details=True, mean_answer_tokens=8, handshake_s=0.0)
    address = f"127.0.0.1:{own_port}"
    coordinator = Coordinator(own_port, folder)
    async with AsyncExitStack() as parts:
        await coordinator.start()
        parts.callback(coordinator.stop)
        for port, events, replay in zip(ports[:4], ports[4:8], ports[8:], strict=True):
            (made,) = worker_options(replace(options, port=port, kv_events_port=events, kv_events_replay_port=replay))
            engine = Worker(made)
            await engine.start()
            parts.push_async_callback(engine.stop)
        workers = [f"127.0.0.1:{port}" for port in ports[:4]]
        labelled = [{"address": each, "labels": {"cache": name}} for each, name in zip(workers[:2], "ab", strict=True)]
        stack = beside(
            {"prefill": labelled, "decode": workers[2:]},
            kv_events={"enabled": True},
            tokens={},
            policies=[{"name": "default", "mode": "disaggregate"}],
            cache_store={"enabled": True, "label": "cache", "directory": address, "directory_timeout_s": 5.0},
        )
        http = await parts.enter_async_context(aiohttp.ClientSession())
        directory = Directory(coordinator, http)
        await directory.join("a")
        await directory.join("b")
        living = asyncio.create_task(directory.live())
        parts.callback(living.cancel)
        await parts.enter_async_context(stack)
        await until(stack, all_in_step, "/healthz")
        yield stack, directory


def prompt_of(seed: int, tokens: int = 1_000) -> list[int]:
    """Token ids; no other prompt begins with these."""
    draw = random.Random(seed)
    return [draw.randrange(100, 30_000) for _ in range(tokens)]


def body(prompt: list[int]) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": 4}


async def expects(stack: Stack, prompt: list[int], *tokens: int) -> Any:
    """Wait until so many tokens of a prompt are expected on the prefill workers, the most first."""

    def good(report: Any) -> bool:
        return tuple(each["cached_prefill_tokens"] for each in _by_prefill(report)) == tokens

    return _by_prefill(await until(stack, good, "/debug/explain", {"path": "/v1/completions", "body": body(prompt)}))


def _by_prefill(report: Any) -> list[Any]:
    best = {each["prefill"]: each for each in report["decision"]["candidates"] if each["prefill"] is not None}
    return sorted(best.values(), key=lambda each: -each["cached_prefill_tokens"])


async def test_what_the_coordinator_says_decides_and_what_is_not_found_is_doubted(tmp_path: Path) -> None:
    async with directed(tmp_path) as (stack, directory):
        prompt = prompt_of(1)
        await expects(stack, prompt, 0, 0)
        await directory.report("a", "store", prompt)
        await directory.report("b", "store", prompt[:512])
        first, second = await expects(stack, prompt, 768, 512)
        assert (first["cached_by"], first["below_tokens"]) == ("cache_server", {"lmcache": 768})
        assert second["below_tokens"] == {"lmcache": 512}

        await directory.report("a", "delete", prompt, first=1)
        await expects(stack, prompt, 512, 256)
        await directory.report("b", "store", prompt, tier="l2", shared=True)
        await expects(stack, prompt, 768, 768)

        async with stack.http.post("/v1/completions", json=body(prompt)) as response:
            assert response.status == 200, await response.text()
        metrics = await stack.metrics()
        (expected,) = [
            value for name, value in metrics.items() if name.startswith("baton_cache_stored_expected_tokens_total") and value
        ]
        assert expected == 768
        assert metrics['baton_cache_error_share_count{by="cache_server"}'] == 1, "the simulated worker found nothing there"
        other = prompt_of(1, 768) + prompt_of(2, 232)
        await expects(stack, other, 768, 768)  # its own memory has it by now, and the other server still counts


async def test_the_disk_of_a_server_that_is_gone_does_not_count(tmp_path: Path) -> None:
    async with directed(tmp_path) as (stack, directory):
        prompt = prompt_of(3)
        await directory.report("a", "store", prompt, tier="l2")
        await expects(stack, prompt, 768, 0)
        await directory.leave("a")
        await expects(stack, prompt, 0, 0)
        assert (await directory.found(prompt))["results"][0]["placements"], "LMCache has it in its directory for good"
        await directory.join("a")
        await expects(stack, prompt, 768, 0)


async def test_a_coordinator_that_is_started_again_goes_on_where_it_was(tmp_path: Path) -> None:
    async with directed(tmp_path) as (stack, directory):
        prompt = prompt_of(4)
        await directory.report("a", "store", prompt)
        await directory.report("b", "store", prompt[:512])
        await directory.report("b", "store", prompt[:512], tier="l2")
        await expects(stack, prompt, 768, 512)

        directory.coordinator.stop()
        await directory.coordinator.start()
        assert len((await directory.found(prompt))["results"][0]["placements"]) == 3
        await expects(stack, prompt, 768, 512)
