"""How many parameters a model has, counted from its ``config.json``.

Norms and biases are left out, well under one per cent. The input embedding counts as active though it is looked up and not
multiplied, as model cards count it: a few per cent too many for small models with experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from extproc.routing.kv_size import head_dim, kv_heads, layer_shares, positive, text_config

_TWO_MATRICES = frozenset(("falcon", "gpt2", "gpt_bigcode", "gpt_neox", "opt", "bloom", "phi", "starcoder2", "nemotron"))
"""Model types whose feed-forward layer has no gate."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "experts_per_token", "num_experts_per_token")


class Parameters(NamedTuple):
    """Of one model."""

    total: float
    active: float
    """Those that each token is multiplied with."""


class Routed(NamedTuple):
    """The routed experts of one model, all layers together."""

    parameters: float
    share: float
    """Of a layer's experts, how many a token goes to."""


def count(config: Mapping[str, Any]) -> Parameters:
    """Parameters of a transformer with attention in every layer, with or without experts.

    Raises ValueError that names the key which is missing or makes no sense, or what cannot be counted.
    """
    text = text_config(config)
    if 0.0 in layer_shares(text, None):
        raise ValueError("config.json: layers without attention cannot be counted; give the number of parameters")
    layers = positive(text, "num_hidden_layers", "n_layer")
    hidden = positive(text, "hidden_size", "n_embd")
    tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings", True))
    embeddings = positive(text, "vocab_size") * hidden * (1 if tied else 2)
    every = embeddings + layers * _attention(text, hidden)
    sparse = _sparse_layers(text, layers)
    every += (layers - sparse) * (_feed_forward(text, hidden, _width(text, hidden)) if sparse < layers else 0)
    every += sparse * (hidden * _experts(text) + _shared(text, hidden))
    experts = routed(config)
    return Parameters(every + experts.parameters, every + experts.parameters * experts.share)


def routed(config: Mapping[str, Any]) -> Routed:
    """The experts of a model; none of a dense one. Raises ValueError that names the key which is missing or makes no sense."""
    text = text_config(config)
    experts = _experts(text)
    if not experts:
        return Routed(0.0, 1.0)
    hidden = positive(text, "hidden_size", "n_embd")
    expert = _feed_forward(text, hidden, positive(text, "moe_intermediate_size", "intermediate_size"))
    sparse = _sparse_layers(text, positive(text, "num_hidden_layers", "n_layer"))
    return Routed(sparse * experts * expert, min(1.0, positive(text, *_EXPERTS_PER_TOKEN) / experts))


def attention_width(config: Mapping[str, Any]) -> float:
    """What stands for the hidden size in attention's work of a prefill, 4 FLOP a layer, token pair and unit of it.

    Queries meet keys, and weights meet values: all heads' dimensions, which need not be the hidden size. With MLA, keys (with
    their rotary part) and values differ in size, and the mean of both counts. Raises ValueError.
    """
    text = text_config(config)
    heads = positive(text, "num_attention_heads", "n_head")
    if text.get("kv_lora_rank") is not None:
        key = positive(text, "qk_nope_head_dim") + positive(text, "qk_rope_head_dim")
        return heads * (key + positive(text, "v_head_dim")) / 2
    return heads * head_dim(text)


def _attention(text: Mapping[str, Any], hidden: int) -> float:
    heads = positive(text, "num_attention_heads", "n_head")
    if text.get("kv_lora_rank") is None:
        return 2 * hidden * head_dim(text) * (heads + kv_heads(text))
    latent, rope = positive(text, "kv_lora_rank"), positive(text, "qk_rope_head_dim")
    nope, value = positive(text, "qk_nope_head_dim"), positive(text, "v_head_dim")
    query = heads * (nope + rope)
    low_rank = None if text.get("q_lora_rank") is None else positive(text, "q_lora_rank")
    queries = hidden * query if low_rank is None else low_rank * (hidden + query)
    return queries + hidden * (latent + rope) + latent * heads * (nope + value) + heads * value * hidden


def _width(text: Mapping[str, Any], hidden: int) -> int:
    keys = ("intermediate_size", "ffn_hidden_size", "n_inner")
    return positive(text, *keys) if any(text.get(key) is not None for key in keys) else 4 * hidden


def _feed_forward(text: Mapping[str, Any], hidden: int, width: int) -> float:
    return (2 if text.get("model_type") in _TWO_MATRICES else 3) * hidden * width


def _shared(text: Mapping[str, Any], hidden: int) -> float:
    """Of experts that see every token."""
    if text.get("shared_expert_intermediate_size"):
        return _feed_forward(text, hidden, positive(text, "shared_expert_intermediate_size"))
    if text.get("n_shared_experts"):
        return _feed_forward(text, hidden, positive(text, "n_shared_experts") * positive(text, "moe_intermediate_size"))
    return 0.0


def _experts(text: Mapping[str, Any]) -> int:
    return next((positive(text, key) for key in _EXPERTS if text.get(key) is not None), 0)


def _sparse_layers(text: Mapping[str, Any], layers: int) -> int:
    """Layers with experts."""
    if not _experts(text):
        return 0
    if text.get("expert_layer_period") is not None:  # Jamba
        period, offset = positive(text, "expert_layer_period"), text.get("expert_layer_offset", 0)
        return sum(layer % period == offset for layer in range(layers))
    first = positive(text, "first_k_dense_replace") if text.get("first_k_dense_replace") else 0
    dense = text.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise ValueError(f"config.json: mlp_only_layers must be a list, not {dense!r}")
    step = 1
    for key in ("decoder_sparse_step", "moe_layer_freq", "interleave_moe_layer_step"):
        step = positive(text, key) if text.get(key) is not None else step
    return sum(layer >= first and layer not in dense and (layer + 1) % step == 0 for layer in range(layers))
