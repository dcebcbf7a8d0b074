"""Which workers are live, and which models they serve: GETs on each of them, on a steady beat."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import aiohttp
import msgspec

from extproc import bounded
from extproc.config import Health
from extproc.observe.logs import Logger
from extproc.routing.pool import Endpoint, Pool
from extproc.tls.reasons import described, kind_of
from extproc.tls.workers import PLAIN, WorkerLink

_MODELS_EVERY = 10
"""Beats from one look at a worker's models to the next: adapters come and go."""

_MODELS_MAX_BYTES = 1 << 20


class _Models(msgspec.Struct, frozen=True):
    data: list[msgspec.Raw]


class _Card(msgspec.Struct, frozen=True):
    id: str


_models_decoder = msgspec.json.Decoder(_Models)
_card_decoder = msgspec.json.Decoder(_Card)


class Prober:
    """Sets ``live`` on the endpoints of a pool, and tells when one changes."""

    def __init__(
        self,
        pool: Pool,
        settings: Health,
        log: Logger,
        on_change: Callable[[Endpoint], None],
        *,
        own_headers: Mapping[str, str],
        link: WorkerLink = PLAIN,
        settle_s: float = 0.0,
        on_failure: Callable[[str], None] = lambda _kind: None,
    ) -> None:
        """``own_headers``: see :mod:`extproc.worker_key`. ``settle_s``: an endpoint that comes after :meth:`serving` is live so
        much later at the earliest, for others have to hear of it before they can be sent there. ``on_failure`` is told the kind
        of each failed probe: ``status``, ``timeout``, ``unreachable`` or ``tls``."""
        self._link = link
        self._settle_s = settle_s
        self._serving = False
        self._waits_s: dict[Endpoint, float] = {}
        """How long each endpoint that came is not asked at first."""
        self._on_failure = on_failure
        self._faults: dict[str, str] = {}
        self._headers = own_headers
        self._pool = pool
        self._settings = settings
        self._log = log
        self._on_change = on_change
        self._others = asyncio.Event()

    async def run(self) -> None:
        """Probe until cancelled."""
        timeout = aiohttp.ClientTimeout(total=self._settings.timeout_s)
        # A new connection each time shows that the worker takes some; with TLS, that would be a handshake for each.
        connector = aiohttp.TCPConnector(limit=0, force_close=self._link.context is None)
        watched: dict[Endpoint, asyncio.Task[None]] = {}
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session, asyncio.TaskGroup() as tasks:
            while True:
                present = set(self._pool.endpoints)
                for endpoint in watched.keys() - present:
                    watched.pop(endpoint).cancel()
                    self._faults.pop(endpoint.address, None)
                for endpoint in present - watched.keys():
                    wait_s = self._waits_s.get(endpoint, 0.0)
                    watched[endpoint] = tasks.create_task(self._watch(session, endpoint, wait_s))
                self._others.clear()
                await self._others.wait()

    def sync(self) -> None:
        """The pool has other endpoints than before."""
        new_s = self._settle_s if self._serving else 0.0
        self._waits_s = {endpoint: self._waits_s.get(endpoint, new_s) for endpoint in self._pool.endpoints}
        self._others.set()

    def serving(self) -> None:
        """From now on requests come: who comes later has to be heard of first."""
        self._serving = True

    def faults(self) -> dict[str, str]:
        """``ip:port`` -> what is wrong with a worker whose last probe failed."""
        return dict(self._faults)

    async def _watch(self, session: aiohttp.ClientSession, endpoint: Endpoint, wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        good = bad = beat = 0
        while True:
            fault = await self._probe(session, endpoint)
            good, bad = (good + 1, 0) if fault is None else (0, bad + 1)
            self._note(endpoint, fault, bad)
            if fault is None and (endpoint.models is None or beat % _MODELS_EVERY == 0):
                models = await self._models(session, endpoint)
                if models and models != endpoint.models:
                    self._pool.set_models(endpoint, models)
            beat += 1
            if not endpoint.live and good >= self._settings.healthy_threshold:
                self._set(endpoint, live=True, fault=None)
            elif endpoint.live and bad >= self._settings.unhealthy_threshold:
                self._set(endpoint, live=False, fault=fault)
            await asyncio.sleep(self._settings.interval_s)

    def _note(self, endpoint: Endpoint, fault: str | None, bad: int) -> None:
        """Keep what is wrong; a worker that was never live says it once, as no change will."""
        if fault is None:
            self._faults.pop(endpoint.address, None)
            return
        if not endpoint.live and bad == self._settings.unhealthy_threshold:
            self._log.warning("endpoint_not_live", endpoint=endpoint.address, fault=fault)
        self._faults[endpoint.address] = fault

    async def _probe(self, session: aiohttp.ClientSession, endpoint: Endpoint) -> str | None:
        """None if the worker is well, else what is wrong."""
        try:
            async with session.get(self._link.url(endpoint.address, self._settings.path), **self._link.how) as response:
                if response.status == 200:
                    return None
                self._on_failure("status")
                return f"status {response.status}"
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            tls = self._link.context is not None
            self._on_failure(kind_of(error, tls=tls))
            return described(error, tls=tls)

    async def _models(self, session: aiohttp.ClientSession, endpoint: Endpoint) -> dict[str, bytes] | None:
        """The models that the worker lists; None if it does not say (no such endpoint, or it wants a key)."""
        try:
            url = self._link.url(endpoint.address, "/v1/models")
            async with session.get(url, headers=self._headers, **self._link.how) as response:
                if response.status != 200:
                    return None
                listed = _models_decoder.decode(await bounded.read(response, _MODELS_MAX_BYTES))
                return {_card_decoder.decode(card).id: bytes(card) for card in listed.data}
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError, RecursionError, bounded.TooLargeError):
            return None

    def _set(self, endpoint: Endpoint, *, live: bool, fault: str | None) -> None:
        self._pool.set_live(endpoint, live)
        roles = "+".join(sorted(role.value for role in endpoint.roles))
        self._log.info("endpoint", role=roles, endpoint=endpoint.address, live=live, fault=fault)
        self._on_change(endpoint)
