"""KV bytes of a token, against what is published about well-known models."""

from __future__ import annotations

import pytest

from extproc.routing.kv_size import kv_bytes_per_token

LLAMA_70B = {
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
LLAMA_8B = {**LLAMA_70B, "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "head_dim": 128}
DEEPSEEK_V3 = {
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16",
}
GPT_OSS = {
    "head_dim": 64,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "sliding_window": 128,
    "torch_dtype": "bfloat16",
}
QWEN3_NEXT = {
    "full_attention_interval": 4,
    "head_dim": 256,
    "num_attention_heads": 16,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "dtype": "bfloat16",
}
FALCON_40B = {  # has new_decoder_architecture: eight heads, whatever multi_query says
    "hidden_size": 8192,
    "multi_query": True,
    "new_decoder_architecture": True,
    "num_attention_heads": 128,
    "num_hidden_layers": 60,
    "num_kv_heads": 8,
    "torch_dtype": "bfloat16",
}
GEMMA_2_9B = {
    "model_type": "gemma2",
    "head_dim": 256,
    "num_attention_heads": 16,
    "num_hidden_layers": 42,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "torch_dtype": "bfloat16",
}
MINIMAX_TEXT_01 = {
    "attn_type_list": [0, 0, 0, 0, 0, 0, 0, 1] * 10,
    "head_dim": 128,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
GPT2 = {"n_embd": 768, "n_head": 12, "n_layer": 12, "torch_dtype": "float32"}


@pytest.mark.parametrize(
    ("config", "kv_dtype", "expected"),
    [
        (LLAMA_70B, "auto", 327_680),
        (LLAMA_70B, "fp8", 163_840),
        (LLAMA_70B, "fp8_e4m3", 163_840),
        (LLAMA_8B, "auto", 131_072),
        (LLAMA_8B, "bfloat16", 131_072),
        ({**LLAMA_8B, "torch_dtype": "float32"}, "auto", 262_144),
        ({**LLAMA_8B, "torch_dtype": None, "dtype": "torch.float16"}, "auto", 131_072),
        (DEEPSEEK_V3, "auto", 70_272),
        (DEEPSEEK_V3, "fp8", 35_136),
        (GPT2, "auto", 2 * 12 * 768 * 4),
        (FALCON_40B, "auto", 2 * 60 * 8 * 64 * 2),
        (MINIMAX_TEXT_01, "auto", 2 * 10 * 8 * 128 * 2),
        ({**LLAMA_8B, "num_key_value_heads": None}, "auto", 4 * 131_072),
        ({**LLAMA_8B, "num_key_value_heads": None, "multi_query": True}, "auto", 131_072 / 8),
        ({"text_config": LLAMA_8B, "vision_config": {"num_hidden_layers": 24}}, "auto", 131_072),
        ({"torch_dtype": "bfloat16", "thinker_config": {"text_config": {**LLAMA_8B, "torch_dtype": None}}}, "auto", 131_072),
    ],
)
def test_the_published_value(config, kv_dtype, expected) -> None:
    assert kv_bytes_per_token(config, kv_dtype=kv_dtype) == expected


def test_a_windowed_layer_counts_up_to_its_window_only() -> None:
    full_layer = 2 * 8 * 64 * 2
    assert kv_bytes_per_token(GPT_OSS) == 36 * full_layer
    assert kv_bytes_per_token(GPT_OSS, context_tokens=64) == 36 * full_layer
    assert kv_bytes_per_token(GPT_OSS, context_tokens=1280) == pytest.approx(18 * full_layer * 1.1)


def test_a_window_of_the_whole_model_counts_for_every_layer_unless_it_is_off() -> None:
    config = {**LLAMA_8B, "sliding_window": 4096}
    assert kv_bytes_per_token(config, context_tokens=8192) == 131_072 / 2
    assert kv_bytes_per_token({**config, "use_sliding_window": False}, context_tokens=8192) == 131_072


def test_layers_with_a_state_of_one_size_count_nothing() -> None:
    assert kv_bytes_per_token(QWEN3_NEXT) == 12 * 2 * 2 * 256 * 2
    named = {**QWEN3_NEXT, "layer_types": ["linear_attention"] * 47 + ["full_attention"], "full_attention_interval": None}
    assert kv_bytes_per_token(named) == 2 * 2 * 256 * 2
    jamba = {**LLAMA_8B, "attn_layer_period": 8, "attn_layer_offset": 4}
    assert kv_bytes_per_token(jamba) == 131_072 / 8
    nemotron = {**LLAMA_8B, "hybrid_override_pattern": "M-M*" * 8}
    assert kv_bytes_per_token(nemotron) == 131_072 / 4
    kimi = {**LLAMA_8B, "linear_attn_config": {"full_attn_layers": [4, 8, 32], "kda_layers": []}}
    assert kv_bytes_per_token(kimi) == 131_072 * 3 / 32


def test_layers_that_read_the_cache_of_others_count_nothing() -> None:
    assert kv_bytes_per_token({**LLAMA_8B, "num_kv_shared_layers": 8}) == 131_072 * 24 / 32


def test_every_sixth_layer_sees_everything() -> None:
    gemma = {**LLAMA_8B, "num_hidden_layers": 12, "sliding_window_pattern": 6, "sliding_window": 1024}
    layer = 131_072 / 32
    assert kv_bytes_per_token(gemma, context_tokens=10_240) == pytest.approx(2 * layer + 10 * layer / 10)


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_attention_heads", "hidden_size"])
def test_what_is_missing_is_named(key) -> None:
    config = {name: value for name, value in LLAMA_70B.items() if name != key}
    with pytest.raises(ValueError, match=key):
        kv_bytes_per_token(config)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"torch_dtype": None}, "torch_dtype or dtype"),
        ({"torch_dtype": "int3"}, "int3"),
        ({"num_hidden_layers": "80"}, "num_hidden_layers"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": True}, "num_key_value_heads"),
        ({"hidden_size": 8191}, "head_dim"),
        ({"kv_lora_rank": 512}, "qk_rope_head_dim"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["of the future"] * 80}, "of the future"),
        ({"layer_types": ["sliding_attention"] * 80}, "sliding_window"),
    ],
)
def test_what_makes_no_sense_is_named(change, named) -> None:
    with pytest.raises(ValueError, match=named):
        kv_bytes_per_token({**LLAMA_70B, **change})


def test_an_empty_config_is_refused() -> None:
    with pytest.raises(ValueError, match="num_hidden_layers"):
        kv_bytes_per_token({}, kv_dtype="fp8")


def test_every_second_layer_of_gemma_2_sees_its_window_only() -> None:
    a_layer = 2 * 8 * 256 * 2
    assert kv_bytes_per_token(GEMMA_2_9B) == 42 * a_layer
    assert kv_bytes_per_token(GEMMA_2_9B, context_tokens=8192) == (21 + 21 / 2) * a_layer
