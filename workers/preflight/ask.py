"""What a preflight is asked: the worker that is to be started, and its peer."""

from __future__ import annotations

from typing import Literal

import msgspec

from workers.preflight.findings import Identity


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """What of a model decides about memory and handoffs."""

    name: str
    kv_bytes_per_token: float
    """All layers, before tensor parallelism."""
    layers: int
    kv_heads: int
    """Over how many GPUs the KV cache can be divided; 1 with multi-head latent attention, which every GPU holds whole."""
    weights_bytes: float | None = None
    weights_source: str = ""
    max_tokens: int | None = None
    """Longest context that the model states."""


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """The worker. What is None is taken from the environment, or not checked."""

    role: Literal["prefill", "decode"] | None = None
    device: Literal["gpu", "cpu"] = "gpu"
    model: Model | None = None
    ucx_tls: str | None = None
    """UCX_TLS. None: the environment's, else all."""
    ucx_net_devices: str | None = None
    """UCX_NET_DEVICES. None: the environment's, else all."""
    side_channel_host: str | None = None
    side_channel_port: int | None = None
    port: int | None = None
    """The worker's HTTP port."""
    peer: str | None = None
    """Address or name of the other node."""
    peer_side_channel_port: int | None = None
    peer_same_host: bool = False
    """The peer is another process or container of this host."""
    peer_identity: Identity | None = None
    """What the peer said of itself, from a measurement or its own report."""
    more_ports: tuple[tuple[int, str], ...] = ()
    """Further ports that the worker listens on, and what for."""
    tensor_parallel: int = 1
    gpus: int | None = None
    """GPUs that the worker takes on this node. None: as many as its tensor parallelism."""
    device_ids: tuple[int, ...] = ()
    """Which of the visible GPUs it takes. Empty: the first ones."""
    block_size_tokens: int = 128
    max_model_len_tokens: int | None = None
    kv_lease_s: float = 120.0
    gpu_memory_utilization: float = 0.9
    kv_cache_gib: float | None = None
    """CPU only: what the KV cache will take."""
    host_cache_gib: float | None = None
    """GPU only: what the tier in host memory behind the GPU cache will take. None: there is none."""
    bandwidth_bytes_per_s: float | None = None
    """Bandwidth to the peer, where it is known."""

    @property
    def needed_gpus(self) -> int:
        """GPUs that the worker takes on this node."""
        return self.gpus if self.gpus is not None else max(self.tensor_parallel, len(self.device_ids))

    def __post_init__(self) -> None:
        """Raises ValueError that begins with the field."""
        for field in ("side_channel_port", "port", "peer_side_channel_port"):
            value = getattr(self, field)
            if value is not None and not 1 <= value <= 65535:
                raise ValueError(f"{field}: a port is 1 to 65535, not {value}")
        for field in ("tensor_parallel", "block_size_tokens", "max_model_len_tokens", "kv_lease_s", "bandwidth_bytes_per_s"):
            value = getattr(self, field)
            if value is not None and not value > 0:
                raise ValueError(f"{field}: must be more than 0, not {value}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization: a share from 0 to 1, not {self.gpu_memory_utilization}")
