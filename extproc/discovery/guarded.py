"""What a source may name as a worker: requests, prompts and the workers' key go there.

Whoever can write a record of a name server, or a file, could otherwise have them sent to any address that this machine reaches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Final

from extproc.discovery.listing import ROLES
from extproc.discovery.source import Running, Source, SourceError
from extproc.routing.endpoint_spec import EndpointSet, EndpointSpec

_CREDENTIALS: Final = frozenset(
    map(ip_address, ("169.254.169.254", "169.254.170.2", "169.254.170.23", "fd00:ec2::254", "fd00:ec2::23", "100.100.100.200"))
)
"""Where clouds tell whoever asks which credentials the machine has: AWS, GCP, Azure and others; ECS; EKS; IMDS over IPv6;
Alibaba."""


class Networks:
    """``workers.networks``."""

    def __init__(self, networks: Sequence[str]) -> None:
        """Empty: any address that can be a worker's. Raises ValueError."""
        self._networks = [ip_network(text) for text in networks]

    def fault(self, address: str) -> str | None:
        """Why this ``ip:port`` is not to be a worker; None: it may be one."""
        ip = ip_address(address.rpartition(":")[0].strip("[]"))
        if isinstance(ip, IPv6Address) and ip.ipv4_mapped is not None:
            ip = ip.ipv4_mapped
        if ip.is_unspecified or ip.is_multicast or (isinstance(ip, IPv4Address) and ip == ip_address("255.255.255.255")):
            return "nobody has this address"
        if not self._networks:
            return "clouds keep credentials there" if ip in _CREDENTIALS else None
        if any(ip in network for network in self._networks):
            return None
        return "it is not in workers.networks"


class Guarded:
    """A source, without the workers that it may not name."""

    def __init__(self, source: Source, networks: Networks, on_refused: Callable[[str, str, str], None]) -> None:
        """``on_refused(kind, address, why)`` is called for each that is left out, once until it is gone and comes again."""
        self._source = source
        self._networks = networks
        self._on_refused = on_refused
        self._refused: frozenset[str] = frozenset()

    @property
    def kind(self) -> str:
        """Of the source."""
        return self._source.kind

    @property
    def name(self) -> str:
        """Of the source."""
        return self._source.name

    async def look(self) -> EndpointSet:
        """What it says, as far as it may. Raises SourceError."""
        try:
            return self._allowed(await self._source.look())
        except SourceError as error:
            raise SourceError(str(error), said=None if error.said is None else self._allowed(error.said)) from error

    async def pause(self) -> None:
        """As the source does."""
        await self._source.pause()

    async def run(self) -> None:
        """As the source does, if it must run at all."""
        if isinstance(self._source, Running):
            await self._source.run()

    def _allowed(self, said: EndpointSet) -> EndpointSet:
        refused: dict[str, str] = {}
        kept = {role: tuple(self._kept(getattr(said, role), refused)) for role in ROLES}
        for address in refused.keys() - self._refused:
            self._on_refused(self.kind, address, refused[address])
        self._refused = frozenset(refused)
        return EndpointSet(**kept) if refused else said

    def _kept(self, specs: Sequence[EndpointSpec], refused: dict[str, str]) -> list[EndpointSpec]:
        kept = []
        for spec in specs:
            why = self._networks.fault(spec.address)
            if why is None:
                kept.append(spec)
            else:
                refused[spec.address] = why
        return kept
