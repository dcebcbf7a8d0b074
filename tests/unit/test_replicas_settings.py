"""What is refused of the sections `replicas` and `envoy.filters`, and what Envoy is told of several filters."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from extproc.config import ConfigError, parse
from extproc.envoy_yaml import render

_WORKERS = 'workers: {prefill: ["127.0.0.1:1"], decode: ["127.0.0.1:2"]}\n'
_PLAIN = "plaintext: true, secret_file: /s"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('replicas: {peers: ["a:1"]}', "replicas.listen: peers is given, but not where the others reach this one"),
        ('replicas: {listen: "0.0.0.0:9005"}', "replicas.peers: who are the others"),
        ('replicas: {listen: "0.0.0.0:9005", dns: a}', "replicas.tls: is needed"),
        ('replicas: {listen: "0.0.0.0:9005", dns: a, plaintext: true}', "replicas.secret_file: is needed without tls"),
        (
            'replicas: {listen: "0.0.0.0:9005", dns: a, plaintext: true, tls: {ca_file: a, cert_file: b, key_file: c}}',
            "replicas.plaintext: contradicts tls",
        ),
        ('replicas: {listen: "0.0.0.0:9005", dns: a, tls: {ca_file: "", cert_file: b, key_file: c}}', "replicas.tls.ca_file"),
        ('replicas: {listen: "0.0.0.0:9005", dns: a, tls: {ca_file: a}}', "cert_file"),
        (f'replicas: {{listen: "unix:/x", dns: a, {_PLAIN}}}', "replicas.listen: 'unix:/x' is not host:port"),
        (f'replicas: {{listen: "0.0.0.0:9005", peers: ["a:1", "nonsense"], {_PLAIN}}}', "replicas.peers[1]"),
        (f'replicas: {{listen: "0.0.0.0:9005", dns: a, silence_s: 0.1, {_PLAIN}}}', "replicas.silence_s"),
        (f'replicas: {{listen: "0.0.0.0:9005", dns: a, refresh_s: 0.1, {_PLAIN}}}', "replicas.refresh_s"),
        (f'replicas: {{listen: "0.0.0.0:9005", dns: a, max_bytes_per_s: 5, {_PLAIN}}}', "replicas.max_bytes_per_s"),
        (f'replicas: {{listen: "0.0.0.0:9005", dns: a, port: 0, {_PLAIN}}}', "replicas.port"),
        (f'replicas: {{listen: "127.0.0.1:9003", dns: a, {_PLAIN}}}\nadmin: "127.0.0.1:9003"', "where something else listens"),
        (
            f'processes: 2\nreplicas: {{listen: "0.0.0.0:9005", dns: a, {_PLAIN}}}',
            "replicas.listen: with processes: 2 not possible",
        ),
        ('envoy: {filters: ["unix:/a", "b:1"]}', "envoy.filters: sockets and host:port do not go together"),
        ('envoy: {filters: ["b:1", "b:1"]}', "envoy.filters: an address stands there twice"),
        ('envoy: {filters: ["b"]}', "envoy.filters[0]"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_its_field(text: str, why: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(_WORKERS + text)
    assert why in str(refused.value)


def test_without_a_word_there_are_no_replicas() -> None:
    config = parse(_WORKERS)
    assert config.replicas.listen is None
    assert config.filters == config.listens


def cluster_of(text: str, name: str = "extproc") -> dict[str, Any]:
    tree = yaml.safe_load(render(parse(_WORKERS + text)))
    return next(each for each in tree["static_resources"]["clusters"] if each["name"] == name)


def test_two_addresses_are_two_endpoints_checked_and_left_out_when_they_are_gone() -> None:
    made = cluster_of('envoy: {filters: ["10.0.0.1:9002", "10.0.0.2:9002"]}')
    [group] = made["load_assignment"]["endpoints"]
    sockets = [each["endpoint"]["address"]["socket_address"] for each in group["lb_endpoints"]]
    assert [(each["address"], each["port_value"]) for each in sockets] == [("10.0.0.1", 9002), ("10.0.0.2", 9002)]
    assert made["type"] == "STATIC"
    assert made["health_checks"][0]["grpc_health_check"]["service_name"] == "envoy.service.ext_proc.v3.ExternalProcessor"
    assert made["common_lb_config"]["healthy_panic_threshold"] == {}
    assert made["outlier_detection"]["consecutive_local_origin_failure"] == 1
    assert "least_request" in str(made["load_balancing_policy"])
    assert "connection_keepalive" in str(made["typed_extension_protocol_options"])


def test_a_name_stands_for_all_replicas_behind_it() -> None:
    made = cluster_of('envoy: {filters: ["baton.ns.svc:9002"]}\nobserve: {sample: 0.5}')
    assert made["type"] == "STRICT_DNS"
    assert "least_request" in str(made["load_balancing_policy"]) and "outlier_detection" in made
    watch = cluster_of('envoy: {filters: ["baton.ns.svc:9002"]}\nobserve: {sample: 0.5}', "watch")
    assert "'port_value': 9004" in str(watch) and "baton.ns.svc" in str(watch)


def test_one_filter_is_told_as_before() -> None:
    made = cluster_of("")
    assert "outlier_detection" not in made and "load_balancing_policy" not in made
    assert "connection_keepalive" not in str(made)
