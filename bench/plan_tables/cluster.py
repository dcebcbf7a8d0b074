"""The five arrangements in the twin, from stated constants. Which of these were fitted, and to what, is said here.

Published with the table: 64 H200, a dense model of 70 billion parameters, the lengths and the limits. Not published: the split,
the degree of tensor parallelism, number formats, what prompts share, what TCP reached. They are chosen here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bench.plan_tables import published
from extproc.plan.arrangement import Arrangement, SharedCache
from extproc.plan.engines import Engine, engine
from extproc.plan.gpus import gpu
from extproc.plan.lengths import fixed
from extproc.plan.links import link
from extproc.plan.shapes import shape_of
from extproc.plan.workload import Workload
from extproc.routing.job import Aims, Mode, Objective


@dataclass(frozen=True, kw_only=True)
class Constants:
    """All that the published text leaves open."""

    gpu: str = "h200-sxm"
    model: str = "llama-3.3-70b"
    """Its shape: 80 layers, 8 KV heads of 128."""
    weight_dtype: str = "fp8"
    """An assumption: in BF16, half of the FLOP/s are there, and the published rates are twice as far away."""
    tensor_parallel: int = 4
    """An assumption: a prompt takes 1.4 s then, which is the published mean TTFT of the colocated row; with 8 it is 0.8 s."""
    prefill_efficiency: float = 0.60
    decode_efficiency: float = 0.90
    tp_efficiency: float = 0.87
    """Of the dense peak, of the memory's bandwidth, and what is left of both each time that TP doubles. Not from the published
    table: with these three, this arithmetic comes within 16 % of 60 throughputs that NVIDIA measured (TensorRT-LLM 1.0,
    performance overview)."""
    prefill: int = 3
    """Prefill workers of the rows that have any; all other GPUs decode. The split that serves most over NIXL."""
    chunk_tokens: int = 512
    """Of the row with chunked prefill: the largest power of two with which a stream can be within the ITL limit."""
    pd_chunk_tokens: int = 8192
    tcp_bytes_a_s: float = 5.0e9
    """FITTED to the row `P/D over TCP`, by its TTFT: it is 1.83 s longer than over NIXL, and a prompt's KV is 9.2 GB. Of one
    port a worker; :mod:`extproc.plan.links` assumes 3.5 GB/s for one connection and 9 for several on 100 Gb/s."""
    nixl: str = "ib-400"
    """One port a GPU, 45 GB/s."""
    prefix_share: float = 0.95
    """FITTED to the row `P/D over NIXL`, and to no other: of a prompt, what others of its group begin with, too."""
    prefix_groups: int = 64
    """So many different beginnings: the default of `baton plan ratio`."""
    cache_bytes_a_gpu: float = 128e9
    cache_bytes_a_s_a_gpu: float = 25e9
    """LMCache's host memory and how fast a GPU loads from it, as `baton plan ratio` assumes."""


NOTHING_SHARED = Constants(prefix_share=0.0, prefill=11)
"""Nothing fitted: no prompt has anything in common with another. The split is again the one that serves most over NIXL."""

LONG_CHUNKS = Constants(chunk_tokens=2048)
"""Chunks too long for the ITL limit, which is how the published ITL says that the row was run."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One arrangement with its load, ready to be simulated."""

    key: str
    arrangement: Arrangement
    workload: Workload
    aims: Aims | None
    """None: Baton's own. Colocated workers stand behind a service that gives them their turns."""
    guess_per_s: float
    """Where the search begins."""


_TURNS = Aims(mode=Mode.AGGREGATE, objective=Objective.ROUND_ROBIN, held=False)
_LONGEST_STEP = 32_768
"""Of an engine that takes whole prompts: room for one with its answer."""


def rows(constants: Constants) -> list[Row]:
    """The five, in the order of the published ones."""
    workers = published.GPUS // constants.tensor_parallel
    small = _engine(constants, "bfloat16", constants.chunk_tokens)
    bf16, fp8 = (_engine(constants, kv_dtype, constants.pd_chunk_tokens) for kv_dtype in ("bfloat16", "fp8"))
    colocated = Arrangement(
        name="colocated",
        prefill=0,
        decode=workers,
        prefill_engine=bf16,
        decode_engine=bf16,
        chunked=False,
        chunk_tokens=_LONGEST_STEP,
        prefix_caching=False,
    )
    chunked = replace(
        colocated,
        name="chunked",
        decode_engine=small,
        chunked=True,
        chunk_tokens=constants.chunk_tokens,
        prefix_caching=True,
    )
    nixl = Arrangement(
        name="nixl",
        prefill=constants.prefill,
        decode=workers - constants.prefill,
        prefill_engine=bf16,
        decode_engine=bf16,
        link=link(constants.nixl),
        chunk_tokens=constants.pd_chunk_tokens,
    )
    ethernet = link("eth-100")
    slow = replace(ethernet, name="tcp", efficiency=constants.tcp_bytes_a_s / ethernet.peak_bytes_a_s)
    tcp = replace(nixl, name="tcp", link=slow)
    gpus = constants.prefill * constants.tensor_parallel
    cache = SharedCache(
        name="host memory",
        capacity_tokens=int(gpus * constants.cache_bytes_a_gpu / fp8.profile.kv_bytes_a_token),
        bytes_a_s=constants.tensor_parallel * constants.cache_bytes_a_s_a_gpu,
    )
    lmcache = replace(nixl, name="lmcache", prefill_engine=fp8, decode_engine=fp8, shared_cache=cache)
    guesses = {row.key: row.goodput_per_s for row in published.ROWS}
    workload = Workload(
        inputs=fixed(published.INPUT_TOKENS),
        outputs=fixed(published.OUTPUT_TOKENS),
        prefix_share=constants.prefix_share,
        prefix_groups=constants.prefix_groups,
    )
    return [
        Row(
            key=each.name,
            arrangement=each,
            workload=workload,
            aims=_TURNS if each.colocated else None,
            guess_per_s=guesses[each.name],
        )
        for each in (colocated, chunked, tcp, nixl, lmcache)
    ]


def variants() -> dict[str, Row]:
    """The row with chunked prefill in other ways, by title."""
    return {
        "colocated, chunks of 2,048": _chunked(LONG_CHUNKS),
        "colocated, chunks of 512, routed by Baton": replace(_chunked(Constants()), aims=None, guess_per_s=16.0),
    }


def _chunked(constants: Constants) -> Row:
    return next(row for row in rows(constants) if row.key == "chunked")


def _engine(constants: Constants, kv_dtype: str, step_tokens: int) -> Engine:
    return engine(
        shape_of(constants.model),
        gpu(constants.gpu),
        tensor_parallel=constants.tensor_parallel,
        weight_dtype=constants.weight_dtype,
        kv_dtype=kv_dtype,
        prefill_efficiency=constants.prefill_efficiency,
        decode_efficiency=constants.decode_efficiency,
        tp_efficiency=constants.tp_efficiency,
        step_tokens=step_tokens,
    )
