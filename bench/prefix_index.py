"""What the prefix index costs: memory for a million entries, and the time of a long prompt, against a naive index.

``python -m bench.prefix_index``. The naive index is an OrderedDict of hashes for each endpoint, each with an equal share of the
entries, walked endpoint by endpoint. Each index is filled in a process of its own, so that memory is counted apart. Times are
processor time, so that other processes do not count.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import multiprocessing
import random
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple, Protocol

import psutil
from rich.console import Console
from rich.table import Table

from extproc.routing.prefix import Chain, PrefixIndex, chain_of

_ENDPOINTS = 64
_PROMPT_BLOCKS = 2048
_BLOCK_TOKENS = 64.0
_BLOCK_BYTES = 256
_SHARED_BLOCKS = 512
"""Of every second prompt: a system prompt that many endpoints hold."""
_ROUNDS = 300


class _Index(Protocol):
    @property
    def blocks(self) -> int: ...

    def insert(self, address: str, chain: Chain) -> None: ...

    def lookup(self, chain: Chain) -> dict[str, int]: ...


class _Naive:
    """An OrderedDict for each endpoint."""

    def __init__(self, entries: int) -> None:
        self._capacity = entries // _ENDPOINTS
        self._held: dict[str, OrderedDict[int, None]] = {}

    @property
    def blocks(self) -> int:
        return sum(map(len, self._held.values()))

    def insert(self, address: str, chain: Chain) -> None:
        own = self._held.setdefault(address, OrderedDict())
        for block in reversed(chain.hashes):
            own[block] = None
            own.move_to_end(block)
        while len(own) > self._capacity:
            own.popitem(last=False)

    def lookup(self, chain: Chain) -> dict[str, int]:
        found = {}
        for address, own in self._held.items():
            length = 0
            for block in chain.hashes:
                if block not in own:
                    break
                length += 1
            if length:
                found[address] = length
        return found


class _Measured(NamedTuple):
    rss_mb: float
    entries: int
    insert_ms: list[float]
    lookup_ms: list[float]


def _timed(action: Callable[[], object]) -> float:
    start = time.thread_time()
    action()
    return (time.thread_time() - start) * 1e3


def _measure(naive: bool, entries: int, prompt_blocks: int) -> _Measured:
    """Fill an index to ``entries``, then time it in that state: new prompts in, old ones looked up."""
    draw = random.Random(7)  # noqa: S311 - a bench that can be repeated
    addresses = [f"10.0.{number}.1:8000" for number in range(_ENDPOINTS)]
    system = array("Q", draw.randbytes(8 * _SHARED_BLOCKS))

    def prompt() -> Chain:
        own = array("Q", draw.randbytes(8 * prompt_blocks))
        shares = draw.random() < 0.5 and prompt_blocks > _SHARED_BLOCKS
        return Chain(system + own[_SHARED_BLOCKS:] if shares else own, _BLOCK_TOKENS)

    gc.collect()
    before_bytes = psutil.Process().memory_info().rss
    index: _Index = _Naive(entries) if naive else PrefixIndex(entries)
    inserted = 0
    recent: list[Chain] = []
    while inserted < entries * 4:  # far past the limit: each insert evicts, and tables have the size that they keep
        chain = prompt()
        index.insert(draw.choice(addresses), chain)
        inserted += len(chain.hashes)
        recent = [*recent[-50:], chain]
    grown_mb = (psutil.Process().memory_info().rss - before_bytes) / 1e6
    lookup_ms, insert_ms = [], []
    for _ in range(_ROUNDS):
        old, new, address = draw.choice(recent), prompt(), draw.choice(addresses)
        lookup_ms.append(_timed(lambda chain=old: index.lookup(chain)))  # type: ignore[misc]
        insert_ms.append(_timed(lambda address=address, chain=new: index.insert(address, chain)))  # type: ignore[misc]
    return _Measured(grown_mb, index.blocks, insert_ms, lookup_ms)


def _apart(naive: bool, entries: int, prompt_blocks: int) -> _Measured:
    """The same in a new process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_measure, (naive, entries, prompt_blocks))


def _chain_ms(prompt_bytes: int) -> list[float]:
    data = random.Random(7).randbytes(prompt_bytes)  # noqa: S311
    return [_timed(lambda: chain_of(data, b"model", _BLOCK_BYTES, _BLOCK_TOKENS)) for _ in range(50)]


def _naive_chain_ms(prompt_bytes: int) -> list[float]:
    """SHA-256 over parent and block, as the engine does it over tokens."""
    data = random.Random(7).randbytes(prompt_bytes)  # noqa: S311

    def chain() -> None:
        before = b""
        for start in range(0, len(data), _BLOCK_BYTES):
            before = hashlib.sha256(before + data[start : start + _BLOCK_BYTES]).digest()

    return [_timed(chain) for _ in range(50)]


def _at(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def main() -> None:
    """Measure, and print a table."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--entries", type=int, default=1_000_000)
    options.add_argument("--prompt-blocks", type=int, default=_PROMPT_BLOCKS, help="of 64 tokens; 1: the worst for the memory")
    given = options.parse_args()
    entries, blocks = given.entries, given.prompt_blocks
    ours, naive = _apart(False, entries, blocks), _apart(True, entries, blocks)
    tokens = blocks * int(_BLOCK_TOKENS)
    table = Table(title=f"{entries:,} entries over {_ENDPOINTS} endpoints; prompts of {blocks:,} blocks ({tokens:,} tokens)")
    for name in ("", "Baton", "naive", "ratio"):
        table.add_column(name, justify="left" if not name else "right")
    table.add_row("entries held", f"{ours.entries:,}", f"{naive.entries:,}", "")
    table.add_row("memory, MB", f"{ours.rss_mb:.0f}", f"{naive.rss_mb:.0f}", f"{ours.rss_mb / naive.rss_mb:.2f}")
    table.add_row(
        "bytes an entry",
        f"{ours.rss_mb * 1e6 / ours.entries:.0f}",
        f"{naive.rss_mb * 1e6 / naive.entries:.0f}",
        f"{ours.rss_mb / ours.entries / (naive.rss_mb / naive.entries):.2f}",
    )
    for what, mine, other in (
        ("lookup", ours.lookup_ms, naive.lookup_ms),
        ("insert", ours.insert_ms, naive.insert_ms),
        ("hash of 512 KB (naive: SHA-256)", _chain_ms(512 << 10), _naive_chain_ms(512 << 10)),
    ):
        for label, share in (("p50", 0.5), ("p99", 0.99)):
            a, b = _at(mine, share), _at(other, share)
            table.add_row(f"{what}, ms, {label}", f"{a:.2f}", f"{b:.2f}", f"{a / b:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
