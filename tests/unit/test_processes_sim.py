"""Two processes with one ledger against one process, and against two that know nothing of each other: simulated workers, a
virtual clock, and a millisecond from a decision to when the other one knows it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from extproc.dispatcher import Dispatcher
from extproc.observe.logs import make_logger
from extproc.observe.metrics import Metrics
from extproc.processes.member import Member
from extproc.processes.siblings import Siblings
from extproc.routing.load import Load
from extproc.routing.ticket import State, Ticket
from tests.unit.processes_world import Nowhere, OwnPost, Posts
from tests.unit.test_replicas import STEP_TOKENS, TOKENS, TTFT_SLO_S, _Cluster, capacity_per_s

DELAY_S = 0.001
"""From a decision to when the other process knows it."""
SECONDS = 60.0

pytestmark = pytest.mark.timeout(400)  # a minute of CPU, which may take long where others want it too


class _Processes(_Cluster):
    """Filters that send each other what they do, or do not."""

    def __init__(self, count: int, *, share: bool) -> None:
        super().__init__(count)
        self.over: list[int] = []
        """Tokens of each prompt that one process, which knows everything, would not have sent to its prefill worker yet."""
        self.placed = 0
        self._posts = Posts()
        self._siblings: list[Siblings] = []
        self._due = False
        if share:
            for index, router in enumerate(self.routers):
                metrics, log, names = (
                    Metrics(),
                    make_logger("error", sink=Nowhere()),
                    SimpleNamespace(cards=lambda found: found),
                )
                stub: Any = names
                dispatcher = Dispatcher(
                    router, names=stub, metrics=metrics, log=log, longest_request_s=1e6, clock=lambda: self.now_s
                )
                member = Member(index=index, count=count, directory="", lifeline=-1)
                post = OwnPost(self._posts, index)
                self._siblings.append(Siblings(member, dispatcher, post, metrics=metrics, log=log, clock=lambda: self.now_s))

    async def meet(self) -> None:
        for each in self._siblings:
            each._joined.set()
            await each.open()
        for each in self._siblings:
            each.settled()
        self._exchange()

    def beat(self, seconds: float) -> None:
        for number in range(int(seconds * 4)):
            self.at(number / 4, self._tick)

    def _tick(self) -> None:
        for each in self._siblings:
            each.tick()
        self._soon()

    def _soon(self) -> None:
        if self._siblings and not self._due:
            self._due = True
            self.at(self.now_s + DELAY_S, self._exchange)

    def _exchange(self) -> None:
        self._due = False
        for each in self._siblings:
            each.flush()
        self._posts.deliver()
        if any(sibling.outbox for each in self._siblings for sibling in each._siblings.values()):
            self._soon()

    def _settled(self, ticket: Ticket) -> None:
        known = ticket in self.by_ticket
        super()._settled(ticket)
        if known and ticket.state is State.PLACED:
            self.placed += 1
            address = ticket.prefill.address
            total = sum(router.pool.get(address).prefill.own_tokens for router in self.routers)
            if total > STEP_TOKENS and total > ticket.prefill_claim.tokens:
                self.over.append(ticket.prefill_claim.tokens)
        self._soon()

    def _happened(self, name: str, event: Any) -> None:
        super()._happened(name, event)
        self._soon()

    def _arrive(self, *what: Any) -> None:
        super()._arrive(*what)
        self._soon()

    def _report(self, name: str) -> None:
        if not self._siblings:
            super()._report(name)
            return
        found = self.engines[name].load()
        load = Load(running=found.running, waiting=found.waiting, kv_usage=found.kv_usage)
        self.routers[0].on_load(name, load, self.now_s)  # the leader scrapes, and says so
        self.routers[0].told.reported(name, load)
        self._soon()

    def close(self) -> None:
        """The last words are heard."""
        for _ in range(3):
            self._exchange()
        for each in self._siblings:
            each.close()

    def ttft_s(self, share: float, router: Any = None) -> float:
        """A quantile of the times to the first token, of requests that got one."""
        found = sorted(r.first_token_s - r.came_s for r in self.done if router is None or r.router is router)
        return found[min(int(share * len(found)), len(found) - 1)]


async def _run(count: int, load: float, *, share: bool, share_of_first: float = 0.5) -> _Processes:
    made = _Processes(count, share=share)
    await made.meet()
    if share:
        made.beat(SECONDS + 60)
    made.run(load * capacity_per_s(), SECONDS, share_of_first)
    made.close()
    return made


@pytest.fixture(scope="module")
def runs() -> dict[str, _Processes]:
    async def all_of_them() -> dict[str, _Processes]:
        found = {}
        for load in (0.9, 1.1):
            found[f"one {load}"] = await _run(1, load, share=False)
            if load < 1:
                found[f"blind {load}"] = await _run(2, load, share=False)
            found[f"shared {load}"] = await _run(2, load, share=True)
        return found

    return asyncio.run(all_of_them())


def _row(name: str, run: _Processes) -> str:
    return (
        f"{name:<12} goodput {run.goodput:.3f}  TTFT p50 {run.ttft_s(0.5):.2f} s  p99 {run.ttft_s(0.99):.2f} s  "
        f"over the window {len(run.over)} of {run.placed}, {sum(run.over)} tokens"
    )


def test_they_serve_like_one(runs: dict[str, _Processes]) -> None:
    for name, run in runs.items():
        print(_row(name, run))
    for load in (0.9, 1.1):
        one, shared = runs[f"one {load}"], runs[f"shared {load}"]
        assert shared.goodput >= one.goodput - 0.03
        assert shared.ttft_s(0.99) <= 1.2 * one.ttft_s(0.99)


def test_a_window_is_filled_over_rarely_and_by_one_prompt_at_most(runs: dict[str, _Processes]) -> None:
    for load in (0.9, 1.1):
        assert runs[f"one {load}"].over == [], "one process never does that"
        shared = runs[f"shared {load}"]
        assert len(shared.over) <= 0.02 * shared.placed
        assert max(shared.over, default=0) <= max(TOKENS)
    blind = runs["blind 0.9"]
    assert len(blind.over) >= 0.05 * blind.placed, "without a word between them it is the rule"


def test_no_process_starves_the_other(runs: dict[str, _Processes]) -> None:
    """Whoever has a worker may not keep it for its own prompts while older ones wait in the other process."""
    for load in (0.9, 1.1):
        shared, one = runs[f"shared {load}"], runs[f"one {load}"]
        in_time = []
        for router in shared.routers:
            own = [request for request in shared.done if request.router is router]
            in_time.append(sum(each.first_token_s - each.came_s <= TTFT_SLO_S for each in own) / len(own))
            assert shared.ttft_s(0.95, router) <= 1.2 * one.ttft_s(0.95)
        assert min(in_time) >= 0.95 * max(in_time)


def test_one_that_gets_nearly_all_requests_does_not_starve_the_other() -> None:
    run = asyncio.run(_run(2, 1.0, share=True, share_of_first=0.9))
    few = [request for request in run.done if request.router is run.routers[1]]
    in_time = sum(each.first_token_s - each.came_s <= TTFT_SLO_S for each in few) / len(few)
    assert in_time >= 0.85 * run.goodput


def test_when_all_is_over_no_process_counts_anything(runs: dict[str, _Processes]) -> None:
    for run in runs.values():
        for router in run.routers:
            assert len(router.queue) == 0
            assert all(endpoint.idle for endpoint in router.pool.endpoints)
