"""Ask LMCache's coordinator which servers hold a prompt (``POST /directory/lookup``, LMCache 0.5.6). Never for long.

Its answer names placements for every chunk and rank. A chunk counts for a server that holds it itself, or if it lies where all
servers can load it from; only what is complete from the beginning counts. When the coordinator is slow or away, what our own
prefills have stored counts instead (:mod:`extproc.routing.stores`), and it is left alone for a while.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from itertools import takewhile

import aiohttp
import msgspec

from extproc import bounded
from extproc.config import CacheStore
from extproc.observe.logs import Logger
from extproc.observe.metrics import Metrics
from extproc.routing.stores import EVERYONE, SHARED
from extproc.routing.token_chain import TokenChain

_MAX_BYTES = 8 << 20
"""A larger answer is not read. It repeats the token ids, eight bytes or less each."""
_FAILURES = 5
"""In a row, and it is left alone for :data:`_PAUSE_S`."""
_PAUSE_S = 10.0
_AT_ONCE = 64
"""Questions under way; one more is not asked."""
_REMEMBERED, _FRESH_S = 1_000, 1.0
"""Answers, and for how long they count."""


class _Placement(msgspec.Struct, frozen=True):
    instance_id: str = ""
    shared: bool = False


class _Key(msgspec.Struct, frozen=True):
    placements: list[_Placement] = []


class _Answer(msgspec.Struct, frozen=True):
    chunks: int = 0
    results: list[_Key] = []


_decoder = msgspec.json.Decoder(_Answer)


def leading_tokens(answer: _Answer, chunk_tokens: int, *, label: str | None) -> dict[str, int]:
    """Server -> tokens of the leading chunks that it can load, of all ranks. Without ``label`` all servers count as one."""
    if answer.chunks < 1 or len(answer.results) % answer.chunks:
        return {}
    ranks = len(answer.results) // answer.chunks
    chunks = [answer.results[at : at + ranks] for at in range(0, len(answer.results), ranks)]
    if label is None:
        count = sum(1 for _ in takewhile(lambda keys: all(key.placements for key in keys), chunks))
        return {SHARED: count * chunk_tokens} if count else {}
    found = {}
    names = {each.instance_id for key in answer.results for each in key.placements if not each.shared}
    for name in (EVERYONE, *names):
        count = sum(1 for _ in takewhile(partial(_all_there, name), chunks))
        if count:
            found[name] = count * chunk_tokens
    return found


def _all_there(name: str, keys: list[_Key]) -> bool:
    return all(any(each.shared or each.instance_id == name for each in key.placements) for key in keys)


class CacheDirectory:
    """Use as an async context manager."""

    def __init__(
        self, settings: CacheStore, metrics: Metrics, log: Logger, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``settings.directory`` is given."""
        self._settings = settings
        self._metrics = metrics
        self._log = log
        self._clock = clock
        self._known: OrderedDict[tuple[str, str | None, int], tuple[float, Mapping[str, int]]] = OrderedDict()
        self._failures = 0
        self._not_before_s = 0.0
        self._asking = 0

    async def __aenter__(self) -> CacheDirectory:
        self._session = aiohttp.ClientSession(
            auto_decompress=False,  # a compressed answer could be small here and huge when it is read
            headers={"content-type": "application/json", "accept-encoding": "identity"},
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def lookup(self, chain: TokenChain, model: str) -> Mapping[str, int] | None:
        """Server -> leading tokens that it holds of a prompt; None: nobody could say in time. It never raises."""
        settings = self._settings
        if chain.lora is not None or chain.items:
            return self._told(None, "not_asked")  # its keys cover neither adapters nor media
        tokens = min(chain.tokens, settings.directory_max_tokens) // settings.chunk_tokens * settings.chunk_tokens
        if not tokens:
            return {}
        now_s = self._clock()
        name = model, chain.cache_salt, chain.keys(settings.chunk_tokens)[tokens // settings.chunk_tokens - 1]
        known = self._known.get(name)
        if known is not None and now_s - known[0] < _FRESH_S:
            return self._told(known[1], "known")
        if now_s < self._not_before_s or self._asking >= _AT_ONCE:
            return self._told(None, "left_alone" if now_s < self._not_before_s else "busy")
        body = msgspec.json.encode(
            {
                "token_ids": chain.token_ids[:tokens].tolist(),
                "model_name": model,
                "world_size": settings.world_size,
                "cache_salt": chain.cache_salt or "",
            }
        )
        self._asking += 1
        try:
            async with asyncio.timeout(settings.directory_timeout_s):
                answer = await self._ask(body)
        except TimeoutError:
            self._failed(f"no answer within {settings.directory_timeout_s:g} s")
            return self._told(None, "timeout")
        except (aiohttp.ClientError, OSError, ValueError, RecursionError, bounded.TooLargeError) as error:
            self._failed(f"{type(error).__name__}: {error}")
            return self._told(None, "failed")
        finally:
            self._asking -= 1
            self._metrics.cache_directory_seconds.observe(self._clock() - now_s)
        self._failures = 0
        found = leading_tokens(answer, settings.chunk_tokens, label=settings.label)
        self._known[name] = now_s, found
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return self._told(found, "hit" if found else "miss")

    async def _ask(self, body: bytes) -> _Answer:
        url = f"http://{self._settings.directory}/directory/lookup"
        async with self._session.post(url, data=body, allow_redirects=False) as response:
            if response.status != 200:
                raise ValueError(f"status {response.status}")
            return _decoder.decode(await bounded.read(response, _MAX_BYTES))

    def _failed(self, why: str) -> None:
        self._failures += 1
        if self._failures >= _FAILURES:
            self._failures = 0
            self._not_before_s = self._clock() + _PAUSE_S
            self._log.warning("cache_directory_left_alone", directory=self._settings.directory, reason=why, pause_s=_PAUSE_S)

    def _told(self, found: Mapping[str, int] | None, outcome: str) -> Mapping[str, int] | None:
        self._metrics.cache_directory.inc(outcome)
        return found
