"""Workers as an operator writes them down, checked: the same three lists in the configuration and in a watched file. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from ipaddress import ip_address
from typing import Final

from extproc.routing.endpoint_spec import EndpointSet, EndpointSpec

MAX_ENDPOINTS: Final = 4096
"""Of one source, all roles together."""

ROLES: Final = ("prefill", "decode", "both")

_IP_PORT = re.compile(r"(?P<ip>[0-9.]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})")
_FACTS = ("max_seqs", "kv_tokens", "prefill_tokens_per_s", "max_batched_tokens")
_MAX_FACT = 1e12


class ListingError(ValueError):
    """What is wrong, and at which field (``decode[3].address``)."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"{field}: {why}")
        self.field = field


def endpoint_set(
    prefill: Sequence[str | EndpointSpec], decode: Sequence[str | EndpointSpec], both: Sequence[str | EndpointSpec]
) -> EndpointSet:
    """The three lists as one set. Raises ListingError."""
    lists = {"prefill": prefill, "decode": decode, "both": both}
    total = sum(map(len, lists.values()))
    if total > MAX_ENDPOINTS:
        raise ListingError("prefill, decode, both", f"{total} workers, more than {MAX_ENDPOINTS}")
    specs = {role: tuple(_spec(f"{role}[{i}]", item) for i, item in enumerate(items)) for role, items in lists.items()}
    for role in ROLES:
        _refuse_twice(role, specs[role])
    both_addresses = {spec.address for spec in specs["both"]}
    for role in ("prefill", "decode"):
        for index, spec in enumerate(specs[role]):
            if spec.address in both_addresses:
                raise ListingError(f"{role}[{index}]", f"{spec.address} stands under `both` already")
    return EndpointSet(**specs)


def canonical(ip: str, port: int) -> str:
    """``ip:port`` or ``[v6]:port``, byte for byte as Envoy writes it. Raises ValueError if ``ip`` is no IP address."""
    address = ip_address(ip)
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"


def name_server(text: str) -> tuple[str, int]:
    """``ip`` or ``ip:port`` of a DNS server -> both of them. Raises ValueError."""
    match = _IP_PORT.fullmatch(text)
    ip, port = (match["ip"], int(match["port"])) if match else (text, 53)
    try:
        address = ip_address(ip.removeprefix("[").removesuffix("]"))
    except ValueError:
        raise ValueError(f"{text!r} is neither ip nor ip:port") from None
    if not 0 < port < 65536:
        raise ValueError(f"{text!r}: a port is 1 to 65535")
    return str(address), port


def _spec(field: str, item: str | EndpointSpec) -> EndpointSpec:
    if isinstance(item, str):
        _check_address(field, item)
        return EndpointSpec(address=item)
    _check_address(f"{field}.address", item.address)
    for name in _FACTS:
        value = getattr(item, name)
        if value is not None and not 0 < value < _MAX_FACT:
            raise ListingError(f"{field}.{name}", f"{value} is not a positive number")
    if item.models is not None and (not item.models or "" in item.models):
        raise ListingError(f"{field}.models", "names at least one model, or is left out")
    return item


def _check_address(field: str, text: str) -> None:
    # Envoy's endpoint discovery takes addresses only, and the pinned value must equal the endpoint's, byte for byte.
    match = _IP_PORT.fullmatch(text)
    try:
        if match is None:
            raise ValueError(text)
        written = canonical(match["ip"].strip("[]"), int(match["port"]))
    except ValueError:
        raise ListingError(field, f"{text!r}: a worker is ip:port, not a name or a unix socket") from None
    if not 0 < int(match["port"]) < 65536:
        raise ListingError(field, f"{text!r}: a port is 1 to 65535")
    if text != written:
        raise ListingError(field, f"{text!r}: write it as {written!r}, as Envoy does")


def _refuse_twice(role: str, specs: Iterable[EndpointSpec]) -> None:
    seen: dict[str, int] = {}
    for index, spec in enumerate(specs):
        first = seen.setdefault(spec.address, index)
        if first != index:
            raise ListingError(f"{role}[{index}]", f"{spec.address} stands there twice, first at {role}[{first}]")
