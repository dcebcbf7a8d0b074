"""From what the API server says of pods and endpoints to workers. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from ipaddress import ip_address
from typing import Final

import msgspec

from extproc.discovery.kubernetes.objects import Container, InferencePool, Pod, Slice
from extproc.discovery.kubernetes.settings import (
    LLMD_ROLES,
    SPECIAL_LABELS,
    KubernetesWorkers,
    PodWorkers,
    PoolWorkers,
    ServiceWorkers,
    WorkerRole,
)
from extproc.discovery.listing import MAX_ENDPOINTS, canonical
from extproc.routing.endpoint_spec import EndpointSet, EndpointSpec

RANK: Final = "dp-rank"
"""Label of a worker that shares its pod with others: which of them it is, from 0."""


class Worker(msgspec.Struct, frozen=True):
    """One of a pod's workers."""

    role: WorkerRole
    spec: EndpointSpec
    created: str
    """Of two that claim one address, the pod that was created later has it."""


class Rule(msgspec.Struct, frozen=True):
    """How pods become workers: one entry of the settings, with what holds for all of them."""

    common: KubernetesWorkers
    namespace: str
    role: WorkerRole | None
    ports: Mapping[str, Sequence[int | str]]
    """Of pods of a role; ``""``: of the others."""
    ranks: int
    labels: Mapping[str, str]

    def role_of(self, pod: Pod) -> WorkerRole | None:
        """What ``pod`` does; None: nothing for us."""
        if self.role is not None:
            return self.role
        if not pod.role:
            return None if self.common.role_missing == "ignore" else self.common.role_missing
        return self.common.role_values.get(pod.role) or LLMD_ROLES.get(pod.role)

    def ports_of(self, role: WorkerRole) -> Sequence[int | str]:
        """Of a pod of that role."""
        return self.ports[role] if role in self.ports else self.ports[""]


def rule_of_pods(entry: PodWorkers, common: KubernetesWorkers, namespace: str) -> Rule:
    """Of an entry of `pods`."""
    return Rule(common, namespace, entry.role, {"": entry.ports}, entry.ranks, entry.labels)


def rule_of_pool(entry: PoolWorkers, pool: InferencePool, common: KubernetesWorkers, namespace: str) -> Rule:
    """Of an entry of `inference_pools`, with the pool itself."""
    return Rule(common, namespace, entry.role, {"": pool.ports} | dict(entry.ports.items()), 1, entry.labels)


def selector_of_pods(entry: PodWorkers, common: KubernetesWorkers) -> str:
    """Label selector of an entry of `pods`."""
    if isinstance(entry.selector, str):
        return entry.selector
    if entry.selector:
        return selector_of(entry.selector)
    return f"{common.role_label} in ({','.join(sorted({*LLMD_ROLES, *common.role_values}))})"


def selector_of(labels: Mapping[str, str]) -> str:
    """Label selector that wants all of ``labels``."""
    return ",".join(f"{key}={value}" for key, value in sorted(labels.items()))


def judge(pod: Pod, rule: Rule) -> list[Worker] | str:
    """The workers of a pod, or why it has none now."""
    if pod.terminating:
        return "it terminates"
    if pod.phase != "Running":
        return f"its phase is {pod.phase or 'unknown'}"
    if rule.common.ready_only and not pod.ready:
        return "it is not ready"
    role = rule.role_of(pod)
    if role is None:
        return f"no role: its label {rule.common.role_label} is {pod.role!r}" if pod.role else "it has no role label"
    ip = _address(pod.ips, rule.common.ip_family)
    if ip is None:
        return f"no address of the family {rule.common.ip_family!r}"
    wanted = rule.ports_of(role)
    numbers = [number for port in wanted for number in _numbers(port, rule.ranks, pod.containers)]
    if not numbers:
        return f"none of its containers has a port named {', '.join(map(str, wanted))}"
    several = len(numbers) > 1
    found: list[Worker] = []
    for rank, number in enumerate(numbers):
        if not 0 < number < 65536:
            continue
        if pod.active_ports is not None and number not in pod.active_ports:
            continue
        spec = EndpointSpec(
            address=canonical(ip, number),
            labels=_labels(pod, rule, str(rank) if several else None),
            models=None if pod.models is None else list(pod.models),
            instance=_instance(pod, number),
        )
        found.append(Worker(role, spec, pod.created))
    return found or "its annotation with the active ports names none of them"


def of_slice(found: Slice, entry: ServiceWorkers, common: KubernetesWorkers, namespace: str) -> list[Worker]:
    """The workers in one EndpointSlice of a Service. Raises ValueError, if it cannot be told which port is meant."""
    if found.family not in ("IPv4", "IPv6") or _other_family(found.family, common.ip_family):
        return []
    ports = _slice_ports(found, entry)
    workers: list[Worker] = []
    for endpoint in found.endpoints:
        if endpoint.terminating or (common.ready_only and not endpoint.ready):
            continue
        special = {
            "metadata.name": endpoint.pod,
            "metadata.namespace": namespace,
            "spec.nodeName": endpoint.node,
            "zone": endpoint.zone,
        }
        labels = {SPECIAL_LABELS[key]: special[key] for key in common.carry_labels if special.get(key)}
        for rank, port in enumerate(ports):
            try:
                address = canonical(endpoint.ip, port)
            except ValueError:
                continue
            ranked = {RANK: str(rank)} if len(ports) > 1 else {}
            spec = EndpointSpec(address=address, labels={**labels, **entry.labels, **ranked}, instance=endpoint.uid or None)
            workers.append(Worker(entry.role, spec, found.created))
    return workers


def as_set(workers: Iterable[Worker]) -> EndpointSet:
    """All workers by role, in the order of their addresses: an address has one role, that of the pod created last.

    Raises ValueError, if there are more than one source may name.
    """
    chosen: dict[str, Worker] = {}
    for worker in workers:
        before = chosen.get(worker.spec.address)
        if before is None or (worker.created, worker.spec.instance or "") > (before.created, before.spec.instance or ""):
            chosen[worker.spec.address] = worker
    if len(chosen) > MAX_ENDPOINTS:
        raise ValueError(f"{len(chosen)} workers, more than {MAX_ENDPOINTS}")
    roles: dict[str, list[EndpointSpec]] = {"prefill": [], "decode": [], "both": []}
    for _, worker in sorted(chosen.items()):
        roles[worker.role].append(worker.spec)
    return EndpointSet(**{role: tuple(specs) for role, specs in roles.items()})


def _numbers(port: int | str, ranks: int, containers: Collection[Container]) -> Iterator[int]:
    if isinstance(port, str):
        first = next((number for each in containers for name, number in each.ports if name == port), None)
    else:
        first = port
    if first is not None:
        yield from range(first, first + ranks)


def _instance(pod: Pod, number: int) -> str:
    """Which life of the engine it is: that of the pod, and of the container that has the port, where one declares it."""
    owners = [each for each in pod.containers if any(port == number for _, port in each.ports)]
    if not owners:
        owners = [each for each in pod.containers if not each.sidecar]
    return f"{pod.uid}/{sum(each.restarts for each in owners)}"


def _labels(pod: Pod, rule: Rule, rank: str | None) -> dict[str, str]:
    special = {"metadata.name": pod.name, "metadata.namespace": rule.namespace}
    carried = {
        SPECIAL_LABELS.get(key, key): value
        for key in rule.common.carry_labels
        if (value := special.get(key, pod.labels.get(key))) is not None
    }
    return {**carried, **rule.labels, **({} if rank is None else {RANK: rank})}


def _address(ips: Sequence[str], family: str) -> str | None:
    for text in ips:
        try:
            version = ip_address(text).version
        except ValueError:
            continue
        if family == "primary" or family == f"ipv{version}":
            return text
    return None


def _other_family(found: str, wanted: str) -> bool:
    return wanted != "primary" and found.lower() != wanted


def _slice_ports(found: Slice, entry: ServiceWorkers) -> list[int]:
    if not found.endpoints:
        return []
    if not entry.ports:
        if len(found.ports) != 1:
            named = ", ".join(f"{name or '-'} ({port})" for name, port in found.ports) or "none"
            raise ValueError(f"which port? The Service {entry.name} has {named}; `ports` says which one")
        return [found.ports[0][1]]
    by_name, numbers = dict(found.ports), {port for _, port in found.ports}
    ports: list[int] = []
    for port in entry.ports:
        if isinstance(port, str) and port in by_name:
            ports.append(by_name[port])
        elif isinstance(port, int) and port in numbers:
            ports.append(port)
    if not ports:
        raise ValueError(f"the Service {entry.name} has none of the ports {', '.join(map(str, entry.ports))}")
    return ports
