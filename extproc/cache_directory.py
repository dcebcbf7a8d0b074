"""Ask LMCache's coordinator which servers hold a prompt (``POST /directory/lookup``, LMCache 0.5.6). Never for long.

Its answer names placements for every chunk and rank. A chunk counts for a server that holds it itself, or if it lies where all
servers can load it from; only what is complete from the beginning counts. The disk of a server that is gone stays in the
directory for good, so what counts is what servers hold that the coordinator hears of (``GET /instances``). When the coordinator
is slow or away or hears of no server, what our own prefills have stored counts instead (:mod:`extproc.routing.stores`); after
several failures it is left alone for a while.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache, partial
from itertools import groupby, takewhile

import aiohttp
import msgspec

from extproc import bounded
from extproc.config import CacheStore
from extproc.observe.logs import Logger
from extproc.observe.metrics import Metrics
from extproc.routing.pool import Pool, Role
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
_SERVERS_S = 5.0
"""From one look at which servers there are to the next: how often servers say that they are there."""
_NO_SALT = frozenset("@/\\\x00")
_MOST_SALT = 128
"""A salt with one of these, or longer, is none to LMCache (`ObjectKey` in `lmcache/v1/distributed/api.py`): nothing is stored
under it, and the question would be refused."""


_MOST_MODEL = 1024
"""Characters of a model's name. Answers are remembered by it, and a client may send any."""


class _Placement(msgspec.Struct, frozen=True):
    instance_id: str = ""
    shared: bool = False


class _Name(msgspec.Struct, frozen=True):
    chunk_hash_hex: str = ""


class _Key(msgspec.Struct, frozen=True):
    """One rank's part of a chunk; of one object group, where servers keep the layers' groups apart."""

    key: _Name = _Name()
    placements: list[_Placement] = []


class _Answer(msgspec.Struct, frozen=True):
    chunks: int = 0
    results: list[_Key] = []


class _Instance(msgspec.Struct, frozen=True):
    instance_id: str


class _Instances(msgspec.Struct, frozen=True):
    instances: list[_Instance]


class _Card(msgspec.Struct, frozen=True):
    root: str | None = None


_decoder = msgspec.json.Decoder(_Answer)
_instances_decoder = msgspec.json.Decoder(_Instances)
_card_decoder = msgspec.json.Decoder(_Card)


@lru_cache(maxsize=1024)
def _root(card: bytes) -> str | None:
    try:
        return _card_decoder.decode(card).root
    except (msgspec.MsgspecError, RecursionError):
        return None


def stored_as(pool: Pool, model: str) -> str:
    """The name under which a model's KV is stored: not the one that clients say, but what its engine was started with (`root`
    of its card in `/v1/models`; `model_config.model` in vLLM's connector). As it is, where no prefill worker says it."""
    for endpoint in pool.endpoints:
        card = (endpoint.models or {}).get(model) if Role.PREFILL in endpoint.roles else None
        root = None if card is None else _root(card)
        if root:
            return root
    return model


def leading_tokens(
    answer: _Answer, chunk_tokens: int, *, label: str | None, servers: frozenset[str] | None = None
) -> dict[str, int]:
    """Server -> tokens of the leading chunks that it can load, of all ranks. Without ``label`` all servers count as one.

    ``servers``: those that there are, None: not known. Chunks of others do not count. A chunk has as many keys as ranks, and
    more where a server keeps groups of layers apart: a group of which it needs the end only is taken for needed from the
    beginning, so that less may be found than there is.
    """
    runs = [list(run) for _, run in groupby(answer.results, key=lambda each: each.key.chunk_hash_hex)]
    if answer.chunks < 1 or len(runs) != answer.chunks:
        return {}
    chunks = [[_there(key.placements, servers) for key in run] for run in runs]
    if label is None:
        count = sum(1 for _ in takewhile(all, chunks))
        return {SHARED: count * chunk_tokens} if count else {}
    found = {}
    for name in {EVERYONE}.union(*(names for keys in chunks for names in keys)):
        count = sum(1 for _ in takewhile(partial(_all_there, name), chunks))
        if count:
            found[name] = count * chunk_tokens
    return found


def _there(placements: list[_Placement], servers: frozenset[str] | None) -> frozenset[str]:
    """Who can load it: servers, or :data:`EVERYONE`."""
    return frozenset(
        EVERYONE if each.shared else each.instance_id
        for each in placements
        if each.shared or servers is None or each.instance_id in servers
    )


def _all_there(name: str, keys: list[frozenset[str]]) -> bool:
    return all(name in names or EVERYONE in names for names in keys)


class _RefusedError(Exception):
    """It does not like this prompt; that says nothing of the next one."""


class CacheDirectory:
    """Use as an async context manager."""

    def __init__(
        self,
        settings: CacheStore,
        metrics: Metrics,
        log: Logger,
        *,
        stored_as: Callable[[str], str] = str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``settings.directory`` is given. ``stored_as``: model that a client says -> its name in the directory."""
        self._settings = settings
        self._metrics = metrics
        self._log = log
        self._stored_as = stored_as
        self._clock = clock
        self._known: OrderedDict[tuple[str, str, int], tuple[float, Mapping[str, int]]] = OrderedDict()
        self._failures = 0
        self._not_before_s = 0.0
        self._asking = 0
        self._servers: frozenset[str] | None = None

    async def __aenter__(self) -> CacheDirectory:
        self._session = aiohttp.ClientSession(
            auto_decompress=False,  # a compressed answer could be small here and huge when it is read
            headers={"content-type": "application/json", "accept-encoding": "identity"},
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self._watching = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._watching.cancel()
        with suppress(asyncio.CancelledError):
            await self._watching
        await self._session.close()

    async def look(self) -> None:
        """See which servers there are; what was known stays where nobody says. It never raises."""
        try:
            async with asyncio.timeout(_SERVERS_S):
                url = f"http://{self._settings.directory}/instances"
                async with self._session.get(url, allow_redirects=False) as response:
                    if response.status == 200:
                        listed = _instances_decoder.decode(await bounded.read(response, _MAX_BYTES))
                        self._servers = frozenset(each.instance_id for each in listed.instances)
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError, RecursionError, bounded.TooLargeError):
            return

    async def _watch(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(_SERVERS_S)

    async def lookup(self, chain: TokenChain, model: str) -> Mapping[str, int] | None:
        """Server -> leading tokens that it holds of a prompt; None: nobody could say in time. It never raises."""
        settings = self._settings
        salt = chain.cache_salt or ""
        unnamed = len(model) > _MOST_MODEL or len(salt) > _MOST_SALT or not _NO_SALT.isdisjoint(salt)
        if unnamed or chain.lora is not None or chain.items:
            return self._told(None, "not_asked")  # its keys cover neither adapters nor media
        tokens = min(chain.tokens, settings.directory_max_tokens) // settings.chunk_tokens * settings.chunk_tokens
        if not tokens:
            return {}
        now_s = self._clock()
        if self._servers is not None and not self._servers:
            return self._told(None, "no_servers")  # it was started again, and has not heard of any yet
        name = model, salt, chain.keys(settings.chunk_tokens)[tokens // settings.chunk_tokens - 1]
        known = self._known.get(name)
        if known is not None and now_s - known[0] < _FRESH_S:
            return self._told(known[1], "known")
        if now_s < self._not_before_s or self._asking >= _AT_ONCE:
            return self._told(None, "left_alone" if now_s < self._not_before_s else "busy")
        body = msgspec.json.encode(
            {
                "token_ids": chain.token_ids[:tokens].tolist(),
                "model_name": self._stored_as(model),
                "world_size": settings.world_size,
                "cache_salt": salt,
            }
        )
        self._asking += 1
        try:
            async with asyncio.timeout(settings.directory_timeout_s):
                answer = await self._ask(body)
            chunks = tokens // settings.chunk_tokens
            if answer.chunks != chunks:
                raise ValueError(f"{answer.chunks} chunks in {tokens} tokens: it has another cache_store.chunk_tokens")
        except TimeoutError:
            self._failed(f"no answer within {settings.directory_timeout_s:g} s")
            return self._told(None, "timeout")
        except _RefusedError:
            return self._told(None, "refused")
        except (aiohttp.ClientError, OSError, ValueError, RecursionError, bounded.TooLargeError) as error:
            self._failed(f"{type(error).__name__}: {error}")
            return self._told(None, "failed")
        finally:
            self._asking -= 1
            self._metrics.cache_directory_seconds.observe(self._clock() - now_s)
        self._failures = 0
        found = leading_tokens(answer, settings.chunk_tokens, label=settings.label, servers=self._servers)
        self._known[name] = now_s, found
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return self._told(found, "hit" if found else "miss")

    async def _ask(self, body: bytes) -> _Answer:
        url = f"http://{self._settings.directory}/directory/lookup"
        async with self._session.post(url, data=body, allow_redirects=False) as response:
            if response.status in (400, 422):
                raise _RefusedError
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
