"""What is read of the API's objects, and nothing else of them is kept. Pure.

Fields as in the API reference of Kubernetes (core/v1 Pod, discovery.k8s.io/v1 EndpointSlice) and of the Gateway API inference
extension (InferencePool v1 and v1alpha2). What is not named here is skipped unparsed.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import msgspec

ACTIVE_PORTS: Final = ("llm-d.ai/active-ports", "inference.networking.k8s.io/active-ports")
"""Annotations with the ports of a pod that take requests, separated by commas; the first that is there counts."""

_MAX_MODELS = 256
_MAX_NAMED_BYTES = 16 << 10
"""Of the annotation with the models."""
_MAX_IPS = 8
_MAX_CONTAINERS = 64


class _Wire(msgspec.Struct, rename="camel", frozen=True):
    pass


class Meta(_Wire, frozen=True):
    """Of an object, list or bookmark."""

    name: str = ""
    uid: str = ""
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    resource_version: str = ""
    continue_: str | None = msgspec.field(default=None, name="continue")
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class Named(_Wire, frozen=True):
    """Any object, as far as every kind has it."""

    metadata: Meta


class _ContainerPort(_Wire, frozen=True):
    container_port: int
    name: str = ""


class _Container(_Wire, frozen=True):
    name: str
    ports: list[_ContainerPort] | None = None
    restart_policy: str | None = None


class _PodSpec(_Wire, frozen=True):
    containers: list[_Container] = []
    init_containers: list[_Container] | None = None
    node_name: str = ""


class _Condition(_Wire, frozen=True):
    type: str
    status: str


class _ContainerStatus(_Wire, frozen=True):
    name: str
    restart_count: int = 0


class _PodIp(_Wire, frozen=True):
    ip: str = ""


class _PodStatus(_Wire, frozen=True):
    phase: str = ""
    pod_ip: str = msgspec.field(default="", name="podIP")
    pod_ips: list[_PodIp] | None = msgspec.field(default=None, name="podIPs")
    conditions: list[_Condition] | None = None
    container_statuses: list[_ContainerStatus] | None = None
    init_container_statuses: list[_ContainerStatus] | None = None


class _PodObject(_Wire, frozen=True):
    metadata: Meta
    spec: _PodSpec = _PodSpec()
    status: _PodStatus = _PodStatus()


class Container(msgspec.Struct, frozen=True):
    """One that runs as long as its pod does."""

    ports: tuple[tuple[str, int], ...]
    """Name (or nothing) and number of those that it declares."""
    restarts: int
    sidecar: bool


class Pod(msgspec.Struct, frozen=True):
    """What is kept of a pod."""

    name: str
    uid: str
    created: str
    phase: str
    ready: bool
    terminating: bool
    ips: tuple[str, ...]
    """Its primary address first."""
    role: str | None
    """Value of the role label."""
    labels: dict[str, str]
    """Those that are carried."""
    models: tuple[str, ...] | None
    active_ports: frozenset[int] | None
    containers: tuple[Container, ...]


class _LabelSelector(_Wire, frozen=True):
    match_labels: dict[str, str] | None = None


class _TargetPort(_Wire, frozen=True):
    number: int


class _PoolSpec(_Wire, frozen=True):
    selector: msgspec.Raw = msgspec.Raw(b"{}")
    target_ports: list[_TargetPort] | None = None
    target_port_number: int | None = None


class _PoolObject(_Wire, frozen=True):
    metadata: Meta
    spec: _PoolSpec = _PoolSpec()


class InferencePool(msgspec.Struct, frozen=True):
    """What is kept of an InferencePool."""

    name: str
    selector: dict[str, str]
    ports: tuple[int, ...]


class _SlicePort(_Wire, frozen=True):
    name: str | None = None
    port: int | None = None


class _EndpointConditions(_Wire, frozen=True):
    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class _TargetRef(_Wire, frozen=True):
    name: str = ""
    uid: str = ""


class _Endpoint(_Wire, frozen=True):
    addresses: list[str] = []
    conditions: _EndpointConditions = _EndpointConditions()
    target_ref: _TargetRef | None = None
    node_name: str | None = None
    zone: str | None = None


class _SliceObject(_Wire, frozen=True):
    metadata: Meta
    address_type: str = ""
    ports: list[_SlicePort] | None = None
    endpoints: list[_Endpoint] | None = None


class SliceEndpoint(msgspec.Struct, frozen=True):
    """One endpoint of a slice."""

    ip: str
    ready: bool
    """A slice without the condition means yes (its API says so)."""
    terminating: bool
    pod: str
    uid: str
    node: str
    zone: str


class Slice(msgspec.Struct, frozen=True):
    """What is kept of an EndpointSlice."""

    name: str
    created: str
    family: str
    """IPv4 or IPv6; endpoints with names instead of addresses are of no use here."""
    ports: tuple[tuple[str, int], ...]
    endpoints: tuple[SliceEndpoint, ...]


_pods = msgspec.json.Decoder(_PodObject)
_pools = msgspec.json.Decoder(_PoolObject)
_slices = msgspec.json.Decoder(_SliceObject)
_label_selectors = msgspec.json.Decoder(_LabelSelector)
_plain_selectors = msgspec.json.Decoder(dict[str, str])


def pod(raw: bytes | msgspec.Raw, *, role_label: str, models_annotation: str, carry: Collection[str]) -> Pod:
    """JSON of a Pod -> what is kept of it. Raises msgspec.MsgspecError."""
    found = _pods.decode(raw)
    meta, status = found.metadata, found.status
    labels, annotations = meta.labels or {}, meta.annotations or {}
    ips = dict.fromkeys([status.pod_ip, *(each.ip for each in (status.pod_ips or ())[:_MAX_IPS])])
    conditions = {each.type: each.status for each in status.conditions or ()}
    active = next((annotations[key] for key in ACTIVE_PORTS if key in annotations), None)
    return Pod(
        name=meta.name,
        uid=meta.uid,
        created=meta.creation_timestamp or "",
        phase=status.phase,
        ready=conditions.get("Ready") == "True",
        terminating=meta.deletion_timestamp is not None,
        ips=tuple(ip for ip in ips if ip),
        role=labels.get(role_label),
        labels={key: labels[key] for key in carry if key in labels}
        | ({"spec.nodeName": found.spec.node_name} if "spec.nodeName" in carry else {}),
        models=_names(annotations.get(models_annotation, labels.get(models_annotation))),
        active_ports=None if active is None else _ports(active),
        containers=_containers(found),
    )


def inference_pool(raw: bytes | msgspec.Raw) -> InferencePool:
    """JSON of an InferencePool of either version -> what is kept of it. Raises msgspec.MsgspecError."""
    found = _pools.decode(raw)
    spec = found.spec
    if spec.target_ports is not None:
        selector = _label_selectors.decode(spec.selector).match_labels or {}
        ports = tuple(each.number for each in spec.target_ports)
    else:
        selector = _plain_selectors.decode(spec.selector)
        ports = () if spec.target_port_number is None else (spec.target_port_number,)
    return InferencePool(name=found.metadata.name, selector=selector, ports=ports)


def endpoint_slice(raw: bytes | msgspec.Raw) -> Slice:
    """JSON of an EndpointSlice -> what is kept of it. Raises msgspec.MsgspecError."""
    found = _slices.decode(raw)
    return Slice(
        name=found.metadata.name,
        created=found.metadata.creation_timestamp or "",
        family=found.address_type,
        ports=tuple((each.name or "", each.port) for each in found.ports or () if each.port is not None),
        endpoints=tuple(_endpoint(each) for each in found.endpoints or () if each.addresses),
    )


def _endpoint(found: _Endpoint) -> SliceEndpoint:
    target = found.target_ref or _TargetRef()
    return SliceEndpoint(
        # All addresses of an endpoint are the same one, and everybody uses the first.
        ip=found.addresses[0],
        ready=found.conditions.ready is not False,
        terminating=found.conditions.terminating is True,
        pod=target.name,
        uid=target.uid,
        node=found.node_name or "",
        zone=found.zone or "",
    )


def _containers(found: _PodObject) -> tuple[Container, ...]:
    spec, status = found.spec, found.status
    restarts = {
        each.name: each.restart_count for each in (*(status.container_statuses or ()), *(status.init_container_statuses or ()))
    }
    # An init container that is always restarted is a sidecar; others have ended before the pod is ready.
    sidecars = [each for each in spec.init_containers or () if each.restart_policy == "Always"]
    return tuple(
        Container(
            ports=tuple((port.name, port.container_port) for port in each.ports or ()),
            restarts=restarts.get(each.name, 0),
            sidecar=sidecar,
        )
        for sidecar, group in ((False, spec.containers), (True, sidecars))
        for each in group[:_MAX_CONTAINERS]
    )


def _ports(text: str) -> frozenset[int]:
    found = [part.strip() for part in text.split(",", 64)[:64]]
    return frozenset(int(part) for part in found if len(part) <= 5 and part.isdecimal())


def _names(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    found = [name.strip() for name in text[:_MAX_NAMED_BYTES].split(",")]
    return tuple(name for name in found if name)[:_MAX_MODELS] or None
