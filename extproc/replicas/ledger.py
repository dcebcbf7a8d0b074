"""One replica among the others: the shared ledger over their connections."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

from extproc.dispatcher import Dispatcher
from extproc.observe.logs import Logger
from extproc.observe.metrics import Metrics
from extproc.processes.facts import Batch
from extproc.processes.ledger import JOIN_S, Poster, SharedLedger, Sibling, new_epoch
from extproc.replicas.keys import ReplicaKeys
from extproc.replicas.mesh import Mesh
from extproc.replicas.peers import Peers
from extproc.replicas.settings import ReplicaSettings
from extproc.routing.load import Load
from extproc.tls.files import Followed

_YIELD_S, _YIELD_MOST_S = 0.015, 0.06
"""See :class:`extproc.routing.told.Others`: to the other one and back, with some milliseconds each way."""
_LEAST_FOR_S = 60.0
"""How long the quickest message counts as what the way takes: clocks drift apart."""


class _Lag:
    """How much later than the quickest message the last one came: clocks differ, so no more can be known."""

    def __init__(self) -> None:
        self._least_s = math.inf
        self._before_s = math.inf
        self._since_s = -math.inf
        self.last_s = 0.0

    def note(self, shift_s: float, now_s: float) -> None:
        """``shift_s``: between the clocks, and how long the message took."""
        if now_s - self._since_s > _LEAST_FOR_S:
            self._before_s, self._least_s, self._since_s = self._least_s, shift_s, now_s
        self._least_s = min(self._least_s, shift_s)
        self.last_s = shift_s - min(self._least_s, self._before_s)


class Carrier(Poster, Protocol):
    """See :class:`extproc.replicas.mesh.Mesh`."""

    on_up: Callable[[int, str], None]
    on_down: Callable[[int, str], None]
    on_data: Callable[[int, bytes], None]

    async def open(self, timeout_s: float) -> None:
        """Begin."""

    async def run(self) -> None:
        """Until cancelled."""

    def drop(self, index: int, why: str) -> None:
        """One of the others is of no use any more."""

    def status(self) -> dict[str, Any]:
        """For `/healthz`."""

    def close(self) -> None:
        """Make an end."""


class Replicas(SharedLedger):
    """The others, as one replica sees them. ``open`` comes first, then ``run`` must be running."""

    kind: ClassVar[str] = "replica"
    shown_as: ClassVar[str] = "replicas"

    def __init__(
        self,
        carrier: Carrier,
        dispatcher: Dispatcher,
        *,
        epoch: str,
        silence_s: float,
        metrics: Metrics,
        log: Logger,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``epoch``: of this life of the filter. ``silence_s``: after which one of the others is gone. ``clock``: our own."""
        super().__init__(dispatcher, carrier, index=0, epoch=epoch, metrics=metrics, log=log, clock=clock)
        self.silence_s = silence_s
        self._carrier = carrier
        self._lags: dict[int, _Lag] = {}
        self._router.others.yield_s, self._router.others.yield_most_s = _YIELD_S, _YIELD_MOST_S
        carrier.on_up, carrier.on_down, carrier.on_data = self._up, self._down, self._data
        metrics.replica_lag_seconds.set_function(lambda: max((lag.last_s for lag in self._lags.values()), default=0.0))

    async def open(self) -> None:
        """Listen, connect, and have the others tell what they know. Raises OSError."""
        await self._carrier.open(JOIN_S)
        await self._join(tuple(self._siblings.values()))

    async def run(self) -> None:
        """Keep in touch until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._carrier.run())
            tasks.create_task(super().run())

    def close(self) -> None:
        """Say no more, and hear no more."""
        super().close()
        self._carrier.close()

    def tick(self) -> None:
        """Time has passed."""
        now_s = self._clock()
        for each in tuple(self._siblings.values()):
            if each.epoch is None and now_s - each.heard_s > self.silence_s:
                self._carrier.drop(each.index, "silent")
        super().tick()

    def leads(self) -> bool:
        """Whether this one makes first handoffs: the lowest epoch of those that know their workers."""
        others = self._alive()
        if not self._settled and any(each.settled for each in others):
            return False
        return all(self.epoch < (each.epoch or "") for each in others if each.settled or not self._settled)

    def reported(self, address: str, load: Load) -> None:
        """Everybody asks the workers by himself: what is left when nobody else is heard must not hang on the others."""

    def status(self) -> dict[str, Any]:
        """For `/healthz`."""
        now_s = self._clock()
        return {
            "epoch": self.epoch,
            "leads": self.leads(),
            **self._carrier.status(),
            "connected": {
                str(each.name): {
                    "state": "silent" if each.epoch is None else "settled" if each.settled else "starting",
                    "epoch": each.epoch,
                    "heard_s_ago": round(now_s - each.heard_s, 3),
                    "lag_s": round(self._lags[each.index].last_s, 4),
                    "claims": each.another.claims,
                    "open_streams": each.open_streams,
                }
                for each in self._siblings.values()
            },
        }

    # -- what the carrier says ---------------------------------------------------------------------------------------------

    def _up(self, index: int, name: str) -> None:
        each = self._meet(index, name)
        each.heard_s = self._clock()
        self._lags[index] = _Lag()
        self._ask(each)

    def _down(self, index: int, why: str) -> None:
        each = self._siblings.get(index)
        if each is None:
            return
        if each.epoch is not None:
            self._gone(each, why)
        del self._siblings[index], self._lags[index]

    def _data(self, index: int, data: bytes) -> None:
        if index in self._siblings:
            self.take(data, index)

    # -- what differs between hosts ----------------------------------------------------------------------------------------

    def _own_clock_s(self) -> float | None:
        return self._clock()

    def _take_header(self, each: Sibling, batch: Batch, now_s: float) -> None:
        super()._take_header(each, batch, now_s)
        self._lags[each.index].note(each.shift_s, now_s)

    def _gone(self, each: Sibling, why: str) -> None:
        super()._gone(each, why)
        self._carrier.drop(each.index, why)


def meet(
    settings: ReplicaSettings, dispatcher: Dispatcher, *, dns_servers: Sequence[str], metrics: Metrics, log: Logger
) -> tuple[Replicas, list[Followed]]:
    """The replicas of a configuration with ``listen``, and the files that hold what they prove themselves with.

    Raises OSError where a file cannot be used.
    """
    assert settings.listen is not None
    epoch, keys = new_epoch(), ReplicaKeys(settings)
    peers = Peers(
        settings,
        own_port=int(settings.listen.rpartition(":")[2]),
        dns_servers=dns_servers,
        log=log,
        on_failure=lambda: metrics.replica_links.inc("lookup_failed"),
    )
    mesh = Mesh(settings, epoch=epoch, keys=keys, peers=peers, metrics=metrics, log=log)
    made = Replicas(mesh, dispatcher, epoch=epoch, silence_s=settings.silence_s, metrics=metrics, log=log)
    return made, keys.followed
