"""The chart: rendered by Helm, judged by the schemas of what it is applied to, and by what the rest of Baton says."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from extproc import config as configuration
from extproc.cli import app
from extproc.config import Address
from extproc.discovery.kubernetes.rbac import rules
from extproc.epp.health import ALIVE, READY
from extproc.headers import ROUTING_HEADERS
from tests.manifests import helm, mesh_files, schemas
from tests.manifests.helm import Object, container, environment, examples, find, pod, template
from tests.manifests.mesh_files import FOLDER
from tests.stack.mesh import envoyfilter
from tests.stack.mesh.manifests import load, of_kind
from tests.stack.mesh.messages import message
from tests.stack.mesh.stack import MeshStack
from workers.launch import plan
from workers.profile import load_profile

CASES = [
    *((name, None) for name in examples()),
    *(("llama-70b-h200", kind) for kind in ("istio", "envoyGateway", "inferencePool")),
]
"""Examples as they are, and one of them behind each kind of gateway."""


def workloads(objects: list[Object]) -> Iterator[Object]:
    return (each for each in objects if each["kind"] in ("Deployment", "LeaderWorkerSet"))


def workers(objects: list[Object]) -> Iterator[Object]:
    return (each for each in workloads(objects) if container(each)["name"] == "worker")


def _plain(typed: object) -> Any:
    return msgspec.json.decode(msgspec.json.encode(typed))


def baton_yaml(objects: list[Object]) -> configuration.Config:
    return configuration.parse(find(objects, "ConfigMap")["data"]["baton.yaml"])


@pytest.mark.parametrize("name", examples())
def test_helm_finds_nothing_wrong(name: str) -> None:
    said = helm.run("lint", str(helm.CHART), "--strict", "--values", str(helm.EXAMPLES / f"{name}.yaml"))
    assert "0 chart(s) failed" in said


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_an_api_server_would_take_every_object(name: str, kind: str | None) -> None:
    sets = ("monitoring.enabled=true", "cache.enabled=true", "gateway.envoyGateway.exactPin=true")
    objects = template(name, sets=(*sets, *((f"gateway.kind={kind}",) if kind else ())))
    found = schemas.faults(objects)
    assert not found, "\n".join(found)
    names = [(each["kind"], each["metadata"]["name"], each["metadata"].get("namespace")) for each in objects]
    assert len(set(names)) == len(names), "two objects of one name"


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_baton_takes_its_configuration(name: str, kind: str | None) -> None:
    config = baton_yaml(template(name, sets=(f"gateway.kind={kind}",) if kind else ()))
    assert config.epp.enabled
    by_pool = kind == "inferencePool" or (kind is None and name == "istio-inference-pool")
    assert config.tls_mode == ("self_signed" if by_pool else "none")


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (("gateway.kind=nginx",), "gateway/kind"),
        (("workerDefaults.gpus=1",), "gpus"),
        (("workers.decode.role=decoder",), "role"),
        (("filter.replicas=-1",), "replicas"),
        (("workerDefaults.modelCache.type=pvc",), "claimName"),
        (("filter.tls.mode=files",), "secretName"),
        (("workers.decode.role=both", "workers.decode.autoscaling.type=keda"), "role both"),
    ],
)
def test_wrong_value_is_refused_by_name(sets: tuple[str, ...], said: str) -> None:
    with pytest.raises(helm.HelmError, match=re.escape(said)):
        template("istio", sets=sets)


@pytest.mark.parametrize("name", examples())
def test_every_worker_starts_with_a_command_that_baton_knows(name: str) -> None:
    """The very options of the manifest, through the command line's own parser and the profile, to the engine's command."""
    for worker in workers(template(name)):
        made = container(worker)
        variables = {each: value.replace("$(POD_IP)", "10.1.2.3") for each, value in environment(worker).items()}
        variables.pop("BATON_HF_TOKEN_FILE", None), variables.pop("BATON_API_KEY_FILE", None)
        options = list(made["args"])
        if made["command"][0] == "sh":
            script = made["command"][2]
            assert script.startswith("exec baton worker ") and made["command"][3] == "worker"
            known = {"LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "10.1.2.9"}
            words = ["sh", "-c", script.replace("exec baton worker", "printf '%s\\n'"), *made["command"][3:]]
            said = subprocess.run(words + options, env=known, capture_output=True, text=True, check=True)
            options = said.stdout.splitlines()
            assert "--data-parallel-rank=8" in options, "the second pod begins where the first ends"
        done = CliRunner().invoke(app, ["worker", *options, "--dry-run"], env=variables)
        assert done.exit_code == 0, done.output
        assert "10.1.2.3" in done.stdout, "peers are told the pod's address"


@pytest.mark.parametrize(("mode", "said"), [("none", None), ("self_signed", {"mode": "SIMPLE", "insecureSkipVerify": True})])
def test_istio_is_told_of_tls_at_the_filter(mode: str, said: object) -> None:
    objects = template("istio", sets=(f"filter.tls.mode={mode}",))
    assert find(objects, "DestinationRule", "baton-filter")["spec"]["trafficPolicy"].get("tls") == said
    assert baton_yaml(objects).tls_mode == mode


def test_cache_server_starts_with_a_command_that_baton_knows() -> None:
    objects = template("llama-70b-h200", sets=("cache.diskGb=100", "cache.remote=redis://kv.internal:6380"))
    made = container(find(objects, "Deployment", "baton-cache"))
    variables = {each["name"]: each["value"] for each in made["env"] if each["name"] != "BATON_CACHE_PASSWORD_FILE"}
    done = CliRunner().invoke(app, ["cache-server", *made["args"], "--dry-run"], env=variables)
    assert done.exit_code == 0, done.output
    assert "--l1-size-gb 256" in done.stdout and "kv.internal" in done.stdout
    policy = find(objects, "NetworkPolicy", "baton-cache")["spec"]
    assert {"port": 6380} in [port for rule in policy["egress"] for port in rule["ports"]], "its remote tier"
    told = environment(find(objects, "Deployment", "baton-prefill"))["BATON_CACHE_SERVER"]
    assert told == "baton-cache.inference.svc.cluster.local:5555"
    assert "BATON_CACHE_SERVER" not in environment(find(objects, "Deployment", "baton-decode"))


def test_large_numbers_stay_whole_numbers(tmp_path: Path) -> None:
    """Helm hands numbers of values on as floating point, and would write 3.3554432e+07."""
    file = tmp_path / "values.yaml"
    file.write_text("filter: {config: {limits: {max_body_bytes: 33554432}}}", encoding="utf-8")
    made = helm.run("template", "baton", str(helm.CHART), "--values", str(file), "--set", "gateway.kind=istio")
    assert "max_body_bytes: 33554432" in made
    assert f"request_body_buffer_limit: {33554432 + 1048576}" in made


@pytest.mark.parametrize("name", examples())
def test_pod_that_is_told_to_go_has_time_for_its_requests(name: str) -> None:
    for worker in workers(template(name)):
        spec = pod(worker)["spec"]
        drain_s = next(int(each.split("=")[1]) for each in container(worker)["args"] if each.startswith("--drain="))
        sleep_s = int(container(worker)["lifecycle"]["preStop"]["exec"]["command"][1])
        profile = load_profile(environment(worker)["BATON_PROFILE"])
        changes: dict[str, Any] = {"shutdown_timeout_s": drain_s, "side_channel_host": "10.1.2.3", "model": "m"}
        role = pod(worker)["metadata"]["labels"]["llm-d.ai/role"]
        grace_s = plan(profile, role, variant=None, changes=changes, arguments=(), environ={}, engine="sim", secrets={}).grace_s
        assert spec["terminationGracePeriodSeconds"] >= sleep_s + grace_s
    filter_ = find(template(name), "Deployment", "baton-filter")
    drain = baton_yaml(template(name)).drain
    assert pod(filter_)["spec"]["terminationGracePeriodSeconds"] > drain.delay_s + drain.timeout_s + 5


@pytest.mark.parametrize("name", ["llama-70b-h200", "deepseek-r1-h200"])
def test_workers_have_shared_memory_of_their_own_size_and_the_devices_that_the_values_name(name: str) -> None:
    for worker in workers(template(name, sets=("workerDefaults.shmSize=24Gi", "workerDefaults.rdma.resource=rdma/ours"))):
        made, spec = container(worker), pod(worker)["spec"]
        (mount,) = [each["name"] for each in made["volumeMounts"] if each["mountPath"] == "/dev/shm"]
        (volume,) = [each for each in spec["volumes"] if each["name"] == mount]
        assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": "24Gi"}
        asked, limit = made["resources"]["requests"], made["resources"]["limits"]
        for device in ("rdma/ours", "nvidia.com/gpu"):
            assert asked[device] == limit[device] > 0, "devices cannot be overcommitted"
        assert made["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"], "RDMA pins memory"


@pytest.mark.parametrize("name", examples())
def test_probes_ask_what_is_there(name: str) -> None:
    objects = template(name)
    for worker in workers(objects):
        made = container(worker)
        ports = {each["name"]: each["containerPort"] for each in made["ports"]}
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert made[kind]["httpGet"] == {"path": "/health", "port": "http"}, kind
        assert ports["http"] == int(environment(worker)["BATON_WORKER_PORT"])
        loads_s = made["startupProbe"]["periodSeconds"] * made["startupProbe"]["failureThreshold"]
        assert loads_s >= (1800 if environment(worker)["BATON_ENGINE"] == "vllm" else 5), "a model loads"
    made = container(find(objects, "Deployment", "baton-filter"))
    settings = baton_yaml(objects).epp
    assert settings.health_listen is not None
    asked = {kind: made[kind]["grpc"] for kind in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert {each["port"] for each in asked.values()} == {Address.parse(settings.health_listen).port}
    assert asked["startupProbe"]["service"] in ALIVE and asked["livenessProbe"]["service"] in ALIVE
    assert asked["readinessProbe"]["service"] in READY


@pytest.mark.parametrize("name", examples())
def test_of_each_workload_only_so_many_pods_may_be_evicted(name: str) -> None:
    objects = template(name)
    budgets = [each["spec"] for each in objects if each["kind"] == "PodDisruptionBudget"]
    for each in workloads(objects):
        labels = pod(each)["metadata"]["labels"]
        of_it = [spec for spec in budgets if spec["selector"]["matchLabels"].items() <= labels.items()]
        if container(each)["name"] == "worker":
            assert [spec["maxUnavailable"] for spec in of_it] == [1]
        elif container(each)["name"] == "filter" and each["spec"]["replicas"] > 1:
            assert [spec["minAvailable"] for spec in of_it] == [1], "one is always there"


@pytest.mark.parametrize("name", examples())
def test_no_pod_is_root_or_can_become_it(name: str) -> None:
    for each in workloads(template(name, sets=("cache.enabled=true",))):
        spec = pod(each)["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True and spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        own = container(each)["securityContext"]
        assert own["allowPrivilegeEscalation"] is False and own["capabilities"]["drop"] == ["ALL"]
        assert set(own["capabilities"].get("add", [])) <= {"IPC_LOCK"}
        assert not spec.get("hostNetwork") and not spec.get("hostPID")
    filter_ = container(find(template(name), "Deployment", "baton-filter"))
    assert filter_["securityContext"]["readOnlyRootFilesystem"] is True


@pytest.mark.parametrize("name", examples())
def test_no_secret_stands_in_a_variable_or_an_argument(name: str) -> None:
    for each in workloads(
        template(name, sets=("secrets.apiKey.name=k", "secrets.hfToken.name=t", "cache.passwordSecret.name=p"))
    ):
        assert all("secretKeyRef" not in (variable.get("valueFrom") or {}) for variable in container(each).get("env", []))
        for volume in pod(each)["spec"]["volumes"]:
            if "secret" in volume:
                assert volume["secret"]["defaultMode"] == 0o440, "read by the pod's group, and nobody else"


def test_filter_may_list_and_watch_pods_of_its_namespace_and_no_more() -> None:
    """The rights that the filter itself says it needs."""
    objects = template("istio")
    settings = baton_yaml(objects).workers.kubernetes
    assert settings is not None
    assert {helm.NAMESPACE: find(objects, "Role")["rules"]} == _plain(rules(settings, helm.NAMESPACE))
    assert not [each for each in objects if each["kind"].startswith("Cluster")]
    assert pod(find(objects, "Deployment", "baton-filter"))["spec"]["automountServiceAccountToken"] is True
    by_dns = template("simulated")
    assert not [each for each in by_dns if each["kind"].startswith("Role")]
    for each in workloads(by_dns):
        assert pod(each)["spec"]["automountServiceAccountToken"] is False


def test_selector_of_the_discovery_finds_the_workers_and_nothing_else() -> None:
    objects = template("llama-70b-h200")
    settings = baton_yaml(objects).workers.kubernetes
    assert settings is not None
    (source,) = settings.pods
    assert isinstance(source.selector, dict)
    for each in workloads(objects):
        labels = pod(each)["metadata"]["labels"]
        assert (source.selector.items() <= labels.items()) == (container(each)["name"] == "worker")
    assert source.ports == ["http"]


def test_lease_of_the_filter_is_that_of_the_workers() -> None:
    objects = template("istio", sets=("workerDefaults.leaseSeconds=90",))
    assert baton_yaml(objects).handoff.lease_s == 90
    assert all("--lease=90" in container(each)["args"] for each in workers(objects))


def reached_by(objects: list[Object], target: dict[str, str], peer: dict[str, str], namespace: str, port: int | str) -> bool:
    """Whether a pod with the labels ``peer`` may connect to one with the labels ``target``, by the policies of ingress."""
    policies = [
        each["spec"]
        for each in objects
        if each["kind"] == "NetworkPolicy" and each["spec"]["podSelector"]["matchLabels"].items() <= target.items()
    ]
    assert policies, "no policy selects it: everything may connect"
    return any(
        _selects(source, peer, namespace) and _opens(rule.get("ports"), port)
        for policy in policies
        for rule in policy["ingress"]
        for source in rule["from"]
    )


def reaches(objects: list[Object], source: dict[str, str], target: dict[str, str], port: int) -> bool:
    """Whether a pod with the labels ``source`` may connect to one of its namespace, by the policies of egress; what goes to
    addresses and not to pods, as to the API server, does not count."""
    policies = [
        each["spec"]
        for each in objects
        if each["kind"] == "NetworkPolicy" and each["spec"]["podSelector"]["matchLabels"].items() <= source.items()
    ]
    assert policies, "no policy selects it: it may connect to everything"
    return any(
        "podSelector" in peer and _selects(peer, target, helm.NAMESPACE) and _opens(rule.get("ports"), port)
        for policy in policies
        for rule in policy["egress"]
        for peer in rule.get("to", [])
    )


def _selects(source: Object, labels: dict[str, str], namespace: str) -> bool:
    own = {"kubernetes.io/metadata.name": namespace}
    if "namespaceSelector" in source:
        wanted = source["namespaceSelector"]
        if not wanted.get("matchLabels", {}).items() <= own.items():
            return False
        if any(own[each["key"]] not in each["values"] for each in wanted.get("matchExpressions", [])):
            return False
    elif namespace != helm.NAMESPACE:
        return False
    return source.get("podSelector", {}).get("matchLabels", {}).items() <= labels.items()


def _opens(ports: list[Object] | None, port: int | str) -> bool:
    if ports is None:
        return True
    return any(
        each["port"] == port or (isinstance(port, int) and "endPort" in each and each["port"] <= port <= each["endPort"])
        for each in ports
    )


@pytest.mark.parametrize("name", examples())
def test_side_channels_are_reached_by_workers_only(name: str) -> None:
    objects = template(name, sets=("gateway.kind=istio",))
    gateway = ({"istio": "ingressgateway"}, "istio-system")
    prometheus = ({"app": "prometheus"}, "monitoring")
    stranger = ({"app": "web"}, helm.NAMESPACE)
    filter_ = (pod(find(objects, "Deployment", "baton-filter"))["metadata"]["labels"], helm.NAMESPACE)
    for worker in workers(objects):
        labels = pod(worker)["metadata"]["labels"]
        other = ({**labels, "baton/pool": "another"}, helm.NAMESPACE)
        first = int(environment(worker)["BATON_SIDE_CHANNEL_PORT"])
        low, high = (int(each) for each in environment(worker)["UCX_TCP_PORT_RANGE"].split("-"))
        for port in (first, low, high):
            assert reached_by(objects, labels, *other, port), f"peers need {port}"
            for nobody in (gateway, prometheus, stranger, filter_):
                assert not reached_by(objects, labels, *nobody, port), (nobody, port)
        assert not reached_by(objects, labels, *other, high + 1)
        assert reached_by(objects, labels, *filter_, "http")
        assert reached_by(objects, labels, *gateway, "http") == (labels["baton/decodes"] == "true")
        assert reached_by(objects, labels, *prometheus, "http")
        for nobody in (stranger, other, ({"app": "web"}, "istio-system"), ({"istio": "ingressgateway"}, "default")):
            assert not reached_by(objects, labels, *nobody, "http"), nobody


@pytest.mark.parametrize("name", ["llama-70b-h200", "deepseek-r1-h200"])
def test_kv_events_are_reached_by_the_filter_only_and_only_where_there_are_any(name: str) -> None:
    gateway, prometheus = ({"istio": "ingressgateway"}, "istio-system"), ({"app": "prometheus"}, "monitoring")
    for sets in ((), ("workerDefaults.ports.kvEvents=5557", "workers.prefill.ports.kvEventsReplay=5657")):
        objects = template(name, sets=("gateway.kind=istio", *sets))
        filter_ = pod(find(objects, "Deployment", "baton-filter"))["metadata"]["labels"]
        config = baton_yaml(objects)
        assert config.kv_events.enabled == bool(sets), "who publishes is listened to"
        assert (config.tokens is not None) == bool(sets), "events speak of tokens: prompts are compared with them by theirs"
        for worker in workers(objects):
            labels = pod(worker)["metadata"]["labels"]
            published, replayed = (
                int(next(each for each in container(worker)["args"] if each.startswith(f"--kv-events-{kind}=")).split("=")[1])
                for kind in ("port", "replay-port")
            )
            assert bool(published) == bool(replayed) == bool(sets)
            ranks = len([each for each in container(worker)["ports"] if each["name"].startswith("nixl-")])
            for first in (published, replayed) if sets else (5557, 5520, 5540, 5560, 5580):
                for port in (first, first + ranks - 1):
                    assert reached_by(objects, labels, filter_, helm.NAMESPACE, port) == bool(sets), port
                    assert reaches(objects, filter_, labels, port) == bool(sets), port
                    for nobody in (gateway, prometheus, ({"app": "web"}, helm.NAMESPACE), (labels, "elsewhere")):
                        assert not reached_by(objects, labels, *nobody, port), (nobody, port)


def test_what_the_filter_needs_to_reach_it_may_reach_and_no_side_channel() -> None:
    objects = template("llama-70b-h200", sets=("gateway.kind=istio", "cache.enabled=true"))
    labels = pod(find(objects, "Deployment", "baton-filter"))["metadata"]["labels"]
    assert reaches(objects, labels, labels, 9005), "replicas"
    assert reaches(objects, labels, pod(find(objects, "Deployment", "baton-cache"))["metadata"]["labels"], 8080)
    for worker in workers(objects):
        to = pod(worker)["metadata"]["labels"]
        assert reaches(objects, labels, to, int(environment(worker)["BATON_WORKER_PORT"]))
        for port in (int(environment(worker)["BATON_SIDE_CHANNEL_PORT"]), 20_000, 9005):
            assert not reaches(objects, labels, to, port), port


def test_filter_is_reached_by_the_gateway_and_its_metrics_by_the_monitoring() -> None:
    objects = template("istio")
    labels = pod(find(objects, "Deployment", "baton-filter"))["metadata"]["labels"]
    gateway, prometheus = ({"istio": "ingressgateway"}, "istio-system"), ({"app": "prometheus"}, "monitoring")
    stranger = ({"app": "web"}, helm.NAMESPACE)
    assert reached_by(objects, labels, *gateway, "grpc") and not reached_by(objects, labels, *gateway, "metrics")
    assert reached_by(objects, labels, *prometheus, "metrics") and not reached_by(objects, labels, *prometheus, "grpc")
    assert reached_by(objects, labels, labels, helm.NAMESPACE, "peers")
    for port in ("grpc", "health", "metrics", "peers"):
        assert not reached_by(objects, labels, *stranger, port)


def test_ports_of_every_rank_are_open() -> None:
    objects = template("deepseek-r1-h200")
    decode = find(objects, "LeaderWorkerSet")
    labels = pod(decode)["metadata"]["labels"]
    named = {each["name"]: each["containerPort"] for each in container(decode)["ports"]}
    assert named["nixl-0"] == 5640 and named["nixl-7"] == 5647
    peer = {**labels, "baton/pool": "prefill"}
    assert reached_by(objects, labels, peer, helm.NAMESPACE, 5647)
    assert not reached_by(objects, labels, peer, helm.NAMESPACE, 13345)
    assert reached_by(objects, labels, labels, helm.NAMESPACE, 13345), "ranks of one engine meet at ports of their own"


@pytest.mark.parametrize("kind", ["keda", "hpa"])
def test_each_role_is_scaled_by_a_metric_that_baton_has(kind: str) -> None:
    sets = (f"workers.prefill.autoscaling.type={kind}", f"workers.decode.autoscaling.type={kind}")
    objects = template("llama-70b-h200", sets=sets)
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    known = set(re.findall(r"`(baton_[a-z_]+)`", text))
    rendered = helm.run(
        "template", "baton", str(helm.CHART), "--values", str(helm.EXAMPLES / "llama-70b-h200.yaml"),
        *[part for each in sets for part in ("--set", each)], "--show-only", "templates/workers/autoscaling.yaml",
    )  # fmt: skip
    queries = re.findall(r'query: (".*")', rendered) if kind == "keda" else re.findall(r"#   baton_\w+: (.*)", rendered)
    assert len(queries) == 4
    for query in queries:
        used = {re.sub("_sum$", "", name) for name in re.findall(r"baton_[a-z_]+", query)}
        assert used <= known, query
    for each in objects:
        if each["kind"] in ("ScaledObject", "HorizontalPodAutoscaler"):
            target = find(objects, each["spec"]["scaleTargetRef"]["kind"], each["spec"]["scaleTargetRef"]["name"])
            assert "replicas" not in target["spec"], "an update of the chart would undo the scaling"


def test_published_schemas_refuse_what_is_wrong() -> None:
    """The judges judge."""
    objects = [
        {"apiVersion": "networking.istio.io/v1", "kind": "VirtualService", "spec": {"hosts": ["a"], "http": [{"timeout": 5}]}},
        {"apiVersion": "keda.sh/v1alpha1", "kind": "ScaledObject", "spec": {"triggers": [{"type": "prometheus"}]}},
        {"apiVersion": "gateway.networking.k8s.io/v1", "kind": "HTTPRoute", "spec": {"hostnames": "a"}},
        {"apiVersion": "monitoring.coreos.com/v1", "kind": "PodMonitor", "spec": {"selector": 1}},
        {"apiVersion": "apps/v1", "kind": "Deployment", "spec": {"replica": 1}},
        {"apiVersion": "inference.networking.k8s.io/v1", "kind": "InferencePool", "spec": {"targetPort": 8000}},
    ]
    for each in objects:
        each["metadata"] = {"name": "x"}
        assert schemas.faults([each]), each["kind"]
    assert all(schemas.published(objects[:4])), "these have published validators"


GATEWAYS = sorted(path.relative_to(helm.ROOT) for folder in ("istio", "gateway") for path in (FOLDER / folder).rglob("*.yaml"))


@pytest.mark.parametrize("path", GATEWAYS, ids=str)
def test_manifest_for_a_gateway_is_one_that_an_api_server_would_take(path: Path) -> None:
    objects = load(str(path))
    assert objects and not schemas.faults(objects)


@pytest.mark.parametrize("path", GATEWAYS, ids=str)
def test_envoy_knows_every_field_of_an_envoyfilter(path: Path) -> None:
    for patch in (patch for each in of_kind(load(str(path)), "EnvoyFilter") for patch in each["spec"]["configPatches"]):
        message(envoyfilter.MESSAGES[patch["applyTo"]], patch["patch"]["value"])


@pytest.mark.parametrize("path", mesh_files.FILES)
def test_committed_manifests_are_what_the_chart_makes(path: str) -> None:
    assert (FOLDER / path).read_text(encoding="utf-8") == mesh_files.text(path), "make generate"


@pytest.mark.parametrize("path", [path for path in mesh_files.FILES if "inference-pool" not in path])
def test_gateways_remove_every_header_that_could_steer(path: str) -> None:
    text = (FOLDER / path).read_text(encoding="utf-8")
    removed = set(re.findall(r"(?:remove: |^ +- )(x-[a-z-]+)", text, re.MULTILINE))
    assert set(ROUTING_HEADERS) <= removed


def test_filter_may_change_what_it_may_change_behind_plain_envoy() -> None:
    """One list of headers, in the EnvoyFilter as in envoy/envoy.yaml."""
    plain = (FOLDER / "envoy.yaml").read_text(encoding="utf-8")
    ours = (FOLDER / "istio" / "envoyfilter.yaml").read_text(encoding="utf-8")
    pattern = re.compile(r'regex: "?(content-[^"\n]*)')
    assert pattern.search(plain).group(1) == pattern.search(ours).group(1)  # type: ignore[union-attr]


def test_queries_are_ones_that_prometheus_can_read(tmp_path: Path) -> None:
    found = []
    for role in ("prefill", "decode"):
        scaled = find(
            template("llama-70b-h200", sets=('monitoring.selector=namespace="inference"',)), "ScaledObject", f"baton-{role}"
        )
        found += [trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]]
    rules = [{"record": f"r{number}", "expr": query} for number, query in enumerate(found)]
    file = tmp_path / "rules.json"
    file.write_bytes(msgspec.json.encode({"groups": [{"name": "g", "rules": rules}]}))
    promtool = Path(sys.executable).parent / "promtool"
    done = subprocess.run([promtool, "check", "rules", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and f"{len(rules)} rules found" in done.stdout, done.stdout + done.stderr
    assert all('namespace="inference"' in query for query in found)


def test_adapter_serves_what_the_autoscalers_ask_for() -> None:
    sets = ("workers.prefill.autoscaling.type=hpa", "workers.decode.autoscaling.type=hpa")
    rendered = helm.run("template", "baton", str(helm.CHART), *[part for each in sets for part in ("--set", each)])
    asked = dict(re.findall(r"^  #   (baton_\w+): (.*)$", rendered, re.MULTILINE))
    (adapter,) = load("deploy/prometheus-adapter.yaml")
    assert {rule["name"]["as"]: rule["metricsQuery"] for rule in adapter["rules"]["external"]} == asked
    used = {
        metric["external"]["metric"]["name"]
        for each in template("istio", sets=sets)
        if each["kind"] == "HorizontalPodAutoscaler"
        for metric in each["spec"]["metrics"]
    }
    assert used == set(asked)


def test_filter_behind_the_meshs_envoy_in_the_stack_tests_is_configured_as_the_chart_does_it() -> None:
    chart = baton_yaml(template("istio"))
    tried = MeshStack(lambda *_: None).config
    for of in (
        lambda config: config.tls_mode,
        lambda config: config.epp.enabled,
        lambda config: (config.access_log, config.unseen_answers, config.watches),
        lambda config: (config.envoy.stats, config.envoy.body_mode, config.envoy.filter_down),
        lambda config: config.prefill,
    ):
        assert of(chart) == of(tried)


def test_docs_name_files_and_values_that_there_are() -> None:
    values = (helm.CHART / "values.yaml").read_text(encoding="utf-8")
    for name in ("deploy/README.md", "docs/istio.md", "docs/envoy-gateway.md"):
        text = (helm.ROOT / name).read_text(encoding="utf-8")
        for link in re.findall(r"\]\(([^)#]+)", text):
            assert ((helm.ROOT / name).parent / link).exists(), f"{name}: {link}"
        for path in re.findall(r"`(gateway\.[A-Za-z.]+[a-z])`", text):
            assert re.search(rf"^ +{path.split('.')[-1]}:", values, re.MULTILINE), f"{name}: {path}"
