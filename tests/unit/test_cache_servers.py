"""What the filter shows of cache servers: health, hits and use; and that nothing a server says can hurt it."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import pytest
from aiohttp import web
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from extproc.config import ConfigError, parse
from extproc.observe import cache_servers
from extproc.observe.cache_servers import CacheServers, CacheUse, grown
from extproc.observe.logs import make_logger
from extproc.observe.metrics import Metrics

PAGE = b"""# HELP lmcache_mp_lookup_requested_tokens_total Tokens
# TYPE lmcache_mp_lookup_requested_tokens_total counter
lmcache_mp_lookup_requested_tokens_total{cache_salt="",model_name="a"} 1000.0
lmcache_mp_lookup_requested_tokens_total{cache_salt="",model_name="b"} 280.0
lmcache_mp_lookup_hit_tokens_total{cache_salt="",model_name="a"} 256.0
lmcache_mp_lookup_hit_l1_tokens_total{cache_salt="",model_name="a"} 77.0
lmcache_mp_l1_usage_ratio{backend="dram",l1_tag="_default"} 0.25
lmcache_mp_l2_usage_bytes{l2_name="fs_native"} 1310720.0
process_resident_memory_bytes 9.65578752e+08
"""


def page(lookup: int, hit: int) -> bytes:
    return (
        f"lmcache_mp_lookup_requested_tokens_total {lookup}\nlmcache_mp_lookup_hit_tokens_total {hit}\n"
        "lmcache_mp_l1_usage_ratio 0.5\n"
    ).encode()


def test_a_page_is_summed_over_models_and_only_whole_names_count() -> None:
    assert cache_servers.parse(PAGE) == CacheUse(lookup_tokens=1280, hit_tokens=256, usage=0.25, below_bytes=1310720)


def test_a_server_that_nobody_has_asked_yet_has_found_nothing() -> None:
    found = cache_servers.parse(b'lmcache_mp_l1_usage_ratio{backend="dram"} 0.0\n')
    assert found == CacheUse(usage=0.0)


@pytest.mark.parametrize(
    "text", [b"", b"process_resident_memory_bytes 1\n", b"vllm:num_requests_running 1\n", b"lmcache_mp_l1_usage_ratio x\n"]
)
def test_a_page_of_something_else_is_no_cache_server(text: bytes) -> None:
    assert cache_servers.parse(text) is None


@pytest.mark.parametrize("value", [b"NaN", b"-1", b"+Inf", b"1e30", b"", b"1" * 100, b"\xff"])
def test_a_value_that_makes_no_sense_is_left_out(value: bytes) -> None:
    text = b"lmcache_mp_l1_usage_ratio 0.1\nlmcache_mp_lookup_requested_tokens_total " + value + b"\n"
    assert cache_servers.parse(text) == CacheUse(usage=0.1)


def test_a_counter_that_went_down_is_one_that_was_started_again() -> None:
    assert grown(100, 130) == 30
    assert grown(100, 0) == 0
    assert grown(100, 40) == 40


@dataclass
class FakeServer:
    """Its two pages, and what was asked."""

    metrics: bytes = PAGE
    health: int = 200
    status: int = 200
    address: str = ""
    asked: list[str] = field(default_factory=list)
    hangs: bool = False


@asynccontextmanager
async def fake_server() -> AsyncIterator[FakeServer]:
    fake = FakeServer()

    async def answer(request: web.Request) -> web.Response:
        fake.asked.append(request.path)
        if fake.hangs:
            await asyncio.sleep(60)
        if request.path == "/healthcheck":
            return web.Response(status=fake.health)
        return web.Response(body=fake.metrics, status=fake.status)

    app = web.Application()
    app.router.add_get("/{any:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    fake.address = f"127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield fake
    finally:
        await runner.cleanup()


class Watched:
    """Servers under watch, and what the filter shows of them."""

    def __init__(self, *addresses: str, timeout_s: float = 1.0) -> None:
        self.log = io.StringIO()
        self.registry = Metrics()
        self.servers = CacheServers(
            addresses, self.registry, make_logger(stream=self.log), interval_s=0.01, timeout_s=timeout_s
        )

    async def __aenter__(self) -> Watched:
        self.task = asyncio.create_task(self.servers.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task

    def value(self, name: str, server: str) -> float | None:
        for family in text_string_to_metric_families(generate_latest(self.registry.registry).decode()):
            for sample in family.samples:
                if sample.name == f"baton_cache_server_{name}" and sample.labels.get("server") == server:
                    return sample.value
        return None

    async def until(self, name: str, server: str, value: float) -> None:
        async with asyncio.timeout(10):
            while self.value(name, server) != value:
                await asyncio.sleep(0.005)


async def test_health_and_growth_since_the_first_look_are_shown_and_a_restart_is_no_loss() -> None:
    async with fake_server() as fake, Watched(fake.address) as watched:
        fake.metrics = page(1000, 500)
        await watched.until("up", fake.address, 1)
        await watched.until("usage_ratio", fake.address, 0.5)
        assert watched.value("lookup_tokens_total", fake.address) in (None, 0)
        fake.metrics = page(1500, 900)
        await watched.until("hit_tokens_total", fake.address, 400)
        assert watched.value("lookup_tokens_total", fake.address) == 500
        fake.metrics = page(20, 10)  # started again
        await watched.until("hit_tokens_total", fake.address, 410)
        assert watched.value("lookup_tokens_total", fake.address) == 520
        shown = watched.servers.status()[fake.address]
        assert (shown["up"], shown["hit_share"]) == (True, 0.5)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"health": 503}, "status 503"),
        ({"status": 500}, "status 500"),
        ({"metrics": b"something_else 1\n"}, "no metric of LMCache"),
        ({"metrics": b"#" * (5 << 20)}, "TooLarge"),
        ({"hangs": True}, "TimeoutError"),
    ],
    ids=["unhealthy", "no metrics", "not a cache server", "endless", "silent"],
)
async def test_a_server_that_does_not_answer_as_one_is_down_with_the_reason_until_it_does(
    fault: dict[str, object], said: str
) -> None:
    async with fake_server() as fake, Watched(fake.address, timeout_s=0.3) as watched:
        await watched.until("up", fake.address, 1)
        before = {name: getattr(fake, name) for name in fault}
        for name, value in fault.items():
            setattr(fake, name, value)
        await watched.until("up", fake.address, 0)
        assert said in watched.servers.status()[fake.address]["fault"]
        for name, value in before.items():
            setattr(fake, name, value)
        await watched.until("up", fake.address, 1)
    assert watched.log.getvalue().count("cache_server_down") == 1, "a fault that lasts is one line"


async def test_one_dead_server_hides_no_other() -> None:
    async with fake_server() as fake, Watched("127.0.0.1:1", fake.address) as watched:
        await watched.until("up", fake.address, 1)
        assert watched.value("up", "127.0.0.1:1") == 0
        assert watched.servers.status()["127.0.0.1:1"]["up"] is False


async def test_without_a_server_the_watch_goes_on_and_says_nothing() -> None:
    """Its end would be taken for the death of a part, and end the filter."""
    async with Watched() as watched:
        await asyncio.sleep(0.1)
        assert not watched.task.done()
        assert watched.servers.status() == {}


@pytest.mark.parametrize("address", ["cache", "unix:/run/cache.sock", "cache:0"])
def test_an_address_that_is_none_is_refused_with_its_line(address: str) -> None:
    text = f'workers:\n  prefill: ["10.0.0.1:8100"]\n  decode: ["10.0.0.2:8200"]\ncache_servers: ["{address}"]\n'
    with pytest.raises(ConfigError, match=r"configuration:4: cache_servers\[0\]"):
        parse(text)
