"""When a worker is live: what its health check says, and that others have heard of it."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from extproc.config import Health
from extproc.observe.logs import make_logger
from extproc.observe.probe import Prober
from extproc.routing.endpoint_spec import EndpointSet, EndpointSpec
from extproc.routing.pool import Endpoint, Pool
from workers.ready import free_ports

SETTLE_S = 0.4


@asynccontextmanager
async def probed(
    pool: Pool, settle_s: float, *addresses: str, models: bytes = b"{}"
) -> AsyncIterator[tuple[Prober, dict[str, float]]]:
    """Workers that are well, whether or not the pool has them, and when each came to be live, by the clock of the loop."""

    async def well(_: web.Request) -> web.Response:
        return web.Response()

    async def listed(_: web.Request) -> web.Response:
        return web.Response(body=models)

    app = web.Application()
    app.router.add_get("/health", well)
    app.router.add_get("/v1/models", listed)
    runner = web.AppRunner(app)
    await runner.setup()
    for address in addresses:
        await web.TCPSite(runner, "127.0.0.1", int(address.rpartition(":")[2])).start()
    loop = asyncio.get_running_loop()
    live_at_s: dict[str, float] = {}

    def on_change(endpoint: Endpoint) -> None:
        live_at_s[endpoint.address] = loop.time()

    log = make_logger(stream=io.StringIO())
    prober = Prober(pool, Health(interval_s=0.05), log, on_change, own_headers={}, settle_s=settle_s)
    task = asyncio.create_task(prober.run())
    try:
        yield prober, live_at_s
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await runner.cleanup()


async def until_live(live_at_s: dict[str, float], address: str) -> None:
    async with asyncio.timeout(10):
        while address not in live_at_s:
            await asyncio.sleep(0.005)


def pool_of(*addresses: str) -> EndpointSet:
    return EndpointSet(prefill=tuple(EndpointSpec(address=each) for each in addresses))


async def test_a_worker_that_comes_later_is_live_only_when_others_have_had_time_to_hear_of_it() -> None:
    first, later = (f"127.0.0.1:{port}" for port in free_ports(2))
    pool = Pool(pool_of(first))
    async with probed(pool, SETTLE_S, first, later) as (prober, live_at_s):
        await until_live(live_at_s, first)
        prober.serving()
        came_at_s = asyncio.get_running_loop().time()
        pool.replace(pool_of(first, later))
        prober.sync()
        await until_live(live_at_s, later)
        assert live_at_s[later] - came_at_s >= SETTLE_S


async def test_nobody_waits_for_workers_that_are_found_before_there_are_requests() -> None:
    """The sources of workers are asked when the probing has begun: the first of them come to an empty pool, one by one."""
    first, second = (f"127.0.0.1:{port}" for port in free_ports(2))
    pool = Pool(EndpointSet())
    async with probed(pool, 3600.0, first, second) as (prober, live_at_s):
        await asyncio.sleep(0.01)
        for found in ((first,), (first, second)):
            pool.replace(pool_of(*found))
            prober.sync()
            await until_live(live_at_s, found[-1])


async def test_a_worker_that_lists_its_models_in_ten_thousand_brackets_says_nothing_and_ends_nothing() -> None:
    one, other = (f"127.0.0.1:{port}" for port in free_ports(2))
    pool = Pool(pool_of(one, other))
    async with probed(pool, 0.0, one, other, models=b'{"data": [' + b"[" * 10_000 + b"]" * 10_000 + b"]}") as (_, live_at_s):
        await until_live(live_at_s, one)
        await until_live(live_at_s, other)
        assert [each.models for each in pool.endpoints] == [None, None]


async def test_a_worker_that_is_gone_before_it_was_looked_at_is_not_remembered() -> None:
    pool = Pool(EndpointSet())
    prober = Prober(pool, Health(), make_logger(stream=io.StringIO()), lambda _: None, own_headers={}, settle_s=SETTLE_S)
    for number in range(10):
        pool.replace(pool_of(f"10.0.0.{number}:80"))
        prober.sync()
        pool.replace(EndpointSet())
        pool.sweep()
        prober.sync()
    assert not prober._waits_s
