"""The YAML of pools and routes. What contradicts itself is refused."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import msgspec

from extproc.routing.endpoint_spec import EndpointSet, EndpointSpec
from extproc.routing.partition import DEFAULT_POOL, POOL_LABEL, UNDECIDED, Partition, Selector, fits

# In names of clusters, statistics, files and routes; a dot would break Envoy's statistics apart.
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?")
_MAX_POOLS: Final = 64
_MAX_MODELS: Final = 256
_MAX_LABELS: Final = 16
_MOST: Final = 1e12


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Raises ValueError when it cannot work; the message may begin with the field."""


class PoolRule(_Section, frozen=True, kw_only=True):
    """Workers of both roles that serve each other and nobody else, with clusters and circuit breakers of their own in Envoy. A
    worker is in the first pool that takes it; those that none takes are in the pool `default`. See [routes](routes.md)."""

    name: str
    """In metrics, logs, names of Envoy's clusters and the header `x-baton-pool`: letters, digits, `_` and `-`, at most 63."""
    labels: dict[str, str] = {}
    """Workers with all of these labels are in this pool. None: those are that serve one of `models`."""
    models: list[str] = []
    """Requests for these models (after `models.aliases`) go to this pool, unless their policy names one: names, or `prefix*`.
    Of several pools with a model the first counts."""
    max_connections: int | None = None
    """As `envoy.max_connections`, which it is where this is null, for the workers of one role of this pool."""
    max_pending: int | None = None
    """As `envoy.max_pending`."""
    max_requests: int | None = None
    """As `envoy.max_requests`."""

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"name: {self.name!r} is not 1 to 63 letters, digits, _ and -, with no _ or - at an end")
        if self.name == DEFAULT_POOL:
            raise ValueError(f"name: {DEFAULT_POOL} is the pool of the workers that no other takes; it needs no entry")
        if not self.labels and not self.models:
            raise ValueError("labels: neither labels nor models: no worker would be in it")
        if len(self.labels) > _MAX_LABELS:
            raise ValueError(f"labels: {len(self.labels)} of them; at most {_MAX_LABELS} are allowed")
        if POOL_LABEL in self.labels:
            raise ValueError(f"labels: {POOL_LABEL} is what Baton itself notes the pool under")
        if len(self.models) > _MAX_MODELS:
            raise ValueError(f"models: {len(self.models)} names; at most {_MAX_MODELS} are allowed")
        for pattern in self.models:
            if not pattern or "*" in pattern[:-1]:
                raise ValueError(f"models: {pattern!r} is neither a name nor a prefix with * at its end")
        for field in ("max_connections", "max_pending", "max_requests"):
            value = getattr(self, field)
            if value is not None and not 0 < value < _MOST:
                raise ValueError(f"{field}: {value} is not a positive number")

    @property
    def selector(self) -> Selector:
        """Which workers are in it."""
        return Selector(name=self.name, labels=self.labels, models=self.models)


class Routes(_Section, frozen=True, kw_only=True):
    """What Envoy may choose the route of a request by, once its body is read. See [routes](routes.md)."""

    model_header: bool = False
    """Set `x-gateway-model-name` to the model that serves the request (after `models.aliases`), and have Envoy match its routes
    again."""
    pool_header: bool | None = None
    """Set `x-baton-pool` to the pool of the workers, and have Envoy match its routes again. null: where there are `pools`,
    unless `epp.enabled` is set: an endpoint picker is asked when the route is chosen already."""
    only: bool = False
    """Choose no workers: set this header, and `x-baton-pool` where there are `pools`, and nothing else. For a filter before a
    gateway's own endpoint pickers, one a pool. It needs no `workers`."""

    @property
    def asks_for_model(self) -> bool:
        """Whether the header is set."""
        return self.model_header or self.only


def partition(rules: Sequence[PoolRule]) -> Partition | None:
    """None: there are no pools, and all workers serve each other."""
    return Partition([rule.selector for rule in rules]) if rules else None


def check_pools(rules: Sequence[PoolRule], listed: EndpointSet | None) -> None:
    """Refuse what only shows among all pools, or beside the workers. Raises ValueError that begins with the field.

    ``listed``: all workers there will be; None: some are not known yet.
    """
    if len(rules) > _MAX_POOLS:
        raise ValueError(f"pools: {len(rules)} of them; at most {_MAX_POOLS} are allowed")
    for index, rule in enumerate(rules):
        for before, earlier in enumerate(rules[:index]):
            if earlier.name == rule.name:
                raise ValueError(f"pools[{index}].name: {rule.name} stands there twice, first at pools[{before}]")
            if earlier.labels and rule.labels and earlier.labels.items() <= rule.labels.items():
                raise ValueError(
                    f"pools[{index}].labels: no worker is ever in {rule.name}: {earlier.name}, before it, takes all of them"
                )
            if not rule.models or not all(fits(earlier.models, each) for each in rule.models):
                continue
            if rule.labels:
                raise ValueError(
                    f"pools[{index}].models: no request comes to {rule.name} by them: {earlier.name}, before it, has these "
                    "models; leave them out, and let policies name the pool"
                )
            if not earlier.labels:
                raise ValueError(
                    f"pools[{index}].models: no worker is ever in {rule.name}: {earlier.name}, before it, has these models"
                )
    if rules and listed is not None:
        _check_workers(rules, listed)


def _check_workers(rules: Sequence[PoolRule], listed: EndpointSet) -> None:
    cut = Partition([rule.selector for rule in rules])
    prefill, decode = (
        {cut.pool_of(spec.labels, spec.models) for spec in (*specs, *listed.both)} for specs in (listed.prefill, listed.decode)
    )
    for role, found in (("prefill", prefill), ("decode", decode)):
        if UNDECIDED in found:
            continue  # it takes workers by the models that they have yet to tell
        for index, rule in enumerate(rules):
            if rule.name not in found:
                raise ValueError(f"pools[{index}].{'labels' if rule.labels else 'models'}: no {role} worker is in {rule.name}")
        if DEFAULT_POOL in prefill | decode and DEFAULT_POOL not in found:
            raise ValueError(f"pools: no {role} worker is left for {DEFAULT_POOL}, the pool of those that none takes")


def pooled_labels(rules: Sequence[PoolRule], specs: Sequence[EndpointSpec]) -> list[dict[str, str]]:
    """The labels of workers, with the pool of each where there are pools."""
    cut = partition(rules)
    if cut is None:
        return [spec.labels for spec in specs]
    return [{**spec.labels, POOL_LABEL: cut.pool_of(spec.labels, spec.models)} for spec in specs]
