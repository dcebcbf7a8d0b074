"""What the cache servers of the prefill workers say: whether they live, and how much of what was looked up they had.

For people and dashboards only: a worker whose cache server has died computes on its own, so nothing here makes the filter
unready or changes a decision. The names are those of LMCache 0.5.6.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any

import aiohttp
import msgspec

from extproc import bounded
from extproc.observe.logs import Logger
from extproc.observe.metrics import Metrics

_INTERVAL_S = 5.0
"""From one look at a server to the next."""
_TIMEOUT_S = 2.0
"""One answer."""
_MAX_BYTES = 4 << 20
"""A larger page is not read."""
_CONCURRENT = 16
"""Servers that are asked at once."""
_HIGHEST = 1e18
"""A greater value is garbage."""

_NOT_ASKED = "not asked yet"

_FIELDS = {
    b"lookup_requested_tokens_total": "lookup_tokens",
    b"lookup_hit_tokens_total": "hit_tokens",
    b"l1_usage_ratio": "usage",
    b"l1_memory_usage_bytes": "memory_bytes",
    b"l2_usage_bytes": "below_bytes",
}
_COUNTERS = ("lookup_tokens", "hit_tokens")
_SAMPLE = re.compile(rb"\nlmcache_mp_(%s)(?:\{.*\})?[ \t]+(\S{1,64})" % b"|".join(_FIELDS))


class CacheUse(msgspec.Struct, kw_only=True):
    """One page, summed over models and salts. A server counts a metric only once it has happened: until then it is 0."""

    lookup_tokens: float = 0.0
    """Tokens that workers looked up since the server started."""
    hit_tokens: float = 0.0
    """Tokens of these that it had, on any tier."""
    usage: float | None = None
    """Share of the memory tier in use, 0 to 1. None: not on the page."""
    memory_bytes: float = 0.0
    """In the memory tier."""
    below_bytes: float = 0.0
    """On the tiers below it, of this run of the server."""


def parse(text: bytes) -> CacheUse | None:
    """A page in Prometheus' text format; None if it is not of a cache server. Lines that make no sense are left out."""
    sums: dict[str, float] = {}
    usages = 0
    for name, written in _SAMPLE.findall(b"\n" + text):
        value = _number(written)
        if value is not None:
            field = _FIELDS[name]
            usages += field == "usage"
            sums[field] = sums.get(field, 0.0) + value
    if not sums:
        return None
    if usages:
        sums["usage"] = min(1.0, sums["usage"] / usages)
    return CacheUse(**sums)


def _number(written: bytes) -> float | None:
    try:
        value = float(written)
    except ValueError:
        return None
    return value if 0 <= value <= _HIGHEST else None  # NaN is not


def grown(before: float, now: float) -> float:
    """How much a counter has grown; all of it if it is less than before: the server was started again."""
    return now - before if now >= before else now


class _Seen(msgspec.Struct):
    """What is known of one server."""

    use: CacheUse | None = None
    """Of the last good look."""
    fault: str | None = _NOT_ASKED
    """Why the last look failed; None: it did not."""


class CacheServers:
    """Asks every server for its health and its metrics, on a steady beat."""

    def __init__(
        self,
        addresses: Sequence[str],
        metrics: Metrics,
        log: Logger,
        *,
        interval_s: float = _INTERVAL_S,
        timeout_s: float = _TIMEOUT_S,
    ) -> None:
        """``addresses``: ``host:port`` of the servers' HTTP ports."""
        self._metrics = metrics
        self._log = log
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._seen = {address: _Seen() for address in addresses}
        for address in self._seen:
            metrics.cache_server_up.labels(address).set(0)

    async def run(self) -> None:
        """Ask until cancelled, also where there is no server."""
        slots = asyncio.Semaphore(_CONCURRENT)
        async with aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=self._timeout_s),
            # A compressed page could be small here and huge when it is read.
            auto_decompress=False,
            headers={"accept": "text/plain", "accept-encoding": "identity"},
            cookie_jar=aiohttp.DummyCookieJar(),
        ) as session:
            while True:
                await asyncio.gather(*(self._look(session, slots, address) for address in self._seen))
                await asyncio.sleep(self._interval_s)

    def status(self) -> dict[str, Any]:
        """For people."""
        return {address: _shown(seen) for address, seen in self._seen.items()}

    async def _look(self, session: aiohttp.ClientSession, slots: asyncio.Semaphore, address: str) -> None:
        async with slots:
            found = await self._ask(session, address)
        if isinstance(found, str):
            self._down(address, found)
        else:
            self._up(address, found)

    async def _ask(self, session: aiohttp.ClientSession, address: str) -> CacheUse | str:
        """The page, or why there is none."""
        try:
            async with session.get(f"http://{address}/healthcheck", allow_redirects=False) as response:
                if response.status != 200:
                    return f"/healthcheck: status {response.status}"
                await bounded.read(response, _MAX_BYTES)
            async with session.get(f"http://{address}/metrics", allow_redirects=False) as response:
                if response.status != 200:
                    return f"/metrics: status {response.status}"
                use = parse(await bounded.read(response, _MAX_BYTES))
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, bounded.TooLargeError) as error:
            return f"{type(error).__name__}: {error}"
        return "/metrics: no metric of LMCache in the answer" if use is None else use

    def _up(self, address: str, use: CacheUse) -> None:
        seen, metrics = self._seen[address], self._metrics
        if seen.use is not None:  # what a server did before it was watched is not counted
            for name, counter in zip(
                _COUNTERS, (metrics.cache_server_lookup_tokens, metrics.cache_server_hit_tokens), strict=True
            ):
                counter.labels(address).inc(grown(getattr(seen.use, name), getattr(use, name)))
        metrics.cache_server_up.labels(address).set(1)
        if use.usage is not None:
            metrics.cache_server_usage.labels(address).set(use.usage)
        metrics.cache_server_below_bytes.labels(address).set(use.below_bytes)
        if seen.fault is not None:
            self._log.info("cache_server_up", server=address)
        seen.use, seen.fault = use, None

    def _down(self, address: str, fault: str) -> None:
        seen = self._seen[address]
        self._metrics.cache_server_up.labels(address).set(0)
        if seen.fault in (None, _NOT_ASKED):
            self._log.warning("cache_server_down", server=address, reason=fault)
        seen.fault = fault


def _shown(seen: _Seen) -> dict[str, Any]:
    shown: dict[str, Any] = {"up": seen.fault is None}
    if seen.fault is not None:
        shown["fault"] = seen.fault
    elif seen.use is not None:
        use = seen.use
        shown |= {
            "memory_usage": use.usage,
            "lookup_tokens": use.lookup_tokens,
            "hit_tokens": use.hit_tokens,
            "hit_share": round(use.hit_tokens / use.lookup_tokens, 4) if use.lookup_tokens else None,
            "below_bytes": use.below_bytes,
        }
    return shown
