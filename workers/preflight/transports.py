"""UCX's names of transports: aliases, what UCX_TLS asks for, and which devices UCX_NET_DEVICES names."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable

ALIASES: dict[str, frozenset[str]] = {
    "rc": frozenset(("rc_mlx5", "rc_verbs")),
    "rc_x": frozenset(("rc_mlx5",)),
    "rc_v": frozenset(("rc_verbs",)),
    "ud": frozenset(("ud_mlx5", "ud_verbs")),
    "ud_x": frozenset(("ud_mlx5",)),
    "ud_v": frozenset(("ud_verbs",)),
    "dc": frozenset(("dc_mlx5",)),
    "dc_x": frozenset(("dc_mlx5",)),
    "ib": frozenset(("rc_mlx5", "rc_verbs", "ud_mlx5", "ud_verbs", "dc_mlx5", "srd")),
    "cuda": frozenset(("cuda_copy", "cuda_ipc", "gdr_copy")),
    "sm": frozenset(("posix", "sysv", "xpmem", "cma", "knem")),
    "shm": frozenset(("posix", "sysv", "xpmem", "cma", "knem")),
    "mm": frozenset(("posix", "sysv", "xpmem")),
}
"""What each alias stands for; the rest are names of transports."""

RDMA = frozenset(("rc_mlx5", "rc_verbs", "dc_mlx5", "srd"))
"""Those that move large blocks without the processor; ud is only for setting up."""
CUDA = ALIASES["cuda"]
SHARED_MEMORY = ALIASES["shm"]


def expand(names: Iterable[str]) -> frozenset[str]:
    """Names and aliases -> names of transports."""
    return frozenset(transport for name in names for transport in ALIASES.get(name, frozenset((name,))))


class Wanted:
    """What a value of UCX_TLS asks for."""

    def __init__(self, tls: str) -> None:
        """``tls``: ``all``, a list, or a list of what not to use after ``^``."""
        self.text = tls
        self._not = tls.startswith("^")
        self.names = tuple(name.strip() for name in tls.removeprefix("^").split(",") if name.strip())
        """As they stand there."""

    @property
    def everything(self) -> bool:
        """No list of what to use: UCX takes what there is."""
        return self._not or "all" in self.names or not self.names

    def allows(self, transport: str) -> bool:
        """The list does not forbid this one."""
        if self._not:
            return transport not in expand(self.names)
        return self.everything or transport in expand(self.names)

    def allowed(self, available: Iterable[str]) -> frozenset[str]:
        """Of these, what it allows."""
        return frozenset(transport for transport in available if self.allows(transport))

    def missing(self, available: Iterable[str]) -> tuple[str, ...]:
        """The names of the list of which nothing is there."""
        if self.everything:
            return ()
        there = frozenset(available)
        return tuple(name for name in self.names if not expand((name,)) & there)


def device_patterns(net_devices: str) -> tuple[str, ...]:
    """The devices that UCX_NET_DEVICES names; empty: all."""
    names = tuple(name.strip() for name in net_devices.split(",") if name.strip())
    return () if not names or "all" in names else names


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """UCX_NET_DEVICES lets this device be used."""
    return not patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
