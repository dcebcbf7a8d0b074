"""Where the other replicas may be: addresses of the configuration, and what a DNS name stands for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from extproc.discovery.dns import Dns, resolver
from extproc.discovery.listing import name_server
from extproc.discovery.source import SourceError
from extproc.observe.logs import Logger
from extproc.replicas.settings import ReplicaSettings


class Peers:
    """``run`` must be running where there is a DNS name."""

    def __init__(
        self,
        settings: ReplicaSettings,
        *,
        own_port: int,
        dns_servers: Sequence[str],
        log: Logger,
        on_failure: Callable[[], None],
    ) -> None:
        """``on_failure`` is called for every look-up in vain. Raises OSError where there is no name server to ask."""
        self._static = tuple(dict.fromkeys(settings.peers))
        self._found: tuple[str, ...] = ()
        self._log = log
        self._on_failure = on_failure
        self.fault: str | None = None
        """Why the name could not be looked up last time."""
        self._dns: Dns | None = None
        self._refresh_s = settings.refresh_s
        if settings.dns is not None:
            try:
                ask = resolver([name_server(text) for text in dns_servers])
            except SourceError as error:
                raise OSError(f"replicas.dns: {error}") from error
            port = own_port if settings.port is None else settings.port
            self._dns = Dns(ask, role="both", name=settings.dns, port=port, refresh_s=settings.refresh_s)

    @property
    def addresses(self) -> tuple[str, ...]:
        """``host:port`` of all, our own too if it is among them."""
        return tuple(dict.fromkeys((*self._static, *self._found)))

    async def look(self) -> None:
        """Ask for the name once. What fails changes nothing."""
        if self._dns is None:
            return
        try:
            found = await self._dns.look()
        except SourceError as error:
            if self.fault is None:
                self._log.warning("replicas_not_found", why=str(error))
            self.fault = str(error)
            self._on_failure()
            return
        self.fault = None
        now = tuple(spec.address for spec in found.both)
        if now != self._found:
            self._log.info("replicas_found", addresses=list(now))
        self._found = now

    async def run(self) -> None:
        """Until cancelled."""
        while self._dns is not None:
            await asyncio.sleep(self._dns.pause_s() if self.fault is None else min(self._refresh_s, 1.0))
            await self.look()
        await asyncio.Event().wait()
