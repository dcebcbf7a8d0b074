"""How fast a KV cache gets from one worker to another, over links that have a name.

``peak_bytes_a_s`` is what the standard says, one direction; ``efficiency`` is the share of it that a large transfer keeps, an
assumption where no source is named.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from extproc.plan.errors import PlanError, unknown

_OVERHEAD_S = 0.002
"""Of each transfer, on any link: the engine's own work. An assumption, the one of :class:`workers.sim.timing.Profile`."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """One way from worker to worker."""

    name: str
    peak_bytes_a_s: float
    """Of one port, one direction."""
    efficiency: float
    overhead_s: float
    """Once a transfer: asking for the blocks, posting the reads, the notification."""
    shared: bool
    """True: one port for the whole worker. False: each GPU has its own, and a worker with more GPUs moves more."""
    source: str

    @property
    def bytes_a_s(self) -> float:
        """Of one port, what a large transfer reaches."""
        return self.peak_bytes_a_s * self.efficiency

    def worker_bytes_a_s(self, gpus: int) -> float:
        """What a worker of ``gpus`` GPUs reaches. Raises PlanError."""
        if gpus < 1:
            raise PlanError(f"GPUs of a worker: at least 1, not {gpus}")
        return self.bytes_a_s * (1 if self.shared else gpus)

    def transfer_s(self, size_bytes: float, gpus: int = 1) -> float:
        """Moving ``size_bytes`` to a worker of ``gpus`` GPUs, with nothing else on the link. Raises PlanError."""
        return self.overhead_s + size_bytes / self.worker_bytes_a_s(gpus)


def _link(name: str, gb_a_s: float, efficiency: float, shared: bool, source: str) -> Link:
    return Link(
        name=name,
        peak_bytes_a_s=gb_a_s * 1e9,
        efficiency=efficiency,
        overhead_s=_OVERHEAD_S,
        shared=shared,
        source=source,
    )


_TCP = "TCP in frames of 1,500 bytes leaves 94 % of the wire (1,448 of 1,538 bytes)"
_ROCE = "Mooncake reports 87 GB/s on four 200 Gb/s ports with RoCE"
_ROCE_400 = "87 % as at 200 Gb/s is an assumption: Mooncake reports 190 GB/s on eight ports, 24 GB/s each"
_GUESS = "is an assumption"

_ALL = (
    _link("eth-10", 1.25, 0.94, True, f"IEEE 802.3ae; {_TCP}"),
    _link("eth-25", 3.125, 0.94, True, f"IEEE 802.3by; {_TCP}"),
    _link(
        "eth-100",
        12.5,
        0.72,
        True,
        "IEEE 802.3bm; TCP at 9 GB/s a port: Mooncake reports RoCE as 2.4 times that fast, on 200 Gb/s ports",
    ),
    _link("eth-400", 50, 0.40, True, f"IEEE 802.3bs; 20 GB/s by many TCP connections {_GUESS}"),
    _link("tcp", 12.5, 0.28, True, f"one TCP connection on 100 Gb/s Ethernet; 28 Gb/s {_GUESS}"),
    _link("tcp-fallback", 12.5, 0.047, True, "UCX that found no RDMA: 0.59 GB/s, openucx/ucx#10854; vllm#52607 has 0.5"),
    _link("roce-100", 12.5, 0.87, False, f"RoCE v2, a port for each GPU; {_ROCE}"),
    _link("roce-200", 25, 0.87, False, f"RoCE v2, a port for each GPU; {_ROCE}"),
    _link("roce-400", 50, 0.87, False, f"RoCE v2, a port for each GPU; {_ROCE_400}"),
    _link("ib-200", 25, 0.90, False, f"InfiniBand HDR, a port for each GPU; 90 % {_GUESS}"),
    _link("ib-400", 50, 0.90, False, "InfiniBand NDR, a port for each GPU; 45 GB/s is what guides to P/D take"),
    _link("pcie-staged", 31.5, 0.35, False, "PCIe 4.0 x16 and host memory between: 11 GB/s a GPU, what guides to P/D take"),
    _link("pcie-4", 31.5, 0.82, False, "PCIe 4.0 x16, GPU to GPU: p2pBandwidthLatencyTest, 25.9 GB/s is common"),
    _link("pcie-5", 63, 0.78, False, "PCIe 5.0 x16, GPU to GPU: 49 GB/s, vllm#52607"),
    _link("nvlink-3", 300, 0.80, False, f"NVIDIA A100 data sheet, 600 GB/s both ways; 80 % {_GUESS}"),
    _link("nvlink-4", 450, 0.80, False, f"NVIDIA H100 data sheet, 900 GB/s both ways; 80 % {_GUESS}"),
    _link("nvlink-5", 900, 0.80, False, f"NVIDIA B200 data sheet, 1.8 TB/s both ways; 80 % {_GUESS}"),
)
LINKS: Mapping[str, Link] = {each.name: each for each in _ALL}


def link(name: str) -> Link:
    """The link of that name. Raises PlanError with the names that are known."""
    key = name.strip().lower().replace("_", "-")
    if key not in LINKS:
        raise unknown("the link", name, LINKS)
    return LINKS[key]
