"""`baton epp`: the options of other pickers, against an API server that knows an InferencePool and pods of both roles."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.certificates import Authority
from tests.kube_api.objects import pod, pool
from tests.kube_api.server import KubeApi
from tests.stack.inference_pool import HEADER, Mesh

pytestmark = pytest.mark.asyncio(loop_scope="session")


def options(mesh: Mesh, *more: str) -> list[str]:
    """As a chart writes them, with what only other pickers know."""
    port = {name: where.rpartition(":")[2] for name, where in (("grpc", mesh.listen), ("health", mesh.health))}
    return [
        *("--pool-name", "llama", "--pool-namespace", "inference", "--pool-group", "inference.networking.k8s.io"),
        *("-v=4", "--zap-encoder", "json"),
        *("--grpc-port", port["grpc"], "--grpc-health-port", port["health"]),
        *("--metrics-port", mesh.metrics_at.rpartition(":")[2]),
        *("--prefill-selector", "llm-d.ai/role=prefill", "--prefill-port", str(mesh.prefill[0].port)),
        *("--config", str(mesh.directory / "baton.yaml")),
        *more,
    ]


def known(api: KubeApi, mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that selects the decode worker only."""
    kubeconfig = mesh.directory / "kubeconfig"
    document = {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c"}}],
        "clusters": [{"name": "c", "cluster": {"server": api.url}}],
    }
    kubeconfig.write_text(json.dumps(document))
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    decode, prefill = mesh.decode[0], mesh.prefill[0]
    labels = {"app": "llama"}
    api.put("pods", pod("decode-0", "127.0.0.1", role="decode", port=decode.port, namespace="inference", labels=labels))
    api.put("pods", pod("prefill-0", "127.0.0.1", role="prefill", port=prefill.port, namespace="inference"))
    api.put("inferencepools", pool("llama", labels, decode.port, namespace="inference"))


async def test_a_pool_is_served_with_a_handoff_by_the_options_of_a_chart(monkeypatch: pytest.MonkeyPatch) -> None:
    async with KubeApi() as api:
        mesh = Mesh(decode=1)
        known(api, mesh, monkeypatch)
        mesh.options = options(mesh, "--secure-serving=true")
        async with mesh:
            code, _, headers = await mesh.ask()
            assert (code, headers[HEADER]) == (200, mesh.decode[0].address)
            assert "kv_transfer_params" in mesh.decode[0].last.json
            assert len(mesh.prefill[0].received) == 1
            (line,) = await mesh.logged("options_ignored")
            assert line["options"] == ["-v", "--zap-encoder"]
            await mesh.at_rest()


async def test_mounted_certificates_are_those_of_a_secret(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    pair = authority.issue("picker", ["picker.test"])
    certificates = tmp_path / "certs"
    certificates.mkdir()
    (certificates / "tls.crt").write_bytes(pair.cert.read_bytes())
    (certificates / "tls.key").write_bytes(pair.key.read_bytes())
    trusted = {"validation_context": {"trusted_ca": {"filename": str(authority.ca)}}}
    async with KubeApi() as api:
        mesh = Mesh(decode=1, tls=trusted)
        known(api, mesh, monkeypatch)
        mesh.options = options(mesh, "--cert-path", str(certificates))
        async with mesh:
            assert (await mesh.ask())[0] == 200
