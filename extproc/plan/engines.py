"""An engine of a given model on given GPUs: the profile that the twin computes with, and what its cache holds.

Everything that `baton plan` says about speed goes through :class:`workers.sim.timing.Profile`, so that its parts cannot
disagree. Efficiencies are assumptions, typical of what serving engines reach: 45 % of the dense peak in prefill, 60 % of the
memory's bandwidth in decode; 2 ms a step for launching and scheduling. What the GPUs of a worker tell each other is in them, or
a share of its own (``tp_efficiency``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from extproc.plan.errors import PlanError
from extproc.plan.gpus import Gpu
from extproc.plan.links import LINKS, Link
from extproc.plan.parameters import attention_width
from extproc.plan.shapes import Shape
from workers.sim.timing import Profile

PREFILL_EFFICIENCY = 0.45
DECODE_EFFICIENCY = 0.60
STEP_OVERHEAD_S = 0.002
SMALL_STEP_TOKENS = 128
"""A step of n prompt tokens takes as long as one of so many more at full efficiency. Agrawal et al. (Sarathi-Serve, OSDI 2024)
measured at most 25 % more for chunks of 512 tokens, and next to nothing for 2,048, on A100; this gives 25 % and 6 %."""
MEMORY_UTILIZATION = 0.9
TP_EFFICIENCY = 0.87
"""Of prefill and decode, what is left each time that the GPUs of a worker double: what makes the arithmetic agree with the
throughputs that NVIDIA publishes at 1, 2 and 8 GPUs a worker (``bench/plan_check``). Llama 3.3 70B on vLLM, prompts of 2,048
tokens, eight H100: two workers of four do 1.18 times (BF16) and 1.27 times (FP8) what one of eight does (ISC 2026, poster "FP8
Makes Prefill Collective-Bound"), which is 0.85 and 0.79."""
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
    tp_efficiency: float = 1.0,
    step_tokens: int | None = None,
    link: Link = LINKS["ib-400"],
    context_tokens: int | None = None,
) -> Engine:
    """An engine of ``tensor_parallel`` GPUs, its peers behind ``link``.

    ``weight_dtype``: auto is what the weights come in. ``tp_efficiency`` is what is left of both efficiencies each time that
    the GPUs double. ``step_tokens`` (vLLM's --max-num-batched-tokens): steps are no larger, and small ones are less efficient
    (``SMALL_STEP_TOKENS``); None: large ones.

    ``context_tokens`` is the typical length of a prompt. It matters only to models that see a window: their KV of a token and
    their attention's work are means over such a prompt, and other lengths are predicted less well. None: shorter than every
    window. Raises PlanError for bad input, and where the model does not fit.
    """
    _check(prefill_efficiency, decode_efficiency, tp_efficiency, step_overhead_s, memory_utilization)
    copies = shape.kv_copies(tensor_parallel)
    kv_bytes = shape.kv_bytes_per_token(kv_dtype, context_tokens)
    if not kv_bytes:
        raise PlanError(f"{shape.name}: no layer has a KV cache, so that there is nothing to hand over")
    dtype = shape.weight_dtype(weight_dtype)
    weight_bytes = shape.weight_bytes(dtype)
    usable_bytes = tensor_parallel * gpu.memory_bytes * (memory_utilization - OTHER_SHARE)
    kv_tokens = int((usable_bytes - weight_bytes) / (kv_bytes * copies))
    if kv_tokens < 1:
        raise PlanError(
            f"{shape.name} in {dtype}: {weight_bytes / 1e9:,.1f} GB of weights, and the usable "
            f"{memory_utilization - OTHER_SHARE:.0%} of {tensor_parallel} x {gpu.name} are {usable_bytes / 1e9:,.1f} GB; "
            "use more GPUs a worker or a smaller weight dtype"
        )
    if step_tokens is not None:
        if step_tokens < 1:
            raise PlanError(f"tokens of a step: at least 1, not {step_tokens}")
        prefill_efficiency *= step_tokens / (step_tokens + SMALL_STEP_TOKENS)
    kept = tensor_parallel * tp_efficiency ** math.log2(tensor_parallel)
    layers = max(1.0, shape.prefill_layers(context_tokens))
    profile = Profile(
        parameters=shape.active_parameters,
        weight_bytes=weight_bytes,
        expert_bytes=weight_bytes * shape.routed_parameters / shape.parameters,
        expert_share=shape.expert_share,
        layers=round(layers),
        hidden=round(attention_width(shape.config) * layers / round(layers)),
        kv_bytes_a_token=round(kv_bytes),
        kv_copies=copies,
        flops_a_s=kept * gpu.flops_a_s(dtype) * prefill_efficiency,
        memory_bytes_a_s=kept * gpu.memory_bytes_a_s * decode_efficiency,
        step_overhead_s=step_overhead_s,
        transfer_bytes_a_s=link.worker_bytes_a_s(tensor_parallel),
        transfer_overhead_s=link.overhead_s,
        attention_apart=True,
    )
    return Engine(profile, kv_tokens, tensor_parallel)


def fewest_gpus(shape: Shape, gpu: Gpu, *, weight_dtype: str, kv_dtype: str, hold_tokens: int = 1) -> int:
    """The fewest GPUs, up to 16, of a worker whose KV cache holds ``hold_tokens``. Raises PlanError if none does."""
    fault = PlanError(f"{shape.name}: no number of GPUs up to 16 shares out its heads")
    for gpus in (1, 2, 4, 8, 16):
        try:
            found = engine(shape, gpu, tensor_parallel=gpus, weight_dtype=weight_dtype, kv_dtype=kv_dtype)
        except PlanError as error:
            fault = error
            continue
        if found.kv_tokens >= hold_tokens:
            return gpus
        fault = PlanError(f"{shape.name}: {gpus} x {gpu.name} hold {found.kv_tokens:,} tokens of KV, and not {hold_tokens:,}")
    raise fault


def _check(prefill: float, decode: float, tp: float, step_overhead_s: float, memory_utilization: float) -> None:
    for name, share in (("prefill", prefill), ("decode", decode), ("tp", tp)):
        if not 0 < share <= 1:
            raise PlanError(f"{name} efficiency: above 0 and at most 1, not {share:g}")
    if not 0 <= step_overhead_s < 1:
        raise PlanError(f"step overhead: from 0 to 1 s, not {step_overhead_s:g} s")
    if not OTHER_SHARE < memory_utilization <= 1:
        raise PlanError(f"memory utilization: above {OTHER_SHARE:g} and at most 1, not {memory_utilization:g}")
