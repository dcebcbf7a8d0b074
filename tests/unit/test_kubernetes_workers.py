"""What follows for a pod, a pool or a slice from the settings: who is a worker, where, in which role, with which facts."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from extproc.config import Config, ConfigError, parse
from extproc.discovery.kubernetes import objects, rbac
from extproc.discovery.kubernetes.objects import InferencePool, Pod
from extproc.discovery.kubernetes.settings import KubernetesWorkers, PodWorkers, PoolWorkers, ServiceWorkers, check
from extproc.discovery.kubernetes.workers import (
    Worker,
    as_set,
    judge,
    of_slice,
    rule_of_pods,
    rule_of_pool,
    selector_of_pods,
)
from extproc.routing.endpoint_spec import EndpointSpec
from tests.kube_api.objects import endpoint, old_pool, pod, pool, slice_of, terminating

DEFAULTS = KubernetesWorkers()
ANY = PodWorkers()


def kept(found: dict[str, Any], common: KubernetesWorkers = DEFAULTS) -> Pod:
    found["metadata"].setdefault("uid", "u1")
    return objects.pod(
        json.dumps(found).encode(),
        role_label=common.role_label,
        models_annotation=common.models_annotation,
        carry=tuple(common.carry_labels),
    )


def judged(found: dict[str, Any], entry: PodWorkers = ANY, **common: Any) -> list[Worker] | str:
    settings = KubernetesWorkers(**common)
    return judge(kept(found, settings), rule_of_pods(entry, settings, "default"))


def workers(found: dict[str, Any], entry: PodWorkers = ANY, **common: Any) -> list[Worker]:
    given = judged(found, entry, **common)
    assert isinstance(given, list), given
    return given


def specs(found: dict[str, Any], entry: PodWorkers = ANY, **common: Any) -> list[EndpointSpec]:
    return [each.spec for each in workers(found, entry, **common)]


# --- who is one -----------------------------------------------------------------------------------------------------------


def test_a_ready_pod_is_a_worker_at_its_address() -> None:
    [worker] = workers(pod("a", "10.0.0.1", role="prefill"))
    assert (worker.role, worker.spec) == ("prefill", EndpointSpec(address="10.0.0.1:8000", instance="u1/0"))


@pytest.mark.parametrize(
    ("value", "role"),
    [
        ("prefill", "prefill"),
        ("encode-prefill", "prefill"),
        ("decode", "decode"),
        ("both", "both"),
        ("prefill-decode", "both"),
        ("encode-prefill-decode", "both"),
        (None, "decode"),
        ("mine", "both"),
    ],
)
def test_the_values_of_llmds_role_label_are_understood_and_ones_own_too(value: str | None, role: str) -> None:
    [worker] = workers(pod("a", "10.0.0.1", role=value), role_values={"mine": "both"})
    assert worker.role == role


@pytest.mark.parametrize("value", ["encode", "router", "Prefill"])
def test_other_values_are_no_workers(value: str) -> None:
    assert judged(pod("a", "10.0.0.1", role=value)) == f"no role: its label llm-d.ai/role is {value!r}"


def test_a_pod_without_the_label_may_be_ignored_and_a_role_of_the_entry_counts_more_than_the_label() -> None:
    assert judged(pod("a", "10.0.0.1"), role_missing="ignore") == "it has no role label"
    [worker] = workers(pod("a", "10.0.0.1", role="decode"), PodWorkers(role="prefill", selector="app=x"))
    assert worker.role == "prefill"


@pytest.mark.parametrize("phase", ["Pending", "Succeeded", "Failed", "Unknown"])
def test_what_does_not_run_is_no_worker_though_it_still_has_an_address(phase: str) -> None:
    assert judged(pod("a", "10.0.0.1", phase=phase)) == f"its phase is {phase}"


def test_a_pod_that_terminates_gets_nothing_new_ready_or_not() -> None:
    found = pod("a", "10.0.0.1")
    terminating(found)
    assert judged(found) == judged(found, ready_only=False) == "it terminates"


def test_readiness_counts_unless_it_is_told_not_to() -> None:
    found = pod("a", "10.0.0.1", ready=False)
    assert judged(found) == "it is not ready"
    assert len(workers(found, ready_only=False)) == 1


# --- addresses ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "address"),
    [("primary", "[fd00::1]:8000"), ("ipv6", "[fd00::1]:8000"), ("ipv4", "10.0.0.1:8000")],
)
def test_a_pod_with_two_addresses(family: Any, address: str) -> None:
    found = pod("a", "fd00:0:0::1", ips=["fd00:0:0::1", "10.0.0.1"])
    assert [spec.address for spec in specs(found, ip_family=family)] == [address], "as Envoy writes it"


@pytest.mark.parametrize("ip", ["", "node-1", "10.0.0.256"])
def test_a_pod_without_an_address_is_none(ip: str) -> None:
    assert judged(pod("a", ip)) == "no address of the family 'primary'"


def test_ports_by_name_number_and_of_a_sidecar() -> None:
    found = pod("a", "10.0.0.1", port=8200)
    assert [spec.address for spec in specs(found, PodWorkers(ports=["http"]))] == ["10.0.0.1:8200"]
    assert [spec.address for spec in specs(found, PodWorkers(ports=["proxy"]))] == ["10.0.0.1:9999"]
    assert judged(found, PodWorkers(ports=["grpc"])) == "none of its containers has a port named grpc"


def test_each_data_parallel_rank_is_a_worker_and_its_label_says_which() -> None:
    by_list = specs(pod("a", "10.0.0.1"), PodWorkers(ports=[8000, 8001, 8002]))
    by_count = specs(pod("a", "10.0.0.1"), PodWorkers(ports=["http"], ranks=3))
    assert by_list == by_count
    assert [(spec.address, spec.labels) for spec in by_list] == [
        ("10.0.0.1:8000", {"dp-rank": "0"}),
        ("10.0.0.1:8001", {"dp-rank": "1"}),
        ("10.0.0.1:8002", {"dp-rank": "2"}),
    ]


@pytest.mark.parametrize("key", ["llm-d.ai/active-ports", "inference.networking.k8s.io/active-ports"])
def test_ports_that_a_pod_says_are_active(key: str) -> None:
    found = pod("a", "10.0.0.1", annotations={key: "8000, 8002,x,99999999999999999999"})
    entry = PodWorkers(ports=[8000, 8001, 8002])
    assert [(spec.address, spec.labels["dp-rank"]) for spec in specs(found, entry)] == [
        ("10.0.0.1:8000", "0"),
        ("10.0.0.1:8002", "2"),
    ]
    assert judged(found, PodWorkers(ports=[8001])) == "its annotation with the active ports names none of them"


# --- facts ----------------------------------------------------------------------------------------------------------------


def test_only_labels_on_the_list_are_carried_and_those_of_the_entry_count_more() -> None:
    found = pod("a", "10.0.0.1", labels={"tier": "gold", "secret": "s", "zone": "x"})
    [spec] = specs(
        found,
        PodWorkers(labels={"site": "here", "zone": "y"}),
        carry_labels=["tier", "zone", "missing", "metadata.name", "metadata.namespace", "spec.nodeName"],
    )
    assert spec.labels == {
        "tier": "gold",
        "zone": "y",
        "site": "here",
        "pod": "a",
        "namespace": "default",
        "node": "node-1",
    }


def test_models_by_annotation_or_label_or_not_at_all() -> None:
    [spec] = specs(pod("a", "10.0.0.1", annotations={"baton/models": " meta/llama ,lora-1,, "}))
    assert spec.models == ["meta/llama", "lora-1"]
    [spec] = specs(pod("a", "10.0.0.1", labels={"model": "m"}), models_annotation="model")
    assert spec.models == ["m"]
    [spec] = specs(pod("a", "10.0.0.1", annotations={"baton/models": " , "}))
    assert spec.models is None, "the worker tells by itself"


def test_another_uid_or_a_restart_of_the_engine_is_another_life_and_a_restarted_sidecar_is_not() -> None:
    [first] = specs(pod("a", "10.0.0.1"))
    [restarted] = specs(pod("a", "10.0.0.1", restarts=1))
    sidecar = pod("a", "10.0.0.1")
    sidecar["status"]["initContainerStatuses"][1]["restartCount"] = 7
    sidecar["spec"]["containers"].append({"name": "exporter", "ports": [{"containerPort": 9400}]})
    sidecar["status"]["containerStatuses"].append({"name": "exporter", "restartCount": 3})
    [beside] = specs(sidecar)
    other = pod("a", "10.0.0.1")
    other["metadata"]["uid"] = "u2"
    [replaced] = specs(other)
    undeclared = pod("a", "10.0.0.1", restarts=2, port=1)
    assert len({first.instance, restarted.instance, replaced.instance}) == 3
    assert beside.instance == first.instance
    assert specs(undeclared)[0].instance == "u1/2", "a port that nobody declares is one of the pod's own containers"


def test_an_address_that_two_pods_claim_is_that_of_the_later_one() -> None:
    early, late = pod("late-name", "10.0.0.1", role="prefill"), pod("early-name", "10.0.0.1", role="both")
    early["metadata"] |= {"uid": "u1", "creationTimestamp": "2026-01-01T00:00:00Z"}
    late["metadata"] |= {"uid": "u2", "creationTimestamp": "2026-01-02T00:00:00Z"}
    for order in ((early, late), (late, early)):
        found = as_set([worker for each in order for worker in workers(each)])
        assert ([spec.instance for spec in found.both], found.prefill, found.decode) == (["u2/0"], (), ())


def test_the_order_of_the_api_server_is_no_change() -> None:
    pods = [pod(name, f"10.0.0.{index}", role="decode") for index, name in enumerate("cab", 1)]
    assert as_set(worker for each in pods for worker in workers(each)) == as_set(
        worker for each in reversed(pods) for worker in workers(each)
    )


def test_more_workers_than_one_source_may_have_are_refused() -> None:
    many = [Worker("decode", EndpointSpec(address=f"10.{i // 65536}.{i // 256 % 256}.{i % 256}:1"), "") for i in range(4097)]
    with pytest.raises(ValueError, match="4097 workers, more than 4096"):
        as_set(many)


# --- InferencePool --------------------------------------------------------------------------------------------------------


def test_a_pool_of_either_version_says_the_same() -> None:
    new, old = pool("p", {"app": "vllm"}, 8000), old_pool("p", {"app": "vllm"}, 8000)
    expected = InferencePool(name="p", selector={"app": "vllm"}, ports=(8000,))
    assert [objects.inference_pool(json.dumps(each).encode()) for each in (new, old)] == [expected, expected]


def test_target_ports_are_ranks_and_a_role_may_have_ports_of_its_own() -> None:
    found = objects.inference_pool(json.dumps(pool("p", {"app": "vllm"}, *range(8000, 8008))).encode())
    common = KubernetesWorkers()
    rule = rule_of_pool(PoolWorkers(name="p", ports={"decode": ["http"]}), found, common, "default")
    prefill = judge(kept(pod("a", "10.0.0.1", role="prefill")), rule)
    decode = judge(kept(pod("b", "10.0.0.2", role="decode", port=8200)), rule)
    assert isinstance(prefill, list)
    assert [each.spec.address for each in prefill] == [f"10.0.0.1:{port}" for port in range(8000, 8008)]
    assert [each.spec.labels for each in prefill] == [{"dp-rank": str(rank)} for rank in range(8)]
    assert isinstance(decode, list)
    assert [(each.spec.address, each.spec.labels) for each in decode] == [("10.0.0.2:8200", {})]


# --- EndpointSlice --------------------------------------------------------------------------------------------------------


def sliced(entry: ServiceWorkers, found: dict[str, Any], **common: Any) -> list[Worker]:
    return of_slice(objects.endpoint_slice(json.dumps(found).encode()), entry, KubernetesWorkers(**common), "default")


DECODE = ServiceWorkers(name="s", role="decode")


def test_endpoints_that_are_ready_and_do_not_terminate() -> None:
    found = slice_of(
        "s",
        "s-1",
        endpoint("10.0.0.1"),
        endpoint("10.0.0.2", ready=None),
        endpoint("10.0.0.3", ready=False),
        endpoint("10.0.0.4", ready=False, serving=True, terminating=True),
        endpoint("10.0.0.5", ready=True, terminating=True),
    )
    assert [each.spec.address for each in sliced(DECODE, found)] == ["10.0.0.1:8000", "10.0.0.2:8000"]
    assert [each.spec.address for each in sliced(DECODE, found, ready_only=False)] == [
        "10.0.0.1:8000",
        "10.0.0.2:8000",
        "10.0.0.3:8000",
    ], "what terminates gets nothing new, also where the Service publishes addresses that are not ready"


def test_ports_labels_and_families_of_slices() -> None:
    two = {"http": 8000, "metrics": 9000}
    with pytest.raises(ValueError, match=r"which port\? The Service s has http \(8000\), metrics \(9000\)"):
        sliced(DECODE, slice_of("s", "s-1", endpoint("10.0.0.1"), ports=two))
    assert sliced(DECODE, slice_of("s", "s-1", ports={})) == [], "a Service without pods has slices without ports"
    by_name = ServiceWorkers(name="s", role="decode", ports=["http"], labels={"site": "x"})
    [worker] = sliced(
        by_name, slice_of("s", "s-1", endpoint("10.0.0.1", uid="u9"), ports=two), carry_labels=["metadata.name", "zone", "app"]
    )
    assert worker.spec == EndpointSpec(
        address="10.0.0.1:8000", labels={"pod": "pod-10.0.0.1", "zone": "zone-a", "site": "x"}, instance="u9"
    )
    six = slice_of("s", "s-6", endpoint("fd00::1"), family="IPv6")
    assert [each.spec.address for each in sliced(DECODE, six)] == ["[fd00::1]:8000"]
    assert sliced(DECODE, six, ip_family="ipv4") == []
    assert sliced(DECODE, slice_of("s", "s-f", endpoint("a.example"), family="FQDN")) == []
    with pytest.raises(ValueError, match="none of the ports grpc"):
        sliced(ServiceWorkers(name="s", role="decode", ports=["grpc"]), slice_of("s", "s-1", endpoint("10.0.0.1")))


# --- what is kept ---------------------------------------------------------------------------------------------------------


def test_nothing_of_a_pod_is_kept_that_is_not_needed() -> None:
    found = pod("a", "10.0.0.1", labels={"secret": "swordfish"}, annotations={"note": "swordfish"})
    found["spec"]["containers"][0]["env"][0]["value"] = "swordfish"
    assert b"swordfish" not in msgspec.json.encode(kept(found))
    assert "swordfish" not in repr(kept(found))


# --- settings -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "workers.kubernetes.pods: at least one entry is needed here"),
        ("{pods: [{role: prefill}]}", "pods[0].selector: is needed where `role` is given"),
        ("{pods: [{ports: []}]}", "pods[0].ports: at least one port is needed"),
        ("{pods: [{ports: [0]}]}", "pods[0].ports: 0 is not 1 to 65535"),
        ("{pods: [{ports: [1,2,3,4,5,6,7,8,9]}]}", "pods[0].ports: 9 ports, more than 8"),
        ("{pods: [{ports: [1,1]}]}", "pods[0].ports: a port stands there twice"),
        ("{pods: [{ports: [Http]}]}", "pods[0].ports: 'Http' is not what Kubernetes calls so"),
        ("{pods: [{ranks: 9}]}", "pods[0].ranks: 9 is not 1 to 8"),
        ("{pods: [{ports: [1,2,3], ranks: 3}]}", "pods[0].ranks: 3 of 3 ports are more than 8 workers a pod"),
        ("{pods: [{selector: 'a=b&watch=1'}]}", "pods[0].selector: 'a=b&watch=1' is not"),
        ("{pods: [{selector: {a: 'b,c=d'}}]}", "pods[0].selector.a: 'b,c=d' is not"),
        ("{pods: [{namespace: '../x'}]}", "pods[0].namespace: '../x' is not"),
        ("{inference_pools: [{name: 'a/b'}]}", "inference_pools[0].name: 'a/b' is not"),
        ("{inference_pools: [{name: a}, {name: a}]}", "inference_pools[1]: a stands there twice"),
        ("{inference_pools: [{name: a, ports: {decode: []}}]}", "inference_pools[0].ports.decode: at least one port"),
        ("{services: [{name: a}]}", "services[0].role: this field is required"),
        ("{pods: [{}], watch_s: 1}", "watch_s: 1 is not 10 to 3600"),
        ("{pods: [{}], context: c}", "context: goes with `kubeconfig`"),
        ("{pods: [{}], role_label: 'a b'}", "role_label: 'a b' is not"),
        ("{pods: [{}], role_values: {x: encode}}", "role_values"),
    ],
)
def test_what_cannot_work_is_refused_with_its_field(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(f"workers: {{kubernetes: {text}}}")
    assert message in str(caught.value)


def test_pods_alone_are_a_whole_configuration() -> None:
    config = parse("workers: {kubernetes: {pods: [{}]}}")
    assert isinstance(config, Config)
    assert config.workers.kubernetes is not None
    check(config.workers.kubernetes)


@pytest.mark.parametrize(
    ("entry", "selector"),
    [
        (PodWorkers(selector="a=b,c in (d, e)"), "a=b,c in (d, e)"),
        (PodWorkers(selector={"b": "2", "a": "1"}), "a=1,b=2"),
        (PodWorkers(), "llm-d.ai/role in (both,decode,encode-prefill,encode-prefill-decode,mine,prefill,prefill-decode)"),
    ],
)
def test_label_selectors(entry: PodWorkers, selector: str) -> None:
    assert selector_of_pods(entry, KubernetesWorkers(role_values={"mine": "both"})) == selector


# --- rights ---------------------------------------------------------------------------------------------------------------


def test_rights_are_those_that_the_settings_need() -> None:
    settings = KubernetesWorkers(
        pods=[PodWorkers(), PodWorkers(namespace="other")],
        inference_pools=[PoolWorkers(name="b"), PoolWorkers(name="a"), PoolWorkers(name="old", api="v1alpha2")],
        services=[ServiceWorkers(name="s", role="decode", namespace="third")],
    )
    found = {
        namespace: [(rule.api_groups, rule.resources, rule.resource_names, rule.verbs) for rule in rules]
        for namespace, rules in rbac.rules(settings, "mine").items()
    }
    read = ("list", "watch")
    assert found == {
        "mine": [
            (("",), ("pods",), (), read),
            (("inference.networking.k8s.io",), ("inferencepools",), ("b", "a"), read),
            (("inference.networking.x-k8s.io",), ("inferencepools",), ("old",), read),
        ],
        "other": [(("",), ("pods",), (), read)],
        "third": [(("discovery.k8s.io",), ("endpointslices",), (), read)],
    }


def test_rights_as_yaml_bind_the_filters_account_in_each_namespace() -> None:
    settings = KubernetesWorkers(pods=[PodWorkers(namespace="gpus")], services=[ServiceWorkers(name="s", role="decode")])
    documents = rbac.manifests(settings, namespace="baton", service_account="filter", labels={"app": "baton"})
    from ruamel.yaml import YAML

    read = [dict(each) for each in YAML(typ="safe").load_all(rbac.as_yaml(documents))]
    assert [(each["kind"], each["metadata"]) for each in read] == [
        (kind, {"name": "filter-workers", "namespace": namespace, "labels": {"app": "baton"}})
        for namespace in ("baton", "gpus")
        for kind in ("Role", "RoleBinding")
    ]
    assert read[2]["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}]
    assert read[3]["subjects"] == [{"kind": "ServiceAccount", "name": "filter", "namespace": "baton"}]
    assert read[3]["roleRef"] == {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "filter-workers"}
