"""Envoy takes another worker than it was told to, without a word but one: what that means for counts, and for KV blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest
from aiohttp import web

from tests.stack.fake_worker import FakeWorker
from tests.stack.inference_pool import HEADER, METADATA, Mesh

pytestmark = pytest.mark.asyncio(loop_scope="session")

WHOLE = {"policies": [{"name": "default", "mode": "aggregate", "objective": "round-robin", "dispatch": "immediate"}]}
RELEASE = "baton-release-no-such-model"


def status(code: int) -> Callable[[web.Request, bytes], Awaitable[web.StreamResponse]]:
    async def answer(_request: web.Request, _body: bytes) -> web.StreamResponse:
        return web.json_response({"error": {"message": "no"}}, status=code)

    return answer


def held_back(gate: asyncio.Event) -> Callable[[web.Request, bytes], Awaitable[web.StreamResponse]]:
    """A stream that begins, and ends when ``gate`` is set; what is a release is turned down, as an engine does."""

    async def answer(request: web.Request, body: bytes) -> web.StreamResponse:
        if RELEASE.encode() in body:
            return web.json_response({"error": {"message": "no such model"}}, status=404)
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"begun ")
        await gate.wait()
        await response.write(b"done")
        return response

    return answer


def prompts(worker: FakeWorker) -> list[Any]:
    return [received for received in worker.received if received.json.get("model") != RELEASE]


def releases(mesh: Mesh) -> list[Any]:
    return [received for worker in mesh.decode for received in worker.received if received.json.get("model") == RELEASE]


async def in_flight(mesh: Mesh, worker: FakeWorker) -> float:
    return await mesh.metric(f'baton_endpoint_in_flight{{endpoint="{worker.address}",role="decode"}}')


def by(who: str) -> str:
    return f'baton_answers_served_total{{by="{who}"}}'


class Open:
    """A request whose answer has begun and does not end yet."""

    def __init__(self, mesh: Mesh, gate: asyncio.Event) -> None:
        self._mesh, self._gate = mesh, gate

    async def __aenter__(self) -> Mapping[str, str]:
        body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream": True}
        self._response = await self._mesh.http.post("/v1/chat/completions", json=body)
        assert self._response.status == 200
        assert await self._response.content.read(5) == b"begun"
        return self._response.headers

    async def __aexit__(self, *_: object) -> None:
        self._gate.set()
        assert await self._response.content.read() == b" done"
        self._response.close()


async def test_the_chosen_worker_is_the_one_that_is_counted() -> None:
    async with Mesh() as mesh:
        for _ in range(4):
            assert (await mesh.ask())[0] == 200
        assert await mesh.metric(by("chosen")) == 4
        assert await mesh.metric("baton_served_elsewhere_total") == 0
        await mesh.at_rest()


async def test_another_decode_worker_of_the_pool_can_fetch_the_blocks_and_counts_from_then_on() -> None:
    """The gateway does not know the worker that was chosen, and takes any: the only one it knows is a decode worker, too."""
    mesh = Mesh(decode=2)
    chosen, other = mesh.decode
    mesh.hosts = [other.address]
    gate = asyncio.Event()
    chosen.answer = other.answer = held_back(gate)
    async with mesh:
        async with asyncio.timeout(20):
            while True:  # in turn: one of two requests is for the worker that the gateway does not know
                async with Open(mesh, gate) as headers:
                    if headers[HEADER] == chosen.address:
                        assert prompts(other)[-1].json["kv_transfer_params"]["do_remote_prefill"] is True
                        assert (await in_flight(mesh, chosen), await in_flight(mesh, other)) == (0, 1)
                        break
                gate.clear()
        assert await mesh.metric(by("pool")) == 1
        assert await mesh.metric("baton_served_elsewhere_total") == 1
        assert await mesh.metric("baton_handoffs_lost_total") == 0
        (line,) = await mesh.logged("served_elsewhere")
        assert (line["chosen"], line["served"]) == (chosen.address, other.address)
        await mesh.at_rest()
        assert releases(mesh) == []


@pytest.mark.parametrize("who", ["a prefill worker", "a worker of nobody"])
async def test_blocks_that_nobody_of_the_pool_can_fetch_are_given_back(who: str) -> None:
    mesh = Mesh(decode=1, prefill=1, strangers=1)
    gate = asyncio.Event()
    other = mesh.strangers[0]
    if who == "a prefill worker":
        other = mesh.prefill[0]
        prefill_answer, answer = other.answer, held_back(gate)

        async def either(request: web.Request, body: bytes) -> web.StreamResponse:
            return await (prefill_answer if b'"do_remote_decode":true' in body else answer)(request, body)

        other.answer = either
    else:
        other.answer = held_back(gate)
    mesh.decode[0].answer = held_back(gate)  # for the release
    mesh.hosts = [other.address]
    async with mesh:
        async with Open(mesh, gate):
            assert await in_flight(mesh, mesh.decode[0]) == 0
            assert await mesh.metric(by("stranger")) == 1
            assert await mesh.metric("baton_handoffs_lost_total") == 1
            await mesh.until_metric('baton_releases_total{outcome="released"}', 1)
            assert len(releases(mesh)) == 1
        await mesh.at_rest()


async def test_nobody_who_can_be_reached_is_an_error_and_the_blocks_are_given_back() -> None:
    """Envoy answers by itself: it knows no worker at all."""
    mesh = Mesh(decode=1)
    mesh.hosts = []
    mesh.decode[0].answer = status(404)  # to the release
    async with mesh:
        code, _, _ = await mesh.ask()
        assert code == 503
        await mesh.until_metric('baton_releases_total{outcome="released"}', 1)
        assert await mesh.metric(by("unknown")) == 1
        await mesh.at_rest()


# -- an ordered list of endpoints ----------------------------------------------------------------------------------------------


def retrying(mesh: Mesh) -> Mesh:
    mesh.retry = {
        "retry_on": "connect-failure,refused-stream,reset,retriable-status-codes",
        "retriable_status_codes": [503],
        "num_retries": 2,
        "retry_host_predicate": [
            {
                "name": "envoy.retry_host_predicates.previous_hosts",
                "typed_config": {
                    "@type": "type.googleapis.com/envoy.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"
                },
            }
        ],
        "host_selection_retry_max_attempts": 3,
    }
    return mesh


async def test_a_request_without_handoff_names_alternatives_and_the_next_one_serves_where_the_first_fails() -> None:
    """The gateway retries along the list; the prefill worker, which its fallback could take, never gets it."""
    mesh = retrying(Mesh(decode=3, settings={**WHOLE, "epp": {"fallback_endpoints": 2}}))
    async with mesh:
        code, _, headers = await mesh.ask()
        assert code == 200
        listed = headers[HEADER].split(",")
        assert headers[METADATA] == headers[HEADER]
        assert sorted(listed) == sorted(worker.address for worker in mesh.decode)
        for worker in mesh.decode:
            worker.reset()
        failing = {worker.address: worker for worker in mesh.decode}
        for worker in mesh.decode[:2]:
            worker.answer = status(503)
        for _ in range(3):
            code, _, headers = await mesh.ask()
            assert code == 200
        assert len(prompts(mesh.decode[2])) == 3
        assert not prompts(mesh.prefill[0])
        found = await mesh.metrics()
        assert found[by("listed")] + found[by("chosen")] == 4
        assert found[by("listed")] >= 1
        assert found['baton_fallbacks_total{kind="gateway"}'] == found[by("listed")]
        assert found.get("baton_served_elsewhere_total", 0.0) == 0
        assert set(failing) == set(listed)
        await mesh.at_rest()


async def test_a_handoff_names_one_worker_only() -> None:
    """A second worker could find the blocks gone: the first may have fetched them, and then they are another prompt's."""
    async with Mesh(decode=3, settings={"epp": {"fallback_endpoints": 2}}) as mesh:
        _, _, headers = await mesh.ask()
        assert "," not in headers[HEADER]
        assert headers[HEADER] == headers[METADATA]


async def test_by_default_one_worker_is_named() -> None:
    """Clusters of the type ORIGINAL_DST do not read lists."""
    async with Mesh("header", decode=3, settings=WHOLE) as mesh:
        code, _, headers = await mesh.ask()
        assert (code, "," in headers[HEADER]) == (200, False)
