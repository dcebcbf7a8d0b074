"""Configurations of a plain Envoy: one that passes everything on, and one that answers everything itself. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_TYPE = "type.googleapis.com/"
_BUFFER_BYTES = 1 << 20
"""Of a connection; the same as in Baton's configuration, so that neither has an advantage with large bodies."""
_BODY_BYTES = 4 << 20
_IDLE = "900s"
"""A timer that each piece of a stream sets anew, as it does in Baton's configuration and in Envoy's own default."""
_ANSWER_BYTES = 1 << 20
_LIMITS = ("max_connections", "max_pending_requests", "max_requests")


@dataclass(frozen=True)
class Answer:
    """What is said to a request whose path begins with ``prefix``."""

    prefix: str
    body: str
    content_type: str = "application/json"


def passing(listeners: Sequence[tuple[int, Sequence[int]]], *, admin_port: int) -> dict[str, Any]:
    """For each (port to listen at, ports of the servers behind it): everything goes there, in turn."""
    return _bootstrap(
        admin_port,
        [
            _listener(port, f"pass-{port}", [{"match": {"prefix": "/"}, "route": {"cluster": f"to-{port}", "timeout": "0s"}}])
            for port, _ in listeners
        ],
        [_cluster(f"to-{port}", servers) for port, servers in listeners],
    )


def answering(workers: Sequence[tuple[int, str, Sequence[Answer]]], *, admin_port: int) -> dict[str, Any]:
    """For each (port, name for statistics, answers): the first answer whose prefix the path has.

    A filter reads the whole body first. Without it, Envoy answers at the headers and closes the connection, since there is a
    body on its way that nobody wants; every request would then need a new connection.
    """
    buffer = _filter(
        "envoy.filters.http.buffer", "envoy.extensions.filters.http.buffer.v3.Buffer", max_request_bytes=_BODY_BYTES
    )
    return _bootstrap(
        admin_port,
        [_listener(port, name, [_answer(each) for each in answers], buffer) for port, name, answers in workers],
        [],
    )


def _answer(answer: Answer) -> dict[str, Any]:
    return {
        "match": {"prefix": answer.prefix},
        "direct_response": {"status": 200, "body": {"inline_string": answer.body}},
        "response_headers_to_add": [
            {"header": {"key": "content-type", "value": answer.content_type}, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}
        ],
    }


def _filter(name: str, message: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "typed_config": {"@type": _TYPE + message, **fields}}


def _listener(port: int, name: str, routes: list[dict[str, Any]], *before: dict[str, Any]) -> dict[str, Any]:
    manager = _filter(
        "envoy.filters.network.http_connection_manager",
        "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix=name,
        use_remote_address=True,
        stream_idle_timeout=_IDLE,
        route_config={
            "max_direct_response_body_size_bytes": _ANSWER_BYTES,
            "virtual_hosts": [{"name": name, "domains": ["*"], "routes": routes}],
        },
        http_filters=[*before, _filter("envoy.filters.http.router", "envoy.extensions.filters.http.router.v3.Router")],
    )
    return {
        "name": name,
        "address": _address(port),
        "per_connection_buffer_limit_bytes": _BUFFER_BYTES,
        "filter_chains": [{"filters": [manager]}],
    }


def _cluster(name: str, ports: Sequence[int]) -> dict[str, Any]:
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "2s",
        "per_connection_buffer_limit_bytes": _BUFFER_BYTES,
        "circuit_breakers": {"thresholds": [dict.fromkeys(_LIMITS, 100_000)]},
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _address(port)}} for port in ports]}],
        },
    }


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


def _bootstrap(admin_port: int, listeners: list[dict[str, Any]], clusters: list[dict[str, Any]]) -> dict[str, Any]:
    return {"admin": {"address": _address(admin_port)}, "static_resources": {"listeners": listeners, "clusters": clusters}}
