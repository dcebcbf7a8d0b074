"""Number formats of weights: one spelling of each, and their size. KV cache formats are those of ``routing.kv_size``."""

from __future__ import annotations

from extproc.plan.errors import unknown

WEIGHT_BYTES = {"bf16": 2.0, "fp8": 1.0, "int8": 1.0, "fp4": 0.5625, "int4": 0.5625}
"""Bytes a parameter. With 4 bits, each 16 values share a scale of one byte (NVFP4); for int4 this is an assumption."""

_SPELLINGS = {
    "auto": "bf16",
    "bfloat16": "bf16",
    "fp16": "bf16",
    "float16": "bf16",
    "half": "bf16",
    "nvfp4": "fp4",
    "mxfp4": "fp4",
    "awq": "int4",
    "gptq": "int4",
}


def weight_dtype(name: str) -> str:
    """The one spelling that the tables here use. Raises PlanError for a format that is not known."""
    lower = name.strip().lower().removeprefix("torch.")
    if lower.startswith(("fp8", "float8")):
        return "fp8"
    lower = _SPELLINGS.get(lower, lower)
    if lower not in WEIGHT_BYTES:
        raise unknown("the weight dtype", name, {*WEIGHT_BYTES, *_SPELLINGS})
    return lower
