"""What the twin makes of a published benchmark: all requests at once, one engine, tokens a second at the end.

TensorRT-LLM's defaults where the benchmark's page says nothing else: up to 2,048 sequences, 8,192 tokens a step, 95 % of what
is free for the KV cache (or 90 %, which the page leaves open). Prompts are random, so that no prefix is shared.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from extproc.plan import engines
from extproc.plan.gpus import gpu
from extproc.plan.shapes import shape_of
from workers.sim.twin import Done, TwinConfig, TwinEngine

PUBLISHED = Path(__file__).with_name("published.json")
MOST_REQUESTS = 1500
"""Of those that the benchmark sent; the others would change nothing but the time that this takes."""
_BLOCK_TOKENS = 64


class Constants(NamedTuple):
    """What no data sheet says."""

    prefill: float
    decode: float
    tp: float


DEFAULT = Constants(engines.PREFILL_EFFICIENCY, engines.DECODE_EFFICIENCY, engines.TP_EFFICIENCY)
TUNED = Constants(0.60, 0.90, engines.TP_EFFICIENCY)
"""Round numbers, chosen by hand so that the middle of all sixty ratios is near 1."""


class Case(NamedTuple):
    """One published number."""

    model: str
    gpu: str
    tensor_parallel: int
    input_tokens: int
    output_tokens: int
    requests: int
    measured_a_s: float
    """Output tokens a second."""


def cases() -> Iterator[Case]:
    """All published numbers. Raises OSError."""
    page = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    for column in page["columns"]:
        rows = zip(page["lengths"], page["requests"], column["tokens_a_s"], strict=True)
        for (input_tokens, output_tokens), requests, measured_a_s in rows:
            sizes = (column["tensor_parallel"], input_tokens, output_tokens, requests)
            yield Case(column["model"], column["gpu"], *sizes, measured_a_s)


def predicted_a_s(case: Case, constants: Constants) -> float:
    """Output tokens a second in the twin."""
    worker = engines.engine(
        shape_of(case.model),
        gpu(case.gpu),
        tensor_parallel=case.tensor_parallel,
        weight_dtype="fp8",
        kv_dtype="fp8",
        prefill_efficiency=constants.prefill,
        decode_efficiency=constants.decode,
        tp_efficiency=constants.tp,
        memory_utilization=0.95,
    )
    limits = TwinConfig(
        block_tokens=_BLOCK_TOKENS,
        num_blocks=worker.kv_tokens // _BLOCK_TOKENS,
        max_num_seqs=2048,
        max_num_batched_tokens=8192,
        prefix_caching=False,
    )
    twin = TwinEngine("one", limits, worker.profile)
    requests = min(case.requests, MOST_REQUESTS)
    for number in range(requests):
        twin.submit_whole(str(number), [], case.input_tokens, case.output_tokens, 0.0)
    end_s = max(event.at_s for event in twin.advance(math.inf) if isinstance(event, Done))
    return requests * case.output_tokens / end_s


def spread(ratios: Sequence[float]) -> tuple[float, float, float]:
    """The lowest, the middle (geometric mean) and the highest."""
    return min(ratios), math.exp(sum(map(math.log, ratios)) / len(ratios)), max(ratios)
