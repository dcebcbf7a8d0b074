"""What one GPU can do, from its maker's data sheet.

Data sheets print the rates of sparse matrices in large type; here they are dense, which is half of that. Bytes are of 10^9 to
the GB, as on the sheets. Prices are assumptions: what clouds that rent out GPUs by the hour asked in 2025 and 2026 without a
contract, rounded. Give your own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from extproc.plan.dtypes import weight_dtype
from extproc.plan.errors import unknown


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One kind of GPU."""

    name: str
    memory_bytes: float
    memory_bytes_a_s: float
    dense_flops_a_s: Mapping[str, float]
    """By number format, the ones that its tensor cores multiply."""
    price_usd_a_hour: float
    """An assumption."""
    source: str

    def compute_dtype(self, dtype: str) -> str:
        """What weights of ``dtype`` are multiplied in: BF16 where the tensor cores do not know the format.

        Then kernels unpack the weights on the way (weight-only quantisation): less to read, but no more FLOP/s.
        """
        dtype = weight_dtype(dtype)
        return dtype if dtype in self.dense_flops_a_s else "bf16"

    def flops_a_s(self, dtype: str) -> float:
        """Dense peak for weights of ``dtype``. Raises PlanError for a format that is not known."""
        return self.dense_flops_a_s[self.compute_dtype(dtype)]


def _gpu(name: str, gb: float, tb_a_s: float, price_usd: float, source: str, **tflops: float) -> Gpu:
    return Gpu(
        name=name,
        memory_bytes=gb * 1e9,
        memory_bytes_a_s=tb_a_s * 1e12,
        dense_flops_a_s={dtype: rate * 1e12 for dtype, rate in tflops.items()},
        price_usd_a_hour=price_usd,
        source=source,
    )


_ALL = (
    _gpu("a100-40gb", 40, 1.555, 1.3, "NVIDIA A100 data sheet, SXM and PCIe 40 GB", bf16=312, int8=624),
    _gpu("a100-80gb", 80, 2.039, 1.8, "NVIDIA A100 data sheet, SXM 80 GB", bf16=312, int8=624),
    _gpu("l4", 24, 0.300, 0.7, "NVIDIA L4 data sheet", bf16=121, fp8=242.5, int8=242.5),
    _gpu("l40s", 48, 0.864, 1.0, "NVIDIA L40S data sheet", bf16=362, fp8=733, int8=733),
    _gpu("h100-pcie", 80, 2.0, 2.5, "NVIDIA H100 data sheet, PCIe", bf16=756, fp8=1513, int8=1513),
    _gpu("h100-nvl", 94, 3.9, 2.7, "NVIDIA H100 data sheet, NVL", bf16=835.5, fp8=1670.5, int8=1670.5),
    _gpu("h100-sxm", 80, 3.35, 3.0, "NVIDIA H100 data sheet, SXM5", bf16=989, fp8=1979, int8=1979),
    _gpu("h200-sxm", 141, 4.8, 3.8, "NVIDIA H200 data sheet, SXM", bf16=989, fp8=1979, int8=1979),
    _gpu("h20", 96, 4.0, 1.5, "NVIDIA H20 as resellers list it; the maker prints no data sheet", bf16=148, fp8=296, int8=296),
    _gpu("b200-sxm", 180, 8.0, 5.0, "NVIDIA HGX B200 data sheet, 180 GB of use", bf16=2250, fp8=4500, int8=4500, fp4=9000),
    _gpu("mi300x", 192, 5.3, 2.5, "AMD Instinct MI300X data sheet", bf16=1307.4, fp8=2614.9, int8=2614.9),
)

GPUS: Mapping[str, Gpu] = {each.name: each for each in _ALL}

_SHORT = {"a100": "a100-80gb", "h100": "h100-sxm", "h200": "h200-sxm", "b200": "b200-sxm"}


def gpu(name: str) -> Gpu:
    """The GPU of that name; ``h100`` is the SXM one. Raises PlanError with the names that are known."""
    key = name.strip().lower().replace(" ", "-").replace("_", "-")
    key = _SHORT.get(key, key)
    if key not in GPUS:
        raise unknown("the GPU", name, GPUS)
    return GPUS[key]
