"""Several processes in one: siblings around routers of the same workers, a clock that the test moves, and a post in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec

from extproc.dispatcher import Dispatcher
from extproc.observe.logs import make_logger
from extproc.observe.metrics import Metrics
from extproc.processes.facts import Batch, read
from extproc.processes.member import Member
from extproc.processes.post import Sent
from extproc.processes.siblings import Siblings
from tests.unit.routing_world import World


class Nowhere:
    """Takes log lines."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def write(self, line: bytes) -> None:
        self.lines.append(msgspec.json.decode(line))

    def flush(self) -> None:
        pass

    def events(self) -> list[str]:
        return [line["event"] for line in self.lines]


class Posts:
    """All sockets. Datagrams arrive when the test says so."""

    def __init__(self) -> None:
        self.open: dict[int, Callable[[bytes], None]] = {}
        self.full: set[int] = set()
        """Who does not read."""
        self.lose: Callable[[int, int, Batch], bool] = lambda _from, _to, _batch: False
        self.on_the_way: deque[tuple[int, int, bytes]] = deque()
        self.seen: list[tuple[int, int, Batch]] = []

    def send(self, sender: int, to: int, data: bytes) -> Sent:
        if to not in self.open:
            return Sent.AWAY
        if to in self.full:
            return Sent.FULL
        self.on_the_way.append((sender, to, data))
        return Sent.YES

    def deliver(self) -> int:
        count = 0
        while self.on_the_way:
            sender, to, data = self.on_the_way.popleft()
            batch = read(data)
            self.seen.append((sender, to, batch))
            if to in self.open and not self.lose(sender, to, batch):
                self.open[to](data)
            count += 1
        return count


class OwnPost:
    """The socket of one."""

    def __init__(self, posts: Posts, index: int) -> None:
        self._posts = posts
        self._index = index

    def open(self, receive: Callable[[bytes], None]) -> None:
        self._posts.open[self._index] = receive

    def send(self, index: int, data: bytes) -> Sent:
        return self._posts.send(self._index, index, data)

    def close(self) -> None:
        self._posts.open.pop(self._index, None)


class One(World):
    """One process: a router, and what it knows of the others."""

    def __init__(self, family: Family, index: int, settings: dict[str, Any], restarts: int) -> None:
        super().__init__(**settings)
        self.family = family
        self.index = index
        self.log = Nowhere()
        self.metrics = Metrics()
        log = make_logger("info", sink=self.log)
        names: Any = SimpleNamespace(cards=lambda models: models)
        self.dispatcher = Dispatcher(
            self.router, names=names, metrics=self.metrics, log=log, longest_request_s=1e6, clock=lambda: family.now_s
        )
        member = Member(index=index, count=family.count, directory="", lifeline=-1, restarts=restarts)
        self.siblings = Siblings(
            member,
            self.dispatcher,
            OwnPost(family.posts, index),
            metrics=self.metrics,
            log=log,
            clock=lambda: family.now_s,
        )

    @property
    def now_s(self) -> float:  # type: ignore[override]
        return self.family.now_s

    @now_s.setter
    def now_s(self, _: float) -> None:
        pass

    def messages(self, outcome: str) -> float:
        return self.metrics.sibling_messages.value(outcome)

    def on(self, address: str) -> tuple[int, int, int, int]:
        """Requests and tokens on a worker, in both roles together: all, and our own."""
        legs = (self[address].prefill, self[address].decode)
        return (
            sum(leg.requests for leg in legs),
            sum(leg.tokens for leg in legs),
            sum(leg.own_requests for leg in legs),
            sum(leg.own_tokens for leg in legs),
        )


class Family:
    """Some processes that have met."""

    def __init__(self, count: int = 2, **settings: Any) -> None:
        self.count = count
        self.now_s = 100.0
        self.posts = Posts()
        self._settings = settings
        self.all: list[One] = []

    async def __aenter__(self) -> Family:
        for index in range(self.count):
            self.all.append(await self.start(index))
        for each in self.all:
            each.siblings.settled()
        self.settle()
        return self

    async def __aexit__(self, *_: object) -> None:
        for each in self.all:
            each.siblings.close()

    async def start(self, index: int, restarts: int = 0) -> One:
        """A process begins; nobody waits for what it hears first."""
        one = One(self, index, self._settings, restarts)
        one.siblings._joined.set()
        await one.siblings.open()
        return one

    async def start_again(self, index: int) -> One:
        self.kill(index)
        self.all[index] = await self.start(index, restarts=1)
        self.settle()
        self.all[index].siblings.settled()
        self.settle()
        return self.all[index]

    def kill(self, index: int) -> None:
        """Without a word."""
        one = self.all[index]
        self.posts.open.pop(index, None)
        one.siblings._post = OwnPost(Posts(), index)

    def __getitem__(self, index: int) -> One:
        return self.all[index]

    def settle(self) -> None:
        """Everything that is to be told is told."""
        for _ in range(1000):
            for each in self.all:
                each.siblings.flush()
            if not self.posts.deliver():
                return
        raise AssertionError("they never come to an end")

    def wait(self, seconds: float, step_s: float = 0.25) -> None:
        """Time passes for all that are there."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += step_s
            for each in self.all:
                if each.index in self.posts.open:
                    each.siblings.tick()
            self.settle()
