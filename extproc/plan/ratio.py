"""The best arrangement of each kind, by simulation of the few that arithmetic leaves, and how they compare.

1. Arithmetic (:mod:`extproc.plan.candidates`) bounds every split at every TP, and drops what cannot meet the SLOs on idle
   workers.
2. The best split of each pair of TP sizes is simulated with one seed, then splits or chunks beside the best, as long as
   that helps. One whose bound is below what another was seen to do is not simulated.
3. The best few are simulated with all seeds, each search beginning where the first one ended. All kinds see the same requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from extproc.plan import confidence
from extproc.plan.candidates import Candidate, Candidates, Kind, candidates
from extproc.plan.confidence import Interval
from extproc.plan.cost import usd_per_million_tokens
from extproc.plan.demand import Demand, Part, demand_of
from extproc.plan.errors import PlanError
from extproc.plan.goodput_search import Stretch
from extproc.plan.question import Question
from extproc.plan.runs import Look, Runner, Search, Seen, look, search

_CLOSE = 0.93
"""Of the best in the first round, what gets into the second."""
_FULL = 0.7
"""A part that is used less than that at the highest rate is not what ends it."""
_ABOVE = 1.02
"""Of what a bound allows where only a share of the requests must be good: luck."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much is simulated."""

    seeds: int = 5
    requests: int = 400
    """Counted in each run, at the rate that is to be expected of the best."""
    counted_s: float = 30.0
    """Counted in each run at least, after half as much of warm-up at least."""
    keep: int = 4
    """Pairs of TP sizes that are simulated, of a kind."""
    finalists: int = 3
    """Candidates of a kind that all seeds are simulated of."""
    all_splits: bool = False
    """Every split of the best pair of TP sizes is simulated with one seed, though it cannot be the best."""
    screen_resolution: float = 0.05
    resolution: float = 0.02

    def __post_init__(self) -> None:
        """Raises PlanError."""
        if not 2 <= self.seeds <= 1_000:
            raise PlanError(f"seeds: from 2 (one says nothing of the spread) to 1000, not {self.seeds}")
        if not self.counted_s > 0:
            raise PlanError(f"seconds that are counted: more than 0, not {self.counted_s:g}")
        if self.requests < 20 or self.keep < 1 or self.finalists < 1:
            raise PlanError(f"at least 20 requests, not {self.requests}, and 1 candidate of each kind")


QUICK = Effort(seeds=3, requests=100, keep=2, finalists=2, screen_resolution=0.1, resolution=0.04)


@dataclass(frozen=True, kw_only=True)
class Finalist:
    """A candidate with all seeds."""

    candidate: Candidate
    rates_per_s: tuple[float, ...]
    """The highest good rate, seed by seed."""
    rate_per_s: Interval


@dataclass(frozen=True, kw_only=True)
class Best:
    """The best of a kind."""

    kind: Kind
    finalist: Finalist | None
    """None: no candidate can do; ``why_none`` says why."""
    why_none: str = ""
    able: tuple[Candidate, ...] = ()
    """All that arithmetic left."""
    tied: tuple[Candidate, ...] = ()
    """Others that cannot be told apart from it."""
    screened: tuple[tuple[Candidate, float], ...] = ()
    """All that were simulated with one seed, and the rate of each."""
    seen: tuple[Seen, ...] = ()
    """At the rate that was asked for, or at its own highest, seed by seed."""
    usd_per_million: Interval | None = None
    bottleneck: Part | None = None
    """The part that is full first; None: none is nearly full when the SLO is missed, requests come in bursts."""
    used: float = math.nan
    """How full it is at the highest rate, by arithmetic, 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """All kinds on the same requests."""

    question: Question
    effort: Effort
    stretch: Stretch
    demand: Demand
    best: tuple[Best, ...]
    considered: int
    """Candidates that arithmetic looked at."""
    simulations: int

    def of(self, kind: Kind) -> Best | None:
        """The best of a kind; None: it was not asked for."""
        return next((each for each in self.best if each.kind is kind), None)

    def lasts(self, finalist: Finalist) -> bool:
        """Whether its rate is within its bound; one beyond it is that of a simulation that was too short to settle."""
        return finalist.rate_per_s.mean <= _ABOVE * finalist.candidate.hard_bound_per_s / self.question.share

    def had_s(self, finalist: Finalist) -> float:
        """How much of the simulated time requests came in at its rate: less than all of it where a trace ended."""
        rate_per_s, duration_s = finalist.rate_per_s.mean, self.stretch.duration_s
        return self.question.workload.cut_to(duration_s, rate_per_s) if rate_per_s else duration_s


def study(
    question: Question,
    *,
    kinds: Sequence[Kind] = tuple(Kind),
    effort: Effort = Effort(),
    runner: Runner,
    progress: Callable[[str], None] = lambda _: None,
) -> Answer:
    """Answer it. Raises PlanError where no arrangement can do: with what fails first, and by how much."""
    demand = demand_of(question.workload)
    found = [candidates(question, demand, kind) for kind in Kind if kind in kinds]
    if not any(each.able for each in found):
        raise PlanError("no arrangement can do:" + "".join(f"\n  {each.kind.value}: {each.why_none}" for each in found))
    stretch = stretch_of(question, demand, found, effort)
    studied = _Study(question, stretch, effort, runner, progress)
    best = tuple(studied.best_of(each) for each in found)
    return Answer(
        question=question,
        effort=effort,
        stretch=stretch,
        demand=demand,
        best=best,
        considered=sum(len(each.able) for each in found),
        simulations=studied.simulations,
    )


def stretch_of(question: Question, demand: Demand, found: Sequence[Candidates], effort: Effort) -> Stretch:
    """How long to simulate: until caches are warm, the slowest answer that is allowed is over, and enough requests came."""
    answer_s = min(600.0, demand.answer_tokens * question.slos.itl_s) + question.slos.ttft_s
    rate_per_s = question.rate_per_s or max(each.able[0].expected_per_s for each in found if each.able)
    return Stretch(
        warm_up_s=max(effort.counted_s / 2, answer_s, question.workload.warm_requests / rate_per_s),
        counted_s=max(effort.counted_s, effort.requests / rate_per_s),
        cool_down_s=max(effort.counted_s / 6, answer_s / 2),
    )


class _Study:
    def __init__(
        self, question: Question, stretch: Stretch, effort: Effort, runner: Runner, progress: Callable[[str], None]
    ) -> None:
        self._question = question
        self._stretch = stretch
        self._effort = effort
        self._runner = runner
        self._progress = progress
        self.simulations = 0

    def best_of(self, found: Candidates) -> Best:
        """The best of a kind."""
        if not found.able:
            self._progress(f"{found.kind.value}: none can do")
            return Best(kind=found.kind, finalist=None, why_none=found.why_none)
        screened = self._screen(found)
        finalists = self._finalists(screened)
        finalists.sort(key=lambda each: -each.rate_per_s.mean)
        first = finalists[0]
        # Each comparison has its part of the error that all of them together may make.
        level = 1 - (1 - confidence.LEVEL) / max(1, len(finalists) - 1)
        tied = tuple(
            each.candidate
            for each in finalists[1:]
            if not confidence.told_apart(
                confidence.ratio(first.rates_per_s, each.rates_per_s, level=level, resolution=self._effort.resolution)
            )
        )
        seen = self._look(first)
        part, used = _bottleneck(first)
        return Best(
            kind=found.kind,
            finalist=first,
            able=found.able,
            tied=tied,
            screened=tuple(screened.items()),
            seen=tuple(seen),
            usd_per_million=self._cost(first, seen),
            bottleneck=part,
            used=used,
        )

    def _screen(self, found: Candidates) -> dict[Candidate, float]:
        """One seed of the best of each family, then of the splits, or the chunks, beside the best."""
        starts: dict[tuple[tuple[int, int], bool], Candidate] = {}
        for each in found.able:
            # Where a chunk is longer than the ITL SLO allows, arithmetic guesses; one that is not is tried besides.
            starts.setdefault((each.family, Part.STALLS in each.limits), each)
        families = list(dict.fromkeys(family for family, _ in starts))[: self._effort.keep if found.kind.apart else None]
        rates: dict[Candidate, float] = {}
        self._try([each for (family, _), each in starts.items() if family in families], rates)
        self._climb(found, rates)
        return rates

    def _climb(self, found: Candidates, rates: dict[Candidate, float]) -> None:
        top = max(rates, key=lambda each: rates[each])
        family = sorted((each for each in found.able if each.family == top.family), key=lambda each: each.place)
        if self._effort.all_splits:
            self._try(family, rates, whatever=True)
        at, step = family.index(top), max(1, len(family) // 8)
        while step:
            beside = [family[place] for place in (at - step, at + step) if 0 <= place < len(family)]
            self._try(beside, rates)
            better = max(beside, key=lambda each: rates.get(each, 0.0), default=family[at])
            if rates.get(better, 0.0) > rates[family[at]]:
                at = family.index(better)
            else:
                step //= 2

    def _try(self, those: Sequence[Candidate], rates: dict[Candidate, float], *, whatever: bool = False) -> None:
        """Simulate them with one seed, but for those that were, or cannot be the best."""
        best_per_s = max(rates.values(), default=0.0)
        share = self._question.share
        new = [each for each in those if each not in rates and (whatever or each.hard_bound_per_s / share >= best_per_s)]
        done = iter(new)

        def one_done() -> None:
            candidate = next(done)
            self._progress(f"{candidate.kind.value}: {candidate.text} (one seed)")

        tasks = [self._search(each, 0, each.expected_per_s * 0.8, screen=True) for each in new]
        for candidate, found in zip(new, self._runner.all(search, tasks, one_done), strict=True):
            self.simulations += len(found.tried)
            rates[candidate] = found.rate_per_s

    def _finalists(self, screened: dict[Candidate, float]) -> list[Finalist]:
        ordered = sorted(screened, key=lambda each: (-screened[each], -each.expected_per_s))
        best_per_s = screened[ordered[0]]
        chosen = [each for each in ordered if screened[each] >= _CLOSE * best_per_s][: self._effort.finalists]
        if not best_per_s:
            chosen = ordered[:1]
        seeds = range(self._effort.seeds)
        tasks = [
            self._search(each, seed, screened[each] or each.expected_per_s * 0.1, screen=False)
            for each in chosen
            for seed in seeds
        ]
        done = 0

        def one_done() -> None:
            nonlocal done
            done += 1
            name = chosen[(done - 1) // len(seeds)]
            self._progress(f"{name.kind.value}: {name.text}: seed {(done - 1) % len(seeds) + 1} of {len(seeds)}")

        found = self._runner.all(search, tasks, one_done)
        self.simulations += sum(len(each.tried) for each in found)
        finalists = []
        for number, candidate in enumerate(chosen):
            rates = tuple(each.rate_per_s for each in found[number * len(seeds) : (number + 1) * len(seeds)])
            rate = confidence.interval(rates, resolution=self._effort.resolution)
            finalists.append(Finalist(candidate=candidate, rates_per_s=rates, rate_per_s=rate))
        return finalists

    def _search(self, candidate: Candidate, seed: int, guess_per_s: float, *, screen: bool) -> Search:
        return Search(
            question=self._question,
            candidate=candidate,
            stretch=self._stretch,
            seed=seed,
            guess_per_s=guess_per_s,
            resolution=self._effort.screen_resolution if screen else self._effort.resolution,
            step=1.4 if screen else 1.08,
        )

    def _look(self, finalist: Finalist) -> list[Seen]:
        asked = self._question.rate_per_s
        tasks = [
            Look(
                question=self._question,
                candidate=finalist.candidate,
                stretch=self._stretch,
                seed=seed,
                rate_per_s=asked or highest,
            )
            for seed, highest in enumerate(finalist.rates_per_s)
            if asked or highest
        ]
        self.simulations += len(tasks)
        return self._runner.all(look, tasks, lambda: None)

    def _cost(self, finalist: Finalist, seen: Sequence[Seen]) -> Interval | None:
        if not seen:
            return None
        costs = [
            usd_per_million_tokens(
                gpus=finalist.candidate.gpus,
                usd_a_gpu_hour=self._question.price,
                good_tokens_per_s=each.good_tokens_per_s,
            )
            for each in seen
        ]
        if not all(0 < cost < math.inf for cost in costs):
            return confidence.interval(costs)
        return confidence.ratio(costs, [1.0] * len(costs))


def _bottleneck(finalist: Finalist) -> tuple[Part | None, float]:
    limits = finalist.candidate.limits
    first = min(limits, key=lambda part: limits[part])
    used = finalist.rate_per_s.mean / limits[first]
    return (first if used >= _FULL else None), used
