"""What was published: five arrangements of 64 H200 serving a dense 70B model. Numbers, and nothing that was made of them."""

from __future__ import annotations

from dataclasses import dataclass

GPUS = 64
INPUT_TOKENS = 28_000
OUTPUT_TOKENS = 650
TTFT_SLO_S = 2.5
ITL_SLO_S = 0.045


@dataclass(frozen=True)
class Published:
    """One row."""

    key: str
    name: str
    goodput_per_s: float
    itl_p99_ms: float
    ttft_mean_ms: float


ROWS = (
    Published("colocated", "colocated", 6.8, 948.0, 1420.0),
    Published("chunked", "colocated, chunked prefill", 11.2, 112.5, 1890.0),
    Published("tcp", "P/D over TCP", 9.4, 21.2, 3140.0),
    Published("nixl", "P/D over NIXL", 24.6, 18.4, 1310.0),
    Published("lmcache", "P/D over NIXL, LMCache, FP8 KV", 27.1, 16.1, 840.0),
)

BASE = "nixl"
"""The row that ratios of goodput are against."""
