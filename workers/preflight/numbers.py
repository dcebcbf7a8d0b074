"""The numbers that findings argue with, and how sizes and times are written."""

from __future__ import annotations

import math

GIB = 1 << 30

STAGED_BYTES_PER_S = 11e9
"""GPU memory through host memory to the NIC and back up: what is commonly seen, whatever the NIC could do."""
DIRECT_BYTES_PER_S = 50e9
"""One 400 Gb/s NIC that reads GPU memory itself."""
TCP_GUESS_BYTES_PER_S = 1e9
"""UCX over TCP where the link's rate cannot be told."""
NVLINK_GUESS_BYTES_PER_S = 200e9
"""Between two GPUs of one host over NVLink, cuda_ipc. A guess on the low side of what an H100 has."""

HANDOFF_TOKENS = (1_024, 8_192, 32_768, 131_072)


def size(size_bytes: float) -> str:
    """64 KiB, 1.5 GiB; a limit that is none is unlimited."""
    if math.isinf(size_bytes):
        return "unlimited"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.3g} {unit}" if size_bytes < 1000 else f"{size_bytes:.0f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:,.3g} TiB"


def rate(bytes_per_s: float) -> str:
    """50 GB/s, 0.85 GB/s."""
    return f"{bytes_per_s / 1e9:.3g} GB/s"


def seconds(time_s: float) -> str:
    """3.2 s, 41 ms, 17 µs."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if time_s * factor >= 1 or unit == "µs":
            return f"{time_s * factor:.0f} {unit}" if time_s * factor >= 100 else f"{time_s * factor:.2g} {unit}"
    raise AssertionError
