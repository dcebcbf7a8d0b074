"""The rights that a configuration needs of the API server, and none beyond. Pure; the one place that knows them.

They are read-only: `list` and `watch`. With the field selector `metadata.name` these are allowed by a rule with that resource
name (Kubernetes' RBAC reference, "Referring to resources"), so an InferencePool is named; pods and EndpointSlices are selected
by label, which RBAC cannot do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import StringIO
from typing import Any, Final

import msgspec
from ruamel.yaml import YAML

from extproc.discovery.kubernetes.settings import POOL_GROUPS, KubernetesWorkers

VERBS: Final = ("list", "watch")


class PolicyRule(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """One rule of a Role."""

    api_groups: tuple[str, ...]
    resources: tuple[str, ...]
    resource_names: tuple[str, ...] = ()
    verbs: tuple[str, ...] = msgspec.field(default_factory=lambda: VERBS)


def rules(settings: KubernetesWorkers, own_namespace: str) -> dict[str, list[PolicyRule]]:
    """Namespace -> the rules of the Role there. ``own_namespace``: where an entry and the settings name none."""
    default = settings.namespace or own_namespace
    found: dict[str, dict[PolicyRule, None]] = {}
    pools: dict[tuple[str, str], list[str]] = {}
    for named in (*(each.namespace for each in settings.pods), *(each.namespace for each in settings.inference_pools)):
        found.setdefault(named or default, {})[_rule("", "pods")] = None
    for service in settings.services:
        found.setdefault(service.namespace or default, {})[_rule("discovery.k8s.io", "endpointslices")] = None
    for pool in settings.inference_pools:
        pools.setdefault((pool.namespace or default, POOL_GROUPS[pool.api]), []).append(pool.name)
    for (where, group), names in pools.items():
        found[where][_rule(group, "inferencepools", names)] = None
    return {namespace: list(each) for namespace, each in sorted(found.items())}


def manifests(
    settings: KubernetesWorkers,
    *,
    namespace: str,
    service_account: str,
    labels: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Role and RoleBinding for each namespace, for the service account of the filter in ``namespace``."""
    found: list[dict[str, Any]] = []
    for where, needed in rules(settings, namespace).items():
        metadata = {"name": f"{service_account}-workers", "namespace": where, **({"labels": dict(labels)} if labels else {})}
        found.append(
            {
                "apiVersion": "rbac.authorization.k8s.io/v1",
                "kind": "Role",
                "metadata": metadata,
                "rules": [msgspec.to_builtins(rule) | {"verbs": list(rule.verbs)} for rule in needed],
            }
        )
        found.append(
            {
                "apiVersion": "rbac.authorization.k8s.io/v1",
                "kind": "RoleBinding",
                "metadata": metadata,
                "roleRef": {
                    "apiGroup": "rbac.authorization.k8s.io",
                    "kind": "Role",
                    "name": metadata["name"],
                },
                "subjects": [{"kind": "ServiceAccount", "name": service_account, "namespace": namespace}],
            }
        )
    return found


def as_yaml(documents: Sequence[Mapping[str, Any]]) -> str:
    """As `kubectl apply -f -` reads it."""
    yaml = YAML()
    yaml.default_flow_style = False
    yaml.indent(mapping=2, sequence=4, offset=2)
    parts: list[str] = []
    for document in documents:
        text = StringIO()
        yaml.dump(msgspec.json.decode(msgspec.json.encode(document)), text)
        parts.append(text.getvalue())
    return "---\n".join(parts)


def _rule(group: str, resource: str, names: Sequence[str] = ()) -> PolicyRule:
    return PolicyRule(api_groups=(group,), resources=(resource,), resource_names=tuple(names))
