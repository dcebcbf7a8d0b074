"""When a worker is live: what its health check says, and that others have heard of it."""

from __future__ import annotations

import asyncio
import io

from aiohttp import web

from extproc.config import Health
from extproc.observe.logs import make_logger
from extproc.observe.probe import Prober
from extproc.routing.endpoint_spec import EndpointSet, EndpointSpec
from extproc.routing.pool import Endpoint, Pool
from workers.ready import free_ports

SETTLE_S = 0.4


async def test_a_worker_that_comes_later_is_live_only_when_others_have_had_time_to_hear_of_it() -> None:
    async def well(_: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_get("/health", well)
    runner = web.AppRunner(app)
    await runner.setup()
    first, later = (f"127.0.0.1:{port}" for port in free_ports(2))
    for address in (first, later):
        await web.TCPSite(runner, "127.0.0.1", int(address.rpartition(":")[2])).start()
    loop = asyncio.get_running_loop()
    since_s: dict[str, float] = {}
    began_s = loop.time()

    def on_change(endpoint: Endpoint) -> None:
        since_s[endpoint.address] = loop.time() - began_s

    pool = Pool(EndpointSet(prefill=(EndpointSpec(address=first),)))
    log = make_logger(stream=io.StringIO())
    prober = Prober(pool, Health(interval_s=0.05), log, on_change, own_headers={}, settle_s=SETTLE_S)
    task = asyncio.create_task(prober.run())
    try:
        async with asyncio.timeout(10):
            while first not in since_s:
                await asyncio.sleep(0.005)
        began_s = loop.time()
        pool.replace(EndpointSet(prefill=(EndpointSpec(address=first), EndpointSpec(address=later))))
        prober.sync()
        async with asyncio.timeout(10):
            while later not in since_s:
                await asyncio.sleep(0.005)
        assert since_s[later] >= SETTLE_S
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await runner.cleanup()
