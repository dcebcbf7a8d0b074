"""A profile: one model on one kind of machine, as a prefill and as a decode worker. From its file to a WorkerSpec.

Layers, the later one wins: what the role needs on every machine (``ROLE_DEFAULTS``), the profile's ``common`` part, its part
for the role, a named decode variant, the flags of the command line.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import msgspec

from workers import yaml_lines
from workers.lmcache import CacheSpec
from workers.model import served_name
from workers.spec import Device, LoadFailure, Role, WorkerSpec

DEFAULT_PROFILE = "default"
_SUFFIX = ".yaml"


class ProfileError(ValueError):
    """The profile cannot be used; the message says which file, line and field, and why."""


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A part of a profile."""


class Settings(_Section, frozen=True, kw_only=True):
    """What may be said for a role. Fields mean what they mean in :class:`WorkerSpec`; None: see the layer below."""

    port: int | None = None
    side_channel_port: int | None = None
    device_ids: tuple[int, ...] | None = None
    block_size_tokens: int | None = None
    max_model_len_tokens: int | None = None
    dtype: str | None = None
    kv_cache_dtype: str | None = None
    quantization: str | None = None
    attention_backend: str | None = None
    tensor_parallel_size: int | None = None
    data_parallel_size: int | None = None
    data_parallel_local: int | None = None
    data_parallel_rank: int | None = None
    data_parallel_address: str | None = None
    data_parallel_rpc_port: int | None = None
    expert_parallel: bool | None = None
    all2all_backend: str | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    gpu_memory_utilization: float | None = None
    prefix_caching: bool | None = None
    prefix_hash_algo: str | None = None
    hash_seed: int | None = None
    enforce_eager: bool | None = None
    hybrid_kv_cache_manager: bool | None = None
    kv_cache_layout: str | None = None
    speculative: dict[str, Any] | None = None
    shutdown_timeout_s: int | None = None
    kv_lease_s: int | None = None
    kv_load_failure_policy: LoadFailure | None = None
    bidirectional_kv_xfer: bool | None = None
    decoder_kv_blocks_ttl_s: int | None = None
    transfer_config: dict[str, Any] | None = None
    kv_events_port: int | None = None
    """0: no events."""
    kv_events_replay_port: int | None = None
    """0: events that were missed are not sent again."""
    kv_events_topic: str | None = None
    ucx_tls: str | None = None
    ucx_net_devices: str | None = None
    host_cache_gib: float | None = None
    """In a profile's ``prefill`` part. 0: none, where a layer below has one."""
    kv_cache_gib: int | None = None
    env: dict[str, str] | None = None
    """More variables. Not for secrets: those come from the environment or from files."""
    extra_args: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        sizes = ("block_size_tokens", "max_num_batched_tokens", "max_num_seqs", "max_model_len_tokens")
        for name in ("kv_lease_s", "decoder_kv_blocks_ttl_s", *sizes):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: at least 1")
        if self.host_cache_gib is not None and not (math.isfinite(self.host_cache_gib) and self.host_cache_gib >= 0):
            raise ValueError(f"host_cache_gib: {self.host_cache_gib:g} is not a number of GiB")
        share = self.gpu_memory_utilization
        if share is not None and not 0 < share <= 1:
            raise ValueError(f"gpu_memory_utilization: {share:g} is not a share between 0 and 1")


class Hardware(_Section, frozen=True, kw_only=True):
    """The machine that the numbers are for."""

    gpu: str
    memory_gb: float
    """Of one GPU, in 10^9 bytes, as its maker states it."""
    gpus_per_node: int = 8


class ModelFacts(_Section, frozen=True, kw_only=True):
    """What the memory arithmetic needs to know of a model. GB are 10^9 bytes."""

    weights_gb: float
    """As they lie in GPU memory: after quantisation."""
    experts_gb: float = 0.0
    """Of these, routed experts, which expert parallelism spreads."""
    layers: int
    """Those with a KV cache that grows with the prompt."""
    kv_heads: int = 1
    head_dim: int
    """With multi-head latent attention: the latent vector and the rotary part of a token, together."""
    mla: bool = False
    """Multi-head latent attention: one vector a token and layer, whole on every tensor-parallel rank."""
    hybrid: bool = False
    """Has layers of more than one kind (sliding window, state space), so that KV blocks come in groups."""
    overhead_gb: float = 5.0
    """Of each GPU, for activations, CUDA graphs and communication buffers. An assumption; vLLM measures it at its start."""


class Link(_Section, frozen=True, kw_only=True):
    """What carries KV blocks from prefill to decode workers."""

    kind: str
    gb_per_s: float | None = None
    """Of one GPU, in one direction, in 10^9 bytes a second, as its maker states it."""


class Profile(_Section, frozen=True, kw_only=True):
    """One model on one kind of machine."""

    title: str
    model: str = ""
    """A Hugging Face name or a folder: the same string on every worker. Empty: the command line must say."""
    served_model_name: str | None = None
    """The model's name in requests. None: the model's own, or the last part of its path."""
    device: Device = "gpu"
    vllm_version: str
    """That the flags are for. Both sides of a handoff must run exactly the same version."""
    sources: tuple[str, ...]
    """Where the numbers come from."""
    not_run_here: tuple[str, ...] = ()
    """What nobody has run who wrote this. Empty: all of it was run."""
    hardware: Hardware | None = None
    facts: ModelFacts | None = None
    link: Link | None = None
    cache: CacheSpec | None = None
    """An LMCache server beside each prefill worker: what it keeps where."""
    common: Settings = Settings()
    prefill: Settings = Settings()
    decode: Settings = Settings()
    decode_variants: dict[str, Settings] = {}
    """More ways to run decode workers: name -> what differs from ``decode``."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError("sources: say where the numbers come from")
        for name in self.decode_variants:
            if name in ("prefill", "decode"):
                raise ValueError(f"decode_variants: {name!r} is a role, not the name of a variant")


ROLE_DEFAULTS: dict[Role, Settings] = {
    "prefill": Settings(
        port=8100,
        side_channel_port=5600,
        kv_events_port=5560,
        kv_events_replay_port=5520,
        prefix_caching=True,
        prefix_hash_algo="sha256_cbor",
        hash_seed=0,
        shutdown_timeout_s=60,
    ),
    "decode": Settings(
        port=8200,
        side_channel_port=5640,
        kv_events_port=5580,
        kv_events_replay_port=5540,
        # Blocks that are here already need not be pulled again, and the router hears of them.
        prefix_caching=True,
        prefix_hash_algo="sha256_cbor",
        hash_seed=0,
        shutdown_timeout_s=60,
        # The filter makes one decode attempt for a handoff, so `fail` is a 500 to the client. What recomputing costs, a prompt
        # on a decode worker, is bounded by its max_num_batched_tokens in every step.
        kv_load_failure_policy="recompute",
    ),
}
"""What a role needs whatever the model and the machine. Ports differ, so that one host can have a worker of each."""


def builtin_names() -> list[str]:
    """The profiles that come with Baton, in order."""
    return sorted(entry.name.removesuffix(_SUFFIX) for entry in _folder().iterdir() if entry.name.endswith(_SUFFIX))


def load_profile(name: str) -> Profile:
    """A profile that comes with Baton, or one in a file (a path that ends in .yaml or .yml, or has a ``/``).

    Raises ProfileError.
    """
    if "/" in name or name.endswith((_SUFFIX, ".yml")):
        source = name
        file: Traversable = Path(name).expanduser()
    else:
        if name not in builtin_names():
            raise ProfileError(
                f"no profile {name!r}; there are {', '.join(builtin_names())}, or name a file that ends in .yaml"
            )
        source = f"profile {name}"
        file = _folder() / f"{name}{_SUFFIX}"
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"{name}: {error}") from error
    try:
        return yaml_lines.decode(text, Profile, source=source)
    except yaml_lines.FaultError as error:
        raise ProfileError(str(error)) from error


def role_of(name: str) -> tuple[Role, str | None]:
    """``prefill``, ``decode`` or a decode variant -> the role, and the variant's name."""
    if name == "prefill":
        return "prefill", None
    return "decode", None if name == "decode" else name


def worker_spec(
    profile: Profile,
    role: Role,
    variant: str | None = None,
    changes: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> WorkerSpec:
    """The worker that a profile means; ``changes`` are WorkerSpec's own fields, and None in them changes nothing.

    ``defaults`` are such fields too, for what no layer says.

    ``env`` and ``extra_args`` of all layers add up. Raises ProfileError for a variant that is not there, or without a model.
    """
    layers = [ROLE_DEFAULTS[role], profile.common, profile.prefill if role == "prefill" else profile.decode]
    if variant is not None:
        if role != "decode" or variant not in profile.decode_variants:
            known = ", ".join(profile.decode_variants) or "none"
            raise ProfileError(f"no decode variant {variant!r} in this profile; there are: {known}")
        layers.append(profile.decode_variants[variant])
    values: dict[str, Any] = dict(defaults or {})
    env: dict[str, str] = {}
    extra_args: tuple[str, ...] = ()
    for layer in layers:
        values |= dict(_given(layer))
        env |= layer.env or {}
        extra_args += layer.extra_args or ()
    values |= {name: value for name, value in (changes or {}).items() if value is not None}
    env |= dict(values.pop("env", ()))
    extra_args += tuple(values.pop("extra_args", ()))
    model = str(values.pop("model", profile.model))
    if not model:
        raise ProfileError("which model? This profile names none: --model")
    served = values.pop("served_model_name", None) or profile.served_model_name or served_name(model)
    values.setdefault("device", profile.device)
    for name in ("kv_events_port", "kv_events_replay_port", "host_cache_gib"):
        values[name] = values.get(name) or None
    return WorkerSpec(role=role, model=model, served_model_name=served, env=tuple(env.items()), extra_args=extra_args, **values)


def _given(settings: Settings) -> Iterator[tuple[str, Any]]:
    for name in settings.__struct_fields__:
        value = getattr(settings, name)
        if value is not None and name not in ("env", "extra_args"):
            yield name, value


def _folder() -> Traversable:
    return resources.files("workers") / "profiles"
