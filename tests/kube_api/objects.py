"""Objects as Kubernetes writes them, with what surrounds the fields that matter."""

from __future__ import annotations

from typing import Any

Object = dict[str, Any]


def pod(
    name: str,
    ip: str = "",
    *,
    role: str | None = None,
    port: int = 8000,
    ready: bool = True,
    phase: str = "Running",
    namespace: str = "default",
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    restarts: int = 0,
    ips: list[str] | None = None,
) -> Object:
    """A pod with an engine (port ``http``), a sidecar (port ``proxy``, 9999) and much that nobody here needs."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": {"app": "vllm", **({} if role is None else {"llm-d.ai/role": role}), **(labels or {})},
            "annotations": {"kubectl.kubernetes.io/last-applied-configuration": "{}", **(annotations or {})},
            "ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "vllm-5f", "uid": "r"}],
            "managedFields": [{"manager": "kubelet", "operation": "Update", "fieldsV1": {"f:status": {}}}],
        },
        "spec": {
            "nodeName": "node-1",
            "initContainers": [
                {"name": "download", "image": "x"},
                {"name": "proxy", "image": "x", "restartPolicy": "Always", "ports": [{"name": "proxy", "containerPort": 9999}]},
            ],
            "containers": [
                {
                    "name": "vllm",
                    "image": "vllm/vllm-openai",
                    "env": [{"name": "HF_TOKEN", "value": "secret"}],
                    "ports": [{"name": "http", "containerPort": port, "protocol": "TCP"}],
                    "resources": {"limits": {"nvidia.com/gpu": "1"}},
                }
            ],
        },
        "status": {
            "phase": phase,
            "conditions": [
                {"type": "PodScheduled", "status": "True"},
                {"type": "Ready", "status": "True" if ready else "False", "lastProbeTime": None},
            ],
            **({"podIP": ip, "podIPs": [{"ip": each} for each in (ips or [ip])]} if ip else {}),
            "containerStatuses": [container("vllm", restarts, ready=ready)],
            "initContainerStatuses": [container("download", 0), container("proxy", 0)],
        },
    }


def container(name: str, restarts: int, *, ready: bool = True) -> Object:
    """Status of a container."""
    return {
        "name": name,
        "image": "x",
        "imageID": "sha256:0",
        "ready": ready,
        "restartCount": restarts,
        "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}},
    }


def terminating(found: Object) -> None:
    """For ``edit``: somebody deleted it, and it has its grace."""
    found["metadata"] |= {"deletionTimestamp": "2026-01-01T00:01:00Z", "deletionGracePeriodSeconds": 600}


def readiness(ready: bool) -> Any:
    """For ``edit``."""

    def change(found: Object) -> None:
        [condition] = [each for each in found["status"]["conditions"] if each["type"] == "Ready"]
        condition["status"] = "True" if ready else "False"

    return change


def pool(name: str, selector: dict[str, str], *ports: int, namespace: str = "default") -> Object:
    """InferencePool v1."""
    return {
        "apiVersion": "inference.networking.k8s.io/v1",
        "kind": "InferencePool",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "selector": {"matchLabels": selector},
            "targetPorts": [{"number": port} for port in ports],
            "endpointPickerRef": {"name": "baton", "port": {"number": 9002}, "failureMode": "FailClose"},
        },
    }


def old_pool(name: str, selector: dict[str, str], port: int, namespace: str = "default") -> Object:
    """InferencePool v1alpha2."""
    return {
        "apiVersion": "inference.networking.x-k8s.io/v1alpha2",
        "kind": "InferencePool",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"selector": selector, "targetPortNumber": port, "extensionRef": {"name": "baton"}},
    }


def slice_of(
    service: str,
    name: str,
    *endpoints: Object,
    ports: dict[str, int] | None = None,
    family: str = "IPv4",
    namespace: str = "default",
) -> Object:
    """EndpointSlice of a Service."""
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": name, "namespace": namespace, "labels": {"kubernetes.io/service-name": service}},
        "addressType": family,
        "ports": [
            {"name": key, "port": port, "protocol": "TCP"} for key, port in ({"http": 8000} if ports is None else ports).items()
        ],
        "endpoints": list(endpoints),
    }


def endpoint(ip: str, *, ready: bool | None = True, serving: bool = True, terminating: bool = False, uid: str = "u") -> Object:
    """One of a slice."""
    return {
        "addresses": [ip],
        "conditions": {**({} if ready is None else {"ready": ready}), "serving": serving, "terminating": terminating},
        "nodeName": "node-1",
        "zone": "zone-a",
        "targetRef": {"kind": "Pod", "name": f"pod-{ip}", "uid": uid},
    }
