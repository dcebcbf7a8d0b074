"""What is the same in whatever a control plane makes: one file in place of its streams."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.stack.mesh.messages import message

Services = Mapping[str, Mapping[int, list[str]]]
"""`name.namespace` -> port of the Service -> `ip:port` of its pods."""

_UNITS = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}


@dataclass(frozen=True)
class Ports:
    """Of the Envoy under test."""

    front: int
    admin: int


def endpoints(addresses: Iterable[str]) -> Any:
    """`ip:port` each -> what EDS says of them."""
    found = message("envoy.config.endpoint.v3.LocalityLbEndpoints", {})
    found.load_balancing_weight.value = 1
    for address in addresses:
        host, _, port = address.rpartition(":")
        target = found.lb_endpoints.add().endpoint.address.socket_address
        target.address, target.port_value = host, int(port)
    return found


def with_endpoints(cluster: Any, addresses: Iterable[str]) -> Any:
    """The cluster with its endpoints in it, which a control plane would send by EDS."""
    cluster.type = 0  # STATIC
    cluster.load_assignment.cluster_name = cluster.name
    cluster.load_assignment.endpoints.append(endpoints(addresses))
    return cluster


def bootstrap(ports: Ports, listeners: Iterable[Any], clusters: Iterable[Any]) -> Any:
    """All of it in one."""
    made = message(
        "envoy.config.bootstrap.v3.Bootstrap",
        {
            "node": {"id": "mesh", "cluster": "mesh"},
            "admin": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": ports.admin}}},
        },
    )
    made.static_resources.listeners.extend(listeners)
    made.static_resources.clusters.extend(clusters)
    return made


def quantity(text: str | int) -> int:
    """`65Mi` -> bytes."""
    found = re.fullmatch(r"(\d+)(|Ki|Mi|Gi)", str(text))
    assert found is not None, text
    return int(found[1]) * _UNITS[found[2]]


def socket(port: int) -> dict[str, Any]:
    """Address of a listener."""
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}
