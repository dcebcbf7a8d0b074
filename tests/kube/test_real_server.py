"""Discovery against the real kube-apiserver: the claims that the double makes about it, and the rights that Baton prints."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from extproc.discovery.kubernetes import rbac, reflector
from extproc.discovery.kubernetes.api import Api, ApiError, Collection
from extproc.discovery.kubernetes.settings import KubernetesWorkers, PodWorkers, PoolWorkers
from tests.kube.cluster import ADMIN, FILTER, Cluster, binaries
from tests.kube_api.follower import discovery, until
from tests.kube_api.objects import pod, pool

PODS = "/api/v1/namespaces/default/pods"
POOL_GROUP = "inference.networking.k8s.io"
POOLS = f"/apis/{POOL_GROUP}/v1/namespaces/default/inferencepools"
SETTINGS = KubernetesWorkers(pods=[PodWorkers(selector="app=vllm")], max_backoff_s=0.5)


@pytest.fixture(scope="module")
async def cluster() -> AsyncIterator[Cluster]:
    async with Cluster(binaries()) as running:
        yield running


@pytest.fixture(autouse=True)
async def empty(cluster: Cluster) -> AsyncIterator[None]:
    yield
    found = await cluster.get(PODS)
    assert found is not None
    for each in found["items"]:
        await cluster.delete(f"{PODS}/{each['metadata']['name']}", grace_s=0)


def follow(cluster: Cluster, settings: KubernetesWorkers = SETTINGS, token: str = ADMIN) -> Any:
    return discovery(settings, cluster.access(token))


async def make_pod(cluster: Cluster, name: str, ip: str, *, ready: bool = True, **more: Any) -> None:
    """As a user, the scheduler and the kubelet make it."""
    found = pod(name, ip, ready=ready, **more)
    wanted = {key: value for key, value in found.items() if key != "status"}
    wanted["metadata"] = {key: found["metadata"][key] for key in ("name", "labels", "annotations")}
    wanted["spec"]["initContainers"] = [{"name": "download", "image": "x"}]  # sidecars came with 1.28
    wanted["spec"]["terminationGracePeriodSeconds"] = 600
    await cluster.post(PODS, wanted)
    await cluster.patch(f"{PODS}/{name}/status", {"status": status(found)})


def status(found: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in found["status"].items() if key in ("phase", "conditions", "podIP", "podIPs")}


async def set_status(cluster: Cluster, name: str, ip: str, **more: Any) -> None:
    await cluster.patch(f"{PODS}/{name}/status", {"status": status(pod(name, ip, **more))})


async def test_pods_come_get_ready_terminate_and_go(cluster: Cluster) -> None:
    await make_pod(cluster, "a", "10.0.0.1", role="prefill")
    async with follow(cluster) as follower:
        await follower.until("10.0.0.1")
        await make_pod(cluster, "b", "10.0.0.2", ready=False)
        await make_pod(cluster, "c", "10.0.0.3", role="both", labels={"app": "vllm"})
        await follower.until("10.0.0.1", "10.0.0.3")
        await set_status(cluster, "b", "10.0.0.2", ready=True)
        await follower.until("10.0.0.1", "10.0.0.2", "10.0.0.3")
        await cluster.delete(f"{PODS}/a")
        found = await cluster.get(f"{PODS}/a")
        assert found is not None, "it has 600 s of grace"
        assert found["metadata"]["deletionTimestamp"]
        await follower.until("10.0.0.2", "10.0.0.3")
        await set_status(cluster, "b", "10.0.0.2", phase="Failed")
        await follower.until("10.0.0.3")
        await cluster.delete(f"{PODS}/c", grace_s=0)
        await follower.until()
        assert [each for each in follower.requests if each[0] == "list"] == [("list", "ok")]


async def test_a_long_list_comes_in_pages_and_a_watch_goes_on_after_it(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reflector, "PAGE", 10)
    for index in range(1, 36):
        await make_pod(cluster, f"p{index}", f"10.0.0.{index}")
    async with follow(cluster) as follower:
        await until(lambda: len(follower.addresses) == 35)
        assert follower.requests[:4] == [("list", "ok")] * 4
        await make_pod(cluster, "later", "10.0.0.99")
        await until(lambda: len(follower.addresses) == 36)


async def test_watches_that_end_go_on_with_the_versions_of_bookmarks(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reflector.Pace, "watch_for_s", lambda _: 3)
    await make_pod(cluster, "a", "10.0.0.1")
    async with follow(cluster) as follower:
        await follower.until("10.0.0.1")
        await until(lambda: follower.requests.count(("watch", "ok")) >= 3)
        await make_pod(cluster, "b", "10.0.0.2")
        await follower.until("10.0.0.1", "10.0.0.2")
        assert follower.requests.count(("list", "ok")) == 1
        assert follower.error is None


async def test_the_server_restarts_and_its_history_is_gone(cluster: Cluster) -> None:
    await make_pod(cluster, "a", "10.0.0.1")
    await make_pod(cluster, "b", "10.0.0.2")
    async with follow(cluster) as follower:
        await follower.until("10.0.0.1", "10.0.0.2")
        await until(lambda: ("watch", "ok") in follower.requests)
        await cluster.stop()
        await until(lambda: follower.error is not None)
        assert follower.addresses == {"10.0.0.1:8000", "10.0.0.2:8000"}
        cluster.start()
        await cluster.ready()
        await make_pod(cluster, "c", "10.0.0.3")
        await cluster.delete(f"{PODS}/a", grace_s=0)
        await follower.until("10.0.0.2", "10.0.0.3")
        await until(lambda: follower.error is None)
        assert all(each.decode for each in follower.sets)


async def test_a_version_that_was_compacted_away_is_gone(cluster: Cluster) -> None:
    await make_pod(cluster, "a", "10.0.0.1")
    what = Collection(group="", version="v1", resource="pods", namespace="default")
    async with Api(cluster.access(ADMIN), request_timeout_s=10) as api:
        old = (await api.page(what, limit=1, token=None)).metadata.resource_version
        for index in range(5):
            await set_status(cluster, "a", f"10.0.0.{index + 2}")
        await cluster.stop()  # its own cache of the history goes with it
        await cluster.compact()
        cluster.start()
        await cluster.ready()
        with pytest.raises(ApiError) as caught:
            async with api.watch(what, since=old, for_s=5) as batches:
                async for events in batches:
                    for event in events:
                        if event.type == "ERROR":
                            from extproc.discovery.kubernetes.api import said_by, status_of

                            raise said_by(status_of(event), what)
        assert caught.value.outcome == "gone"


async def test_the_rights_that_baton_prints_are_enough_and_give_nothing_else(cluster: Cluster) -> None:
    await make_pod(cluster, "a", "10.0.0.1")
    async with follow(cluster, SETTINGS, FILTER) as follower:
        await until(lambda: "403: RBAC must allow the verbs list and watch on pods" in str(follower.error))
        await grant(cluster, rbac.manifests(SETTINGS, namespace="default", service_account="baton"))
        await follower.until("10.0.0.1")
        await until(lambda: follower.error is None)
        await make_pod(cluster, "b", "10.0.0.2")
        await follower.until("10.0.0.1", "10.0.0.2")
    async with Api(cluster.access(FILTER), request_timeout_s=10) as api:
        for resource, namespace in (("secrets", "default"), ("pods", "kube-system"), ("services", "default")):
            assert await outcome(api, core(resource, namespace)) == "forbidden", resource


async def test_a_rule_with_a_name_allows_what_names_it_and_nothing_else(cluster: Cluster) -> None:
    """As the rule for an InferencePool does: here with a kind that every server has."""
    named = rbac.PolicyRule(api_groups=("",), resources=("configmaps",), resource_names=("mine",))
    [role, binding] = rbac.manifests(SETTINGS, namespace="default", service_account="baton")
    for each in (role, binding):
        each["metadata"]["name"] = "named"
    role["rules"] = [msgspec.to_builtins(named) | {"verbs": list(rbac.VERBS)}]
    binding["roleRef"]["name"] = "named"
    await cluster.post("/api/v1/namespaces/default/configmaps", {"metadata": {"name": "mine"}, "data": {"a": "b"}})
    await grant(cluster, [role, binding])
    async with Api(cluster.access(FILTER), request_timeout_s=10) as api:
        mine = core("configmaps", fields="metadata.name=mine")
        async with asyncio.timeout(20):
            while await outcome(api, mine) != "ok":  # the server hears of the role a moment later
                await asyncio.sleep(0.05)
        page = await api.page(mine, limit=10, token=None)
        assert len(page.items or ()) == 1
        async with api.watch(mine, since=page.metadata.resource_version, for_s=5) as batches:
            await cluster.patch("/api/v1/namespaces/default/configmaps/mine", {"data": {"a": "c"}})
            async for [event, *_] in batches:
                assert event.type == "MODIFIED"
                break
        assert await outcome(api, core("configmaps")) == "forbidden"
        assert await outcome(api, core("configmaps", fields="metadata.name=other")) == "forbidden"


def core(resource: str, namespace: str = "default", fields: str | None = None) -> Collection:
    return Collection(group="", version="v1", resource=resource, namespace=namespace, fields=fields)


async def outcome(api: Api, what: Collection) -> str:
    try:
        await api.page(what, limit=1, token=None)
    except ApiError as error:
        return error.outcome
    return "ok"


async def grant(cluster: Cluster, manifests: list[dict[str, Any]]) -> None:
    for each in manifests:
        kind = {"Role": "roles", "RoleBinding": "rolebindings"}[each["kind"]]
        as_json = msgspec.json.decode(msgspec.json.encode(each))
        await cluster.post(f"/apis/rbac.authorization.k8s.io/v1/namespaces/default/{kind}", as_json)


async def test_an_inference_pool_is_followed_with_the_rights_for_it_alone(cluster: Cluster) -> None:
    await define_pools(cluster)
    await make_pod(cluster, "a", "10.0.0.1")
    await cluster.post(POOLS, pool("p", {"app": "vllm"}, 8000))
    settings = KubernetesWorkers(inference_pools=[PoolWorkers(name="p")], max_backoff_s=0.5)
    manifests = rbac.manifests(settings, namespace="default", service_account="baton")
    for each in manifests:
        each["metadata"]["name"] = "pool"
        if "roleRef" in each:
            each["roleRef"]["name"] = "pool"
    async with follow(cluster, settings, FILTER) as follower:
        await until(lambda: "403: RBAC must allow the verbs list and watch on inferencepools" in str(follower.error))
        await grant(cluster, manifests)
        await follower.until("10.0.0.1")
        await until(lambda: follower.error is None)
        await make_pod(cluster, "b", "10.0.0.2")
        await follower.until("10.0.0.1", "10.0.0.2")
        await cluster.patch(f"{POOLS}/p", {"spec": {"targetPorts": [{"number": 8001}]}})
        await until(lambda: follower.addresses == {"10.0.0.1:8001", "10.0.0.2:8001"})
        await cluster.delete(f"{POOLS}/p")
        await until(lambda: "there is no such pool" in str(follower.error))
        assert len(follower.addresses) == 2
    every = Collection(group=POOL_GROUP, version="v1", resource="inferencepools", namespace="default")
    async with Api(cluster.access(FILTER), request_timeout_s=10) as api:
        assert await outcome(api, every) == "forbidden", "only the pool that is named"


async def define_pools(cluster: Cluster) -> None:
    """The InferencePool's CustomResourceDefinition, as far as it matters here."""
    await cluster.post(
        "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
        {
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": {
                "name": f"inferencepools.{POOL_GROUP}",
                "annotations": {"api-approved.kubernetes.io": "unapproved, for a test"},
            },
            "spec": {
                "group": POOL_GROUP,
                "scope": "Namespaced",
                "names": {"plural": "inferencepools", "singular": "inferencepool", "kind": "InferencePool"},
                "versions": [
                    {
                        "name": "v1",
                        "served": True,
                        "storage": True,
                        "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
                    }
                ],
            },
        },
    )
    async with asyncio.timeout(20):
        while await cluster.get(POOLS) is None:
            await asyncio.sleep(0.05)
