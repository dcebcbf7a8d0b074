"""``/sim/*``: what went wrong, what is held, and the failure switches. On each worker's port and on the control port."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from workers.sim.faults import Fault
from workers.sim.hashing import HASH_BYTES

if TYPE_CHECKING:
    from workers.sim.worker import Worker

_encode = msgspec.json.Encoder().encode
_fault = msgspec.json.Decoder(Fault)


def _answer(value: object, status: int = 200) -> web.Response:
    return web.Response(body=_encode(value), status=status, content_type="application/json")


def add_routes(app: web.Application, worker: Worker, prefix: str) -> None:
    """The routes of one worker below ``prefix``."""

    async def violations(_: web.Request) -> web.Response:
        return _answer(worker.violations.report())

    async def state(_: web.Request) -> web.Response:
        return _answer(worker.state())

    async def reset(_: web.Request) -> web.Response:
        await worker.reset()
        return _answer({})

    async def faults(_: web.Request) -> web.Response:
        return _answer(worker.faults.active())

    async def inject(request: web.Request) -> web.Response:
        try:
            fault = _fault.decode(await request.read())
        except msgspec.DecodeError as error:
            return _answer({"error": str(error)}, 400)
        worker.inject(fault)
        return _answer(fault)

    async def clear(_: web.Request) -> web.Response:
        await worker.clear_faults()
        return _answer({})

    async def held(request: web.Request) -> web.Response:
        """How many leading blocks of a prompt are in the prefix cache, and how many behind them in the host's memory; the body
        is their hashes, one after the other."""
        body = await request.read()
        hashes = [body[at : at + HASH_BYTES] for at in range(0, len(body), HASH_BYTES)]
        cached, host = len(worker.engine.pool.match(hashes)), worker.engine.host
        return _answer({"blocks": cached, "host_blocks": 0 if host is None else host.match(hashes[cached:])})

    app.router.add_post(f"{prefix}/held", held)
    app.router.add_get(f"{prefix}/violations", violations)
    app.router.add_get(f"{prefix}/state", state)
    app.router.add_post(f"{prefix}/reset", reset)
    app.router.add_get(f"{prefix}/faults", faults)
    app.router.add_post(f"{prefix}/faults", inject)
    app.router.add_delete(f"{prefix}/faults", clear)


def control_app(workers: Sequence[Worker]) -> web.Application:
    """All workers of a process on one port, which no fault closes: ``/workers/{index}/sim/...`` and ``/sim/...`` for all."""
    app = web.Application()
    for index, worker in enumerate(workers):
        add_routes(app, worker, f"/workers/{index}/sim")

    async def states(_: web.Request) -> web.Response:
        return _answer([worker.state() for worker in workers])

    async def violations(_: web.Request) -> web.Response:
        return _answer({worker.options.name: worker.violations.report() for worker in workers})

    async def reset(_: web.Request) -> web.Response:
        for worker in workers:
            await worker.reset()
        return _answer({})

    async def clear(_: web.Request) -> web.Response:
        for worker in workers:
            await worker.clear_faults()
        return _answer({})

    app.router.add_get("/sim/state", states)
    app.router.add_get("/sim/violations", violations)
    app.router.add_post("/sim/reset", reset)
    app.router.add_delete("/sim/faults", clear)
    return app
