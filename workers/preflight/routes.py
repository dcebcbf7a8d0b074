"""Which way the KV blocks will go, and how fast. Pure."""

from __future__ import annotations

import math
from enum import Enum

from workers.preflight import numbers
from workers.preflight.ask import Ask
from workers.preflight.facts import Facts, RdmaPort
from workers.preflight.findings import Measurement, Route
from workers.preflight.identity import on_one_host
from workers.preflight.transports import CUDA, RDMA, SHARED_MEMORY, Wanted, device_patterns, matches

_DMABUF_KERNEL = (5, 12)
_UNKNOWN_GBIT_PER_S = 100.0
"""An RDMA port that does not say its rate."""


class Direct(Enum):
    """Whether the NIC can read GPU memory itself."""

    PEERMEM = "nvidia_peermem"
    DMABUF = "DMA-BUF"
    MAYBE = "DMA-BUF, perhaps"
    """Kernel and driver can; nothing here says whether UCX does."""
    NO = "no"


def wanted(facts: Facts, ask: Ask) -> Wanted:
    """What UCX_TLS will say."""
    return Wanted(ask.ucx_tls or facts.env.get("UCX_TLS") or "all")


def net_devices(facts: Facts, ask: Ask) -> tuple[str, ...]:
    """What UCX_NET_DEVICES will say; empty: all."""
    return device_patterns(ask.ucx_net_devices or facts.env.get("UCX_NET_DEVICES") or "all")


def available(facts: Facts) -> frozenset[str] | None:
    """Transports of the UCX that counts; None: no UCX was found."""
    found = facts.nixl_ucx
    return None if found is None else found.transports


def usable_ports(facts: Facts, ask: Ask) -> tuple[RdmaPort, ...]:
    """RDMA ports that are active and that UCX may use, fastest first."""
    patterns = net_devices(facts, ask)
    ports = (port for port in facts.rdma if port.active and matches(port.name, patterns))
    return tuple(sorted(ports, key=lambda port: -port.rate_gbit_per_s))


def rdma_wanted(facts: Facts, ask: Ask) -> bool:
    """UCX_TLS lets RDMA be used."""
    return any(wanted(facts, ask).allows(transport) for transport in RDMA)


def rdma_works(facts: Facts, ask: Ask) -> bool:
    """An active port, a transport that is asked for, and a UCX that has it (or none that could be asked)."""
    there = available(facts)
    has = there is None or bool(wanted(facts, ask).allowed(there) & RDMA)
    return has and rdma_wanted(facts, ask) and bool(usable_ports(facts, ask))


def direct(facts: Facts) -> Direct:
    """By a peer memory module, or by DMA-BUF: a kernel from 5.12 on, the open driver, and a UCX that exports it."""
    if facts.modules & {"nvidia_peermem", "nv_peer_mem"}:
        return Direct.PEERMEM
    if facts.kernel is None or facts.kernel < _DMABUF_KERNEL or not facts.open_driver:
        return Direct.NO
    told = [build.dmabuf for build in facts.ucx if build.dmabuf is not None]
    if not told:
        return Direct.MAYBE
    return Direct.DMABUF if any(told) else Direct.NO


def kind_of(port: RdmaPort) -> str:
    """RoCE, InfiniBand, or RDMA of another kind (EFA)."""
    return "RoCE" if port.roce else "InfiniBand" if port.link_layer == "InfiniBand" else "RDMA"


def rails_bytes_per_s(facts: Facts, ask: Ask) -> float:
    """All NICs that the worker's GPUs can use at once: one a GPU at most."""
    ports = usable_ports(facts, ask)[: ask.tensor_parallel]
    return sum(port.rate_gbit_per_s or _UNKNOWN_GBIT_PER_S for port in ports) * 1e9 / 8


def staged_bytes_per_s(ask: Ask) -> float:
    """What host staging gives all GPUs of the worker together."""
    return numbers.STAGED_BYTES_PER_S * ask.tensor_parallel


def isolated_pids(facts: Facts, ask: Ask) -> bool | None:
    """The peer on this host is in another process namespace; None: cannot be told."""
    peer = ask.peer_identity
    if peer is not None and peer.pid_namespace and facts.pid_namespace:
        return peer.pid_namespace != facts.pid_namespace
    # On the host itself the peer's processes are visible, whatever they run in; but UCX compares namespaces.
    return None


def route_of(facts: Facts, ask: Ask, measurement: Measurement | None) -> Route:
    """Measured before stated before derived."""
    name, bytes_per_s, source = _derived(facts, ask)
    if measurement is not None:
        rails = max(1, len(usable_ports(facts, ask)[: ask.tensor_parallel])) if rdma_works(facts, ask) else 1
        each = f" on one of {rails} NICs" if rails > 1 else ""
        return Route(name=name, bytes_per_s=measurement.bytes_per_s * rails, source=f"measured with {measurement.tool}{each}")
    if ask.bandwidth_bytes_per_s is not None:
        return Route(name=name, bytes_per_s=ask.bandwidth_bytes_per_s, source="stated")
    return Route(name=name, bytes_per_s=bytes_per_s, source=source)


def _derived(facts: Facts, ask: Ask) -> tuple[str, float, str]:
    there = available(facts)
    allowed = wanted(facts, ask).allowed(there if there is not None else RDMA | CUDA | SHARED_MEMORY | {"tcp"})
    same_host = on_one_host(facts, ask)
    if same_host and not isolated_pids(facts, ask):
        if ask.device == "gpu" and "cuda_ipc" in allowed:
            return "cuda_ipc", numbers.NVLINK_GUESS_BYTES_PER_S, "a guess for NVLink"
        if ask.device == "cpu" and allowed & SHARED_MEMORY:
            return "shared memory", numbers.STAGED_BYTES_PER_S, "a guess"
    if rdma_works(facts, ask):
        rails = rails_bytes_per_s(facts, ask)
        kind = kind_of(usable_ports(facts, ask)[0])
        if ask.device == "gpu" and direct(facts) is Direct.NO:
            return f"{kind} through host memory", min(rails, staged_bytes_per_s(ask)), "what host staging commonly gives"
        return kind, rails, "rate of the links"
    patterns = net_devices(facts, ask)
    speeds = [device.mbit_per_s for device in facts.net if device.up and device.mbit_per_s and matches(device.name, patterns)]
    if speeds and not same_host:
        return "TCP", min(max(speeds) * 1e6 / 8, numbers.STAGED_BYTES_PER_S), "rate of the link, which TCP seldom reaches"
    return "TCP", numbers.TCP_GUESS_BYTES_PER_S, "a guess"


def slowdown(facts: Facts, ask: Ask) -> float:
    """How many times slower host staging is than what the NICs could do."""
    staged = min(rails_bytes_per_s(facts, ask), staged_bytes_per_s(ask))
    return rails_bytes_per_s(facts, ask) / staged if staged else math.nan
