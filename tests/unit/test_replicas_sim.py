"""Two replicas that tell each other what they do, against two that do not, and one: simulated workers, a virtual clock, and
milliseconds of network between a decision and when the other one knows it."""

from __future__ import annotations

import asyncio

import pytest

from extproc.observe.metrics import Metrics
from extproc.replicas.ledger import Replicas
from tests.unit.processes_world import Nowhere
from tests.unit.replicas_world import Network, replicas
from tests.unit.test_processes_sim import _Processes
from tests.unit.test_replicas import TTFT_SLO_S, _Cluster, capacity_per_s

NEAR_S, FAR_S, AWAY_S = 0.001, 0.002, 0.01
"""From one replica to the other: in one zone, between two zones, and between regions, which is too far."""
SECONDS = 60.0

pytestmark = pytest.mark.timeout(400)  # a minute of CPU, which may take long where others want it too


class _Replicas(_Processes):
    """Filters on different hosts. Each asks the workers by itself."""

    def __init__(self, count: int, *, delay_s: float | None) -> None:
        """``delay_s`` None: they know nothing of each other."""
        super().__init__(count, share=False)
        self.delay_s = delay_s or 0.0
        self.network = Network()
        self.metrics = [Metrics() for _ in range(count)]
        self._siblings: list[Replicas] = []
        if delay_s is not None:
            self._siblings = [
                replicas(self.network, str(number), router, lambda: self.now_s, Nowhere(), self.metrics[number], f"{number}000")
                for number, router in enumerate(self.routers)
            ]

    async def meet(self) -> None:
        for each in self._siblings:
            each._joined.set()
            await each.open()
        if self._siblings:
            self.network.connect("0", "1")
        for each in self._siblings:
            each.settled()
        self._exchange()

    def _soon(self) -> None:
        if self._siblings and not self._due:
            self._due = True
            self.at(self.now_s + NEAR_S, self._exchange)

    def _exchange(self) -> None:
        """What is told now is heard ``delay_s`` later, and nothing waits for that."""
        self._due = False
        for each in self._siblings:
            each.flush()
        sent, self.network.on_the_way = self.network.on_the_way, type(self.network.on_the_way)()
        if sent:
            self.at(self.now_s + self.delay_s, lambda: self._arrives(sent))
        if any(sibling.outbox for each in self._siblings for sibling in each._siblings.values()):
            self._soon()

    def _arrives(self, sent) -> None:  # type: ignore[no-untyped-def]
        for sender, to, data in sent:
            end = self.network.ends[to]
            end.on_data(end.indices[sender], data)
        self._soon()

    def _report(self, name: str) -> None:
        _Cluster._report(self, name)

    def close(self) -> None:
        for _ in range(5):
            for each in self._siblings:
                each.flush()
            self._arrives(list(self.network.on_the_way))
            self.network.on_the_way.clear()
        for each in self._siblings:
            each.close()

    @property
    def bytes_per_request(self) -> float:
        """From each replica to the other, together."""
        return self.network.bytes / len(self.done)


async def _run(count: int, load: float, delay_s: float | None) -> _Replicas:
    made = _Replicas(count, delay_s=delay_s)
    await made.meet()
    if delay_s is not None:
        made.beat(SECONDS + 60)
    made.run(load * capacity_per_s(), SECONDS)
    made.close()
    return made


@pytest.fixture(scope="module")
def runs() -> dict[str, _Replicas]:
    async def all_of_them() -> dict[str, _Replicas]:
        return {
            "one": await _run(1, 0.9, None),
            "blind": await _run(2, 0.9, None),
            "near": await _run(2, 0.9, NEAR_S),
            "far": await _run(2, 0.9, FAR_S),
            "away": await _run(2, 0.9, AWAY_S),
        }

    return asyncio.run(all_of_them())


def _row(name: str, run: _Replicas) -> str:
    return (
        f"{name:<6} goodput {run.goodput:.3f}  TTFT p50 {run.ttft_s(0.5):.2f} s  p99 {run.ttft_s(0.99):.2f} s  "
        f"over the window {len(run.over)} of {run.placed}  {run.bytes_per_request:.0f} bytes a request"
    )


def test_they_serve_like_one(runs: dict[str, _Replicas]) -> None:
    for name, run in runs.items():
        print(_row(name, run))
    for name in ("near", "far"):
        assert runs[name].goodput >= runs["one"].goodput - 0.03
        assert runs[name].ttft_s(0.99) <= 1.2 * runs["one"].ttft_s(0.99)


def test_what_they_know_of_each_other_keeps_windows_from_being_filled_over(runs: dict[str, _Replicas]) -> None:
    for name in ("near", "far"):
        assert len(runs[name].over) <= 0.02 * runs[name].placed
    assert len(runs["blind"].over) >= 0.05 * runs["blind"].placed, "without a word between them it is the rule"


def test_where_the_way_is_longer_than_a_replica_waits_for_another_it_is_no_worse_than_blind(runs: dict[str, _Replicas]) -> None:
    assert runs["away"].goodput >= runs["blind"].goodput - 0.02
    assert runs["away"].ttft_s(0.99) <= 1.1 * runs["blind"].ttft_s(0.99)


def test_none_starves_the_other(runs: dict[str, _Replicas]) -> None:
    for name in ("near", "far"):
        in_time = []
        for router in runs[name].routers:
            own = [request for request in runs[name].done if request.router is router]
            in_time.append(sum(each.first_token_s - each.came_s <= TTFT_SLO_S for each in own) / len(own))
        assert min(in_time) >= 0.93 * max(in_time)


def test_a_request_costs_a_few_kilobytes(runs: dict[str, _Replicas]) -> None:
    """With prompts of 2,000 to 16,000 tokens in blocks of 512, signs of life included."""
    assert runs["blind"].network.bytes == 0
    for name in ("near", "far"):
        assert 100 < runs[name].bytes_per_request < 4_000


def test_when_all_is_over_nobody_counts_anything(runs: dict[str, _Replicas]) -> None:
    for run in runs.values():
        for router in run.routers:
            assert len(router.queue) == 0
            assert all(endpoint.idle for endpoint in router.pool.endpoints)
