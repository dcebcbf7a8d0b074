"""Whole requests through an Envoy as meshes configure it for an InferencePool, with Baton as its endpoint picker."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from tests.stack.fake_worker import FakeWorker, begun_until, when
from tests.stack.inference_pool import BODY, DESTINATION, HEADER, METADATA, Mesh, Shape

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(scope="session", loop_scope="session", params=["istio", "header", "buffered"])
async def shared_mesh(request: pytest.FixtureRequest) -> AsyncIterator[Mesh]:
    shape: Shape = request.param
    async with Mesh(shape) as mesh:
        yield mesh


@pytest_asyncio.fixture(loop_scope="session")
async def mesh(shared_mesh: Mesh) -> Mesh:
    for worker in (*shared_mesh.prefill, *shared_mesh.decode):
        worker.reset()
    return shared_mesh


def status(code: int) -> Callable[[web.Request, bytes], Awaitable[web.StreamResponse]]:
    async def answer(_request: web.Request, _body: bytes) -> web.StreamResponse:
        return web.json_response({"error": {"message": "no"}}, status=code)

    return answer


def served(mesh: Mesh) -> list[FakeWorker]:
    return [worker for worker in mesh.decode if worker.received]


async def test_a_streamed_chat_is_prefilled_by_one_worker_and_answered_by_another(mesh: Mesh) -> None:
    """No sidecar: the decode worker gets the blocks' place in its body, the client every chunk in order."""
    code, text, _ = await mesh.ask(stream=True)
    assert code == 200
    assert [line for line in text.split("\n\n") if line] == [
        'data: {"text":"one"}',
        'data: {"text":"two"}',
        'data: {"text":"three"}',
        "data: [DONE]",
    ]
    (decode,) = served(mesh)
    assert mesh.prefill[0].last.json["max_tokens"] == 1
    assert decode.last.json["kv_transfer_params"]["remote_engine_id"] == "0f9d8c7b-engine"  # type: ignore[index]
    assert decode.last.headers["x-kv-transfer"].startswith("nixl;prefill=")
    await mesh.at_rest()


async def test_the_header_and_the_metadata_name_the_same_endpoint(mesh: Mesh) -> None:
    _, _, headers = await mesh.ask()
    (decode,) = served(mesh)
    assert headers[HEADER] == headers[METADATA] == decode.address


async def test_what_is_no_prompt_goes_to_a_decode_worker_with_and_without_a_body(mesh: Mesh) -> None:
    async with mesh.http.get("/version") as response:
        assert response.status == 200
        assert response.headers[HEADER] == response.headers[METADATA]
    code, _, headers = await mesh.ask("/tokenize")
    assert code == 200
    assert headers[HEADER] == headers[METADATA]
    assert not mesh.prefill[0].received
    assert sum(len(worker.received) for worker in mesh.decode) == 2
    await mesh.at_rest()


async def test_a_large_body_comes_whole_to_both_workers(mesh: Mesh) -> None:
    """Larger than the gateway's buffer of 32 KiB, and than one message of ours."""
    content = "wagon " * 40_000
    code, _, _ = await mesh.ask(messages=[{"role": "user", "content": content}])
    assert code == 200
    (decode,) = served(mesh)
    for worker in (mesh.prefill[0], decode):
        assert worker.last.json["messages"][0]["content"] == content  # type: ignore[index]


async def test_a_clients_routing_headers_choose_nothing_and_reach_nobody(mesh: Mesh) -> None:
    liar = {
        DESTINATION: "127.0.0.1:1",
        f"{DESTINATION}-subset": "127.0.0.1:1",
        "x-prefiller-host-port": "127.0.0.1:1",
        "x-kv-transfer": "forged",
    }
    code, _, headers = await mesh.ask(headers=liar)
    (decode,) = served(mesh)
    assert (code, headers[HEADER]) == (200, decode.address)
    assert decode.last.headers["x-kv-transfer"].startswith("nixl;prefill=")
    assert "x-prefiller-host-port" not in decode.last.headers
    assert f"{DESTINATION}-subset" not in decode.last.headers


# -- errors, at every phase ----------------------------------------------------------------------------------------------------


async def test_a_path_that_controls_the_engine_is_refused_before_its_body(mesh: Mesh) -> None:
    code, text, _ = await mesh.ask("/reset_prefix_cache")
    assert (code, '"code":"not_found"' in text) == (404, True)
    assert not served(mesh)
    await mesh.at_rest()


async def test_a_body_that_is_no_json_is_refused_after_it(mesh: Mesh) -> None:
    async with mesh.http.post("/v1/chat/completions", data=b"{", headers={"content-type": "application/json"}) as response:
        assert (response.status, '"code":"invalid_json"' in await response.text()) == (400, True)
        assert response.headers["content-type"] == "application/json"
    await mesh.at_rest()


async def test_a_prefill_that_failed_is_502_and_no_decode_worker_hears_of_it(mesh: Mesh) -> None:
    mesh.prefill[0].answer = status(500)
    code, text, _ = await mesh.ask()
    assert (code, '"code":"prefill_failed"' in text) == (502, True)
    assert not served(mesh)
    await mesh.at_rest()


async def test_a_prefill_workers_own_4xx_reaches_the_client(mesh: Mesh) -> None:
    mesh.prefill[0].answer = status(422)
    code, text, _ = await mesh.ask()
    assert (code, "no" in text) == (422, True)
    await mesh.at_rest()


async def test_a_decode_workers_error_reaches_the_client_and_its_blocks_are_given_back(mesh: Mesh) -> None:
    before = await mesh.metric('baton_releases_total{outcome="released"}')
    for worker in mesh.decode:
        worker.answer = status(404)
    code, _, _ = await mesh.ask()
    assert code == 404
    await mesh.until_metric('baton_releases_total{outcome="released"}', before + 1)
    await mesh.at_rest()


async def test_a_client_that_leaves_during_the_prefill_cancels_it(mesh: Mesh) -> None:
    never = asyncio.Event()
    mesh.prefill[0].answer = when(never)
    asking = asyncio.create_task(mesh.ask())
    await mesh.until(lambda: bool(mesh.prefill[0].received))
    asking.cancel()
    await mesh.until(lambda: mesh.prefill[0].last.gone_at is not None)
    assert not served(mesh)
    await mesh.at_rest()


async def test_a_client_that_leaves_during_the_answer_is_no_longer_counted(mesh: Mesh) -> None:
    never = asyncio.Event()
    for worker in mesh.decode:
        worker.answer = begun_until(never)
    async with mesh.http.post("/v1/chat/completions", json={**BODY, "stream": True}) as response:
        assert await response.content.read(5) == b"begun"
        (decode,) = served(mesh)
        assert await mesh.metric(f'baton_endpoint_in_flight{{endpoint="{decode.address}",role="decode"}}') == 1
    await mesh.until(lambda: decode.last.gone_at is not None)
    await mesh.at_rest()


async def test_nothing_is_awaited_that_only_an_envoy_of_ours_gives(mesh: Mesh) -> None:
    """No line of an access log is missed, and the page for people says what is not known for want of it."""
    for _ in range(3):
        await mesh.ask()
    async with aiohttp.ClientSession() as session, session.get(f"{mesh.admin}/healthz") as response:
        log = (await response.json())["access_log"]
    assert (log["state"], log["awaited"], log["lost"]) == ("off", 0, 0)
    assert "no ITL" in log["without_it"]
    assert not [line for line in mesh.log_lines() if line["event"] == "access_log_lines_lost"]


async def test_what_the_picker_sees_itself_of_answers_is_in_the_metrics(mesh: Mesh) -> None:
    """Time to the first piece of a stream, and how each request ended, which elsewhere Envoy's access log tells."""
    kind = 'mode="disaggregate",model="m"'

    def name(outcome: str, kind: str = kind) -> str:
        return f'baton_client_requests_total{{{kind},outcome="{outcome}",policy="default"}}'

    ttft = f'baton_client_ttft_seconds_count{{{kind},policy="default"}}'
    before = await mesh.metrics()
    assert (await mesh.ask(stream=True))[0] == 200
    await mesh.until_metric(ttft, before.get(ttft, 0.0) + 1)
    await mesh.until_metric(name("ok"), before.get(name("ok"), 0.0) + 1)
    never = asyncio.Event()
    for worker in mesh.decode:
        worker.answer = begun_until(never)
    async with mesh.http.post("/v1/chat/completions", json={**BODY, "stream": True}) as response:
        assert await response.content.read(5) == b"begun"
    await mesh.until_metric(name("cut"), before.get(name("cut"), 0.0) + 1)
    for worker in mesh.decode:
        worker.answer = status(400)
    assert (await mesh.ask())[0] == 400
    await mesh.until_metric(name("client_error"), before.get(name("client_error"), 0.0) + 1)


# -- pools and pickers that come and go ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["istio", "header"])
async def test_a_limit_is_429_with_a_time_and_nobody_ready_503(shape: Shape) -> None:
    rule = {"name": "default", "mode": "disaggregate", "dispatch": "immediate", "limits": {"max_in_flight": 1}}
    async with Mesh(shape, decode=1, settings={"policies": [rule]}) as mesh:
        gate = asyncio.Event()
        mesh.prefill[0].answer = when(gate)
        first = asyncio.create_task(mesh.ask())
        await mesh.until(lambda: bool(mesh.prefill[0].received))
        code, text, headers = await mesh.ask()
        assert (code, '"code":"policy_limit"' in text) == (429, True)
        assert int(headers["retry-after"]) >= 1
        gate.set()
        assert (await first)[0] == 200
        mesh.decode[0].healthy = False
        await mesh.until_metric(f'baton_endpoint_live{{endpoint="{mesh.decode[0].address}",role="decode"}}', 0)
        code, text, _ = await mesh.ask()
        assert (code, '"code":"no_decode_worker"' in text) == (503, True)
        await mesh.at_rest()


@pytest.mark.parametrize("shape", ["istio", "header", "buffered"])
async def test_a_full_queue_is_429_and_whoever_waits_in_it_is_served_or_may_leave(shape: Shape) -> None:
    settings = {"policies": [{"name": "default", "mode": "disaggregate"}], "routing": {"step_tokens": 300, "queue_requests": 2}}
    async with Mesh(shape, decode=1, settings=settings) as mesh:
        gate = asyncio.Event()
        mesh.prefill[0].answer = when(gate)

        def asked(number: int) -> asyncio.Task[tuple[int, str, Mapping[str, str]]]:
            return asyncio.create_task(mesh.ask(messages=[{"role": "user", "content": f"{number} " * 400}]))

        first = asked(1)
        await mesh.until(lambda: bool(mesh.prefill[0].received))
        waits, leaves = asked(2), asked(3)
        await mesh.until_metric("baton_queue_requests", 2)
        code, text, headers = await asked(4)
        assert (code, '"code":"queue_full"' in text) == (429, True)
        assert int(headers["retry-after"]) >= 1
        leaves.cancel()
        await mesh.until_metric("baton_queue_requests", 1)
        gate.set()
        assert ((await first)[0], (await waits)[0]) == (200, 200)
        assert len(mesh.prefill[0].received) == 2
        await mesh.at_rest()


@pytest.mark.parametrize("transport", ["lean", "grpc"])
async def test_a_picker_that_is_restarted_with_another_certificate_goes_on(transport: str) -> None:
    async with Mesh(transport=transport) as mesh:
        assert (await mesh.ask())[0] == 200
        await mesh.stop_picker()
        assert (await mesh.ask())[0] == 500  # Envoy's word where the picker is away, and failing closed is configured
        await mesh.start_picker()
        async with asyncio.timeout(15):
            while (await mesh.ask())[0] != 200:
                await asyncio.sleep(0.1)
        await mesh.at_rest()


@pytest.mark.parametrize("transport", ["lean", "grpc"])
@pytest.mark.parametrize("shape", ["istio", "header"])
async def test_many_at_once_of_whom_some_leave_get_whole_answers_and_leave_nothing_behind(shape: Shape, transport: str) -> None:
    dice = random.Random(7)
    whole = [f'data: {{"text":"{word}"}}' for word in ("one", "two", "three")]

    async def one(mesh: Mesh, leaves_after_s: float | None) -> None:
        body = {"stream": True, "messages": [{"role": "user", "content": "wagon " * dice.randrange(1, 20_000)}]}
        asking = asyncio.create_task(mesh.ask(**body))
        if leaves_after_s is not None:
            await asyncio.wait((asking,), timeout=leaves_after_s)
            asking.cancel()
            await asyncio.wait((asking,))
            return
        code, text, headers = await asking
        assert (code, headers[HEADER]) == (200, headers[METADATA])
        assert [line for line in text.split("\n\n") if line] == [*whole, "data: [DONE]"]

    async with Mesh(shape, prefill=2, decode=3, transport=transport) as mesh:
        await asyncio.gather(*(one(mesh, dice.uniform(0, 0.4) if number % 3 == 0 else None) for number in range(120)))
        await mesh.at_rest()
        found = await mesh.metrics()
        assert found.get("baton_ledger_leaks_total", 0.0) == 0
        assert not any(value for name, value in found.items() if "protocol_error" in name or "internal_error" in name)
        assert not [line for line in mesh.log_lines() if line["level"] in ("error", "critical")]


async def test_a_gateway_that_fails_open_goes_on_without_its_picker_where_there_is_no_body() -> None:
    """With one, Envoy has begun to stream it to nobody; and nobody has taken a client's transfer keys out of it."""
    mesh = Mesh()
    mesh.fail_open = True
    async with mesh:
        await mesh.stop_picker()
        async with mesh.http.get("/version") as response:
            assert response.status == 200
        assert (await mesh.ask())[0] == 500


@pytest.mark.parametrize("transport", ["lean", "grpc"])
async def test_a_stop_waits_for_the_answers_that_are_under_way(transport: str) -> None:
    async with Mesh(transport=transport, decode=1) as mesh:
        gate = asyncio.Event()
        mesh.decode[0].answer = begun_until(gate)
        async with mesh.http.post("/v1/chat/completions", json={**BODY, "stream": True}) as response:
            assert await response.content.read(5) == b"begun"
            stopping = asyncio.create_task(mesh.stop_picker())
            await mesh.until(lambda: any(line["event"] == "draining" for line in mesh.log_lines()))
            gate.set()
            assert await response.content.read() == b" done"
        await stopping
