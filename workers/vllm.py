"""The command line and the environment of one vLLM worker.

Pure: from a :class:`WorkerSpec` to a :class:`Command`; no process is started and nothing is looked up here. Whoever
starts the command adds ``Command.env`` to the environment it has.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Literal

Role = Literal["prefill", "decode"]

_KV_ROLE = {"prefill": "kv_producer", "decode": "kv_consumer"}


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """One worker. ``model`` must be the same string for all: it is part of what NIXL compares in the handshake."""

    role: Role
    model: str
    port: int
    side_channel_port: int
    """Where the other side's NIXL connector asks for this worker's memory layout. One port a worker on a host."""
    served_model_name: str
    host: str = "127.0.0.1"
    """Also what the worker advertises to its peers, so an address that they can reach: never 0.0.0.0."""
    local_model: bool = False
    """``model`` is a folder: nothing is fetched."""
    device: Literal["cpu", "gpu"] = "cpu"
    block_size_tokens: int = 128
    """On a CPU a multiple of 32."""
    max_model_len_tokens: int | None = None
    """None: what the model says."""
    kv_lease_s: int = 120
    """How long a prefill worker keeps blocks for a decode worker that has not come. vLLM does not detect a read after
    that, which gives wrong text, and the first transfer of a pair can take half a minute: longer than its 30 s."""
    kv_cache_gib: int = 1
    """CPU only."""
    threads: int = 1
    """CPU only: OpenMP threads; as many as the worker will have cores."""
    dev_endpoints: bool = False
    """Serve vLLM's development endpoints (``/reset_prefix_cache`` among them). For tests."""
    extra_args: tuple[str, ...] = ()


@dataclass(frozen=True)
class Command:
    """What to run: arguments, and the environment variables to set besides those inherited."""

    argv: tuple[str, ...]
    env: dict[str, str]


def command(spec: WorkerSpec) -> Command:
    """The command of one worker. Raises ValueError for a spec that vLLM would start with and then fail on."""
    if spec.host in ("0.0.0.0", "::", "localhost"):  # noqa: S104  (refused, not bound)
        raise ValueError(f"host {spec.host!r}: peers are told it, so it must be the address they reach this worker by")
    if spec.port == spec.side_channel_port:
        raise ValueError(f"port and side_channel_port are both {spec.port}")
    if spec.device == "cpu" and spec.block_size_tokens % 32:
        raise ValueError(f"block_size_tokens {spec.block_size_tokens}: vLLM's CPU attention takes multiples of 32")
    return Command(_argv(spec), _env(spec))


def _argv(spec: WorkerSpec) -> tuple[str, ...]:
    transfer = {
        "kv_connector": "NixlConnector",
        "kv_role": _KV_ROLE[spec.role],
        "kv_connector_extra_config": {"kv_lease_duration": spec.kv_lease_s},
    }
    # Not the `vllm` command: that of the CPU build stops, as it looks for a distribution named "vllm".
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", spec.model]
    argv += ["--served-model-name", spec.served_model_name]
    argv += ["--host", spec.host, "--port", str(spec.port)]
    argv += ["--block-size", str(spec.block_size_tokens)]
    argv += ["--kv-transfer-config", json.dumps(transfer)]
    argv += ["--enable-prompt-tokens-details"]
    argv += ["--disable-access-log-for-endpoints", "/health,/metrics"]
    if spec.max_model_len_tokens is not None:
        argv += ["--max-model-len", str(spec.max_model_len_tokens)]
    if spec.device == "cpu":
        # bfloat16 without AVX-512 BF16 or AMX is some fifty times slower; compiling would need a C++ compiler.
        argv += ["--dtype", "float32", "--enforce-eager"]
    return (*argv, *spec.extra_args)


def _env(spec: WorkerSpec) -> dict[str, str]:
    env = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": spec.host,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(spec.side_channel_port),
        "VLLM_HOST_IP": spec.host,
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if spec.local_model:
        env["HF_HUB_OFFLINE"] = "1"
    if spec.dev_endpoints:
        env["VLLM_SERVER_DEV_MODE"] = "1"
    if spec.device == "cpu":
        env |= {
            "UCX_TLS": "tcp,sm,self",
            "VLLM_CPU_KVCACHE_SPACE": str(spec.kv_cache_gib),
            # vLLM's own binding gives every worker of the host the same cores; workers.cores does it afterwards.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(spec.threads),
        }
    return env
