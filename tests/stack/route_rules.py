"""What control planes make of their routes: a VirtualService and an HTTPRoute as Envoy's routes.

Only what our examples use: the rest is an error, so that an example cannot say more than what is run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

ROOT = Path(__file__).parents[2] / "envoy"
EXT_PROC = "envoy.filters.http.ext_proc"

Route = dict[str, Any]


def documents(path: str, kind: str) -> list[Any]:
    """The documents of one kind in a file under ``envoy/``."""
    found = [each for each in YAML(typ="safe").load_all((ROOT / path).read_text()) if each["kind"] == kind]
    assert found, f"{path} has no {kind}"
    return found


def of_virtual_service(document: Any) -> list[Route]:
    """In the order in which they stand: the first that matches counts. A host's first part is the cluster."""
    routes = []
    for rule in document["spec"]["http"]:
        _only(rule, "name", "match", "route", "timeout", "retries")
        assert rule["timeout"] == "0s" and rule["retries"] == {"attempts": 0}, "a long answer is cut, or a handoff used twice"
        (target,) = rule["route"]
        for match in rule.get("match", [{}]):
            _only(match, "headers")
            headers = [_istio_header(name, how) for name, how in match.get("headers", {}).items()]
            routes.append(_route(rule["name"], "/", headers, target["destination"]["host"].partition(".")[0]))
    return routes


def of_http_route(document: Any, overrides: Mapping[str, Any]) -> list[Route]:
    """The most specific match counts, then the order. A backend is an InferencePool: a cluster, and what a route overrides."""
    ranked = []
    for rule in document["spec"]["rules"]:
        _only(rule, "matches", "backendRefs", "timeouts")
        assert rule["timeouts"] == {"request": "0s"}
        (backend,) = rule["backendRefs"]
        assert backend["kind"] == "InferencePool"
        for match in rule.get("matches", [{}]):
            _only(match, "path", "headers")
            path = match.get("path", {"type": "PathPrefix", "value": "/"})
            assert path["type"] == "PathPrefix"
            headers = [_gateway_header(each) for each in match.get("headers", [])]
            route = _route(backend["name"], path["value"], headers, backend["name"])
            route["typed_per_filter_config"] = {EXT_PROC: overrides[backend["name"]]}
            ranked.append(((-len(path["value"]), -len(headers)), route))
    return [route for _, route in sorted(ranked, key=lambda each: each[0])]


def with_filter_patches(routes: list[Route], document: Any) -> list[Route]:
    """The HTTP_ROUTE patches of an EnvoyFilter, merged into the routes of the names that they are for."""
    for patch in document["spec"]["configPatches"]:
        assert patch["applyTo"] == "HTTP_ROUTE" and patch["patch"]["operation"] == "MERGE"
        named = patch["match"]["routeConfiguration"]["vhost"]["route"]["name"]
        fitting = [route for route in routes if route["name"] == named]
        assert fitting, f"no route is named {named}"
        for route in fitting:
            route.update(patch["patch"]["value"])
    return routes


def _istio_header(name: str, how: dict[str, str]) -> Any:
    ((kind, value),) = how.items()
    return _header(name, {"exact": "exact", "prefix": "prefix", "regex": "safe_regex"}[kind], value)


def _gateway_header(match: dict[str, str]) -> Any:
    return _header(match["name"], {"Exact": "exact", "RegularExpression": "safe_regex"}[match["type"]], match["value"])


def _header(name: str, kind: str, value: str) -> Any:
    matcher: Any = {"regex": value} if kind == "safe_regex" else value
    return {"name": name.lower(), "string_match": {kind: matcher}}


def _route(name: str, prefix: str, headers: list[Any], cluster: str) -> Route:
    return {
        "name": name,
        "match": {"prefix": prefix, "headers": headers},
        "route": {"cluster": cluster, "timeout": "0s", "idle_timeout": "600s"},
        "request_body_buffer_limit": 64 << 20,
    }


def _only(what: Mapping[str, Any], *known: str) -> None:
    unknown = what.keys() - set(known)
    assert not unknown, f"nothing here translates {unknown}"
