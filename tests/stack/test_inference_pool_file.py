"""`envoy/istio/inference-pool.yaml` as Istio puts it into Envoy: DestinationRule, InferencePool, HTTPRoute, and requests."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from tests.manifests import helm
from tests.stack.inference_pool import Mesh
from tests.stack.mesh import istio
from tests.stack.mesh.manifests import load, only
from tests.stack.mesh.messages import content

OBJECTS = load("envoy/istio/inference-pool.yaml")
RULE = only(OBJECTS, "DestinationRule")["spec"]
POOL = only(OBJECTS, "InferencePool")
PICKER = POOL["spec"]["endpointPickerRef"]
PODS = {
    helm.pod(each)["metadata"]["labels"]["llm-d.ai/role"]: helm.pod(each)["metadata"]["labels"]
    for each in helm.template("istio-inference-pool")
    if each["kind"] == "Deployment" and helm.container(each)["name"] == "worker"
}
"""Role -> labels of its pods, of the same chart."""


class FromFile(Mesh):
    """The gateway's cluster has the pods that the pool selects, and its way to the picker is what the DestinationRule says."""

    def __init__(self, *, ruled: bool = True) -> None:
        super().__init__("istio", prefill=1, decode=2)
        wanted = POOL["spec"]["selector"]["matchLabels"].items()
        roles = {"prefill": self.prefill, "decode": self.decode}
        self.hosts = [each.address for role, found in roles.items() if wanted <= PODS[role].items() for each in found]
        self.fail_open = {"FailClose": False, "FailOpen": True}[PICKER["failureMode"]]
        self._policy: dict[str, Any] = RULE["trafficPolicy"] if ruled else {}

    def _picker(self) -> dict[str, Any]:
        made = istio.cluster(f"{PICKER['name']}.inference", PICKER["port"]["number"], [self.listen], self._policy)
        assert made.name == f"outbound|9002||{RULE['host']}", "the rule is for the picker of the pool"
        made.name = made.load_assignment.cluster_name = "picker"
        found: dict[str, Any] = content(made)
        return found

    def _route(self) -> dict[str, Any]:
        (rule,) = only(OBJECTS, "HTTPRoute")["spec"]["rules"]
        (target,) = rule["backendRefs"]
        assert (target["group"], target["kind"], target["name"]) == (
            POOL["apiVersion"].partition("/")[0],
            "InferencePool",
            POOL["metadata"]["name"],
        )
        made = super()._route()
        made["route"]["timeout"] = rule["timeouts"]["request"]
        return made


async def test_the_gateway_sends_what_the_picker_says_to_the_pool_over_tls_and_nothing_without_it() -> None:
    async with FromFile() as mesh:
        assert mesh.hosts == [each.address for each in mesh.decode], "prefill workers are no destination of a request"
        for _ in range(4):
            assert (await mesh.ask())[0] == 200
        assert (len(mesh.prefill[0].received), [len(each.received) for each in mesh.decode]) == (4, [2, 2])
        async with aiohttp.ClientSession() as session, session.get(f"{mesh.envoy_admin}/stats?filter=picker.ssl.handsh") as got:
            assert int((await got.text()).rpartition(":")[2]) > 0
        await mesh.stop_picker()
        assert (await mesh.ask())[0] == 500, "FailClose"
        assert [len(each.received) for each in mesh.decode] == [2, 2]


@pytest.mark.timeout(60)
async def test_without_the_destination_rule_the_gateway_speaks_plaintext_to_a_picker_that_has_tls() -> None:
    """Why the file has one."""
    async with FromFile(ruled=False) as mesh:
        assert (await mesh.ask())[0] == 500
        assert not [each for worker in (*mesh.prefill, *mesh.decode) for each in worker.received]
