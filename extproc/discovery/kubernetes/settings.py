"""What an operator says about workers in Kubernetes. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final, Literal

import msgspec

WorkerRole = Literal["prefill", "decode", "both"]

LLMD_ROLES: Final[dict[str, WorkerRole]] = {
    "prefill": "prefill",
    "encode-prefill": "prefill",
    "decode": "decode",
    "prefill-decode": "both",
    "both": "both",
    "encode-prefill-decode": "both",
}
"""Values of llm-d's role label (``bylabel`` of its scheduler) and what they mean here. ``encode`` is none of our roles."""

POOL_GROUPS: Final = {"v1": "inference.networking.k8s.io", "v1alpha2": "inference.networking.x-k8s.io"}
"""API groups of an InferencePool, by version."""

MAX_PORTS: Final = 8
"""Of an InferencePool, by its schema; and of any other entry."""

SPECIAL_LABELS: Final = {"metadata.name": "pod", "metadata.namespace": "namespace", "spec.nodeName": "node", "zone": "zone"}
"""What `carry_labels` may name beside labels -> the label that it becomes."""

_MAX_ENTRIES = 64
_NAME = re.compile(r"[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?")
_PORT_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_LABEL_KEY = re.compile(r"([a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-._A-Za-z0-9]{0,61}[A-Za-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-._A-Za-z0-9]{0,61}[A-Za-z0-9])?)?")
_SELECTOR = re.compile(r"[-._/A-Za-z0-9=!,() ]{1,4096}")


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class PodWorkers(_Section, frozen=True, kw_only=True):
    """Pods of one namespace that a label selector matches. Those that run and are ready are workers."""

    selector: str | dict[str, str] | None = None
    """Label selector as in `kubectl get pods -l`, or a mapping. null: every pod whose `role_label` says a role."""
    role: WorkerRole | None = None
    """What they do; needs a `selector`. null: the `role_label` of each pod says it."""
    namespace: str | None = None
    """null: `workers.kubernetes.namespace`."""
    ports: list[int | str] = msgspec.field(default_factory=lambda: [8000])
    """HTTP ports of the engine, as numbers or names of container ports; at most 8. Each is a worker of its own, and its label
    `dp-rank` counts them if there are several."""
    ranks: int = 1
    """So many ports in a row for each of `ports`: data-parallel ranks with a port each."""
    labels: dict[str, str] = {}
    """Labels of all of them, which policies select by."""


class PoolWorkers(_Section, frozen=True, kw_only=True):
    """An InferencePool of the Gateway API inference extension: it names pods and ports, `role_label` what each pod does."""

    name: str
    """Of the InferencePool."""
    namespace: str | None = None
    """null: `workers.kubernetes.namespace`."""
    api: Literal["v1", "v1alpha2"] = "v1"
    """`v1`: inference.networking.k8s.io/v1. `v1alpha2`: the older inference.networking.x-k8s.io/v1alpha2."""
    role: WorkerRole | None = None
    """What all of its pods do. null: the `role_label` of each pod says it."""
    ports: dict[WorkerRole, list[int | str]] = {}
    """Other ports than the pool's for pods of a role, e.g. `{decode: [8200]}` where a proxy listens on the pool's port."""
    labels: dict[str, str] = {}
    """Labels of all of them, which policies select by."""


class ServiceWorkers(_Section, frozen=True, kw_only=True):
    """A Service: the endpoints in its EndpointSlices that are ready and not terminating."""

    name: str
    """Of the Service."""
    role: WorkerRole
    """What they do."""
    namespace: str | None = None
    """null: `workers.kubernetes.namespace`."""
    ports: list[int | str] = []
    """Ports of the slices: names, or numbers as the pods have them. Empty: the only one that there is."""
    labels: dict[str, str] = {}
    """Labels of all of them, which policies select by."""


class KubernetesWorkers(_Section, frozen=True, kw_only=True):
    """Workers found in Kubernetes. The filter lists and watches them, with no more rights than `baton kubernetes rbac` prints.
    See [Kubernetes](kubernetes.md)."""

    pods: list[PodWorkers] = []
    """Pods by label."""
    inference_pools: list[PoolWorkers] = []
    """InferencePools."""
    services: list[ServiceWorkers] = []
    """Services, by their EndpointSlices."""
    namespace: str | None = None
    """Where an entry names no namespace. null: that of the filter's own service account, or of the kubeconfig's context."""
    role_label: str = "llm-d.ai/role"
    """Label of a pod that says its role. Understood are llm-d's values and those of `role_values`; pods with others are no
    workers."""
    role_values: dict[str, WorkerRole] = {}
    """Further values of that label, and their roles."""
    role_missing: Literal["prefill", "decode", "both", "ignore"] = "decode"
    """Role of a pod that has no such label: `decode`, as llm-d takes it, another one, or `ignore` the pod."""
    carry_labels: list[str] = []
    """Labels of pods that policies may select by; also `metadata.name`, `metadata.namespace`, `spec.nodeName` (as `pod`,
    `namespace`, `node`) and, of EndpointSlices, `zone`. No other label of a pod is kept."""
    models_annotation: str = "baton/models"
    """Annotation (or label) of a pod with the models that it serves, separated by commas. Without it the worker tells."""
    ready_only: bool = True
    """Only pods whose condition `Ready` is true. false: the filter's own health checks decide alone. A pod that terminates gets
    no new request either way."""
    ip_family: Literal["primary", "ipv4", "ipv6"] = "primary"
    """Which address of a pod with two."""
    kubeconfig: str | None = None
    """File with server and credentials. null: those that a pod is given, or else what `KUBECONFIG` names."""
    context: str | None = None
    """Of the kubeconfig; null: its current one."""
    request_timeout_s: float = 30.0
    """One page of a list, from the connection to its last byte."""
    watch_s: float = 240.0
    """About how long a watch runs before it is begun again where it ended: from 3/4 to 5/4 of it, by chance."""
    max_backoff_s: float = 30.0
    """Longest pause between two tries while the API server is not there; the first is half a second."""


def check(settings: KubernetesWorkers) -> None:
    """Refuse what cannot work, naming the field. Raises ValueError."""
    entries = [*_entries(settings)]
    if not entries:
        raise ValueError("pods: at least one entry is needed here, in `inference_pools` or in `services`")
    if len(entries) > _MAX_ENTRIES:
        raise ValueError(f"pods: {len(entries)} entries with those of the other two lists, more than {_MAX_ENTRIES}")
    if settings.context is not None and settings.kubeconfig is None:
        raise ValueError("context: goes with `kubeconfig`")
    _match(_NAME, "namespace", settings.namespace)
    _match(_LABEL_KEY, "role_label", settings.role_label)
    _match(_LABEL_KEY, "models_annotation", settings.models_annotation)
    for index, key in enumerate(settings.carry_labels):
        _match(_LABEL_KEY, f"carry_labels[{index}]", key)
    for field, least, most in (("request_timeout_s", 1, 600), ("watch_s", 10, 3600), ("max_backoff_s", 0.5, 600)):
        value = getattr(settings, field)
        if not least <= value <= most:
            raise ValueError(f"{field}: {value:g} is not {least:g} to {most:g}")
    for where, entry in entries:
        _match(_NAME, f"{where}.namespace", entry.namespace)
        if not isinstance(entry, PodWorkers):
            _match(_NAME, f"{where}.name", entry.name)
        if isinstance(entry, PoolWorkers):
            for role, ports in entry.ports.items():
                _check_ports(f"{where}.ports.{role}", ports, empty=False)
        else:
            _check_ports(f"{where}.ports", entry.ports, empty=isinstance(entry, ServiceWorkers))
        if isinstance(entry, PodWorkers):
            _check_pods(where, entry)
    _refuse_twice(settings)


def _entries(settings: KubernetesWorkers) -> Iterator[tuple[str, PodWorkers | PoolWorkers | ServiceWorkers]]:
    for field in ("pods", "inference_pools", "services"):
        for index, entry in enumerate(getattr(settings, field)):
            yield f"{field}[{index}]", entry


def _check_pods(where: str, entry: PodWorkers) -> None:
    if entry.role is not None and not entry.selector:
        raise ValueError(f"{where}.selector: is needed where `role` is given, or every pod of the namespace would be one")
    if not 1 <= entry.ranks <= MAX_PORTS:
        raise ValueError(f"{where}.ranks: {entry.ranks} is not 1 to {MAX_PORTS}")
    if entry.ranks * len(entry.ports) > MAX_PORTS:
        raise ValueError(f"{where}.ranks: {entry.ranks} of {len(entry.ports)} ports are more than {MAX_PORTS} workers a pod")
    if isinstance(entry.selector, str):
        _match(_SELECTOR, f"{where}.selector", entry.selector)
    elif entry.selector is not None:
        for key, value in entry.selector.items():
            _match(_LABEL_KEY, f"{where}.selector", key)
            _match(_LABEL_VALUE, f"{where}.selector.{key}", value)


def _check_ports(where: str, ports: Sequence[int | str], *, empty: bool) -> None:
    if not ports and not empty:
        raise ValueError(f"{where}: at least one port is needed")
    if len(ports) > MAX_PORTS:
        raise ValueError(f"{where}: {len(ports)} ports, more than {MAX_PORTS}")
    if len(set(ports)) < len(ports):
        raise ValueError(f"{where}: a port stands there twice")
    for port in ports:
        if isinstance(port, int):
            if not 0 < port < 65536:
                raise ValueError(f"{where}: {port} is not 1 to 65535")
        else:
            _match(_PORT_NAME, where, port)


def _refuse_twice(settings: KubernetesWorkers) -> None:
    for field in ("inference_pools", "services"):
        seen: set[tuple[str | None, str]] = set()
        for index, entry in enumerate(getattr(settings, field)):
            key = (entry.namespace or settings.namespace, entry.name)
            if key in seen:
                raise ValueError(f"{field}[{index}]: {entry.name} stands there twice")
            seen.add(key)


def _match(pattern: re.Pattern[str], where: str, text: str | None) -> None:
    if text is not None and not pattern.fullmatch(text):
        raise ValueError(f"{where}: {text!r} is not what Kubernetes calls so")
