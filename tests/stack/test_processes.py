"""Two filter processes behind the real Envoy: they serve as one, and each goes on without the other."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections import Counter
from collections.abc import Mapping
from typing import Any

import aiohttp
import psutil

from tests.stack.fake_worker import begun_until, when
from tests.stack.harness import Stack
from tests.stack.test_errors import PROMPT
from tests.stack.test_legs import post
from tests.stack.test_streams import until

_BODY = {"model": "m", "max_tokens": 5}


class Several(Stack):
    """A stack whose filter is a parent and two processes."""

    def __init__(self, *, settings: Mapping[str, Any] | None = None, **workers: Any) -> None:
        super().__init__(settings=settings, **workers)
        self._tree["processes"] = 2
        self.configure()

    def process(self, index: int) -> psutil.Process:
        """One of the two."""
        for pid in self.filter.pids():
            process = psutil.Process(pid)
            line = process.cmdline()
            if "--member" in line and json.loads(line[line.index("--member") + 1])["index"] == index:
                return process
        raise AssertionError(f"there is no process {index}")

    def parent(self) -> psutil.Process:
        """Of both."""
        return self.process(0).parent()

    async def health(self) -> dict[str, Any]:
        """What the admin port says of all."""
        async with aiohttp.ClientSession() as session, session.get(f"{self.admin}/healthz") as response:
            return await response.json()

    async def of(self, name: str) -> dict[str, float]:
        """Samples of one metric, summed, by process."""
        found: Counter[str] = Counter({"0": 0, "1": 0})
        for sample, value in (await self.metrics()).items():
            if sample.partition("{")[0] == name:
                found[re.search(r'process="(\d)"', sample)[1]] += value
        return dict(found)

    async def together(self) -> None:
        """Until each hears the other, and Envoy reaches both."""
        async with asyncio.timeout(20):
            while await self.of("baton_siblings") != {"0": 1, "1": 1}:
                await asyncio.sleep(0.05)
        await self.ext_proc_seen(again=True)
        await asyncio.gather(*(prompt(self, f"hello {number}") for number in range(8)))  # connects to both
        await self.idle()

    async def agree(self) -> None:
        """Until each has heard of all that the other has on the workers."""
        async with asyncio.timeout(10), aiohttp.ClientSession() as session:
            while True:
                own = await self.of("baton_endpoint_in_flight")
                async with session.get(f"{self.admin}/processes/1/healthz") as response:
                    second = (await response.json())["process"]["siblings"]["0"]["claims"]
                first = (await self.health())["process"]["siblings"]["1"]["claims"]
                if (first, second) == (own["1"], own["0"]):
                    return
                await asyncio.sleep(0.02)

    async def idle(self) -> None:
        """Until no ledger counts anything, neither a process's own requests nor the other's."""
        async with asyncio.timeout(10):
            while True:
                own = await self.of("baton_endpoint_in_flight")
                health = await self.health()
                others = sum(each["claims"] for each in health["process"]["siblings"].values())
                if not any(own.values()) and not others:
                    return
                await asyncio.sleep(0.05)


async def prompt(stack: Stack, text: str) -> int:
    """A completion; its status."""
    status, _, _ = await post(stack, "/v1/completions", json.dumps({**_BODY, "prompt": text}).encode())
    return status


async def test_both_serve_no_line_is_lost_and_both_ledgers_return_to_zero() -> None:
    async with Several(prefill=2) as stack:
        await stack.together()
        before = await stack.of("baton_requests_total")
        for _ in range(5):
            assert set(await asyncio.gather(*(prompt(stack, f"prompt {number}") for number in range(40)))) == {200}
        served = await stack.of("baton_requests_total")
        new = {process: served[process] - before[process] for process in served}
        assert sum(new.values()) == 200
        assert min(new.values()) >= 50, new
        await stack.idle()
        async with asyncio.timeout(10):
            # A line reaches either process, and is counted where its request was.
            while await stack.of("baton_access_log_lines_total") != await stack.of("baton_requests_total"):
                await asyncio.sleep(0.1)
        metrics = await stack.metrics()
        assert sum(value for name, value in metrics.items() if name.startswith("baton_access_log_lost_total")) == 0
        told = {name: value for name, value in metrics.items() if name.startswith("baton_sibling_messages_total")}
        for outcome in ("missed", "malformed", "overflow"):
            assert sum(value for name, value in told.items() if f'outcome="{outcome}"' in name) == 0
        assert len(set(metrics)) == len(metrics), "no series stands on the page twice"


async def test_a_prefix_that_one_process_has_seen_is_known_to_the_other() -> None:
    settings: dict[str, Any] = {"policies": [{"name": "default", "mode": "disaggregate", "objective": "prefix"}]}
    async with Several(prefill=3, settings=settings) as stack:
        await stack.together()
        stack.reset()
        document = "The quick brown fox jumps over the lazy dog. " * 400
        assert await prompt(stack, document) == 200
        await stack.idle()
        before = await stack.of("baton_requests_total")
        assert set(await asyncio.gather(*(prompt(stack, f"{document} Question {n}?") for n in range(20)))) == {200}
        served = await stack.of("baton_requests_total")
        assert min(served[each] - before[each] for each in served) >= 3, "both processes had some of them"
        assert sorted(len(worker.received) for worker in stack.prefill) == [0, 0, 21]


async def test_load_of_one_process_is_seen_by_the_other() -> None:
    gate = asyncio.Event()
    settings: dict[str, Any] = {"policies": [{"name": "default", "mode": "disaggregate", "objective": "least-load"}]}
    async with Several(prefill=2, settings=settings) as stack:
        await stack.together()
        stack.reset()
        for worker in stack.prefill:
            worker.answer = when(gate)
        tasks = []
        for number in range(8):
            tasks.append(asyncio.create_task(prompt(stack, f"{number} " * 500)))
            await until(lambda: sum(len(worker.received) for worker in stack.prefill) == len(tasks))
            await stack.agree()
        assert sum((await stack.of("baton_endpoint_in_flight")).values()) == 16, "each leg is counted by one process only"
        gate.set()
        assert set(await asyncio.gather(*tasks)) == {200}
        await stack.idle()


async def test_a_process_that_is_killed_leaves_the_other_serving_and_is_started_again() -> None:
    gate = asyncio.Event()
    async with Several() as stack:
        await stack.together()
        stack.reset()
        for worker in stack.decode:
            worker.answer = begun_until(gate)
        open_requests = [asyncio.create_task(post(stack, "/v1/completions", PROMPT)) for _ in range(12)]
        await until(lambda: len(stack.decode_received) == 12)
        own = await stack.of("baton_streams")
        assert min(own.values()) >= 2, own
        killed = stack.process(1)
        os.kill(killed.pid, signal.SIGKILL)
        async with asyncio.timeout(2):
            while (await stack.health())["process"]["siblings"]["1"]["claims"]:
                await asyncio.sleep(0.02)
        gate.set()
        statuses = Counter()
        for task in open_requests:
            try:
                status, answer, _ = await task
                statuses[status if answer == b"begun done" else "cut"] += 1
            except aiohttp.ClientError:
                statuses["cut"] += 1
        assert statuses[200] >= own["0"], "the other's requests come to their end"
        for worker in stack.decode:
            worker.reset()
        for _ in range(20):
            assert await prompt(stack, "while one is away") == 200
        async with asyncio.timeout(20):
            while await stack.of("baton_siblings") != {"0": 1, "1": 1}:
                await asyncio.sleep(0.05)
        assert (await stack.of("baton_process_restarts")) == {"0": 0, "1": 1}
        assert stack.process(1).pid != killed.pid
        await stack.together()
        served = await stack.of("baton_requests_total")
        async with asyncio.timeout(20):
            while (await stack.of("baton_requests_total"))["1"] <= served["1"]:  # until Envoy has found it again
                assert set(await asyncio.gather(*(prompt(stack, f"prompt {n}") for n in range(20)))) == {200}
        [ended] = await stack.logged("process_ended")
        assert (ended["process"], ended["how"]) == (1, "was ended by SIGKILL")


async def test_without_its_first_process_another_one_leads_and_envoys_files_stay_whole() -> None:
    async with Several() as stack:
        await stack.together()
        files = {path.name: path.read_text() for path in (stack.directory / "eds").iterdir()}
        assert set(files) == {"decode.json", "prefill.json"}
        os.kill(stack.process(0).pid, signal.SIGKILL)
        seen: set[str] = set()
        async with asyncio.timeout(20):
            while not ("process_leads" in seen and len(again(stack)) == 3):
                seen = {line["event"] for line in stack.log_lines() if line.get("process") == 1}
                for path in (stack.directory / "eds").glob("*.json"):
                    assert json.loads(path.read_text())["resources"][0]["endpoints"], "a list without workers was written"
                await asyncio.sleep(0.01)
        await stack._wait(stack.filter, f"{stack.admin}/healthz", (200,))
        assert await prompt(stack, "after that") == 200


def again(stack: Several) -> list[dict[str, Any]]:
    """Every time that a process came to serve."""
    return [line for line in stack.log_lines() if line["event"] == "process_serves"]


async def test_a_drain_finishes_the_requests_of_both_and_no_line_is_lost() -> None:
    gate = asyncio.Event()
    async with Several(settings={"drain": {"delay_s": 0.3, "timeout_s": 20.0}}) as stack:
        await stack.together()
        async with asyncio.timeout(10):  # Envoy opens no new stream for its log to a filter that drains
            while await stack.of("baton_access_log_lines_total") != await stack.of("baton_requests_total"):
                await asyncio.sleep(0.05)
        stack.reset()
        for worker in stack.decode:
            worker.answer = begun_until(gate)
        open_requests = [asyncio.create_task(post(stack, "/v1/completions", PROMPT)) for _ in range(12)]
        await until(lambda: len(stack.decode_received) == 12)
        assert min((await stack.of("baton_streams")).values()) >= 2
        total = sum((await stack.of("baton_requests_total")).values()) + 12
        pids = [stack.process(0).pid, stack.process(1).pid, stack.parent().pid]
        for pid in pids:
            os.kill(pid, signal.SIGTERM)  # as a service manager does that signals the whole group
        await asyncio.sleep(1.0)
        assert stack.filter.poll() is None
        gate.set()
        assert [(await task)[:2] for task in open_requests] == [(200, b"begun done")] * 12
        await until(lambda: stack.filter.poll() is not None, 15)
        assert stack.filter.poll() == 0
        closed = await stack.logged("access_log_closed", 2)
        assert len(closed) == 2
        assert (sum(line["lines"] for line in closed), sum(line["lost"] for line in closed)) == (total, 0)
        assert not any(psutil.pid_exists(pid) for pid in pids)


async def test_a_second_signal_to_the_parent_does_not_wait_for_open_requests() -> None:
    async with Several() as stack:
        await stack.together()
        gate = asyncio.Event()
        stack.prefill[0].answer = when(gate)
        held = [asyncio.create_task(post(stack, "/v1/completions", PROMPT)) for _ in range(4)]
        await until(lambda: len(stack.prefill[0].received) >= 4)
        stack.parent().send_signal(signal.SIGTERM)
        await asyncio.sleep(0.3)
        stack.parent().send_signal(signal.SIGTERM)
        await until(lambda: stack.filter.poll() is not None, 5)
        assert [(await task)[0] for task in held] == [503] * 4


async def test_without_their_parent_the_processes_finish_and_end() -> None:
    gate = asyncio.Event()
    async with Several(settings={"drain": {"delay_s": 0.1, "timeout_s": 20.0}}) as stack:
        await stack.together()
        processes = [stack.process(0), stack.process(1)]
        watched = [psutil.Process(each.pid) for each in processes]
        # Its guard, which the test's harness puts above it, would end all that it leaves behind.
        guard = stack.parent().parent()
        guard.suspend()
        try:
            for worker in stack.decode:
                worker.answer = begun_until(gate)
            stack.reset()
            for worker in stack.decode:
                worker.answer = begun_until(gate)
            held = [asyncio.create_task(post(stack, "/v1/completions", PROMPT)) for _ in range(4)]
            await until(lambda: len(stack.decode_received) == 4)
            stack.parent().kill()
            await asyncio.sleep(0.5)
            gate.set()
            assert [(await task)[:2] for task in held] == [(200, b"begun done")] * 4
            await until(lambda: all(ended(each) for each in watched), 15)
        finally:
            guard.resume()


def ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


async def test_workers_meet_once_for_all_processes() -> None:
    async with Several(prefill=2, decode=2, settings={"warm_up": {"enabled": True}}) as stack:
        async with asyncio.timeout(12), aiohttp.ClientSession() as session:  # the other one would begin by itself after 15 s
            for path in ("healthz", "processes/1/healthz"):
                while True:
                    async with session.get(f"{stack.admin}/{path}") as response:
                        found = (await response.json())["warm_up"]
                    if (found["pairs_warm"], found["pairs"], found["warming"]) == (4, 4, {}):
                        break
                    await asyncio.sleep(0.05)
        met = await stack.of("baton_warm_up_total")
        assert 4 <= sum(met.values()) <= 6, "not each pair by each process; one or two at the change of the leader"


async def test_the_admin_port_shows_each_process() -> None:
    async with Several() as stack:
        await stack.together()
        health = await stack.health()
        assert {index: each["ready"] for index, each in health["processes"].items()} == {"0": True, "1": True}
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{stack.admin}/processes/1/healthz") as response:
                assert (response.status, (await response.json())["process"]["index"]) == (200, 1)
            async with session.get(f"{stack.admin}/processes/1/debug/decisions?last=2") as response:
                assert response.status == 200
            async with session.get(f"{stack.admin}/processes/1/") as response:
                assert (response.status, response.content_type) == (200, "text/html")
            async with session.get(f"{stack.admin}/processes/2/healthz") as response:
                assert response.status == 404
