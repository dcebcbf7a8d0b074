"""A configuration that cannot work is refused, and the message says where."""

from __future__ import annotations

from pathlib import Path

import pytest

from extproc.config import Address, ConfigError, load, parse

WORKERS = "workers: {prefill: ['10.0.0.1:8100'], decode: ['10.0.0.2:8200', '[fd00::1]:8200']}\n"


def test_the_smallest_configuration_is_the_workers() -> None:
    config = parse(WORKERS)
    assert config.workers.decode == ["10.0.0.2:8200", "[fd00::1]:8200"]
    assert config.limits.max_body_bytes == 64 * 1024 * 1024
    assert config.prefill.via == "direct"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "baton.yaml: Expected object, got null"),
        ("a: [", "baton.yaml:1: not YAML"),
        ("workers: {prefill: ['10.0.0.1:1']}", "workers.decode: at least one worker is needed"),
        (WORKERS + "lissten: x", "baton.yaml:2: lissten: unknown field; did you mean listen?"),
        (WORKERS + "prefill: {timeout: 3}", "baton.yaml:2: prefill.timeout: unknown field; did you mean timeout_s?"),
        (WORKERS + "prefill: {timeout_s: soon}", "baton.yaml:2: prefill.timeout_s: Expected float, got str"),
        (WORKERS + "prefill: {timeout_s: -1}", "baton.yaml:2: prefill.timeout_s: -1"),
        (WORKERS + "prefill: {timeout_s: .inf}", "prefill.timeout_s: inf"),
        (WORKERS + "prefill: {via: somewhere}", "prefill.via: 'somewhere'"),
        (WORKERS + "prefill: {timeout_s: 700}", "envoy.idle_timeout_s (600 s) must be longer than prefill.timeout_s (700 s)"),
        (WORKERS + "listen: 'unix:relative'", "listen: 'unix:relative'"),
        (WORKERS + f"listen: 'unix:/{'x' * 120}'", "107 bytes"),
        (WORKERS + "limits: {max_held_bytes: 1000}", "limits.max_held_bytes"),
        (WORKERS + "handoff: {lease_s: 2}", "handoff.release_delay_s: not below handoff.lease_s"),
        (WORKERS + "handoff: {connector: carrier_pigeon}", "baton.yaml:2: handoff.connector: Invalid enum value"),
        (WORKERS + "handoff: {max_age_share: 1.5}", "handoff.max_age_share: 1.5"),
        (WORKERS + "handoff: {connector: nixl_push}", "handoff.nixl_push: the prefill worker 10.0.0.1:8100 is missing"),
        (
            WORKERS + "handoff: {connector: lmcache, lmcache: {'10.0.0.2:8200': {host: h, init_ports: [1], alloc_ports: [2]}}}",
            "handoff.lmcache: the decode worker [fd00::1]:8200 is missing",
        ),
        (WORKERS + "log_level: loud", "log_level: 'loud'"),
        (WORKERS + "log_format: xml", "baton.yaml:2: log_format: Invalid enum value"),
        (WORKERS + "log_sample: 1.5", "log_sample: 1.5 is not 0 to 1"),
        (WORKERS + "log_slow_s: -1", "log_slow_s: -1"),
        (WORKERS + "tracing: {endpoint: 'collector:4317'}", "tracing.endpoint: 'collector:4317' is not http://host:port"),
        (WORKERS + "tracing: {endpoint: 'http://c:4317/x'}", "gRPC has no path"),
        (WORKERS + "tracing: {endpoint: 'http://c:99999'}", "tracing.endpoint"),
        (WORKERS + "tracing: {endpoint: 'http://u:k3y@c'}", "tracing.endpoint: only http://host:port/path; keys go into"),
        (WORKERS + "tracing: {endpoint: 'https://c'}", "tracing.endpoint: with https, Envoy's part has to be off"),
        (WORKERS + "tracing: {endpoint: 'http://c', headers_file: /x}", "tracing.headers_file: needs tracing.envoy: false"),
        (WORKERS + "tracing: {endpoint: 'http://c', sample_ratio: 1.5}", "tracing.sample_ratio: 1.5 is over 1"),
        (WORKERS + "tracing: {endpoint: 'http://c', timeout_s: 0}", "tracing.timeout_s: 0"),
        (WORKERS + WORKERS, "baton.yaml:2: the key 'workers' stands twice in the same mapping"),
        ("workers: {prefill: [], decode: ['10.0.0.2:1']}", "workers.prefill: at least one"),
        ("workers: {prefill: ['10.0.0.1:99999'], decode: ['10.0.0.2:1']}", "workers.prefill[0]: '10.0.0.1:99999'"),
        ("workers: {prefill: ['10.0.0.1:1'], decode: ['gpu-3:1']}", "workers.decode[0]: 'gpu-3:1': a worker is ip:port"),
        ("workers: {prefill: ['[0:0:0:0:0:0:0:1]:1'], decode: ['10.0.0.2:1']}", "write it as '[::1]:1'"),
        ("workers: {prefill: ['10.0.0.1:0080'], decode: ['10.0.0.2:1']}", "write it as '10.0.0.1:80'"),
        ("workers: {prefill: ['unix:/run/w.sock'], decode: ['10.0.0.2:1']}", "not a name or a unix socket"),
        ("workers: {prefill: ['10.0.0.1:1', '10.0.0.1:1'], decode: ['10.0.0.2:1']}", "stands there twice"),
    ],
)
def test_what_cannot_work_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, source="baton.yaml")
    assert message in str(caught.value)
    assert str(caught.value).startswith("baton.yaml:")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        load(tmp_path / "nowhere.yaml")


def test_addresses() -> None:
    assert Address.parse("127.0.0.1:80") == Address(host="127.0.0.1", port=80)
    assert Address.parse("unix:/run/x.sock").path == "/run/x.sock"
    assert str(Address.parse("[::1]:80")) == "[::1]:80"
    for wrong in ("", ":80", "host", "host:0", "host:65536", "host:8x", "http://host:80", "unix:"):
        with pytest.raises(ValueError):
            Address.parse(wrong)
