"""Number formats of weights: one spelling of each, and their size. KV cache formats are those of ``routing.kv_size``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from extproc.plan.errors import unknown

WEIGHT_BYTES = {"bf16": 2.0, "fp8": 1.0, "int8": 1.0, "fp4": 0.5625, "int4": 0.5625}
"""Bytes a parameter. With 4 bits, each 16 values share a scale of one byte (NVFP4); for int4 this is an assumption."""

_SPELLINGS = {
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


def own_weight_dtype(config: Mapping[str, Any]) -> str:
    """What a model's weights come in, by its ``config.json``: as they are quantised, else BF16.

    Where only most of them are quantised (attention and embeddings often are not), that counts for all. A method that is not
    known counts as none. Never raises.
    """
    quantisation = config.get("quantization_config")
    if not isinstance(quantisation, Mapping):
        return "bf16"
    groups = quantisation.get("config_groups")
    if isinstance(groups, Mapping):  # compressed-tensors
        for group in groups.values():
            weights = group.get("weights") if isinstance(group, Mapping) else None
            if isinstance(weights, Mapping):
                kind = "fp" if weights.get("type") == "float" else "int"
                name = f"{kind}{weights.get('num_bits')}"
                return name if name in WEIGHT_BYTES else "bf16"
    method = str(quantisation.get("quant_algo") or quantisation.get("quant_method")).lower()
    name = _SPELLINGS.get(method, method)
    return name if name in WEIGHT_BYTES else "bf16"
