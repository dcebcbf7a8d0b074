"""What clients ask for: lengths, prefixes that requests share, and when they come. Requests in the form of a trace's.

Common random numbers: of one seed, the n-th request has the same lengths and the same prefix at every rate, and its arrival is
the same but for the scale of time. What two candidates differ by is then the candidates, not the luck of the draw.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from extproc.plan.errors import PlanError
from extproc.plan.lengths import Lengths
from workers import traces
from workers.traces import BLOCK_TOKENS, Request

_MOST_REQUESTS = 2_000_000
"""A run of more is a mistake in rate or duration."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Requests that come by themselves (Poisson), of stated lengths."""

    inputs: Lengths
    outputs: Lengths
    prefix_share: float = 0.0
    """Of a prompt's tokens, those at its beginning that all requests of its group share, in whole blocks of 512 tokens."""
    prefix_groups: int = 64
    """So many different prefixes (tenants, system prompts, documents), all asked for as often as each other."""

    def __post_init__(self) -> None:
        """Raises PlanError."""
        if not 0 <= self.prefix_share <= 1:
            raise PlanError(f"prefix share: from 0 to 1, not {self.prefix_share:g}")
        if self.prefix_groups < 1:
            raise PlanError(f"prefix groups: at least 1, not {self.prefix_groups}")

    @property
    def text(self) -> str:
        """In words."""
        shared = f", {self.prefix_share:.0%} of a prompt shared in {self.prefix_groups} groups" if self.prefix_share else ""
        return f"{self.inputs.text} tokens in, {self.outputs.text} out{shared}"

    def requests(self, rate_per_s: float, duration_s: float, seed: int) -> list[Request]:
        """Those that come within ``duration_s``. Raises PlanError for a rate or a duration that makes no sense."""
        _check(rate_per_s, duration_s)
        if rate_per_s * duration_s > _MOST_REQUESTS:
            raise PlanError(
                f"{rate_per_s:g} requests/s for {duration_s:g} s are {rate_per_s * duration_s:,.0f} requests; "
                f"at most {_MOST_REQUESTS:,} are simulated"
            )
        gaps = random.Random(f"{seed} gaps")  # noqa: S311 (not a secret, and so below)
        inputs = random.Random(f"{seed} inputs")  # noqa: S311
        outputs = random.Random(f"{seed} outputs")  # noqa: S311
        groups = random.Random(f"{seed} groups")  # noqa: S311
        fresh = self.prefix_groups << 20
        """Block ids below are those of the groups."""
        requests: list[Request] = []
        at_s = gaps.expovariate(1.0) / rate_per_s
        while at_s < duration_s:
            tokens = self.inputs.at(inputs.random())
            group = int(groups.random() * self.prefix_groups)
            shared = round(self.prefix_share * tokens) // BLOCK_TOKENS
            own = -(-tokens // BLOCK_TOKENS) - shared
            ids = (*range(group << 20, (group << 20) + shared), *range(fresh, fresh + own))
            fresh += own
            requests.append(Request(at_s, tokens, self.outputs.at(outputs.random()), ids))
            at_s += gaps.expovariate(1.0) / rate_per_s
        return requests

    @property
    def warm_requests(self) -> int:
        """So many must have come before what is shared is in caches: all groups but one in fifty."""
        return 4 * self.prefix_groups if self.prefix_share else 0

    @property
    def longest_tokens(self) -> int:
        """The longest prompt with the longest answer."""
        return self.inputs.longest + self.outputs.longest

    def typical(self, count: int) -> list[Request]:
        """``count`` requests whose lengths are evenly spread over the distributions: for arithmetic, not for a run.

        Inputs and outputs are independent, as in :meth:`requests`: the outputs come in another order (a stride that shares no
        divisor with the count).
        """
        stride = max(1, int(count * 0.618))
        while math.gcd(stride, count) != 1:
            stride += 1
        return [
            Request(
                float(number),
                self.inputs.at((number + 0.5) / count),
                self.outputs.at((number * stride % count + 0.5) / count),
                (),
            )
            for number in range(count)
        ]

    def shared_tokens(self, request: Request) -> int:
        """Of a request of :meth:`typical`, the prompt tokens that others have sent before, at best."""
        return round(self.prefix_share * request.input_tokens) // BLOCK_TOKENS * BLOCK_TOKENS

    def cut_to(self, duration_s: float, rate_per_s: float) -> float:
        """What of ``duration_s`` can be had: all of it."""
        del rate_per_s
        return duration_s


@dataclass(frozen=True, kw_only=True)
class TraceWorkload:
    """Requests of a trace file, its time scaled to the rate. A seed begins elsewhere in it and goes round once."""

    path: Path
    trace: tuple[Request, ...]

    @property
    def text(self) -> str:
        """In words."""
        return f"{len(self.trace):,} requests of {self.path.name}"

    def requests(self, rate_per_s: float, duration_s: float, seed: int) -> list[Request]:
        """Those of the trace that come within ``duration_s``, each at most once. Raises PlanError."""
        count = len(self.trace)
        _check(rate_per_s, duration_s)
        if rate_per_s * duration_s > _MOST_REQUESTS:
            # Where even all of them at once are served in time, no search for the highest rate would end.
            raise PlanError(
                f"{self.path}: at {rate_per_s:.3g} requests/s its {count:,} requests come within {count / rate_per_s:.2g} s, "
                f"and {duration_s:.0f} s are to be simulated: a longer trace is needed"
            )
        first = int(random.Random(f"{seed} trace").random() * count) if seed else 0  # noqa: S311 (not a secret)
        try:
            scaled = traces.at_rate(self.trace, rate_per_s)
        except ValueError as error:
            raise PlanError(f"{self.path}: {error}") from None
        span_s = scaled[-1].at_s - scaled[0].at_s + 1 / rate_per_s
        turned = [*scaled[first:], *(replace(each, at_s=each.at_s + span_s) for each in scaled[:first])]
        begin_s = turned[0].at_s
        return [replace(each, at_s=each.at_s - begin_s) for each in turned if each.at_s - begin_s < duration_s]

    @property
    def warm_requests(self) -> int:
        """None: what is shared in a trace comes and goes."""
        return 0

    @property
    def longest_tokens(self) -> int:
        """The longest request, with its answer."""
        return max(each.input_tokens + each.output_tokens for each in self.trace)

    def typical(self, count: int) -> list[Request]:
        """``count`` requests, evenly spread over the trace; all of it where it has fewer."""
        total = len(self.trace)
        return [self.trace[number * total // count] for number in range(count)] if total > count else list(self.trace)

    def shared_tokens(self, request: Request) -> int:
        """Of a request of the trace, the prompt tokens whose blocks come at least twice in it: what a cache could have."""
        shared = 0
        for block in request.hash_ids:
            if self._block_times[block] < 2:
                break
            shared += BLOCK_TOKENS
        return min(shared, request.input_tokens // BLOCK_TOKENS * BLOCK_TOKENS)

    def cut_to(self, duration_s: float, rate_per_s: float) -> float:
        """What of ``duration_s`` can be had at that rate, each request used once."""
        return min(duration_s, len(self.trace) / rate_per_s)

    @cached_property
    def _block_times(self) -> Counter[int]:
        return Counter(block for request in self.trace for block in request.hash_ids)


AnyWorkload = Workload | TraceWorkload


def of_trace(path: Path, *, limit: int | None = None) -> TraceWorkload:
    """A trace file as :func:`workers.traces.load` reads them. Raises PlanError with the file and the line."""
    try:
        trace = traces.load(path, limit=limit)
    except OSError as error:
        raise PlanError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:
        raise PlanError(str(error)) from None
    if len(trace) < 2:
        raise PlanError(f"{path}: at least two requests are needed, there are {len(trace)}")
    return TraceWorkload(path=path, trace=tuple(trace))


def _check(rate_per_s: float, duration_s: float) -> None:
    if not (math.isfinite(rate_per_s) and rate_per_s > 0):
        raise PlanError(f"rate: more than 0 requests/s, not {rate_per_s:g}")
    if not (math.isfinite(duration_s) and duration_s > 0):
        raise PlanError(f"duration: more than 0 s, not {duration_s:g}")
