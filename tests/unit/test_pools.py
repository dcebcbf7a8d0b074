"""Pools and routes: what a configuration may say, which worker and which request is where, and what Envoy is told."""

from __future__ import annotations

import re
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc import xds
from extproc.config import Config, ConfigError, parse
from extproc.envoy_config import build
from extproc.envoy_yaml import render
from extproc.errors import ApiError
from extproc.inference import parse as parse_body
from extproc.intake import Intake
from extproc.paths import Treatment
from extproc.policy import Policies
from extproc.policy_config import PolicyRule
from extproc.pools.choice import within
from extproc.pools.routes import RouteHeaders, fits_a_header
from extproc.pools.settings import PoolRule, partition
from extproc.prompt import BytesPerToken
from extproc.routing.endpoint_spec import EndpointSet, EndpointSpec
from extproc.routing.explain import explain_snapshot
from extproc.routing.job import Aims, Job, Mode
from extproc.routing.partition import DEFAULT_POOL, POOL_LABEL, UNDECIDED
from extproc.routing.picker import NoEndpointError
from extproc.routing.pool import Pool, Role
from extproc.routing.prefix import Chain
from extproc.routing.router import Router
from extproc.routing.settings import Routing
from extproc.routing.snapshot import take
from extproc.warm_up import rules

WORKERS = """\
workers:
  prefill:
    - {address: "10.0.0.1:1", labels: {tier: gold}}
    - {address: "10.0.0.2:1", models: [llama-7b]}
    - "10.0.0.3:1"
  decode:
    - {address: "10.0.1.1:1", labels: {tier: gold}}
    - {address: "10.0.1.2:1", models: [llama-7b]}
    - "10.0.1.3:1"
"""
BY_LABEL = "pools:\n  - {name: gold, labels: {tier: gold}}\n"


@pytest.mark.parametrize(
    ("text", "where", "why"),
    [
        ("pools: [{name: gold}]", 10, "pools[0].labels: neither labels nor models"),
        ("pools: [{name: default, labels: {a: b}}]", 10, "pools[0].name: default is the pool"),
        ("pools: [{name: a.b, labels: {a: b}}]", 10, "pools[0].name: 'a.b' is not"),
        ("pools: [{name: a, labels: {a: b}, max_requests: 0}]", 10, "pools[0].max_requests: 0 is not a positive number"),
        ("pools: [{name: a, models: ['*a']}]", 10, "pools[0].models: '*a' is neither a name nor a prefix"),
        ("pools: [{name: a, labels: {baton.pool: b}}]", 10, "is what Baton itself notes"),
        (f"{BY_LABEL}  - {{name: gold, labels: {{tier: b}}}}", 12, "pools[1].name: gold stands there twice"),
        (f"{BY_LABEL}  - {{name: b, labels: {{tier: gold, x: y}}}}", 12, "no worker is ever in b: gold, before it, takes all"),
        ("pools: [{name: a, models: [ll*]}, {name: b, models: [llama-7b]}]", 10, "no worker is ever in b: a, before it, has"),
        (
            "pools: [{name: a, models: [x]}, {name: b, labels: {tier: gold}, models: [x]}]",
            10,
            "no request comes to b by them: a, before it, has these models",
        ),
        ("pools: [{name: b, labels: {tier: silver}}]", 10, "pools[0].labels: no prefill worker is in b"),
        (f"{BY_LABEL}policies: [{{name: a, pool: glod}}]", 12, "policies[0].pool: there is no pool glod; did you mean gold?"),
        (f"{BY_LABEL}policies: [{{name: a, pool: {{gold: 1, x: 1}}}}]", 12, "policies[0].pool: there is no pool x; there are"),
        (f"{BY_LABEL}policies: [{{name: a, pool: {{gold: 0}}}}]", 12, "policies[0].pool: all weights are 0"),
        (f"{BY_LABEL}policies: [{{name: a, pool: {{gold: -1}}}}]", 12, "policies[0].pool.gold: -1 is not from 0"),
        ("policies: [{name: a, pool: gold}]", 10, "policies[0].pool: gold, but there are no pools"),
        (
            f"{BY_LABEL}policies: [{{name: a, pool: default, workers: {{decode: {{tier: gold}}}}}}]",
            12,
            "policies[0].workers.decode: no decode worker in the pool default has these labels",
        ),
        (f"{BY_LABEL}envoy: {{filter_down: round_robin}}", 12, "envoy.filter_down: round_robin does not go with pools"),
        ("routes: {only: true}", 10, "routes.only: with workers beside it"),
        ("routes: {pool_header: true}", 10, "routes.pool_header: there are no pools"),
    ],
)
def test_what_contradicts_itself_is_refused_with_file_line_and_field(text: str, where: int, why: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(WORKERS + text, source="baton.yaml")
    assert str(refused.value).startswith(f"baton.yaml:{where}: ") and why in str(refused.value)


def test_a_pool_with_one_role_only_is_refused_and_so_is_what_it_leaves_behind() -> None:
    both = "workers: {prefill: [{address: '10.0.0.1:1', labels: {a: b}}, '10.0.0.2:1'], decode: ['10.0.1.1:1']}\n"
    with pytest.raises(ConfigError, match=r"pools\[0\]\.labels: no decode worker is in one"):
        parse(both + "pools: [{name: one, labels: {a: b}}]")
    rest = (
        "workers: {prefill: [{address: '10.0.0.1:1', labels: {a: b}}],"
        " decode: [{address: '10.0.1.1:1', labels: {a: b}}, '10.0.1.2:1']}\n"
    )
    with pytest.raises(ConfigError, match="pools: no prefill worker is left for default"):
        parse(rest + "pools: [{name: one, labels: {a: b}}]")


def test_what_is_not_known_yet_is_not_held_against_a_pool() -> None:
    parse("workers: {file: /run/workers.yaml}\npools: [{name: one, labels: {a: b}}]")
    parse(WORKERS + "pools: [{name: one, models: [of-a-worker-that-has-yet-to-say]}, {name: gold, labels: {tier: gold}}]")
    parse("routes: {only: true}\npools: [{name: one, models: [m]}]\npolicies: [{name: a, pool: one}]")


def test_a_worker_is_in_the_first_pool_that_takes_it() -> None:
    cut = partition(
        [
            PoolRule(name="gold", labels={"tier": "gold"}),
            PoolRule(name="llama", models=["llama*", "mistral"]),
            PoolRule(name="late", labels={"late": "1"}),
        ]
    )
    assert cut is not None and partition([]) is None
    assert cut.pool_of({"tier": "gold", "late": "1"}, ["llama"]) == "gold"
    assert cut.pool_of({"late": "1"}, ["x", "llama-7b"]) == "llama"
    assert cut.pool_of({"late": "1"}, ["x"]) == "late"
    assert cut.pool_of({}, ["x"]) == DEFAULT_POOL
    assert cut.pool_of({"late": "1"}, None) == UNDECIDED  # it may turn out to be one of llama
    assert cut.pool_of({"tier": "gold"}, None) == "gold"


def test_a_worker_moves_when_it_says_what_it_serves_and_envoy_is_told() -> None:
    cut = partition([PoolRule(name="llama", models=["llama"])])
    spec = EndpointSpec(address="10.0.0.1:1", labels={"a": "b", POOL_LABEL: "mine"})
    pool, moves = Pool(EndpointSet(decode=(spec,)), cut), []
    pool.on_move = lambda: moves.append(pool.pool_at("10.0.0.1:1"))
    (endpoint,) = pool.endpoints
    assert pool.pool_at("10.0.0.1:1") == UNDECIDED and endpoint.labels["a"] == "b"
    for models in ({"llama": b"{}"}, {"llama": b"{}", "x": b"{}"}, {"x": b"{}"}):
        pool.set_models(endpoint, models)
    assert moves == ["llama", DEFAULT_POOL]


def router(*pools: PoolRule, prefill: int = 1) -> Router:
    def specs(role: int) -> tuple[EndpointSpec, ...]:
        return tuple(
            EndpointSpec(address=f"10.0.{role}.{number}:1", labels={"at": name}, models=[model])
            for number, (name, model) in enumerate((("a", "m"), ("b", "m"), ("c", "n")), 1)
        )

    pool = Pool(EndpointSet(prefill=specs(0), decode=specs(1)), partition(list(pools)))
    for endpoint in pool.endpoints:
        pool.set_live(endpoint, True)
    return Router(pool, Routing())


A, B, C = (PoolRule(name=name, labels={"at": name}) for name in "abc")


def test_only_workers_of_a_pool_are_chosen_and_an_empty_one_says_so() -> None:
    made = router(A, B)
    picker = made.picker
    assert [each.address for each in picker.group(Role.DECODE, "m", {POOL_LABEL: "b"})] == ["10.0.1.2:1"]
    with pytest.raises(NoEndpointError) as absent:
        picker.group(Role.DECODE, "n", {POOL_LABEL: "b"})
    assert absent.value.model == "n"  # it is a 404: no worker of the pool has it
    decode = made.pool.get("10.0.1.2:1")
    assert decode is not None
    made.pool.set_live(decode, False)
    with pytest.raises(NoEndpointError, match="no decode worker of the pool 'b' is live") as empty:
        picker.group(Role.DECODE, "m", {POOL_LABEL: "b"})
    assert empty.value.model is None  # and this is a 503


def test_what_nobody_serves_is_not_found_where_the_default_pool_is_empty() -> None:
    picker = router(A, B, C).picker
    with pytest.raises(NoEndpointError) as absent:
        picker.group(Role.PREFILL, "x", {POOL_LABEL: DEFAULT_POOL})
    assert absent.value.model == "x"


def test_one_pool_with_both_roles_is_ready_two_halves_are_not() -> None:
    pool = router(A, B, C).pool
    assert pool.ready()
    for address in ("10.0.0.1:1", "10.0.1.2:1", "10.0.0.3:1"):
        endpoint = pool.get(address)
        assert endpoint is not None
        pool.set_live(endpoint, False)
    assert not pool.ready()


def config(**more: Any) -> Config:
    tree = {
        "workers": {"file": "/run/workers.yaml"},
        "pools": [{"name": "gold", "labels": {"tier": "gold"}, "max_requests": 7}, {"name": "llama", "models": ["llama*"]}],
        "policies": [
            {"name": "acme", "match": {"headers": {"x-tenant": {"exact": "acme"}}}, "pool": "gold"},
            {"name": "split", "match": {"headers": {"x-split": {"present": True}}}, "pool": {"gold": 1, "llama": 3}},
            {"name": "named", "match": {"path": {"exact": "/no"}}, "pool": "gold", "allow_overrides": ["policy"]},
        ],
        "models": {"aliases": {"chat": "llama-7b"}},
        **more,
    }
    return msgspec.convert(tree, Config)


def pool_for(made: Config, model: str, request_id: str = "r", **headers: str) -> str:
    body = msgspec.json.encode({"model": model, "prompt": "Hello"})
    asked = Intake(made, BytesPerToken()).read(
        parse_body(body, Treatment.COMPLETIONS),
        headers={name.replace("_", "-"): value for name, value in headers.items()},
        path="/v1/completions",
        size_bytes=len(body),
        request_id=request_id,
        arrived_s=0.0,
        deadline_s=1.0,
    )
    aims = asked.job.aims
    assert aims.prefill_labels[POOL_LABEL] == aims.decode_labels[POOL_LABEL]
    return aims.decode_labels[POOL_LABEL]


def test_a_request_goes_where_its_policy_says_then_by_its_model_then_to_the_rest() -> None:
    made = config()
    assert pool_for(made, "llama-7b") == "llama"
    assert pool_for(made, "chat") == "llama"  # by what serves it
    assert pool_for(made, "llama-7b", x_tenant="acme") == "gold"
    assert pool_for(made, "other") == DEFAULT_POOL
    assert pool_for(made, "other", x_baton_policy="named") == "gold"
    assert pool_for(made, "other", x_baton_policy="acme") == DEFAULT_POOL  # which does not let itself be asked for
    drawn = [pool_for(made, "m", f"r{number}", x_split="1") for number in range(400)]
    assert set(drawn) == {"gold", "llama"} and 60 < drawn.count("gold") < 140
    assert drawn == [pool_for(made, "m", f"r{number}", x_split="1") for number in range(400)]


def test_a_policy_that_is_asked_for_may_stand_behind_one_that_takes_everything() -> None:
    parse(f"{WORKERS}{BY_LABEL}policies: [{{name: all}}, {{name: later, pool: gold, allow_overrides: [policy]}}]")
    made = Policies([PolicyRule(name="all"), PolicyRule(name="later", allow_overrides=["policy", "explain"])])
    asked = made.resolve({"x-baton-policy": "later", "x-baton-explain": "true"}, "/", "m", 1)
    assert (asked.aims.policy, asked.explain, asked.ignored_overrides) == ("later", True, ())
    for name in ("all", "", "LATER"):
        refused = made.resolve({"x-baton-policy": name}, "/", "m", 1)
        assert (refused.aims.policy, refused.ignored_overrides) == ("all", ("policy",))


def test_without_pools_a_request_has_no_pool_and_no_header() -> None:
    made = msgspec.convert({"workers": {"file": "/w"}}, Config)
    body = parse_body(b'{"model": "m", "prompt": "x"}', Treatment.COMPLETIONS)
    other = Intake(made, BytesPerToken()).read_other(body, headers={}, path="/tokenize", request_id="r", aims=Aims())
    assert (other.request, other.model, other.aims) == (body, None, Aims())
    assert RouteHeaders().of("m", {POOL_LABEL: "gold"}) == {}


def test_the_headers_of_a_route_are_those_of_the_worker_that_was_chosen() -> None:
    both = RouteHeaders(model=True, pools=True)
    assert both.of("m", {POOL_LABEL: "gold"}) == {"x-baton-pool": "gold", "x-gateway-model-name": "m"}
    assert both.of(None, {}) == {"x-baton-pool": DEFAULT_POOL}
    assert RouteHeaders(model=True).of("m\n", {}) == {}


@given(st.text())
def test_what_is_set_as_a_header_is_one(text: str) -> None:
    if fits_a_header(text):
        assert text.encode("ascii").isascii() and "\n" not in text and "\r" not in text and "\0" not in text
    assert fits_a_header("meta-llama/Llama-3.1 (8B)") and not fits_a_header("x" * 257)


def test_pairs_meet_within_pools_only() -> None:
    acme = PolicyRule(name="acme", pool="gold")
    made = rules([acme, PolicyRule(name="rest")], ("default", "gold"))
    assert [(each.prefill, each.decode) for each in made] == [({POOL_LABEL: name},) * 2 for name in ("gold", "default")]
    assert rules([], ()) == rules([PolicyRule(name="rest")], ())


def test_envoy_has_a_cluster_of_each_role_and_a_route_for_each_pool_with_its_own_breakers() -> None:
    made = config(prefill={"via": "unix:/run/loop.sock"}, policies=[])
    tree = build(made)
    static = tree.static_resources
    assert static is not None
    clusters = {each.name: each for each in static.clusters}
    for role in ("decode", "prefill"):
        assert [name for name in clusters if name.startswith(role)] == [role, f"{role}-gold", f"{role}-llama"]
        gold, llama = (clusters[f"{role}-{name}"].circuit_breakers for name in ("gold", "llama"))
        assert gold is not None and llama is not None
        assert (gold.thresholds[0].max_requests, gold.thresholds[0].max_pending_requests) == (7, 100_000)
        assert llama.thresholds[0].max_requests == 100_000
    assert xds.cluster_of("decode", DEFAULT_POOL) == "decode" and xds.cluster_of("prefill", "gold") == "prefill-gold"
    text = render(made)
    assert text.count("exact: gold") == 2 and text.count("remove: x-baton-pool") == 1


def test_without_pools_envoy_is_told_what_it_always_was() -> None:
    made = msgspec.convert({"workers": {"file": "/w"}, "prefill": {"via": "unix:/run/loop.sock"}}, Config)
    text = render(made)
    assert "request_headers_to_remove" not in text and "decode-" not in text and text.count("remove: x-baton-pool") == 1


def test_a_body_that_names_no_model_is_no_reason_to_refuse_what_is_no_prompt() -> None:
    made = config()
    intake = Intake(made, BytesPerToken())
    for body in (b"{}", b'{"model": 7}', b'{"model": ""}'):
        other = intake.read_other(
            parse_body(body, Treatment.WHOLE), headers={}, path="/tokenize", request_id="r", aims=Aims(policy="other")
        )
        assert other.model is None and POOL_LABEL not in other.aims.decode_labels
    pinned = intake.read_other(None, headers={"x-tenant": "acme"}, path="/version", request_id="r", aims=Aims())
    assert pinned.aims.decode_labels == {POOL_LABEL: "gold"}
    with pytest.raises(ApiError):
        parse_body(b"[]", Treatment.WHOLE)


PAGE = (Path(__file__).parents[2] / "docs" / "routes.md").read_text()


def test_every_example_of_the_page_can_be_loaded_and_the_wrong_one_is_refused_as_it_says() -> None:
    good = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert len(good) == 2
    for text in good:
        parse(text)
    ((wrong, message),) = re.findall(r"```yaml no\n(.*?)```\n+```text\n(.*?)```", PAGE, re.DOTALL)
    with pytest.raises(ConfigError) as refused:
        parse(wrong, source="baton.yaml")
    assert str(refused.value) == message.strip()


def test_a_decision_explained_from_a_snapshot_knows_the_pools() -> None:
    made = router(A, B, C)
    job = Job(
        model="m",
        chain=Chain(array("Q"), 1.0),
        tokens=100,
        aims=within(Aims(mode=Mode.DISAGGREGATE), "b"),
        arrived_s=0.0,
        deadline_s=60.0,
    )
    explained = explain_snapshot(take(made, 0.0), job)
    assert explained.decision is not None
    assert (explained.decision.prefill, explained.decision.decode) == ("10.0.0.2:1", "10.0.1.2:1")
    assert {each.endpoint: each.why for each in explained.left_out}["10.0.1.1:1"] == "in the pool a"


def test_an_endpoint_picker_leaves_the_route_alone_unless_it_is_told_to() -> None:
    assert config().names_pools and not msgspec.convert({"workers": {"file": "/w"}}, Config).names_pools
    assert not config(epp={"enabled": True}).names_pools
    assert config(epp={"enabled": True}, routes={"pool_header": True}).names_pools
    silent = config(routes={"pool_header": False})
    assert not silent.names_pools
    with pytest.raises(ConfigError, match=r"routes\.pool_header: "):
        render(silent)
    with pytest.raises(ConfigError, match=r"routes\.only: "):
        render(msgspec.convert({"routes": {"only": True}}, Config))
