"""The admin port: ``/metrics`` for Prometheus, ``/healthz`` for whoever asks whether requests can be served, ``/debug/…`` for
people who ask why a decision came out as it did, and the live page at ``/`` with its data at ``/live``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from extproc import pages
from extproc.admin_guard import guard
from extproc.admin_site import AdminSite
from extproc.config import Address
from extproc.debug import Debug
from extproc.live import Live
from extproc.observe.metrics import Metrics
from extproc.processes.pages import SiblingPages


async def start(
    address: Address,
    metrics: Metrics,
    status: Callable[[], tuple[bool, dict[str, object]]],
    debug: Debug,
    live: Live,
    *,
    hosts: Sequence[str] = (),
    process: str | None = None,
    siblings: SiblingPages | None = None,
) -> web.AppRunner:
    """Serve until the runner's ``cleanup()``. ``status`` says (ready, what to show). Raises OSError if the port is busy.

    ``hosts``: names by which it may be called, see :mod:`extproc.admin_guard`. ``process``: which of several this is, as a
    label of its metrics. ``siblings``: the others are shown here too.
    """

    async def show_metrics(_: web.Request) -> web.Response:
        page = await metrics.render(process)
        if siblings is not None:
            page = await siblings.metrics(page)
        return web.Response(body=page, headers={"content-type": CONTENT_TYPE_LATEST})

    async def show_health(_: web.Request) -> web.Response:
        ready, details = status()
        if siblings is not None:
            ready, details = await siblings.health(ready, details)
        return web.json_response({"ready": ready, **details}, status=200 if ready else 503)

    app = web.Application(client_max_size=debug.max_bytes, middlewares=[guard(hosts)])
    app.add_routes([web.get("/metrics", show_metrics), web.get("/healthz", show_health), *debug.routes(), *pages.routes(live)])
    if siblings is not None:
        app.add_routes(siblings.routes())
    app.on_response_prepare.append(pages.secure)
    site = AdminSite()
    app.on_shutdown.append(site.close)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    assert runner.server is not None
    await site.open(runner.server, address)
    return runner
