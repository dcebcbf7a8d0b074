"""The proxy that guides show for prefill and decode: FastAPI in front, httpx behind. Runs in the peers' environment.

``python proxy.py PORT PREFILL,... DECODE,...``. One prefill call with ``max_tokens`` of 1, then the decode worker's answer as
it comes; workers in turn. Nothing of Baton's is imported here.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse


def make(prefill: list[str], decode: list[str]) -> FastAPI:
    """The application, for these workers (`ip:port`)."""
    prefillers, decoders = itertools.cycle(prefill), itertools.cycle(decode)
    client: httpx.AsyncClient

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        nonlocal client
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(timeout=600.0, limits=limits) as client:
            yield

    app = FastAPI(lifespan=lifespan)

    @app.get("/health")
    async def health() -> Response:
        return Response()

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = await request.json()
        first = {
            **body,
            "max_tokens": 1,
            "stream": False,
            "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
        }
        first.pop("stream_options", None)
        reply = await client.post(f"http://{next(prefillers)}/v1/chat/completions", json=first)
        reply.raise_for_status()
        body["kv_transfer_params"] = reply.json().get("kv_transfer_params") or {}
        url = f"http://{next(decoders)}/v1/chat/completions"
        if not body.get("stream"):
            answer = await client.post(url, json=body)
            return Response(answer.content, answer.status_code, media_type="application/json")

        async def relay() -> AsyncIterator[bytes]:
            headers = {"content-type": "application/json"}
            async with client.stream("POST", url, content=json.dumps(body), headers=headers) as answer:
                async for chunk in answer.aiter_bytes():
                    yield chunk

        return StreamingResponse(relay(), media_type="text/event-stream")

    return app


if __name__ == "__main__":
    uvicorn.run(
        make(sys.argv[2].split(","), sys.argv[3].split(",")),
        host="127.0.0.1",
        port=int(sys.argv[1]),
        log_level="warning",
        access_log=False,
    )
