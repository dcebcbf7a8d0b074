"""The connectors beside NIXL pull: what both legs receive, and when."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from tests.stack.fake_worker import FakeWorker, when
from tests.stack.harness import Stack
from tests.stack.test_errors import PROMPT, answering, error_of
from tests.stack.test_legs import post
from tests.stack.test_streams import connect, hang, request_bytes, until


def with_connector(connector: str, **more: Any) -> Stack:
    stack = Stack(decode=1, settings={"handoff": {"connector": "llmd_sidecar"}})
    peers = {
        "nixl_push": {"nixl_push": {stack.prefill[0].address: {"engine_id": "e1", "host": "127.0.0.1", "port": 5601}}},
        "lmcache": {"lmcache": {stack.decode[0].address: {"host": "127.0.0.1", "init_ports": [7300], "alloc_ports": [7400]}}},
        "llmd_sidecar": {},
    }[connector]
    stack.configure(handoff={"connector": connector, **peers}, **more)
    return stack


async def test_the_sidecar_gets_the_prefill_workers_address_and_the_clients_body() -> None:
    async with with_connector("llmd_sidecar") as stack:
        status, _, _ = await post(stack, "/v1/completions", PROMPT, **{"x-prefiller-host-port": "10.6.6.6:80"})
        assert status == 200
        received = stack.decode[0].last
        assert received.body == PROMPT
        assert received.headers["x-prefiller-host-port"] == stack.prefill[0].address
        assert received.headers["x-kv-transfer"] == f'llmd-sidecar;prefill="{stack.prefill[0].address}"'
        assert stack.prefill[0].received == []


async def test_a_prefill_that_the_sidecar_makes_counts_until_the_answer_begins() -> None:
    async with with_connector("llmd_sidecar") as stack:
        begun, over = asyncio.Event(), asyncio.Event()

        async def answer(request: web.Request, _: bytes) -> web.StreamResponse:
            await begun.wait()
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            await over.wait()
            return response

        async def in_flight(role: str, worker: FakeWorker) -> float:
            return (await stack.metrics())[f'baton_endpoint_in_flight{{endpoint="{worker.address}",role="{role}"}}']

        stack.decode[0].answer = answer
        request = asyncio.create_task(post(stack, "/v1/completions", PROMPT))
        await until(lambda: bool(stack.decode[0].received))
        assert await in_flight("prefill", stack.prefill[0]) == 1
        begun.set()
        async with asyncio.timeout(20):
            while await in_flight("prefill", stack.prefill[0]) != 0:
                await asyncio.sleep(0.02)
        assert await in_flight("decode", stack.decode[0]) == 1
        over.set()
        assert (await request)[0] == 200


async def test_lmcache_prefills_with_the_receiver_and_decodes_the_clients_body() -> None:
    async with with_connector("lmcache") as stack:
        stack.prefill[0].answer = answering(200, b'{"id":"x","kv_transfer_params":null}')
        status, _, _ = await post(stack, "/v1/completions", PROMPT)
        assert status == 200
        sent = stack.prefill[0].last
        assert sent.json["max_tokens"] == 1 and sent.json["stream"] is False
        assert sent.json["kv_transfer_params"] == {
            "disagg_spec": {
                "req_id": sent.headers["x-request-id"],
                "receiver_host": "127.0.0.1",
                "receiver_init_port": [7300],
                "receiver_alloc_port": [7400],
            }
        }
        assert stack.decode[0].last.body == PROMPT
        assert stack.decode[0].last.headers["x-kv-transfer"].startswith("lmcache;prefill=")


async def test_push_sends_both_legs_at_once_under_one_id() -> None:
    async with with_connector("nixl_push") as stack:
        prefill_gate, decode_gate = asyncio.Event(), asyncio.Event()
        stack.prefill[0].answer, stack.decode[0].answer = when(prefill_gate), when(decode_gate, answering(200))
        asked = asyncio.create_task(post(stack, "/v1/completions", PROMPT, **{"x-request-id": "the-clients"}))
        await until(lambda: stack.prefill[0].received and stack.decode[0].received)
        prefill, decode = stack.prefill[0].last, stack.decode[0].last
        assert prefill.headers["x-request-id"] == decode.headers["x-request-id"] != "the-clients"
        params = decode.json["kv_transfer_params"]
        assert isinstance(params, dict)
        assert params["remote_engine_id"] == "e1" and params["remote_port"] == 5601
        assert params["remote_request_id"] == decode.headers["x-request-id"]
        prefill_gate.set()
        await asyncio.sleep(0.1)
        decode_gate.set()
        assert (await asked)[0] == 200
        async with asyncio.timeout(20):  # the filter hears of the end after the client does
            while any(value for name, value in (await stack.metrics()).items() if "endpoint_in_flight" in name):
                await asyncio.sleep(0.02)


async def test_push_does_not_let_a_decode_outlive_the_failure_of_its_prefill() -> None:
    async with with_connector("nixl_push") as stack:
        stack.prefill[0].answer, stack.decode[0].answer = answering(500), hang
        status, answer, _ = await asyncio.wait_for(post(stack, "/v1/completions", PROMPT), 20)
        assert status == 502 and error_of(answer)["code"] == "prefill_failed"
        await until(lambda: stack.decode[0].last.gone_at is not None)


async def test_push_cancels_the_prefill_of_a_client_that_leaves() -> None:
    async with with_connector("nixl_push") as stack:
        stack.prefill[0].answer, stack.decode[0].answer = hang, hang
        _, writer = await connect(stack)
        writer.write(request_bytes(PROMPT))
        await until(lambda: stack.prefill[0].received and stack.decode[0].received)
        writer.close()
        await until(lambda: stack.prefill[0].last.gone_at is not None and stack.decode[0].last.gone_at is not None)


async def test_what_a_connector_cannot_hand_over_goes_whole() -> None:
    async with with_connector("nixl_push") as stack:
        status, _, _ = await post(stack, "/v1/responses", b'{"model":"m","input":"x"}')
        assert status == 200
        assert stack.prefill[0].received == []
        assert stack.decode[0].last.body == b'{"model":"m","input":"x"}'
        assert (await stack.metrics())['baton_whole_requests_total{reason="connector"}'] == 1


@pytest.mark.parametrize("connector", ["lmcache", "llmd_sidecar"])
async def test_a_clients_transfer_keys_are_removed_with_every_connector(connector: str) -> None:
    async with with_connector(connector) as stack:
        sent = b'{"model":"m","prompt":"a","kv_transfer_params":{"do_remote_prefill":true}}'
        assert (await post(stack, "/v1/completions", sent))[0] == 200
        assert stack.decode[0].last.body == b'{"model":"m","prompt":"a"}'
