"""The gateway of Istio: what istiod makes of Services, a VirtualService and DestinationRules, then our EnvoyFilter.

The shape follows Istio's source of 2026 (pilot/pkg/networking/core: gateway.go, listener.go, cluster_builder.go,
cluster_traffic_policy.go, route/route.go). Left out: Istio's own filters that are not in plain Envoy, mTLS between sidecars,
and xDS (routes and endpoints stand in the listener and the clusters).
"""

from __future__ import annotations

from typing import Any

from tests.stack.mesh import envoyfilter
from tests.stack.mesh.bootstrap import Ports, Services, bootstrap, socket, with_endpoints
from tests.stack.mesh.envoyfilter import Proxy
from tests.stack.mesh.manifests import of_kind, only
from tests.stack.mesh.messages import message, pack, unpacked

LISTENER_PORT = 8080
"""Where the gateway's pods listen; the test's own port takes its place when all patches are in."""

_MOST = 4294967295
_EXTENSIONS = "type.googleapis.com/envoy.extensions"


def gateway(objects: list[dict[str, Any]], services: Services) -> Proxy:
    """The gateway's configuration before any EnvoyFilter. The host `other.test` stands for what runs there already."""
    virtual_service = only(objects, "VirtualService")["spec"]
    rules = {rule["spec"]["host"]: rule["spec"]["trafficPolicy"] for rule in of_kind(objects, "DestinationRule")}
    proxy = Proxy(labels={"istio": "ingressgateway", "app": "istio-ingressgateway"}, namespace="istio-system")
    routes = [_route(each) for each in virtual_service["http"]]
    other = {**routes[0], "name": "other", "route": {**routes[0]["route"], "cluster": _cluster_name("other.apps", 80)}}
    proxy.routes.append(
        message(
            "envoy.config.route.v3.RouteConfiguration",
            {
                "name": "http.8080",
                "validate_clusters": False,
                "ignore_port_in_host_matching": True,
                "virtual_hosts": [
                    {"name": "*:80", "domains": virtual_service["hosts"], "routes": routes},
                    {"name": "other.test:80", "domains": ["other.test"], "routes": [other]},
                ],
            },
        )
    )
    for service, ports in services.items():
        for port, addresses in ports.items():
            proxy.clusters.append(cluster(service, port, addresses, rules.get(f"{service}.svc.cluster.local", {})))
    proxy.listeners.append(_listener())
    return proxy


def configuration(objects: list[dict[str, Any]], services: Services, ports: Ports) -> Any:
    """The whole Envoy, patched."""
    proxy = gateway(objects, services)
    for each in of_kind(objects, "EnvoyFilter"):
        changed = envoyfilter.apply(each, proxy)
        # Every patch has found the one thing it is for.
        assert changed == len(each["spec"]["configPatches"]), changed
    (listener,) = proxy.listeners
    listener.address.socket_address.port_value = ports.front
    network_filter = listener.filter_chains[0].filters[0]
    manager = unpacked(network_filter.typed_config)
    manager.route_config.CopyFrom(proxy.routes[0])
    pack(network_filter.typed_config, manager)
    return bootstrap(ports, proxy.listeners, proxy.clusters)


def _cluster_name(service: str, port: int) -> str:
    return f"outbound|{port}||{service}.svc.cluster.local"


def _route(http: dict[str, Any]) -> dict[str, Any]:
    (target,) = http["route"]
    destination = target["destination"]
    action: dict[str, Any] = {
        "cluster": f"outbound|{destination['port']['number']}||{destination['host']}",
        "timeout": http.get("timeout", "0s"),
        "max_grpc_timeout": http.get("timeout", "0s"),
    }
    # Without a word there are two retries.
    attempts = http.get("retries", {}).get("attempts", 2)
    if attempts:
        action["retry_policy"] = {
            "num_retries": attempts,
            "retry_on": "connect-failure,refused-stream,unavailable,cancelled,retriable-status-codes",
        }
    return {
        "name": http["name"],
        "match": {"prefix": "/"},
        "route": action,
        "decorator": {"operation": "any"},
        "metadata": {"filter_metadata": {"istio": {"config": "/apis/networking.istio.io/v1/virtual-service"}}},
    }


def _listener() -> Any:
    def typed(name: str, kind: str) -> dict[str, Any]:
        return {"name": name, "typed_config": {"@type": f"{_EXTENSIONS}.filters.http.{kind}"}}

    manager = {
        "@type": f"{_EXTENSIONS}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "outbound_0.0.0.0_8080",
        "http_filters": [
            typed("envoy.filters.http.grpc_stats", "grpc_stats.v3.FilterConfig"),
            typed("envoy.filters.http.fault", "fault.v3.HTTPFault"),
            typed("envoy.filters.http.cors", "cors.v3.Cors"),
            typed("envoy.filters.http.router", "router.v3.Router"),
        ],
        "http_protocol_options": {},
        "server_name": "istio-envoy",
        "use_remote_address": True,
        "forward_client_cert_details": "SANITIZE_SET",
        "set_current_client_cert_details": {"subject": True, "cert": True, "dns": True, "uri": True},
        "upgrade_configs": [{"upgrade_type": "websocket"}],
        "tracing": {
            "client_sampling": {"value": 100},
            "random_sampling": {"value": 1},
            "overall_sampling": {"value": 100},
            "custom_tags": [{"tag": "istio.mesh_id", "literal": {"value": "cluster.local"}}],
        },
        "access_log": [
            {
                "name": "envoy.access_loggers.file",
                "typed_config": {
                    "@type": f"{_EXTENSIONS}.access_loggers.file.v3.FileAccessLog",
                    "path": "/dev/null",
                    "log_format": {"text_format_source": {"inline_string": "%REQ(:METHOD)% %RESPONSE_CODE%\n"}},
                },
            }
        ],
        "stream_idle_timeout": "0s",
        "normalize_path": True,
        "path_with_escaped_slashes_action": "KEEP_UNCHANGED",
    }
    return message(
        "envoy.config.listener.v3.Listener",
        {
            "name": "0.0.0.0_8080",
            "address": socket(LISTENER_PORT),
            # The least that meshes come with.
            "per_connection_buffer_limit_bytes": 32768,
            "traffic_direction": "OUTBOUND",
            "filter_chains": [{"filters": [{"name": envoyfilter.HCM, "typed_config": manager}]}],
        },
    )


def cluster(service: str, port: int, addresses: list[str], policy: dict[str, Any]) -> Any:
    """That of a port of a Service (``name.namespace``), by the ``trafficPolicy`` of its DestinationRule."""
    pool = policy.get("connectionPool", {})
    tcp, http = pool.get("tcp", {}), pool.get("http", {})
    grpc = port == 9002  # by the Service's appProtocol
    content: dict[str, Any] = {
        "name": _cluster_name(service, port),
        "connect_timeout": tcp.get("connectTimeout", "10s"),
        "lb_policy": "LEAST_REQUEST",
        "common_lb_config": {},
        "circuit_breakers": {
            "thresholds": [
                {
                    "max_connections": tcp.get("maxConnections", _MOST),
                    "max_pending_requests": http.get("http1MaxPendingRequests", _MOST),
                    "max_requests": http.get("http2MaxRequests", _MOST),
                    "max_retries": _MOST,
                    "track_remaining": True,
                }
            ]
        },
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": f"{_EXTENSIONS}.upstreams.http.v3.HttpProtocolOptions",
                "common_http_protocol_options": {"idle_timeout": http["idleTimeout"]} if "idleTimeout" in http else {},
                "explicit_http_config": {"http2_protocol_options": {}} if grpc else {"http_protocol_options": {}},
            }
        },
        "metadata": {"filter_metadata": {"istio": {"default_original_port": port, "services": [{"host": service}]}}},
    }
    if "tcpKeepalive" in tcp:
        keepalive = tcp["tcpKeepalive"]
        content["upstream_connection_options"] = {
            "tcp_keepalive": {
                "keepalive_probes": keepalive["probes"],
                "keepalive_time": int(keepalive["time"].rstrip("s")),
                "keepalive_interval": int(keepalive["interval"].rstrip("s")),
            }
        }
    if policy.get("tls", {}).get("mode") == "SIMPLE":
        assert policy["tls"]["insecureSkipVerify"]
        content["transport_socket"] = {
            "name": "envoy.transport_sockets.tls",
            "typed_config": {
                "@type": f"{_EXTENSIONS}.transport_sockets.tls.v3.UpstreamTlsContext",
                "common_tls_context": {"alpn_protocols": ["h2"] if grpc else []},
            },
        }
    return with_endpoints(message("envoy.config.cluster.v3.Cluster", content), addresses)
