"""What the decision is about: one prompt, and what its policy aims at."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

import msgspec

from extproc.routing.prefix import Chain
from extproc.routing.token_chain import TokenChain


class Mode(Enum):
    """Whether a prompt is handed over."""

    __hash__ = object.__hash__  # that of Enum is written in Python, and this is a key for every request

    AUTO = "auto"
    """Whichever costs less."""
    DISAGGREGATE = "disaggregate"
    """A prefill worker, then a decode worker."""
    AGGREGATE = "aggregate"
    """A decode worker does all of it."""


class Objective(Enum):
    """What the choice of workers minimises."""

    __hash__ = object.__hash__  # that of Enum is written in Python, and this is a key for every request

    BALANCED = "balanced"
    """Time to first token and work added to the pool, weighted by how busy the pool is."""
    TTFT = "ttft"
    """The request's own time to first token."""
    THROUGHPUT = "throughput"
    """Work added to the pool."""
    PREFIX = "prefix"
    """The longest cached prefix, whatever the load."""
    LEAST_LOAD = "least-load"
    """The least work in flight, whatever the cache holds."""
    ROUND_ROBIN = "round-robin"
    RANDOM = "random"


class Late(Enum):
    """What happens to a request that can no longer meet its TTFT SLO."""

    __hash__ = object.__hash__  # that of Enum is written in Python, and this is a key for every request

    WAIT = "wait"
    """It waits, behind those that still can."""
    REJECT = "reject"
    """429, with the time after which to try again."""
    AGGREGATE = "aggregate"
    """A decode worker does all of it."""


class Aims(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a policy that the decision reads."""

    policy: str = "default"
    """Its name, for metrics and explanations."""
    mode: Mode = Mode.AUTO
    objective: Objective = Objective.BALANCED
    held: bool = True
    """Wait in our queue for a prefill worker; False: send at once, and let the engine queue."""
    ttft_slo_s: float | None = None
    itl_slo_s: float | None = None
    threshold_uncached_tokens: int | None = None
    """With Mode.AUTO: hand over from so many uncached tokens on, instead of weighing the costs."""
    prefill_labels: Mapping[str, str] = {}
    """Labels that a prefill worker must have."""
    decode_labels: Mapping[str, str] = {}
    late: Late = Late.WAIT
    max_wait_s: float = 60.0
    """Longest time in the queue; then 429."""
    max_in_flight: int | None = None
    """Requests of this policy at once; one more is 429."""
    weight: float = 1.0
    """Of a tenant under this policy, against other tenants."""
    priority: int = 0
    """Band in the queue: a lower number goes first, as vLLM has it."""


class Offer(NamedTuple):
    """Blocks of the turn before, which a decode worker keeps for a prefill worker to read."""

    decode: str
    """``ip:port`` of the decode worker."""
    tokens: int
    """Leading tokens of the prompt in them, all of which are known to be the same."""
    not_for: frozenset[str] = frozenset()
    """``ip:port`` of prefill workers that get nothing to read."""


class Job(msgspec.Struct, kw_only=True):
    """One prompt that asks for workers."""

    model: str | None
    chain: Chain
    """The prompt as block hashes of its text."""
    token_chain: TokenChain | None = None
    """The prompt as the engine caches it; None: its tokens are not known, or nobody asked for them."""
    stored_tokens: Mapping[str, int] | None = None
    """Leading tokens that cache servers hold, as their directory said a moment ago, by server; None: it was not asked."""
    next_turn: Offer | None = None
    """What a decode worker keeps of it for the prefill worker; None: nothing that may be read."""
    tokens: int
    """Length of the prompt, estimated or known."""
    aims: Aims
    arrived_s: float
    deadline_s: float
    """When the client's patience ends (clock seconds): no prefill may begin after it."""
    tenant: str = ""
    session: str = ""
    """Conversation that it belongs to; the worker that holds it is preferred. Empty: none."""
    answer_tokens: int | None = None
    """The request's own cap; None: not given."""
    token_chain_whole: bool = True
    """False: ``token_chain`` is only known to be the beginning of the prompt, and says nothing of its length."""
    size_bytes: int = 0
    """Of the request's body, for the queue's limit."""
    handoff: bool = True
    """False: it cannot be handed over, and only a decode worker is wanted."""
    takes_rank: bool = False
    """An engine of a worker with several data-parallel ranks may be named for it."""
    only: frozenset[str] | None = None
    """``ip:port`` of the decode workers that may be chosen, whatever else speaks for others; None: any."""


class Kind(NamedTuple):
    """What decides which workers a prompt may go to. Prompts of one kind wait in one queue."""

    model: str | None
    prefill_labels: frozenset[tuple[str, str]]
    decode_labels: frozenset[tuple[str, str]]


_NO_LABELS: frozenset[tuple[str, str]] = frozenset()


def kind_of(job: Job) -> Kind:
    """The kind of a prompt."""
    aims = job.aims
    return Kind(
        job.model,
        frozenset(aims.prefill_labels.items()) if aims.prefill_labels else _NO_LABELS,
        frozenset(aims.decode_labels.items()) if aims.decode_labels else _NO_LABELS,
    )
