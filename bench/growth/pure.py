"""Experiments without network: endpoints under the decision, blocks in the prefix index. Each size in a process of its own."""

from __future__ import annotations

import gc
import multiprocessing
import random
import statistics
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import psutil

from bench.growth.judge import Cost, Growth
from bench.growth.series import Series, Tell
from bench.picker import BusyPool
from extproc.routing.endpoint_spec import EndpointSet, EndpointSpec
from extproc.routing.job import Aims, Mode
from extproc.routing.pool import Pool
from extproc.routing.prefix import Chain, PrefixIndex

_DECISIONS = 400
_ENDPOINTS = 64
_PROMPT_BLOCKS = 512
_BLOCK_TOKENS = 64.0
_PROMPTS = 200


def endpoints(sizes: Sequence[int], rounds: int, tell: Tell) -> Series:
    """Half of them prefill, half decode; with one, it does both."""
    series = Series(
        title="Endpoints, half of them for prefill: a decision for a prompt of 12K tokens, while a third of them has work",
        input="endpoints",
        costs=(
            Cost(name="decision (queue, auto), p50", unit="ms", expected=Growth.LINEAR, floor=0.05),
            Cost(name="decision (immediate, auto), p50", unit="ms", expected=Growth.LINEAR, floor=0.05),
            Cost(name="decision (queue, forced), p50", unit="ms", expected=Growth.LINEAR, floor=0.05),
            Cost(name="memory of the pool", unit="MB", expected=Growth.LINEAR, floor=1.0),
        ),
    )
    _run(series, sizes, rounds, tell, _decide)
    return series


def index(sizes: Sequence[int], rounds: int, tell: Tell) -> Series:
    """Full ones: every insert evicts."""
    series = Series(
        title=f"Blocks in the prefix index, over {_ENDPOINTS} endpoints; prompts of {_PROMPT_BLOCKS} blocks",
        input="blocks",
        costs=(
            Cost(name="insert, p50", unit="ms", expected=Growth.FLAT, floor=0.02),
            Cost(name="lookup, p50", unit="ms", expected=Growth.FLAT, floor=0.02),
            Cost(name="memory", unit="MB", expected=Growth.LINEAR, floor=2.0),
        ),
    )
    _run(series, sizes, rounds, tell, _index)
    return series


def _run(series: Series, sizes: Sequence[int], rounds: int, tell: Tell, measure: Callable[[int], Mapping[str, float]]) -> None:
    for turn in range(rounds):
        for size in sizes:
            tell(f"round {turn + 1} of {rounds}: {size:,} {series.input}")
            with multiprocessing.get_context("spawn").Pool(1) as process:
                series.note(size, dict(process.apply(measure, (size,))))


def _memory_mb() -> float:
    gc.collect()
    return float(psutil.Process().memory_info().rss) / 1e6


def _decide(many: int) -> dict[str, float]:
    prefill, decode = max(many // 2, 1), max(many - many // 2, 1)
    before_mb = _memory_mb()
    pool = Pool(EndpointSet(prefill=_specs(0, prefill), decode=_specs(1, decode)))
    for endpoint in pool.endpoints:
        pool.set_live(endpoint, True)
    found = {"memory of the pool": _memory_mb() - before_mb}
    for name, aims in (
        ("queue, auto", Aims(mode=Mode.AUTO, max_wait_s=1e6)),
        ("immediate, auto", Aims(mode=Mode.AUTO, held=False, max_wait_s=1e6)),
        ("queue, forced", Aims(mode=Mode.DISAGGREGATE, max_wait_s=1e6)),
    ):
        found[f"decision ({name}), p50"] = statistics.median(BusyPool(prefill, decode, aims).submits(_DECISIONS)) * 1e3
    return found


def _specs(network: int, count: int) -> tuple[EndpointSpec, ...]:
    return tuple(EndpointSpec(address=f"10.{network}.{number >> 8}.{number & 255}:8000") for number in range(count))


def _index(blocks: int) -> dict[str, float]:
    draw = random.Random(7)  # noqa: S311 - a benchmark
    addresses = [f"10.0.{number}.1:8000" for number in range(_ENDPOINTS)]

    def prompt() -> Chain:
        return Chain(array("Q", draw.randbytes(8 * _PROMPT_BLOCKS)), _BLOCK_TOKENS)

    before_mb = _memory_mb()
    held = PrefixIndex(blocks)
    recent: list[Chain] = []
    for _ in range(max(2 * blocks // _PROMPT_BLOCKS, 2 * _ENDPOINTS)):
        chain = prompt()
        held.insert(draw.choice(addresses), chain)
        recent = [*recent[-50:], chain]
    memory_mb = _memory_mb() - before_mb
    insert_s, lookup_s = [], []
    for _ in range(_PROMPTS):
        old, new, address = draw.choice(recent), prompt(), draw.choice(addresses)
        lookup_s.append(_timed(partial(held.lookup, old)))
        insert_s.append(_timed(partial(held.insert, address, new)))
    return {
        "insert, p50": statistics.median(insert_s) * 1e3,
        "lookup, p50": statistics.median(lookup_s) * 1e3,
        "memory": memory_mb,
    }


def _timed(action: Callable[[], object]) -> float:
    began_s = time.thread_time()
    action()
    return time.thread_time() - began_s
