"""Fail-open and fail-closed in a mesh's own Envoy: what a client sees when every picker is away, and what never gets through.

The configuration is what a mesh makes of `failureMode` of an InferencePool, or of `failOpen` of an EnvoyExtensionPolicy, with
and without the Lua filter that `extproc.filter_down.guard` makes for it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import Any

import aiohttp
import psutil
import pytest

from extproc.filter_down import guard
from tests.stack.fake_worker import begun_until, when
from tests.stack.inference_pool import DESTINATION, TYPE, Mesh, Shape

pytestmark = pytest.mark.timeout(120)

_SMUGGLED = {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "10.0.0.1"}}


class Gateway(Mesh):
    """A mesh's Envoy, with what can be added to it."""

    def __init__(self, shape: Shape, *, opens: bool, guarded: bool, checked: bool) -> None:
        """``checked``: gRPC health checks of the picker and no panic mode, which few meshes have."""
        super().__init__(shape, prefill=1, decode=2)
        self.fail_open, self.guarded, self.checked = opens, guarded, checked
        self.hosts = [each.address for each in self.decode]

    def _listener(self) -> dict[str, Any]:
        made = super()._listener()
        if self.guarded:
            connections = made["filter_chains"][0]["filters"][0]["typed_config"]
            script = {
                "name": "envoy.filters.http.lua",
                "typed_config": {
                    "@type": f"{TYPE}.filters.http.lua.v3.Lua",
                    "default_source_code": {"inline_string": guard()},
                },
            }
            connections["http_filters"].insert(-1, script)
            connections["early_header_mutation_extensions"] = [
                {
                    "name": "envoy.http.early_header_mutation.header_mutation",
                    "typed_config": {
                        "@type": f"{TYPE}.http.early_header_mutation.header_mutation.v3.HeaderMutation",
                        "mutations": [{"remove": DESTINATION}],
                    },
                }
            ]
        return made

    def _picker(self) -> dict[str, Any]:
        made = super()._picker()
        if self.checked:
            service = {"service_name": "envoy.service.ext_proc.v3.ExternalProcessor"}
            made["health_checks"] = [
                {
                    **dict.fromkeys(("timeout", "interval", "no_traffic_interval"), "0.5s"),
                    "unhealthy_threshold": 1,
                    "healthy_threshold": 1,
                    "grpc_health_check": service,
                }
            ]
            # 0s: the workers of Envoy know what its admin port says, not up to a second later.
            made["common_lb_config"] = {"healthy_panic_threshold": {"value": 0}, "update_merge_window": "0s"}
        return made

    async def kill(self) -> None:
        [pid] = [pid for pid in self.picker.pids() if "guard.py" not in " ".join(psutil.Process(pid).cmdline())]
        os.kill(pid, signal.SIGKILL)
        await self.until(lambda: self.picker.poll() is not None)
        if self.checked:
            async with asyncio.timeout(15), aiohttp.ClientSession() as session:
                while True:
                    async with session.get(f"{self.envoy_admin}/clusters?format=json") as response:
                        text = await response.text()
                    found = [c for c in json.loads(text)["cluster_statuses"] if c["name"] not in ("workers", "none")]
                    if any(h["health_status"].get("failed_active_health_check") for c in found for h in c["host_statuses"]):
                        return
                    await asyncio.sleep(0.05)

    async def seen(self, **more: Any) -> tuple[int, bool]:
        """What a client gets, and whether its answer came to its end."""
        headers = {"content-type": "application/json", **more.pop("headers", {})}
        body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, **more}
        async with self.http.post("/v1/chat/completions", json=body, headers=headers) as response:
            try:
                await response.read()
            except aiohttp.ClientError:
                return response.status, False
        return response.status, True

    @property
    def reached(self) -> list[Any]:
        return [received for worker in self.decode for received in worker.received]


@pytest.mark.parametrize("opens", [False, True], ids=["closed", "open"])
@pytest.mark.parametrize("shape", ["istio", "buffered"])
async def test_without_health_checks_a_full_duplex_mesh_stays_closed_whatever_it_says(shape: Shape, opens: bool) -> None:
    """Envoy has sent a part of the body, or tries every host in panic mode: it cannot go on by itself."""
    async with Gateway(shape, opens=opens, guarded=False, checked=False) as mesh:
        await mesh.kill()
        assert await mesh.seen() == ((503 if opens and shape == "buffered" else 500), True)
        assert mesh.reached == [], "with whole bodies it goes on, and the load balancer finds no destination"


@pytest.mark.parametrize("shape", ["istio", "buffered"])
async def test_closed_a_request_is_an_error_and_reaches_nobody(shape: Shape) -> None:
    async with Gateway(shape, opens=False, guarded=False, checked=True) as mesh:
        gate = asyncio.Event()
        mesh.prefill[0].answer = when(gate)
        held = asyncio.create_task(mesh.seen())
        await mesh.until(lambda: bool(mesh.prefill[0].received))
        await mesh.kill()
        assert await held == (500, True)
        assert await mesh.seen() == (500, True)
        assert await mesh.seen(headers={DESTINATION: mesh.decode[0].address}) == (500, True)
        assert mesh.reached == []
        gate.set()


async def test_open_and_without_the_guard_a_clients_own_transfer_keys_reach_an_engine() -> None:
    """Why `FailOpen` alone must not be used: nobody reads the body."""
    async with Gateway("istio", opens=True, guarded=False, checked=True) as mesh:
        await mesh.kill()
        assert await mesh.seen(**_SMUGGLED) == (200, True)
        assert [b"kv_transfer_params" in received.body for received in mesh.reached] == [True]


async def test_open_and_without_the_guard_a_client_chooses_its_worker_where_the_header_is_the_pin() -> None:
    async with Gateway("buffered", opens=True, guarded=False, checked=True) as mesh:
        await mesh.kill()
        for _ in range(2):
            assert await mesh.seen(headers={DESTINATION: mesh.decode[0].address}) == (200, True)
        assert [len(worker.received) for worker in mesh.decode] == [2, 0]


async def test_open_and_guarded_prompts_go_on_and_nothing_that_only_the_filter_may_say() -> None:
    async with Gateway("istio", opens=True, guarded=True, checked=True) as mesh:
        assert await mesh.seen() == (200, True), "with the filter there, the guard lets everything pass"
        assert await mesh.seen(**_SMUGGLED) == (200, True)
        for worker in mesh.decode:
            assert not any(b"10.0.0.1" in received.body for received in worker.received)
            worker.reset()
        gate = asyncio.Event()
        mesh.prefill[0].answer = when(gate)
        held = asyncio.create_task(mesh.seen())
        await mesh.until(lambda: len(mesh.prefill[0].received) == 3)
        await mesh.kill()
        assert await held == (500, True), "the filter has had a part of it"
        assert mesh.reached == []
        assert await mesh.seen() == (200, True)
        for worker in mesh.decode:
            worker.reset()
        assert await mesh.seen(**_SMUGGLED) == (503, True)
        assert mesh.reached == []
        for _ in range(2):
            assert await mesh.seen(headers={DESTINATION: mesh.decode[0].address}) == (200, True)
        assert [len(worker.received) for worker in mesh.decode] == [1, 1], "it is no choice of the client's"
        gate.set()


async def test_open_and_guarded_with_the_header_as_the_pin_nobody_is_reached() -> None:
    """A cluster that connects to what a header says has nowhere to go without it."""
    async with Gateway("buffered", opens=True, guarded=True, checked=True) as mesh:
        await mesh.kill()
        for more in ({}, _SMUGGLED, {"headers": {DESTINATION: mesh.decode[0].address}}):
            assert await mesh.seen(**more) == (503, True)
        assert mesh.reached == []


@pytest.mark.parametrize(
    ("shape", "opens", "whole"),
    [("istio", False, False), ("istio", True, False), ("buffered", False, False), ("buffered", True, True)],
)
async def test_an_answer_that_is_under_way_is_cut_but_where_whole_bodies_fail_open(
    shape: Shape, opens: bool, whole: bool
) -> None:
    async with Gateway(shape, opens=opens, guarded=False, checked=True) as mesh:
        gate = asyncio.Event()
        for worker in mesh.decode:
            worker.answer = begun_until(gate)
        asked = asyncio.create_task(mesh.seen())
        await mesh.until(lambda: bool(mesh.reached))
        await asyncio.sleep(0.3)
        await mesh.kill()
        gate.set()
        assert await asked == (200, whole)
