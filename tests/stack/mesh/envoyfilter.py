"""Istio's EnvoyFilter, applied as istiod does it: the operations and conditions that our manifests use, and no others.

Facts: Istio's own source, pilot/pkg/networking/core/envoyfilter (listener_patch.go, rc_patch.go, cluster_patch.go) and
pkg/proto/merge, of 2026: patches of a kind are applied in the order of the list; an insertion before a filter goes before the
first that matches; a value of a MERGE is merged like protobuf, durations are replaced; a cluster's name is
``direction|port|subset|host``; the name of a filter in a MERGE is the new name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import Message

from tests.stack.mesh.messages import merge, merge_any, message, pack, unpacked

HCM = "envoy.filters.network.http_connection_manager"
_MANAGER = "envoy.extensions.filters.network.http_connection_manager.v3"

MESSAGES = {
    "NETWORK_FILTER": "envoy.config.listener.v3.Filter",
    "HTTP_FILTER": f"{_MANAGER}.HttpFilter",
    "HTTP_ROUTE": "envoy.config.route.v3.Route",
    "CLUSTER": "envoy.config.cluster.v3.Cluster",
}
"""What a patch's value is, by what it applies to."""


@dataclass
class Proxy:
    """What istiod has made for a gateway, before and after patches."""

    labels: dict[str, str]
    namespace: str
    listeners: list[Any] = field(default_factory=list)
    routes: list[Any] = field(default_factory=list)
    clusters: list[Any] = field(default_factory=list)


def apply(manifest: dict[str, Any], proxy: Proxy) -> int:
    """Patch the proxy; returns how often a patch found something to change. Raises ValueError for what is not done here, and
    json_format.ParseError for a value that Envoy does not know."""
    spec = manifest["spec"]
    wanted = spec["workloadSelector"]["labels"]
    if manifest["metadata"]["namespace"] != proxy.namespace or not wanted.items() <= proxy.labels.items():
        return 0
    changed = 0
    for patch in spec["configPatches"]:
        if patch["match"]["context"] != "GATEWAY":
            raise ValueError(f"context {patch['match']['context']}")
        kind, operation, match = patch["applyTo"], patch["patch"]["operation"], patch["match"]
        value = message(MESSAGES[kind], patch["patch"]["value"])
        if (kind, operation) == ("NETWORK_FILTER", "MERGE"):
            changed += _merge_network_filter(proxy, match["listener"], value)
        elif (kind, operation) == ("HTTP_FILTER", "INSERT_BEFORE"):
            changed += _insert_http_filter(proxy, match["listener"], value)
        elif (kind, operation) == ("HTTP_ROUTE", "MERGE"):
            changed += _merge_route(proxy, match["routeConfiguration"], value)
        elif (kind, operation) == ("CLUSTER", "MERGE"):
            changed += _merge_cluster(proxy, match["cluster"], value)
        else:
            raise ValueError(f"{operation} of {kind} is not done here")
    return changed


def _filters(proxy: Proxy, match: dict[str, Any]) -> list[Any]:
    wanted = match["filterChain"]["filter"]["name"]
    return [
        network_filter
        for listener in proxy.listeners
        if match.get("portNumber") in (None, listener.address.socket_address.port_value)
        for chain in listener.filter_chains
        for network_filter in chain.filters
        if network_filter.name == wanted
    ]


def _merge_network_filter(proxy: Proxy, match: dict[str, Any], value: Any) -> int:
    found = _filters(proxy, match)
    for network_filter in found:
        network_filter.name = value.name or network_filter.name
        merge_any(network_filter.typed_config, value.typed_config)
    return len(found)


def _insert_http_filter(proxy: Proxy, match: dict[str, Any], value: Message) -> int:
    before, changed = match["filterChain"]["filter"]["subFilter"]["name"], 0
    for network_filter in _filters(proxy, match):
        if network_filter.name != HCM:
            continue
        manager = unpacked(network_filter.typed_config)
        names = [each.name for each in manager.http_filters]
        if before in names:
            kept = list(manager.http_filters)
            kept.insert(names.index(before), value)
            del manager.http_filters[:]
            manager.http_filters.extend(kept)
            pack(network_filter.typed_config, manager)
            changed += 1
    return changed


def _merge_route(proxy: Proxy, match: dict[str, Any], value: Message) -> int:
    changed = 0
    for configuration in proxy.routes:
        if match.get("name") not in (None, configuration.name):
            continue
        for host in configuration.virtual_hosts:
            if match["vhost"].get("name") not in (None, host.name):
                continue
            for route in host.routes:
                if match["vhost"]["route"]["name"] == route.name:
                    merge(route, value)
                    changed += 1
    return changed


def _merge_cluster(proxy: Proxy, match: dict[str, Any], value: Message) -> int:
    changed = 0
    for cluster in proxy.clusters:
        _, port, _, host = cluster.name.split("|")
        if match["service"] == host and match.get("portNumber") in (None, int(port)):
            merge(cluster, value)
            changed += 1
    return changed
