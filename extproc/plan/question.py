"""What is asked of `baton plan ratio`, with every assumption that an answer rests on."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from extproc.plan import engines
from extproc.plan.engines import Engine
from extproc.plan.errors import PlanError
from extproc.plan.goodput_search import SHARE
from extproc.plan.gpus import Gpu
from extproc.plan.links import LINKS, Link
from extproc.plan.shapes import Shape
from extproc.plan.simulate import Slos
from extproc.plan.workload import AnyWorkload

TENSOR_PARALLEL = (1, 2, 4, 8)
"""Sizes that are tried: a worker stays within a node of eight GPUs."""


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """Of the engines and the cache tier. None of it is measured on the GPUs in question; give what you have measured."""

    prefill_efficiency: float = engines.PREFILL_EFFICIENCY
    """Of the dense peak FLOP/s, at TP 1."""
    decode_efficiency: float = engines.DECODE_EFFICIENCY
    """Of the memory bandwidth, at TP 1."""
    tp_efficiency: float = engines.TP_EFFICIENCY
    """What is left of both each time that TP doubles."""
    step_overhead_s: float = engines.STEP_OVERHEAD_S
    memory_utilization: float = engines.MEMORY_UTILIZATION
    max_num_seqs: int = 256
    step_tokens: int = 8192
    """Tokens of a step where prompts are prefilled apart from decodes, or where chunks are not tuned."""
    cache_gb_a_gpu: float = 128.0
    """Host memory for the shared cache: 1 TB of a node's 2 TB, eight GPUs."""
    cache_gb_a_s_a_gpu: float = 25.0
    """At which a GPU loads from it: PCIe 5.0 x16 at 40 %, since many small blocks are gathered."""

    def __post_init__(self) -> None:
        """Raises PlanError."""
        for name in ("tp_efficiency", "cache_gb_a_gpu", "cache_gb_a_s_a_gpu"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise PlanError(f"{name.replace('_', ' ')}: above 0, not {getattr(self, name):g}")
        if self.tp_efficiency > 1:
            raise PlanError(f"tp efficiency: at most 1, not {self.tp_efficiency:g}")
        if not 1 <= self.max_num_seqs <= self.step_tokens:
            raise PlanError(
                f"max num seqs: from 1 to the tokens of a step ({self.step_tokens}), not {self.max_num_seqs}: "
                "a step decodes every sequence"
            )


@dataclass(frozen=True, kw_only=True)
class Question:
    """Which arrangement of so many GPUs serves most of this workload within these limits?"""

    shape: Shape
    gpu: Gpu
    gpus: int
    workload: AnyWorkload
    slos: Slos
    link: Link = LINKS["ib-400"]
    tcp: Link = LINKS["tcp"]
    """What the row `tcp` takes in place of it."""
    weight_dtype: str = "auto"
    kv_dtype: str = "auto"
    share: float = SHARE
    """Of the requests, those that must be within both limits."""
    rate_per_s: float | None = None
    """At which times are reported; None: at the highest of each arrangement."""
    prefill_tp: tuple[int, ...] = TENSOR_PARALLEL
    decode_tp: tuple[int, ...] = TENSOR_PARALLEL
    usd_a_gpu_hour: float | None = None
    """None: the GPU's own."""
    enough: float = 0.10
    """A gain in goodput up to which it is not worth to disaggregate."""
    assume: Assumptions = field(default_factory=Assumptions)

    def __post_init__(self) -> None:
        """Raises PlanError with the value that makes no sense."""
        if self.gpus < 1:
            raise PlanError(f"GPUs: at least 1, not {self.gpus}")
        if self.gpus > 4096:
            raise PlanError(f"GPUs: at most 4096, not {self.gpus}; plan one part of a fleet, it scales")
        for name, value in (("TTFT SLO", self.slos.ttft_s), ("ITL SLO", self.slos.itl_s)):
            if not (math.isfinite(value) and value > 0):
                raise PlanError(f"{name}: above 0, not {value * 1e3:g} ms")
        if not 0 < self.share <= 1:
            raise PlanError(f"share of good requests: above 0 and up to 1, not {self.share:g}")
        if self.rate_per_s is not None and not (math.isfinite(self.rate_per_s) and self.rate_per_s > 0):
            raise PlanError(f"rate: more than 0 requests/s, not {self.rate_per_s:g}")
        if not 0 <= self.enough < 10:
            raise PlanError(f"gain that is not worth it: from 0 to 10, not {self.enough:g}")
        for name, sizes in (("prefill", self.prefill_tp), ("decode", self.decode_tp)):
            if not sizes or any(size < 1 for size in sizes):
                raise PlanError(f"TP of {name} workers: whole numbers of at least 1, not {sizes}")
        if self.price < 0 or not math.isfinite(self.price):
            raise PlanError(f"price of a GPU-hour: 0 or more US dollars, not {self.price:g}")

    @property
    def price(self) -> float:
        """US dollars a GPU-hour."""
        return self.gpu.price_usd_a_hour if self.usd_a_gpu_hour is None else self.usd_a_gpu_hour

    def engine(self, tensor_parallel: int, kv_dtype: str, context_tokens: int, step_tokens: int | None = None) -> Engine:
        """A worker of that many GPUs, for prompts that are typically so long.

        ``step_tokens``: its steps are of so many tokens at most, and small ones are less efficient; None: large ones.
        Raises PlanError where the model does not fit.
        """
        assume = self.assume
        return engines.engine(
            self.shape,
            self.gpu,
            tensor_parallel=tensor_parallel,
            weight_dtype=self.weight_dtype,
            kv_dtype=kv_dtype,
            prefill_efficiency=assume.prefill_efficiency,
            decode_efficiency=assume.decode_efficiency,
            tp_efficiency=assume.tp_efficiency,
            step_tokens=step_tokens,
            step_overhead_s=assume.step_overhead_s,
            memory_utilization=assume.memory_utilization,
            link=self.link,
            context_tokens=context_tokens,
        )
