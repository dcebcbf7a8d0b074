"""What a node is like, as plain data: gathered by :mod:`workers.preflight.gather`, judged by the checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class RdmaPort:
    """One port of an RDMA device."""

    device: str
    number: int
    state: str
    """ACTIVE, INIT, ARMED or DOWN."""
    physical: str
    """LinkUp, Disabled, Polling …"""
    link_layer: str
    """InfiniBand or Ethernet (RoCE)."""
    rate_gbit_per_s: float
    """0: it does not say."""
    netdev: str | None
    numa_node: int | None
    pfc: tuple[bool, ...] | None
    """Priority flow control of the priorities 0 to 7; None: cannot be told."""
    ecn: bool | None
    """Congestion notification of any priority; None: cannot be told."""
    lost: int | None
    """Packets that came out of order or not at all, since the driver was loaded."""

    @property
    def name(self) -> str:
        """As UCX_NET_DEVICES has it."""
        return f"{self.device}:{self.number}"

    @property
    def active(self) -> bool:
        """It carries traffic."""
        return self.state == "ACTIVE"

    @property
    def roce(self) -> bool:
        """RDMA over Ethernet."""
        return self.link_layer == "Ethernet"


@dataclass(frozen=True, kw_only=True)
class NetDevice:
    """A network interface."""

    name: str
    up: bool
    mbit_per_s: int | None
    mtu: int | None


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU that nvidia-smi shows."""

    index: int
    name: str
    uuid: str
    total_bytes: int
    used_bytes: int
    driver: str
    numa_node: int | None


@dataclass(frozen=True, kw_only=True)
class Listener:
    """A TCP port that somebody listens on."""

    address: str
    port: int
    owner: str | None
    """Process id and name, where they can be seen."""


@dataclass(frozen=True, kw_only=True)
class Ucx:
    """A UCX that is installed here."""

    source: str
    """ucx_info, or the NIXL package it is bundled with."""
    version: str
    transports: frozenset[str]
    """Their own names (rc_mlx5), no aliases (rc)."""
    dmabuf: bool | None
    """It can export GPU memory as DMA-BUF; None: cannot be told."""


@dataclass(frozen=True, kw_only=True)
class Dial:
    """How an attempt to connect to the peer ended."""

    target: str
    outcome: str
    """connected, refused, timed out, unknown host, or the error."""
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Facts:
    """One node."""

    env: Mapping[str, str] = field(default_factory=dict)
    """Only the variables that matter here."""
    hostname: str = ""
    boot_id: str = ""
    kernel: tuple[int, int] | None = None
    modules: frozenset[str] = frozenset()
    pid_namespace: str = ""
    container: bool = False
    memlock_bytes: float | None = None
    """inf: no limit."""
    nofile: float | None = None
    shm_bytes: int | None = None
    memory_bytes: int | None = None
    """What processes here may have: the machine's, or the cgroup's limit."""
    available_bytes: int | None = None
    cores: float = 0.0
    """What processes here may use: affinity, and the cgroup's quota."""
    cpu_flags: frozenset[str] = frozenset()
    rdma: tuple[RdmaPort, ...] = ()
    verbs_nodes: int = 0
    """/dev/infiniband/uverbs*."""
    net: tuple[NetDevice, ...] = ()
    addresses: frozenset[str] = frozenset()
    listeners: tuple[Listener, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    nvidia_smi: str | None = None
    """Why nvidia-smi gave no list; None: it gave one."""
    open_driver: bool = False
    """The driver is the open kernel module, which DMA-BUF needs."""
    ucx: tuple[Ucx, ...] = ()
    """That of the NIXL package first: it is the one vLLM uses."""
    nixl: str = ""
    """Version of the Python package; empty: not installed."""
    vllm: str = ""
    dials: tuple[Dial, ...] = ()
    peer_addresses: frozenset[str] = frozenset()

    @property
    def nixl_ucx(self) -> Ucx | None:
        """The UCX that matters: NIXL's own, else whatever there is."""
        return self.ucx[0] if self.ucx else None
