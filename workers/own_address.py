"""Which of this machine's addresses lies in a network: how a worker with several finds the one that its peers reach."""

from __future__ import annotations

import socket
from ipaddress import ip_address, ip_network


def own_address(network: str) -> str:
    """The address of this machine in ``network`` (``172.31.240.0/24``). Raises ValueError if there is none.

    The system is asked from which address it would send to that network; nothing is sent.
    """
    block = ip_network(network, strict=False)
    family = socket.AF_INET if block.version == 4 else socket.AF_INET6
    target = block[1] if block.num_addresses > 1 else block[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((str(target), 9))
        except OSError as error:
            raise ValueError(f"{network}: this machine has no way there ({error.strerror or error})") from error
        found = ip_address(probe.getsockname()[0])
    # Without an address in it, the system would send by the default route.
    if found not in block and not (block.is_loopback and found.is_loopback):
        raise ValueError(f"{network}: this machine has no address there; it would send from {found}")
    # For a loopback network every address of it is this machine's own.
    return str(target) if block.is_loopback else str(found)
