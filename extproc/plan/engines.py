"""An engine of a given model on given GPUs: the profile that the twin computes with, and what its cache holds.

Efficiencies are assumptions, typical of what serving engines reach: 45 % of the dense peak in prefill, 60 % of the memory's
bandwidth in decode, communication between the GPUs of a worker included; 2 ms a step for launching and scheduling.
"""

from __future__ import annotations

from dataclasses import dataclass

from extproc.plan.errors import PlanError
from extproc.plan.gpus import Gpu
from extproc.plan.links import LINKS, Link
from extproc.plan.shapes import Shape
from workers.sim.timing import Profile

PREFILL_EFFICIENCY = 0.45
DECODE_EFFICIENCY = 0.60
STEP_OVERHEAD_S = 0.002
MEMORY_UTILIZATION = 0.9
OTHER_SHARE = 0.05
"""Of each GPU's memory, for activations, CUDA graphs and communication. An assumption; vLLM measures it at its start."""


@dataclass(frozen=True)
class Engine:
    """One worker."""

    profile: Profile
    kv_tokens: int
    """That its KV cache holds."""
    gpus: int


def engine(
    shape: Shape,
    gpu: Gpu,
    *,
    tensor_parallel: int,
    weight_dtype: str,
    kv_dtype: str,
    prefill_efficiency: float = PREFILL_EFFICIENCY,
    decode_efficiency: float = DECODE_EFFICIENCY,
    step_overhead_s: float = STEP_OVERHEAD_S,
    memory_utilization: float = MEMORY_UTILIZATION,
    link: Link = LINKS["ib-400"],
    context_tokens: int | None = None,
) -> Engine:
    """An engine of ``tensor_parallel`` GPUs.

    ``context_tokens``: typical length of a prompt, which matters to models that see a window only (None: shorter than it).
    Raises PlanError where the model does not fit.
    """
    weight_bytes = shape.weight_bytes(weight_dtype)
    kv_bytes = shape.kv_bytes_per_token(kv_dtype, context_tokens)
    free_bytes = tensor_parallel * gpu.memory_bytes * (memory_utilization - OTHER_SHARE) - weight_bytes
    if free_bytes <= 0:
        raise PlanError(f"{shape.name} in {weight_dtype} does not fit into {tensor_parallel} x {gpu.name}")
    profile = Profile(
        parameters=shape.active_parameters,
        weight_bytes=weight_bytes,
        layers=shape.layers,
        hidden=shape.hidden,
        kv_bytes_a_token=round(kv_bytes),
        flops_a_s=tensor_parallel * gpu.flops_a_s(weight_dtype) * prefill_efficiency,
        memory_bytes_a_s=tensor_parallel * gpu.memory_bytes_a_s * decode_efficiency,
        step_overhead_s=step_overhead_s,
        transfer_bytes_a_s=link.worker_bytes_a_s(tensor_parallel),
        transfer_overhead_s=link.overhead_s,
    )
    return Engine(profile, int(free_bytes / kv_bytes), tensor_parallel)
