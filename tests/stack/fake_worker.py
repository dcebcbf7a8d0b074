"""A worker as small as one can be: it records what it receives, byte for byte, and answers what a test tells it to."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from aiohttp import web

Answer = Callable[[web.Request, bytes], Awaitable[web.StreamResponse]]

ENGINE_ID = "0f9d8c7b-engine"
PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[7, 8, 9]],
    "remote_engine_id": ENGINE_ID,
    "remote_request_id": "cmpl-abc-0-1234abcd",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
    "remote_num_tokens": 334,
    "remote_blocks_expiry_time": None,
    "a_key_of_a_later_release": {"kept": [1, 2.50]},
}
# Spacing that no encoder of ours would make: only a relay byte for byte keeps it.
PARAMS_BYTES = json.dumps(PARAMS, separators=(" , ", " :  ")).encode()


NAME = web.AppKey("name", str)


@dataclass
class Received:
    """One request as it came in."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    gone_at: float | None = None
    """When the client's connection closed under an answer in the making (time.monotonic)."""

    @property
    def json(self) -> dict[str, object]:
        return json.loads(self.body)


async def prefill_answer(_: web.Request, __: bytes) -> web.StreamResponse:
    body = b'{"id":"cmpl-1","choices":[{"index":0,"text":"x"}],"kv_transfer_params":' + PARAMS_BYTES + b"}"
    return web.Response(body=body, content_type="application/json")


def when(gate: asyncio.Event, then: Answer = prefill_answer) -> Answer:
    """Answer as ``then`` does, but not before ``gate`` is set."""

    async def answer(request: web.Request, body: bytes) -> web.StreamResponse:
        await gate.wait()
        return await then(request, body)

    return answer


def begun_until(gate: asyncio.Event) -> Answer:
    """Answer ``begun``, and ``done`` when ``gate`` is set."""

    async def answer(request: web.Request, _: bytes) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"begun ")
        await gate.wait()
        await response.write(b"done")
        return response

    return answer


async def decode_answer(request: web.Request, body: bytes) -> web.StreamResponse:
    if b'"stream":true' not in body.replace(b" ", b""):
        return web.json_response({"served_by": request.app[NAME]})
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    for word in ("one", "two", "three"):
        await response.write(f'data: {{"text":"{word}"}}\n\n'.encode())
        await asyncio.sleep(0.01)
    await response.write(b"data: [DONE]\n\n")
    return response


@dataclass
class FakeWorker:
    """Use as an async context manager; ``received`` lists what came, without the filter's probes and scrapes."""

    name: str
    port: int
    answer: Answer
    received: list[Received] = field(default_factory=list)
    healthy: bool = True
    models: tuple[str, ...] = ("m",)
    tls: ssl.SSLContext | None = None
    """HTTPS, where it is given."""
    named: list[str | None] = field(default_factory=list)
    """With TLS: the common name in the certificate of each client that asked anything, probes included."""

    def __post_init__(self) -> None:
        self._default = self.answer

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def last(self) -> Received:
        return self.received[-1]

    def reset(self) -> None:
        self.received.clear()
        self.answer = self._default
        self.healthy = True

    async def __aenter__(self) -> FakeWorker:
        app = web.Application(client_max_size=1 << 30)
        app[NAME] = self.name
        app.router.add_route("*", "/{tail:.*}", self._serve)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.5)
        await self._runner.setup()
        # As many may wait to be accepted as uvicorn, the engines' server, lets wait.
        await web.TCPSite(self._runner, "127.0.0.1", self.port, backlog=2048, ssl_context=self.tls).start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        if self.tls is not None:
            self.named.append(_name_of(request))
        if request.path == "/health" and "x-client" not in request.headers:
            return web.Response(status=200 if self.healthy else 503)
        if request.path == "/metrics" and "x-client" not in request.headers:
            return web.Response(text="vllm:num_requests_running 0\n")
        if request.path == "/v1/models":
            cards = [{"id": name, "object": "model", "owned_by": self.name} for name in self.models]
            return web.json_response({"object": "list", "data": cards})
        body = await request.read()
        record = Received(request.method, request.path_qs, {k.lower(): v for k, v in request.headers.items()}, body)
        self.received.append(record)
        try:
            return await self.answer(request, body)
        except asyncio.CancelledError:
            record.gone_at = time.monotonic()
            raise


def _name_of(request: web.Request) -> str | None:
    shown = None if request.transport is None else request.transport.get_extra_info("peercert")
    return dict(pair for part in shown["subject"] for pair in part).get("commonName") if shown else None
