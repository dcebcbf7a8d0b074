"""The command: one process around the workers that the options mean."""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import AsyncExitStack

import msgspec
import uvloop
from aiohttp import web

from workers.sim.api_control import control_app
from workers.sim.local import running
from workers.sim.options import SimOptions, worker_options

__all__ = ["SimOptions", "run", "serve"]


async def serve(options: SimOptions) -> None:
    """Run until SIGTERM or SIGINT. Says on standard output, in one JSON line, when it is ready."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    async with AsyncExitStack() as parts:
        workers = await parts.enter_async_context(running(options))
        if options.control_port is not None:
            runner = web.AppRunner(control_app(workers), access_log=None, shutdown_timeout=0.1)
            await runner.setup()
            parts.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, options.host, options.control_port).start()
        ready = {"ready": [{"url": w.url, "engine_id": w.engine.engine_id} for w in workers]}
        sys.stdout.write(msgspec.json.encode(ready).decode() + "\n")
        sys.stdout.flush()
        await ended.wait()


def run(options: SimOptions) -> int:
    """The process; its exit status."""
    try:
        worker_options(options)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    try:
        uvloop.run(serve(options))
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0
