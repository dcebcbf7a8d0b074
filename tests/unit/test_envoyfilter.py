"""The double of istiod that puts our EnvoyFilter into a gateway: what it leaves alone, and what it refuses."""

from __future__ import annotations

import copy
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import ParseError

from extproc.stack import find_envoy
from tests.stack.mesh import envoyfilter, istio
from tests.stack.mesh.bootstrap import Ports
from tests.stack.mesh.manifests import load, only
from tests.stack.mesh.messages import content, merge, message, unpacked

OBJECTS = load("envoy/istio/envoyfilter.yaml")
SERVICES = {
    "baton-decode.inference": {8000: ["10.0.0.1:8000"]},
    "baton-filter.inference": {9002: ["10.0.0.2:9002"]},
    "other.apps": {80: ["10.0.0.3:80"]},
}
ALL_PATCHES = 6


def manager(proxy: envoyfilter.Proxy) -> dict[str, Any]:
    return content(unpacked(proxy.listeners[0].filter_chains[0].filters[0].typed_config))


def patched(change: Any = None) -> tuple[int, envoyfilter.Proxy]:
    manifest = copy.deepcopy(only(OBJECTS, "EnvoyFilter"))
    if change is not None:
        change(manifest)
    proxy = istio.gateway(OBJECTS, SERVICES)
    return envoyfilter.apply(manifest, proxy), proxy


def test_every_patch_finds_one_thing() -> None:
    assert patched()[0] == ALL_PATCHES == len(only(OBJECTS, "EnvoyFilter")["spec"]["configPatches"])


def test_what_the_gateway_had_stays_as_it_was() -> None:
    """Logs, tracing, limits, its own filters and other routes: what is there already is there afterwards, in its order."""
    before, after = istio.gateway(OBJECTS, SERVICES), patched()[1]
    was, now = manager(before), manager(after)
    ours = {"early_header_mutation_extensions", "local_reply_config", "http_filters"}
    assert {name: value for name, value in now.items() if name not in ours} == {
        name: value for name, value in was.items() if name not in ours
    }
    kept = [each for each in now["http_filters"] if not each["name"].startswith("baton.")]
    assert kept == was["http_filters"]
    assert all(each["disabled"] for each in now["http_filters"] if each["name"].startswith("baton."))
    assert [each["name"] for each in now["http_filters"]][-3:] == ["baton.ext_proc", "baton.seen", "envoy.filters.http.router"]
    assert content(before.routes[0])["virtual_hosts"][1] == content(after.routes[0])["virtual_hosts"][1]
    assert content(before.clusters[2]) == content(after.clusters[2])


@pytest.mark.parametrize(
    "change",
    [
        lambda each: each["metadata"].update(namespace="inference"),
        lambda each: each["spec"]["workloadSelector"]["labels"].update(istio="egressgateway"),
    ],
)
def test_pods_of_another_namespace_or_label_are_left_alone(change: Any) -> None:
    changed, proxy = patched(change)
    assert changed == 0 and manager(proxy) == manager(istio.gateway(OBJECTS, SERVICES))


def test_another_port_is_left_alone() -> None:
    def other_port(each: dict[str, Any]) -> None:
        for patch in each["spec"]["configPatches"]:
            if "listener" in patch["match"]:
                patch["match"]["listener"]["portNumber"] = 8443

    assert patched(other_port)[0] == ALL_PATCHES - 3


def test_field_that_envoy_does_not_know_is_refused() -> None:
    def misspell(each: dict[str, Any]) -> None:
        each["spec"]["configPatches"][1]["patch"]["value"]["typed_config"]["message_timout"] = "1s"

    with pytest.raises(ParseError, match="message_timout"):
        patched(misspell)


def test_operation_that_is_not_done_here_is_no_silent_success() -> None:
    def other(each: dict[str, Any]) -> None:
        each["spec"]["configPatches"][1]["patch"]["operation"] = "INSERT_AFTER"

    with pytest.raises(ValueError, match="INSERT_AFTER"):
        patched(other)


def test_merging_replaces_durations_and_words_and_adds_to_lists() -> None:
    kind = "envoy.config.cluster.v3.Cluster"
    into = message(
        kind, {"name": "a", "connect_timeout": "10.5s", "health_checks": [{"timeout": "1s"}], "circuit_breakers": {}}
    )
    merge(into, message(kind, {"connect_timeout": "2s", "health_checks": [{"timeout": "3s"}]}))
    assert content(into) == {
        "name": "a",
        "connect_timeout": "2s",
        "health_checks": [{"timeout": "1s"}, {"timeout": "3s"}],
        "circuit_breakers": {},
    }


def test_envoy_refuses_localities_weighed_beside_the_pin(tmp_path: Path) -> None:
    """Why there is no outlierDetection in our DestinationRule: Istio would add this to the cluster."""
    made = content(istio.configuration(OBJECTS, SERVICES, Ports(1, 2)))
    said = []
    for changed in ({}, {"locality_weighted_lb_config": {}}):
        made["static_resources"]["clusters"][0]["common_lb_config"] = changed
        file = tmp_path / "envoy.json"
        file.write_text(json.dumps(made), encoding="utf-8")
        done = subprocess.run([find_envoy(), "--mode", "validate", "-c", file], capture_output=True, text=True, check=False)
        said.append((done.returncode, "load_balancing_policy cannot be combined" in done.stderr))
    assert said == [(0, False), (1, True)]
