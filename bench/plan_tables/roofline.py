"""What a published rate asks of 64 GPUs, by arithmetic alone: whether it can be, and what must be true for it to be.

Pure formulas. A prompt of n tokens takes 2 * parameters * n FLOP in the linear layers and 4 * layers * hidden * n^2 / 2 in
attention (:class:`workers.sim.timing.Profile`); each token of an answer reads the KV of all tokens before it.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.plan_tables import published
from bench.plan_tables.cluster import Constants
from bench.plan_tables.published import Published
from extproc.plan.gpus import gpu
from extproc.plan.shapes import shape_of
from workers.sim.timing import Profile


@dataclass(frozen=True)
class Demand:
    """What a rate asks for, as shares of what all GPUs have at their peak."""

    key: str
    prompt_tokens_a_s: float
    fp8_share: float
    """Of the dense FP8 FLOP/s of all GPUs, for computing every prompt whole."""
    bf16_share: float
    kv_read_share: float
    """Of the memory bandwidth of all GPUs, for reading the KV of what is decoded."""
    cached_at_least: float
    """Share of the prompts' FLOP that must come from caches, if the GPUs that are not reading KV prefill, at the constants'
    efficiencies; 0: none must."""


def demand(row: Published, constants: Constants) -> Demand:
    """Of one row. FP8 KV where the row has it."""
    hardware, shape = gpu(constants.gpu), shape_of(constants.model)
    profile = Profile(parameters=shape.active_parameters, layers=shape.layers, hidden=shape.hidden)
    prompt = published.INPUT_TOKENS
    prompt_flops = profile.step_flops(tokens=prompt, prefill_context_tokens=prompt**2 // 2)
    kv_dtype = "fp8" if row.key == "lmcache" else "bfloat16"
    context_tokens = published.INPUT_TOKENS + published.OUTPUT_TOKENS / 2
    answer_bytes = published.OUTPUT_TOKENS * context_tokens * shape.kv_bytes_per_token(kv_dtype)
    flops_a_s = row.goodput_per_s * prompt_flops
    read_share = row.goodput_per_s * answer_bytes / (published.GPUS * hardware.memory_bytes_a_s)
    peaks = {dtype: published.GPUS * hardware.flops_a_s(dtype) for dtype in ("fp8", "bf16")}
    doublings = (constants.tensor_parallel - 1).bit_length()
    kept = constants.tp_efficiency**doublings
    left = max(0.0, 1 - read_share / (constants.decode_efficiency * kept))
    able_a_s = left * peaks["fp8"] * constants.prefill_efficiency * kept
    return Demand(
        key=row.key,
        prompt_tokens_a_s=row.goodput_per_s * prompt,
        fp8_share=flops_a_s / peaks["fp8"],
        bf16_share=flops_a_s / peaks["bf16"],
        kv_read_share=read_share,
        cached_at_least=max(0.0, 1 - able_a_s / flops_a_s),
    )
