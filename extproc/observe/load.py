"""What each worker says about its load: its ``/metrics``, read on a steady beat.

The names are those of vLLM 0.32.
"""

from __future__ import annotations

import asyncio
import math
import random
import re
import time
from collections.abc import Callable, Iterable
from functools import lru_cache

import aiohttp
import msgspec

from extproc import bounded
from extproc.routing.load import Load
from extproc.tls.reasons import described
from extproc.tls.workers import PLAIN, WorkerLink


class Scraping(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the workers' `/metrics` are read."""

    interval_s: float = 1.0
    """From the beginning of one look at a worker to the next."""
    timeout_s: float = 2.0
    """A worker without an answer by then has failed to report."""
    max_bytes: int = 4 << 20
    """A larger page is not read."""
    concurrent: int = 32
    """Workers that are asked at once."""


class Scrape(msgspec.Struct, kw_only=True):
    """One page, summed over the engines of a worker (data parallel ranks). None: it was not there."""

    running: float | None = None
    """Requests in the scheduler's batches."""
    waiting: float | None = None
    """Requests that wait for the scheduler."""
    kv_usage: float | None = None
    """Share of the KV cache in use, 0 to 1; the mean over the engines."""
    kv_tokens: int | None = None
    """Size of the KV cache."""
    block_tokens: int | None = None
    """Tokens in a KV block, where all engines have the same."""
    prefix_queries: float | None = None
    """Tokens that were looked up in the prefix cache, since the engine started. So are all below."""
    prefix_hits: float | None = None
    """Tokens that were found there."""
    prompt_tokens: float | None = None
    generation_tokens: float | None = None
    itl_sum_s: float | None = None
    """Time between tokens."""
    itl_count: float | None = None
    itl_buckets: dict[float, float] | None = None
    """Upper bound in seconds -> how many were up to it."""
    ttft_sum_s: float | None = None
    """From the request's arrival at the engine to its first token."""
    ttft_count: float | None = None
    ttft_buckets: dict[float, float] | None = None
    prefill_sum_s: float | None = None
    """From being scheduled to the first token."""
    prefill_count: float | None = None
    transfer_sum_s: float | None = None
    """KV transfers, counted where they are received."""
    transfer_count: float | None = None
    transfer_sum_bytes: float | None = None
    transfer_sizes: float | None = None
    """How many transfers ``transfer_sum_bytes`` is made of."""
    failed_transfers: float | None = None
    failed_notifications: float | None = None
    """A decode worker could not tell that it is done with blocks."""
    expired_requests: float | None = None
    """Prefilled, and not fetched within the lease."""
    late_notifications: float | None = None
    """A decode worker was done with blocks after their lease."""
    preemptions: float | None = None
    sources: dict[str, float] | None = None
    """Prompt tokens by where their KV came from, under vLLM's names for that."""
    rank_running: tuple[float, ...] = ()
    """As `running`, of each engine in the order of their numbers. Empty: there is one, or too many, or they do not say the
    same."""
    rank_waiting: tuple[float, ...] = ()
    model: str | None = None
    """The name under which the engine reports."""
    process_start_s: float | None = None
    """When the process started, Unix time."""
    restarted: bool = False
    """It is not the engine of the last page any more: its cache is empty."""

    def load(self, before: Scrape | None) -> Load:
        """The same as the decision wants it, with means over the time since ``before``; none of those on a first page."""
        load = Load(
            running=self.running,
            waiting=self.waiting,
            kv_usage=self.kv_usage,
            kv_tokens=self.kv_tokens,
            block_tokens=self.block_tokens,
            rank_running=self.rank_running,
            rank_waiting=self.rank_waiting,
            restarted=self.restarted,
        )
        if before is None or self.restarted:
            return load
        return msgspec.structs.replace(
            load,
            itl_s=_mean(before.itl_sum_s, before.itl_count, self.itl_sum_s, self.itl_count),
            transfer_s=_mean(before.transfer_sum_s, before.transfer_count, self.transfer_sum_s, self.transfer_count),
            transfer_bytes=_mean(
                before.transfer_sum_bytes, before.transfer_sizes, self.transfer_sum_bytes, self.transfer_sizes
            ),
        )


def _mean(sum_before: float | None, count_before: float | None, sum_now: float | None, count_now: float | None) -> float | None:
    """Of what was observed in between; None if nothing was."""
    if sum_now is None or count_now is None:
        return None
    count = count_now - (count_before or 0)
    total = sum_now - (sum_before or 0)
    return total / count if count > 0 and total >= 0 else None


_FIELDS = {
    b"num_requests_running": "running",
    b"num_requests_waiting": "waiting",
    b"kv_cache_usage_perc": "kv_usage",
    b"prefix_cache_queries_total": "prefix_queries",
    b"prefix_cache_hits_total": "prefix_hits",
    b"prompt_tokens_total": "prompt_tokens",
    b"generation_tokens_total": "generation_tokens",
    b"inter_token_latency_seconds_sum": "itl_sum_s",
    b"inter_token_latency_seconds_count": "itl_count",
    b"request_prefill_time_seconds_sum": "prefill_sum_s",
    b"request_prefill_time_seconds_count": "prefill_count",
    b"nixl_xfer_time_seconds_sum": "transfer_sum_s",
    b"nixl_xfer_time_seconds_count": "transfer_count",
    b"nixl_bytes_transferred_sum": "transfer_sum_bytes",
    b"nixl_bytes_transferred_count": "transfer_sizes",
    b"nixl_num_failed_transfers_total": "failed_transfers",
    b"nixl_num_failed_notifications_total": "failed_notifications",
    b"nixl_num_kv_expired_reqs_total": "expired_requests",
    b"nixl_num_notifications_after_expiry_total": "late_notifications",
    b"num_preemptions_total": "preemptions",
    b"time_to_first_token_seconds_sum": "ttft_sum_s",
    b"time_to_first_token_seconds_count": "ttft_count",
}

_HISTOGRAMS = {
    b"\nvllm:inter_token_latency_seconds_bucket{": "itl_buckets",
    b"\nvllm:time_to_first_token_seconds_bucket{": "ttft_buckets",
}
_BUCKETS = {start: re.compile(start + rb'(?:.*?,)?le="([^"]{1,64})".*\}[ \t]+(\S{1,64})') for start in _HISTOGRAMS}

_SOURCES = b"prompt_tokens_by_source_total"

_BY_RANK = (b"num_requests_running", b"num_requests_waiting")
_MOST_RANKS = 64
"""As of KV events: of no more is one named. Processes tell each other of them in datagrams, which have to hold them."""

_COUNTERS = ("prefix_queries", "prompt_tokens", "generation_tokens", "itl_count", "prefill_count", "transfer_count")
"""What only a new engine has less of."""

_CACHE = b"cache_config_info"

# The newline and the prefix are literal, so that the search jumps from line to line; most lines are buckets of histograms.
_SAMPLE = re.compile(rb"\nvllm:(%s)(?:\{(.*)\})?[ \t]+(\S{1,64})" % b"|".join((*_FIELDS, _CACHE, _SOURCES)))
_SOURCE = re.compile(rb'(?:^|,)source="([a-z_]{1,64})"')
_ENGINE = re.compile(rb'(?:^|,)engine="(\d{1,9})"')
_MODEL = re.compile(rb'(?:^|,)model_name="([^"\\]{1,256})"')
_PROCESS_START = re.compile(rb"\nprocess_start_time_seconds(?:\{.*\})?[ \t]+(\S{1,64})")
_BLOCKS = re.compile(rb',num_gpu_blocks="(\d{1,12})"')
_BLOCK_SIZE = re.compile(rb',block_size="(\d{1,9})"')

_PAUSE = 4
"""How many times as long as a failed look at a worker took, nobody looks at it again."""

_HIGHEST = 1e18
"""A greater value is garbage."""


def parse(text: bytes) -> Scrape:
    """A page in Prometheus' text format. Lines that make no sense, and values that are negative or no number, are left out."""
    sums: dict[str, float] = {}
    sources: dict[str, float] = {}
    ranks: dict[bytes, dict[int, float]] = {name: {} for name in _BY_RANK}
    model: str | None = None
    kv_tokens = usages = 0
    sizes: set[int] = set()
    page = b"\n" + text
    for name, labels, written in _SAMPLE.findall(page):
        value = _number(written)
        if value is None:
            continue
        if name == _CACHE:
            labels = b"," + labels
            blocks, size = _BLOCKS.search(labels), _BLOCK_SIZE.search(labels)
            if blocks and size:
                kv_tokens += int(blocks[1]) * int(size[1])
                sizes.add(int(size[1]))
            continue
        if name == _SOURCES:
            if source := _SOURCE.search(labels):
                where = source[1].decode()
                sources[where] = sources.get(where, 0.0) + value
            continue
        if name == b"num_requests_running" and (named := _MODEL.search(labels)):
            model = named[1].decode("utf-8", "replace")
        if name in ranks and (engine := _ENGINE.search(labels)):
            of = ranks[name]
            of[int(engine[1])] = of.get(int(engine[1]), 0.0) + value
        field = _FIELDS[name]
        usages += field == "kv_usage"
        sums[field] = sums.get(field, 0.0) + value
    if usages:
        sums["kv_usage"] = min(1.0, sums["kv_usage"] / usages)
    starts = (_number(found[1]) for found in _PROCESS_START.finditer(page))
    start_s = next((value for value in starts if value is not None), None)
    scrape = Scrape(
        kv_tokens=kv_tokens or None,
        block_tokens=sizes.pop() if len(sizes) == 1 else None,
        sources=sources or None,
        model=model,
        process_start_s=start_s,
    )
    running, waiting = (ranks[name] for name in _BY_RANK)
    if 1 < len(running) <= _MOST_RANKS and running.keys() == waiting.keys():
        scrape.rank_running, scrape.rank_waiting = (tuple(of[number] for number in sorted(of)) for of in (running, waiting))
    for field, buckets in _buckets(page).items():
        setattr(scrape, field, buckets)
    for field, total in sums.items():
        setattr(scrape, field, total)
    return scrape


def _buckets(page: bytes) -> dict[str, dict[float, float]]:
    """Of the histograms, by field; engines are summed."""
    found: dict[str, dict[float, float]] = {}
    for start, field in _HISTOGRAMS.items():
        first = page.find(start)
        if first < 0:
            continue
        # The lines of a family stand together, up to the next comment: the rest of the page need not be searched.
        end = page.find(b"\n#", first)
        buckets: dict[float, float] = {}
        for le, written in _BUCKETS[start].findall(page, first, end if end >= 0 else len(page)):
            bound, samples = _bound(le), _number(written)
            if bound is not None and samples is not None:
                buckets[bound] = buckets.get(bound, 0.0) + samples
        if buckets:
            found[field] = buckets
    return found


@lru_cache(maxsize=256)
def _bound(written: bytes) -> float | None:
    return math.inf if written == b"+Inf" else _number(written)


def _number(written: bytes) -> float | None:
    try:
        value = float(written)
    except ValueError:
        return None
    return value if 0 <= value <= _HIGHEST else None  # NaN is not


def restarted(before: Scrape, now: Scrape) -> bool:
    """Whether the two pages are of different engines: another start of the process, or a counter that went down."""
    starts = before.process_start_s, now.process_start_s
    if starts[0] is not None and starts[1] is not None and abs(starts[1] - starts[0]) > 0.5:
        return True
    for name in _COUNTERS:
        earlier, later = getattr(before, name), getattr(now, name)
        if earlier is not None and later is not None and later < earlier:
            return True
    return False


class LoadScraper:
    """Asks every worker for its metrics, each at a moment of its own within the interval."""

    def __init__(
        self,
        addresses: Callable[[], Iterable[str]],
        on_scrape: Callable[[str, Scrape, float], None],
        on_failure: Callable[[str, str], None],
        *,
        settings: Scraping | None = None,
        link: WorkerLink = PLAIN,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """``addresses`` (``ip:port``) is called once in an interval, so the workers may change.

        ``on_scrape(address, scrape, at_s)``: ``at_s`` is ``clock()`` when the worker was asked, so that the page knows
        nothing of what happened after it. ``on_failure(address, reason)``. Both must return at once. ``jitter`` gives
        numbers from 0 to 1.
        """
        self._addresses = addresses
        self._on_scrape = on_scrape
        self._on_failure = on_failure
        self._settings = settings or Scraping()
        self._link = link
        self._clock = clock
        self._jitter = jitter
        self._slots = asyncio.Semaphore(self._settings.concurrent)

    async def run(self) -> None:
        """Ask until cancelled."""
        timeout = aiohttp.ClientTimeout(total=self._settings.timeout_s)
        connector = aiohttp.TCPConnector(limit=0)
        watched: dict[str, asyncio.Task[None]] = {}
        async with (
            # A compressed page could be small here and huge when it is read.
            aiohttp.ClientSession(
                connector=connector,
                timeout=timeout,
                auto_decompress=False,
                headers={"accept": "text/plain", "accept-encoding": "identity"},
                cookie_jar=aiohttp.DummyCookieJar(),
            ) as session,
            asyncio.TaskGroup() as tasks,
        ):
            while True:
                current = dict.fromkeys(self._addresses())
                for address in watched.keys() - current.keys():
                    watched.pop(address).cancel()
                for address in current:
                    if address not in watched:
                        watched[address] = tasks.create_task(self._watch(session, address))
                await asyncio.sleep(self._settings.interval_s)

    async def _watch(self, session: aiohttp.ClientSession, address: str) -> None:
        interval_s = self._settings.interval_s
        await asyncio.sleep(interval_s * self._jitter())
        before: Scrape | None = None
        due_s = self._clock()
        while True:
            async with self._slots:
                asked_s = self._clock()
                scrape = await self._ask(session, address)
            due_s = max(due_s + interval_s, self._clock())  # late is late: no rush to make up for it
            if isinstance(scrape, str):
                # One that does not answer holds its slot for long. It must not have them all.
                due_s += _PAUSE * (self._clock() - asked_s)
                self._on_failure(address, scrape)
            else:
                scrape.restarted = before is not None and restarted(before, scrape)
                before = scrape
                self._on_scrape(address, scrape, asked_s)
            await asyncio.sleep(due_s - self._clock())

    async def _ask(self, session: aiohttp.ClientSession, address: str) -> Scrape | str:
        """The page, or why there is none."""
        try:
            async with session.get(self._link.url(address, "/metrics"), **self._link.how) as response:
                if response.status != 200:
                    return f"status {response.status}"
                scrape = parse(await bounded.read(response, self._settings.max_bytes))
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, bounded.TooLargeError) as error:
            return described(error)
        nothing = Scrape(process_start_s=scrape.process_start_s)  # any program in Python has that one
        return scrape if scrape != nothing else "no metric of vLLM in the answer"
