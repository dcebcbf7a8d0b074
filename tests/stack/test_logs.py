"""Logs of the filter and of Envoy: one line a request, joined by its id, and nothing that a client would not want there."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
from aiohttp import web

from tests.stack.harness import Stack
from workers.process import Child

MARK = "s3cret"
PROMPT = b'{"model":"m","prompt":"hello","max_tokens":4}'
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e]")

ASCII_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f]")
"""Envoy's JSON escapes these; the others need a terminal that obeys them as UTF-8."""


async def ask(stack: Stack, body: bytes = PROMPT, path: str = "/v1/completions", **headers: str) -> int:
    named = {"content-type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    async with stack.http.post(path, data=body, headers=named) as response:
        await response.read()
        return response.status


async def lines(stack: Stack, request_id: str) -> list[dict[str, Any]]:
    """Of the filter, about one request, once there is one: it comes after the client has its answer."""
    for _ in range(200):
        found = [line for line in stack.log_lines() if line.get("request_id") == request_id and line["event"] == "request"]
        if found:
            return found
        await asyncio.sleep(0.02)
    return []


async def envoys(stack: Stack, request_id: str) -> dict[str, Any]:
    for _ in range(600):  # Envoy writes its log every ten seconds
        for text in stack.envoy.log.read_text().splitlines():
            if text.startswith("{") and json.loads(text).get("request_id") == request_id:
                return dict(json.loads(text))
        await asyncio.sleep(0.02)
    raise AssertionError(f"no line about {request_id} in Envoy's log")


async def test_one_id_joins_the_client_envoy_the_filter_and_both_workers(stack: Stack) -> None:
    assert await ask(stack, x_request_id="join-me.1") == 200
    prefill, (decode,) = stack.prefill[0].last, stack.decode_received
    assert decode.headers["x-request-id"] == "join-me.1"
    assert re.fullmatch(r"join-me\.1-[0-9a-f]{32}", prefill.headers["x-request-id"]), "unique, but it begins with the request's"
    (line,) = await lines(stack, "join-me.1")
    assert line["outcome"] == "handoff" and line["answer_status"] == 200 and line["path"] == "/v1/completions"
    assert (await envoys(stack, "join-me.1"))["decode"] == line["decode"]


async def test_a_request_without_an_id_gets_one_that_all_share(stack: Stack) -> None:
    async with stack.http.post("/v1/completions", data=PROMPT, headers={"content-type": "application/json"}) as response:
        given = response.headers["x-request-id"]
    assert stack.decode_received[0].headers["x-request-id"] == given
    assert stack.prefill[0].last.headers["x-request-id"].startswith(f"{given}-")
    assert len(await lines(stack, given)) == 1


async def test_nothing_that_a_client_could_hide_anywhere_is_in_a_log() -> None:
    policies = [
        {
            "name": "default",
            "mode": "disaggregate",
            "objective": "round-robin",
            "tenant_header": "x-tenant",
            "session_header": "x-session-id",
        }
    ]

    async def echoes(_: web.Request, body: bytes) -> web.StreamResponse:
        return web.Response(status=400, body=body, reason=MARK)

    async def nonsense(_: web.Request, body: bytes) -> web.StreamResponse:
        return web.Response(body=b'{"kv_transfer_params":{"remote_host":"' + MARK.encode() + b'"}}')

    async with Stack(prefill=1, decode=1, settings={"policies": policies}) as stack:
        everywhere = {
            "authorization": f"Bearer {MARK}",
            "x-api-key": MARK,
            "cookie": MARK,
            "user-agent": MARK,
            "referer": MARK,
            "x-tenant": MARK,
            "x-session-id": MARK,
            "tracestate": f"a={MARK}",
            "traceparent": MARK,
            "baggage": MARK,
            "x-forwarded-for": "192.0.2.1",
            "x-baton-mode": MARK,
            f"x-baton-{MARK}": "1",
            "x-kv-transfer": MARK,
        }
        prompt = json.dumps({"model": "m", "prompt": f"{MARK} prompt", "user": MARK, "max_tokens": 4}).encode()
        strange_model = json.dumps({"model": f"{MARK}-model", "prompt": "x"}).encode()
        long_id = "i" * 200 + MARK
        evil_id = "\u009b31m\u202eid"
        bodies = [
            prompt,
            strange_model,
            b'{"model":"m","prompt":"' + MARK.encode(),
            f'["{MARK}"]'.encode(),
            b"\xff" + MARK.encode(),
        ]
        for number, body in enumerate(bodies):
            await ask(stack, body, f"/v1/completions?api_key={MARK}", **everywhere, x_request_id=f"body-{number}")
        await ask(stack, prompt, x_request_timeout_ms=MARK, x_request_id="timeout")
        await ask(stack, prompt, x_request_id=long_id)
        await ask(stack, prompt, x_request_id=evil_id)
        await ask(stack, prompt, "/v1/embeddings", x_request_id="whole")
        await ask(stack, prompt, "/" + "p" * 300 + MARK, x_request_id="long-path")
        await ask(stack, prompt, "/v1/%1b%0a%0d%7f", x_request_id="evil-path")
        async with stack.http.post(
            "/v1/completions", data=prompt, headers={"content-type": f"text/{MARK}", "x-request-id": "type"}
        ) as response:
            assert response.status == 415
        for answer in (echoes, nonsense):
            stack.prefill[0].answer = answer
            await ask(stack, prompt, x_request_id=f"{answer.__name__}")
        assert len(await lines(stack, "nonsense")) == 1
        (cut,) = await lines(stack, "i" * 128 + "…")
        assert cut["outcome"] == "handoff"
        (path,) = await lines(stack, "long-path")
        assert path["path"] == "/" + "p" * 127 + "…"
        await envoys(stack, "nonsense")
        for log, control in ((stack.filter.log, CONTROL), (stack.envoy.log, ASCII_CONTROL)):
            text = log.read_text()
            assert MARK not in text, next(line for line in text.splitlines() if MARK in line)
            assert not control.search(text)


async def test_requests_that_went_well_are_drawn_and_all_others_have_their_line() -> None:
    async def fails(_: web.Request, __: bytes) -> web.StreamResponse:
        return web.Response(status=500)

    quiet = Stack(prefill=1, decode=1)
    quiet._tree.update(log_sample=0.0, log_slow_s=0.4)
    quiet.configure()
    async with quiet as stack:
        for number in range(5):
            assert await ask(stack, x_request_id=f"well-{number}") == 200
        assert await ask(stack, b"{", x_request_id="refused") == 400

        async def slow(_: web.Request, __: bytes) -> web.StreamResponse:
            await asyncio.sleep(0.5)
            return web.Response()

        stack.decode[0].answer = slow
        assert await ask(stack, x_request_id="slow") == 200
        stack.decode[0].answer = fails
        assert await ask(stack, x_request_id="worker-failed") == 500
        stack.prefill[0].answer = fails
        assert await ask(stack, x_request_id="failed") == 502
        for wanted in ("refused", "slow", "worker-failed", "failed"):
            assert len(await lines(stack, wanted)) == 1, wanted
        assert not [line for line in stack.log_lines() if str(line.get("request_id")).startswith("well-")]
        found = await stack.metrics()
        assert found['baton_log_lines_total{outcome="left_out"}'] == 5
        assert found['baton_log_lines_total{outcome="logged"}'] == 4


class Unread(Stack):
    """Nobody reads what its filter logs."""

    def _child(self, parts: AsyncExitStack, name: str, *argv: str) -> Child:
        if name != "filter":
            return super()._child(parts, name, *argv)
        pipe = self.directory / "stderr"
        os.mkfifo(pipe)
        parts.callback(os.close, os.open(pipe, os.O_RDWR))
        return super()._child(parts, name, "sh", "-c", 'exec "$@" 2> "$0"', str(pipe), *argv)


async def test_a_log_that_nobody_reads_holds_up_no_request_and_not_the_end() -> None:
    async with Unread(prefill=1, decode=1) as stack:
        for _ in range(250):  # at 500 bytes a line, far more than a pipe holds
            assert await ask(stack) == 200
        async with aiohttp.ClientSession() as session, session.get(f"{stack.admin}/healthz") as response:
            assert response.status == 200
        began = time.monotonic()
        stack.signal_filter(signal.SIGTERM)
        async with asyncio.timeout(20):
            while stack.filter.poll() is None:
                await asyncio.sleep(0.02)
        assert stack.filter.poll() == 0 and time.monotonic() - began < 6.0
