"""Where a prefill worker's reply may say that its KV blocks are.

The decode worker connects to whatever host and port the reply names (vLLM's NIXL side channel, over ZMQ). So a reply is a way
to make it connect elsewhere, and what could not be a host and a port never goes on.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import Final

OF_WORKER: Final = "worker"

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,252})")


def host_fault(host: str, port: int) -> str | None:
    """Why these cannot be where blocks are; None: they can."""
    if _NAME.fullmatch(host) is None:
        try:
            ip_address(host[1:-1] if host[:1] == "[" and host[-1:] == "]" else host)
        except ValueError:
            return "remote_host is no host"
    if not 0 < port < 65536:
        return f"remote_port {port} is not 1 to 65535"
    return None


class RemoteHosts:
    """``handoff.remote_hosts``. Empty: any host."""

    def __init__(self, allowed: Sequence[str]) -> None:
        """Raises ValueError for what is neither a network, a name nor ``worker``."""
        self._names: set[str] = set()
        self._networks: list[IPv4Network | IPv6Network] = []
        self._worker = OF_WORKER in allowed
        self._any = not allowed
        for text in allowed:
            if text == OF_WORKER:
                continue
            try:
                self._networks.append(ip_network(text))
            except ValueError as error:
                if "/" in text or ":" in text or _NAME.fullmatch(text) is None or text.replace(".", "").isdigit():
                    raise ValueError(f"{text!r} is neither a network, nor a host name, nor `worker`: {error}") from None
                self._names.add(text.lower())

    def fault(self, host: str, worker: str) -> str | None:
        """Why a reply of ``worker`` (``ip:port``) may not name this host; None: it may."""
        if self._any or host.lower() in self._names:
            return None
        try:
            address = ip_address(host.strip("[]").partition("%")[0])
        except ValueError:
            return f"remote_host {host!r} is not one of handoff.remote_hosts"
        if self._worker and address == ip_address(worker.rpartition(":")[0].strip("[]")):
            return None
        if any(address in network for network in self._networks):
            return None
        return f"remote_host {host!r} is not one of handoff.remote_hosts"
