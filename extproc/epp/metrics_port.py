"""``/metrics`` at a port of its own, for a Prometheus that must not reach the rest of the admin port."""

from __future__ import annotations

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from extproc.config import Address
from extproc.observe.metrics import Metrics


async def start(address: Address, metrics: Metrics) -> web.AppRunner:
    """Serve until the runner's ``cleanup()``. Raises OSError if the port is busy."""

    async def show(_: web.Request) -> web.Response:
        return web.Response(body=await metrics.render(), headers={"content-type": CONTENT_TYPE_LATEST})

    app = web.Application(client_max_size=1)
    app.add_routes([web.get("/metrics", show)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = (
            web.UnixSite(runner, address.path) if address.path else web.TCPSite(runner, address.host.strip("[]"), address.port)
        )
        await site.start()
    except OSError as error:
        await runner.cleanup()
        raise OSError(f"epp.metrics_listen: {error}") from error
    return runner
