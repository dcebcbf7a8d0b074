"""The manifests in envoy/istio and envoy/gateway: made from the chart, for whoever does not use Helm.

``python -m tests.manifests.mesh_files`` writes them (`make generate`).
"""

from __future__ import annotations

from tests.manifests import helm

FOLDER = helm.ROOT / "envoy"

_ISTIO = ("istio/virtualservice", "istio/envoyfilter")
_POOL = ("inference-pool/pool", "gateway-api/httproute")
_GATEWAY = ("gateway-api/httproute", "envoy-gateway/policies")

FILES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "istio/envoyfilter.yaml": ("istio", _ISTIO, ()),
    "istio/inference-pool.yaml": ("istio-inference-pool", _POOL, ()),
    "gateway/buffered.yaml": ("envoy-gateway", _GATEWAY, ()),
    "gateway/full-duplex.yaml": ("envoy-gateway", _GATEWAY, ("gateway.envoyGateway.bodyMode=FullDuplexStreamed",)),
    "gateway/exact-pin.yaml": ("envoy-gateway", _GATEWAY, ("gateway.envoyGateway.exactPin=true",)),
}
"""File -> example values, templates of the chart, single values."""


def text(path: str) -> str:
    """What the file must hold."""
    example, templates, sets = FILES[path]
    options = ["--values", str(helm.EXAMPLES / f"{example}.yaml")]
    options += [part for each in sets for part in ("--set", each)]
    options += [part for each in templates for part in ("--show-only", f"templates/{each}.yaml")]
    made = helm.run("template", helm.RELEASE, str(helm.CHART), "--namespace", helm.NAMESPACE, *options)
    again = " ".join(f"--set {each}" for each in sets)
    lines = [line for line in made.splitlines() if not line.startswith("# Source: ")]
    head = [
        "# Made from the chart by `make generate`: change that, not this file. Namespace `inference`, release `baton`:",
        f"#   helm template baton deploy/chart --namespace inference --values deploy/examples/{example}.yaml {again}".rstrip(),
        f"#   kubectl apply --namespace inference --filename envoy/{path}",
    ]
    return "\n".join([*head, *lines]) + "\n"


def main() -> None:
    """Write all of them."""
    for path in FILES:
        file = FOLDER / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text(path), encoding="utf-8")
        print(f"wrote {file.relative_to(helm.ROOT)}")


if __name__ == "__main__":
    main()
