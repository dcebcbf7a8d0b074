"""How often and for how long each size is transferred. Independent of what transfers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

from workers.preflight.findings import Sample

_SIZES_BYTES = (1 << 20, 8 << 20, 64 << 20, 256 << 20, 1 << 30, 4 << 30)
_SIZE_S = 1.5
"""Time spent on one size, and no more transfers begun after it."""
_TRANSFERS_MIN, _TRANSFERS_MAX = 3, 50
LATENCY_TRANSFERS = 50
LATENCY_S = 1.0


def steps(block_bytes: int, blocks: int) -> Iterator[int]:
    """Blocks of each transfer size, smallest first: from a MiB or one block up to the whole buffer."""
    done = 0
    for size_bytes in _SIZES_BYTES:
        count = min(blocks, max(1, size_bytes // block_bytes))
        if count > done:
            yield count
            done = count


def sample(transfer: Callable[[], float], *, size_bytes: int, descriptors: int, left_s: float) -> Sample:
    """Repeat ``transfer``, which returns its seconds."""
    times: list[float] = []
    start = time.monotonic()
    limit_s = min(_SIZE_S, left_s)
    while len(times) < _TRANSFERS_MAX and (len(times) < _TRANSFERS_MIN or time.monotonic() - start < limit_s):
        times.append(transfer())
        if time.monotonic() - start > left_s:
            break
    return Sample(
        size_bytes=size_bytes,
        descriptors=descriptors,
        median_s=statistics.median(times),
        best_bytes_per_s=size_bytes / min(times),
        transfers=len(times),
    )


def affordable(count: int, block_bytes: int, last: Sample | None, left_s: float) -> bool:
    """So many blocks can be transferred often enough in the time that is left, at the bandwidth of the last size."""
    if last is None:
        return True
    return count * block_bytes * last.median_s / last.size_bytes * _TRANSFERS_MIN < min(left_s, 4 * _SIZE_S)
