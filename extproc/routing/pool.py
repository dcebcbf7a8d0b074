"""The workers: which of them may get what, and the ledger of what is in flight on each."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from enum import Enum

from extproc.routing.endpoint_spec import EndpointSet, EndpointSpec
from extproc.routing.load import Load
from extproc.routing.partition import POOL_LABEL, Partition

_REPORT_AGE_S = 0.1
"""How old what a worker reports may be when it arrives."""

_ENDED_MOST = 1024


class Role(Enum):
    """One of the two legs of a request, and who serves it."""

    __hash__ = object.__hash__  # that of Enum is written in Python, and this is a key for every request

    PREFILL = "prefill"
    DECODE = "decode"


class Claim:
    """One request's share in the load of a worker, from the decision to its end. Given back once, however often asked."""

    __slots__ = ("another", "late", "leg", "since_s", "tokens", "work_s")

    def __init__(self, leg: Leg, tokens: int, work_s: float, since_s: float, *, another: bool = False) -> None:
        self.leg: Leg | None = leg
        self.another = another
        """It is a request of another process."""
        self.late = False
        """It cannot meet its deadline any more: others should not have to wait for it."""
        self.tokens = tokens
        """Prefill: prompt tokens to compute. Decode: KV tokens of prompt and answer."""
        self.work_s = work_s
        """Prefill: seconds that the worker is expected to need."""
        self.since_s = since_s

    def release(self, now_s: float) -> bool:
        """Give it back; False if that was done before."""
        leg, self.leg = self.leg, None
        if leg is None:
            return False
        leg.give_back(self, now_s)
        return True


class Leg:
    """A worker in one of its roles: what is in flight, when it will be through, and whether it fails."""

    __slots__ = (
        "_ended_s",
        "blocked_until_s",
        "busy_until_s",
        "claims",
        "external_requests",
        "external_s",
        "external_tokens",
        "failures",
        "others",
        "others_tokens",
        "tokens",
        "trial",
        "turn",
        "version",
    )

    def __init__(self) -> None:
        self.claims: dict[Claim, None] = {}
        """In the order of the decisions."""
        self.tokens = 0
        self.others = self.others_tokens = 0
        """How many of the claims, and how much of their tokens, are of other processes."""
        self.busy_until_s = -math.inf
        """Prefill: when the work in flight is expected to be done."""
        self.turn = 0
        """When it was last chosen, as a number that counts choices: among equals the one that waits longest goes first."""
        self.failures = 0
        """In a row."""
        self.blocked_until_s = -math.inf
        self.trial: Claim | None = None
        """The one request that it gets after a pause."""
        self.external_requests = 0.0
        """On the worker but not ours, when it last reported: other replicas, direct clients."""
        self.external_tokens = 0
        """Decode: KV tokens in use there beyond what is counted here."""
        self.external_s = -math.inf
        """When that was."""
        self._ended_s: deque[float] = deque(maxlen=_ENDED_MOST)
        """When the last requests ended."""
        self.version = 0
        """Grows with whatever may let it take more, or less, than before, but for the passing of time."""

    def reported(self, now_s: float) -> int:
        """How many of the requests in a report that arrived just now may be ours: it may count some that have ended since."""
        while self._ended_s and self._ended_s[0] < now_s - _REPORT_AGE_S:
            self._ended_s.popleft()
        return len(self.claims) + len(self._ended_s)

    @property
    def requests(self) -> int:
        """Requests in flight through this process, and through others that share their ledgers with it."""
        return len(self.claims)

    @property
    def own_requests(self) -> int:
        """Requests in flight through this process alone."""
        return len(self.claims) - self.others

    @property
    def own_tokens(self) -> int:
        """Tokens of these."""
        return self.tokens - self.others_tokens

    def claim(self, *, tokens: int, work_s: float, now_s: float, turn: int, another: bool = False) -> Claim:
        """Count one request, from now on. ``another``: of another process."""
        claim = Claim(self, tokens, work_s, now_s, another=another)
        if another:
            self.others += 1
            self.others_tokens += tokens
        self.claims[claim] = None
        self.tokens += tokens
        self.busy_until_s = max(self.busy_until_s, now_s) + work_s
        self.turn = turn
        self.version += 1
        return claim

    def occupy(self, work_s: float, now_s: float) -> None:
        """Work that ends without a word: it is taken to be done when it is expected to be."""
        self.busy_until_s = max(self.busy_until_s, now_s) + work_s
        self.version += 1

    def external(self, requests: float, now_s: float, tokens: int = 0) -> None:
        """So many requests are on the worker that are not ours, and so many KV tokens are in use that we do not count."""
        if requests != self.external_requests or tokens != self.external_tokens:
            self.version += 1
        self.external_requests, self.external_tokens, self.external_s = requests, tokens, now_s

    def give_back(self, claim: Claim, now_s: float) -> None:
        """Only for Claim.release."""
        del self.claims[claim]
        if claim.another:
            self.others -= 1
            self.others_tokens -= claim.tokens
        self._ended_s.append(now_s)
        self.tokens -= claim.tokens
        # The engine serves in order: what is left begins now, at the earliest.
        self.busy_until_s = now_s + sum(left.work_s for left in self.claims)
        self.version += 1

    def expire(self, before_s: float, now_s: float) -> int:
        """Give back what has been in flight since before ``before_s``: a guard against leaks; how many there were."""
        old = [claim for claim in self.claims if claim.since_s < before_s]
        return sum(claim.release(now_s) for claim in old)


class Endpoint:
    """One worker."""

    __slots__ = (
        "_legs",
        "address",
        "decode",
        "kv_tokens",
        "labels",
        "leaving",
        "live",
        "load",
        "max_seqs",
        "models",
        "prefill",
        "roles",
        "spec",
        "step_tokens",
        "warming",
    )

    def __init__(self, spec: EndpointSpec, roles: frozenset[Role]) -> None:
        self.address = spec.address
        """``ip:port``."""
        self.roles = roles
        self.prefill = Leg()
        self.decode = Leg()
        self._legs = {Role.PREFILL: self.prefill, Role.DECODE: self.decode}
        self.live = False
        """Unknown counts as not live: the first probe decides."""
        self.warming = False
        """It has yet to make its first handoff: not for requests while another can take them."""
        self.leaving = False
        """No longer among the configured workers: it finishes what it has."""
        self.models: dict[str, bytes] | None = None
        """Name of a model that it serves -> the JSON by which it describes it; None while nobody knows."""
        self.load: Load | None = None
        """What it last reported."""
        self.take(spec)

    def take(self, spec: EndpointSpec) -> None:
        """What the configuration says of it."""
        self.spec = spec
        self.labels: Mapping[str, str] = spec.labels
        self.kv_tokens = spec.kv_tokens
        self.max_seqs = spec.max_seqs
        self.step_tokens = spec.max_batched_tokens

    def leg(self, role: Role) -> Leg:
        """The side of it that serves ``role``."""
        return self._legs[role]

    def serves(self, model: str | None) -> bool:
        """Whether it may get a request for ``model``. What is not known is not held against it."""
        if model is None:
            return True
        if self.spec.models is not None:
            return model in self.spec.models
        return self.models is None or model in self.models

    @property
    def idle(self) -> bool:
        """Nothing of ours is in flight on it."""
        return not self.prefill.claims and not self.decode.claims


class Pool:
    """All endpoints, in the order of the configuration. ``version`` changes with everything that changes who may be chosen."""

    def __init__(self, endpoints: EndpointSet, partition: Partition | None = None) -> None:
        """``partition``: the pools that the endpoints are in; None: they all serve each other."""
        self.partition = partition
        self.on_move: Callable[[], None] | None = None
        """Called when an endpoint has turned out to be in another pool."""
        self.version = 0
        self._by_address: dict[str, Endpoint] = {}
        self.replace(endpoints)

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """All of them, those that are leaving too."""
        return tuple(self._by_address.values())

    def get(self, address: str) -> Endpoint | None:
        """The endpoint at ``ip:port``."""
        return self._by_address.get(address)

    def pool_at(self, address: str) -> str | None:
        """The pool of the endpoint at ``ip:port``; None where there are none, or no such endpoint."""
        if self.partition is None:
            return None
        endpoint = self._by_address.get(address)
        return None if endpoint is None else endpoint.labels[POOL_LABEL]

    def replace(self, wanted: EndpointSet) -> list[Endpoint]:
        """Take over a new set of workers. Those that are no longer in it finish what they have and go (:meth:`sweep`).

        Returns those at whose address there is another worker than before. Nothing is known of it, not even that it lives.
        """
        found: dict[str, tuple[EndpointSpec, frozenset[Role]]] = {}
        for specs, roles in (
            (wanted.prefill, frozenset((Role.PREFILL,))),
            (wanted.decode, frozenset((Role.DECODE,))),
            (wanted.both, frozenset(Role)),
        ):
            for spec in specs:
                before = found.get(spec.address)
                found[spec.address] = (spec, roles | before[1] if before else roles)
        kept: dict[str, Endpoint] = {}
        others: list[Endpoint] = []
        for address, (spec, roles) in found.items():
            endpoint = self._by_address.get(address) or Endpoint(spec, roles)
            if None not in (endpoint.spec.instance, spec.instance) and endpoint.spec.instance != spec.instance:
                endpoint.live, endpoint.models, endpoint.load = False, None, None
                others.append(endpoint)
            endpoint.take(spec)
            self._assign(endpoint)
            endpoint.roles, endpoint.leaving = roles, False
            kept[address] = endpoint
        for address, endpoint in self._by_address.items():
            if address not in kept and not endpoint.idle:
                endpoint.leaving = True
                kept[address] = endpoint
        self._by_address = kept
        self.version += 1
        return others

    def sweep(self) -> list[str]:
        """Forget those that are leaving and have nothing left to do; their addresses."""
        gone = [address for address, endpoint in self._by_address.items() if endpoint.leaving and endpoint.idle]
        for address in gone:
            del self._by_address[address]
        return gone

    def set_live(self, endpoint: Endpoint, live: bool) -> None:
        """What the last probes say."""
        endpoint.live = live
        self.version += 1

    def set_warming(self, endpoint: Endpoint, warming: bool) -> None:
        """Whether it has yet to make its first handoff."""
        endpoint.warming = warming
        self.version += 1

    def set_models(self, endpoint: Endpoint, models: dict[str, bytes]) -> None:
        """What the worker lists."""
        endpoint.models = models
        moved = self._assign(endpoint)
        self.version += 1
        if moved and self.on_move is not None:
            self.on_move()

    def _assign(self, endpoint: Endpoint) -> bool:
        """Note in which pool it is; whether that was another one before."""
        if self.partition is None:
            return False
        spec, before = endpoint.spec, endpoint.labels.get(POOL_LABEL)
        models = endpoint.models if spec.models is None else spec.models
        pool = self.partition.pool_of(spec.labels, models)
        endpoint.labels = {POOL_LABEL: pool, **{name: each for name, each in spec.labels.items() if name != POOL_LABEL}}
        return pool != before

    def live(self, role: Role) -> list[Endpoint]:
        """The endpoints of a role that answer. Which of them gets a request is the picker's choice."""
        return [each for each in self._by_address.values() if each.live and not each.leaving and role in each.roles]

    def models(self) -> dict[str, bytes]:
        """Every model of the live endpoints, with the JSON by which its first worker describes it."""
        merged: dict[str, bytes] = {}
        for endpoint in self._by_address.values():
            if endpoint.live:
                for name, card in (endpoint.models or {}).items():
                    merged.setdefault(name, card)
        return merged

    def ready(self) -> bool:
        """Both roles have a live worker; where there are pools, in one of them."""
        if self.partition is None:
            return all(self.live(role) for role in Role)
        prefill, decode = ({each.labels[POOL_LABEL] for each in self.live(role)} for role in Role)
        return not prefill.isdisjoint(decode)

    def expire(self, before_s: float, now_s: float) -> int:
        """Give back claims older than ``before_s`` on all endpoints; how many there were, which should be none."""
        return sum(leg.expire(before_s, now_s) for each in self._by_address.values() for leg in (each.prefill, each.decode))


def matches(labels: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    """Whether ``labels`` has everything that is ``wanted``."""
    return all(labels.get(key) == value for key, value in wanted.items())


def addresses(endpoints: Iterable[Endpoint]) -> list[str]:
    """Their ``ip:port``."""
    return [endpoint.address for endpoint in endpoints]
