"""Workers that cost little: they answer as an engine would, fail now and then, and remember nothing."""

from __future__ import annotations

import asyncio
import json
import random
from collections import deque
from contextlib import suppress
from pathlib import Path

from aiohttp import web

from tests.stack.fake_worker import PARAMS_BYTES, Answer, FakeWorker

_PAGE = Path(__file__).parent.parent / "cases" / "metrics" / "vllm-0.32.txt"

_PREFILL_FAILS = 0.02
_PREFILL_IS_NONSENSE = 0.005
_DECODE_FAILS = 0.01
_DECODE_BREAKS_OFF = 0.01
_TOKENS = 12
_TOKEN_S = 0.02


class Faults:
    """Draws who fails, from a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.on = True

    def hit(self, share: float) -> bool:
        """Whether this one does."""
        return self.on and self._random.random() < share

    def between(self, low: float, high: float) -> float:
        """A number in between."""
        return self._random.uniform(low, high)


class SoakWorker(FakeWorker):
    """Its `/metrics` is the page of a real engine."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.received = deque(maxlen=16)  # type: ignore[assignment]
        self._page = _PAGE.read_bytes()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/metrics":
            return web.Response(body=self._page)
        return await super()._serve(request)


def prefilling(faults: Faults) -> Answer:
    """A prefill takes 5 to 60 ms."""
    good = b'{"id":"cmpl-1","choices":[{"index":0,"text":"x"}],"usage":{"prompt_tokens":334},"kv_transfer_params":'

    async def answer(_: web.Request, __: bytes) -> web.StreamResponse:
        await asyncio.sleep(faults.between(0.005, 0.06))
        if faults.hit(_PREFILL_FAILS):
            return web.Response(status=500, text="the engine has failed")
        params = b"null" if faults.hit(_PREFILL_IS_NONSENSE) else PARAMS_BYTES
        return web.Response(body=good + params + b"}", content_type="application/json")

    return answer


def decoding(faults: Faults) -> Answer:
    """A stream of tokens with its usage at the end."""

    async def answer(request: web.Request, body: bytes) -> web.StreamResponse:
        if b"baton-release-no-such-model" in body:
            return web.json_response({"error": {"message": "no such model"}}, status=404)
        if faults.hit(_DECODE_FAILS):
            return web.Response(status=500, text="the engine has failed")
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        with suppress(ConnectionResetError):  # the client has left
            await stream(request, response)
        return response

    async def stream(request: web.Request, response: web.StreamResponse) -> None:
        await response.prepare(request)
        stops_at = int(faults.between(1, _TOKENS)) if faults.hit(_DECODE_BREAKS_OFF) else _TOKENS
        for number in range(stops_at):
            await response.write(f'data: {{"choices":[{{"index":0,"text":"t{number}"}}]}}\n\n'.encode())
            await asyncio.sleep(_TOKEN_S)
        if stops_at < _TOKENS and request.transport is not None:
            request.transport.close()
            return
        usage = {"prompt_tokens": 334, "completion_tokens": _TOKENS, "total_tokens": 334 + _TOKENS}
        await response.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode())

    return answer
