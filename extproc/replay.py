"""A trace replayed on simulated workers with a virtual clock: the filter's own routing decides, minutes pass in seconds.

The routing code is the filter's; the workers are :class:`workers.sim.twin.TwinEngine`. What is left out is Envoy, the network
but for a fixed delay a message, and everything that can fail.
"""

from __future__ import annotations

import heapq
import math
import time
from array import array
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from extproc.routing.job import Aims, Job
from extproc.routing.load import Load
from extproc.routing.prefix import Chain
from extproc.routing.token_chain import TokenChain
from workers.goodput import Outcome, Status
from workers.sim.timing import Profile
from workers.sim.twin import Done, Event, Gaps, Pulled, TwinConfig, TwinEngine, TwinLoad
from workers.sim.twin_cache import Change
from workers.sim.twin_link import Wires
from workers.sim.twin_tier import TierConfig, TwinTier, host_tier
from workers.traces import BLOCK_TOKENS, Request

_PATIENCE_S = 600.0
"""How long a client of the replay waits."""
_64_BITS = (1 << 64) - 1


class Placed(NamedTuple):
    """Workers for a request. No ``prefill``: the decode worker does it all."""

    prefill: str | None
    decode: str


class Refused(NamedTuple):
    """No worker for a request."""

    reason: str


class Dispatcher(Protocol):
    """What decides: the filter's router, or one that it is compared with. Time is given, in seconds, and never goes back."""

    def submit(self, job: Job, now_s: float) -> Hashable:
        """A request came; what it is called from now on."""

    def poll(self, now_s: float) -> Sequence[tuple[Hashable, Placed | Refused]]:
        """What was decided."""

    def next_wake_s(self) -> float | None:
        """When poll() should be called although nothing else happens."""

    def prefill_done(self, ticket: Hashable, now_s: float, *, tokens: int, cached_tokens: int) -> None:
        """The prefill worker answered."""

    def decode_began(self, ticket: Hashable, now_s: float) -> None:
        """The decode worker has read the handoff."""

    def decode_done(self, ticket: Hashable, now_s: float) -> None:
        """The answer is complete."""

    def on_load(self, address: str, load: Load, now_s: float) -> None:
        """A worker reported."""


class Watch(Protocol):
    """Who is told what the caches of the workers hold."""

    def begin(self, engines: Mapping[str, TwinEngine]) -> None:
        """All workers, by address, before anything happens."""

    def told(self, address: str, changes: Sequence[Change], ids: Mapping[int, int]) -> None:
        """A worker's events. ``ids``: the trace's id of each block of a prompt that came so far, by its key."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The workers of a replay."""

    prefill: int = 3
    decode: int = 5
    engine: TwinConfig = field(default_factory=TwinConfig)
    profile: Profile = field(default_factory=lambda: replace(Profile(), handshake_s=0.0))
    """Workers that know each other already: a handshake of seconds for each pair would be most of a short replay."""
    prefill_engine: TwinConfig | None = None
    """Of the prefill workers; None: as the others."""
    prefill_profile: Profile | None = None
    """Of the prefill workers; None: as the others."""
    shared_links: bool = False
    """Whether transfers through the same worker share its link. False: each takes as long as if it were alone."""
    tier: TierConfig | None = None
    """Behind the caches of the workers that prefill: one for all of them, or one each."""
    tier_each: bool = False
    """Each has its own, as host memory is. Only without ``shared_links``, and one for all only with them."""
    all_gaps: bool = False
    """Whether the times between all tokens are kept, and not only each request's 99th percentile."""
    hop_s: float = 0.002
    """From one process to the next."""
    scrape_s: float = 1.0
    """How often the workers report."""

    @classmethod
    def with_caches(cls, cache_tokens: int, host_cache_tokens: int = 0, *, prefill: int = 3, decode: int = 5) -> Setup:
        """Workers with KV caches of that size, and prefill workers whose hosts keep as much behind them, in blocks of the
        traces."""
        setup = cls(
            prefill=prefill,
            decode=decode,
            engine=TwinConfig(block_tokens=BLOCK_TOKENS, num_blocks=cache_tokens // BLOCK_TOKENS),
        )
        if not host_cache_tokens:
            return setup
        return replace(setup, tier=host_tier(host_cache_tokens, setup.profile), tier_each=True)

    def __post_init__(self) -> None:
        """Raises ValueError for a tier whose reads have no way to share what they share, or one that has."""
        if self.tier is not None and self.tier_each == self.shared_links:
            raise ValueError("tier: one for all workers needs shared_links, and one for each goes without")

    @property
    def prefill_addresses(self) -> tuple[str, ...]:
        """``ip:port`` of the prefill workers."""
        return tuple(f"10.0.0.{index + 1}:8000" for index in range(self.prefill))

    @property
    def decode_addresses(self) -> tuple[str, ...]:
        """``ip:port`` of the decode workers."""
        return tuple(f"10.0.1.{index + 1}:8000" for index in range(self.decode))

    @property
    def of_prefill(self) -> tuple[TwinConfig, Profile]:
        """Limits and hardware of a prefill worker."""
        return self.prefill_engine or self.engine, self.prefill_profile or self.profile

    def wires(self) -> Wires | None:
        """The ports of all workers, and of the tier; None where transfers share nothing."""
        if not self.shared_links:
            return None
        tier, sending = self.tier, self.of_prefill[1].transfer_bytes_a_s
        ports = {f"{address} out": sending for address in self.prefill_addresses}
        ports |= {f"{address} in": self.profile.transfer_bytes_a_s for address in self.decode_addresses}
        if tier is not None:
            readers = self.prefill_addresses or self.decode_addresses
            ports |= {"tier": tier.total_bytes_a_s} | {f"{address} load": tier.bytes_a_s for address in readers}
        return Wires(ports)


class Worked(NamedTuple):
    """What a worker did in a replay."""

    busy_s: float
    """In steps of the engine."""
    kv_peak: float
    """Largest share of its KV cache that was in use."""
    preemptions: int
    transferred_bytes: float
    """KV that it read from prefill workers."""
    gaps: Sequence[Gaps]
    """Between the tokens of its streams, where they were asked for."""


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """A replay that came to its end."""

    outcomes: list[Outcome]
    """In the order of the arrivals."""
    placed: list[Placed | Refused]
    """What was decided for each."""
    load_spread: float
    """Prompt tokens computed by the busiest prefill worker, against the mean of all; 1 is even."""
    virtual_s: float
    wall_s: float
    worked: Mapping[str, Worked]
    """By address."""


def chain_of_ids(hash_ids: Sequence[int], tokens: int) -> Chain:
    """The chain of a prompt of a trace: equal exactly as far as the ids agree."""
    digest, hashes = 0, array("Q")
    for block in hash_ids[: tokens // BLOCK_TOKENS]:
        digest = (digest ^ (block + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9 & _64_BITS
        digest ^= digest >> 29
        hashes.append(digest)
    return Chain(hashes, float(BLOCK_TOKENS))


def token_chain_of(hash_ids: Sequence[int], tokens: int) -> TokenChain:
    """A prompt of a trace as tokens: those of a block are all its id."""
    token_ids = array("I")
    for block in hash_ids:
        token_ids += tokens_of(block)
    del token_ids[tokens:]
    return TokenChain(token_ids)


def tokens_of(block: int) -> array[int]:
    """The tokens of a block."""
    return array("I", (block & 0xFFFFFFFF,)) * BLOCK_TOKENS


def capacity(requests: Sequence[Request], setup: Setup) -> float:
    """Requests a second from which on the prefill queues grow without end where workers are given their turns.

    As many prefill workers, each with every so-manieth request and its own cache, by the mean time for one request when there
    is always a next one. NaN for no requests.
    """
    busy_s = 0.0
    config, profile = setup.of_prefill
    for turn in range(setup.prefill):
        engine = TwinEngine(str(turn), config, profile)
        outstanding_tokens, now_s = 0, 0.0
        waiting = list(reversed(requests[turn :: setup.prefill]))
        while waiting or outstanding_tokens:
            while waiting and outstanding_tokens <= 2 * config.max_num_batched_tokens:
                request = waiting.pop()
                keys = chain_of_ids(request.hash_ids, request.input_tokens).hashes
                engine.submit_prefill(f"{len(waiting)} {request.input_tokens}", keys, request.input_tokens, now_s)
                outstanding_tokens += request.input_tokens
            next_s = engine.next_event_s()
            assert next_s is not None
            now_s = next_s
            for event in engine.advance(now_s):
                engine.release(event.name, now_s)
                outstanding_tokens -= int(event.name.split()[1])
        busy_s += now_s
    return setup.prefill * len(requests) / busy_s if busy_s else math.nan


def replay(
    requests: Sequence[Request],
    dispatcher: Dispatcher,
    setup: Setup,
    aims: Callable[[Request], Aims],
    *,
    tenant: Callable[[int], str] = lambda _: "",
    watches: Sequence[Watch] = (),
) -> Replayed:
    """Send the requests at their times and follow each to its end.

    ``aims`` is the policy of a request, ``tenant`` says whose the n-th one is; ``watches`` are told of the workers' caches, and
    prompts have tokens where there are any. Raises RuntimeError if the dispatcher never
    decides about a request, and ValueError for one that no worker could ever hold.
    """
    return _Run(requests, dispatcher, setup, aims, tenant, watches).run()


class _Journey:
    __slots__ = ("cached_tokens", "chain", "number", "placed", "placed_s", "request", "ticket")

    def __init__(self, number: int, request: Request, chain: Chain) -> None:
        self.number = number
        self.request = request
        self.chain = chain
        self.ticket: Hashable = None
        self.placed: Placed | Refused | None = None
        self.placed_s = 0.0
        self.cached_tokens = 0


class _Worker:
    """An engine, when it wants to be looked at next, and what it had reported before."""

    __slots__ = ("address", "computed_tokens", "engine", "next_s", "reported")

    def __init__(self, address: str, config: TwinConfig, profile: Profile, wires: Wires | None, tier: TwinTier | None) -> None:
        self.address = address
        self.engine = TwinEngine(address, config, profile, wires=wires, tier=tier)
        self.next_s = math.inf
        self.computed_tokens = 0
        self.reported: TwinLoad = self.engine.load()

    def worked(self) -> Worked:
        engine = self.engine
        return Worked(
            busy_s=engine.busy_s,
            kv_peak=engine.kv_peak,
            preemptions=engine.preemptions,
            transferred_bytes=engine.load().transferred_tokens * engine.profile.kv_bytes_a_token * engine.profile.kv_copies,
            gaps=engine.gaps or (),
        )

    def tells(self) -> Sequence[Change]:
        """What its caches have to tell since the last time; the first time they begin to take note."""
        engine = self.engine
        told, engine.cache.changes = engine.cache.changes or (), []
        if engine.tier is not None:
            engine.tier.changes = engine.cache.changes  # one list: order matters
        return told

    def stirred(self) -> None:
        next_s = self.engine.next_event_s()
        self.next_s = math.inf if next_s is None else next_s


class _Run:
    def __init__(
        self,
        requests: Sequence[Request],
        dispatcher: Dispatcher,
        setup: Setup,
        aims: Callable[[Request], Aims],
        tenant: Callable[[int], str],
        watches: Sequence[Watch],
    ) -> None:
        self._requests = requests
        self._dispatcher = dispatcher
        self._setup = setup
        self._aims = aims
        self._tenant = tenant
        self._wires = setup.wires()
        tier = None if setup.tier is None else TwinTier(setup.tier)
        self._prefill = {
            address: _Worker(
                address, *setup.of_prefill, self._wires, TwinTier(setup.tier) if setup.tier and setup.tier_each else tier
            )
            for address in setup.prefill_addresses
        }
        self._decode = {
            address: _Worker(address, setup.engine, setup.profile, self._wires, None if self._prefill else tier)
            for address in setup.decode_addresses
        }
        self._workers = [*self._prefill.values(), *self._decode.values()]
        self._by_address = self._prefill | self._decode
        self._journeys: dict[str, _Journey] = {}
        self._by_ticket: dict[Hashable, _Journey] = {}
        self._outcomes: dict[int, Outcome] = {}
        self._placed: dict[int, Placed | Refused] = {}
        self._messages: list[tuple[float, int, Callable[[float], None]]] = []
        self._sent = 0
        self._watches = watches
        self._ids: dict[int, int] = {}
        for worker in self._workers if setup.all_gaps else ():
            worker.engine.gaps = []
        for worker in self._workers if watches else ():
            worker.tells()
        for watch in watches:
            watch.begin({worker.address: worker.engine for worker in self._workers})

    def run(self) -> Replayed:
        began_s = time.perf_counter()
        now_s = 0.0
        arriving = 0
        scrape_s = 0.0
        requests = self._requests
        while len(self._outcomes) < len(requests):
            arrival_s = requests[arriving].at_s if arriving < len(requests) else math.inf
            wake_s = self._dispatcher.next_wake_s()
            message_s = self._messages[0][0] if self._messages else math.inf
            worker_s = min(worker.next_s for worker in self._workers)
            wire_s = math.inf if self._wires is None else self._wires.next_event_s()
            next_s = min(arrival_s, worker_s, wire_s, message_s, math.inf if wake_s is None else wake_s)
            if next_s == math.inf:
                raise RuntimeError(f"{len(requests) - len(self._outcomes)} requests were never decided about")
            now_s = max(now_s, min(next_s, scrape_s))
            decide = wake_s is not None and wake_s <= now_s
            if wire_s <= now_s:
                worker_s = min(worker_s, self._arrived_over_wires(now_s))
            if worker_s <= now_s:
                for worker in self._workers:
                    if worker.next_s <= now_s:
                        for event in worker.engine.advance(now_s):
                            self._happened(worker, event)
                        worker.stirred()
                        if worker.engine.cache.changes:
                            self._tell(worker, now_s)
            while self._messages and self._messages[0][0] <= now_s:
                heapq.heappop(self._messages)[2](now_s)
                decide = True
            while arriving < len(requests) and requests[arriving].at_s <= now_s:
                self._arrived(arriving, now_s)
                arriving += 1
                decide = True
            if scrape_s <= now_s:
                scrape_s = now_s + self._setup.scrape_s
                for worker in self._workers:
                    self._report(worker, now_s)
                decide = True
            if decide:
                for ticket, placed in self._dispatcher.poll(now_s):
                    self._decided(self._by_ticket[ticket], placed, now_s)
        computed = [worker.computed_tokens for worker in self._prefill.values()]
        return Replayed(
            outcomes=[self._outcomes[number] for number in range(len(requests))],
            placed=[self._placed[number] for number in range(len(requests))],
            load_spread=max(computed) * len(computed) / sum(computed) if sum(computed) else math.nan,
            virtual_s=now_s,
            wall_s=time.perf_counter() - began_s,
            worked={worker.address: worker.worked() for worker in self._workers},
        )

    def _send(self, at_s: float, what: Callable[[float], None]) -> None:
        self._sent += 1
        heapq.heappush(self._messages, (at_s, self._sent, what))

    def _arrived(self, number: int, now_s: float) -> None:
        request = self._requests[number]
        journey = _Journey(number, request, chain_of_ids(request.hash_ids, request.input_tokens))
        self._journeys[str(number)] = journey
        token_chain = None
        if self._watches:
            self._ids.update(zip(journey.chain.hashes, request.hash_ids, strict=False))
            token_chain = token_chain_of(request.hash_ids, request.input_tokens)
        job = Job(
            model=None,
            chain=journey.chain,
            token_chain=token_chain,
            tokens=request.input_tokens,
            aims=self._aims(request),
            arrived_s=now_s,
            deadline_s=now_s + _PATIENCE_S,
            tenant=self._tenant(number),
            answer_tokens=request.output_tokens,
            handoff=request.output_tokens > 1,  # as the filter: nothing is left to decode
        )
        journey.ticket = self._dispatcher.submit(job, now_s)
        self._by_ticket[journey.ticket] = journey

    def _arrived_over_wires(self, now_s: float) -> float:
        """Tell those that waited; when the first of them goes on, infinity if none does."""
        assert self._wires is not None
        first_s = math.inf
        for to, name, at_s in self._wires.advance(now_s):
            worker = self._by_address[to]
            worker.engine.arrived(name, at_s)
            worker.stirred()
            first_s = min(first_s, worker.next_s)
        return first_s

    def _decided(self, journey: _Journey, placed: Placed | Refused, now_s: float) -> None:
        journey.placed, journey.placed_s = placed, now_s
        if isinstance(placed, Refused):
            self._end(journey, None, now_s)
            return
        leg = self._start_whole if placed.prefill is None else self._start_prefill
        self._send(now_s + self._setup.hop_s, lambda at_s: leg(journey, placed, at_s))

    def _start_prefill(self, journey: _Journey, placed: Placed, now_s: float) -> None:
        assert placed.prefill is not None
        worker, request = self._prefill[placed.prefill], journey.request
        worker.engine.submit_prefill(str(journey.number), journey.chain.hashes, request.input_tokens, now_s)
        worker.stirred()

    def _start_whole(self, journey: _Journey, placed: Placed, now_s: float) -> None:
        worker, request = self._decode[placed.decode], journey.request
        worker.engine.submit_whole(
            str(journey.number), journey.chain.hashes, request.input_tokens, request.output_tokens, now_s
        )
        worker.stirred()

    def _start_decode(self, journey: _Journey, placed: Placed, now_s: float) -> None:
        assert placed.prefill is not None
        worker, request = self._decode[placed.decode], journey.request
        worker.engine.submit_decode(
            str(journey.number),
            journey.chain.hashes,
            request.input_tokens,
            request.output_tokens,
            now_s,
            peer=placed.prefill,
        )
        worker.stirred()

    def _happened(self, worker: _Worker, event: Event) -> None:
        journey = self._journeys[event.name]
        if isinstance(event, Pulled):
            peer = self._prefill[event.peer]
            peer.engine.release(event.name, event.at_s)
            peer.stirred()
            self._dispatcher.decode_began(journey.ticket, event.at_s)
            return
        done = event
        if worker.address in self._prefill:
            self._send(event.at_s + self._setup.hop_s, lambda now_s: self._prefilled(journey, worker, done, now_s))
        else:
            self._send(event.at_s + self._setup.hop_s, lambda now_s: self._end(journey, done, now_s))

    def _prefilled(self, journey: _Journey, worker: _Worker, done: Done, now_s: float) -> None:
        tokens, placed = journey.request.input_tokens, journey.placed
        assert isinstance(placed, Placed)
        journey.cached_tokens = done.cached_tokens
        worker.computed_tokens += tokens - done.cached_tokens
        self._dispatcher.prefill_done(journey.ticket, now_s, tokens=tokens, cached_tokens=done.cached_tokens)
        self._send(now_s + self._setup.hop_s, lambda at_s: self._start_decode(journey, placed, at_s))

    def _end(self, journey: _Journey, done: Done | None, now_s: float) -> None:
        request, placed = journey.request, journey.placed
        assert placed is not None
        del self._by_ticket[journey.ticket], self._journeys[str(journey.number)]
        cached_tokens = journey.cached_tokens
        if done is not None:
            self._dispatcher.decode_done(journey.ticket, now_s)
            if isinstance(placed, Placed) and placed.prefill is None:
                cached_tokens = done.cached_tokens
        self._placed[journey.number] = placed
        self._outcomes[journey.number] = Outcome(
            arrived_s=request.at_s,
            ttft_s=None if done is None else done.first_token_s + self._setup.hop_s - request.at_s,
            itl_p99_s=None if done is None else done.itl_p99_s,
            input_tokens=request.input_tokens,
            cached_tokens=cached_tokens,
            output_tokens=0 if done is None else request.output_tokens,
            status=Status.REFUSED if done is None else Status.SERVED,
            tenant=self._tenant(journey.number),
            wait_s=journey.placed_s - request.at_s,
        )

    def _tell(self, worker: _Worker, now_s: float) -> None:
        """Its events reach all who watch."""
        told, address = worker.tells(), worker.address
        for watch in self._watches:
            self._send(now_s + self._setup.hop_s, lambda _, to=watch: to.told(address, told, self._ids))  # type: ignore[misc]

    def _report(self, worker: _Worker, now_s: float) -> None:
        before, load = worker.reported, worker.engine.load()
        worker.reported = load
        gaps, transfers = load.gaps - before.gaps, load.transfers - before.transfers
        moved = (load.transferred_tokens - before.transferred_tokens) * self._setup.profile.kv_bytes_a_token
        self._dispatcher.on_load(
            worker.address,
            Load(
                running=float(load.running),
                waiting=float(load.waiting),
                kv_usage=load.kv_usage,
                kv_tokens=worker.engine.config.num_blocks * worker.engine.config.block_tokens,
                itl_s=(load.gaps_s - before.gaps_s) / gaps if gaps else None,
                transfer_s=(load.transfers_s - before.transfers_s) / transfers if transfers else None,
                transfer_bytes=moved / transfers if transfers else None,
            ),
            now_s,
        )
