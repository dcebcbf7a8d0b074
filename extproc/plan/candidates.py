"""Which arrangements there are of so many GPUs, what each can do by arithmetic, and which are worth a simulation.

Arithmetic knows no queue: what it gives is what a candidate could do if requests came evenly and batches were as large as their
limits let them be. It is good enough to drop most candidates, and to say why one cannot do at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from extproc.plan.arrangement import Arrangement, SharedCache
from extproc.plan.demand import Demand, Part, moved_bytes, prefill_s, rate_within_wait
from extproc.plan.engines import Engine
from extproc.plan.errors import PlanError
from extproc.plan.links import Link
from extproc.plan.question import Question

_CHUNKS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_STALLED_SHARE = 0.01
"""A 99th percentile bears so much."""


class Kind(Enum):
    """What is compared. The order is the one of answers."""

    COLOCATED = "colocated"
    """Every worker does both; a prompt takes a step of its own."""
    CHUNKED = "chunked prefill"
    """Every worker does both; chunks of prompts share steps with decodes."""
    TCP = "TCP transfer"
    NIXL = "NIXL"
    """Disaggregated, over the link that was asked for."""
    NIXL_CACHE_FP8 = "NIXL + LMCache + FP8"
    """The same with a cache in host memory that prefill workers share, and the KV cache in FP8."""

    @property
    def apart(self) -> bool:
        """Whether prefill has workers of its own."""
        return self not in (Kind.COLOCATED, Kind.CHUNKED)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One arrangement, and what it can do by arithmetic."""

    kind: Kind
    arrangement: Arrangement
    limits: Mapping[Part, float] = field(compare=False)
    """Requests a second at which a part is full."""
    gpus: int
    """Those that are paid for, idle ones included."""
    idle_ttft_s: float
    """On idle workers, for the prompt that the stated share of all do not exceed."""
    unhurried_per_s: float
    """At which the stated share of the requests would not wait too long, by an approximation."""

    @property
    def prefill_tp(self) -> int:
        """GPUs of a prefill worker, or of one that does both."""
        return self.arrangement.prefill_engine.gpus

    @property
    def decode_tp(self) -> int:
        """GPUs of a decode worker, or of one that does both."""
        return self.arrangement.decode_engine.gpus

    @property
    def bound_per_s(self) -> float:
        """The first limit."""
        return min(self.limits.values())

    @property
    def expected_per_s(self) -> float:
        """What is to be expected; candidates are tried in this order."""
        return min(self.bound_per_s, self.unhurried_per_s)

    @property
    def hard_bound_per_s(self) -> float:
        """No more than this is possible: without what depends on luck, or on how well two kinds of work share a step."""
        return min(limit for part, limit in self.limits.items() if part not in (Part.STALLS, Part.WORKERS))

    @property
    def text(self) -> str:
        """The split in words."""
        arrangement = self.arrangement
        if arrangement.colocated:
            chunk = f", chunks of {arrangement.chunk_tokens}" if arrangement.chunked else ""
            return f"{arrangement.decode} x TP{self.decode_tp}{chunk}"
        return f"{arrangement.prefill} x TP{self.prefill_tp} : {arrangement.decode} x TP{self.decode_tp}"

    @property
    def idle_gpus(self) -> int:
        """Paid for, and not used."""
        return self.gpus - self.arrangement.gpus

    @property
    def family(self) -> tuple[int, int]:
        """Candidates that differ by the split alone, or by the chunk, have the same."""
        return self.prefill_tp, self.decode_tp

    @property
    def place(self) -> tuple[int, int]:
        """Its order in its family."""
        return self.arrangement.prefill, self.arrangement.chunk_tokens


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Of one kind: those that can do at all, the most promising first, or why there are none."""

    kind: Kind
    able: tuple[Candidate, ...]
    why_none: str = ""


def candidates(question: Question, demand: Demand, kind: Kind) -> Candidates:
    """All of a kind. Raises PlanError where the model does not fit at any size."""
    kv_dtype = "fp8" if kind is Kind.NIXL_CACHE_FP8 else question.kv_dtype
    sizes = sorted({*question.prefill_tp, *question.decode_tp}) if kind.apart else sorted(set(question.decode_tp))
    fitting = fitting_engines(question, demand, sizes, kv_dtype)
    faults = _Faults(question)
    found = list(
        _apart(question, demand, kind, fitting, faults) if kind.apart else _together(question, demand, kind, fitting, faults)
    )
    found.sort(key=lambda each: (-each.expected_per_s, each.family, each.place))
    return Candidates(kind=kind, able=tuple(found), why_none="" if found else faults.nearest())


def fitting_engines(question: Question, demand: Demand, sizes: list[int], kv_dtype: str) -> dict[int, Engine]:
    """By TP, the workers that hold the model and the longest request. Raises PlanError with the reason where there is none."""
    engines: dict[int, Engine] = {}
    reasons: list[str] = []
    for size in sizes:
        if size > question.gpus:
            reasons.append(f"TP {size} is more than the {question.gpus} GPUs there are")
            continue
        try:
            engine = question.engine(size, kv_dtype, demand.prompt_tokens, question.assume.step_tokens)
        except PlanError as error:
            reasons.append(str(error))
            continue
        if engine.kv_tokens < demand.longest_tokens:
            reasons.append(
                f"TP {size}: a KV cache of {engine.kv_tokens:,} tokens does not hold the longest request of "
                f"{demand.longest_tokens:,} tokens"
            )
            continue
        engines[size] = engine
    if not engines:
        raise PlanError(f"{question.shape.name} fits no worker of {question.gpu.name}:\n  " + "\n  ".join(reasons))
    return engines


class _Faults:
    """Why candidates cannot do; the one that came nearest is told."""

    def __init__(self, question: Question) -> None:
        self._question = question
        self._ttft: tuple[float, str] | None = None
        self._itl: tuple[float, str] | None = None
        self.other = ""

    def too_slow(self, demand: Demand, first_s: float, prefill: float, transfer: float, engine: Engine) -> bool:
        """Whether the time to the first token on idle workers is over the SLO already."""
        slo_s = self._question.slos.ttft_s
        if first_s <= slo_s:
            return False
        if self._ttft is None or first_s < self._ttft[0]:
            prompt, uncached = demand.prompt_at(self._question.share)
            moved = f" and {transfer:.2f} s of transfer" if transfer else ""
            size = f"{prompt:,} tokens" + (f", {uncached:,} of them not cached" if uncached < prompt else "")
            self._ttft = (
                first_s,
                f"TTFT SLO {slo_s:g} s: the fastest idle worker (TP {engine.gpus}) needs {first_s:.2f} s for the prompt that "
                f"{self._question.share:.0%} do not exceed ({size}): "
                f"{prefill:.2f} s of prefill{moved}, and a decode step; that is {first_s - slo_s:.2f} s "
                f"({first_s / slo_s - 1:.0%}) too long",
            )
        return True

    def too_slow_a_token(self, demand: Demand, engine: Engine) -> bool:
        """Whether one sequence alone is decoded more slowly than the SLO."""
        slo_s, step_s = self._question.slos.itl_s, demand.decode_step_s(engine, 1)
        if step_s <= slo_s:
            return False
        if self._itl is None or step_s < self._itl[0]:
            self._itl = (
                step_s,
                f"ITL SLO {slo_s * 1e3:g} ms: the fastest worker (TP {engine.gpus}) takes {step_s * 1e3:.1f} ms a token for "
                f"one sequence alone, {(step_s - slo_s) * 1e3:.1f} ms ({step_s / slo_s - 1:.0%}) too long; it must read "
                f"{engine.profile.weight_bytes / 1e9:.1f} GB of weights a step",
            )
        return True

    def nearest(self) -> str:
        """In words."""
        return "; ".join(each[1] for each in (self._ttft, self._itl) if each is not None) or self.other


def _apart(
    question: Question, demand: Demand, kind: Kind, fitting: Mapping[int, Engine], faults: _Faults
) -> Iterator[Candidate]:
    link = question.tcp if kind is Kind.TCP else question.link
    prompt, uncached = demand.prompt_at(question.share)
    faults.other = f"{question.gpus} GPU{'s' * (question.gpus > 1)} cannot be both a prefill and a decode worker"
    for prefill_tp in (size for size in question.prefill_tp if size in fitting):
        prefill = fitting[prefill_tp]
        alone_s = prefill_s(prefill, prompt, uncached, question.assume.step_tokens)
        for decode_tp in (size for size in question.decode_tp if size in fitting):
            decode = fitting[decode_tp]
            if prefill_tp + decode_tp > question.gpus:
                continue
            moved_s = link.transfer_s(uncached * moved_bytes(decode), min(prefill_tp, decode_tp))
            first_s = alone_s + moved_s + demand.decode_step_s(decode, 1)
            if faults.too_slow(demand, first_s, alone_s, moved_s, prefill) or faults.too_slow_a_token(demand, decode):
                continue
            for workers in range(1, (question.gpus - decode_tp) // prefill_tp + 1):
                left = question.gpus - workers * prefill_tp
                if left % decode_tp >= prefill_tp:
                    continue  # one more prefill worker fits beside as many decode workers
                yield _split(question, demand, kind, (prefill, workers), (decode, left // decode_tp), link, first_s)


def _split(
    question: Question,
    demand: Demand,
    kind: Kind,
    prefills: tuple[Engine, int],
    decodes: tuple[Engine, int],
    link: Link,
    idle_ttft_s: float,
) -> Candidate:
    (prefill, workers), (decode, others) = prefills, decodes
    assume = question.assume
    limits = {
        Part.PREFILL: workers / demand.prefills_s(prefill, assume.step_tokens),
        **_decode_limits(question, demand, decode, others, assume.max_num_seqs),
        Part.LINK: min(workers / demand.transfers_s(prefill, link), others / demand.transfers_s(decode, link)),
    }
    arrangement = Arrangement(
        name=kind.value,
        prefill=workers,
        decode=others,
        prefill_engine=prefill,
        decode_engine=decode,
        link=link,
        chunk_tokens=assume.step_tokens,
        max_num_seqs=assume.max_num_seqs,
        shared_cache=_cache(question, prefill, workers) if kind is Kind.NIXL_CACHE_FP8 else None,
    )
    return Candidate(
        kind=kind,
        arrangement=arrangement,
        limits=limits,
        gpus=question.gpus,
        idle_ttft_s=idle_ttft_s,
        unhurried_per_s=_unhurried(question, workers, workers / limits[Part.PREFILL], idle_ttft_s),
    )


def _cache(question: Question, prefill: Engine, workers: int) -> SharedCache:
    """The host memory beside the prefill workers' GPUs."""
    size_bytes = question.assume.cache_gb_a_gpu * 1e9 * prefill.gpus * workers
    return SharedCache(
        name="LMCache",
        capacity_tokens=max(1, int(size_bytes / prefill.profile.kv_bytes_a_token)),
        bytes_a_s=question.assume.cache_gb_a_s_a_gpu * 1e9 * prefill.gpus,
    )


def _together(
    question: Question, demand: Demand, kind: Kind, fitting: Mapping[int, Engine], faults: _Faults
) -> Iterator[Candidate]:
    prompt, uncached = demand.prompt_at(question.share)
    for size, fits in fitting.items():
        workers = question.gpus // size
        if faults.too_slow_a_token(demand, fits):
            continue
        for step_tokens in _steps(question, demand, kind):
            engine = question.engine(size, question.kv_dtype, demand.prompt_tokens, step_tokens)
            alone_s = prefill_s(engine, prompt, uncached, step_tokens)
            if faults.too_slow(demand, alone_s, alone_s, 0.0, engine):
                continue
            arrangement = Arrangement(
                name=kind.value,
                prefill=0,
                decode=workers,
                prefill_engine=engine,
                decode_engine=engine,
                chunked=kind is Kind.CHUNKED,
                chunk_tokens=step_tokens,
                max_num_seqs=min(question.assume.max_num_seqs, step_tokens),
            )
            limits = _together_limits(question, demand, engine, workers, step_tokens)
            yield Candidate(
                kind=kind,
                arrangement=arrangement,
                limits=limits,
                gpus=question.gpus,
                idle_ttft_s=alone_s,
                unhurried_per_s=_unhurried(question, workers, workers / limits[Part.WORKERS], alone_s),
            )


def _unhurried(question: Question, workers: int, service_s: float, idle_ttft_s: float) -> float:
    return rate_within_wait(workers, service_s, question.slos.ttft_s - idle_ttft_s, max(0.001, 1 - question.share))


def _steps(question: Question, demand: Demand, kind: Kind) -> list[int]:
    """Tokens of a step that are worth a try."""
    if kind is Kind.COLOCATED:
        return [max(question.assume.max_num_seqs, demand.longest_tokens)]
    return sorted({*_CHUNKS, question.assume.step_tokens})


def _together_limits(question: Question, demand: Demand, engine: Engine, workers: int, step_tokens: int) -> dict[Part, float]:
    most = min(question.assume.max_num_seqs, step_tokens)
    limits = _decode_limits(question, demand, engine, workers, most)
    within = demand.batch_within(engine, question.slos.itl_s, most)
    batch = max(1, min(within, int(engine.kv_tokens / demand.held_tokens)))
    answer_s = demand.answer_tokens * demand.decode_step_s(engine, batch) / batch
    prefills_s = demand.prefills_s(engine, step_tokens)
    limits[Part.PREFILL] = workers / prefills_s
    limits[Part.WORKERS] = workers / (prefills_s + answer_s)
    if demand.decode_step_s(engine, batch // 4, min(step_tokens, int(demand.uncached_tokens))) > question.slos.itl_s:
        # Prefills that come evenly: each of their steps is one of so many that decode.
        step_s = demand.decode_step_s(engine, batch)
        limits[Part.STALLS] = workers * _STALLED_SHARE / (demand.prefills_steps(step_tokens) * step_s)
    return limits


def _decode_limits(question: Question, demand: Demand, engine: Engine, workers: int, most: int) -> dict[Part, float]:
    within = demand.batch_within(engine, question.slos.itl_s, 16 * most)
    return {
        Part.BANDWIDTH: workers * demand.decodes_per_s(engine, within),
        Part.KV: workers * demand.decodes_per_s(engine, max(1.0, engine.kv_tokens / demand.held_tokens)),
        Part.SEQS: workers * demand.decodes_per_s(engine, most),
    }
