"""The host's memory behind the cache of a simulated engine: what is kept, what goes first, what is told, what is read back."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from tests.unit.test_sim_handoff import MODEL, NAME, OPTIONS, kinds, post, prefill, until
from workers.sim.blocks import CacheEvent, Cleared, Kv, Removed, Stored
from workers.sim.host_cache import HostCache
from workers.sim.local import running
from workers.sim.options import SimOptions, worker_options
from workers.sim.prompts import expected_answer
from workers.sim.request import Sequence
from workers.sim.text import Stop
from workers.sim.worker import Worker

PATH = "/v1/completions"
FIRST = list(range(1000, 1160))
OTHERS = [list(range(start, start + 470)) for start in (3000, 5000)]
SMALL = replace(OPTIONS, num_blocks=31, max_model_len=480, host_cache_tokens=16 * 100, enable_prompt_tokens_details=True)


def stored(*names: str, parent: str | None = None) -> Stored:
    """Blocks of two tokens."""
    return Stored(
        hashes=tuple(name.encode() for name in names),
        parent=None if parent is None else parent.encode(),
        token_ids=tuple(range(2 * len(names))),
        adapter="",
        extra_keys=(None,) * len(names),
    )


def kv(*names: str) -> list[Kv]:
    return [Kv(b"", name.encode()) for name in names]


def keep(host: HostCache, *names: str, parent: str | None = None) -> None:
    host.store(stored(*names, parent=parent), kv(*names))


def test_what_was_not_used_for_longest_goes_first_and_ends_before_beginnings() -> None:
    host = HostCache(4, 2)
    keep(host, "a", "b")
    keep(host, "x", "y")
    host.touch([b"a", b"b"])
    keep(host, "z")
    assert [host.match([name]) for name in (b"a", b"b", b"x", b"y", b"z")] == [1, 1, 1, 0, 1], "y is the end of x, y"
    assert host.read([b"a", b"b"]) == kv("a", "b")
    assert host.match([b"a", b"y", b"b"]) == 1, "nothing behind a hole counts"


def test_events_name_new_blocks_with_their_tokens_and_what_is_before_them() -> None:
    told: list[CacheEvent] = []
    host = HostCache(5, 2, on_event=told.append)
    keep(host, "b", "c", parent="a")
    (event,) = told
    assert event == replace(stored("b", "c", parent="a"), medium="CPU")
    told.clear()
    keep(host, "b", "c", parent="a")
    assert told == [], "they are there"
    keep(host, "a", "b", "c", "d", "e")
    beginning, end = told
    assert isinstance(beginning, Stored) and isinstance(end, Stored)
    assert (beginning.hashes, beginning.parent, beginning.token_ids) == ((b"a",), None, (0, 1))
    assert (end.hashes, end.parent, end.token_ids, end.extra_keys) == ((b"d", b"e"), b"c", (6, 7, 8, 9), (None, None))
    told.clear()
    keep(host, "f", parent="e")
    assert told == [Removed((b"e",), "CPU"), replace(stored("f", parent="e"), medium="CPU")]


def test_of_a_prompt_that_is_larger_than_the_memory_the_beginning_is_kept_and_told() -> None:
    told: list[CacheEvent] = []
    host = HostCache(2, 2, on_event=told.append)
    keep(host, "old")
    told.clear()
    keep(host, "a", "b", "c")
    assert told[0] == Removed((b"old",), "CPU")
    assert told[1] == replace(stored("a", "b"), medium="CPU")
    assert len(host) == host.match([b"a", b"b", b"c"]) == 2


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 5])
def test_whatever_is_kept_those_who_hear_of_it_know_what_is_there(num_blocks: int) -> None:
    draw, heard = random.Random(num_blocks), set[bytes]()

    def hear(event: CacheEvent) -> None:
        assert not isinstance(event, Cleared)
        known = isinstance(event, Removed)
        assert all((name in heard) is known for name in event.hashes), event
        heard.symmetric_difference_update(event.hashes)

    host = HostCache(num_blocks, 2, on_event=hear)
    for _ in range(100):
        prompt, first = draw.choice("abc"), draw.randrange(5)
        keep(host, *(f"{prompt}{at}" for at in range(first, draw.randrange(first, 6) + 1)))
        assert heard == set(host._kv)


def test_what_is_forgotten_is_told() -> None:
    told: list[CacheEvent] = []
    host = HostCache(5, 2, on_event=told.append)
    keep(host, "a", "b")
    told.clear()
    host.clear()
    host.clear()
    assert (told, len(host)) == ([Removed((b"b", b"a"), "CPU")], 0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"host_cache_tokens": 8, "block_size": 16}, "8 are less than one block of 16"),
        ({"host_cache_tokens": 1600, "enable_prefix_caching": False}, "that is off"),
    ],
)
def test_what_cannot_work_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        worker_options(replace(SimOptions(), **given))


@pytest.fixture
async def pair(http: aiohttp.ClientSession) -> AsyncIterator[list[Worker]]:
    async with running(SMALL) as workers:
        yield workers


async def by_source(http: aiohttp.ClientSession, worker: Worker, source: str) -> float:
    """Prompt tokens that were not computed, by where they came from."""
    async with http.get(f"{worker.url}/metrics") as response:
        lines = (await response.text()).splitlines()
    start = "vllm:prompt_tokens_cached_by_source_total{"
    (line,) = [line for line in lines if line.startswith(start) and f'source="{source}"' in line]
    return float(line.split()[-1])


async def crowded_out(http: aiohttp.ClientSession, worker: Worker, body: dict[str, Any]) -> None:
    """A prompt that was there, and others that fill the worker's cache: nothing else is left in it."""
    assert (await post(http, worker, PATH, body))[0] == 200
    held = tuple(worker.engine.pool.cached())
    for prompt in OTHERS:
        assert (await post(http, worker, PATH, {"prompt": prompt, "max_tokens": 1}))[0] == 200
    assert not set(held) & set(worker.engine.pool.cached())


async def test_what_the_cache_has_lost_is_loaded_and_the_handoff_has_the_right_text(
    http: aiohttp.ClientSession, pair: list[Worker]
) -> None:
    first, second = pair
    body = {"prompt": FIRST, "max_tokens": 20}
    await crowded_out(http, first, {**body, "max_tokens": 1})
    params = await prefill(http, first, body)
    assert params["remote_prefill_cached_tokens"] == 144, "nine of its ten blocks; the last token is computed"
    assert (await by_source(http, first, "host"), await by_source(http, first, "device")) == (144, 0)
    status, answer = await post(http, second, PATH, {**body, "kv_transfer_params": params})
    assert (status, answer["choices"][0]["text"]) == (200, expected_answer(PATH, {"model": NAME, **body}, MODEL))
    assert kinds(first) == kinds(second) == {}
    assert first.engine.pool.free_blocks == 30, "all blocks came back"


async def test_usage_counts_what_was_loaded_as_cached(http: aiohttp.ClientSession, pair: list[Worker]) -> None:
    body = {"prompt": FIRST, "max_tokens": 1}
    await crowded_out(http, pair[0], body)
    _, answer = await post(http, pair[0], PATH, body)
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 144}


async def test_whoever_looks_is_told_what_lies_where_and_a_reset_forgets_both(
    http: aiohttp.ClientSession, pair: list[Worker]
) -> None:
    first = pair[0]
    assert (await post(http, first, PATH, {"prompt": FIRST, "max_tokens": 1}))[0] == 200
    hashes = b"".join(first.engine.pool.cached())
    assert await held(http, first, hashes) == {"blocks": 10, "host_blocks": 0}, "what is in the cache is not looked for below"
    await crowded_out(http, first, {"prompt": FIRST, "max_tokens": 1})
    assert await held(http, first, hashes) == {"blocks": 0, "host_blocks": 10}
    async with http.post(f"{first.url}/sim/reset") as response:
        assert response.status == 200
    assert await held(http, first, hashes) == {"blocks": 0, "host_blocks": 0}
    assert first.state()["host_blocks"] == 0


async def held(http: aiohttp.ClientSession, worker: Worker, hashes: bytes) -> Any:
    async with http.post(f"{worker.url}/sim/held", data=hashes) as response:
        return await response.json()


async def test_a_client_that_leaves_while_its_prompt_is_loaded_leaves_nothing_behind(http: aiohttp.ClientSession) -> None:
    async with running(replace(SMALL, workers=1, speed=0.001)) as (worker,):
        body = {"prompt": FIRST, "max_tokens": 1}
        sequence = Sequence("kept", FIRST, Stop(1))
        worker.engine.core._hash_up_to(sequence, 10)
        worker.engine.host.store(
            Stored(tuple(sequence.hashes), None, tuple(FIRST), "", (None,) * 10),
            [Kv(sequence.context(i, 16), sequence.bytes_of(i * 16, i * 16 + 16)) for i in range(10)],
        )
        asked = asyncio.create_task(post(http, worker, PATH, body))
        await until(lambda: bool(worker.engine.core.pulling))
        asked.cancel()
        await until(lambda: not worker.engine.core.pulling)
        await until(lambda: worker.engine.pool.free_blocks == 30)
