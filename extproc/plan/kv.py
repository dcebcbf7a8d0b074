"""``baton plan kv``: how large the KV cache of a prompt is, and how long it takes from worker to worker. Arithmetic only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from extproc.plan.errors import PlanError
from extproc.plan.links import Link
from extproc.plan.shapes import config_of, kv_bytes, kv_copies
from extproc.routing.kv_size import head_dim, kv_heads, layer_shares, own_dtype, positive, text_config

_FOREVER_TOKENS = 1 << 62
_MOST_TOKENS = 10**12


class Handoff(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt over one link."""

    link: str
    bytes_a_s: float
    """That the worker's ports reach together."""
    move_s: float
    """The bytes alone."""
    handoff_s: float
    """With what each transfer costs beside its bytes."""


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """The KV cache of one prompt in one format."""

    tokens: int
    kv_dtype: str
    bytes_per_token: float
    """Mean over the prompt; layers with a window keep less of a long one."""
    size_bytes: float
    gb: float
    """10^9 bytes."""
    gib: float
    """2^30 bytes."""
    mixed_gb: float
    """Units of 10^6 KiB, 1,024,000,000 bytes, which many published tables call GB."""
    moved_bytes: float
    """Over the link: several GPUs may need the same KV."""
    handoffs: list[Handoff]


class KvPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What ``baton plan kv`` prints."""

    model: str
    attention: str
    gpus: int
    windows: bool
    """Whether some layers keep a window only."""
    prompts: list[Prompt]


def plan_kv(model: str, *, tokens: Sequence[int], kv_dtypes: Sequence[str], links: Sequence[Link], gpus: int = 1) -> KvPlan:
    """Sizes and times for each length and format. ``gpus``: of the worker that receives. Raises PlanError."""
    name, config = config_of(model)
    for each in tokens:
        if not 1 <= each <= _MOST_TOKENS:
            raise PlanError(f"tokens of a prompt: at least 1 and at most {_MOST_TOKENS:,}, not {each:,}")
    copies = kv_copies(name, config, gpus)
    formats = [_own_dtype(name, config) if each == "auto" else each for each in kv_dtypes]
    prompts = []
    for count in tokens:
        for kv_dtype in formats:
            each_bytes = kv_bytes(name, config, kv_dtype, count)
            size_bytes = each_bytes * count
            prompts.append(
                Prompt(
                    tokens=count,
                    kv_dtype=kv_dtype,
                    bytes_per_token=each_bytes,
                    size_bytes=size_bytes,
                    gb=size_bytes / 1e9,
                    gib=size_bytes / 2**30,
                    mixed_gb=size_bytes / 1024e6,
                    moved_bytes=size_bytes * copies,
                    handoffs=[_handoff(link, size_bytes * copies, gpus) for link in links],
                )
            )
    attention, windows = attention_of(name, config)
    return KvPlan(model=name, attention=attention, gpus=gpus, windows=windows, prompts=prompts)


def attention_of(name: str, config: Mapping[str, Any]) -> tuple[str, bool]:
    """In words what a model keeps of its prompt, and whether some layers keep a window only. Raises PlanError."""
    try:
        text = text_config(config)
        kept, in_long = layer_shares(text, None), layer_shares(text, _FOREVER_TOKENS)
        layers = positive(text, "num_hidden_layers", "n_layer")
        full = sum(share == 1 for share in in_long)
        windowed = sum(before == 1 > after for before, after in zip(kept, in_long, strict=True))
        what = _heads(text)
    except ValueError as error:
        raise PlanError(f"{name}: {error}") from None
    parts = [(full, "full attention"), (windowed, "a window"), (layers - full - windowed, "no KV cache of their own")]
    kinds = [(number, kind) for number, kind in parts if number]
    if len(kinds) == 1:
        return f"{layers} layers with {kinds[0][1]}; {what}", windowed > 0
    listed = ", ".join(f"{number} with {kind}" for number, kind in kinds)
    return f"{layers} layers: {listed}; {what}", windowed > 0


def _own_dtype(name: str, config: Mapping[str, Any]) -> str:
    try:
        return own_dtype(config)
    except ValueError as error:
        raise PlanError(f"{name}: {error}") from None


def _heads(text: Mapping[str, Any]) -> str:
    if text.get("kv_lora_rank") is not None:
        latent, rope = positive(text, "kv_lora_rank"), positive(text, "qk_rope_head_dim")
        return f"multi-head latent attention (MLA): one vector of {latent} + {rope} for keys and values of all heads"
    heads, queries = kv_heads(text), positive(text, "num_attention_heads", "n_head")
    kind = "multi-query" if heads == 1 else "multi-head" if heads == queries else "grouped-query"
    return f"{kind} attention: {heads} of {queries} heads have keys and values, {head_dim(text)} numbers each"


def _handoff(link: Link, size_bytes: float, gpus: int) -> Handoff:
    bytes_a_s = link.worker_bytes_a_s(gpus)
    return Handoff(
        link=link.name, bytes_a_s=bytes_a_s, move_s=size_bytes / bytes_a_s, handoff_s=link.transfer_s(size_bytes, gpus)
    )
