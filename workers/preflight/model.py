"""What of a model matters here, from its ``config.json`` and the files of its weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from workers.preflight.ask import Model

KvSize = Callable[[Mapping[str, Any]], float]
"""A ``config.json`` -> bytes of KV cache a token, all layers. Raises ValueError."""

_TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")
_CONFIG_MAX_BYTES = 8 << 20


def describe(model: Path, kv_size: KvSize, *, weights_bytes: float | None = None) -> Model:
    """``model``: a folder in Hugging Face layout, or a ``config.json``.

    Raises ValueError that names the file and what is wrong with it, or OSError.
    """
    config_file = model / "config.json" if model.is_dir() else model
    with config_file.open("rb") as file:
        raw = file.read(_CONFIG_MAX_BYTES)
    try:
        config = json.loads(raw)
        if not isinstance(config, dict):
            raise ValueError("not a JSON object")
        kv_bytes_per_token = kv_size(config)
        text = next((config[key] for key in _TEXT_CONFIGS if isinstance(config.get(key), dict)), config)
        layers = _first(text, "num_hidden_layers", "n_layer") or 1
        latent = text.get("kv_lora_rank") is not None
        heads = 1 if latent else _first(text, "num_key_value_heads", "num_kv_heads", "num_attention_heads", "n_head") or 1
        source = "stated"
        if weights_bytes is None:
            weights_bytes, source = _weights(config_file.parent)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{config_file}: {error}") from error
    return Model(
        name=model.name if model.is_dir() else model.parent.name,
        kv_bytes_per_token=kv_bytes_per_token,
        layers=layers,
        kv_heads=heads,
        weights_bytes=weights_bytes,
        weights_source=source if weights_bytes is not None else "",
        max_tokens=_first(text, "max_position_embeddings", "n_positions"),
    )


def _first(config: Mapping[str, Any], *keys: str) -> int | None:
    values = (config.get(key) for key in keys)
    return next((value for value in values if isinstance(value, int) and not isinstance(value, bool) and value > 0), None)


def _weights(folder: Path) -> tuple[float | None, str]:
    """From the index of the safetensors, which says it for files that are not here yet; else from the files."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        total = json.loads(index.read_bytes()).get("metadata", {}).get("total_size")
        if isinstance(total, int | float) and total > 0:
            return float(total), "index of the weights"
    sizes = [file.stat().st_size for file in folder.glob("*.safetensors")]
    return (float(sum(sizes)), "size of the files") if sizes else (None, "")
