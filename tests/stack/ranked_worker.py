"""A worker with several data-parallel engines behind one address, as `vllm serve --data-parallel-size` is one: in front of
simulated engines of one rank each.

What it does is what vLLM 0.32 does (entrypoints/generate/base/serving.py, v1/engine/input_processor.py and core_client.py): a
request that names a rank goes there, one that names none to the engine with the fewest requests, and a rank that there is not
is a 400.
"""

from __future__ import annotations

import json
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
from aiohttp import web

from workers.ready import free_ports
from workers.sim.options import SimOptions, worker_options
from workers.sim.worker import Worker

RANK = "x-data-parallel-rank"


@dataclass
class Leg:
    """One request for an answer."""

    named: str | None
    """The rank, as the header says it."""
    engine: int | None
    """Who answers it; None: nobody."""
    cached_tokens: int | None = None
    """As the engine's usage says it."""


class RankedWorker:
    """Use as an async context manager."""

    def __init__(self, engines: int, options: SimOptions, first: int = 0) -> None:
        """``first``: the engine that is taken where all have the same to do; then the one after it."""
        self.port, *ports = free_ports(1 + 3 * engines)
        self.address = f"127.0.0.1:{self.port}"
        self.engines: list[Worker] = []
        for rank in range(engines):
            port, events, replay = ports[3 * rank : 3 * rank + 3]
            (made,) = worker_options(replace(options, port=port, kv_events_port=events, kv_events_replay_port=replay))
            self.engines.append(Worker(replace(made, engine=replace(made.engine, engine_id=f"node-{self.port}_dp{rank}"))))
        self.legs: list[Leg] = []
        self.fails = False
        """It answers 500."""
        self._next = first
        self._in_flight: Counter[int] = Counter()

    async def __aenter__(self) -> RankedWorker:
        async with AsyncExitStack() as parts:
            for engine in self.engines:
                await parts.enter_async_context(engine)
            self._http = await parts.enter_async_context(aiohttp.ClientSession())
            app = web.Application(client_max_size=1 << 26)
            app.router.add_get("/kv_event_sources", self._sources)
            app.router.add_get("/metrics", self._metrics)
            app.router.add_route("*", "/{path:.*}", self._pass_on)
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
            await runner.setup()
            parts.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, "127.0.0.1", self.port).start()
            self._parts = parts.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._parts.aclose()

    @property
    def violations(self) -> int:
        """Of the engines' contract, by whoever called them."""
        return sum(engine.violations.report()["count"] for engine in self.engines)

    async def _sources(self, _: web.Request) -> web.Response:
        found = {}
        for rank, engine in enumerate(self.engines):
            async with self._http.get(f"{engine.url}/kv_event_sources") as response:
                found[str(rank)] = (await response.json())["0"]
        return web.json_response(found)

    async def _metrics(self, _: web.Request) -> web.Response:
        pages = []
        for rank, engine in enumerate(self.engines):
            async with self._http.get(f"{engine.url}/metrics") as response:
                pages.append((await response.text()).replace('engine="0"', f'engine="{rank}"'))
        return web.Response(text="".join(pages), content_type="text/plain")

    async def _pass_on(self, request: web.Request) -> web.Response:
        body = await request.read()
        if request.path not in ("/v1/chat/completions", "/v1/completions"):
            return await self._asked(request, body, 0)
        named = request.headers.get(RANK)
        leg = Leg(named, None)
        self.legs.append(leg)
        if self.fails:
            return web.Response(status=500)
        if named is not None and not 0 <= int(named) < len(self.engines):
            return web.Response(status=400, text=f"data_parallel_rank {named} is out of range [0, {len(self.engines)}).")
        leg.engine = self._balance() if named is None else int(named)
        self._in_flight[leg.engine] += 1
        try:
            answer = await self._asked(request, body, leg.engine)
        finally:
            self._in_flight[leg.engine] -= 1
        if answer.status == 200 and answer.body is not None:
            leg.cached_tokens = _cached(json.loads(bytes(answer.body)))  # type: ignore[arg-type]
        return answer

    def _balance(self) -> int:
        count = len(self.engines)
        chosen = min(((self._next + more) % count for more in range(count)), key=lambda rank: self._in_flight[rank])
        self._next = (self._next + 1) % count
        return chosen

    async def _asked(self, request: web.Request, body: bytes, rank: int) -> web.Response:
        own = (RANK, "host", "content-length")
        headers = {name: value for name, value in request.headers.items() if name.lower() not in own}
        url = self.engines[rank].url + request.path_qs
        async with self._http.request(request.method, url, data=body or None, headers=headers) as response:
            found, kind = await response.read(), response.headers.get("content-type", "")
            return web.Response(status=response.status, body=found, headers={"content-type": kind})


def _cached(answer: dict[str, Any]) -> int | None:
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    return details.get("cached_tokens")
