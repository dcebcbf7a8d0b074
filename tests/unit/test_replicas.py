"""Two filters over the same workers: what the workers report is all that one knows of the other."""

from __future__ import annotations

import heapq
import math
import random
from array import array
from collections.abc import Callable

import pytest

from extproc.routing.job import Aims, Job, Mode
from extproc.routing.load import Load
from extproc.routing.prefix import Chain
from extproc.routing.router import Router
from extproc.routing.settings import Routing
from extproc.routing.ticket import State, Ticket
from tests.unit.routing_world import pool_of
from workers.sim.timing import Profile
from workers.sim.twin import Done, Pulled, TwinConfig, TwinEngine

BLOCK_TOKENS = 512
STEP_TOKENS = 8192
PREFILL, DECODE = 3, 5
TTFT_SLO_S = 2.5
TOKENS = (2048, 4096, 8192, 16_384)
SHARED_TOKENS = 1024
"""Of each prompt: one of a few system prompts."""


class _Served:
    """One request on its way."""

    def __init__(self, number: int, router: Router, ticket: Ticket, came_s: float, answer_tokens: int) -> None:
        self.name = str(number)
        self.router = router
        self.ticket = ticket
        self.came_s = came_s
        self.answer_tokens = answer_tokens
        self.first_token_s = math.inf


class _Cluster:
    """Simulated workers on a virtual clock, and filters that send each request to them in turn."""

    def __init__(self, replicas: int) -> None:
        self.routers = []
        for _ in range(replicas):
            pool = pool_of(PREFILL, DECODE)
            self.routers.append(Router(pool, Routing(step_tokens=STEP_TOKENS, prefill_tokens_per_s=12_000.0, handshake_s=0.0)))
        profile, config = Profile(handshake_s=0.0), TwinConfig(max_num_batched_tokens=STEP_TOKENS)
        names = [*(f"p{number}" for number in range(PREFILL)), *(f"d{number}" for number in range(DECODE))]
        self.engines = {name: TwinEngine(name, config, profile) for name in names}
        self.outstanding = dict.fromkeys(names[:PREFILL], 0)
        """Prompt tokens at each prefill worker that it has not yet computed."""
        self.samples: list[int] = []
        """The same, each tenth of a second, for each worker."""
        self.requests: dict[str, _Served] = {}
        self.by_ticket: dict[Ticket, _Served] = {}
        self.done: list[_Served] = []
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0

    def at(self, at_s: float, what: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._events, (at_s, self._order, what))

    def run(self, rate_per_s: float, seconds: float, share_of_first: float = 0.5) -> None:
        rng = random.Random(5)
        at_s, number = 0.0, 0
        while at_s < seconds:
            at_s += rng.expovariate(rate_per_s)
            first = rng.random() < share_of_first
            router = self.routers[0 if first else -1]
            size, system, answer = rng.choice(TOKENS), rng.randrange(8), rng.choice((50, 150, 300))
            self.at(at_s, lambda a=(number, router, size, system, answer): self._arrive(*a))
            number += 1
        for tenth in range(int(seconds * 10)):
            self.at(tenth / 10, lambda: self.samples.extend(self.outstanding.values()))
        for second in range(int(seconds) + 120):
            for name in self.engines:
                self.at(second + 0.05, lambda name=name: self._report(name))
        while len(self.done) < number:
            engine_s = min((s for e in self.engines.values() if (s := e.next_event_s()) is not None), default=math.inf)
            wake_s = min((s for r in self.routers if (s := r.next_wake_s()) is not None), default=math.inf)
            event_s = self._events[0][0] if self._events else math.inf
            next_s = min(engine_s, wake_s, event_s)
            assert next_s < math.inf, "somebody waits for nothing"
            self.now_s = max(self.now_s, next_s)
            for name, engine in self.engines.items():
                for event in engine.advance(self.now_s):
                    self._happened(name, event)
            while self._events and self._events[0][0] <= self.now_s:
                heapq.heappop(self._events)[2]()
            for router in self.routers:
                for ticket in router.poll(self.now_s):
                    self._settled(ticket)

    def _arrive(self, number: int, router: Router, size: int, system: int, answer: int) -> None:
        hashes = [system << 48 | block for block in range(SHARED_TOKENS // BLOCK_TOKENS)]
        hashes += [(number + 1) << 16 | block for block in range(len(hashes), size // BLOCK_TOKENS)]
        job = Job(
            model=None,
            chain=Chain(array("Q", hashes), float(BLOCK_TOKENS)),
            tokens=size,
            aims=Aims(mode=Mode.DISAGGREGATE, ttft_slo_s=TTFT_SLO_S),
            arrived_s=self.now_s,
            deadline_s=self.now_s + 600,
            answer_tokens=answer,
        )
        ticket = router.submit(job, self.now_s)
        self.by_ticket[ticket] = self.requests[str(number)] = _Served(number, router, ticket, self.now_s, answer)
        if ticket.state is State.PLACED:
            self._settled(ticket)

    def _settled(self, ticket: Ticket) -> None:
        request = self.by_ticket.pop(ticket, None)
        if request is None:
            return
        if ticket.state is State.REJECTED:
            self.done.append(request)
            return
        job = ticket.job
        self.outstanding[ticket.prefill.address] += job.tokens
        self.engines[ticket.prefill.address].submit_prefill(request.name, job.chain.hashes, job.tokens, self.now_s)

    def _happened(self, name: str, event: Done | Pulled) -> None:
        request = self.requests[event.name]
        router, ticket, job = request.router, request.ticket, request.ticket.job
        if isinstance(event, Pulled):
            self.engines[event.peer].release(event.name, event.at_s)
            router.answered(ticket, event.at_s, ok=True)
        elif name in self.outstanding:
            self.outstanding[name] -= job.tokens
            router.prefill_done(ticket, event.at_s, tokens=job.tokens, cached_tokens=event.cached_tokens)
            self.engines[ticket.decode.address].submit_decode(
                request.name, job.chain.hashes, job.tokens, request.answer_tokens, event.at_s, peer=name
            )
        else:
            request.first_token_s = event.first_token_s
            router.finish(ticket, event.at_s)
            self.done.append(request)

    def _report(self, name: str) -> None:
        load = self.engines[name].load()
        for router in self.routers:
            router.on_load(name, Load(running=load.running, waiting=load.waiting, kv_usage=load.kv_usage), self.now_s)

    @property
    def goodput(self) -> float:
        """Share of the requests that had their first token in time."""
        return sum(request.first_token_s - request.came_s <= TTFT_SLO_S for request in self.done) / len(self.done)

    def share_above(self, tokens: int) -> float:
        """Of the time and of the prefill workers: with more than so many tokens outstanding."""
        return sum(each > tokens for each in self.samples) / len(self.samples)


def capacity_per_s() -> float:
    """Requests a second at which the prefill workers are never idle."""
    profile = Profile()
    mean_s = sum(
        profile.step_s(
            prefill_tokens=size - SHARED_TOKENS,
            prefill_context_tokens=(size - SHARED_TOKENS) * (size + SHARED_TOKENS) // 2,
            decodes=0,
            decode_context_tokens=0,
        )
        for size in TOKENS
    ) / len(TOKENS)
    return PREFILL / mean_s


@pytest.fixture(scope="module")
def clusters() -> dict[int, _Cluster]:
    found = {}
    for replicas in (1, 2):
        found[replicas] = _Cluster(replicas)
        found[replicas].run(0.9 * capacity_per_s(), 160.0)
    return found


def test_two_filters_serve_as_much_in_time_as_one(clusters: dict[int, _Cluster]) -> None:
    assert clusters[2].goodput >= 0.9 * clusters[1].goodput


def test_each_filter_gets_its_share(clusters: dict[int, _Cluster]) -> None:
    goodputs = []
    for router in clusters[2].routers:
        own = [request for request in clusters[2].done if request.router is router]
        goodputs.append(sum(request.first_token_s - request.came_s <= TTFT_SLO_S for request in own) / len(own))
    assert min(goodputs) >= 0.85 * max(goodputs)


def test_no_worker_has_more_than_about_two_steps_of_work_for_long(clusters: dict[int, _Cluster]) -> None:
    largest = max(TOKENS)
    assert clusters[2].share_above(largest + 2 * STEP_TOKENS) < 0.02


def test_when_all_is_over_no_filter_counts_anything(clusters: dict[int, _Cluster]) -> None:
    for router in clusters[2].routers:
        assert len(router.queue) == 0
        assert all(endpoint.idle for endpoint in router.pool.endpoints)
