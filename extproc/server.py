"""The process: gRPC server, health, admin port, drain. Start-up, main loop and shutdown read top to bottom."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from extproc import __version__, admin, memory, wire
from extproc.attempts import Prefiller
from extproc.cache_directory import CacheDirectory, stored_as
from extproc.config import Address, Config, ConfigError
from extproc.debug import Debug
from extproc.discovery.source import SourceError
from extproc.dispatcher import Dispatcher, live_decode_worker
from extproc.epp import metrics_port
from extproc.epp.health import HealthPort
from extproc.explain import Explainer
from extproc.filter import Filter
from extproc.fleet import Fleet
from extproc.handoff.choose import connector as choose_connector
from extproc.handoff.remote_hosts import RemoteHosts
from extproc.intake import Intake
from extproc.journey import Parts
from extproc.kv import routing_of
from extproc.live import Live
from extproc.next_turn.store import NextTurns
from extproc.observe.cache_servers import CacheServers
from extproc.observe.engines import Engines
from extproc.observe.kv_events.following import Following
from extproc.observe.log_writer import LogWriter
from extproc.observe.logs import Logger, take_over
from extproc.observe.metrics import Metrics
from extproc.observe.observer import Observer
from extproc.observe.pulse import Pulse
from extproc.observe.request_log import RequestLog
from extproc.observe.seldom import Seldom
from extproc.pools.route_only import RouteFilter
from extproc.pools.routes import RouteHeaders
from extproc.pools.settings import partition
from extproc.prefill import PrefillClient
from extproc.processes.ledger import SharedLedger
from extproc.processes.lifeline import Lifeline
from extproc.processes.member import Member, config_of
from extproc.processes.pages import SiblingPages
from extproc.processes.post import Post
from extproc.processes.siblings import Siblings
from extproc.prompt import BytesPerToken
from extproc.recent import Recent
from extproc.release import Releaser
from extproc.replicas import ledger as replicas
from extproc.routing.endpoint_spec import EndpointSet
from extproc.routing.holdings import Holdings
from extproc.routing.pool import Pool
from extproc.routing.router import Router
from extproc.routing.stores import Stores
from extproc.tls.files import FileFollower, Followed
from extproc.tls.workers import WorkerLink
from extproc.tokens.source import TokenSource
from extproc.tokens.tokenizer import FolderError
from extproc.transport.call import Server as GrpcServer
from extproc.transport.choose import make_server
from extproc.warm_call import Meeting
from extproc.warm_up import WarmUp
from extproc.worker_key import WorkerKey

if TYPE_CHECKING:  # they import libraries, which are not even looked for where tracing and TLS are off
    from extproc.observe.tracing import Tracing
    from extproc.transport.tls.ring import KeyRing

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

# gRPC health services. Alive: the process runs. Accepting: it takes requests (Envoy asks this one, so that a client learns
# from our own 503 which pool is empty). Ready: it can serve a prompt.
_ALIVE = ("liveness",)
_ACCEPTING = (wire.SERVICE_NAME,)
_READY = ("", "readiness")

_GRPC_SLACK_BYTES = 1 << 20
"""What a message holds beside the body."""

_LONGEST_REQUEST_S = 24 * 3600.0
"""Nothing counts as in flight for longer."""

_TELL_AGAIN_S = 60.0
"""From one word about handshakes that fail in one way to the next."""

_FIRST_PROBES_S = 3.0
"""How long one that starts beside others waits for its first look at the workers."""

_SPARE_STREAMS = 1_000
"""Room above limits.max_streams, in which the filter itself says 429 instead of gRPC cutting the stream."""


class Server:
    """One filter process."""

    def __init__(self, config: Config, log: Logger, writer: LogWriter | None = None, member: Member | None = None) -> None:
        """``writer``: what ``log`` writes to, to count the lines that it must drop. ``member``: which of several processes this
        is; None: the only one."""
        self._member = member
        self._lifeline: Lifeline | None = None
        self._siblings: SharedLedger | None = None
        self._replica_files: list[Followed] = []
        self._config = config
        self._log = log
        self._metrics = Metrics()
        if writer is not None:
            writer.on_drop = lambda: self._metrics.log_lines.inc("dropped")
        as_json = config.log_format == "json" and config.log_level in ("debug", "info")
        self._request_log = RequestLog(log, writer if as_json else None)
        self._pool = Pool(EndpointSet(), partition(config.pools))
        self._cache_servers = CacheServers(config.cache_servers, self._metrics, log)
        self._health = health.aio.HealthServicer()
        epp = config.epp
        self._health_port = HealthPort(epp, config.transport) if epp.enabled and epp.health_listen is not None else None
        self._ring: KeyRing | None = None
        self._observer = Observer(config, self._metrics, log)
        self._tokens: TokenSource | None = None
        self._accepting = False
        """The gRPC server takes requests."""
        self._draining = False
        self._shake_told = Seldom(_TELL_AGAIN_S)
        self._stop = asyncio.Event()
        self._cut = asyncio.Event()
        self._pending: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT, then drain. Raises OSError if an address cannot be used."""
        config = self._config
        self._listen_for_the_end()
        self._ring = self._make_ring()
        pulse = Pulse(on_lag=self._metrics.loop_lag_seconds.observe)
        engines = Engines(self._metrics)
        connector = choose_connector(config.handoff)
        bytes_per_token = BytesPerToken()
        intake = Intake(config, bytes_per_token)
        holdings = Holdings(config.kv_events.max_blocks) if config.kv_events.enabled else None
        router = Router(
            self._pool,
            routing_of(config),
            holdings=holdings,
            stores=_stores(config),
            predicts=config.kv_events.unknown == "predict",
        )
        dispatcher = Dispatcher(
            router,
            names=intake.names,
            metrics=self._metrics,
            log=self._log,
            longest_request_s=_LONGEST_REQUEST_S,
        )
        siblings = await self._meet_siblings(dispatcher)
        leads = (lambda: True) if siblings is None else siblings.leads
        # A replica on another host has workers to ask, and an Envoy to write for, of its own.
        leads_here = leads if self._member is not None else lambda: True
        recent = Recent()
        live = Live(config, dispatcher, recent, self._status, log=self._log, times=self._observer.times.snapshot)
        own_headers = WorkerKey(config.workers.api_key_file)
        link = WorkerLink(config.workers.tls)
        secrets = self._follow_secrets(own_headers, link)
        releaser = Releaser(
            config.handoff, live_decode_worker(router), self._metrics, self._log, own_headers=own_headers, link=link
        )
        meeting = Meeting(config, connector, releaser, pulse, own_headers=own_headers, link=link)
        warm_up = self._warm_up = WarmUp(
            config,
            dispatcher,
            meeting,
            metrics=self._metrics,
            log=self._log,
            on_change=self._on_endpoint_change,
            leads=leads,
        )
        kv_events = self._follow_kv_events(router, holdings, own_headers, link)
        try:
            fleet = self._fleet = Fleet(
                config,
                dispatcher,
                warm_up=warm_up,
                engines=engines,
                metrics=self._metrics,
                log=self._log,
                on_change=self._on_endpoint_change,
                own_headers=own_headers,
                link=link,
                leads=leads_here,
                kv_events=kv_events,
            )
        except SourceError as error:
            raise OSError(str(error)) from error
        self._expose_routing(router)
        tracing = self._open_tracing()
        if tracing is not None:
            secrets.follow(*tracing.followed)
        tokens = await self._open_tokens(router, intake, own_headers, link)
        asks = config.cache_store.enabled and config.cache_store.directory is not None
        names = partial(stored_as, self._pool)
        directory = CacheDirectory(config.cache_store, self._metrics, self._log, stored_as=names) if asks else None
        async with (
            PrefillClient(config.prefill, link, self._pool.pool_at) as client,
            releaser,
            meeting,
            directory or contextlib.nullcontext(),
        ):
            next_turns = self._open_next_turns(router, releaser, pulse)
            prefiller = Prefiller(
                client=client,
                dispatcher=dispatcher,
                connector=connector,
                settings=config.prefill,
                pulse=pulse,
                metrics=self._metrics,
                log=self._log,
                on_unused=releaser.release,
                next_turns=next_turns,
            )
            filter_ = (RouteFilter if config.routes.only else Filter)(
                Parts(
                    config=config,
                    pool=self._pool,
                    dispatcher=dispatcher,
                    intake=intake,
                    bytes_per_token=bytes_per_token,
                    connector=connector,
                    prefiller=prefiller,
                    releaser=releaser,
                    warm_up=warm_up,
                    engines=engines,
                    metrics=self._metrics,
                    observer=self._observer,
                    log=self._log,
                    recent=recent,
                    request_log=self._request_log,
                    credentials=own_headers if config.workers.replace_credentials else None,
                    tracing=tracing,
                    directory=directory,
                    tokens=tokens,
                    next_turns=next_turns,
                    routes=RouteHeaders(model=config.routes.asks_for_model, pools=config.names_pools),
                )
            )
            self._metrics.streams.set_function(lambda: filter_.open_streams)
            background = [
                asyncio.create_task(part.run())
                for part in (fleet, dispatcher, pulse, live, self._cache_servers, self._observer, secrets)
            ]
            if siblings is not None:
                siblings.on_lead = fleet.lead if self._member is not None else lambda: None
                siblings.load = lambda: (filter_.open_streams, self._observer.access_log.awaited)
                background.append(asyncio.create_task(siblings.run()))
            if self._health_port is not None:
                await self._health_port.start()
            await fleet.first_look()
            if siblings is not None:
                siblings.settled()
                await siblings.taught()
                if siblings.others_serve():
                    await self._workers_known()
            server = await self._start_grpc(filter_)
            debug = Debug(
                dispatcher,
                Explainer(config),
                bytes_per_token,
                self._observer,
                max_body_bytes=config.limits.max_body_bytes,
                tokens=tokens,
                directory=directory,
                next_turns=next_turns,
            )
            runner = await admin.start(
                Address.parse(config.admin),
                self._metrics,
                self._status,
                debug,
                live,
                hosts=config.admin_hosts,
                **self._shown_with_siblings(),
            )
            metrics_runner = await self._start_metrics_port()
            memory.collect_rarely()
            self._log.info(
                "serving", version=__version__, listen=config.listen, admin=config.admin, prefill_via=config.prefill.via
            )
            if config.epp.enabled or self._ring is not None:
                epp = config.epp if config.epp.enabled else None
                self._log.info(
                    "gateway_ports",
                    tls=config.tls_mode,
                    client_certificates=config.tls.client_ca_file is not None,
                    health=None if epp is None else epp.health_listen,
                    metrics=None if epp is None else epp.metrics_listen,
                )
            if self._lifeline is not None:
                self._lifeline.serving()
            try:
                await self._until_stopped(background)
                await self._drain(server, filter_)
            finally:
                for task in background:
                    task.cancel()
                await asyncio.gather(*background, return_exceptions=True)
                await runner.cleanup()
                if metrics_runner is not None:
                    await metrics_runner.cleanup()
                await server.stop(None)
                if self._health_port is not None:
                    await self._health_port.stop()
                if tracing is not None:
                    await tracing.close(self._log)
                if tokens is not None:
                    await tokens.close()
        self._log.info("stopped")

    # -- one of several processes ------------------------------------------------------------------------------------------

    def _listen_for_the_end(self) -> None:
        loop, member = asyncio.get_running_loop(), self._member
        # To one of several a signal may come twice, from its parent's parent too: only the parent says when not to wait.
        on_signal = self._on_signal if member is None else self._stop.set
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal)
        if member is not None:
            self._lifeline = Lifeline(member.lifeline, on_drain=self._stop.set, on_cut=self._cut.set)

    async def _meet_siblings(self, dispatcher: Dispatcher) -> SharedLedger | None:
        """None: there are none. Raises OSError."""
        member, observer, config = self._member, self._observer, self._config
        siblings: Siblings | replicas.Replicas
        if member is not None:
            siblings = Siblings(member, dispatcher, Post(member), metrics=self._metrics, log=self._log)
            observer.access_log.elsewhere = lambda: not siblings.quiet()
            observer.share_watch(member.count, here=member.index == 0)
        elif config.replicas.listen is not None:
            siblings, files = replicas.meet(
                config.replicas,
                dispatcher,
                dns_servers=config.workers.dns_servers,
                metrics=self._metrics,
                log=self._log,
            )
            self._replica_files = files
            # Lines of ours may come by way of any of them. What they still wait for does not hold up our end.
            observer.access_log.elsewhere = lambda: False
        else:
            return None
        self._siblings = siblings
        observer.access_log.name_by(siblings.epoch)
        observer.access_log.pass_on, siblings.on_line = siblings.pass_on, observer.access_log.hear
        observer.pass_on_sighting, siblings.on_sighting = siblings.pass_on_sighting, observer.sighted
        await siblings.open()
        return siblings

    def _shown_with_siblings(self) -> dict[str, Any]:
        """What the admin port is to know of the others."""
        member = self._member
        if member is None:
            return {}
        return {"process": str(member.index), "siblings": None if member.index else SiblingPages(member)}

    async def _workers_known(self) -> None:
        """Until a worker of each role is known to live: the others can do without us for so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_PROBES_S):
                while not self._pool.ready():  # noqa: ASYNC110 (a second at a start)
                    await asyncio.sleep(0.02)

    # -- parts -------------------------------------------------------------------------------------------------------------

    async def _open_tokens(
        self, router: Router, intake: Intake, own_headers: WorkerKey, link: WorkerLink
    ) -> TokenSource | None:
        """None: not wanted. Raises OSError where a tokenizer cannot be read."""
        settings = self._config.tokens
        if settings is None or self._config.routes.only:
            return None
        known = router.known
        self._tokens = TokenSource(
            settings,
            pool=self._pool,
            prompts=intake.prompts,
            metrics=self._metrics,
            log=self._log,
            own_headers=own_headers,
            link=link,
            block_sizes=(lambda: ()) if known is None else known.holdings.block_sizes,
        )
        try:
            await self._tokens.open()
        except FolderError as error:
            raise OSError(str(error)) from None
        return self._tokens

    def _open_next_turns(self, router: Router, releaser: Releaser, pulse: Pulse) -> NextTurns | None:
        """None: decode workers keep nothing, or nobody asks."""
        settings, metrics = self._config.handoff.next_turn, self._metrics
        if not settings.enabled or self._config.routes.only:
            return None
        turns = NextTurns(
            settings,
            self._pool,
            router.costs.back,
            hosts=RemoteHosts(self._config.handoff.remote_hosts),
            not_before=pulse.not_before,
            count=metrics.next_turns,
            release=releaser.release,
            release_later=releaser.release_later,
        )
        metrics.next_turn_kept.set_function(lambda: len(turns))
        metrics.next_turn_bytes.set_function(lambda: turns.bytes)
        return turns

    def _follow_secrets(self, key: WorkerKey, link: WorkerLink) -> FileFollower:
        """What reads keys and certificates again when they change."""
        if self._config.workers.tls is not None and self._config.workers.tls.insecure_skip_verify:
            self._log.warning(
                "insecure_workers",
                why="workers.tls.insecure_skip_verify: any certificate is taken; who is on the way reads and changes prompts",
            )

        def count(name: str, outcome: str) -> None:
            self._metrics.secret_reloads.labels(name, outcome).inc()

        followed = [
            *key.followed,
            *link.followed,
            *self._replica_files,
            *([] if self._ring is None else [self._ring.followed()]),
        ]
        self._secrets = FileFollower(followed, self._log, count)
        return self._secrets

    def _make_ring(self) -> KeyRing | None:
        """What the gRPC port shows of itself; None: it is in plaintext. Raises ConfigError."""
        mode = self._config.tls_mode
        if mode == "none":
            return None
        from extproc.transport.tls.keys import KeysError
        from extproc.transport.tls.ring import KeyRing

        try:
            ring = KeyRing(self._config.tls, from_files=mode == "files")
        except KeysError as error:
            raise ConfigError(f"tls: {error}") from None
        self._metrics.tls_expiry.set_function(lambda: ring.keys.expires_s)
        return ring

    def _on_shake(self, outcome: str, why: str) -> None:
        """A TLS handshake ended."""
        self._metrics.tls_handshakes.inc(outcome)
        # Each is counted, but of a peer that tries all the time the log needs no more than a line a minute.
        if outcome in ("ok", "gone") or not self._shake_told.due(outcome):
            return
        self._log.warning("tls_handshake_failed", outcome=outcome, why=why)

    async def _start_metrics_port(self) -> web.AppRunner | None:
        epp = self._config.epp
        if not epp.enabled or epp.metrics_listen is None:
            return None
        return await metrics_port.start(Address.parse(epp.metrics_listen), self._metrics)

    def _open_tracing(self) -> Tracing | None:
        """None: it is off. Raises ConfigError, OSError."""
        settings = self._config.tracing
        if settings.endpoint is None:
            return None
        try:
            from extproc.observe.tracing import open_tracing
        except ModuleNotFoundError as error:
            raise ConfigError(f"tracing.endpoint: no module {error.name}: pip install 'kv-baton[tracing]'") from None
        metrics = self._metrics
        return open_tracing(settings, count=lambda outcome, spans: metrics.trace_spans.inc(outcome, by=spans), log=self._log)

    def _follow_kv_events(
        self, router: Router, holdings: Holdings | None, own_headers: WorkerKey, link: WorkerLink
    ) -> Following | None:
        """None: it is off. Each of several processes follows all workers: each decides by itself. Raises ConfigError."""
        if holdings is None:
            return None
        try:
            from extproc.observe.kv_events.subscriber import Subscriber
        except ModuleNotFoundError as error:
            raise ConfigError(f"kv_events.enabled: no module {error.name}: pip install 'kv-baton[kv-events]'") from None
        subscriber = Subscriber(
            self._config.kv_events,
            self._pool,
            holdings,
            metrics=self._metrics,
            log=self._log,
            link=link,
            own_headers=own_headers,
        )
        if router.known is not None:
            router.known.truth.on_mistrust = subscriber.distrusted
        return subscriber

    async def _until_stopped(self, background: list[asyncio.Task[None]]) -> None:
        """Wait for SIGTERM. Raises what a background task died of: without its eyes the filter must not go on."""
        stop = asyncio.create_task(self._stop.wait())
        done, _ = await asyncio.wait((stop, *background), return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        for task in background:
            if task in done:
                task.result()

    async def _start_grpc(self, filter_: Filter) -> GrpcServer:
        limits = self._config.limits
        server = make_server(
            self._config.transport,
            max_message_bytes=limits.max_body_bytes + _GRPC_SLACK_BYTES,
            max_streams=limits.max_streams + _SPARE_STREAMS,
            on_shake=self._on_shake,
            handshake_timeout_s=self._config.tls.handshake_timeout_s,
        )
        wire.register(server, filter_.handle)
        self._fleet.endpoints.register(server)
        self._observer.access_log.register(server)
        register_health: Callable[[Any, Any], None] = health_pb2_grpc.add_HealthServicer_to_server
        register_health(self._health, server)
        address = Address.parse(self._config.listen)
        if address.path:
            Path(address.path).parent.mkdir(parents=True, exist_ok=True)
        try:
            if self._ring is None:
                server.add_insecure_port(str(address))
            else:
                server.add_secure_port(str(address), self._ring)
        except RuntimeError as error:
            raise OSError(f"listen: {address}: {error}") from error
        await self._publish_health()
        await server.start()
        self._accepting = True
        await self._publish_health()
        return server

    def _expose_routing(self, router: Router) -> None:
        metrics, queue = self._metrics, router.queue
        metrics.queue_requests.set_function(lambda: len(queue))
        metrics.queue_bytes.set_function(lambda: queue.bytes)
        metrics.queue_work_seconds.set_function(lambda: queue.queued_s)
        metrics.prefix_blocks.set_function(lambda: router.index.blocks)

    def _status(self) -> tuple[bool, dict[str, object]]:
        live, warm = self._config.routes.only or self._pool.ready(), self._warm_up.ready()
        return live and warm and not self._draining, {
            "why": self._why_not(live=live, warm=warm),
            "draining": self._draining,
            **self._fleet.status(),
            "secrets": self._secrets.status(),
            "cache_servers": self._cache_servers.status(),
            **({} if self._tokens is None else {"tokens": self._tokens.status()}),
            **self._observer.status(),
            **({} if self._siblings is None else {self._siblings.shown_as: self._siblings.status()}),
        }

    def _why_not(self, *, live: bool, warm: bool) -> str | None:
        """Why nobody should send requests here now; None: they may."""
        if self._draining:
            return "draining"
        if not live:
            return "a role has no live worker"
        return None if warm else self._warm_up.summary()

    def _on_endpoint_change(self) -> None:
        task = asyncio.create_task(self._publish_health())
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)

    async def _publish_health(self) -> None:
        ready = (self._config.routes.only or self._pool.ready()) and self._warm_up.ready() and not self._draining
        if self._health_port is not None:
            await self._health_port.publish(accepting=self._accepting and not self._draining, ready=ready)
        for services, serving in ((_ALIVE, True), (_ACCEPTING, not self._draining), (_READY, ready)):
            for service in services:
                await self._health.set(service, _SERVING if serving else _NOT_SERVING)

    def _on_signal(self) -> None:
        (self._cut if self._stop.is_set() else self._stop).set()

    async def _drain(self, server: GrpcServer, filter_: Filter) -> None:
        drain = self._config.drain
        self._draining = True
        self._metrics.draining.set(1)
        await self._publish_health()
        self._log.info("draining", open_streams=filter_.open_streams, delay_s=drain.delay_s, timeout_s=drain.timeout_s)

        async def finish() -> None:
            # Requests that Envoy sends before it has seen the health change are served like any other.
            await asyncio.sleep(drain.delay_s)
            # Streams that never end by themselves would be waited for.
            self._fleet.endpoints.close()
            logged = asyncio.create_task(self._observer.access_log.close(lambda: self._quiet(filter_)))
            await server.stop(drain.timeout_s)
            if self._siblings is not None:  # lines of the last requests may come by way of another process
                await asyncio.wait((logged,), timeout=drain.timeout_s)
            logged.cancel()

        finished = asyncio.create_task(finish())
        cut = asyncio.create_task(self._cut.wait())  # a second signal: whoever sends it does not want to wait
        await asyncio.wait((finished, cut), return_when=asyncio.FIRST_COMPLETED)
        for task in (finished, cut):
            task.cancel()
        if filter_.open_streams:
            self._log.warning("drain_cut_short", cut_streams=filter_.open_streams)

    def _quiet(self, filter_: Filter) -> bool:
        """Whether no request is open, here or in another process whose lines of the access log may come here."""
        return not filter_.open_streams and (self._member is None or self._siblings is None or self._siblings.at_rest())


def run(config: Config, log: Logger, writer: LogWriter | None = None, member: Member | None = None) -> None:
    """Serve until told to stop, on uvloop. Raises OSError if an address cannot be used, ConfigError.

    ``writer``: what ``log`` writes to. ``member``: which of several processes this is, by the configuration of all.
    """
    import uvloop

    if member is not None:
        log = log.bind(process=member.index)

    async def main() -> None:
        own = config if member is None else config_of(config, member)
        await Server(own, log, writer, member).run()

    take_over(log)
    memory.keep_freed()
    uvloop.run(main())


def _stores(config: Config) -> Stores | None:
    """What cache servers hold; None: it does not count."""
    store = config.cache_store
    if not store.enabled:
        return None
    return Stores(label=store.label, chunk_tokens=store.chunk_tokens, capacity_tokens=store.capacity_tokens)
