"""Workers found in Kubernetes, by a double of its API server: no request is lost whatever happens to pods or the server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp

from tests.kube_api.objects import pod, readiness, terminating
from tests.kube_api.server import KubeApi
from tests.stack.fake_worker import FakeWorker, begun_until, decode_answer
from tests.stack.harness import Stack
from tests.stack.test_errors import PROMPT
from tests.stack.test_legs import post
from tests.stack.test_streams import until
from tests.stack.test_workers_change import status, until_hosts, until_live
from workers.ready import free_ports


def pod_of(worker: FakeWorker, role: str, **more: Any) -> dict[str, Any]:
    return pod(worker.name, "127.0.0.1", role=role, port=worker.port, **more)


@asynccontextmanager
async def in_kubernetes(api: KubeApi, *, decode: int = 2, known: int | None = None) -> AsyncIterator[Stack]:
    """A stack whose workers are pods: at first the first ``known`` decode workers."""
    stack = Stack(decode=decode)
    path = stack.directory / "kubeconfig"
    path.write_text(
        json.dumps(
            {
                "current-context": "here",
                "contexts": [{"name": "here", "context": {"cluster": "c"}}],
                "clusters": [{"name": "c", "cluster": {"server": api.url}}],
            }
        )
    )
    stack.configure(
        workers={
            "prefill": [],
            "decode": [],
            "kubernetes": {
                "kubeconfig": str(path),
                "pods": [{"selector": "app=vllm", "ports": ["http"]}],
                "max_backoff_s": 0.5,
            },
        }
    )
    for worker in stack.prefill:
        api.put("pods", pod_of(worker, "prefill"))
    for worker in stack.decode[:known]:
        api.put("pods", pod_of(worker, "decode"))
    async with stack:
        yield stack


class Load:
    """Clients that ask one after the other, as long as it lasts."""

    def __init__(self, stack: Stack, clients: int = 6) -> None:
        self.codes: list[int] = []
        self._stack = stack
        self._clients = clients
        self._over = False

    async def __aenter__(self) -> Load:
        self._tasks = [asyncio.create_task(self._ask()) for _ in range(self._clients)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._over = True
        await asyncio.gather(*self._tasks)

    async def _ask(self) -> None:
        while not self._over:
            code, _, _ = await post(self._stack, "/v1/completions", PROMPT)
            self.codes.append(code)

    async def more(self, count: int = 20) -> None:
        """Until so many more requests are answered."""
        have = len(self.codes)
        await until(lambda: len(self.codes) >= have + count)


async def test_a_pod_that_becomes_ready_gets_traffic_and_one_that_terminates_finishes_what_it_has() -> None:
    async with KubeApi() as api, in_kubernetes(api, known=1) as stack:
        old, new = stack.decode
        await until_hosts(stack, old)
        api.put("pods", pod_of(new, "decode", ready=False))
        api.bookmark()
        assert (await post(stack, "/v1/completions", PROMPT))[0] == 200
        api.edit("pods", new.name, readiness(True))
        await until_live(stack, old, new)
        await until_hosts(stack, old, new)
        assert [(await post(stack, "/v1/completions", PROMPT))[0] for _ in range(4)] == [200] * 4
        assert new.received

        gate = asyncio.Event()
        old.answer = new.answer = begun_until(gate)
        had = len(old.received)
        requests = [asyncio.create_task(post(stack, "/v1/completions", PROMPT)) for _ in range(2)]
        await until(lambda: len(old.received) == had + 1)
        api.edit("pods", old.name, terminating)
        await until_live(stack, new)
        assert (await status(stack))["leaving"] == [old.address]
        new.answer = decode_answer
        assert [(await post(stack, "/v1/completions", PROMPT))[0] for _ in range(4)] == [200] * 4
        assert len(old.received) == had + 1, "nothing new for a pod that terminates"
        gate.set()
        assert [(code, text) for code, text, _ in await asyncio.gather(*requests)] == [(200, b"begun done")] * 2
        await until_hosts(stack, new)
        api.delete("pods", old.name)
        assert (await post(stack, "/v1/completions", PROMPT))[0] == 200


async def test_a_rolling_update_of_both_roles_under_load_fails_no_request() -> None:
    async with KubeApi() as api, in_kubernetes(api) as stack, AsyncExitStack() as newer:
        ports = free_ports(3)
        prefill = [FakeWorker("prefill-new", ports[0], stack.prefill[0].answer)]
        decode = [FakeWorker(f"decode-new-{index}", port, decode_answer) for index, port in enumerate(ports[1:])]
        await until_live(stack, *stack.decode)
        async with Load(stack) as load:
            await load.more()
            for role, old, new in (
                ("prefill", stack.prefill[0], prefill[0]),
                ("decode", stack.decode[0], decode[0]),
                ("decode", stack.decode[1], decode[1]),
            ):
                api.put("pods", pod_of(new, role, ready=False))
                await newer.enter_async_context(new)
                api.edit("pods", new.name, readiness(True))
                await until_role(stack, role, new, there=True)
                api.edit("pods", old.name, terminating)
                await until_role(stack, role, old, there=False)
                await until_gone(stack, old)
                api.delete("pods", old.name)
                await old.__aexit__(None, None, None)  # its process has ended: whoever still asked it would fail
                await load.more()
            assert new.received
        assert set(load.codes) == {200}, f"{len(load.codes)} requests"
        await until_live(stack, *decode)
        for worker in (*stack.prefill, *stack.decode):
            await worker.__aenter__()  # the stack closes them


async def test_the_api_server_away_for_a_while_costs_nothing_and_is_seen() -> None:
    async with KubeApi() as api, in_kubernetes(api, decode=3, known=2) as stack:
        first, second, third = stack.decode
        await until_live(stack, first, second)
        async with Load(stack) as load:
            await api.stop()
            await until_failing(stack, failing=True)
            await load.more()
            shown = await status(stack)
            [source] = [each for each in shown["discovery"] if each["source"] == "kubernetes"]
            assert source["endpoints"] == 3
            assert "watch of pods in namespace default" in source["error"]
            assert set(shown["live"]["decode"]) == {first.address, second.address}
            metrics = await stack.metrics()
            assert metrics['baton_kubernetes_requests_total{outcome="unreachable",verb="watch"}'] > 0
            api.put("pods", pod_of(third, "decode"))
            api.edit("pods", second.name, terminating)
            api.forget_history()
            await api.start()
            await until_live(stack, first, third)
            await until_failing(stack, failing=False)
            await load.more()
        assert set(load.codes) == {200}, f"{len(load.codes)} requests"
        assert third.received


async def test_another_pod_at_the_same_address_is_another_engine() -> None:
    async with KubeApi() as api, in_kubernetes(api, decode=1) as stack:
        [worker] = stack.decode
        await until_live(stack, worker)
        api.delete("pods", worker.name)
        api.put("pods", pod_of(worker, "decode"))
        await until(lambda: any(line.get("event") == "worker_restarted" for line in stack.log_lines()))
        await until_live(stack, worker)
        assert (await post(stack, "/v1/completions", PROMPT))[0] == 200


async def until_role(stack: Stack, role: str, worker: FakeWorker, *, there: bool) -> None:
    async with asyncio.timeout(20):
        while (worker.address in (await status(stack))["live"][role]) != there:
            await asyncio.sleep(0.02)


async def until_gone(stack: Stack, worker: FakeWorker) -> None:
    """It has nothing left to do, and Envoy does not know it any more."""
    async with asyncio.timeout(20):
        while worker.address in (await status(stack))["leaving"]:
            await asyncio.sleep(0.02)
    async with asyncio.timeout(20):
        while worker.address in await all_hosts(stack):
            await asyncio.sleep(0.02)


async def all_hosts(stack: Stack) -> str:
    async with aiohttp.ClientSession() as session, session.get(f"{stack.envoy_admin}/clusters") as response:
        return await response.text()


async def until_failing(stack: Stack, *, failing: bool) -> None:
    async with asyncio.timeout(20):
        while ((await stack.metrics())['baton_discovery_failing_seconds{source="kubernetes"}'] > 0) != failing:
            await asyncio.sleep(0.05)
