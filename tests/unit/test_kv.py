"""The size of a token's KV cache comes from the model's own description."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from extproc.config import ConfigError, parse
from extproc.kv import routing_of

WORKERS = "workers: {prefill: ['127.0.0.1:1'], decode: ['127.0.0.1:2']}\n"
LLAMA_70B = {
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}


def test_a_model_s_config_says_how_much_a_handoff_moves(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_70B))
    config = parse(f"{WORKERS}models: {{configs: {{llama: '{path}'}}}}\nrouting: {{kv_bytes_by_model: {{other: 5}}}}\n")
    assert routing_of(config).kv_bytes_by_model == {"other": 5, "llama": 327_680}
    halved = parse(f"{WORKERS}models: {{configs: {{llama: '{path}'}}, kv_dtype: fp8}}\n")
    assert routing_of(halved).kv_bytes_by_model == {"llama": 163_840}


@pytest.mark.parametrize(
    ("text", "why"), [(None, "No such file"), ("[", "expected `object`"), ('{"num_hidden_layers": 80}', "config.json")]
)
def test_a_config_that_says_too_little_is_refused_by_name(tmp_path: Path, text: str | None, why: str) -> None:
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    config = parse(f"{WORKERS}models: {{configs: {{llama: '{path}'}}}}\n")
    with pytest.raises(ConfigError, match=r"models\.configs\.llama") as refused:
        routing_of(config)
    assert why.lower() in str(refused.value).lower()
