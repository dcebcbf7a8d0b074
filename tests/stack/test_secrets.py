"""A run with everything in it, and secrets and prompts planted in it: none of them is in any log, page, metric or span."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from tests.certificates import Authority
from tests.stack.collector import Collector
from tests.stack.fake_worker import prefill_answer
from tests.stack.harness import Stack
from tests.stack.raw_http import http1
from workers.ready import free_ports

NAME = "workers.baton.test"
PLANTED = {
    "client_bearer": "planted-bearer-5f0c81",
    "client_x_api_key": "planted-x-api-key-9d2e44",
    "client_cookie": "planted-cookie-77ab01",
    "query": "planted-query-key-31c9d7",
    "workers_key": "planted-workers-key-c0ffee",
    "collector_key": "planted-collector-key-0badf0",
    "prompt": "planted-prompt-the-patient-is-called",
    "chat": "planted-chat-my-password-is",
    "answer": "planted-answer-your-balance-is",
    "kv_params": "planted-kv-params-of-a-client",
    "user": "planted-user-id-4242",
    "malformed": "planted-in-malformed-json",
}


async def test_nothing_that_was_planted_is_shown(tmp_path: Path) -> None:
    """Handoffs, whole requests, failures of each kind, errors of clients, questions to the admin port; logs at debug."""
    key, headers_file = tmp_path / "workers.key", tmp_path / "collector.headers"
    key.write_text(PLANTED["workers_key"])
    headers_file.write_text(f"authorization: {PLANTED['collector_key']}\n")
    authority = Authority(tmp_path / "tls")
    worker, caller = authority.issue("worker", [NAME]), authority.issue("baton")
    tls = {
        "ca_file": str(authority.ca),
        "server_name": NAME,
        "cert_file": str(caller.cert),
        "key_file": str(caller.key),
    }
    async with Collector(*free_ports(2)) as collector:
        stack = Stack(
            settings={
                "workers": {"api_key_file": str(key), "tls": tls},
                "log_level": "debug",
                "tracing": {
                    "endpoint": collector.http_endpoint,
                    "protocol": "http",
                    "envoy": False,
                    "headers_file": str(headers_file),
                    "interval_s": 0.05,
                },
                "observe": {"sample": 1},
                "envoy": {"secrets_dir": str(tmp_path / "secrets")},
                "limits": {"max_body_bytes": 100_000},
            }
        )
        for each in (*stack.prefill, *stack.decode):
            each.tls = worker.server(clients=authority.ca)
        async with stack:
            await everything(stack)
            await collector.until(8)
            shown = dict(await pages(stack))
            shown["spans"] = repr(collector.spans)
    assert any(line for line in shown["filter.log"].splitlines() if '"event":"request"' in line.replace(" ", ""))
    for where in ("envoy.log", "spans"):
        assert "/v1/completions" in shown[where], "what is no secret is shown"
    assert stack.decode[0].address in shown["filter /debug/decisions"]
    secrets = {**PLANTED, "worker's private key": caller.key.read_text().splitlines()[1]}
    found = [(what, where) for what, text in secrets.items() for where, page in shown.items() if text in page]
    assert found == []


async def everything(stack: Stack) -> None:
    """Each way that a request can go."""
    headers = {
        "authorization": f"Bearer {PLANTED['client_bearer']}",
        "x-api-key": PLANTED["client_x_api_key"],
        "cookie": f"session={PLANTED['client_cookie']}",
    }
    completion = {"model": "m", "prompt": f"{PLANTED['prompt']} " * 20, "user": PLANTED["user"], "max_tokens": 3}
    chat = {"model": "m", "messages": [{"role": "user", "content": f"{PLANTED['chat']} " * 20}], "max_tokens": 3}
    query = f"?api_key={PLANTED['query']}"

    async def post(path: str, body: Any) -> int:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with stack.http.post(
            path + query, data=data, headers={**headers, "content-type": "application/json"}
        ) as response:
            await response.read()
            return response.status

    async def broken(_: web.Request, __: bytes) -> web.StreamResponse:
        return web.Response(status=500, text=PLANTED["answer"])

    async def refusing(_: web.Request, body: bytes) -> web.StreamResponse:
        return web.json_response({"error": {"message": f"bad prompt: {body[:300]!r}"}}, status=400)

    async def empty(_: web.Request, __: bytes) -> web.StreamResponse:
        return web.json_response({"choices": [{"text": PLANTED["answer"]}], "kv_transfer_params": PLANTED["answer"]})

    async def saying(_: web.Request, __: bytes) -> web.StreamResponse:
        return web.Response(text=f'data: {{"text":"{PLANTED["answer"]}"}}\n\n', content_type="text/event-stream")

    stack.decode[0].answer = stack.decode[1].answer = saying
    assert await post("/v1/completions", completion) == 200
    assert await post("/v1/completions", {**completion, "stream": True}) == 200
    assert await post("/v1/chat/completions", chat) == 200
    assert await post("/v1/completions", {**completion, "kv_transfer_params": {"x": PLANTED["kv_params"]}}) == 200
    assert await post("/v1/embeddings", {"model": "m", "input": PLANTED["prompt"]}) == 200
    for answer, wanted in ((broken, 502), (refusing, 400), (empty, 502)):
        stack.prefill[0].answer = answer
        assert await post("/v1/completions", completion) == wanted
    stack.prefill[0].answer = prefill_answer
    for worker in stack.decode:
        worker.answer = broken
    assert await post("/v1/completions", completion) == 500
    for body in (
        f'{{"prompt": "{PLANTED["malformed"]}'.encode(),
        f'["{PLANTED["malformed"]}"]'.encode(),
        json.dumps({**completion, "n": PLANTED["malformed"], "max_tokens": PLANTED["malformed"]}).encode(),
        json.dumps({**completion, "model": PLANTED["malformed"]}).encode(),
        b'{"prompt": "' + PLANTED["malformed"].encode() + b'", "prompt": \xff}',
        json.dumps({**completion, "prompt": PLANTED["prompt"] * 5000}).encode(),
    ):
        await post("/v1/completions", body)
    port = int(stack.base.rpartition(":")[2])
    await http1(port, f"POST /v1/completions{query} HTTP/1.1\r\nauthorization: {PLANTED['client_bearer']}\r\n\r\n".encode())
    await http1(port, f"GET /{query} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n: {PLANTED['client_bearer']}\r\n\r\n".encode())


async def pages(stack: Stack) -> list[tuple[str, str]]:
    """Whatever the filter and Envoy show, and their logs."""
    found = []
    question = {"path": "/v1/completions", "headers": {}, "body": {"model": "m", "prompt": PLANTED["prompt"]}}
    async with aiohttp.ClientSession() as session:
        for path in ("/metrics", "/healthz", "/live", "/debug/decisions", "/debug/times", "/debug/snapshot?index=1", "/"):
            async with session.get(stack.admin + path) as response:
                assert response.status == 200, path
                found.append((f"filter {path}", await response.text()))
        async with session.post(f"{stack.admin}/debug/explain", json=question) as response:
            assert response.status == 200
            found.append(("filter /debug/explain", await response.text()))
        for path in ("/stats", "/stats/prometheus", "/clusters", "/config_dump?include_eds", "/certs", "/listeners"):
            async with session.get(stack.envoy_admin + path) as response:
                found.append((f"envoy {path}", await response.text()))
    async with asyncio.timeout(10):  # logs are written beside what they tell of
        while stack.filter.log.read_text().count('"request"') < 15:
            await asyncio.sleep(0.05)
    found += [(log.name, log.read_text()) for log in stack.directory.glob("*.log")]
    return found
