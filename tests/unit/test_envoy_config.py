"""Envoy's configuration: the real Envoy accepts it, and the settings that would fail silently have the right values."""

from __future__ import annotations

import functools
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import betterproto2
import msgspec
import pytest
from ruamel.yaml import YAML

from extproc import envoy_yaml
from extproc.config import ApiKeys, Config, ConfigError, Envoy, Limits, Observe, Prefill, Tls, Tracing, parse
from extproc.envoy_config import EXAMPLE, build
from extproc.envoy_yaml import render
from extproc.headers import (
    DESTINATION_HEADER,
    FILTER_REPLY_DETAILS,
    KV_TRANSFER_HEADER,
    ORIGIN_HEADER,
    PREFILLER_HEADER,
    ROUTING_HEADERS,
)
from extproc.policy_config import PolicyRule
from extproc.pools.settings import PoolRule
from extproc.stack import find_envoy
from extproc.tls.settings import ClientTls
from extproc.xds import write_endpoints

COMMITTED = Path(__file__).parents[2] / "envoy" / "envoy.yaml"


def change(base: Config = EXAMPLE, **fields: Any) -> Config:
    return msgspec.structs.replace(base, **fields)


def tree(config: Config = EXAMPLE) -> dict[str, Any]:
    return _tree(msgspec.json.encode(config))


@functools.cache
def _tree(encoded: bytes) -> dict[str, Any]:
    loaded: dict[str, Any] = YAML(typ="safe").load(render(msgspec.json.decode(encoded, type=Config)))
    return loaded


def listener(name: str, config: Config = EXAMPLE) -> dict[str, Any]:
    [found] = [item for item in tree(config)["static_resources"]["listeners"] if item["name"] == name]
    return dict(found)


def manager(name: str, config: Config = EXAMPLE) -> dict[str, Any]:
    return dict(listener(name, config)["filter_chains"][0]["filters"][0]["typed_config"])


def route(name: str, config: Config = EXAMPLE) -> dict[str, Any]:
    [found] = manager(name, config)["route_config"]["virtual_hosts"][0]["routes"]
    return dict(found)


def cluster(name: str, config: Config = EXAMPLE) -> dict[str, Any]:
    [found] = [item for item in tree(config)["static_resources"]["clusters"] if item["name"] == name]
    return dict(found)


def ext_proc(config: Config = EXAMPLE) -> dict[str, Any]:
    first = manager("front", config)["http_filters"][0]
    assert first["name"] == "envoy.filters.http.ext_proc"
    inner = first["typed_config"].get("extension_config", first)  # it may be one that is not shown good answers
    return dict(inner["typed_config"])


# --- the whole ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        change(),
        change(prefill=Prefill()),
        change(listen="127.0.0.1:9002", prefill=Prefill(via="127.0.0.1:8009")),
        change(listen="[::]:9002", prefill=Prefill(via="[::1]:8009"), envoy=Envoy(listen="[::]:8000", admin="[::1]:1")),
        change(listen="filter.example.org:9002"),
        change(envoy=Envoy(debug_headers=True), limits=Limits(max_body_bytes=1, max_streams=1)),
        change(envoy=Envoy(eds="grpc")),
        change(envoy=Envoy(pin="original_dst")),
        change(envoy=Envoy(filter_down="round_robin")),
        change(envoy=Envoy(stats=False, access_log=False), observe=Observe(sample=0)),
        change(envoy=Envoy(stats_listen="0.0.0.0:9902")),
    ],
    ids=[
        "unix",
        "direct",
        "tcp",
        "ipv6",
        "name",
        "limits",
        "grpc",
        "original_dst",
        "filter_down",
        "unobserved",
        "stats_listen",
    ],
)
def test_the_real_envoy_accepts_it(config: Config, tmp_path: Path) -> None:
    eds = tmp_path / "eds"
    for name in ("decode", "prefill"):
        write_endpoints(eds, name, ["127.0.0.1:8100", "[::1]:8100"])
    if config.envoy.eds != "grpc":
        config = change(config, envoy=msgspec.structs.replace(config.envoy, eds_dir=str(eds)))
    file = tmp_path / "envoy.yaml"
    file.write_text(render(config))
    command = [
        str(find_envoy()),
        "--mode",
        "validate",
        "--use-dynamic-base-id",
        "--log-level",
        "warning",
        "--config-path",
        str(file),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "deprecated" not in done.stderr.lower(), done.stderr


def test_committed_file_is_in_step() -> None:
    assert COMMITTED.read_text() == render(EXAMPLE)


def test_yaml_says_what_the_messages_say() -> None:
    # Characters that mean something in YAML, in the one place where a user's text ends up in the file.
    config = change(envoy=Envoy(eds_dir="""/run/a b: c #d 'e' "f" \\g {h} é\t%i"""))
    assert tree(config) == build(config).to_dict(casing=betterproto2.Casing.SNAKE)


def test_every_comment_finds_its_setting() -> None:
    left = dict(envoy_yaml._COMMENTS)
    tracing = Tracing(endpoint="http://collector:4317")
    for settings, processes in (
        (EXAMPLE.envoy, 1),
        (Envoy(stats_listen="[::]:9902"), 1),
        (Envoy(pin="original_dst"), 2),
        (Envoy(filter_down="round_robin"), 1),
        (Envoy(filters=["10.0.0.1:9002", "10.0.0.2:9002"]), 1),
    ):
        pools = [] if settings.filter_down == "round_robin" else [PoolRule(name="one", models=["m"])]
        config = change(envoy=settings, tracing=tracing, processes=processes, pools=pools)
        made = build(config).to_dict(casing=betterproto2.Casing.SNAKE)
        unused = dict(envoy_yaml._COMMENTS)
        list(envoy_yaml._emit(made, 0, "", unused))
        left = {path: text for path, text in left.items() if path in unused}
    made = build(_guarded()).to_dict(casing=betterproto2.Casing.SNAKE)
    list(envoy_yaml._emit(made, 0, "", left))
    assert left == {}


def _guarded() -> Config:
    """TLS to the filter and to workers, clients' keys, and the workers' own in their place."""
    tls = ClientTls(ca_file="/tls/ca.pem", server_name="a.test", cert_file="/tls/a.pem", key_file="/tls/a.key")
    keys = ApiKeys(file="/keys/api-keys.yaml", requests_per_s=5)
    return change(
        listen="127.0.0.1:9002",
        tls=Tls(mode="files", cert_file="/tls/f.pem", key_file="/tls/f.key", client_ca_file="/tls/ca.pem"),
        workers=msgspec.structs.replace(EXAMPLE.workers, tls=tls, api_key_file="/keys/k", replace_credentials=True),
        envoy=msgspec.structs.replace(EXAMPLE.envoy, secrets_dir="/etc/envoy", extproc_tls=tls, api_keys=keys),
    )


@pytest.mark.parametrize(
    ("listen", "expected"),
    [
        ("unix:/run/x.sock", ["/run/x.sock.0", "/run/x.sock.1", "/run/x.sock.2"]),
        ("10.0.0.1:9002", [9002, 9003, 9004]),
        ("filter:7000", [7000, 7001, 7002]),
    ],
)
def test_several_processes_are_endpoints_of_one_cluster_of_which_the_least_busy_is_taken(
    listen: str, expected: list[str | int]
) -> None:
    config = change(listen=listen, processes=3, admin="127.0.0.1:19003", observe=Observe(listen="unix:/run/watch.sock"))
    made = build(config).to_dict(casing=betterproto2.Casing.SNAKE)
    [extproc] = [each for each in made["static_resources"]["clusters"] if each["name"] == "extproc"]
    addresses = [each["endpoint"]["address"] for each in extproc["load_assignment"]["endpoints"][0]["lb_endpoints"]]
    found = [each["pipe"]["path"] if "pipe" in each else each["socket_address"]["port_value"] for each in addresses]
    assert found == expected
    [policy] = extproc["load_balancing_policy"]["policies"]
    assert policy["typed_extension_config"]["typed_config"]["selection_method"] == "FULL_SCAN"
    assert len(extproc["health_checks"]) == 1


# --- what a client can and cannot do ------------------------------------------------------------------------------------


def test_client_cannot_choose_workers() -> None:
    [strip] = manager("front")["early_header_mutation_extensions"]
    assert [mutation["remove"] for mutation in strip["typed_config"]["mutations"]] == list(ROUTING_HEADERS)
    assert {DESTINATION_HEADER, KV_TRANSFER_HEADER, "x-prefiller-host-port", "x-data-parallel-rank"} < set(ROUTING_HEADERS)


def test_header_spelled_with_underscores_is_dropped_and_the_request_served() -> None:
    assert manager("front")["common_http_protocol_options"]["headers_with_underscores_action"] == "DROP_HEADER"


def test_filter_and_worker_see_the_same_path() -> None:
    front = manager("front")
    assert front["normalize_path"] is True
    assert front["merge_slashes"] is True
    assert front["path_with_escaped_slashes_action"] == "UNESCAPE_AND_FORWARD"


def test_request_id_of_the_client_is_kept_and_returned() -> None:
    front = manager("front")
    assert front["use_remote_address"] is True
    assert front["preserve_external_request_id"] is True
    assert front["always_set_request_id_in_response"] is True


# --- traces -----------------------------------------------------------------------------------------------------------


def test_without_tracing_envoy_knows_nothing_of_it() -> None:
    assert "tracing" not in manager("front") and "request_id_extension" not in manager("front")
    off = change(tracing=Tracing(endpoint="http://10.0.0.9:4317", envoy=False))
    assert "collector" not in json.dumps(tree(off)["static_resources"]["clusters"])
    assert "tracing" not in manager("front", off)


@pytest.mark.parametrize(("protocol", "port"), [("grpc", 4317), ("http", 4318)])
def test_the_real_envoy_takes_the_tracer(protocol: Any, port: int, tmp_path: Path) -> None:
    file = tmp_path / "envoy.yaml"
    tracing = Tracing(endpoint="http://collector.example", protocol=protocol, sample_ratio=0.25)
    file.write_text(render(change(envoy=Envoy(), tracing=tracing)))
    subprocess.run([str(find_envoy()), "--mode", "validate", "-c", str(file)], check=True, capture_output=True)
    made = cluster("collector", change(tracing=tracing))
    assert made["type"] == "STRICT_DNS"
    [locality] = made["load_assignment"]["endpoints"]
    address = locality["lb_endpoints"][0]["endpoint"]["address"]["socket_address"]
    assert address == {"address": "collector.example", "port_value": port}


def test_the_filter_may_set_the_trace_context_only_where_it_traces() -> None:
    rule = ext_proc()["mutation_rules"]["allow_expression"]["regex"]
    traced = ext_proc(change(tracing=Tracing(endpoint="http://c")))["mutation_rules"]["allow_expression"]["regex"]
    assert re.fullmatch(rule, "traceparent") is None
    assert re.fullmatch(traced, "traceparent") and re.fullmatch(traced, "x-request-id") and not re.fullmatch(traced, "host")


def test_a_query_is_in_no_log_and_no_span() -> None:
    text = json.dumps(tree(change(tracing=Tracing(endpoint="http://c"))))
    assert "REQ(:path)" not in text and text.count("%PATH(NQ)") == 2


def test_admin_port_is_loopback_only() -> None:
    with pytest.raises(ConfigError, match=re.escape("envoy.admin: 0.0.0.0:9901")):
        build(change(envoy=Envoy(admin="0.0.0.0:9901")))


def test_prefill_listener_is_loopback_only() -> None:
    with pytest.raises(ConfigError, match=re.escape("prefill.via: 10.0.0.1:8009")):
        build(change(prefill=Prefill(via="10.0.0.1:8009")))


def test_envoy_cannot_listen_on_a_name() -> None:
    with pytest.raises(ConfigError, match=re.escape("envoy.listen: localhost:8000")):
        build(change(envoy=Envoy(listen="localhost:8000")))


# --- time ---------------------------------------------------------------------------------------------------------------


def test_long_answer_is_not_cut() -> None:
    assert route("front")["route"]["timeout"] == "0s"
    assert "max_stream_duration" not in render(EXAMPLE)


def test_silence_is_bounded_by_the_configuration() -> None:
    config = change(envoy=Envoy(idle_timeout_s=900.5))
    assert manager("front", config)["stream_idle_timeout"] == "900.500s"
    assert route("front", config)["route"]["idle_timeout"] == "900.500s"


def test_filter_has_the_time_of_a_prefill() -> None:
    config = change(prefill=Prefill(via="unix:/run/baton/prefill.sock", timeout_s=200))
    assert ext_proc(config)["message_timeout"] == "230s"
    assert route("prefill_loop", config)["route"]["timeout"] == "200s"
    assert manager("prefill_loop", config)["stream_idle_timeout"] == "0s"


def test_envoy_closes_idle_worker_connections_before_uvicorn_does() -> None:
    for name in ("decode", "prefill"):
        [options] = cluster(name)["typed_extension_protocol_options"].values()
        assert options["common_http_protocol_options"]["idle_timeout"] == "4s"


# --- size ---------------------------------------------------------------------------------------------------------------


def test_body_limit_leaves_room_for_what_the_filter_adds() -> None:
    config = change(limits=Limits(max_body_bytes=5_000_000))
    for name in ("front", "prefill_loop"):
        assert int(route(name, config)["request_body_buffer_limit"]) == 5_000_000 + 1_048_576


def test_body_limit_is_the_same_with_http2() -> None:
    # Envoy takes the larger of the stream window, the connection's buffer and the route's limit.
    config = change(limits=Limits(max_body_bytes=1))
    limit = int(route("front", config)["request_body_buffer_limit"])
    assert manager("front", config)["http2_protocol_options"]["initial_stream_window_size"] <= limit
    assert listener("front", config)["per_connection_buffer_limit_bytes"] <= limit


def test_requests_held_in_prefill_do_not_trip_a_circuit_breaker() -> None:
    for name in ("decode", "prefill", "extproc"):
        [threshold] = cluster(name)["circuit_breakers"]["thresholds"]
        assert set(threshold.values()) == {100_000}


def test_flood_of_clients_does_not_stop_prefill_calls() -> None:
    [monitor] = tree()["overload_manager"]["resource_monitors"]
    assert int(monitor["typed_config"]["max_active_downstream_connections"]) == 40_000
    assert listener("prefill_loop")["bypass_overload_manager"] is True
    assert "bypass_overload_manager" not in listener("front")


# --- the filter ---------------------------------------------------------------------------------------------------------


def test_response_never_passes_through_the_filter_but_its_end_is_known() -> None:
    assert ext_proc()["processing_mode"] == {
        "request_header_mode": "SEND",
        "request_body_mode": "BUFFERED",
        "request_trailer_mode": "SKIP",
        "response_header_mode": "SKIP",
        # response_body_mode: NONE is the default
        "response_trailer_mode": "SEND",
    }


def test_good_answers_of_marked_requests_are_not_shown_where_the_log_tells_of_them() -> None:
    shown = manager("front")["http_filters"][0]["typed_config"]
    [rule] = shown["xds_matcher"]["matcher_list"]["matchers"]
    status, mark = rule["predicate"]["and_matcher"]["predicate"]
    # In this order: without a status yet, Envoy asks again; without a mark, it would never ask again.
    assert status["single_predicate"]["value_match"] == {"exact": "2xx"}
    assert mark["single_predicate"]["input"]["typed_config"]["path"] == [{"key": "unseen"}]
    assert rule["on_match"]["action"]["typed_config"]["@type"].endswith("SkipFilter")
    for envoy in (Envoy(access_log=False), Envoy(body_mode="full_duplex_both")):
        assert "xds_matcher" not in manager("front", change(envoy=envoy))["http_filters"][0]["typed_config"]


def test_request_never_bypasses_the_filter() -> None:
    for mode in ("full_duplex", "full_duplex_both"):
        assert "failure_mode_allow" not in ext_proc(change(envoy=Envoy(body_mode=mode)))
    filter_ = ext_proc()
    assert filter_["status_on_error"]["code"] == "ServiceUnavailable"
    # An answer outlives the filter; a request that it has not named a worker for is refused by the next in the chain.
    assert filter_["failure_mode_allow"] is True
    behind = manager("front")["http_filters"][1]["typed_config"]
    [policy] = behind["rules"]["policies"].values()
    assert behind["rules"].get("action", "ALLOW") == "ALLOW"
    assert policy["principals"] == [{"header": {"name": DESTINATION_HEADER, "present_match": True}}]
    assert route("front")["match"] == {"prefix": "/"}
    assert "typed_per_filter_config" not in route("front")


@pytest.mark.parametrize(
    ("header", "allowed"),
    [
        ("content-length", True),
        (DESTINATION_HEADER, True),
        (KV_TRANSFER_HEADER, True),
        ("x-request-id", True),
        ("content-type", True),
        (PREFILLER_HEADER, True),
        ("retry-after", True),
        ("x-baton-decision", True),
        ("x-data-parallel-rank", True),
        ("x-kv-cache-source-host-port", False),
        ("content-encoding", False),
        (":path", False),
        ("host", False),
        ("authorization", False),
        ("x-forwarded-for", False),
        ("x-kv", False),
        ("retry-after-x", False),
        ("xx-request-id", False),
    ],
)
def test_filter_changes_only_its_own_headers(header: str, allowed: bool) -> None:
    rules = ext_proc()["mutation_rules"]
    assert rules["disallow_all"] is True
    assert rules["disallow_is_error"] is True
    assert (re.fullmatch(rules["allow_expression"]["regex"], header) is not None) is allowed


def test_filter_that_is_down_is_noticed_within_seconds_and_not_called() -> None:
    extproc = cluster("extproc")
    [check] = extproc["health_checks"]
    assert (check["interval"], check["no_traffic_interval"], check["unhealthy_threshold"]) == ("0.250s", "0.250s", 2)
    assert check["grpc_health_check"]["service_name"] == "envoy.service.ext_proc.v3.ExternalProcessor"
    # By default the load balancer hears of an endpoint up to a second later.
    assert extproc["common_lb_config"] == {"healthy_panic_threshold": {}, "update_merge_window": "0s"}


@pytest.mark.parametrize(
    ("listen", "kind", "address"),
    [
        ("unix:/run/x.sock", "STATIC", {"pipe": {"path": "/run/x.sock"}}),
        ("0.0.0.0:9002", "STATIC", {"socket_address": {"address": "127.0.0.1", "port_value": 9002}}),
        ("[::]:9002", "STATIC", {"socket_address": {"address": "::1", "port_value": 9002}}),
        ("filter:9002", "STRICT_DNS", {"socket_address": {"address": "filter", "port_value": 9002}}),
    ],
)
def test_envoy_dials_the_filter_where_it_listens(listen: str, kind: str, address: dict[str, Any]) -> None:
    extproc = cluster("extproc", change(listen=listen))
    [target] = extproc["load_assignment"]["endpoints"][0]["lb_endpoints"]
    assert extproc["type"] == kind
    assert target["endpoint"]["address"] == address


# --- the worker ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["decode", "prefill"])
def test_request_goes_to_the_named_worker_or_nowhere(name: str) -> None:
    [policy] = cluster(name)["load_balancing_policy"]["policies"]
    override = policy["typed_extension_config"]["typed_config"]
    assert override["override_host_sources"] == [{"metadata": {"key": "envoy.lb", "path": [{"key": DESTINATION_HEADER}]}}]
    [fallback] = override["fallback_policy"]["policies"]
    nobody = fallback["typed_extension_config"]
    assert nobody["name"] == "envoy.load_balancing_policies.subset"
    # No subset, and NO_FALLBACK, which is the default.
    assert set(nobody["typed_config"]) == {"@type", "subset_lb_policy"}


def test_only_the_filter_can_name_the_decode_worker() -> None:
    assert ext_proc()["metadata_options"] == {
        "receiving_namespaces": {"untyped": ["envoy.lb", "baton"]},
        "forwarding_namespaces": {"untyped": ["envoy.lb"]},
    }
    assert [item["name"] for item in manager("front")["http_filters"]] == [
        "envoy.filters.http.ext_proc",
        "envoy.filters.http.rbac",
        "envoy.filters.http.composite.stream_tokens",
        "envoy.filters.http.composite.watch",
        "envoy.filters.http.router",
    ]


def test_prefill_worker_is_named_by_a_header_that_ends_there() -> None:
    [rule] = manager("prefill_loop")["http_filters"][0]["typed_config"]["request_rules"]
    assert rule == {
        "header": DESTINATION_HEADER,
        "on_header_present": {"metadata_namespace": "envoy.lb", "key": DESTINATION_HEADER},
        "remove": True,
    }


@pytest.mark.parametrize("name", ["front", "prefill_loop"])
def test_no_request_is_retried_behind_the_filters_back(name: str) -> None:
    assert "retry_policy" not in route(name)["route"]


def test_endpoints_are_read_from_the_files_that_are_written(tmp_path: Path) -> None:
    config = change(envoy=Envoy(eds_dir=str(tmp_path)))
    for name in ("decode", "prefill"):
        write_endpoints(tmp_path, name, [])
        source = cluster(name, config)["eds_cluster_config"]["eds_config"]["path_config_source"]
        assert Path(source["path"]).exists()
        assert source["watched_directory"]["path"] == str(tmp_path)


@pytest.mark.parametrize("settings", [Envoy(), Envoy(eds="grpc", eds_dir="/run/eds")], ids=["no folder", "asked for"])
def test_endpoints_are_asked_of_the_filter_which_may_be_away_at_start(settings: Envoy) -> None:
    config = change(envoy=settings)
    ads = tree(config)["dynamic_resources"]["ads_config"]
    [service] = ads["grpc_services"]
    assert service["envoy_grpc"]["cluster_name"] == "extproc"
    assert service["envoy_grpc"]["retry_policy"]["retry_back_off"]["max_interval"] == "2s"
    for name in ("decode", "prefill"):
        source = cluster(name, config)["eds_cluster_config"]["eds_config"]
        assert (source["ads"], source["initial_fetch_timeout"]) == ({}, "2s")


def test_endpoint_files_need_no_stream() -> None:
    assert "dynamic_resources" not in tree()
    assert "dynamic_resources" not in tree(change(envoy=Envoy(pin="original_dst")))


def test_worker_that_envoy_does_not_know_is_reached_only_by_what_the_filter_wrote() -> None:
    for name in ("decode", "prefill"):
        pinned = cluster(name, change(envoy=Envoy(pin="original_dst")))
        assert (pinned["type"], pinned["lb_policy"]) == ("ORIGINAL_DST", "CLUSTER_PROVIDED")
        assert pinned["original_dst_lb_config"] == {"metadata_key": {"key": "envoy.lb", "path": [{"key": DESTINATION_HEADER}]}}
        assert "load_balancing_policy" not in pinned


def test_circuit_breakers_of_the_workers_are_settings_and_that_of_the_filter_is_not() -> None:
    config = change(envoy=Envoy(max_connections=1, max_pending=2, max_requests=3))
    for name in ("decode", "prefill"):
        [threshold] = cluster(name, config)["circuit_breakers"]["thresholds"]
        assert (threshold["max_connections"], threshold["max_pending_requests"], threshold["max_requests"]) == (1, 2, 3)
    [threshold] = cluster("extproc", config)["circuit_breakers"]["thresholds"]
    assert set(threshold.values()) == {100_000}


def test_without_the_filter_only_marked_requests_go_on_and_no_client_can_mark_one() -> None:
    config = change(envoy=Envoy(filter_down="round_robin"))
    front = manager("front", config)
    assert [item["name"] for item in front["http_filters"]] == [
        "envoy.filters.http.ext_proc",
        "envoy.filters.http.lua",
        "envoy.filters.http.composite.stream_tokens",
        "envoy.filters.http.composite.watch",
        "envoy.filters.http.router",
    ]
    assert ext_proc(config)["failure_mode_allow"] is True
    [strip] = front["early_header_mutation_extensions"]
    assert {"remove": "x-baton-filter-down"} in strip["typed_config"]["mutations"]
    marked, pinned = front["route_config"]["virtual_hosts"][0]["routes"]
    assert marked["match"]["headers"] == [{"name": "x-baton-filter-down", "string_match": {"exact": "1"}}]
    assert (marked["route"]["cluster"], pinned["route"]["cluster"]) == ("any_decode", "decode")
    assert marked["request_body_buffer_limit"] == pinned["request_body_buffer_limit"]
    assert cluster("any_decode", config)["eds_cluster_config"]["service_name"] == "decode"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{eds: file}", "envoy.eds: file needs envoy.eds_dir"),
        ("{pin: original_dst, filter_down: round_robin}", "envoy.filter_down: round_robin needs envoy.pin: exact"),
        ("{max_pending: 0}", "envoy.max_pending: 0"),
        ("{pin: loose}", "envoy.pin"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(f"workers: {{both: ['10.0.0.1:1']}}\nenvoy: {text}")
    assert message in str(caught.value)


def test_direct_prefill_needs_no_listener_and_no_cluster() -> None:
    static = tree(change(prefill=Prefill()))["static_resources"]
    assert [item["name"] for item in static["listeners"]] == ["front"]
    assert [item["name"] for item in static["clusters"]] == ["decode", "extproc", "watch"]


def test_prefill_socket_is_not_for_everybody() -> None:
    assert listener("prefill_loop")["address"] == {"pipe": {"path": "/run/baton/prefill.sock", "mode": 0o660}}


# --- what a client reads ------------------------------------------------------------------------------------------------


def test_filter_reply_is_passed_on_and_comes_first() -> None:
    first = manager("front")["local_reply_config"]["mappers"][0]
    expression = first["filter"]["extension_filter"]["typed_config"]["expression"]
    assert expression == f"response.code_details.startsWith('{FILTER_REPLY_DETAILS}')"
    assert first["body_format_override"] == {
        "text_format_source": {"inline_string": "%LOCAL_REPLY_BODY%"},
        "content_type": "application/json",
    }


def test_envoy_errors_are_shaped_like_openai() -> None:
    codes = {}
    for mapper in manager("front")["local_reply_config"]["mappers"][1:]:
        expression = mapper["filter"]["extension_filter"]["typed_config"]["expression"]
        text = mapper["body_format_override"]["text_format_source"]["inline_string"]
        # Envoy would replace a %COMMAND% in it.
        assert "%" not in text
        error = json.loads(text)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["param"] is None
        codes[expression] = (error["type"], error["code"])
    assert codes == {
        "response.code == 504 && response.code_details.startsWith('ext_proc')": ("server_error", "timeout"),
        "response.code_details.startsWith('rbac_access_denied')": ("server_error", "filter_unavailable"),
        "response.code == 503 && response.flags == 0": ("server_error", "filter_unavailable"),
        "response.code == 401": ("invalid_request_error", "invalid_api_key"),
        "response.code == 403": ("invalid_request_error", "forbidden"),
        "response.code == 429": ("rate_limit_error", "rate_limit_exceeded"),
        "response.code == 404": ("invalid_request_error", "not_found"),
        "response.code == 408": ("invalid_request_error", "timeout"),
        "response.code == 413": ("invalid_request_error", "request_too_large"),
        "response.code == 431": ("invalid_request_error", "headers_too_large"),
        "response.code >= 400 && response.code < 500": ("invalid_request_error", "bad_request"),
        "response.code == 502 || response.code == 503": ("server_error", "upstream_unavailable"),
        "response.code == 504": ("server_error", "timeout"),
        "response.code >= 500": ("server_error", "internal_error"),
    }


def test_worker_cannot_pass_its_answer_off_as_envoys() -> None:
    assert route("prefill_loop")["response_headers_to_remove"] == [ORIGIN_HEADER]
    [mapper] = manager("prefill_loop")["local_reply_config"]["mappers"]
    assert [added["header"] for added in mapper["headers_to_add"]] == [{"key": ORIGIN_HEADER, "value": "envoy"}]


def test_worker_addresses_are_shown_only_when_asked_for() -> None:
    assert "response_headers_to_add" not in route("front")
    added = route("front", change(envoy=Envoy(debug_headers=True)))["response_headers_to_add"]
    assert {item["header"]["key"]: item["header"]["value"] for item in added} == {
        KV_TRANSFER_HEADER: f"%REQ({KV_TRANSFER_HEADER})%",
        "x-decode-endpoint": "%UPSTREAM_HOST%",
    }
    assert not any(item.get("keep_empty_value") for item in added)


def logs(config: Config = EXAMPLE) -> dict[str, Any]:
    return {log["name"].removeprefix("envoy.access_loggers."): log for log in manager("front", config)["access_log"]}


def test_time_to_first_token_is_measured_at_the_body() -> None:
    histograms = logs()["stats.times"]["typed_config"]["histograms"]
    assert {item["stat"]["name"]: item["value_format"] for item in histograms} == {
        "ttft_ms": "%COMMON_DURATION(DS_RX_BEG:US_RX_BODY_BEG:ms)%",
        "generation_ms": "%COMMON_DURATION(US_RX_BODY_BEG:US_RX_END:ms)%",
    }
    tags = {tag["name"]: tag["value_format"] for item in histograms for tag in item["stat"]["tags"]}
    assert tags == {tag: f"%DYNAMIC_METADATA(baton:{tag})%" for tag in ("model", "policy", "mode")}


def test_common_limits_of_ttft_and_itl_are_bounds_of_buckets() -> None:
    [settings] = tree()["stats_config"]["histogram_bucket_settings"]
    assert settings["match"] == {"prefix": "baton."}
    assert {45.0, 2500.0} <= set(settings["buckets"])
    assert settings["buckets"] == sorted(settings["buckets"])


def test_of_the_admin_port_others_can_reach_the_statistics_alone() -> None:
    config = change(envoy=Envoy(stats_listen="0.0.0.0:9902"))
    [page] = manager("stats", config)["route_config"]["virtual_hosts"][0]["routes"]
    assert page["match"] == {"path": "/stats/prometheus", "headers": [{"name": ":method", "string_match": {"exact": "GET"}}]}
    assert listener("stats", config)["address"]["socket_address"] == {"address": "0.0.0.0", "port_value": 9902}
    assert [each["name"] for each in tree()["static_resources"]["listeners"]] == ["front", "prefill_loop"], "off by default"


def filters(config: Config) -> list[str]:
    return [item["name"].removeprefix("envoy.filters.http.") for item in manager("front", config)["http_filters"]]


def test_everything_that_observes_can_be_switched_off() -> None:
    off = change(envoy=Envoy(stats=False, access_log=False), observe=Observe(sample=0))
    assert list(logs(off)) == ["stdout"]
    assert filters(off) == ["ext_proc", "rbac", "router"]
    assert [item["name"] for item in tree(off)["static_resources"]["clusters"]] == ["decode", "prefill", "extproc"]
    without_tokens = change(envoy=Envoy(stream_tokens=False))
    assert "composite.stream_tokens" not in filters(without_tokens)
    assert list(logs(without_tokens)) == ["stdout", "stats.times", "stats.requests", "http_grpc"]


@pytest.mark.parametrize(
    "policy", [{"observe": {"sample": 0.5}}, {"allow_overrides": ["observe"]}], ids=["a policy samples", "clients may ask"]
)
def test_streams_can_be_watched_where_only_a_policy_wants_it(policy: dict[str, Any]) -> None:
    rule = msgspec.convert({"name": "a", **policy}, PolicyRule)
    assert "composite.watch" in filters(change(observe=Observe(sample=0), policies=[rule]))


@pytest.mark.parametrize(
    ("listen", "own", "watch"),
    [
        ("unix:/run/baton/extproc.sock", None, {"pipe": {"path": "/run/baton/watch.sock"}}),
        ("0.0.0.0:9002", None, {"socket_address": {"address": "127.0.0.1", "port_value": 9004}}),
        ("0.0.0.0:9002", "127.0.0.1:1", {"socket_address": {"address": "127.0.0.1", "port_value": 1}}),
    ],
    ids=["beside the socket", "its port", "its own address"],
)
def test_the_process_that_watches_streams_has_an_address_of_its_own(listen: str, own: str | None, watch: Any) -> None:
    made = cluster("watch", change(listen=listen, observe=Observe(listen=own)))
    [locality] = made["load_assignment"]["endpoints"]
    assert [each["endpoint"]["address"] for each in locality["lb_endpoints"]] == [watch]


def test_a_watched_stream_is_never_held_and_never_fails_for_it() -> None:
    [watch] = [item for item in manager("front")["http_filters"] if item["name"] == "envoy.filters.http.composite.watch"]
    [rule] = watch["typed_config"]["xds_matcher"]["matcher_list"]["matchers"]
    seen = rule["on_match"]["action"]["typed_config"]["typed_config"]["typed_config"]
    assert (seen["observability_mode"], seen["failure_mode_allow"]) == (True, True)
    assert seen["processing_mode"]["response_body_mode"] == "STREAMED"
    assert seen["metadata_options"] == {"forwarding_namespaces": {"untyped": ["baton"]}}
