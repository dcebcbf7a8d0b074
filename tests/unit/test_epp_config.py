"""The settings of an endpoint picker: what follows from one word, and what contradicts itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from extproc.cli_epp import secure_and_rest, settings_of
from extproc.config import Config, ConfigError, parse
from extproc.discovery.kubernetes.settings import PoolWorkers
from extproc.epp import conformance

WORKERS = 'workers: {prefill: ["10.0.0.1:8100"], decode: ["10.0.0.2:8200"]}\n'


def config(text: str = "") -> Config:
    return parse(WORKERS + text)


def test_one_word_makes_it_a_picker_on_the_ports_that_gateways_expect() -> None:
    made = config("epp: {enabled: true}")
    assert (made.listen, made.epp.health_listen, made.epp.metrics_listen) == ("0.0.0.0:9002", "0.0.0.0:9003", "0.0.0.0:9090")
    assert made.admin == "127.0.0.1:9091"
    assert made.tls_mode == "self_signed"
    assert not made.access_log
    assert not made.unseen_answers
    assert not made.watches


def test_without_it_nothing_changes() -> None:
    made = config()
    assert (made.listen, made.admin, made.tls_mode) == ("unix:/run/baton/extproc.sock", "127.0.0.1:9003", "none")
    assert made.access_log


def test_what_is_given_holds() -> None:
    made = config('listen: "10.0.0.9:7000"\nadmin: "127.0.0.1:7001"\ntls: {mode: none}\nepp: {enabled: true}')
    assert (made.listen, made.admin, made.tls_mode) == ("10.0.0.9:7000", "127.0.0.1:7001", "none")


def test_it_survives_being_written_and_read_again() -> None:
    made = config("epp: {enabled: true}")
    assert msgspec.json.encode(msgspec.convert(msgspec.to_builtins(made), Config)) == msgspec.json.encode(made)
    assert msgspec.structs.replace(made, log_level="debug").listen == "0.0.0.0:9002"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("epp: {enabled: true}\nprocesses: 2", "run replicas instead"),
        ('epp: {enabled: true}\nlisten: "unix:/run/x.sock"', "needs a TCP port|unix socket nobody listens in"),
        ('epp: {enabled: true, health_listen: "0.0.0.0:9002"}', "port 9002 is that of listen"),
        ('epp: {enabled: true}\nadmin: "0.0.0.0:9090"', "port 9090 is that of admin"),
        ("epp: {enabled: true, fallback_endpoints: 9}", "more than 8"),
        ("epp: {enabled: true, fallback_endpoints: -1}", "epp.fallback_endpoints"),
        ("tls: {mode: files}\nlisten: 0.0.0.0:9002", "tls.cert_file: mode files needs it"),
        ("tls: {mode: files, cert_file: a}\nlisten: 0.0.0.0:9002", "tls.key_file: mode files needs it"),
        ("tls: {mode: self_signed, cert_file: a, key_file: b}\nlisten: 0.0.0.0:9002", "goes with mode: files"),
        ("tls: {client_ca_file: a}\nlisten: 0.0.0.0:9002", "tls.client_ca_file"),
        ("tls: {mode: self_signed}", "unix socket nobody listens in"),
        ("tls: {mode: self_signed, handshake_timeout_s: 0}\nlisten: 0.0.0.0:9002", "tls.handshake_timeout_s"),
    ],
)
def test_contradictions_are_refused_with_the_field(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config(text)


def test_the_conformance_suites_header_names_addresses_or_hosts_of_the_pool_and_no_others() -> None:
    known = ["10.0.0.1:3000", "10.0.0.1:3002", "10.0.0.2:3000", "[fd00::1]:3000"]
    assert conformance.selection("10.0.0.1", known) == {"10.0.0.1:3000", "10.0.0.1:3002"}
    assert conformance.selection("10.0.0.2, 10.0.0.1:3002", known) == {"10.0.0.2:3000", "10.0.0.1:3002"}
    assert conformance.selection("fd00::1", known) == {"[fd00::1]:3000"}
    assert conformance.selection("10.9.9.9:22,example.org", known) == frozenset()
    assert conformance.selection("", known) == frozenset()


# -- baton epp -----------------------------------------------------------------------------------------------------------------


def options(base: Config | None = None, **more: Any) -> Config:
    given: dict[str, Any] = {
        "pool": PoolWorkers(name="llama"),
        "prefill": None,
        "ports": (9002, 9003, 9090),
        "bind": "0.0.0.0",
        "cert_path": None,
        "secure": True,
        "conformance": False,
    }
    return settings_of(base, **{**given, **more})


def test_a_pools_name_is_enough() -> None:
    made = options()
    assert made.epp.enabled
    assert made.workers.kubernetes is not None
    assert [each.name for each in made.workers.kubernetes.inference_pools] == ["llama"]
    assert (made.listen, made.epp.health_listen, made.epp.metrics_listen) == ("0.0.0.0:9002", "0.0.0.0:9003", "0.0.0.0:9090")
    assert made.tls_mode == "self_signed"


def test_options_hold_over_a_file_and_the_file_for_what_they_do_not_say() -> None:
    base = config("log_level: debug\nepp: {ready_after_s: 7}")
    made = options(base, ports=(7002, 7003, 7090), bind="[::]", conformance=True)
    assert (made.log_level, made.epp.ready_after_s, made.epp.conformance_headers) == ("debug", 7, True)
    assert (made.listen, made.epp.metrics_listen) == ("[::]:7002", "[::]:7090")
    assert made.workers.prefill == ()
    assert options(base, pool=None).workers == base.workers


def test_a_folder_of_certificates_and_plaintext() -> None:
    made = options(cert_path=Path("/certs"))
    assert (made.tls_mode, made.tls.cert_file, made.tls.key_file) == ("files", "/certs/tls.crt", "/certs/tls.key")
    assert options(secure=False).tls_mode == "none"


def test_without_a_pool_and_without_a_file_nobody_knows_the_workers() -> None:
    with pytest.raises(ConfigError, match="--pool-name"):
        options(pool=None)


@pytest.mark.parametrize(
    ("arguments", "secure"),
    [([], True), (["--secure-serving"], True), (["--secure-serving=true"], True), (["-secure-serving=false"], False)],
)
def test_flags_are_read_as_go_writes_them(arguments: list[str], secure: bool) -> None:
    assert secure_and_rest([*arguments, "--zap-encoder", "json"]) == (secure, ["--zap-encoder", "json"])


def test_a_flag_that_is_neither_true_nor_false_is_refused() -> None:
    with pytest.raises(ConfigError, match="neither true nor false"):
        secure_and_rest(["--secure-serving=perhaps"])
