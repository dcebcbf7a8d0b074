"""`baton replay`: policies against each other on one trace, as a table or JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec
from rich.table import Table

from extproc.config import Config
from extproc.policy import Policies
from extproc.replay import Dispatcher, Placed, Replayed, Setup, Watch, capacity, replay
from extproc.replay_index import Index, filters
from extproc.replay_peers import CacheAware, Turns
from extproc.routing.job import Aims, Late, Mode, Objective
from extproc.routing.settings import Routing
from workers import goodput, traces
from workers.goodput import Summary
from workers.traces import Request

_PATH = "/v1/chat/completions"
"""Where a request of a trace is taken to go."""

_Word = TypeVar("_Word", Objective, Mode, Late, Index)

_OURS = {
    "least-load": Aims(objective=Objective.LEAST_LOAD, mode=Mode.DISAGGREGATE, held=False),
    "prefix": Aims(objective=Objective.PREFIX, mode=Mode.DISAGGREGATE, held=False),
    "random": Aims(objective=Objective.RANDOM, mode=Mode.DISAGGREGATE, held=False),
}
"""What the filter can be set to beside what is asked for: sent at once, always handed over."""

POLICIES = ("baton", "round-robin", "cache-aware", *_OURS)


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """What to replay; :func:`run_replay` says what cannot be."""

    trace: Path
    requests: int | None = 2_000
    rate_per_s: float | None = None
    load: float = 0.9
    """Of the capacity; only without ``rate_per_s``."""
    setup: Setup = field(default_factory=Setup)
    aims: Callable[[Request], Aims] = lambda _: Aims(ttft_slo_s=goodput.TTFT_SLO_S, itl_slo_s=goodput.ITL_SLO_S)
    """What the policy `baton` makes of a request."""
    routing: Routing = field(default_factory=Routing)
    policies: Sequence[str] = POLICIES
    index: Index = Index.PREDICTED
    """How the filter's own policies know what the caches hold."""
    filters: int = 1
    """So many that know nothing of each other."""
    ttft_slo_s: float = goodput.TTFT_SLO_S
    itl_slo_s: float = goodput.ITL_SLO_S


@dataclass(frozen=True, kw_only=True)
class Line:
    """One policy's result."""

    policy: str
    summary: Summary
    load_spread: float
    whole: int
    """Requests that a decode worker did alone."""
    virtual_s: float
    wall_s: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All policies on the same requests."""

    requests: int
    capacity_per_s: float
    rate_per_s: float
    lines: list[Line]


def run_replay(options: ReplayOptions, *, progress: Callable[[str], None] = lambda _: None) -> Comparison:
    """Replay the trace once a policy. Raises ValueError for a trace or a policy that cannot be used, and OSError."""
    unknown = sorted(set(options.policies) - set(POLICIES))
    if unknown:
        raise ValueError(f"no policy {', '.join(unknown)}; there are {', '.join(POLICIES)}")
    requests = traces.load(options.trace, limit=options.requests)
    if len(requests) < 2:
        raise ValueError(f"{options.trace}: at least two requests are needed")
    limit_per_s = capacity(requests, options.setup)
    rate_per_s = options.rate_per_s if options.rate_per_s is not None else options.load * limit_per_s
    requests = traces.at_rate(requests, rate_per_s)
    lines = []
    for name in options.policies:
        progress(name)
        dispatcher, aims, watches = _policy(name, options)
        lines.append(_line(name, replay(requests, dispatcher, options.setup, aims, watches=watches), options))
    return Comparison(requests=len(requests), capacity_per_s=limit_per_s, rate_per_s=rate_per_s, lines=lines)


def routing_of(routing: Routing, setup: Setup) -> Routing:
    """Settings for the blocks and the model of the trace's workers."""
    return msgspec.structs.replace(
        routing,
        block_tokens=traces.BLOCK_TOKENS,
        kv_bytes_per_token=float(setup.profile.kv_bytes_a_token),
    )


def _policy(name: str, options: ReplayOptions) -> tuple[Dispatcher, Callable[[Request], Aims], Sequence[Watch]]:
    setup = options.setup
    if name == "round-robin":
        return Turns(setup.prefill_addresses, setup.decode_addresses), _no_aims, ()
    if name == "cache-aware":
        return CacheAware(setup.prefill_addresses, setup.decode_addresses), _no_aims, ()
    ours = _OURS.get(name)
    dispatcher, watches = filters(setup, routing_of(options.routing, setup), options.index, options.filters)
    return dispatcher, options.aims if ours is None else lambda _: ours, watches


def _no_aims(request: Request) -> Aims:
    del request
    return Aims()


def _line(name: str, replayed: Replayed, options: ReplayOptions) -> Line:
    return Line(
        policy=name,
        summary=goodput.summary(replayed.outcomes, ttft_slo_s=options.ttft_slo_s, itl_slo_s=options.itl_slo_s),
        load_spread=replayed.load_spread,
        whole=sum(isinstance(placed, Placed) and placed.prefill is None for placed in replayed.placed),
        virtual_s=replayed.virtual_s,
        wall_s=replayed.wall_s,
    )


def as_json(found: Comparison) -> bytes:
    """For programs; what is not a number is null."""
    return msgspec.json.encode(_plain(asdict(found)))


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def as_table(found: Comparison) -> Table:
    """For people."""
    table = Table(box=None, pad_edge=False, caption_justify="left")
    table.add_column("policy")
    for title in (
        "goodput",
        "good/s",
        "TTFT p50",
        "TTFT p99",
        "ITL p99",
        "hits",
        "spread",
        "whole",
        "refused",
        "longest wait",
        "replayed",
        "in",
    ):
        table.add_column(title, justify="right")
    for line in found.lines:
        numbers = line.summary
        table.add_row(
            line.policy,
            f"{numbers.goodput:.1%}",
            f"{numbers.goodput_per_s:.2f}",
            f"{numbers.ttft_p50_s:.2f} s",
            f"{numbers.ttft_p99_s:.1f} s",
            f"{numbers.itl_p99_s * 1e3:.1f} ms",
            f"{numbers.hit_ratio:.1%}",
            f"{line.load_spread:.2f}",
            str(line.whole),
            str(numbers.refused),
            f"{numbers.longest_wait_s:.1f} s",
            f"{line.virtual_s:.0f} s",
            f"{line.wall_s:.1f} s",
        )
    return table


def aims_of_config(config: Config) -> Callable[[Request], Aims]:
    """What the policies of a configuration make of a request of a trace, which has no headers and names no model."""
    policies = Policies(config.policies)
    return lambda request: policies.resolve({}, _PATH, None, request.input_tokens).aims


def aims_of(
    *, objective: str, mode: str, late: str, dispatch: str, ttft_slo_s: float, itl_slo_s: float, max_wait_s: float
) -> Aims:
    """The policy `baton` as the command line has it. Raises ValueError for a word that there is not."""
    if dispatch not in ("queue", "immediate"):
        raise ValueError(f"dispatch: queue or immediate, not {dispatch!r}")
    return Aims(
        policy="replay",
        objective=one_of(Objective, "objective", objective),
        mode=one_of(Mode, "mode", mode),
        late=one_of(Late, "late", late),
        held=dispatch == "queue",
        ttft_slo_s=ttft_slo_s,
        itl_slo_s=itl_slo_s,
        max_wait_s=max_wait_s,
    )


def one_of(kind: type[_Word], option: str, word: str) -> _Word:
    """The member that a word of the command line names. Raises ValueError with all there are."""
    try:
        return kind(word)
    except ValueError:
        raise ValueError(f"{option}: {', '.join(each.value for each in kind)}; not {word!r}") from None
