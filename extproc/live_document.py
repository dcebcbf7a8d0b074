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
    labels: dict[str, str] = {}
    """At most eight."""
    models: list[str] = []
    """At most four."""
    prefill_requests: int = 0
    """In flight through this filter. So are the next three."""
    decode_requests: int = 0
    prefill_tokens: int = 0
    """To be computed."""
    decode_tokens: int = 0
    """Of prompts and answers, in its KV cache."""
    backlog_s: float = 0.0
    """Until it is expected to be through with its prefills."""
    other_requests: float = 0.0
    """On it, but not through this filter, when it last reported."""
    running: float | None = None
    """Requests in the engine's batches. As the engine reported it; so are the next four."""
    waiting: float | None = None
    """Requests that wait in the engine."""
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
    decode: str
    count: int


class QueueNow(msgspec.Struct, kw_only=True):
    """Prompts that wait for a prefill worker."""

    requests: int = 0
    work_s: float = 0.0
    """Prefill seconds that they will need, all together."""
    longest_wait_s: float = 0.0
    """Of the one that came first."""


class RatesNow(msgspec.Struct, kw_only=True):
    """Events a second, over the last `window_s`."""

    requests_per_s: float = 0.0
    handoffs_per_s: float = 0.0
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
    p90_s: float | None = None
    p99_s: float | None = None
    mean_s: float | None = None
    samples: int | None = None


class TimesOf(msgspec.Struct, kw_only=True):
    """The same, of the answers of one model under one policy in one mode."""

    model: str
    policy: str
    mode: str
    answers: int
    ttft: Quantiles | None = None
    itl: Quantiles | None = None


class TimesNow(msgspec.Struct, kw_only=True):
    """Time to the first token and between tokens, of the answers of the last `window_s`."""

    window_s: float | None = None
    """null: nobody tells how long answers took; what there is comes from the engines' last reports."""
    ttft: Quantiles | None = None
    """Of all of them. null: there was none."""
    itl: Quantiles | None = None
    by: list[TimesOf] = []
    """Those with the most answers first."""


class Target(msgspec.Struct, kw_only=True):
    """The SLO of a policy, in seconds."""

    policy: str
    ttft_s: float | None = None
    itl_s: float | None = None


class History(msgspec.Struct, kw_only=True):
    """The last minutes, the oldest first; all lists are as long as each other. null: nothing was known."""

    step_s: float
    """From one point to the next."""
    ttft_p50_s: list[float | None] = []
    ttft_p99_s: list[float | None] = []
    itl_p50_s: list[float | None] = []
    """Where only a mean is known, that."""
    itl_p99_s: list[float | None] = []
    requests_per_s: list[float] = []
    queue_requests: list[int] = []


class CandidateNow(msgspec.Struct, kw_only=True, gc=False):
    """A choice that was weighed."""

    prefill: str | None
    """null: the decode worker does it all."""
    decode: str
    cost: float
    """What the objective makes of the terms, mostly seconds; the least wins."""
    terms_ms: dict[str, float]
    """Milliseconds, those that are not 0: `queue_prefill`, `prefill`, `transfer`, `handshake`, `overhead`, `penalty`,
    `queue_decode`, `generation`, `stall`, `hold`."""
    cached_prefill_tokens: int
    cached_decode_tokens: int
    why: str | None
    """Why it lost; null: it was chosen."""


class DecisionNow(msgspec.Struct, kw_only=True, gc=False):
    """One decision, the chosen candidate first."""

    at: float
    """Unix time."""
    request_id: str
    policy: str
    objective: str
    reason: str
    prefill: str | None
    decode: str
    prompt_tokens: int
    cached_tokens: int
    """Of the prompt, expected in the cache of the worker that computes it."""
    queued_ms: float
    ttft_ms: float
    """Expected, from the dispatch on."""
    candidates: list[CandidateNow]


class SourceNow(msgspec.Struct, kw_only=True):
    """A source of workers."""

    kind: str
    name: str
    endpoints: int | None
    """null: it was never read."""
    error: str | None


class WarmUpNow(msgspec.Struct, kw_only=True):
    """Pairs that have made a handoff."""

    enabled: bool
    pairs: int = 0
    pairs_warm: int = 0
    waiting_requests: int = 0
    failing: list[str] = []
    """Pairs that do not work, and why."""


class FilterNow(msgspec.Struct, kw_only=True):
    """The filter itself."""

    ready: bool
    why: str | None
    """Why it is not ready."""
    draining: bool
    version: str
    uptime_s: float
    warm_up: WarmUpNow
    discovery: list[SourceNow]
    cache_servers: dict[str, str]
    """Address -> `ok`, or what is wrong."""
    listens_on: str
    """Where Envoy takes requests, as configured."""


class Live(msgspec.Struct, kw_only=True):
    """All of it."""

    version: int = VERSION
    at: float
    """Unix time at which this was made. It is made at most twice a second."""
    window_s: float
    """What rates and handoffs are counted over."""
    filter: FilterNow
    workers: list[WorkerNow]
    workers_left_out: int
    pairs: list[PairNow]
    """Those with the most handoffs first."""
    pairs_left_out: int
    queue: QueueNow
    rates: RatesNow
    times: TimesNow
    targets: list[Target]
    history: History
    decisions: list[DecisionNow]
    """The newest first."""
