"""``baton plan roofline``: what prefill and decode do with a GPU, and which of its two limits each runs into.

All times come from :class:`workers.sim.timing.Profile`, the arithmetic of the twin: nothing here has a formula of its own for
how long a step takes.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Literal

import msgspec

from extproc.plan.engines import Engine
from extproc.plan.errors import PlanError
from extproc.plan.gpus import Gpu
from workers.sim.timing import Profile

_MOST = 10**12

Bound = Literal["compute", "memory"]

_MOST_STEPS = 100_000
"""Of one prefill. More are a mistake."""


class Ridge(msgspec.Struct, frozen=True, kw_only=True):
    """Where a GPU's two limits meet, in one number format: below, memory is the limit, above, compute."""

    gpu: str
    dtype: str
    flops_a_s: float
    """Dense peak."""
    memory_bytes_a_s: float
    flop_per_byte: float


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """A prefill or a decode step of one worker."""

    what: Literal["prefill", "decode"]
    batch: int
    """Sequences."""
    context_tokens: int
    """Of each: the prompt's length, or what a decode step attends to."""
    flops: float
    """In all steps of a prefill, or in the one of a decode."""
    read_bytes: float
    flop_per_byte: float
    """Arithmetic intensity."""
    time_s: float
    """Of the whole prefill, or of one decode step."""
    tokens_a_s: float
    """Prompt tokens, or generated ones over all sequences."""
    bound: Bound
    fits: bool
    """The KV cache holds it."""


class Clash(msgspec.Struct, frozen=True, kw_only=True):
    """What a prefill does to the decode steps that it shares a worker with."""

    batch: int
    context_tokens: int
    prefill_tokens: int
    """In the same step."""
    alone_s: float
    shared_s: float


class Assumed(msgspec.Struct, frozen=True, kw_only=True):
    """What times rest on and no data sheet says."""

    prefill_efficiency: float
    decode_efficiency: float
    tp_efficiency: float
    step_overhead_s: float


class Roofline(msgspec.Struct, frozen=True, kw_only=True):
    """One worker: its roofs, and where its work lies."""

    worker: str
    gpus: int
    """Of the worker."""
    assumed: Assumed
    ridges: list[Ridge]
    reached_flops_a_s: float
    """With the stated efficiency, all GPUs of the worker."""
    reached_bytes_a_s: float
    reached_flop_per_byte: float
    """Where the limits meet that are reached."""
    weight_bytes: float
    kv_bytes_per_token: int
    kv_tokens: int
    compute_bound_prefill_tokens: int
    """A step with so many prompt tokens, or more, is limited by compute."""
    points: list[Point]
    clash: Clash


def ridges(gpus: Sequence[Gpu]) -> list[Ridge]:
    """Of each GPU, for each number format that it multiplies."""
    return [
        Ridge(
            gpu=gpu.name,
            dtype=dtype,
            flops_a_s=flops_a_s,
            memory_bytes_a_s=gpu.memory_bytes_a_s,
            flop_per_byte=flops_a_s / gpu.memory_bytes_a_s,
        )
        for gpu in gpus
        for dtype, flops_a_s in gpu.dense_flops_a_s.items()
    ]


def prefill(engine: Engine, tokens: int, *, chunk_tokens: int = 8192) -> Point:
    """A prompt alone on the worker, in steps of ``chunk_tokens``. Raises PlanError."""
    _at_least_one(tokens=tokens, chunk_tokens=chunk_tokens)
    if tokens > _MOST_STEPS * chunk_tokens:
        raise PlanError(f"tokens: {tokens:,} in chunks of {chunk_tokens:,} are more than {_MOST_STEPS:,} steps")
    profile = engine.profile
    flops = read_bytes = time_s = 0.0
    for done in range(0, tokens, chunk_tokens):
        step = min(chunk_tokens, tokens - done)
        context_tokens = step * (2 * done + step) // 2
        flops += profile.step_flops(tokens=step, prefill_context_tokens=context_tokens)
        read_bytes += profile.step_bytes(tokens=step, decode_context_tokens=0)
        time_s += profile.step_s(prefill_tokens=step, prefill_context_tokens=context_tokens, decodes=0, decode_context_tokens=0)
    return _point("prefill", engine, 1, tokens, flops, read_bytes, time_s, tokens)


def decode(engine: Engine, batch: int, context_tokens: int) -> Point:
    """One step of ``batch`` sequences that attend to ``context_tokens`` each. Raises PlanError."""
    _at_least_one(batch=batch, context_tokens=context_tokens)
    profile = engine.profile
    in_all = batch * context_tokens
    flops = profile.step_flops(tokens=batch, prefill_context_tokens=0)
    read_bytes = profile.step_bytes(tokens=batch, decode_context_tokens=in_all)
    time_s = profile.step_s(prefill_tokens=0, prefill_context_tokens=0, decodes=batch, decode_context_tokens=in_all)
    return _point("decode", engine, batch, context_tokens, flops, read_bytes, time_s, batch)


def clash(engine: Engine, batch: int, context_tokens: int, prefill_tokens: int) -> Clash:
    """A decode step alone, and with the first chunk of a prompt in it. Raises PlanError."""
    _at_least_one(batch=batch, context_tokens=context_tokens, chunk_tokens=prefill_tokens)
    shared_s = engine.profile.step_s(
        prefill_tokens=prefill_tokens,
        prefill_context_tokens=prefill_tokens**2 // 2,
        decodes=batch,
        decode_context_tokens=batch * context_tokens,
    )
    return Clash(
        batch=batch,
        context_tokens=context_tokens,
        prefill_tokens=prefill_tokens,
        alone_s=decode(engine, batch, context_tokens).time_s,
        shared_s=shared_s,
    )


def roofline(
    engine: Engine,
    gpu: Gpu,
    *,
    worker: str,
    assumed: Assumed,
    prompts: Sequence[int],
    batches: Sequence[int],
    contexts: Sequence[int],
    chunk_tokens: int = 8192,
) -> Roofline:
    """A prefill of each length, and a decode step of each batch at each context. Raises PlanError."""
    profile = engine.profile
    points = [prefill(engine, tokens, chunk_tokens=chunk_tokens) for tokens in prompts]
    points += [decode(engine, batch, context) for context in contexts for batch in batches]
    return Roofline(
        worker=worker,
        gpus=engine.gpus,
        assumed=assumed,
        ridges=ridges([gpu]),
        reached_flops_a_s=profile.flops_a_s,
        reached_bytes_a_s=profile.memory_bytes_a_s,
        reached_flop_per_byte=profile.flops_a_s / profile.memory_bytes_a_s,
        weight_bytes=profile.weight_bytes,
        kv_bytes_per_token=profile.kv_bytes_a_token,
        kv_tokens=engine.kv_tokens,
        compute_bound_prefill_tokens=_compute_bound_tokens(profile),
        points=points,
        clash=clash(engine, batches[len(batches) // 2], contexts[len(contexts) // 2], chunk_tokens),
    )


def _compute_bound_tokens(profile: Profile) -> int:
    """The fewest tokens of a prefill step whose work takes longer than reading the weights."""

    def enough(tokens: int) -> bool:
        flops = profile.step_flops(tokens=tokens, prefill_context_tokens=tokens**2 // 2)
        read_bytes = profile.step_bytes(tokens=tokens, decode_context_tokens=0)
        return flops / profile.flops_a_s >= read_bytes / profile.memory_bytes_a_s

    return bisect.bisect_left(range(1, 1 << 24), True, key=enough) + 1


def _point(
    what: Literal["prefill", "decode"],
    engine: Engine,
    batch: int,
    context_tokens: int,
    flops: float,
    read_bytes: float,
    time_s: float,
    tokens: int,
) -> Point:
    profile = engine.profile
    return Point(
        what=what,
        batch=batch,
        context_tokens=context_tokens,
        flops=flops,
        read_bytes=read_bytes,
        flop_per_byte=flops / read_bytes,
        time_s=time_s,
        tokens_a_s=tokens / time_s,
        bound="compute" if flops / profile.flops_a_s >= read_bytes / profile.memory_bytes_a_s else "memory",
        fits=batch * context_tokens <= engine.kv_tokens,
    )


def _at_least_one(**given: int) -> None:
    for name, value in given.items():
        if not 1 <= value <= _MOST:
            raise PlanError(f"{name.replace('_', ' ')}: at least 1 and at most {_MOST:,}, not {value:,}")
