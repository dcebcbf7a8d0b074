"""Envoy Gateway: what it makes of the HTTPRoute and the policies that we ship.

The shape follows its translator (internal/xds/translator: listener.go, extproc.go, cluster.go, route.go and the expected output
in testdata/out/xds-ir, of 2025 and 2026). Its releases differ in where a route's ext_proc stands: most put each one into the
connection manager, off, and turn it on by the route; the newest have it in the route itself, and a filter of filters runs it
(``in_route``). Only what our manifests say is translated, and anything else in them is refused, so that nothing of them goes
unseen.
"""

from __future__ import annotations

from typing import Any

from tests.stack.mesh.bootstrap import Ports, Services, bootstrap, quantity, socket, with_endpoints
from tests.stack.mesh.manifests import of_kind, only
from tests.stack.mesh.messages import content as json_of
from tests.stack.mesh.messages import message

_EXTENSIONS = "type.googleapis.com/envoy.extensions"
_DEFAULT_BUFFER = "32Ki"
_CHAIN = "envoy.filters.http.filter_chain/eep"
_BODY_MODES = {"Buffered": "BUFFERED", "Streamed": "STREAMED", "FullDuplexStreamed": "FULL_DUPLEX_STREAMED"}
_BALANCERS = {
    "RoundRobin": ("envoy.load_balancing_policies.round_robin", "round_robin.v3.RoundRobin"),
    "LeastRequest": ("envoy.load_balancing_policies.least_request", "least_request.v3.LeastRequest"),
}


def configuration(objects: list[dict[str, Any]], services: Services, ports: Ports, *, in_route: bool = False) -> Any:
    """The whole Envoy. A second route, for the host `other.test`, has no policy of ours."""
    route = only(objects, "HTTPRoute")
    extension = only(objects, "EnvoyExtensionPolicy")
    backend = only(objects, "BackendTrafficPolicy")["spec"]
    client = only(objects, "ClientTrafficPolicy")["spec"]
    namespace = route["metadata"].get("namespace", "inference")
    (rule,) = route["spec"]["rules"]
    (target,) = rule["backendRefs"]
    (processor,) = extension["spec"]["extProc"]
    filter_name = f"envoy.filters.http.ext_proc/envoyextensionpolicy/{namespace}/{extension['metadata']['name']}/extproc/0"
    decode = f"httproute/{namespace}/{route['metadata']['name']}/rule/0"
    extproc = f"envoyextensionpolicy/{namespace}/{extension['metadata']['name']}/extproc/0"
    other = "httproute/apps/other/rule/0"
    (picked,) = processor["backendRefs"]
    clusters = [
        _backend(decode, backend, services[f"{target['name']}.{namespace}"][target["port"]]),
        _backend(other, {}, services["other.apps"][80]),
        _ext_service(extproc, processor["backendSettings"], services[f"{picked['name']}.{namespace}"][picked["port"]]),
    ]
    for patches in of_kind(objects, "EnvoyPatchPolicy"):
        clusters = [_patched(cluster, patches["spec"]["jsonPatches"]) for cluster in clusters]
    routes = [
        {
            "name": f"{decode}/match/0/*",
            "match": {"prefix": "/"},
            "route": _action(decode, rule, backend),
            # Turned on where the policy says so.
            "typed_per_filter_config": {
                filter_name: {"@type": "type.googleapis.com/envoy.config.route.v3.FilterConfig", "config": {}}
            },
        }
    ]
    made = {"name": filter_name, "disabled": True, "typed_config": ext_proc(processor, extproc)}
    if in_route:
        chain = {"filters": [{"name": "envoy.filters.http.ext_proc/0", "typed_config": made["typed_config"]}]}
        kind = f"{_EXTENSIONS}.filters.http.filter_chain.v3.FilterChainConfig"
        routes[0]["typed_per_filter_config"] = {_CHAIN: {"@type": f"{kind}PerRoute", "filter_chain": chain}}
        made = {"name": _CHAIN, "disabled": True, "typed_config": {"@type": kind}}
    listener = _listener(ports, client, [made], routes, other)
    return bootstrap(ports, [listener], clusters)


def _listener(
    ports: Ports, client: dict[str, Any], filters: list[dict[str, Any]], routes: list[dict[str, Any]], other: str
) -> Any:
    client = dict(client)
    headers = client.pop("headers")
    stream_idle = client.pop("timeout")["http"]["streamIdleTimeout"]
    buffer = quantity(client.pop("connection", {}).get("bufferLimit", _DEFAULT_BUFFER))
    assert set(client) == {"targetRefs"}, client
    manager = {
        "@type": f"{_EXTENSIONS}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "http-10080",
        "common_http_protocol_options": {
            "headers_with_underscores_action": {"DropHeader": "DROP_HEADER"}[headers["withUnderscoresAction"]]
        },
        "http2_protocol_options": {
            "initial_connection_window_size": 1048576,
            "initial_stream_window_size": 65536,
            "max_concurrent_streams": 100,
        },
        "early_header_mutation_extensions": [
            {
                "name": "envoy.http.early_header_mutation.header_mutation",
                "typed_config": {
                    "@type": f"{_EXTENSIONS}.http.early_header_mutation.header_mutation.v3.HeaderMutation",
                    "mutations": [{"remove": name} for name in headers["earlyRequestHeaders"]["remove"]],
                },
            }
        ],
        "generate_request_id": headers["requestID"] == "PreserveOrGenerate",
        "preserve_external_request_id": headers["requestID"] == "PreserveOrGenerate",
        "stream_idle_timeout": stream_idle,
        "http_filters": [
            *filters,
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": f"{_EXTENSIONS}.filters.http.router.v3.Router", "suppress_envoy_headers": True},
            },
        ],
        "merge_slashes": True,
        "normalize_path": True,
        "path_with_escaped_slashes_action": "UNESCAPE_AND_REDIRECT",
        "server_header_transformation": "PASS_THROUGH",
        "use_remote_address": True,
        "route_config": {
            "name": "inference/inference-gateway/http",
            "ignore_port_in_host_matching": True,
            "virtual_hosts": [
                {"name": "any", "domains": ["*"], "routes": routes},
                {
                    "name": "other",
                    "domains": ["other.test"],
                    "routes": [{"name": other, "match": {"prefix": "/"}, "route": {"cluster": other}}],
                },
            ],
        },
    }
    return message(
        "envoy.config.listener.v3.Listener",
        {
            "name": "inference/inference-gateway/http",
            "address": socket(ports.front),
            "per_connection_buffer_limit_bytes": buffer,
            "max_connections_to_accept_per_socket_event": 1,
            "default_filter_chain": {
                "name": "inference/inference-gateway/http",
                "filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}],
            },
        },
    )


def ext_proc(processor: dict[str, Any], cluster: str) -> dict[str, Any]:
    """The filter of one entry of a policy's `extProc`, for the server behind ``cluster``."""
    processor = dict(processor)
    mode = dict.fromkeys(("request_header_mode", "response_header_mode"), "SKIP")
    mode |= dict.fromkeys(("request_body_mode", "response_body_mode"), "NONE")
    mode |= dict.fromkeys(("request_trailer_mode", "response_trailer_mode"), "SKIP")
    wanted = dict(processor.pop("processingMode"))
    allow_override = wanted.pop("allowModeOverride", False)
    for side, settings in wanted.items():
        mode[f"{side}_header_mode"] = "SEND"
        mode[f"{side}_body_mode"] = _BODY_MODES[settings["body"]]
        if settings["body"] == "FullDuplexStreamed":
            mode[f"{side}_trailer_mode"] = "SEND"
    metadata = processor.pop("metadata", {})
    retry = processor.pop("backendSettings", {}).get("retry")
    fail_open, message_timeout = processor.pop("failOpen", False), processor.pop("messageTimeout", "0.2s")
    # The rule of its CRD.
    assert not (fail_open and "FullDuplexStreamed" in {settings["body"] for settings in wanted.values()})
    assert set(processor) == {"backendRefs"}, processor
    return {
        "@type": f"{_EXTENSIONS}.filters.http.ext_proc.v3.ExternalProcessor",
        "failure_mode_allow": fail_open,
        "grpc_service": {
            "envoy_grpc": {"cluster_name": cluster, "authority": "baton-filter.inference:9002"},
            "timeout": "10s",
            **({} if retry is None else {"retry_policy": _retries(retry)}),
        },
        "message_timeout": message_timeout,
        "processing_mode": mode,
        "allow_mode_override": allow_override,
        "metadata_options": {
            "forwarding_namespaces": {"untyped": metadata.get("accessibleNamespaces", [])},
            "receiving_namespaces": {"untyped": metadata.get("writableNamespaces", [])},
        },
    }


def _retries(retry: dict[str, Any]) -> dict[str, Any]:
    return {"num_retries": retry["numRetries"], "retry_on": ",".join(retry["retryOn"]["triggers"])}


def _action(cluster: str, rule: dict[str, Any], backend: dict[str, Any]) -> dict[str, Any]:
    # The route's own word counts more than the policy's. Without either, Envoy's 15 s hold.
    timeout = rule.get("timeouts", {}).get("request", backend["timeout"]["http"].get("requestTimeout"))
    action: dict[str, Any] = {"cluster": cluster, "upgrade_configs": [{"upgrade_type": "websocket"}]}
    if timeout is not None:
        action["timeout"] = timeout
    if "retry" in backend:
        action["retry_policy"] = {
            "num_retries": backend["retry"]["numRetries"],
            "retry_on": "connect-failure,refused-stream,unavailable,cancelled,retriable-status-codes",
            "retriable_status_codes": [503],
        }
    return action


def _backend(name: str, policy: dict[str, Any], addresses: list[str]) -> Any:
    policy = dict(policy)
    balancer = policy.pop("loadBalancer", {"type": "LeastRequest"})
    made = _policy(*_BALANCERS[balancer["type"]])
    if "endpointOverride" in balancer:
        sources = [{"header": each["header"]} for each in balancer["endpointOverride"]["extractFrom"]]
        made = _policy(
            "envoy.load_balancing_policies.override_host",
            "override_host.v3.OverrideHost",
            override_host_sources=sources,
            fallback_policy=made,
        )
    timeout = policy.pop("timeout", {})
    http = timeout.get("http", {})
    content: dict[str, Any] = {
        "name": name,
        "lb_policy": "CLUSTER_PROVIDED" if "endpointOverride" in balancer else "LEAST_REQUEST",
        "load_balancing_policy": made,
        "common_lb_config": {},
        "connect_timeout": timeout.get("tcp", {}).get("connectTimeout", "10s"),
        "per_connection_buffer_limit_bytes": quantity(policy.pop("connection", {}).get("bufferLimit", _DEFAULT_BUFFER)),
        "circuit_breakers": {"thresholds": [_thresholds(policy.pop("circuitBreaker", {}))]},
        "ignore_health_on_host_removal": True,
    }
    if "connectionIdleTimeout" in http:
        content["typed_extension_protocol_options"] = {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": f"{_EXTENSIONS}.upstreams.http.v3.HttpProtocolOptions",
                "common_http_protocol_options": {"idle_timeout": http["connectionIdleTimeout"]},
                "explicit_http_config": {"http_protocol_options": {}},
            }
        }
    keepalive = policy.pop("tcpKeepalive", None)
    if keepalive is not None:
        content["upstream_connection_options"] = {
            "tcp_keepalive": {
                "keepalive_probes": keepalive["probes"],
                "keepalive_time": int(keepalive["idleTime"].rstrip("s")),
                "keepalive_interval": int(keepalive["interval"].rstrip("s")),
            }
        }
    assert set(policy) <= {"targetRefs", "retry"}, policy
    return with_endpoints(message("envoy.config.cluster.v3.Cluster", content), addresses)


def _ext_service(name: str, settings: dict[str, Any], addresses: list[str]) -> Any:
    settings = dict(settings)
    health = settings.pop("healthCheck")
    active = health["active"]
    assert active["type"] == "GRPC"
    content = {
        "name": name,
        "lb_policy": "LEAST_REQUEST",
        "load_balancing_policy": _policy(*_BALANCERS["LeastRequest"]),
        "common_lb_config": {"healthy_panic_threshold": {"value": health["panicThreshold"]}},
        "connect_timeout": "10s",
        "per_connection_buffer_limit_bytes": 32768,
        "circuit_breakers": {"thresholds": [_thresholds(settings.pop("circuitBreaker"))]},
        "health_checks": [
            {
                "timeout": active["timeout"],
                "interval": active["interval"],
                "unhealthy_threshold": active["unhealthyThreshold"],
                "healthy_threshold": active["healthyThreshold"],
                "grpc_health_check": {"service_name": active["grpc"]["service"]},
            }
        ],
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": f"{_EXTENSIONS}.upstreams.http.v3.HttpProtocolOptions",
                "explicit_http_config": {
                    "http2_protocol_options": {
                        "initial_connection_window_size": 1048576,
                        "initial_stream_window_size": 65536,
                    }
                },
            }
        },
    }
    assert set(settings) == {"retry"}, settings
    return with_endpoints(message("envoy.config.cluster.v3.Cluster", content), addresses)


def _thresholds(breaker: dict[str, Any]) -> dict[str, Any]:
    names = {
        "maxConnections": "max_connections",
        "maxPendingRequests": "max_pending_requests",
        "maxParallelRequests": "max_requests",
    }
    return {"max_retries": 1024, **{names[name]: value for name, value in breaker.items()}}


def _policy(name: str, kind: str, **fields: Any) -> dict[str, Any]:
    typed = {"@type": f"{_EXTENSIONS}.load_balancing_policies.{kind}", **fields}
    return {"policies": [{"typed_extension_config": {"name": name, "typed_config": typed}}]}


def _patched(cluster: Any, patches: list[dict[str, Any]]) -> Any:
    """JSON patches on the cluster in the API's own spelling, as EnvoyPatchPolicy has it."""
    content = json_of(cluster)
    for patch in patches:
        if patch["name"] != cluster.name:
            continue
        *way, last = patch["operation"]["path"].strip("/").split("/")
        at: Any = content
        for part in way:
            at = at[int(part)] if isinstance(at, list) else at[part]
        assert (last in at) == (patch["operation"]["op"] == "replace"), patch
        at[last] = patch["operation"]["value"]
    return message("envoy.config.cluster.v3.Cluster", content)
