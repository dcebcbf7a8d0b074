"""The real admin port over a real router, whose workers and prompts a test makes up: no Envoy, no engines.

    python -m tests.page.world --prefill 100 --decode 100

keeps one running, with prompts that come and go.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from extproc import admin
from extproc.config import Address, Config, Envoy, Workers
from extproc.debug import Debug
from extproc.dispatcher import Dispatcher
from extproc.errors import ApiError
from extproc.explain import Explainer
from extproc.live import Live
from extproc.models import Models, Names
from extproc.observe.logs import make_logger
from extproc.observe.metrics import Metrics
from extproc.observe.observer import Observer
from extproc.policy_config import PolicyRule, Slo
from extproc.prompt import BytesPerToken
from extproc.recent import Recent
from extproc.routing.endpoint_spec import EndpointSet, EndpointSpec
from extproc.routing.job import Aims, Job, Mode
from extproc.routing.load import Load
from extproc.routing.pool import Endpoint, Pool, Role
from extproc.routing.prefix import Chain
from extproc.routing.router import Router
from extproc.routing.settings import Routing
from extproc.routing.ticket import State, Ticket
from workers.ready import free_ports

NO_TIMES: dict[str, Any] = {"window_s": 60.0, "source": "envoy access log", "answers": 0, "ttft": None, "itl": None, "by": []}


def spec(role: str, number: int, **facts: Any) -> EndpointSpec:
    """``10.0.0.1:8100`` and so on for prefill, ``10.0.1.1:8200`` for decode."""
    net, port = (0, 8100) if role == "prefill" else (1, 8200)
    return EndpointSpec(address=f"10.0.{net}.{number + 1}:{port}", kv_tokens=400_000, max_seqs=64, **facts)


class World:
    """A pool, its router, and everything that the page reads."""

    def __init__(
        self, prefill: int = 2, decode: int = 3, *, times: dict[str, Any] | None = None, specs: EndpointSet | None = None
    ) -> None:
        pool = Pool(
            specs
            or EndpointSet(
                tuple(spec("prefill", number) for number in range(prefill)),
                tuple(spec("decode", number) for number in range(decode)),
            )
        )
        for endpoint in pool.endpoints:
            pool.set_live(endpoint, True)
            endpoint.models = {"llama-3": b"{}"}
        self.times = times if times is not None else NO_TIMES
        self.now_s = time.monotonic
        self.pool = pool
        self.router = Router(pool, Routing())
        self.metrics = Metrics()
        self.config = Config(
            workers=Workers(prefill=["10.0.0.1:8100"], decode=["10.0.1.1:8200"]),
            policies=[PolicyRule(name="interactive", slo=Slo(ttft_s=1.0, itl_s=0.045))],
            envoy=Envoy(listen="0.0.0.0:8000"),
        )
        self.dispatcher = Dispatcher(
            self.router, names=Names(Models()), metrics=self.metrics, log=make_logger("error"), longest_request_s=600.0
        )
        self.recent = Recent()
        self.state: dict[str, Any] = {
            "why": None,
            "draining": False,
            "warm_up": {"enabled": True, "pairs": prefill * decode, "pairs_warm": prefill * decode},
            "discovery": [
                {
                    "source": "file",
                    "name": "/etc/baton/workers.yaml",
                    "endpoints": len(pool.endpoints),
                    "error": None,
                    "changed_at": 0.0,
                }
            ],
            "cache_servers": {},
        }
        self.live = Live(
            self.config,
            self.dispatcher,
            self.recent,
            lambda: (self.state["why"] is None and not self.state["draining"], self.state),
            log=make_logger("error"),
            times=lambda: self.times,
        )
        self.dice = random.Random(7)
        self.asked = 0

    def __getitem__(self, address: str) -> Endpoint:
        found = self.pool.get(address)
        assert found is not None
        return found

    def prompt(
        self,
        *,
        tokens: int | None = None,
        request_id: str | None = None,
        policy: str = "interactive",
        mode: Mode = Mode.AUTO,
        **fields: Any,
    ) -> Ticket:
        """One is decided on. Raises ApiError."""
        self.asked += 1
        conversation = self.dice.randrange(400)
        tokens = tokens or self.dice.choice((300, 2_000, 6_000, 14_000)) + self.dice.randrange(200)
        job = Job(
            model=None,
            chain=Chain(array("Q", ((conversation << 20) + block for block in range(tokens // 64))), 64.0),
            tokens=tokens,
            aims=Aims(policy=policy, mode=mode, ttft_slo_s=1.0, itl_slo_s=0.045),
            arrived_s=self.now_s(),
            deadline_s=self.now_s() + 60,
            **fields,
        )
        self.recent.came()
        ticket = self.dispatcher.submit(job)
        if ticket.state is State.PLACED:
            self.dispatcher.note(ticket, request_id or f"request-{self.asked:06}")
            assert ticket.decode is not None
            if ticket.prefill is None:
                self.recent.whole()
            else:
                self.recent.handed_over(ticket.prefill.address, ticket.decode.address)
        return ticket

    def report(self, endpoint: Endpoint, **said: Any) -> None:
        """What a worker says of itself; the rest fits what it has."""
        own = endpoint.prefill.requests + endpoint.decode.requests
        usage = 0.02 + (endpoint.prefill.tokens + endpoint.decode.tokens) / 400_000 + self.dice.random() * 0.02
        itl_s = 0.018 + 0.0004 * own if Role.DECODE in endpoint.roles else None
        said = {"running": float(own), "waiting": 0.0, "kv_usage": min(1.0, usage), "itl_s": itl_s, **said}
        self.dispatcher.on_load(endpoint.address, Load(**said))

    async def traffic(self, per_s: float) -> None:
        """Prompts come and go, until cancelled."""
        open_: list[tuple[float, Ticket]] = []
        while True:
            await asyncio.sleep(self.dice.expovariate(per_s))
            now_s = self.now_s()
            for ends_s, ticket in [each for each in open_ if each[0] <= now_s]:
                open_.remove((ends_s, ticket))
                self.dispatcher.finish(ticket)
            for _, ticket in open_:
                claim = ticket.prefill_claim
                if claim is not None and claim.leg is not None and now_s - claim.since_s > claim.work_s:
                    self.dispatcher.prefilled(ticket, tokens=None, cached_tokens=None, engine_id=None)
            try:
                open_.append(
                    (
                        now_s + 2 + 8 * self.dice.random(),
                        self.prompt(mode=self.dice.choice((Mode.AUTO, Mode.DISAGGREGATE, Mode.DISAGGREGATE))),
                    )
                )
            except ApiError as error:
                self.recent.answered(error.status)
            for endpoint in self.dice.sample(self.pool.endpoints, min(8, len(self.pool.endpoints))):
                if endpoint.live:
                    self.report(endpoint)

    @asynccontextmanager
    async def served(self, port: int | None = None) -> AsyncIterator[str]:
        """The address of the admin port."""
        port = port or free_ports(1)[0]
        observer = Observer(self.config, self.metrics, make_logger("critical"))
        debug = Debug(self.dispatcher, Explainer(self.config), BytesPerToken(), observer, max_body_bytes=1 << 20)
        address = Address.parse(f"127.0.0.1:{port}")
        runner = await admin.start(address, self.metrics, lambda: (self.state["why"] is None, self.state), debug, self.live)
        history = asyncio.create_task(self.live.run())
        try:
            yield f"http://{address}"
        finally:
            history.cancel()
            await asyncio.gather(history, return_exceptions=True)
            await runner.cleanup()


async def _stay(prefill: int, decode: int, per_s: float, port: int) -> None:
    world = World(prefill, decode)
    async with world.served(port) as address:
        print(f"{address}/ is up", flush=True)
        await world.traffic(per_s)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--prefill", type=int, default=100)
    parser.add_argument("--decode", type=int, default=100)
    parser.add_argument("--per-s", type=float, default=30.0)
    parser.add_argument("--port", type=int, default=9103)
    given = parser.parse_args()
    asyncio.run(_stay(given.prefill, given.decode, given.per_s, given.port))
