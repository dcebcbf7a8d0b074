"""LMCache's directory: what its answers mean, and that no prompt waits long for them."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from extproc.cache_directory import CacheDirectory, _Answer, _Key, _Name, _Placement, leading_tokens, stored_as
from extproc.config import CacheStore, Config, ConfigError, Workers
from extproc.observe.kv_events.settings import KvEvents
from extproc.observe.logs import make_logger
from extproc.observe.metrics import Metrics
from extproc.routing.endpoint_spec import EndpointSet, EndpointSpec
from extproc.routing.pool import Pool
from extproc.routing.token_chain import TokenChain
from extproc.tokens.settings import TokenSettings


def at(*names: str, shared: bool = False, of: str = "") -> _Key:
    """A key of the next chunk, or of the chunk ``of``."""
    return _Key(_Name(of), [_Placement(name, shared) for name in names])


NOWHERE = _Key()
ANYWHERE = at("a", shared=True)


def answer_of(chunks: int, keys: list[_Key]) -> _Answer:
    """As the coordinator sends it: keys of one chunk have its hash."""
    return _Answer(
        chunks, [key if key.key.chunk_hash_hex else _Key(_Name(f"{at}"), key.placements) for at, key in enumerate(keys)]
    )


@pytest.mark.parametrize(
    ("chunks", "keys", "found"),
    [
        (2, [at("a"), at("a", "b")], {"a": 512}),
        (3, [at("a", "b"), at("a"), at("b")], {"a": 512, "b": 256}),
        (2, [NOWHERE, at("a")], {}),
        (3, [ANYWHERE, at("b"), ANYWHERE], {"*": 256, "b": 768}),
        (2, [ANYWHERE, ANYWHERE], {"*": 512}),
        (2, [at("a", of="x"), at("a", of="x"), at("a", of="y"), at(of="y")], {"a": 256}),  # two ranks
        (2, [at("a", of="x"), at("a", of="x"), at("a", of="y")], {"a": 512}),  # another object group of the first
        (2, [at("a", of="x"), at("b", of="x"), at("a", of="y")], {}),  # and not on the same server
        (0, [], {}),
        (2, [at("a")], {}),  # contradicts itself
    ],
)
def test_only_what_is_complete_from_the_beginning_counts(chunks: int, keys: list[_Key], found: dict[str, int]) -> None:
    assert leading_tokens(answer_of(chunks, keys), 256, label="cache") == found


def test_without_a_label_all_servers_count_as_one() -> None:
    assert leading_tokens(answer_of(3, [at("a"), at("b"), NOWHERE]), 256, label=None) == {"": 512}


def test_the_disk_of_a_server_that_is_gone_does_not_count_and_what_all_can_load_does() -> None:
    answer = answer_of(3, [at("a", "b"), at("a"), ANYWHERE])
    assert leading_tokens(answer, 256, label="cache", servers=frozenset({"a"})) == {"a": 768}
    assert leading_tokens(answer, 256, label="cache", servers=frozenset({"b"})) == {"b": 256}
    assert leading_tokens(answer, 256, label=None, servers=frozenset({"b"})) == {"": 256}


def test_a_model_is_asked_for_by_what_the_prefill_workers_engine_was_started_with() -> None:
    pool = Pool(EndpointSet((EndpointSpec(address="10.0.0.1:80"),), (EndpointSpec(address="10.0.0.2:80"),)))
    prefill, decode = pool.endpoints
    assert stored_as(pool, "chat") == "chat", "nobody has said anything yet"
    pool.set_models(decode, {"chat": b'{"id": "chat", "root": "/decode"}'})
    pool.set_models(prefill, {"chat": b'{"id": "chat", "root": "org/Llama"}', "x": b'{"id": "x", "root": null}', "y": b"[]"})
    assert [stored_as(pool, each) for each in ("chat", "x", "y", "z")] == ["org/Llama", "x", "y", "z"]
    pool.set_models(prefill, {"deep": b'{"id": "deep", "of": ' + b"[" * 10_000 + b"]" * 10_000 + b"}"})
    assert stored_as(pool, "deep") == "deep"


class Coordinator:
    """What the tests let it say."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.status = 200
        self.servers: list[str] | None = None
        self.instances_say: bytes | None = None
        self.chunk_tokens = 256
        self.hold = asyncio.Event()
        self.hold.set()

    async def lookup(self, request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        self.asked.append(body)
        await self.hold.wait()
        chunks = len(body["token_ids"]) // self.chunk_tokens
        places = [{"instance_id": "a", "tier": "l1", "shared": False}]
        results = [
            {"key": {"chunk_hash_hex": f"{at}"}, "placements": places, "token_ids": [1] * 256}
            for at in range(chunks)
            for _ in range(body["world_size"])
        ]
        return web.json_response({"chunks": chunks, "results": results}, status=self.status)

    async def instances(self, _: web.Request) -> web.Response:
        if self.instances_say is not None:
            return web.Response(body=self.instances_say)
        if self.servers is None:
            raise web.HTTPNotFound
        return web.json_response({"instances": [{"instance_id": each, "ip": "10.0.0.9"} for each in self.servers]})


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@asynccontextmanager
async def directory(**settings: Any) -> AsyncIterator[tuple[CacheDirectory, Coordinator, Clock, Metrics]]:
    coordinator, clock, metrics = Coordinator(), Clock(), Metrics()
    app = web.Application(client_max_size=16 << 20)
    app.router.add_post("/directory/lookup", coordinator.lookup)
    app.router.add_get("/instances", coordinator.instances)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
    store = CacheStore(**{"enabled": True, "directory": f"127.0.0.1:{port}", "directory_timeout_s": 10.0, **settings})
    try:
        async with CacheDirectory(store, metrics, make_logger("critical"), stored_as=str.upper, clock=clock) as found:
            yield found, coordinator, clock, metrics
    finally:
        coordinator.hold.set()
        await runner.cleanup()


def prompt(tokens: int = 1_000, first: int = 0, **more: Any) -> TokenChain:
    return TokenChain(array("I", range(first, first + tokens)), **more)


async def test_whole_chunks_are_asked_for_with_model_ranks_and_salt() -> None:
    async with directory(world_size=2) as (found, coordinator, _, metrics):
        assert await found.lookup(prompt(cache_salt="tenant"), "m") == {"": 768}
        assert coordinator.asked == [
            {"token_ids": list(range(768)), "model_name": "M", "world_size": 2, "cache_salt": "tenant"}
        ]
        assert metrics.cache_directory.value("hit") == 1


async def test_an_answer_counts_for_a_second_and_of_a_long_prompt_the_beginning_is_asked_for() -> None:
    async with directory(directory_max_tokens=600) as (found, coordinator, clock, metrics):
        assert await found.lookup(prompt(), "m") == {"": 512}
        assert await found.lookup(prompt(5_000), "m") == {"": 512}, "begins the same"
        assert len(coordinator.asked) == 1
        await found.lookup(prompt(), "another model")
        assert len(coordinator.asked) == 2
        clock.now_s += 1.1
        await found.lookup(prompt(), "m")
        assert len(coordinator.asked) == 3
        assert metrics.cache_directory.value("known") == 1


async def test_nobody_waits_longer_than_the_bound_and_a_slow_directory_is_left_alone() -> None:
    async with directory(directory_timeout_s=0.01) as (found, coordinator, clock, metrics):
        coordinator.hold.clear()
        for number in range(5):
            assert await found.lookup(prompt(first=number), "m") is None
        assert metrics.cache_directory.value("timeout") == 5
        assert await found.lookup(prompt(first=9), "m") is None
        assert metrics.cache_directory.value("left_alone") == 1, "not asked at all"
        coordinator.hold.set()
        clock.now_s += 10.1
        found._settings = CacheStore(enabled=True, directory=found._settings.directory, directory_timeout_s=10.0)
        assert await found.lookup(prompt(first=10), "m") == {"": 768}


async def test_what_is_no_answer_counts_as_none() -> None:
    async with directory() as (found, coordinator, _, metrics):
        coordinator.status = 500
        assert await found.lookup(prompt(), "m") is None
        assert metrics.cache_directory.value("failed") == 1


@pytest.mark.parametrize("chunk_tokens", [128, 512])
async def test_a_coordinator_with_other_chunks_is_not_believed(chunk_tokens: int) -> None:
    """It would tell of twice the tokens of the prompt, or of half of them."""
    async with directory() as (found, coordinator, _, metrics):
        coordinator.chunk_tokens = chunk_tokens
        assert await found.lookup(prompt(1_024), "m") is None
        assert metrics.cache_directory.value("failed") == 1


async def test_what_cannot_be_read_of_the_servers_there_are_changes_nothing() -> None:
    async with directory() as (found, coordinator, _, _metrics):
        coordinator.servers = ["a"]
        await found.look()
        for said in (b'{"more": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", b"{}", b'{"instances": 1}', b"\xff"):
            coordinator.instances_say = said
            await found.look()
            assert await found.lookup(prompt(), "m") == {"": 768}


async def test_only_servers_that_the_coordinator_hears_of_count_and_without_any_it_is_not_believed() -> None:
    async with directory() as (found, coordinator, clock, metrics):
        coordinator.servers = ["a"]
        await found.look()
        assert await found.lookup(prompt(), "m") == {"": 768}
        coordinator.servers = ["b"]
        await found.look()
        clock.now_s += 1.1
        assert await found.lookup(prompt(), "m") == {}
        coordinator.servers = []
        await found.look()
        clock.now_s += 1.1
        assert await found.lookup(prompt(), "m") is None, "it has just been started, and knows nothing"
        assert metrics.cache_directory.value("no_servers") == 1
        coordinator.servers = None
        await found.look()
        assert await found.lookup(prompt(), "m") is None, "what was known stays"


@pytest.mark.parametrize("salt", ["a/b", "a@b", "a\\b", "x" * 129])
async def test_a_salt_that_lmcache_does_not_take_is_not_asked_for(salt: str) -> None:
    """Else anybody could have the directory left alone by sending a few of them."""
    async with directory() as (found, coordinator, _, metrics):
        assert await found.lookup(prompt(cache_salt=salt), "m") is None
        assert (coordinator.asked, metrics.cache_directory.value("not_asked")) == ([], 1)


async def test_a_name_that_no_model_has_is_neither_asked_for_nor_remembered() -> None:
    """A prompt of token ids comes here with whatever name its client gives the model."""
    async with directory() as (found, coordinator, _, metrics):
        assert await found.lookup(prompt(), "m" * 1025) is None
        assert (coordinator.asked, len(found._known), metrics.cache_directory.value("not_asked")) == ([], 0, 1)
        assert await found.lookup(prompt(), "m" * 1024) is not None


async def test_a_question_that_it_does_not_take_says_nothing_of_the_next() -> None:
    async with directory() as (found, coordinator, _, metrics):
        coordinator.status = 400
        for number in range(6):
            assert await found.lookup(prompt(first=number), "m") is None
        coordinator.status = 200
        assert await found.lookup(prompt(first=9), "m") == {"": 768}
        assert metrics.cache_directory.value("refused") == 6


async def test_adapters_and_short_prompts_are_not_asked_for() -> None:
    async with directory() as (found, coordinator, _, metrics):
        assert await found.lookup(prompt(lora="adapter"), "m") is None
        assert await found.lookup(prompt(200), "m") == {}
        assert coordinator.asked == []
        assert metrics.cache_directory.value("not_asked") == 1


@pytest.mark.parametrize(
    ("field", "kv_events", "store"),
    [
        ("kv_events.enabled", KvEvents(), CacheStore(enabled=True)),
        ("tokens", KvEvents(enabled=True), CacheStore(enabled=True)),
    ],
)
def test_it_is_refused_without_what_makes_tokens_known(field: str, kv_events: KvEvents, store: CacheStore) -> None:
    with pytest.raises(ConfigError, match=f"cache_store.enabled: needs {field}"):
        Config(workers=Workers(prefill=["10.0.0.1:80"], decode=["10.0.0.2:80"]), kv_events=kv_events, cache_store=store)


def test_it_is_refused_to_ask_for_less_than_a_chunk() -> None:
    """Every prompt would be one of which the directory knows nothing, and what our own prefills have stored would not count."""
    workers, events = Workers(prefill=["10.0.0.1:80"], decode=["10.0.0.2:80"]), KvEvents(enabled=True)
    store = CacheStore(enabled=True, directory="10.0.0.3:9300", directory_max_tokens=255)
    with pytest.raises(ConfigError, match="directory_max_tokens: less than"):
        Config(workers=workers, kv_events=events, tokens=TokenSettings(ask_workers="tokenize"), cache_store=store)
