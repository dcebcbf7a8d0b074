"""``baton kubernetes``: what it prints can be applied as it stands, and it says why a pod is no worker."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from ruamel.yaml import YAML

from tests.kube_api.objects import pod, pool, terminating
from tests.kube_api.server import KubeApi


async def baton(*arguments: str) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "extproc", *arguments), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode, out.decode(), err.decode()


def configuration(folder: Path, kubernetes: dict[str, object]) -> str:
    path = folder / "baton.yaml"
    path.write_text(json.dumps({"workers": {"kubernetes": kubernetes}}))
    return str(path)


def kubeconfig(folder: Path, server: str) -> str:
    path = folder / "kubeconfig"
    contexts = [{"name": "c", "context": {"cluster": "c"}}]
    path.write_text(
        json.dumps({"current-context": "c", "contexts": contexts, "clusters": [{"name": "c", "cluster": {"server": server}}]})
    )
    return str(path)


async def test_rights_are_printed_as_yaml_for_kubectl(tmp_path: Path) -> None:
    config = configuration(tmp_path, {"inference_pools": [{"name": "llama"}]})
    code, out, err = await baton("kubernetes", "rbac", "-c", config, "-n", "gpus", "--service-account", "f", "--label", "a=b")
    assert (code, err) == (0, "")
    role, binding = YAML(typ="safe").load_all(out)
    assert (role["kind"], role["metadata"]) == ("Role", {"name": "f-workers", "namespace": "gpus", "labels": {"a": "b"}})
    assert [(rule["resources"], rule.get("resourceNames"), rule["verbs"]) for rule in role["rules"]] == [
        (["pods"], None, ["list", "watch"]),
        (["inferencepools"], ["llama"], ["list", "watch"]),
    ]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "f", "namespace": "gpus"}]


async def test_what_is_found_is_shown_and_why_a_pod_is_no_worker(tmp_path: Path) -> None:
    async with KubeApi() as api:
        api.put("inferencepools", pool("llama", {"app": "vllm"}, 8000))
        api.put("pods", pod("good", "10.0.0.1", role="prefill"))
        api.put("pods", pod("slow", "10.0.0.2", ready=False))
        api.put("pods", pod("leaving", "10.0.0.3"))
        api.edit("pods", "leaving", terminating)
        config = configuration(tmp_path, {"inference_pools": [{"name": "llama"}], "kubeconfig": kubeconfig(tmp_path, api.url)})
        code, out, err = await baton("kubernetes", "workers", "-c", config)
        assert (code, err) == (0, f"asking {api.url}\n")
        lines = {line.split()[3]: line for line in out.splitlines() if " pod " in line}
        assert "prefill" in lines["good"]
        assert "10.0.0.1:8000" in lines["good"]
        assert "none: it is not ready" in lines["slow"]
        assert "none: it terminates" in lines["leaving"]

        api.denied = {"inferencepools"}
        code, _, err = await baton("kubernetes", "workers", "-c", config)
        assert code == 1
        assert "baton: InferencePool default/llama: list of inferencepools.inference.networking.k8s.io" in err
        assert "403: RBAC must allow" in err


async def test_what_cannot_be_said_is_an_error_in_one_line(tmp_path: Path) -> None:
    nothing = tmp_path / "nothing.yaml"
    nothing.write_text("workers: {prefill: ['10.0.0.1:1'], decode: ['10.0.0.2:1']}")
    for arguments, why in (
        (("rbac", "-c", str(nothing)), "workers.kubernetes is not set"),
        (("rbac", "-c", configuration(tmp_path, {"pods": [{}]}), "--label", "x"), "--label x: key=value is needed"),
        (("workers", "-c", configuration(tmp_path, {"pods": [{}], "kubeconfig": "/nowhere"})), "No such file"),
    ):
        code, out, err = await baton("kubernetes", *arguments)
        assert (code, out) == (1, "")
        assert why in err
        assert err.count("\n") == 1
