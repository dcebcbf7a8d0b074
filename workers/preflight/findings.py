"""What a preflight says: findings, and the report that holds them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec


class Severity(StrEnum):
    """How bad a finding is. In this order."""

    OK = "ok"
    INFO = "info"
    WARN = "warn"
    """It works, but slower or with a risk that is named."""
    ERROR = "error"
    """It does not start, fails on the first transfer, or silently takes a path three times slower than the hardware's."""

    @property
    def rank(self) -> int:
        """0 for OK up to 3 for ERROR."""
        return list(Severity).index(self)


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at."""

    id: str
    """Stable; docs/preflight.md lists all of them."""
    severity: Severity
    found: str
    """What is the case here."""
    why: str = ""
    """Why it matters, in numbers where there are some."""
    fix: str = ""
    """What to do about it."""


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """The way KV blocks will go between this worker and a peer."""

    name: str
    bytes_per_s: float
    source: str
    """Where the bandwidth comes from: measured, stated, the link's rate, or a guess."""


class Handoff(msgspec.Struct, frozen=True, kw_only=True):
    """What handing over the KV cache of one prompt takes."""

    tokens: int
    size_bytes: float
    route_s: float
    """On the route that was found here."""
    staged_s: float
    """If it goes through host memory."""
    direct_s: float
    """If the NIC reads GPU memory itself at 400 Gb/s."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """Transfers of one size."""

    size_bytes: int
    """Bytes of one transfer, all descriptors together."""
    descriptors: int
    median_s: float
    best_bytes_per_s: float
    transfers: int


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured between this node and a peer."""

    peer: str
    tool: str
    """nixl or ucx_perftest."""
    memory: str
    """dram or cuda."""
    block_bytes: int
    """Bytes of one descriptor."""
    first_transfer_s: float
    """Connection set-up included."""
    latency_s: float
    """Median of a transfer of one block."""
    samples: tuple[Sample, ...]

    @property
    def bytes_per_s(self) -> float:
        """The median bandwidth of the largest size: smaller ones may come out of the processor's cache."""
        return self.samples[-1].size_bytes / self.samples[-1].median_s


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What a peer has to know of a node to tell whether the two fit."""

    hostname: str = ""
    boot_id: str = ""
    """The same on two sides: they are on one host."""
    pid_namespace: str = ""
    gpu_uuids: tuple[str, ...] = ()
    """All that are visible."""
    used_gpu_uuids: tuple[str, ...] = ()
    """Those that its worker would use."""
    driver: str = ""
    ucx: str = ""
    """Version of the UCX that NIXL loads."""
    nixl: str = ""
    vllm: str = ""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How it went with the peer."""

    measurement: Measurement | None = None
    identity: Identity | None = None
    """Of the peer."""
    reached_side_channel: str | None = None
    """How the peer's attempt to reach our side-channel port ended; None: it made none."""
    error: str = ""
    """Why nothing could be measured."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All of it. ``findings`` come worst first."""

    version: int = 1
    """Of this shape; it grows when a reader would have to change."""
    findings: tuple[Finding, ...]
    route: Route
    kv_bytes_per_token: float | None = None
    """All layers, before tensor parallelism; None: the model is not known."""
    handoffs: tuple[Handoff, ...] = ()
    measurement: Measurement | None = None
    identity: Identity = Identity()

    @property
    def worst(self) -> Severity:
        """The severity of the worst finding."""
        return max((finding.severity for finding in self.findings), key=lambda severity: severity.rank, default=Severity.OK)

    @property
    def counts(self) -> Mapping[Severity, int]:
        """Findings of each severity."""
        return {each: sum(finding.severity is each for finding in self.findings) for each in Severity}

    def exit_status(self, *, strict: bool = False) -> int:
        """2 with an error, 1 with a warning if ``strict``, else 0."""
        if self.worst is Severity.ERROR:
            return 2
        return 1 if strict and self.worst is Severity.WARN else 0


def sorted_findings(findings: list[Finding]) -> tuple[Finding, ...]:
    """Worst first; within a severity in the order in which they were found."""
    return tuple(sorted(findings, key=lambda finding: -finding.severity.rank))
