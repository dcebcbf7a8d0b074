"""KV cache of one token, from a model's Hugging Face ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "float": 4,
    "float16": 2,
    "half": 2,
    "bfloat16": 2,
    "int8": 1,
}
"""Names that begin with fp8 or float8 are one byte."""

_TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")
"""Where models with several parts keep the part that has the cache."""

_WINDOWED = frozenset(("sliding_attention", "local_attention", "local", "chunked_attention", "sliding"))
_STATEFUL = frozenset(("linear_attention", "mamba", "mamba2", "recurrent", "conv", "ssm", "lightning_attention", "moe", "mlp"))
"""Layers with a state of one size, or with none at all."""


def kv_bytes_per_token(config: Mapping[str, Any], *, kv_dtype: str = "auto", context_tokens: int | None = None) -> float:
    """Bytes that each token of a prompt has in the KV cache, all layers together, before tensor parallelism.

    ``kv_dtype`` is vLLM's ``--kv-cache-dtype``; ``auto`` takes the model's own. Layers that see a window only count in full
    up to it and with nothing beyond, so that the mean depends on ``context_tokens``, the prompt's length; None: a prompt
    that is shorter than every window. Layers with linear attention or a state-space model count nothing. Raises ValueError
    that names the key which is missing or makes no sense.
    """
    dtype_bytes = _dtype_bytes(config, kv_dtype)
    text = text_config(config)
    share = sum(layer_shares(text, context_tokens))
    if text.get("kv_lora_rank") is not None:  # MLA: one latent vector for keys and values of all heads
        return share * (positive(text, "kv_lora_rank") + positive(text, "qk_rope_head_dim")) * dtype_bytes
    return share * 2 * kv_heads(text) * head_dim(text) * dtype_bytes


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part that says how the language model is built; the whole ``config.json`` where there is no other."""
    if "num_hidden_layers" not in config:
        for key in _TEXT_CONFIGS:
            inner = config.get(key)
            if isinstance(inner, Mapping):
                return text_config(inner)
    return config


def positive(config: Mapping[str, Any], *keys: str) -> int:
    """The whole number that the first of the keys that is given has. Raises ValueError."""
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"config.json: {key} must be a whole number of at least 1, not {value!r}")
        return value
    raise ValueError(f"config.json: {' or '.join(keys)} is missing")


def own_dtype(config: Mapping[str, Any]) -> str:
    """The number format that the model comes in, such as bfloat16. Raises ValueError."""
    text = text_config(config)
    places = ((part, key) for part in (text, config) for key in ("torch_dtype", "dtype"))
    name = next((part[key] for part, key in places if part.get(key) is not None), None)
    if name is None:
        raise ValueError("config.json: torch_dtype or dtype is missing; give kv_dtype")
    return str(name).removeprefix("torch.")


def _dtype_bytes(config: Mapping[str, Any], kv_dtype: str) -> int:
    name = own_dtype(config) if kv_dtype == "auto" else kv_dtype
    name = name.lower().removeprefix("torch.")
    if name.startswith(("fp8", "float8")):
        return 1
    if name not in _DTYPE_BYTES:
        raise ValueError(f"KV dtype {name!r} is not known; known are auto, fp8*, {', '.join(sorted(_DTYPE_BYTES))}")
    return _DTYPE_BYTES[name]


def kv_heads(config: Mapping[str, Any]) -> int:
    """Heads with keys and values of their own. Raises ValueError."""
    # Falcon's newer architecture says multi_query, too, and has num_kv_heads of them.
    old = not config.get("new_decoder_architecture")
    if config.get("num_key_value_heads") is None and config.get("multi_query") is True and old:
        return 1
    return positive(config, "num_key_value_heads", "num_kv_heads", "num_attention_heads", "n_head")


def head_dim(config: Mapping[str, Any]) -> int:
    """Numbers in a head's key, and in its value. Raises ValueError."""
    if config.get("head_dim") is not None:
        return positive(config, "head_dim")
    hidden = positive(config, "hidden_size", "n_embd")
    heads = positive(config, "num_attention_heads", "n_head")
    if hidden % heads:
        raise ValueError(
            f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads {heads}; head_dim is missing"
        )
    return hidden // heads


def layer_shares(config: Mapping[str, Any], context_tokens: int | None) -> list[float]:
    """Of each layer with attention, or with none (0), the share of the prompt's tokens that it keeps. Raises ValueError."""
    layers = positive(config, "num_hidden_layers", "n_layer")
    kinds = _kinds(config, layers)
    if kinds is None:
        everywhere = config.get("sliding_window") is not None and config.get("use_sliding_window", True)
        kinds = ["sliding_attention" if everywhere else "full_attention"] * layers
    shared = config.get("num_kv_shared_layers")  # Gemma 3n: the last ones read the cache of others
    if shared:
        kinds = kinds[: -positive(config, "num_kv_shared_layers")]
    shares = []
    for kind in kinds:
        if kind in _STATEFUL:
            shares.append(0.0)
        elif kind in _WINDOWED:
            keys = ("attention_chunk_size", "sliding_window") if kind.startswith("chunked") else ("sliding_window",)
            window = positive(config, *keys, "window_size", "attention_window_size")
            shares.append(1.0 if not context_tokens else min(1.0, window / context_tokens))
        elif kind in ("full_attention", "attention", "global", "global_attention", "full", "hybrid"):
            shares.append(1.0)
        else:
            raise ValueError(f"config.json: the layer type {kind!r} is not known")
    return shares


def _kinds(config: Mapping[str, Any], layers: int) -> Sequence[str] | None:
    """What each layer is; None where the model has one kind only."""
    for key in ("layer_types", "layers_block_type"):
        kinds = config.get(key)
        if kinds is None:
            continue
        if not isinstance(kinds, Sequence) or isinstance(kinds, str) or len(kinds) != layers:
            raise ValueError(f"config.json: {key} must name each of the {layers} layers")
        return [str(kind) for kind in kinds]
    if config.get("model_type") == "gemma2":  # windows in every second layer; its config.json does not say so
        return ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)]
    numbers = config.get("attn_type_list")  # MiniMax: 1 for full attention, 0 for linear
    if isinstance(numbers, Sequence) and not isinstance(numbers, str) and len(numbers) == layers:
        return ["full_attention" if number else "linear_attention" for number in numbers]
    pattern = config.get("hybrid_override_pattern")  # Nemotron-H: a letter a layer
    if isinstance(pattern, str):
        return ["full_attention" if letter == "*" else "mamba" for letter in pattern]
    every = config.get("full_attention_interval")  # Qwen3-Next: each so many layers one with full attention
    if every is not None:
        step = positive(config, "full_attention_interval")
        return ["linear_attention" if (layer + 1) % step else "full_attention" for layer in range(layers)]
    every = config.get("sliding_window_pattern")  # Gemma 3: likewise, between windows
    if every is not None:
        step = positive(config, "sliding_window_pattern")
        return ["sliding_attention" if (layer + 1) % step else "full_attention" for layer in range(layers)]
    linear = config.get("linear_attn_config")  # Kimi Linear: layers counted from 1
    if isinstance(linear, Mapping) and isinstance(linear.get("full_attn_layers"), Sequence):
        full = set(linear["full_attn_layers"])
        return ["full_attention" if layer + 1 in full else "linear_attention" for layer in range(layers)]
    period = config.get("attn_layer_period")  # Jamba
    if period is not None:
        step, offset = positive(config, "attn_layer_period"), config.get("attn_layer_offset", 0)
        return ["full_attention" if layer % step == offset else "mamba" for layer in range(layers)]
    return None
