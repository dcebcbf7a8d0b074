"""However many names clients and workers come up with, the filter's metrics have a bounded number of series."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from prometheus_client import generate_latest

from extproc import wire
from extproc.attempts import Prefiller
from extproc.config import Config
from extproc.dispatcher import Dispatcher, live_decode_worker
from extproc.filter import Filter
from extproc.fleet import Fleet
from extproc.handoff.choose import connector as choose_connector
from extproc.intake import Intake
from extproc.journey import Parts
from extproc.kv import routing_of
from extproc.observe.engines import Engines
from extproc.observe.load import Scrape
from extproc.observe.logs import make_logger
from extproc.observe.metrics import Metrics
from extproc.observe.observer import Observer
from extproc.observe.pulse import Pulse
from extproc.prompt import BytesPerToken
from extproc.release import Releaser
from extproc.routing.endpoint_spec import EndpointSet, EndpointSpec
from extproc.routing.pool import Pool
from extproc.routing.router import Router
from extproc.warm_call import Meeting
from extproc.warm_up import WarmUp

CONFIG: dict[str, Any] = {
    "workers": {"prefill": ["10.0.0.1:1"], "decode": ["10.0.0.2:1"]},
    "policies": [
        {
            "name": "default",
            "mode": "disaggregate",
            "dispatch": "immediate",
            "tenant_header": "x-tenant",
            "session_header": "x-session",
        }
    ],
    "models": {"aliases": {"latest": "m"}},
    "warm_up": {"enabled": False},
    "envoy": {"access_log": False},
    "observe": {"sample": 0},
}

REPLY = msgspec.json.encode(
    {
        "usage": {"prompt_tokens": 20, "prompt_tokens_details": {"cached_tokens": 4}},
        "kv_transfer_params": {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[1]],
            "remote_engine_id": "e",
            "remote_request_id": "r",
            "remote_host": "10.0.0.1",
            "remote_port": 5600,
            "tp_size": 1,
            "remote_num_tokens": 20,
        },
    }
)


class Client:
    """Prefill workers, all of which answer at once."""

    fault: Callable[[], Exception] | None = None

    def call(self, *_: object) -> asyncio.Future[bytes]:
        reply = asyncio.get_running_loop().create_future()
        if self.fault is None:
            reply.set_result(REPLY)
        else:
            reply.set_exception(self.fault())
        return reply


class Stream(wire.Stream):
    """One request, as Envoy would show it."""

    def __init__(self, *events: wire.Event) -> None:
        super().__init__(None)  # type: ignore[arg-type]  # no call: what uses it is replaced
        self._events = [*events]
        self.replies: list[bytes] = []

    def stirred(self) -> asyncio.Future[None]:
        """There is always something: the request's end at the latest."""
        stirred = asyncio.get_running_loop().create_future()
        stirred.set_result(None)
        return stirred

    async def receive(self) -> wire.Event | None:
        return self._events.pop(0) if self._events else None

    async def send(self, reply: bytes) -> None:
        self.replies.append(reply)


class Silent(Stream):
    """One whose client waits for the prefill."""

    def stirred(self) -> asyncio.Future[None]:
        return asyncio.get_running_loop().create_future()


class World:
    """A filter without a network."""

    def __init__(self) -> None:
        self.config = msgspec.convert(CONFIG, Config)
        log = make_logger("critical", io.StringIO())
        self.client = Client()
        self.metrics = metrics = Metrics()
        self.pool = Pool(EndpointSet())
        connector, sizes = choose_connector(self.config.handoff), BytesPerToken()
        intake = Intake(self.config, sizes)
        router = Router(self.pool, routing_of(self.config))
        dispatcher = Dispatcher(router, names=intake.names, metrics=metrics, log=log, longest_request_s=3600.0)
        releaser = Releaser(self.config.handoff, live_decode_worker(router), metrics, log, own_headers={})
        pulse = Pulse()
        meeting = Meeting(self.config, connector, releaser, pulse, own_headers={})
        warm_up = WarmUp(self.config, dispatcher, meeting, metrics=metrics, log=log, on_change=lambda: None)
        self.engines = Engines(metrics)
        self.fleet = Fleet(
            self.config,
            dispatcher,
            warm_up=warm_up,
            engines=self.engines,
            metrics=metrics,
            log=log,
            own_headers={},
            on_change=lambda: None,
        )
        self.filter = Filter(
            Parts(
                config=self.config,
                pool=self.pool,
                dispatcher=dispatcher,
                intake=intake,
                bytes_per_token=sizes,
                connector=connector,
                prefiller=Prefiller(
                    client=self.client,  # type: ignore[arg-type]
                    dispatcher=dispatcher,
                    connector=connector,
                    settings=self.config.prefill,
                    pulse=pulse,
                    metrics=metrics,
                    log=log,
                    on_unused=releaser.release,
                ),
                releaser=releaser,
                warm_up=warm_up,
                engines=self.engines,
                metrics=metrics,
                observer=Observer(self.config, metrics, log),
                log=log,
            )
        )

    def workers(self, *, prefill: list[str], decode: list[str], models: tuple[str, ...] = ("m",)) -> None:
        """These are the workers now, and live."""
        specs = [[EndpointSpec(address=address) for address in role] for role in (prefill, decode)]
        self.fleet._on_discovery(EndpointSet(*specs))
        for endpoint in self.pool.endpoints:
            self.pool.set_live(endpoint, True)
            self.pool.set_models(endpoint, dict.fromkeys(models, b"{}"))

    async def ask(self, *, path: str = "/v1/completions", model: str = "m", **headers: str) -> None:
        head = {":method": "POST", ":path": path, "content-type": "application/json"}
        head |= {name.replace("_", "-"): value for name, value in headers.items()}
        body = msgspec.json.encode({"model": model, "prompt": "a word or two", "max_tokens": 5})
        stream = Silent(wire.RequestHeaders(head, False), wire.RequestBody(body))
        await self.filter.handle(stream)  # type: ignore[arg-type]

    def series(self) -> list[str]:
        text = generate_latest(self.metrics.registry).decode()
        return [line for line in text.splitlines() if not line.startswith("#")]

    def value(self, start: str) -> float:
        return sum(float(line.rpartition(" ")[2]) for line in self.series() if line.startswith(start))


@pytest.fixture
async def world() -> World:
    made = World()
    made.workers(prefill=["10.0.0.1:1"], decode=["10.0.0.2:1"])
    return made


async def test_names_of_clients_make_a_bounded_number_of_series(world) -> None:
    for number in range(10_000):
        await world.ask(
            path=f"/v1/completions?x={number}" if number % 2 else f"/own/path/{number}",
            model="m" if number % 4 else f"model-{number}",
            x_tenant=f"tenant-{number}",
            x_session=f"s-{number}",
            **{f"x_baton_{number}": "1"},
        )
        if number == 1_000:
            first = len(world.series())
    assert len(world.series()) == first < 1_500, "the last nine thousand names added nothing"
    assert world.value("baton_requests_total") == 10_000, "and every request is counted"
    assert world.value('baton_tokens_total{kind="prompt"') == 5_000 * 20
    tenants = {line.split('tenant="')[1].split('"')[0] for line in world.series() if line.startswith("baton_tokens_total")}
    assert len(tenants) == 101 and "other" in tenants
    assert not [line for line in world.series() if "model-" in line or "/own/path" in line or "s-1" in line]


async def test_a_model_that_no_worker_has_is_other_and_an_alias_is_what_it_stands_for(world) -> None:
    await world.ask(model="no-such-model")
    await world.ask(model="latest")
    models = {line.split('model="')[1].split('"')[0] for line in world.series() if line.startswith("baton_requests_total")}
    assert models == {"other", "m"}


async def test_a_tenant_that_is_a_secret_is_shown_as_a_hash_of_it(world) -> None:
    label = world.metrics.accounts.tenant("Bearer very-secret", "authorization")
    assert label.startswith("sha256:") and "secret" not in label and len(label) < 24
    assert label == world.metrics.accounts.tenant("Bearer very-secret", "authorization"), "always the same one"
    assert world.metrics.accounts.tenant("acme", "x-tenant") == "acme"


async def test_workers_that_come_and_go_leave_nothing_behind(world) -> None:
    page = Scrape(
        running=1,
        waiting=0,
        kv_usage=0.5,
        preemptions=1,
        generation_tokens=1,
        model="m",
        sources={"local_compute": 1.0},
        itl_buckets={0.01: 1},
    )
    counts = []
    for number in range(300):
        fresh = [f"10.1.{number}.{role}:1" for role in (1, 2)]
        world.workers(prefill=fresh[:1], decode=fresh[1:])
        for address in fresh:
            world.fleet._on_scrape(address, page, 1.0)
        await world.ask()
        counts.append(len(world.series()))
    assert counts[-1] == counts[0]
    named = [line for line in world.series() if ':1"' in line]
    assert named and all('"10.1.299.' in line for line in named), "only the workers of now have series"
    world.fleet._on_scrape("10.1.0.1:1", page, 1.0)
    assert len(world.series()) == counts[-1], "a late page of one that is gone brings nothing back"
