"""Replicas with clocks of their own, whose connections are lists."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from extproc.dispatcher import Dispatcher
from extproc.observe.logs import make_logger
from extproc.observe.metrics import Metrics
from extproc.processes.facts import Batch, read
from extproc.processes.ledger import new_epoch
from extproc.processes.post import Sent
from extproc.replicas.ledger import Replicas
from extproc.routing.router import Router
from tests.unit.processes_world import Nowhere
from tests.unit.routing_world import World

SKEW_S = 86_400.0
"""From the clock of one replica to that of the next."""


class Network:
    """All connections. Messages arrive when the test says so."""

    def __init__(self) -> None:
        self.ends: dict[str, End] = {}
        self.on_the_way: deque[tuple[str, str, bytes]] = deque()
        self.bytes = 0
        self.seen: list[tuple[str, str, Batch]] = []

    def connect(self, one: str, other: str) -> None:
        for here, there in ((one, other), (other, one)):
            self.ends[here].connected(there)

    def cut(self, one: str, other: str) -> None:
        """A connection breaks, and what is on its way is lost."""
        self.on_the_way = deque(each for each in self.on_the_way if {each[0], each[1]} != {one, other})
        for here, there in ((one, other), (other, one)):
            if here in self.ends:
                self.ends[here].lost(there)

    def deliver(self) -> int:
        count = 0
        while self.on_the_way:
            sender, to, data = self.on_the_way.popleft()
            end = self.ends.get(to)
            self.seen.append((sender, to, read(data)))
            if end is not None and sender in end.indices:
                end.on_data(end.indices[sender], data)
            count += 1
        return count


class End:
    """The carrier of one replica."""

    def __init__(self, network: Network, name: str) -> None:
        self.network = network
        self.name = name
        self.indices: dict[str, int] = {}
        self.full = False
        self._next = 0
        self.on_up: Callable[[int, str], None]
        self.on_down: Callable[[int, str], None]
        self.on_data: Callable[[int, bytes], None]
        network.ends[name] = self

    async def open(self, _timeout_s: float) -> None:
        pass

    async def run(self) -> None:
        pass

    def connected(self, other: str) -> None:
        self._next += 1
        self.indices[other] = self._next
        self.on_up(self._next, other)

    def lost(self, other: str, why: str = "closed by the other side") -> None:
        index = self.indices.pop(other, None)
        if index is not None:
            self.on_down(index, why)

    def send(self, index: int, data: bytes) -> Sent:
        to = next((name for name, each in self.indices.items() if each == index), None)
        if to is None:
            return Sent.AWAY
        if self.full:
            return Sent.FULL
        self.network.bytes += len(data) + 20  # length and code
        self.network.on_the_way.append((self.name, to, data))
        return Sent.YES

    def drop(self, index: int, _why: str) -> None:
        to = next((name for name, each in self.indices.items() if each == index), None)
        if to is not None:
            self.network.cut(self.name, to)

    def status(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        for other in tuple(self.indices):
            self.network.cut(self.name, other)
        self.network.ends.pop(self.name, None)


def replicas(
    network: Network, name: str, router: Router, clock: Callable[[], float], log: Nowhere, metrics: Metrics, epoch: str | None
) -> Replicas:
    """What one filter knows of the others."""
    logger = make_logger("info", sink=log)
    names: Any = SimpleNamespace(cards=lambda models: models)
    dispatcher = Dispatcher(router, names=names, metrics=metrics, log=logger, longest_request_s=1e6, clock=clock)
    return Replicas(
        End(network, name), dispatcher, epoch=epoch or new_epoch(), silence_s=2.0, metrics=metrics, log=logger, clock=clock
    )


class One(World):
    """One replica. Its clock is ``skew_s`` ahead of the world's."""

    def __init__(self, group: Group, name: str, skew_s: float, epoch: str | None) -> None:
        super().__init__(**group.settings)
        self.group = group
        self.name = name
        self.skew_s = skew_s
        self.log = Nowhere()
        self.metrics = Metrics()
        self.replicas = replicas(group.network, name, self.router, lambda: self.now_s, self.log, self.metrics, epoch)

    @property
    def now_s(self) -> float:  # type: ignore[override]
        return self.group.now_s + self.skew_s

    @now_s.setter
    def now_s(self, _: float) -> None:
        pass

    def messages(self, outcome: str) -> float:
        return self.metrics.sibling_messages.value(outcome)


class Group:
    """Replicas that are all connected with each other."""

    def __init__(self, count: int = 2, **settings: Any) -> None:
        self.count = count
        self.now_s = 100.0
        self.network = Network()
        self.settings = settings
        self.all: dict[str, One] = {}

    async def __aenter__(self) -> Group:
        for number in range(self.count):
            await self.start(f"r{number}", epoch=f"{number}000")
        return self

    async def __aexit__(self, *_: object) -> None:
        for each in list(self.all.values()):
            each.replicas.close()

    async def start(self, name: str, epoch: str | None = None) -> One:
        """A replica begins, is connected with all others, and comes to know its workers."""
        one = One(self, name, SKEW_S * len(self.all), epoch)
        one.replicas._joined.set()
        await one.replicas.open()
        for other in self.all:
            self.network.connect(other, name)
        self.all[name] = one
        self.settle()
        one.replicas.settled()
        self.settle()
        return one

    def kill(self, name: str) -> None:
        """Without a word; the others see that its connections are closed."""
        one = self.all.pop(name)
        one.replicas.close()

    def __getitem__(self, number: int) -> One:
        return list(self.all.values())[number]

    def settle(self) -> None:
        """Everything that is to be told is told."""
        for _ in range(1000):
            for each in self.all.values():
                each.replicas.flush()
            if not self.network.deliver():
                return
        raise AssertionError("they never come to an end")

    def wait(self, seconds: float, step_s: float = 0.25) -> None:
        """Time passes for all."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += step_s
            for each in list(self.all.values()):
                each.replicas.tick()
            self.settle()
