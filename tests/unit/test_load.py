"""Reading the workers' metrics: what a page says, however it is spoiled, and who is asked when."""

from __future__ import annotations

import asyncio
import gzip
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from extproc.observe.load import LoadScraper, Scrape, Scraping, parse, restarted
from extproc.observe.metrics import ITL_SECONDS, TTFT_SECONDS
from workers.sim.local import running
from workers.sim.options import SimOptions

PAGE = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 70.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="1000"} 1.0
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 1e3
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 400
vllm:prompt_tokens_total{engine="0",model_name="m"} 1000.0
vllm:generation_tokens_total{engine="0",model_name="m"} 50.0
vllm:inter_token_latency_seconds_bucket{engine="0",le="0.01",model_name="m"} 99.0
vllm:inter_token_latency_seconds_sum{engine="0",model_name="m"} 1.5
vllm:inter_token_latency_seconds_count{engine="0",model_name="m"} 50.0
vllm:request_prefill_time_seconds_sum{engine="0",model_name="m"} 4.0
vllm:request_prefill_time_seconds_count{engine="0",model_name="m"} 8.0
vllm:nixl_xfer_time_seconds_sum{engine="0",model_name="m"} 0.5
vllm:nixl_xfer_time_seconds_count{engine="0",model_name="m"} 5.0
vllm:nixl_bytes_transferred_sum{engine="0",model_name="m"} 5e9
vllm:nixl_bytes_transferred_count{engine="0",model_name="m"} 5.0
vllm:nixl_num_failed_transfers_total{engine="0",model_name="m"} 1.0
process_start_time_seconds 1.7e+09
"""

SAID = Scrape(
    running=3,
    waiting=2,
    kv_usage=0.25,
    kv_tokens=16_000,
    block_tokens=16,
    prefix_queries=1000,
    prefix_hits=400,
    prompt_tokens=1000,
    generation_tokens=50,
    itl_sum_s=1.5,
    itl_count=50,
    itl_buckets={0.01: 99},
    model="m",
    prefill_sum_s=4,
    prefill_count=8,
    transfer_sum_s=0.5,
    transfer_count=5,
    transfer_sum_bytes=5e9,
    transfer_sizes=5,
    failed_transfers=1,
    process_start_s=1.7e9,
)


def test_a_page_says_what_it_says() -> None:
    assert parse(PAGE) == SAID


def test_a_page_of_a_real_vllm_is_read() -> None:
    """Recorded from a decode worker of vLLM 0.32 that had received one prompt of 429 tokens; its help texts are blanked out."""
    scrape = parse((Path(__file__).parent.parent / "cases" / "metrics" / "vllm-0.32.txt").read_bytes())
    assert scrape.model == "tiny"
    assert scrape.sources == {"local_compute": 0, "local_cache_hit": 0, "external_kv_transfer": 429}
    assert (scrape.transfer_count, scrape.ttft_count) == (1, 1)
    assert scrape.itl_buckets is not None and scrape.ttft_buckets is not None
    assert tuple(scrape.itl_buckets) == (*ITL_SECONDS, math.inf), "ours are its own, or its samples end up in wider ones"
    assert tuple(scrape.ttft_buckets) == (*TTFT_SECONDS, math.inf)
    assert scrape.itl_buckets[math.inf] == scrape.itl_count
    missing = [field for field in Scrape.__struct_fields__ if field != "restarted" and getattr(scrape, field) is None]
    assert not missing, f"vLLM has other names for {missing}"


def test_engines_of_one_worker_are_summed_and_their_cache_use_is_the_mean() -> None:
    second = PAGE.replace(b'engine="0"', b'engine="1"').replace(
        b'perc{engine="1",model_name="m"} 0.25', b'perc{engine="1"} 0.75'
    )
    scrape = parse(PAGE + second)
    assert (scrape.running, scrape.kv_usage, scrape.kv_tokens, scrape.itl_count) == (6, 0.5, 32_000, 100)


def test_an_empty_page_says_nothing() -> None:
    assert parse(b"") == Scrape()


@pytest.mark.parametrize(
    "line",
    [
        b'vllm:num_requests_running{model_name="m"} NaN',
        b'vllm:num_requests_running{model_name="m"} +Inf',
        b'vllm:num_requests_running{model_name="m"} -1',
        b'vllm:num_requests_running{model_name="m"} 1e300',
        b'vllm:num_requests_running{model_name="m"} seven',
        b'vllm:num_requests_running{model_name="m"} ' + b"9" * 400,
        b'vllm:num_requests_running{model_name="m"}',
        b'vllm:num_requests_running{model_name="m"',
        b"vllm:num_requests_running",
        b"vllm:num_requests_running_of_others 7",
        b"num_requests_running 7",
        b" vllm:num_requests_running 7",
        b"# vllm:num_requests_running 7",
        b'vllm:cache_config_info{block_size="x",num_gpu_blocks="1000"} 1.0',
        b'vllm:cache_config_info{xblock_size="16",num_gpu_blocks="1000"} 1.0',
        b"vllm:cache_config_info 1.0",
        b'vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0',
        b"\xff\xfe\x00",
        b"process_start_time_seconds -5",
    ],
)
def test_a_line_that_makes_no_sense_is_left_out_and_the_others_count(line) -> None:
    assert parse(line) == Scrape()
    assert parse(line + b"\n" + PAGE) == SAID
    assert parse(PAGE + line) == SAID


@pytest.mark.parametrize(
    "line",
    [
        b"vllm:num_requests_running 7",
        b"vllm:num_requests_running{} 7",
        b'vllm:num_requests_running{model_name="a} b{c\\" d"} 7',
        b'vllm:num_requests_running{model_name="m"}   7.0 1700000000000',
        b'vllm:num_requests_running{model_name="m"} 7\r\n',
        b"vllm:num_requests_running\t7",
    ],
)
def test_spellings_that_the_format_allows_are_read(line) -> None:
    assert parse(line).running == 7


@given(st.lists(st.sampled_from(PAGE.splitlines()) | st.binary(max_size=60), max_size=30))
def test_no_page_makes_it_raise(lines) -> None:
    scrape = parse(b"\n".join(lines))
    assert scrape.kv_usage is None or 0 <= scrape.kv_usage <= 1


def changed(**values: float | None) -> Scrape:
    scrape = parse(PAGE)
    for name, value in values.items():
        setattr(scrape, name, value)
    return scrape


def test_a_counter_that_went_down_or_another_start_is_another_engine() -> None:
    assert not restarted(SAID, SAID)
    assert not restarted(SAID, changed(running=0, waiting=0, kv_usage=0, prompt_tokens=2000))
    assert restarted(SAID, changed(prompt_tokens=999))
    assert restarted(SAID, changed(process_start_s=1.7e9 + 60))
    assert not restarted(SAID, Scrape()), "what is missing has not gone down"


def test_means_are_of_the_time_since_the_last_page() -> None:
    now = changed(itl_sum_s=2.5, itl_count=70, transfer_sum_s=0.8, transfer_count=6, transfer_sum_bytes=8e9, transfer_sizes=6)
    load = now.load(SAID)
    assert load.itl_s == pytest.approx(0.05)
    assert load.transfer_s == pytest.approx(0.3)
    assert load.transfer_bytes == pytest.approx(3e9)
    assert (load.running, load.waiting, load.kv_usage, load.kv_tokens) == (3, 2, 0.25, 16_000)


def test_there_is_no_mean_of_nothing() -> None:
    for load in (SAID.load(None), SAID.load(SAID), Scrape().load(SAID), changed(itl_count=99, restarted=True).load(SAID)):
        assert (load.itl_s, load.transfer_s, load.transfer_bytes) == (None, None, None)
    assert changed(restarted=True).load(SAID).restarted


class Seen:
    """Takes what the scraper tells."""

    def __init__(self) -> None:
        self.scrapes: list[tuple[str, Scrape, float]] = []
        self.failures: list[tuple[str, str]] = []
        self._changed = asyncio.Event()

    def on_scrape(self, address: str, scrape: Scrape, at_s: float) -> None:
        self.scrapes.append((address, scrape, at_s))
        self._changed.set()

    def on_failure(self, address: str, reason: str) -> None:
        self.failures.append((address, reason))
        self._changed.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not holds():
                self._changed.clear()
                await self._changed.wait()


@asynccontextmanager
async def scraping(addresses: list[str], **settings) -> AsyncIterator[Seen]:
    seen = Seen()
    how = Scraping(**{"interval_s": 0.02, **settings})
    task = asyncio.create_task(LoadScraper(lambda: addresses, seen.on_scrape, seen.on_failure, settings=how).run())
    try:
        yield seen
    finally:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


@asynccontextmanager
async def serving(answer) -> AsyncIterator[str]:
    """A worker that answers as a test wants."""
    app = web.Application()
    app.router.add_get("/metrics", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_simulated_engines_are_read_and_a_restart_is_noticed() -> None:
    async with running(SimOptions(port=0, workers=2, speed=0, num_blocks=600, max_model_len=4096)) as workers:
        addresses = [worker.address for worker in workers]
        async with scraping(addresses) as seen, aiohttp.ClientSession() as http:
            body = {"model": workers[0].model.names[0], "prompt": "one two three", "max_tokens": 20}
            async with http.post(workers[0].url + "/v1/completions", json=body) as response:
                assert response.status == 200
            await seen.until(lambda: {address for address, *_ in seen.scrapes} == set(addresses))
            await seen.until(lambda: any(scrape.generation_tokens == 20 for _, scrape, _ in seen.scrapes))
            address, scrape = next((each, scrape) for each, scrape, _ in seen.scrapes if scrape.generation_tokens == 20)
            assert address == addresses[0]
            assert scrape.kv_tokens == 600 * 16
            assert (scrape.running, scrape.waiting) == (0, 0)
            assert scrape.prefix_queries
            assert scrape.itl_count
            assert scrape.prefill_count == 1
            assert scrape.transfer_count == 0
            assert not any(scrape.restarted for _, scrape, _ in seen.scrapes)
            await workers[0].restart()
            # Two workers may have been read before this wakes: the last scrape need not be the one that says it.
            await seen.until(lambda: any(scrape.restarted for _, scrape, _ in seen.scrapes))
            count = len(seen.scrapes)
            await seen.until(lambda: len(seen.scrapes) > count + 6)
            said = [address for address, scrape, _ in seen.scrapes if scrape.restarted]
            assert said == [addresses[0]], "by the worker that it is, and once"


async def test_workers_come_and_go() -> None:
    async def page(_: web.Request) -> web.Response:
        return web.Response(body=PAGE)

    async with serving(page) as one, serving(page) as other:
        addresses = [one]
        async with scraping(addresses) as seen:
            await seen.until(lambda: bool(seen.scrapes))
            addresses[:] = [other]
            await seen.until(lambda: any(address == other for address, *_ in seen.scrapes))
            await asyncio.sleep(0.05)
            seen.scrapes.clear()
            await seen.until(lambda: len(seen.scrapes) > 3)
            assert {address for address, *_ in seen.scrapes} == {other}
            times = [at_s for *_, at_s in seen.scrapes]
            assert times == sorted(times)


async def _redirect(_: web.Request) -> web.Response:
    raise web.HTTPFound("http://169.254.169.254/")


async def _too_large(_: web.Request) -> web.Response:
    return web.Response(body=b"x" * 100_000)


async def _endless(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b"vllm:num_requests_running 1\n" * 100)


async def _bomb(_: web.Request) -> web.Response:
    return web.Response(body=gzip.compress(PAGE + b"#" * 10_000_000), headers={"content-encoding": "gzip"})


async def _silent(_: web.Request) -> web.Response:
    await asyncio.sleep(60)
    return web.Response()


async def _other_program(_: web.Request) -> web.Response:
    return web.Response(body=b"process_start_time_seconds 1.7e9\n")


async def _broken(_: web.Request) -> web.Response:
    return web.Response(status=500, body=PAGE)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (_redirect, "status 302"),
        (_broken, "status 500"),
        (_too_large, "TooLargeError: over 50000 bytes"),
        (_endless, "TooLargeError: over 50000 bytes"),
        (_bomb, "no metric of vLLM in the answer"),
        (_silent, "TimeoutError"),
        (_other_program, "no metric of vLLM in the answer"),
    ],
)
async def test_a_worker_that_gives_no_page_is_a_failure_with_its_reason(answer, reason) -> None:
    async with serving(answer) as address, scraping([address], timeout_s=0.5, max_bytes=50_000) as seen:
        await seen.until(lambda: bool(seen.failures))
        assert seen.failures[0][0] == address
        assert reason in seen.failures[0][1]
        assert not seen.scrapes


async def test_nobody_there_is_a_failure_and_the_others_are_read_all_the_same() -> None:
    async def page(_: web.Request) -> web.Response:
        return web.Response(body=PAGE)

    async with serving(page) as good, serving(_silent) as silent:
        addresses = [good, silent, "127.0.0.1:1", "no address"]
        async with scraping(addresses, concurrent=2, timeout_s=0.3) as seen:
            await seen.until(lambda: {address for address, _ in seen.failures} == set(addresses[1:]))
            count = len(seen.scrapes)
            await seen.until(lambda: len(seen.scrapes) > count + 2)


async def test_no_more_workers_are_asked_at_once_than_allowed() -> None:
    asked = most = 0

    async def page(_: web.Request) -> web.Response:
        nonlocal asked, most
        asked += 1
        most = max(most, asked)
        await asyncio.sleep(0.01)
        asked -= 1
        return web.Response(body=PAGE)

    async with serving(page) as address:
        host, port = address.split(":")
        names = [f"127.0.0.{number}:{port}" for number in range(1, 9)]
        assert host == "127.0.0.1"
        async with serving_everywhere(page, int(port), names[1:]), scraping(names, concurrent=3) as seen:
            await seen.until(lambda: {name for name, *_ in seen.scrapes} == set(names))
    assert most <= 3


@asynccontextmanager
async def serving_everywhere(answer, port: int, addresses: list[str]) -> AsyncIterator[None]:
    app = web.Application()
    app.router.add_get("/metrics", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    for address in addresses:
        await web.TCPSite(runner, address.split(":")[0], port).start()
    try:
        yield
    finally:
        await runner.cleanup()
