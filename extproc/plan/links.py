"""How fast a KV cache gets from one worker to another, over links that have a name.

``peak_bytes_a_s`` is what the standard says, one direction; ``efficiency`` is the share of it that a large transfer keeps, an
assumption where no source is named.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from extproc.plan.errors import PlanError, unknown


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


def _link(name: str, gb_a_s: float, efficiency: float, overhead_ms: float, shared: bool, source: str) -> Link:
    return Link(
        name=name,
        peak_bytes_a_s=gb_a_s * 1e9,
        efficiency=efficiency,
        overhead_s=overhead_ms / 1e3,
        shared=shared,
        source=source,
    )


_ALL = (
    _link("eth-10", 1.25, 0.94, 1.0, True, "IEEE 802.3ae; 94 % is TCP in frames of 1,500 bytes"),
    _link("eth-25", 3.125, 0.94, 1.0, True, "IEEE 802.3by; 94 % is TCP in frames of 1,500 bytes"),
    _link("eth-100", 12.5, 0.80, 1.0, True, "IEEE 802.3ba; 80 % with several TCP connections is an assumption"),
    _link("eth-400", 50, 0.50, 1.0, True, "IEEE 802.3bs; 50 % with many TCP connections is an assumption"),
    _link("tcp", 12.5, 0.28, 1.0, True, "one TCP connection of the kernel on 100 Gb/s: 3.5 GB/s, an assumption"),
    _link("roce-100", 12.5, 0.90, 0.2, False, "IEEE 802.3ba with RoCE v2, one port a GPU; 90 % is an assumption"),
    _link("roce-200", 25, 0.90, 0.2, False, "IEEE 802.3bs with RoCE v2, one port a GPU; 90 % is an assumption"),
    _link("roce-400", 50, 0.90, 0.2, False, "IEEE 802.3bs with RoCE v2, one port a GPU; 90 % is an assumption"),
    _link("ib-200", 25, 0.90, 0.2, False, "InfiniBand HDR, one port a GPU; 90 % is an assumption"),
    _link("ib-400", 50, 0.90, 0.2, False, "InfiniBand NDR, one port a GPU; 90 %, 45 GB/s, is what reports on NIXL take"),
    _link("pcie-staged", 31.5, 0.35, 1.0, False, "PCIe 4.0 x16 and host memory between: 11 GB/s as reports on NIXL say"),
    _link("pcie-4", 31.5, 0.80, 0.2, False, "PCIe 4.0 x16, GPU to GPU; 80 % is an assumption"),
    _link("pcie-5", 63, 0.80, 0.2, False, "PCIe 5.0 x16, GPU to GPU; 80 % is an assumption"),
    _link("nvlink-3", 300, 0.80, 0.1, False, "NVIDIA A100 data sheet: 600 GB/s both directions; 80 % is an assumption"),
    _link("nvlink-4", 450, 0.80, 0.1, False, "NVIDIA H100 data sheet: 900 GB/s both directions; 80 % is an assumption"),
    _link("nvlink-5", 900, 0.80, 0.1, False, "NVIDIA B200 data sheet: 1.8 TB/s both directions; 80 % is an assumption"),
)

LINKS: Mapping[str, Link] = {each.name: each for each in _ALL}


def link(name: str) -> Link:
    """The link of that name. Raises PlanError with the names that are known."""
    key = name.strip().lower().replace("_", "-")
    if key not in LINKS:
        raise unknown("the link", name, LINKS)
    return LINKS[key]
