"""The workers as the process sees them: who there is, who lives, how busy they are; and Envoy is told of the same ones.

Discovery changes the pool, probes say who is live, scrapes say who is busy. A worker that is no longer wanted stays until what
it has is finished; until then Envoy keeps it as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from extproc import xds
from extproc.config import Config
from extproc.discovery.choose import sources
from extproc.discovery.merge import Discovery
from extproc.dispatcher import Dispatcher
from extproc.observe.engines import Engines
from extproc.observe.kv_events.following import Following
from extproc.observe.load import LoadScraper, Scrape, restarted
from extproc.observe.logs import Logger
from extproc.observe.metrics import Metrics
from extproc.observe.probe import Prober
from extproc.routing.endpoint_spec import EndpointSet
from extproc.routing.partition import DEFAULT_POOL, POOL_LABEL, UNDECIDED
from extproc.routing.pool import Endpoint, Pool, Role
from extproc.tls.workers import PLAIN, WorkerLink
from extproc.warm_up import WarmUp
from extproc.xds_server import EndpointServer

_SWEEP_S = 0.5
_ENVOY_LEARNS_S = 0.5
"""Envoy is told of a new worker at once, and has no word for when all of its threads know it: some tens of milliseconds later.
A request that names a worker before that is answered 503."""
_FIRST_LOOK_S = 5.0
"""How long the start waits for DNS and the like, before Envoy is told that there is nobody."""


class Fleet:
    """Keeps the pool true. ``run`` must be running; ``endpoints`` is registered on the gRPC server."""

    def __init__(
        self,
        config: Config,
        dispatcher: Dispatcher,
        *,
        warm_up: WarmUp,
        engines: Engines,
        metrics: Metrics,
        log: Logger,
        on_change: Callable[[], None],
        own_headers: Mapping[str, str],
        link: WorkerLink = PLAIN,
        leads: Callable[[], bool] = lambda: True,
        kv_events: Following | None = None,
    ) -> None:
        """``on_change`` is called when a worker comes, goes, or changes between live and not; ``own_headers``: see
        :mod:`extproc.worker_key`. ``leads``: no other process of this filter scrapes workers and writes Envoy's files.
        ``kv_events``: what follows the workers' KV events; None: nothing does.

        Raises SourceError, and OSError where endpoint files cannot be written.
        """
        self._config = config
        self._dispatcher = dispatcher
        self._router = dispatcher.router
        self._warm_up = warm_up
        self._engines = engines
        self._metrics = metrics
        self._log = log
        self._on_change = on_change
        self._leads = leads
        self._kv_events = kv_events
        self._stale_files = asyncio.Event()
        self._scrapes: dict[str, Scrape] = {}
        self._shown: set[tuple[str, str]] = set()
        self.endpoints = EndpointServer(log, on_nack=lambda: metrics.discovery_reloads.labels("envoy", "refused").inc())
        self._prober = Prober(
            self.pool,
            config.health,
            log,
            self._on_probe,
            own_headers=own_headers,
            link=link,
            settle_s=_ENVOY_LEARNS_S,
            on_failure=lambda kind: metrics.probe_failures.labels(kind).inc(),
        )
        self._discovery = Discovery(
            sources(
                config.workers,
                self._on_refused,
                lambda verb, outcome: metrics.kubernetes_requests.labels(verb, outcome).inc(),
            ),
            on_change=self._on_discovery,
            on_outcome=lambda source, outcome: metrics.discovery_reloads.labels(source, outcome).inc(),
            log=log,
        )
        for kind in self._discovery.kinds():
            metrics.discovery_failing_seconds.labels(kind).set_function(partial(self._discovery.failing_s, kind))
        self._scraper = LoadScraper(
            lambda: [each.address for each in self.pool.endpoints if each.live] if leads() else [],
            self._on_scrape,
            lambda _address, _reason: metrics.scrapes.labels("failed").inc(),
            settings=config.scrape,
            link=link,
        )
        self.pool.on_move = self._tell
        if kv_events is not None:
            dispatcher.on_restart = kv_events.restarted  # its events have to show whether another engine is there
        if self.pool.partition is not None:
            self._count_pools(self.pool.partition.names)
        self._told: dict[str, list[str]] = {}
        """What Envoy reads in its files, if it was written here."""
        if leads():
            self._write_now(self._clusters())

    @property
    def pool(self) -> Pool:
        """All workers."""
        return self._router.pool

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for part in (self._discovery, self._prober, self._scraper, self._warm_up):
                tasks.create_task(part.run())
            if self._kv_events is not None:
                tasks.create_task(self._kv_events.run())
            tasks.create_task(self._sweep())
            tasks.create_task(self._follow_files())

    def lead(self) -> None:
        """From now on Envoy's files are written here."""
        self._told = {}
        self._stale_files.set()

    async def first_look(self) -> None:
        """Wait until every source of workers has been asked once. Requests can come after that."""
        await self._discovery.first_look(_FIRST_LOOK_S)
        self._prober.serving()

    def status(self) -> dict[str, Any]:
        """For people."""
        return {
            "live": {
                role.value: [
                    each.address for each in self.pool.endpoints if each.live and not each.leaving and role in each.roles
                ]
                for role in Role
            },
            "faults": self._prober.faults(),
            **({} if self.pool.partition is None else {"pools": self._pools(self.pool.partition.names)}),
            "leaving": [each.address for each in self.pool.endpoints if each.leaving],
            "warm_up": self._warm_up.status(),
            "discovery": self._discovery.status(),
            **({} if self._kv_events is None else {"kv_events": self._kv_events.status()}),
            "envoy": self.endpoints.status(),
        }

    def _count_pools(self, names: Sequence[str]) -> None:
        """The gauges of live workers by pool."""
        for name in (*names, UNDECIDED):
            for role in Role:
                gauge = self._metrics.pool_workers.labels(name, role.value)
                gauge.set_function(partial(self._live_in, name, role))

    def _live_in(self, pool: str, role: Role) -> int:
        return sum(each.labels[POOL_LABEL] == pool for each in self.pool.live(role))

    def _pools(self, names: Sequence[str]) -> dict[str, dict[str, int]]:
        """Pool -> role -> live workers."""
        found = {name: {role.value: 0 for role in Role} for name in (*names, UNDECIDED)}
        for role in Role:
            for each in self.pool.live(role):
                found[each.labels[POOL_LABEL]][role.value] += 1
        if not any(found[UNDECIDED].values()):
            del found[UNDECIDED]
        return found

    # -- what changes ------------------------------------------------------------------------------------------------------

    def _on_discovery(self, found: EndpointSet) -> None:
        others = self.pool.replace(found)
        self._router.sync()
        for endpoint in others:
            self._scrapes.pop(endpoint.address, None)
            self._dispatcher.restarted(endpoint)
        self._changed()

    def _on_refused(self, source: str, address: str, why: str) -> None:
        self._log.error("endpoint_refused", source=source, endpoint=address, why=why)
        self._metrics.endpoints_refused.labels(source).inc()

    def _on_probe(self, endpoint: Endpoint) -> None:
        if endpoint.live:
            self._warm_up.came(endpoint.address, again=endpoint.address in self._scrapes)
        else:
            self._warm_up.sync()
        self._dispatcher.stir()
        self._on_change()

    def _on_scrape(self, address: str, scrape: Scrape, asked_s: float) -> None:
        endpoint = self.pool.get(address)
        if endpoint is None:
            return  # it went while it was asked
        self._metrics.scrapes.labels("ok").inc()
        self._engines.on_scrape(address, endpoint.roles, scrape, asked_s)
        before = self._scrapes.get(address)
        # The scraper forgets a worker that is away.
        scrape.restarted |= before is not None and restarted(before, scrape)
        load = scrape.load(before)
        if self._warm_up.took_transfer(address):
            load = msgspec.structs.replace(load, transfer_s=None, transfer_bytes=None)
        self._dispatcher.on_load(address, load)
        self._router.told.reported(address, load)
        self._scrapes[address] = scrape
        known = before is not None and None not in (before.process_start_s, scrape.process_start_s)
        self._warm_up.reported(address, same=known and not scrape.restarted)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            gone = self._router.sweep()
            if gone:
                self._log.info("endpoints_gone", endpoints=gone)
                self._dispatcher.gone(gone)
                self._changed()

    def _changed(self) -> None:
        self._prober.sync()
        self._warm_up.sync()
        if self._kv_events is not None:
            self._kv_events.sync()
        self._expose()
        self._tell()
        self._dispatcher.stir()
        self._on_change()

    # -- who is told -------------------------------------------------------------------------------------------------------

    def _clusters(self) -> dict[str, list[str]]:
        """What Envoy knows of the workers: those that are leaving too, as long as something is on its way to them."""
        partition = self.pool.partition
        found: dict[str, list[str]] = {
            xds.cluster_of(role.value, pool): []
            for pool in ((DEFAULT_POOL,) if partition is None else partition.names)
            for role in Role
        }
        for each in self.pool.endpoints:
            pool = each.labels.get(POOL_LABEL, DEFAULT_POOL)
            if pool != UNDECIDED:
                for role in each.roles:
                    found[xds.cluster_of(role.value, pool)].append(each.address)
        return {name: sorted(addresses) for name, addresses in found.items()}

    def _tell(self) -> None:
        """Envoy, over gRPC at once; its files are written beside the event loop."""
        self.endpoints.publish(self._clusters())
        self._stale_files.set()

    async def _follow_files(self) -> None:
        """Write the files whenever they are out of date. What goes wrong is tried again."""
        while True:
            await self._stale_files.wait()
            self._stale_files.clear()
            clusters = self._clusters()
            if clusters == self._told or not self._leads():
                continue
            try:
                await asyncio.to_thread(self._write_now, clusters)
            except OSError as error:
                self._log.error("endpoints_not_written", why=str(error))
                self._metrics.discovery_reloads.labels("files", "failed").inc()
                await asyncio.sleep(_SWEEP_S)
                self._stale_files.set()

    def _write_now(self, clusters: dict[str, list[str]]) -> None:
        """Raises OSError."""
        directory = self._config.envoy.eds_dir
        if directory is not None:
            for cluster, addresses in clusters.items():
                xds.write_endpoints(Path(directory), cluster, addresses)
            self._log.info("endpoints_written", directory=directory, **{name: len(each) for name, each in clusters.items()})
        self._told = clusters

    def _expose(self) -> None:
        """The gauges of every worker, and those of no other."""
        present = {
            (role.value, endpoint.address): (endpoint, role)
            for endpoint in self.pool.endpoints
            for role in sorted(endpoint.roles, key=lambda each: each.value)
        }
        gauges = (self._metrics.endpoint_live, self._metrics.endpoint_in_flight, self._metrics.endpoint_tokens)
        for labels in self._shown - present.keys():
            for gauge in gauges:
                gauge.remove(*labels)
        for labels in present.keys() - self._shown:
            endpoint, role = present[labels]
            leg = endpoint.leg(role)
            self._metrics.endpoint_live.labels(*labels).set_function(partial(getattr, endpoint, "live"))
            self._metrics.endpoint_in_flight.labels(*labels).set_function(partial(getattr, leg, "own_requests"))
            self._metrics.endpoint_tokens.labels(*labels).set_function(partial(getattr, leg, "own_tokens"))
        for address in {address for _, address in self._shown} - {address for _, address in present}:
            self._scrapes.pop(address, None)
            self._engines.gone(address)
        self._shown = set(present)
