"""Settings of TLS and networks: what is refused, what Envoy is told, and files that change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from extproc.config import Config, ConfigError, parse
from extproc.discovery.guarded import Guarded, Networks
from extproc.envoy_tls import sds_files
from extproc.envoy_yaml import render
from extproc.handoff.remote_hosts import RemoteHosts, host_fault
from extproc.observe.tracing import _headers
from extproc.routing.endpoint_spec import EndpointSet, EndpointSpec
from extproc.tls.files import FAILED, RELOADED, Followed, open_to_others
from extproc.tls.header_file import HeaderFile
from extproc.tls.reasons import kind_of, tls_reason
from extproc.tls.workers import WorkerLink, client_context
from extproc.worker_key import WorkerKey
from tests.certificates import Authority
from workers.spec import WorkerSpec
from workers.vllm import command

BASE: dict[str, Any] = {"workers": {"prefill": ["10.0.0.1:8100"], "decode": ["10.0.0.2:8200"]}, "listen": "127.0.0.1:9002"}
GOOD = {"ca_file": "/tls/ca.pem", "server_name": "workers.test", "cert_file": "/tls/a.pem", "key_file": "/tls/a.key"}
DIRECTORY = {"secrets_dir": "/etc/baton/envoy"}


def config(**sections: Any) -> Config:
    return parse(
        json.dumps({**BASE, **{k: {**BASE.get(k, {}), **v} if isinstance(v, dict) else v for k, v in sections.items()}})
    )


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"workers": {"tls": {}}}, "workers.tls.ca_file"),
        ({"workers": {"tls": {"ca_file": "/ca"}}}, "workers.tls.server_name"),
        ({"workers": {"tls": {**GOOD, "server_name": "a b"}}}, "workers.tls.server_name: 'a b'"),
        ({"workers": {"tls": {**GOOD, "key_file": None}}}, "workers.tls.cert_file"),
        ({"workers": {"tls": {**GOOD, "ca_file": ""}}}, "workers.tls.ca_file: an empty path"),
        ({"workers": {"tls": {**GOOD, "insecure_skip_verify": True}}}, "workers.tls.insecure_skip_verify"),
        ({"workers": {"tls": {**GOOD, "ca": "x"}}}, "unknown field"),
        ({"workers": {"networks": ["10.0.0.1/8"]}}, "workers.networks[0]"),
        ({"workers": {"replace_credentials": True}}, "workers.replace_credentials: needs workers.api_key_file"),
        (
            {"workers": {"replace_credentials": True, "api_key_file": "/k"}, "envoy": {"filter_down": "round_robin"}},
            "workers.replace_credentials",
        ),
        ({"handoff": {"remote_hosts": ["10.0.0.0/33"]}}, "handoff.remote_hosts"),
        ({"handoff": {"remote_hosts": ["a/b"]}}, "handoff.remote_hosts"),
        ({"admin_hosts": ["a:80"]}, "admin_hosts[0]"),
        ({"admin_hosts": [""]}, "admin_hosts[0]"),
        ({"envoy": {"extproc_tls": {"ca_file": "/ca"}}}, "envoy.extproc_tls.server_name"),
        ({"envoy": {"api_keys": {"file": ""}}}, "envoy.api_keys.file"),
        ({"envoy": {"api_keys": {"file": "/k", "client_header": "X Y"}}}, "envoy.api_keys.client_header"),
        ({"envoy": {"api_keys": {"file": "/k", "requests_per_s": 0}}}, "envoy.api_keys.requests_per_s"),
    ],
)
def test_contradictions_are_refused_with_the_field(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config(**sections)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"workers": {"tls": GOOD}}, "envoy.secrets_dir: workers.tls"),
        ({"workers": {"tls": {**GOOD, "key_file": "/other/a.key"}}, "envoy": DIRECTORY}, "workers.tls.key_file"),
        ({"tls": {"mode": "files", "cert_file": "/c", "key_file": "/k"}}, "envoy.extproc_tls"),
        ({"tls": {"mode": "self_signed", "client_ca_file": "/ca"}}, "envoy.extproc_tls: tls.client_ca_file"),
        (
            {
                "tls": {"mode": "files", "cert_file": "/c", "key_file": "/k", "client_ca_file": "/ca"},
                "envoy": {"extproc_tls": {"ca_file": "/ca", "server_name": "filter.test"}, **DIRECTORY},
            },
            "envoy.extproc_tls.cert_file",
        ),
    ],
)
def test_envoy_is_not_told_what_cannot_work(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        render(config(**sections))
    assert words in str(refused.value)


def clusters(made: Config) -> dict[str, Any]:
    return {each["name"]: each for each in YAML(typ="safe").load(render(made))["static_resources"]["clusters"]}


def test_plain_http_is_the_default_and_has_no_transport_socket() -> None:
    assert all("transport_socket" not in each for each in clusters(config(prefill={"via": "127.0.0.1:9100"})).values())
    assert sds_files(config(envoy=DIRECTORY)) == {}


def test_all_clusters_of_workers_and_of_the_filter_have_tls() -> None:
    made = config(
        workers={"tls": GOOD},
        prefill={"via": "127.0.0.1:9100"},
        tls={"mode": "files", "cert_file": "/c", "key_file": "/k", "client_ca_file": "/ca"},
        envoy={"extproc_tls": {**GOOD, "server_name": "filter.test"}, "filter_down": "round_robin", **DIRECTORY},
    )
    found = clusters(made)
    names = {name: each["transport_socket"]["typed_config"] for name, each in found.items()}
    assert {name: each["sni"] for name, each in names.items()} == {
        "decode": "workers.test",
        "any_decode": "workers.test",
        "prefill": "workers.test",
        "extproc": "filter.test",
        "watch": "filter.test",
    }
    for name, each in names.items():
        common = each["common_tls_context"]
        whom = "extproc" if each["sni"] == "filter.test" else "workers"
        sans = common["combined_validation_context"]["default_validation_context"]["match_typed_subject_alt_names"]
        assert [san["matcher"]["exact"] for san in sans] == [each["sni"]], name
        assert common["tls_certificate_sds_secret_configs"][0]["name"] == f"{whom}_cert"
    assert names["extproc"]["common_tls_context"]["alpn_protocols"] == ["h2"]


def test_self_signed_filter_is_taken_without_a_check_and_a_socket_needs_no_tls() -> None:
    found = clusters(config(tls={"mode": "self_signed"}))
    assert "combined_validation_context" not in found["extproc"]["transport_socket"]["typed_config"]["common_tls_context"]
    assert "transport_socket" not in clusters(config(listen="unix:/run/x.sock"))["extproc"]


def test_files_for_envoy_name_paths_and_hold_no_secret() -> None:
    files = {
        path.name: json.loads(text)["resources"][0]
        for path, text in sds_files(config(workers={"tls": GOOD}, envoy=DIRECTORY)).items()
    }
    assert files.keys() == {"workers_ca.json", "workers_cert.json"}
    assert files["workers_cert.json"]["tls_certificate"] == {
        "certificate_chain": {"filename": "/tls/a.pem"},
        "private_key": {"filename": "/tls/a.key"},
        "watched_directory": {"path": "/tls"},
    }


@pytest.mark.parametrize(
    ("networks", "address", "allowed"),
    [
        ([], "10.0.0.1:80", True),
        ([], "127.0.0.1:80", True),
        ([], "[fd00::1]:80", True),
        ([], "169.254.7.7:80", True),
        ([], "169.254.169.254:80", False),
        ([], "[::ffff:169.254.169.254]:80", False),
        ([], "[fd00:ec2::254]:80", False),
        ([], "100.100.100.200:80", False),
        ([], "0.0.0.0:80", False),
        ([], "[::]:80", False),
        ([], "224.0.0.1:80", False),
        ([], "255.255.255.255:80", False),
        (["10.0.0.0/8"], "10.255.0.1:80", True),
        (["10.0.0.0/8"], "[::ffff:10.1.1.1]:80", True),
        (["10.0.0.0/8"], "11.0.0.1:80", False),
        (["10.0.0.0/8"], "[fd00::1]:80", False),
        (["fd00::/8"], "[fd00::1]:80", True),
        (["169.254.169.254/32"], "169.254.169.254:80", True),
        (["0.0.0.0/0"], "0.0.0.0:80", False),
    ],
)
def test_which_addresses_a_worker_may_have(networks: list[str], address: str, allowed: bool) -> None:
    assert (Networks(networks).fault(address) is None) is allowed


class Source:
    kind, name = "file", "x"

    def __init__(self) -> None:
        self.said = EndpointSet()

    async def look(self) -> EndpointSet:
        return self.said

    async def pause(self) -> None:
        return


async def test_what_a_source_may_not_name_is_left_out_and_told_once_until_it_comes_again() -> None:
    source, told = Source(), []
    guarded = Guarded(source, Networks([]), lambda kind, address, why: told.append((kind, address, why)))
    good, bad = EndpointSpec(address="10.0.0.1:80"), EndpointSpec(address="169.254.169.254:80")
    source.said = EndpointSet(decode=(good, bad))
    for _ in range(3):
        assert (await guarded.look()).decode == (good,)
    assert [each[:2] for each in told] == [("file", bad.address)]
    source.said = EndpointSet(decode=(good,))
    assert await guarded.look() is source.said
    source.said = EndpointSet(prefill=(bad,))
    assert (await guarded.look()).prefill == ()
    assert len(told) == 2


@pytest.mark.parametrize(
    ("host", "good"),
    [
        ("10.0.0.1", True),
        ("::1", True),
        ("[fd00::1]", True),
        ("fe80::1%eth0", True),
        ("node-1.gpu", True),
        ("localhost", True),
        ("", False),
        ("a b", False),
        ("a/b", False),
        ("a:80", False),
        ("a\n", False),
        ("*", False),
        ("a;b", False),
        ("x" * 254, False),
        ("-a", False),
    ],
)
def test_what_can_be_a_host(host: str, good: bool) -> None:
    assert (host_fault(host, 5600) is None) is good


def test_hosts_that_are_the_workers_own() -> None:
    hosts = RemoteHosts(["worker"])
    assert hosts.fault("10.0.0.1", "10.0.0.1:8100") is None
    assert hosts.fault("fd00::1", "[fd00::1]:8100") is None
    assert hosts.fault("10.0.0.2", "10.0.0.1:8100") is not None


def test_key_is_read_again_and_a_faulty_one_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("one\n")
    key = WorkerKey(str(file))
    (followed,) = key.followed
    assert dict(key) == {"authorization": "Bearer one"}
    assert followed.look() is None
    file.write_text("the other\n")
    assert followed.look() == FAILED
    assert dict(key) == {"authorization": "Bearer one"}
    assert followed.fault is not None and "the other" not in followed.fault
    assert followed.look() is None, "a faulty state is told once"
    file.write_text("another\n")
    assert followed.look() == RELOADED
    assert dict(key) == {"authorization": "Bearer another"}
    file.unlink()
    assert followed.look() == FAILED
    assert dict(key) == {"authorization": "Bearer another"}


def test_symbolic_link_that_is_switched_is_a_change(tmp_path: Path) -> None:
    """As Kubernetes does it with a mounted Secret."""
    for name in ("1", "2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "key").write_text(f"key-{name}")
    (tmp_path / "data").symlink_to("1")
    key = WorkerKey(str(tmp_path / "data" / "key"))
    (tmp_path / "new").symlink_to("2")
    (tmp_path / "new").rename(tmp_path / "data")
    assert key.followed[0].look() == RELOADED
    assert dict(key) == {"authorization": "Bearer key-2"}


def test_file_that_others_may_read_is_named(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("x")
    for mode, told in ((0o600, False), (0o640, False), (0o644, True), (0o604, True)):
        file.chmod(mode)
        assert (open_to_others(str(file)) is not None) is told
    assert open_to_others(str(tmp_path / "none")) is None


def test_files_that_are_no_certificates_are_named_without_their_content(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair, other = authority.issue("a"), authority.issue("b")
    junk = tmp_path / "junk"
    junk.write_text("-----BEGIN secret planted-----\n")
    good = {"ca_file": str(authority.ca), "server_name": "x", "cert_file": str(pair.cert), "key_file": str(pair.key)}
    for change in (
        {"ca_file": str(junk)},
        {"ca_file": str(tmp_path / "none")},
        {"cert_file": str(junk)},
        {"key_file": str(junk)},
        {"key_file": str(other.key)},
        {"key_file": str(tmp_path / "none")},
    ):
        settings = config(workers={"tls": {**good, **change}}).workers.tls
        assert settings is not None
        with pytest.raises(OSError) as refused:
            client_context(settings)
        (named,) = change.values()
        assert named in str(refused.value)
        assert "planted" not in str(refused.value)
    link = WorkerLink(config(workers={"tls": good}).workers.tls)
    assert (link.scheme, link.url("10.0.0.1:80", "/x")) == ("https", "https://10.0.0.1:80/x")


def test_reasons_say_what_it_was_and_nothing_of_other_errors() -> None:
    assert tls_reason(ValueError("x")) is None
    assert kind_of(TimeoutError()) == "timeout"
    assert kind_of(ConnectionRefusedError()) == "unreachable"
    assert tls_reason(None) is None


def worker(**fields: Any) -> WorkerSpec:
    return WorkerSpec(
        role="decode", model="m", served_model_name="m", host="10.0.0.1", port=8000, side_channel_port=5600, **fields
    )


def test_worker_serves_https_by_vllms_own_flags() -> None:
    plain, encrypted = worker(), worker(ssl_certfile="/c", ssl_keyfile="/k", ssl_ca_certs="/ca")
    assert (plain.scheme, encrypted.scheme) == ("http", "https")
    assert not [each for each in command(plain).argv if "ssl" in each]
    argv = command(encrypted).argv
    start = argv.index("--ssl-certfile")
    assert argv[start : start + 9] == (
        *("--ssl-certfile", "/c", "--ssl-keyfile", "/k", "--enable-ssl-refresh"),
        *("--ssl-ca-certs", "/ca", "--ssl-cert-reqs", "2"),
    )
    for half in ({"ssl_certfile": "/c"}, {"ssl_keyfile": "/k"}, {"ssl_ca_certs": "/ca"}):
        with pytest.raises(ValueError, match="ssl_"):
            command(worker(**half))


def test_followed_files_see_every_change(tmp_path: Path) -> None:
    loads: list[int] = []
    file = tmp_path / "a"
    followed = Followed("x", [str(file), str(tmp_path / "b")], lambda: loads.append(1))
    assert followed.look() is None
    file.write_text("1")
    assert followed.look() == RELOADED
    (tmp_path / "b").write_text("1")
    assert followed.look() == RELOADED
    assert len(loads) == 2


def test_headers_for_the_collector_are_read_again(tmp_path: Path) -> None:
    file = tmp_path / "headers"
    file.write_text("x-key: one\n")
    headers = HeaderFile("tracing.headers_file", str(file), _headers)
    (followed,) = headers.followed
    file.write_text("x-key: the other one\nx-more: 1\n")
    assert followed.look() == RELOADED
    assert dict(headers.items()) == {"x-key": "the other one", "x-more": "1"}
    file.write_text("no header, and a secret\n")
    assert followed.look() == FAILED
    assert followed.fault is not None and "secret" not in followed.fault
    assert dict(headers.items()) == {"x-key": "the other one", "x-more": "1"}
