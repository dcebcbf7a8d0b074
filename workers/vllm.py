"""The command line and the environment of one vLLM worker.

Pure: from a :class:`WorkerSpec` to a :class:`Command`; no process is started and nothing is looked up here. Whoever
starts the command adds ``Command.env`` to the environment it has.
"""

from __future__ import annotations

import json
import sys

from workers import host_cache
from workers.lmcache import WORKER_ENV, connector
from workers.spec import Command, Role, WorkerSpec, ports, ssl_flags

__all__ = ["Command", "Role", "WorkerSpec", "command", "transfer_config"]

_KV_ROLE = {"prefill": "kv_producer", "decode": "kv_consumer"}
_UNREACHABLE = ("0.0.0.0", "::", "localhost", "")  # noqa: S104  (refused, not bound)


def command(spec: WorkerSpec) -> Command:
    """The command of one worker. Raises ValueError for a spec that vLLM would start with and then fail on."""
    if spec.peer_host in _UNREACHABLE:
        name = "host" if spec.side_channel_host is None else "side_channel_host"
        raise ValueError(f"{name} {spec.peer_host!r}: peers are told it, so it must be the address they reach this worker by")
    ports(spec)
    if spec.device == "cpu" and spec.block_size_tokens % 32:
        raise ValueError(f"block_size_tokens {spec.block_size_tokens}: vLLM's CPU attention takes multiples of 32")
    _check_parallel(spec)
    return Command(_argv(spec), _env(spec))


def transfer_config(spec: WorkerSpec) -> dict[str, object]:
    """vLLM's ``--kv-transfer-config``: NIXL alone, or NIXL and then the LMCache server or host memory.

    Raises ValueError for a place behind the GPU cache that cannot be.
    """
    if spec.transfer_config is not None:
        return spec.transfer_config
    role = _KV_ROLE[spec.role]
    own: dict[str, object] = {"kv_lease_duration": spec.kv_lease_s}
    if spec.bidirectional_kv_xfer:
        own["bidirectional_kv_xfer"] = True
        if spec.decoder_kv_blocks_ttl_s is not None:
            own["decoder_kv_blocks_ttl"] = spec.decoder_kv_blocks_ttl_s
    nixl: dict[str, object] = {"kv_connector": "NixlConnector", "kv_role": role, "kv_connector_extra_config": own}
    whole = nixl
    behind = []
    if spec.host_cache_gib is not None:
        behind.append(host_cache.connector(spec))
    if spec.cache_server is not None:
        behind.append(connector(spec.cache_server, device=spec.device))
    if behind:
        # Blocks are loaded from the first child that has them. NIXL is first: a decode worker takes what was handed over.
        children = [nixl, *behind]
        whole = {"kv_connector": "MultiConnector", "kv_role": role, "kv_connector_extra_config": {"connectors": children}}
    policy = spec.kv_load_failure_policy
    reads = spec.cache_server is not None or spec.bidirectional_kv_xfer
    if policy is None and reads and spec.role == "prefill":
        # What a cache server or a decode worker that has gone cannot give is computed, which is this worker's work anyway.
        policy = "recompute"
    if policy is not None:
        whole["kv_load_failure_policy"] = policy  # vLLM reads it at the top only
    return whole


def _check_parallel(spec: WorkerSpec) -> None:
    """Raise ValueError for parallelism that does not add up."""
    for name in ("tensor_parallel_size", "data_parallel_size"):
        if getattr(spec, name) < 1:
            raise ValueError(f"{name}: at least 1")
    ranks = spec.ranks
    if not ranks or ranks.start < 0 or ranks.stop > spec.data_parallel_size:
        raise ValueError(
            f"data_parallel_rank and data_parallel_local: ranks {ranks.start} to {ranks.stop - 1} are not part of a group of "
            f"{spec.data_parallel_size} (data_parallel_size)"
        )
    if len(ranks) < spec.data_parallel_size and spec.data_parallel_rank is None:
        raise ValueError(
            f"data_parallel_rank: {len(ranks)} of {spec.data_parallel_size} ranks run here; which is the first of them?"
        )
    if len(ranks) < spec.data_parallel_size and spec.data_parallel_address is None:
        raise ValueError(
            f"data_parallel_address: {spec.data_parallel_size - len(ranks)} of the group's ranks run elsewhere; "
            "where is rank 0 reached?"
        )
    if spec.device_ids and len(spec.device_ids) != spec.gpus:
        raise ValueError(
            f"device_ids: {len(spec.device_ids)} are given, and {spec.gpus} are needed "
            f"(tensor_parallel_size {spec.tensor_parallel_size}, {len(ranks)} data-parallel ranks here)"
        )


def _argv(spec: WorkerSpec) -> tuple[str, ...]:
    if spec.device == "cpu":
        # Not the `vllm` command: that of the CPU build stops, as it looks for a distribution named "vllm".
        argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", spec.model]
    else:
        argv = ["vllm", "serve", spec.model]
    argv += ["--served-model-name", spec.served_model_name]
    argv += ["--host", spec.host, "--port", str(spec.port)]
    argv += ["--block-size", str(spec.block_size_tokens)]
    argv += ["--kv-transfer-config", json.dumps(transfer_config(spec))]
    argv += ["--enable-prompt-tokens-details"]
    argv += ["--disable-access-log-for-endpoints", "/health,/metrics"]
    argv += ssl_flags(spec)
    argv += _parallel(spec)
    argv += _given(
        ("--max-model-len", spec.max_model_len_tokens),
        ("--quantization", spec.quantization),
        # bfloat16 without AVX-512 BF16 or AMX is some fifty times slower.
        ("--dtype", "float32" if spec.dtype is None and spec.device == "cpu" else spec.dtype),
        ("--kv-cache-dtype", spec.kv_cache_dtype),
        ("--attention-backend", spec.attention_backend),
        ("--gpu-memory-utilization", spec.gpu_memory_utilization),
        ("--max-num-batched-tokens", spec.max_num_batched_tokens),
        ("--max-num-seqs", spec.max_num_seqs),
        ("--max-num-queued-reqs", spec.max_num_queued_reqs),
        ("--max-num-queued-tokens", spec.max_num_queued_tokens),
        ("--prefix-caching-hash-algo", spec.prefix_hash_algo),
        ("--shutdown-timeout", spec.shutdown_timeout_s or None),
    )
    if spec.enforce_eager or spec.device == "cpu":  # compiling for a CPU would need a C++ compiler
        argv += ["--enforce-eager"]
    if spec.prefix_caching is not None:
        argv += ["--enable-prefix-caching" if spec.prefix_caching else "--no-enable-prefix-caching"]
    if spec.hybrid_kv_cache_manager is not None:
        argv += [f"--{'no-' if spec.hybrid_kv_cache_manager else ''}disable-hybrid-kv-cache-manager"]
    if spec.speculative is not None:
        argv += ["--speculative-config", json.dumps(spec.speculative)]
    if spec.kv_events_port is not None:
        argv += ["--kv-events-config", json.dumps(_events(spec, spec.kv_events_port))]
    return (*argv, *spec.extra_args)


def _parallel(spec: WorkerSpec) -> list[str]:
    argv: list[str] = []
    if spec.tensor_parallel_size > 1:
        argv += ["--tensor-parallel-size", str(spec.tensor_parallel_size)]
    if spec.data_parallel_size > 1:
        argv += ["--data-parallel-size", str(spec.data_parallel_size)]
        ranks = spec.ranks
        if len(ranks) == spec.data_parallel_size:
            pass
        elif len(ranks) == 1:
            argv += ["--data-parallel-rank", str(ranks.start)]
        else:
            # Each node answers for its own ranks, so that every node is a worker of its own to the router.
            argv += ["--data-parallel-size-local", str(len(ranks)), "--data-parallel-start-rank", str(ranks.start)]
            argv += ["--data-parallel-hybrid-lb"]
        argv += _given(
            ("--data-parallel-address", spec.data_parallel_address),
            ("--data-parallel-rpc-port", spec.data_parallel_rpc_port),
        )
    if spec.expert_parallel:
        argv += ["--enable-expert-parallel"]
        argv += _given(("--all2all-backend", spec.all2all_backend))
    if spec.device_ids:
        argv += ["--device-ids", ",".join(map(str, spec.device_ids))]
    return argv


def _events(spec: WorkerSpec, port: int) -> dict[str, object]:
    # "*" with no address: vLLM binds where the endpoint has a wildcard, and connects where it has not.
    events: dict[str, object] = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{port}"}
    if spec.kv_events_replay_port is not None:
        events["replay_endpoint"] = f"tcp://*:{spec.kv_events_replay_port}"
    if spec.kv_events_topic:
        events["topic"] = spec.kv_events_topic
    return events


def _given(*options: tuple[str, object]) -> list[str]:
    return [part for flag, value in options if value is not None for part in (flag, str(value))]


def _env(spec: WorkerSpec) -> dict[str, str]:
    env = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": spec.peer_host,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(spec.side_channel_port),
        "VLLM_HOST_IP": spec.peer_host,
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if spec.local_model:
        env["HF_HUB_OFFLINE"] = "1"
    if spec.dev_endpoints:
        env["VLLM_SERVER_DEV_MODE"] = "1"
    if spec.hash_seed is not None:
        env["PYTHONHASHSEED"] = str(spec.hash_seed)
    if spec.kv_cache_layout is not None:
        env["VLLM_KV_CACHE_LAYOUT"] = spec.kv_cache_layout
    if spec.device == "cpu":
        env |= {
            "UCX_TLS": "tcp,sm,self",
            "VLLM_CPU_KVCACHE_SPACE": str(spec.kv_cache_gib),
            # vLLM's own binding gives every worker of the host the same cores; workers.cores does it afterwards.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(spec.threads),
        }
    if spec.cache_server is not None:
        env |= WORKER_ENV
    if spec.ucx_tls is not None:
        env["UCX_TLS"] = spec.ucx_tls
    if spec.ucx_net_devices is not None:
        env["UCX_NET_DEVICES"] = spec.ucx_net_devices
    return env | dict(spec.env)
