"""The address that other machines reach this one by. Looks at the system, and sends nothing."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping

POD_IP = "POD_IP"
"""The variable that a Kubernetes pod gets its address in (from ``status.podIP``)."""


class AddressError(ValueError):
    """There is no address that peers could use; the message says what to do."""


def routable(given: str | None, environ: Mapping[str, str]) -> tuple[str, str]:
    """An IP address for peers, and where it comes from: ``given`` (a name is resolved), else POD_IP, else the default route's.

    Raises AddressError for what peers cannot reach, and where there is nothing to choose from.
    """
    if given is not None:
        return _address(given, "the side channel's host"), "as given"
    if pod := environ.get(POD_IP):
        return _address(pod, POD_IP), POD_IP
    found = default_route()
    if found is None:
        raise AddressError("this machine has no default route to tell its address by: give --side-channel-host")
    return found, "the default route's address"


def default_route() -> str | None:
    """The address that packets to the outside leave from; None without a route."""
    # Addresses that are reserved for documentation. Connecting a UDP socket looks the route up and sends nothing.
    for family, outside in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((outside, 9))
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return None


def _address(text: str, what: str) -> str:
    refused = "every peer would look for the worker on its own machine: give the address that peers reach this one by"
    if text.lower() == "localhost":
        raise AddressError(f"{what}: {text}: {refused}")
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        try:
            address = ipaddress.ip_address(socket.getaddrinfo(text, None, type=socket.SOCK_STREAM)[0][4][0])
        except OSError as error:
            raise AddressError(f"{what}: {text} cannot be resolved: {error}") from None
        if address.is_loopback:
            raise AddressError(f"{what}: {text} is {address} here: {refused}") from None
    if address.is_unspecified or address.is_multicast:
        raise AddressError(f"{what}: {text}: {refused}")
    return str(address)
