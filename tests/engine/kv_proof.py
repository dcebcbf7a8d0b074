"""What a worker says about the KV blocks it pulled and the tokens it computed, and what it must say for a given prompt.

The proof is exact: a decode worker that got a prompt's KV from elsewhere has transferred so many bytes and computed no token
of it. Anything less is not a handoff, whatever the text looks like.
"""

from __future__ import annotations

import json
import math
import time
import urllib.request
from dataclasses import dataclass, fields
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

BLOCK_SIZE_TOKENS = 32
"""The least that vLLM's CPU attention takes, so that a prompt of several blocks is cheap."""

_FLOAT32_BYTES = 4


@dataclass(frozen=True)
class KvUse:
    """Counters of one worker; the difference of two of them is what the requests in between did."""

    transfers: int = 0
    transferred_bytes: int = 0
    computed_tokens: int = 0
    """Prompt tokens that the worker prefilled itself."""
    cached_tokens: int = 0
    """Prompt tokens found in its own prefix cache."""
    external_tokens: int = 0
    """Prompt tokens whose KV came from another worker."""

    def __sub__(self, other: KvUse) -> KvUse:
        return KvUse(*(getattr(self, field.name) - getattr(other, field.name) for field in fields(self)))

    @property
    def prompt_tokens(self) -> int:
        return self.computed_tokens + self.cached_tokens + self.external_tokens


def kv_use(url: str) -> KvUse:
    """Read a worker's counters."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as reply:
        text = reply.read().decode()
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name + (f"/{sample.labels['source']}" if "source" in sample.labels else "")
            totals[name] = totals.get(name, 0.0) + sample.value
    sources = "vllm:prompt_tokens_by_source_total"
    # This family is there from the start: a renamed one must not read as zero.
    computed = totals[f"{sources}/local_compute"]
    return KvUse(
        transfers=int(totals.get("vllm:nixl_bytes_transferred_count", 0)),
        transferred_bytes=int(totals.get("vllm:nixl_bytes_transferred_sum", 0)),
        computed_tokens=int(computed),
        cached_tokens=int(totals[f"{sources}/local_cache_hit"]),
        external_tokens=int(totals[f"{sources}/external_kv_transfer"]),
    )


def kv_use_since(url: str, before: KvUse, *, prompt_tokens: int) -> KvUse:
    """What happened since, once ``prompt_tokens`` have been counted: a worker counts just after it has answered."""
    deadline = time.monotonic() + 10.0
    while True:
        use = kv_use(url) - before
        if use.prompt_tokens >= prompt_tokens or time.monotonic() > deadline:
            return use
        time.sleep(0.05)


def block_bytes(model: Path) -> int:
    """The size of one block of KV of this model in float32, from its shape: keys and values of every layer and KV head."""
    shape = json.loads((model / "config.json").read_text())
    per_token = shape["num_hidden_layers"] * 2 * shape["num_key_value_heads"] * shape["head_dim"]
    return int(per_token * _FLOAT32_BYTES * BLOCK_SIZE_TOKENS)


def blocks(tokens: int) -> int:
    """How many blocks hold so many tokens."""
    return math.ceil(tokens / BLOCK_SIZE_TOKENS)


def assert_kv_moved(use: KvUse, *, prompt_tokens: int, block_size_bytes: int, cached_tokens: int = 0) -> None:
    """A decode worker served one prompt from blocks that it pulled, but for those in its cache, and prefilled nothing.

    It does run the last token, for the logits that the first new token is drawn from; vLLM counts that as transferred.
    """
    missing_blocks = blocks(prompt_tokens) - blocks(cached_tokens)
    expected = KvUse(
        transfers=1,
        transferred_bytes=missing_blocks * block_size_bytes,
        computed_tokens=0,
        cached_tokens=cached_tokens,
        external_tokens=prompt_tokens - cached_tokens,
    )
    assert use == expected, f"{use} is not {expected}"
