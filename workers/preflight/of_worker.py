"""The question that a worker's own settings ask."""

from __future__ import annotations

from workers.preflight.ask import Ask, Model
from workers.spec import WorkerSpec, ports


def ask_of(spec: WorkerSpec, *, model: Model | None = None, peer: str | None = None) -> Ask:
    """What to look at before this worker is started. Raises ValueError where two of its parts want one port."""
    own = (spec.port, spec.side_channel_port)
    return Ask(
        role=spec.role,
        device=spec.device,
        model=model,
        ucx_tls=spec.ucx_tls or ("tcp,sm,self" if spec.device == "cpu" else None),
        ucx_net_devices=spec.ucx_net_devices,
        side_channel_host=spec.peer_host,
        side_channel_port=spec.side_channel_port,
        port=spec.port,
        more_ports=tuple((port, what) for port, what in ports(spec).items() if port not in own),
        peer=peer,
        peer_side_channel_port=None if peer is None else spec.side_channel_port,
        tensor_parallel=spec.tensor_parallel_size,
        gpus=spec.gpus if spec.device == "gpu" else None,
        device_ids=spec.device_ids,
        block_size_tokens=spec.block_size_tokens,
        max_model_len_tokens=spec.max_model_len_tokens,
        kv_lease_s=spec.kv_lease_s,
        gpu_memory_utilization=spec.gpu_memory_utilization or 0.9,
        kv_cache_gib=spec.kv_cache_gib if spec.device == "cpu" else None,
        host_cache_gib=spec.host_cache_gib if spec.device == "gpu" else None,
    )
