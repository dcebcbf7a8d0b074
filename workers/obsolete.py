"""What published guides still show and vLLM 0.32 refuses, ignores or means differently: translated with a note, or refused.

Pure. Every sentence says what replaced the old thing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from workers.spec import Role

_KV_ROLE = {"prefill": "kv_producer", "decode": "kv_consumer"}

CONNECTORS = frozenset(
    """DecodeBenchConnector ExampleConnector ExampleHiddenStatesConnector FlexKVConnectorV1 HF3FSKVConnector HiSparseConnector
    LMCacheConnectorV1 LMCacheMPConnector MoRIIOConnector MooncakeConnector MooncakeStoreConnector MultiConnector NixlConnector
    NixlPullConnector NixlPushConnector OffloadingConnector SimpleCPUOffloadConnector""".split()
)
"""Those that vLLM 0.32 has."""

TRANSFER_KEYS = frozenset(
    """kv_connector engine_id kv_buffer_device kv_role kv_port kv_connector_extra_config kv_connector_module_path
    enable_permute_local_kv kv_load_failure_policy""".split()
)
"""Those of ``--kv-transfer-config`` in vLLM 0.32."""

_PEERS_COME_WITH_THE_REQUEST = "each request's kv_transfer_params say which worker has its blocks"
DROPPED_KEYS = {
    "kv_rank": f"vLLM refuses it: workers have no ranks among each other any more; {_PEERS_COME_WITH_THE_REQUEST}",
    "kv_parallel_size": f"vLLM refuses it: any number of workers can join; {_PEERS_COME_WITH_THE_REQUEST}",
    "kv_buffer_size": "vLLM refuses it: NIXL reads the KV cache itself, there is no buffer of its own to size",
    "kv_ip": "vLLM refuses it: VLLM_NIXL_SIDE_CHANNEL_HOST replaced it, which --side-channel-host sets",
    "kv_port": "NIXL does not read it: VLLM_NIXL_SIDE_CHANNEL_PORT replaced it, which --side-channel-port sets",
}
"""Keys of ``--kv-transfer-config`` that are left out, and why."""

_DROPPED_EXTRA = {
    "enable_cross_layers_blocks": "vLLM 0.32 does not read it",
    "kv_abort_request_timeout": "kv_lease_duration replaced it",
}
"""The same inside ``kv_connector_extra_config``."""

_NIXL = "NixlConnector replaced it: leave --kv-transfer-config away, and the role makes the right one"
GONE_CONNECTORS = {
    "PyNcclConnector": _NIXL,
    "PyNcclPipeConnector": _NIXL,
    "P2pNcclConnector": _NIXL,
    "MooncakePipeConnector": "MooncakeConnector, or NixlConnector, replaced it",
    "SharedStorageConnector": "ExampleConnector is its new name, and an example is what it is; for real work NixlConnector",
    "LMCacheConnector": "LMCacheMPConnector replaced it: name the cache server with --cache-server",
    "DynamoNixlConnector": _NIXL,
}
"""Connectors that are no longer there, and what took their place."""

DROPPED_FLAGS = {
    "--disable-log-requests": (0, "it is vLLM's default now; --enable-log-requests is the opposite"),
    "--use-v2-block-manager": (0, "there is no other block manager"),
    "--num-scheduler-steps": (1, "multi-step scheduling went with the V0 engine; --async-scheduling does its work"),
    "--multi-step-stream-outputs": (0, "multi-step scheduling went with the V0 engine"),
    "--swap-space": (1, "preempted requests are computed again, never swapped"),
    "--preemption-mode": (1, "preempted requests are always computed again"),
    "--scheduler-delay-factor": (1, "the V1 scheduler has no such delay"),
    "--num-lookahead-slots": (1, "--speculative-config says it"),
    "--worker-use-ray": (0, "--distributed-executor-backend ray replaced it"),
    "--engine-use-ray": (0, "--distributed-executor-backend ray replaced it"),
    "--disable-frontend-multiprocessing": (0, "the API server and the engine are always processes of their own"),
    "--enable-reasoning": (0, "--reasoning-parser alone is enough"),
    "--calculate-kv-scales": (0, "scales of an fp8 KV cache come with the checkpoint, or are 1"),
    "--device": (1, "the build of vLLM says it; --device before the -- chooses the build's needs"),
}
"""Arguments that vLLM 0.32 does not know and that can be left out: how many values follow, and why."""

RENAMED_FLAGS = {
    "--max-seq-len-to-capture": "--max-model-len bounds it, and --max-cudagraph-capture-size the batch",
    "--cuda-graph-sizes": "--cudagraph-capture-sizes replaced it",
    "--full-cuda-graph": '--compilation-config \'{"cudagraph_mode": "FULL"}\' replaced it',
    "--guided-decoding-backend": "--structured-outputs-config '{\"backend\": …}' replaced it",
    "--speculative-model": '--speculative-config \'{"model": …, "num_speculative_tokens": …}\' replaced it',
    "--num-speculative-tokens": '--speculative-config \'{"model": …, "num_speculative_tokens": …}\' replaced it',
    "--task": "--runner and --convert replaced it",
    "--rope-scaling": "--hf-overrides '{\"rope_parameters\": …}' replaced it",
    "--rope-theta": "--hf-overrides '{\"rope_parameters\": …}' replaced it",
    "--num-redundant-experts": "--eplb-config '{\"num_redundant_experts\": …}' replaced it",
    "--max-num-partial-prefills": "vLLM 0.32 has no such limit; --long-prefill-token-threshold comes nearest",
    "--max-long-partial-prefills": "vLLM 0.32 has no such limit; --long-prefill-token-threshold comes nearest",
}
"""Arguments that vLLM 0.32 does not know and whose replacement needs a value that only the user has: refused."""


class ObsoleteError(ValueError):
    """Something that today's vLLM would refuse and that cannot be translated; the message says what replaced it."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What the inherited environment means for a worker."""

    unset: tuple[str, ...] = ()
    """Variables that the engine must not see."""
    lease_s: int | None = None
    """A lease that an old variable asked for."""
    attention_backend: str | None = None
    notes: tuple[str, ...] = field(default=())


def check_environment(environ: Mapping[str, str], *, cache_server: bool = False) -> Environment:
    """Look for variables that have gone. Raises ObsoleteError."""
    unset, notes = [], []
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        settings = [part.strip().lower() for part in environ.get(name, "").split(",")]
        if "expandable_segments:true" in settings:
            raise ObsoleteError(
                f"{name}={environ[name]}: expandable segments let PyTorch move the KV cache to other memory pages after "
                "NIXL has registered it, and transfers then fail or read the wrong pages; unset it (vLLM refuses it under the "
                "name PYTORCH_CUDA_ALLOC_CONF, and does not look at PYTORCH_ALLOC_CONF)"
            )
    if environ.get("VLLM_USE_V1", "1").strip().lower() in ("0", "false"):
        raise ObsoleteError(f"VLLM_USE_V1={environ['VLLM_USE_V1']}: the V0 engine has gone, there is only V1; unset it")
    if "VLLM_USE_V1" in environ:
        unset.append("VLLM_USE_V1")
        notes.append("VLLM_USE_V1 is left out: there is only V1")
    lease_s = None
    if (value := environ.get("VLLM_NIXL_ABORT_REQUEST_TIMEOUT")) is not None:
        if not value.isdecimal() or int(value) < 1:
            raise ObsoleteError(f"VLLM_NIXL_ABORT_REQUEST_TIMEOUT={value}: not seconds; use --lease, which replaced it")
        lease_s = int(value)
        unset.append("VLLM_NIXL_ABORT_REQUEST_TIMEOUT")
        notes.append(
            f"VLLM_NIXL_ABORT_REQUEST_TIMEOUT={value} is read as a lease of {value} s: kv_lease_duration replaced it, which "
            "--lease sets, and decode workers renew it while they wait"
        )
    backend = environ.get("VLLM_ATTENTION_BACKEND")
    if backend is not None:
        unset.append("VLLM_ATTENTION_BACKEND")
        notes.append(
            f"VLLM_ATTENTION_BACKEND={backend} becomes --attention-backend {backend}: vLLM no longer reads the variable"
        )
    if cache_server:
        ours = ("LMCACHE_TRACK_USAGE",)
        unread = sorted(name for name in environ if name.startswith("LMCACHE_") and name not in ours)
        if unread:
            notes.append(
                f"{', '.join(unread)}: not read by LMCache's connector to a cache server; its settings belong to the server "
                "(baton cache-server)"
            )
    return Environment(unset=tuple(unset), lease_s=lease_s, attention_backend=backend, notes=tuple(notes))


def check_arguments(arguments: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Arguments for vLLM -> those that it knows, and notes on what was left out. Raises ObsoleteError."""
    kept: list[str] = []
    notes: list[str] = []
    index = 0
    while index < len(arguments):
        argument = arguments[index]
        flag, _, inline = argument.partition("=")
        flag = "--" + flag[2:].replace("_", "-") if flag.startswith("--") else flag
        index += 1
        if flag in RENAMED_FLAGS:
            raise ObsoleteError(f"{flag}: vLLM 0.32 does not know it; {RENAMED_FLAGS[flag]}")
        if flag in DROPPED_FLAGS:
            values, why = DROPPED_FLAGS[flag]
            if not inline:
                index += values
            notes.append(f"{flag} is left out: {why}")
            continue
        kept.append(argument)
    return tuple(kept), tuple(notes)


def check_transfer_config(text: str, role: Role, *, lease_s: int) -> tuple[dict[str, Any], tuple[str, ...]]:
    """A ``--kv-transfer-config`` that somebody has -> the one that vLLM 0.32 takes for this role, and notes on what changed.

    A NIXL connector without a lease gets ``lease_s``. Raises ObsoleteError.
    """
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ObsoleteError(f"--kv-transfer-config is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ObsoleteError("--kv-transfer-config: a JSON object is needed")
    notes: list[str] = []
    made = _connector(config, role, lease_s, notes, where="--kv-transfer-config")
    if made.get("kv_connector") == "MultiConnector":
        _children(made, role, lease_s, notes)
    return made, tuple(notes)


def _children(config: dict[str, Any], role: Role, lease_s: int, notes: list[str]) -> None:
    extra = config["kv_connector_extra_config"]
    children = extra.get("connectors")
    if not isinstance(children, list) or not children or not all(isinstance(child, dict) for child in children):
        raise ObsoleteError(
            "--kv-transfer-config: MultiConnector needs kv_connector_extra_config.connectors, a list of objects"
        )
    made = []
    for index, child in enumerate(children):
        where = f"--kv-transfer-config: connectors[{index}]"
        child = _connector(child, role, lease_s, notes, where=where)
        if child.pop("engine_id", None) is not None:
            notes.append(f"{where}: engine_id is left out: vLLM gives all children the one of the MultiConnector")
        policy = child.pop("kv_load_failure_policy", None)
        if policy is not None:
            config.setdefault("kv_load_failure_policy", policy)
            notes.append(f"{where}: kv_load_failure_policy moves to the MultiConnector: vLLM reads it nowhere else")
        made.append(child)
    config["kv_connector_extra_config"] = {**extra, "connectors": made}


def _connector(given: Mapping[str, Any], role: Role, lease_s: int, notes: list[str], *, where: str) -> dict[str, Any]:
    config = dict(given)
    for key in [key for key in config if key in DROPPED_KEYS]:
        del config[key]
        notes.append(f"{where}: {key} is left out; {DROPPED_KEYS[key]}")
    unknown = sorted(config.keys() - TRANSFER_KEYS)
    if unknown:
        raise ObsoleteError(f"{where}: vLLM 0.32 refuses {', '.join(unknown)}; it takes {', '.join(sorted(TRANSFER_KEYS))}")
    name = config.get("kv_connector")
    if not isinstance(name, str):
        raise ObsoleteError(f"{where}: kv_connector is missing")
    if name in GONE_CONNECTORS:
        raise ObsoleteError(f"{where}: {name} has gone; {GONE_CONNECTORS[name]}")
    if name not in CONNECTORS and "kv_connector_module_path" not in config:
        raise ObsoleteError(
            f"{where}: vLLM 0.32 has no {name}; it has {', '.join(sorted(CONNECTORS))}, and others by kv_connector_module_path"
        )
    _give_role(config, name, role, notes, where)
    extra = config.get("kv_connector_extra_config", {})
    if not isinstance(extra, dict):
        raise ObsoleteError(f"{where}: kv_connector_extra_config must be an object")
    extra = dict(extra)
    for key in [key for key in extra if key in _DROPPED_EXTRA]:
        del extra[key]
        notes.append(f"{where}: {key} is left out: {_DROPPED_EXTRA[key]}")
    if name.startswith("Nixl") and "kv_lease_duration" not in extra:
        extra["kv_lease_duration"] = lease_s
        notes.append(f"{where}: kv_lease_duration {lease_s} is added; vLLM's own 30 s are less than a first transfer can take")
    if extra or name == "MultiConnector":
        config["kv_connector_extra_config"] = extra
    return config


def _give_role(config: dict[str, Any], name: str, role: Role, notes: list[str], where: str) -> None:
    ours, theirs = _KV_ROLE[role], config.get("kv_role")
    if name.startswith("Nixl") or name == "MultiConnector":
        if theirs in (None, "kv_both"):
            config["kv_role"] = ours
            why = "vLLM refuses a connector without a role" if theirs is None else "kv_both is deprecated for NIXL"
            notes.append(f"{where}: kv_role is {ours}, from --role: {why}")
        elif theirs != ours:
            raise ObsoleteError(f"{where}: kv_role {theirs} and --role {role} disagree: a {role} worker is {ours}")
    elif theirs is None:
        config["kv_role"] = "kv_both"
        notes.append(f"{where}: kv_role is kv_both for {name}: vLLM refuses a connector without a role")
