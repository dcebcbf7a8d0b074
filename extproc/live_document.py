"""The document of ``/live``: what the live page and ``baton top`` show. Its fields are its documentation.

Bounded whatever the pool and the traffic: every list has a limit, and says how many it left out. Nothing in it comes from a
prompt or an answer.

Hundreds of some of these are made for one document. They hold no cycles, so the garbage collector need not know of them
(``gc=False``).
"""

from __future__ import annotations

from typing import Literal

import msgspec

VERSION = 1
"""Grows when a field changes its meaning or goes. New fields do not change it."""

WORKERS_MOST = 1_000
PAIRS_MOST = 500
DECISIONS_MOST = 20
FAULTS_MOST = 20
TIMES_MOST = 20
TEXT_MOST = 200
"""Characters of a text that comes from elsewhere: an error, a label, the id of a request."""

State = Literal["live", "warming", "failing", "leaving", "down"]


class WorkerNow(msgspec.Struct, kw_only=True, gc=False):
    """One worker."""

    address: str
    """`ip:port`."""
    roles: list[str]
    """`prefill`, `decode`, or both."""
    state: State
    """`live`. `warming`: it has yet to make its first handoff. `failing`: requests failed on it, it is left alone for a while.
    `leaving`: no longer configured, it finishes what it has. `down`: its health check fails."""
    why: str | None = None
    """Why it is in that state, where that is known."""
    pool: str | None = None
    """The pool that it is in; null: there are none."""
    labels: dict[str, str] = {}
    """At most eight."""
    models: list[str] = []
    """At most four."""
    prefill_requests: int = 0
    """Prefills in flight on it through this filter."""
    decode_requests: int = 0
    """Answers in flight on it through this filter, from the decision on."""
    prefill_tokens: int = 0
    """Prompt tokens of these prefills that it has to compute."""
    decode_tokens: int = 0
    """KV tokens of these answers: prompt, and as much answer as is expected."""
    backlog_s: float = 0.0
    """Until it is expected to be through with its prefills."""
    other_requests: float = 0.0
    """On it, but not through this filter, when it last reported."""
    running: float | None = None
    """Requests in the engine's batches, as it last reported."""
    waiting: float | None = None
    """Requests that wait in the engine, as it last reported."""
    kv_usage: float | None = None
    """Share of its KV cache in use, 0 to 1."""
    kv_tokens: int | None = None
    """Size of its KV cache."""
    itl_s: float | None = None
    """Mean time between tokens, between its last two reports."""
    report_age_s: float | None = None
    """Time since its last report; null: there was none."""
    handoffs: int = 0
    """Given or taken in the last `window_s`."""


class PairNow(msgspec.Struct, gc=False):
    """Handoffs between two workers, in the last `window_s`."""

    prefill: str
    """Address of the worker that gave them."""
    decode: str
    """Address of the worker that took them."""
    count: int
    """How many."""


class QueueNow(msgspec.Struct, kw_only=True):
    """Prompts that wait for a prefill worker."""

    requests: int = 0
    """How many."""
    work_s: float = 0.0
    """Prefill seconds that they will need, all together."""
    longest_wait_s: float = 0.0
    """Of the one that came first."""


class RatesNow(msgspec.Struct, kw_only=True):
    """Events a second, over the last `window_s`."""

    requests_per_s: float = 0.0
    """That came, of every kind."""
    handoffs_per_s: float = 0.0
    """Given to a decode worker."""
    whole_per_s: float = 0.0
    """Prompts that one worker serves alone."""
    refused_per_s: float = 0.0
    """Answered 429."""
    errors_per_s: float = 0.0
    """Answered 500 or more."""


class Quantiles(msgspec.Struct, kw_only=True):
    """Of a time in seconds. null: the source does not know it."""

    source: str
    """`envoy access log` and `stream watch`: as clients saw it. `engines`: as the workers report it."""
    p50_s: float | None = None
    """Half of them took no longer."""
    p90_s: float | None = None
    """Nine of ten took no longer."""
    p99_s: float | None = None
    """All but one in a hundred took no longer."""
    mean_s: float | None = None
    """Mean, where that is all that is known."""
    samples: int | None = None
    """How many there were."""


class TimesOf(msgspec.Struct, kw_only=True):
    """The same, of the answers of one model under one policy in one mode."""

    model: str
    """As the workers list it, or `other`."""
    policy: str
    """Its name."""
    mode: str
    """`disaggregate` or `aggregate`."""
    answers: int
    """How many ended."""
    ttft: Quantiles | None = None
    """Time to the first token."""
    itl: Quantiles | None = None
    """Time between tokens."""


class TimesNow(msgspec.Struct, kw_only=True):
    """Time to the first token and between tokens, of the answers of the last `window_s`."""

    window_s: float | None = None
    """null: nobody tells how long answers took; what there is comes from the engines' last reports."""
    ttft: Quantiles | None = None
    """Time to the first token, of all of them. null: there was none."""
    itl: Quantiles | None = None
    """Time between tokens, of all of them."""
    by: list[TimesOf] = []
    """Those with the most answers first."""


class Target(msgspec.Struct, kw_only=True):
    """The SLO of a policy, in seconds."""

    policy: str
    """Its name."""
    ttft_s: float | None = None
    """To the first token."""
    itl_s: float | None = None
    """Between tokens."""


class History(msgspec.Struct, kw_only=True):
    """The last minutes, the oldest first; all lists are as long as each other. null: nothing was known."""

    step_s: float
    """From one point to the next."""
    ttft_p50_s: list[float | None] = []
    """Median of the time to the first token."""
    ttft_p99_s: list[float | None] = []
    """99th percentile of it."""
    itl_p50_s: list[float | None] = []
    """Median of the time between tokens; where only a mean is known, that."""
    itl_p99_s: list[float | None] = []
    """99th percentile of it."""
    requests_per_s: list[float] = []
    """Requests that came."""
    queue_requests: list[int] = []
    """Prompts in the queue."""


class CandidateNow(msgspec.Struct, kw_only=True, gc=False):
    """A choice that was weighed."""

    prefill: str | None
    """null: the decode worker does it all."""
    decode: str
    """Address of the decode worker."""
    cost: float
    """What the objective makes of the terms, mostly seconds; the least wins."""
    terms_ms: dict[str, float]
    """Milliseconds, those that are not 0: `queue_prefill`, `prefill`, `load`, `transfer`, `handshake`, `overhead`, `penalty`,
    `queue_decode`, `generation`, `stall`, `hold`."""
    cached_prefill_tokens: int
    """Of the prompt, expected in the cache of the prefill worker."""
    cached_decode_tokens: int
    """Of the prompt, expected in the cache of the decode worker."""
    why: str | None
    """Why it lost; null: it was chosen."""


class DecisionNow(msgspec.Struct, kw_only=True, gc=False):
    """One decision, the chosen candidate first."""

    at: float
    """Unix time."""
    request_id: str
    """The client's `x-request-id`, or Envoy's."""
    policy: str
    """Its name."""
    objective: str
    """What the policy minimises."""
    reason: str
    """Why it came out as it did; see [metrics](metrics.md#decisions)."""
    prefill: str | None
    """Address of the prefill worker; null: the decode worker does it all."""
    decode: str
    """Address of the decode worker."""
    prompt_tokens: int
    """Of the prompt, counted or estimated."""
    cached_tokens: int
    """Of the prompt, expected in the caches of the worker that computes it."""
    cached_by: str
    """Who says so: `events` of that worker, `ranks` (the same, as a mean over its engines), `placed` (it was sent there a
    moment ago), `cache_server`, or `predicted`."""
    prefill_rank: int | None
    """The engine that the prefill leg names, of a worker with several behind one address; null: none."""
    decode_rank: int | None
    """The same of the decode leg."""
    below_tokens: dict[str, int]
    """Of these, what it has to load, by tier: `cpu`, `disk`, `lmcache`."""
    queued_ms: float
    """Time in our queue."""
    ttft_ms: float
    """Expected time to the first token, from the dispatch on."""
    candidates: list[CandidateNow]
    """What was weighed, the cheapest of it."""


class SourceNow(msgspec.Struct, kw_only=True):
    """A source of workers."""

    kind: str
    """`static`, `file`, `dns` and the like."""
    name: str
    """Which one."""
    endpoints: int | None
    """Workers that it last named; null: it was never read."""
    error: str | None
    """Why it cannot be read now."""


class WarmUpNow(msgspec.Struct, kw_only=True):
    """Pairs that have made a handoff."""

    enabled: bool
    """As configured."""
    pairs: int = 0
    """Of live workers."""
    pairs_warm: int = 0
    """Of these, that have made one."""
    waiting_requests: int = 0
    """Prompts for which no pair is warm yet."""
    failing: list[str] = []
    """Pairs that do not work, and why."""


class FilterNow(msgspec.Struct, kw_only=True):
    """The filter itself."""

    ready: bool
    """As `/healthz` says."""
    why: str | None
    """Why it is not ready."""
    draining: bool
    """It was told to stop."""
    version: str
    """Of Baton."""
    uptime_s: float
    """Since it started."""
    warm_up: WarmUpNow
    discovery: list[SourceNow]
    cache_servers: dict[str, str]
    """Address -> `ok`, or what is wrong."""
    listens_on: str
    """Where Envoy takes requests, as configured."""


class Live(msgspec.Struct, kw_only=True):
    """All of it."""

    version: int = VERSION
    """Of this format: grows when a field changes its meaning or goes."""
    at: float
    """Unix time at which this was made. It is made at most twice a second."""
    window_s: float
    """What rates and handoffs are counted over."""
    filter: FilterNow
    workers: list[WorkerNow]
    """At most 1000."""
    workers_left_out: int
    """How many more there are."""
    pairs: list[PairNow]
    """At most 500, those with the most handoffs first."""
    pairs_left_out: int
    """How many more had handoffs."""
    queue: QueueNow
    rates: RatesNow
    times: TimesNow
    targets: list[Target]
    history: History
    decisions: list[DecisionNow]
    """At most 20, the newest first."""
