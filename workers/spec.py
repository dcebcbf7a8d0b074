"""What one worker is: everything its command line and its environment are made from."""

from __future__ import annotations

from dataclasses import dataclass, field
from ssl import CERT_REQUIRED
from typing import Literal

Role = Literal["prefill", "decode"]
Device = Literal["cpu", "gpu"]
LoadFailure = Literal["fail", "recompute"]

_VLLM_RPC_PORT = 29550
"""Where rank 0 of a data-parallel group listens for the others, if nothing else is said."""


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """One worker. ``model`` must be the same string for all: it is part of what NIXL compares in the handshake.

    Where None is allowed and nothing else is said, it means what vLLM does by itself.
    """

    role: Role
    model: str
    port: int
    side_channel_port: int
    """Where the other side's NIXL connector asks for this worker's memory layout: data-parallel rank R listens on this port
    plus R. No two workers of a host share one."""
    served_model_name: str
    host: str = "127.0.0.1"
    """Where the HTTP server listens; without ``side_channel_host`` also what peers are told."""
    side_channel_host: str | None = None
    """The address that peers reach this worker by: never 0.0.0.0. None: ``host``."""
    local_model: bool = False
    """``model`` is a folder: nothing is fetched."""
    device: Device = "cpu"
    device_ids: tuple[int, ...] = ()
    """Which GPUs, by number. The others stay visible: two workers of a host copy from GPU to GPU only if each sees both."""
    block_size_tokens: int = 128
    """On a CPU a multiple of 32."""
    max_model_len_tokens: int | None = None
    """None: what the model says."""
    dtype: str | None = None
    """None: float32 on a CPU, the model's own on a GPU."""
    kv_cache_dtype: str | None = None
    quantization: str | None = None
    attention_backend: str | None = None

    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    """Engines of the whole group, on all nodes."""
    data_parallel_local: int | None = None
    """Engines of the group that this worker runs. None: all of them, or one where ``data_parallel_rank`` is given."""
    data_parallel_rank: int | None = None
    """The first rank that this worker runs. None: 0."""
    data_parallel_address: str | None = None
    """Where rank 0 of a group on several nodes is reached."""
    data_parallel_rpc_port: int | None = None
    expert_parallel: bool = False
    """Experts of a mixture are spread over all GPUs of the data-parallel group, instead of every expert being cut."""
    all2all_backend: str | None = None

    max_num_batched_tokens: int | None = None
    """Tokens of one step."""
    max_num_seqs: int | None = None
    max_num_queued_reqs: int | None = None
    """Requests that may be in the worker, waiting or running, over all its ranks; beyond that it answers 503."""
    max_num_queued_tokens: int | None = None
    """Prompt tokens that may wait for their prefill, over all its ranks; beyond that it answers 503."""
    gpu_memory_utilization: float | None = None
    prefix_caching: bool | None = None
    prefix_hash_algo: str | None = None
    hash_seed: int | None = None
    """``PYTHONHASHSEED``: where block hashes begin. The same for all workers whose events one router reads."""
    enforce_eager: bool = False
    """No CUDA graphs. A CPU worker never has any."""
    hybrid_kv_cache_manager: bool | None = None
    """A part of the handshake: both sides have it, or neither."""
    kv_cache_layout: str | None = None
    speculative: dict[str, object] | None = None
    """vLLM's ``--speculative-config``."""
    shutdown_timeout_s: int = 0
    """How long requests that run may go on after SIGTERM. 0: they are aborted at once."""

    kv_lease_s: int = 120
    """How long a prefill worker keeps blocks for a decode worker that has not come. vLLM does not detect a read after
    that, which gives wrong text, and the first transfer of a pair can take half a minute: longer than its 30 s."""
    kv_load_failure_policy: LoadFailure | None = None
    """What a decode worker does when it cannot pull blocks. None: vLLM's ``fail``."""
    bidirectional_kv_xfer: bool = False
    """A decode worker keeps its blocks after an answer, and a prefill worker reads them for the next turn: on both sides or on
    neither. The filter's ``handoff.next_turn`` uses them; nobody else should be there who does not."""
    decoder_kv_blocks_ttl_s: int | None = None
    """How long a decode worker keeps them where nobody reads them. None: vLLM's 480 s. Every answer to a handoff takes its room
    for so long, streamed ones above all, which nobody can read."""
    transfer_config: dict[str, object] | None = field(default=None)
    """A whole ``--kv-transfer-config`` in place of the one that is made from the other fields."""
    cache_server: str | None = None
    """``HOST:PORT`` of an LMCache server, which then is a second place that KV blocks are kept in and come from."""
    host_cache_gib: float | None = None
    """Prefill workers on GPUs: GiB of host memory behind the GPU cache, of all ranks that run here together. What the GPU drops
    is read back from there. None: no such tier."""
    kv_events_port: int | None = None
    """Rank R publishes what its prefix cache holds on this port plus R. None: no events."""
    kv_events_replay_port: int | None = None
    """Rank R answers for events that were missed on this port plus R."""
    kv_events_topic: str = ""

    ssl_certfile: str | None = None
    """PEM: certificate of the HTTP server, with its chain. None: plain HTTP. Goes with ``ssl_keyfile``."""
    ssl_keyfile: str | None = None
    ssl_ca_certs: str | None = None
    """PEM: authorities of clients' certificates. Given, every client must have one, our own readiness check included, which
    shows the worker's: that must be good for clients, too."""

    ucx_tls: str | None = None
    """Transports that UCX may use. None: on a CPU ``tcp,sm,self``, on a GPU what UCX finds best."""
    ucx_net_devices: str | None = None
    kv_cache_gib: int = 1
    """CPU only."""
    threads: int = 1
    """CPU only: OpenMP threads; as many as the worker will have cores."""
    dev_endpoints: bool = False
    """Serve vLLM's development endpoints (``/reset_prefix_cache`` among them). For tests."""
    env: tuple[tuple[str, str], ...] = ()
    """More variables; they win."""
    extra_args: tuple[str, ...] = ()
    """More arguments, after all others, so that they win."""

    @property
    def peer_host(self) -> str:
        """The address that peers are told."""
        return self.host if self.side_channel_host is None else self.side_channel_host

    @property
    def scheme(self) -> str:
        """`http` or `https`."""
        return "http" if self.ssl_certfile is None else "https"

    @property
    def ranks(self) -> range:
        """The data-parallel ranks that this worker runs."""
        first = self.data_parallel_rank or 0
        alone = 1 if self.data_parallel_rank is not None else self.data_parallel_size
        return range(first, first + (alone if self.data_parallel_local is None else self.data_parallel_local))

    @property
    def gpus(self) -> int:
        """How many GPUs it takes on this node; 0 on a CPU."""
        return 0 if self.device == "cpu" else self.tensor_parallel_size * len(self.ranks)


@dataclass(frozen=True)
class Command:
    """What to run: arguments, and the environment variables to set besides those inherited."""

    argv: tuple[str, ...]
    env: dict[str, str]


def ssl_flags(spec: WorkerSpec) -> tuple[str, ...]:
    """The engine's flags for HTTPS; none for plain HTTP. Raises ValueError."""
    if (spec.ssl_certfile is None) != (spec.ssl_keyfile is None):
        raise ValueError("ssl_certfile and ssl_keyfile: one without the other")
    if spec.ssl_certfile is None or spec.ssl_keyfile is None:
        if spec.ssl_ca_certs is not None:
            raise ValueError("ssl_ca_certs: goes with ssl_certfile; in plain HTTP no client shows a certificate")
        return ()
    flags: tuple[str, ...] = ("--ssl-certfile", spec.ssl_certfile, "--ssl-keyfile", spec.ssl_keyfile, "--enable-ssl-refresh")
    if spec.ssl_ca_certs is not None:
        flags += ("--ssl-ca-certs", spec.ssl_ca_certs, "--ssl-cert-reqs", str(int(CERT_REQUIRED)))
    return flags


def ports(spec: WorkerSpec) -> dict[int, str]:
    """Every port that the worker listens on here, and what for. Raises ValueError where two parts want the same one."""
    wanted = [(spec.port, "the HTTP server (port)")]
    for base, name in (
        (spec.side_channel_port, "side_channel_port"),
        (spec.kv_events_port, "kv_events_port"),
        (spec.kv_events_replay_port, "kv_events_replay_port"),
    ):
        if base is not None:
            wanted += [(base + rank, f"{name} {base}, rank {rank}") for rank in spec.ranks]
    if spec.data_parallel_size > 1 and spec.ranks.start == 0:
        rpc_port = _VLLM_RPC_PORT if spec.data_parallel_rpc_port is None else spec.data_parallel_rpc_port
        wanted.append((rpc_port, "the data-parallel group (data_parallel_rpc_port)"))
    taken: dict[int, str] = {}
    for port, purpose in wanted:
        if not 0 < port < 65536:
            raise ValueError(f"{purpose}: {port} is not a port")
        if port in taken:
            raise ValueError(f"{purpose} and {taken[port]} both need port {port}")
        taken[port] = purpose
    return taken
