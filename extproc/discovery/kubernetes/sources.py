"""The entries of ``workers.kubernetes`` as sources of workers: each has its own watch, and its own state at ``/healthz``."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

from extproc.discovery.kubernetes import objects
from extproc.discovery.kubernetes.access import Access
from extproc.discovery.kubernetes.api import Api, Collection
from extproc.discovery.kubernetes.objects import InferencePool, Pod, Slice
from extproc.discovery.kubernetes.reflector import Pace, Reflector
from extproc.discovery.kubernetes.settings import POOL_GROUPS, KubernetesWorkers, PodWorkers, PoolWorkers, ServiceWorkers
from extproc.discovery.kubernetes.workers import (
    Rule,
    Worker,
    as_set,
    judge,
    of_slice,
    rule_of_pods,
    rule_of_pool,
    selector_of,
    selector_of_pods,
)
from extproc.discovery.source import SourceError
from extproc.routing.endpoint_spec import EndpointSet

_TOGETHER_S = 0.05
"""Changes that come together are taken together."""

RUNNING: Final = "status.phase=Running"
"""Others are no workers yet, or none any more: they are not even sent."""


class Watched(ABC):
    """A source that is told of changes instead of looking for them. ``run`` must be running."""

    kind = "kubernetes"

    def __init__(self, name: str, api: Callable[[], Api]) -> None:
        """``api`` makes a client, for this source alone."""
        self.name = name
        self._make_api = api
        self._news = asyncio.Event()

    async def run(self) -> None:
        """List and watch until cancelled."""
        async with self._make_api() as api:
            await self._follow(api)

    async def look(self) -> EndpointSet:
        """What is known, as soon as anything is. Raises SourceError, with what is known all the same."""
        while True:
            await self._news.wait()
            self._news.clear()
            fault = self._fault()
            try:
                workers = self._workers()
                said = None if workers is None else as_set(workers)
            except ValueError as error:
                raise SourceError(f"{self.name}: {fault or error}") from error
            if fault is not None:
                raise SourceError(f"{self.name}: {fault}", said=said)
            if said is not None:
                return said

    async def pause(self) -> None:
        """Until there is something new."""
        await self._news.wait()
        await asyncio.sleep(_TOGETHER_S)

    @abstractmethod
    async def _follow(self, api: Api) -> None:
        """Until cancelled."""

    @abstractmethod
    def _fault(self) -> str | None:
        """Why what is known may be old."""

    @abstractmethod
    def _workers(self) -> Iterable[Worker] | None:
        """What is known; None: nothing yet. Raises ValueError."""

    def explain(self) -> list[tuple[str, list[Worker] | str]]:
        """For people: what each pod or slice that is known gives, or why it gives nothing. Raises ValueError."""
        return []


class Pods(Watched):
    """Pods by label selector."""

    def __init__(
        self, entry: PodWorkers, common: KubernetesWorkers, namespace: str, *, api: Callable[[], Api], pace: Pace
    ) -> None:
        selector = selector_of_pods(entry, common)
        super().__init__(f"pods {namespace}/{selector}", api)
        self._rule = rule_of_pods(entry, common, namespace)
        self._selector = selector
        self._pace = pace
        self._pods: Reflector[Pod] | None = None

    async def _follow(self, api: Api) -> None:
        self._pods = _pods(api, self._rule.common, self._rule.namespace, self._selector, self._pace, self._news.set)
        await self._pods.run()

    def _fault(self) -> str | None:
        return None if self._pods is None else self._pods.fault

    def _workers(self) -> list[Worker] | None:
        if self._pods is None or not self._pods.synced:
            return None
        return _of_pods(self._pods.items.values(), self._rule)

    def explain(self) -> list[tuple[str, list[Worker] | str]]:
        """For each pod."""
        known = {} if self._pods is None else self._pods.items
        return [(f"pod {name}", judge(pod, self._rule)) for name, pod in sorted(known.items())]


class Pool(Watched):
    """The pods of an InferencePool. A pool that is gone, or names no pods, keeps what it named."""

    def __init__(
        self, entry: PoolWorkers, common: KubernetesWorkers, namespace: str, *, api: Callable[[], Api], pace: Pace
    ) -> None:
        super().__init__(f"InferencePool {namespace}/{entry.name}", api)
        self._entry = entry
        self._common = common
        self._namespace = namespace
        self._pace = pace
        self._pools: Reflector[InferencePool] | None = None
        self._pool: InferencePool | None = None
        """As it was last of use."""
        self._pods: Reflector[Pod] | None = None
        self._changed = asyncio.Event()

    async def _follow(self, api: Api) -> None:
        self._pools = Reflector(
            api,
            pool_collection(self._entry, self._namespace),
            objects.inference_pool,
            pace=self._pace,
            on_news=self._on_pool,
        )
        selector: dict[str, str] | None = None
        following: asyncio.Task[None] | None = None
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._pools.run())
            while True:
                await self._changed.wait()
                self._changed.clear()
                if self._pool is None or self._pool.selector == selector:
                    continue
                if following is not None:
                    following.cancel()
                selector = self._pool.selector
                self._pods = _pods(api, self._common, self._namespace, selector_of(selector), self._pace, self._news.set)
                following = tasks.create_task(self._pods.run())

    def _on_pool(self) -> None:
        assert self._pools is not None
        found = self._pools.items.get(self._entry.name)
        if found is not None and _flaw(found) is None:
            self._pool = found
        self._changed.set()
        self._news.set()

    def _fault(self) -> str | None:
        if self._pools is None:
            return None
        if self._pools.fault is not None:
            return self._pools.fault
        if self._pools.synced:
            found = self._pools.items.get(self._entry.name)
            flaw = "there is no such pool" if found is None else _flaw(found)
            if flaw is not None:
                return flaw
        return None if self._pods is None else self._pods.fault

    def _workers(self) -> list[Worker] | None:
        if self._pool is None or self._pods is None or not self._pods.synced:
            return None  # with a new selector, what the old one matched stays until then
        return _of_pods(self._pods.items.values(), self._rule(self._pool))

    def _rule(self, pool: InferencePool) -> Rule:
        return rule_of_pool(self._entry, pool, self._common, self._namespace)

    def explain(self) -> list[tuple[str, list[Worker] | str]]:
        """For each pod."""
        if self._pool is None or self._pods is None:
            return []
        rule = self._rule(self._pool)
        return [(f"pod {name}", judge(pod, rule)) for name, pod in sorted(self._pods.items.items())]


class Service(Watched):
    """The endpoints of a Service."""

    def __init__(
        self, entry: ServiceWorkers, common: KubernetesWorkers, namespace: str, *, api: Callable[[], Api], pace: Pace
    ) -> None:
        super().__init__(f"Service {namespace}/{entry.name}", api)
        self._entry = entry
        self._common = common
        self._namespace = namespace
        self._pace = pace
        self._slices: Reflector[Slice] | None = None

    async def _follow(self, api: Api) -> None:
        self._slices = Reflector(
            api,
            slice_collection(self._entry, self._namespace),
            objects.endpoint_slice,
            pace=self._pace,
            on_news=self._news.set,
        )
        await self._slices.run()

    def _fault(self) -> str | None:
        return None if self._slices is None else self._slices.fault

    def _workers(self) -> list[Worker] | None:
        if self._slices is None or not self._slices.synced:
            return None
        return [worker for each in self._slices.items.values() for worker in self._of(each)]

    def _of(self, found: Slice) -> list[Worker]:
        return of_slice(found, self._entry, self._common, self._namespace)

    def explain(self) -> list[tuple[str, list[Worker] | str]]:
        """For each slice."""
        known = {} if self._slices is None else self._slices.items
        return [(f"slice {name}", self._of(each) or "no endpoint is ready") for name, each in sorted(known.items())]


def sources_of(
    settings: KubernetesWorkers, access: Access, *, on_request: Callable[[str, str], None] = lambda _verb, _outcome: None
) -> list[Watched]:
    """A source for each entry. ``on_request``: see :class:`Api`."""
    api = partial(Api, access, request_timeout_s=settings.request_timeout_s, on_request=on_request)
    pace = Pace(watch_s=settings.watch_s, max_backoff_s=settings.max_backoff_s)
    namespace = settings.namespace or access.namespace
    found: list[Watched] = []
    for pods in settings.pods:
        found.append(Pods(pods, settings, pods.namespace or namespace, api=api, pace=pace))
    for pool in settings.inference_pools:
        found.append(Pool(pool, settings, pool.namespace or namespace, api=api, pace=pace))
    for service in settings.services:
        found.append(Service(service, settings, service.namespace or namespace, api=api, pace=pace))
    return found


def pod_collection(namespace: str, selector: str) -> Collection:
    """Running pods by label."""
    return Collection(group="", version="v1", resource="pods", namespace=namespace, labels=selector, fields=RUNNING)


def pool_collection(entry: PoolWorkers, namespace: str) -> Collection:
    """One InferencePool: RBAC with a resource name allows a list and a watch that name it like this."""
    return Collection(
        group=POOL_GROUPS[entry.api],
        version=entry.api,
        resource="inferencepools",
        namespace=namespace,
        fields=f"metadata.name={entry.name}",
    )


def slice_collection(entry: ServiceWorkers, namespace: str) -> Collection:
    """The EndpointSlices of a Service, by the label that says whose they are."""
    return Collection(
        group="discovery.k8s.io",
        version="v1",
        resource="endpointslices",
        namespace=namespace,
        labels=f"kubernetes.io/service-name={entry.name}",
    )


def _pods(
    api: Api, common: KubernetesWorkers, namespace: str, selector: str, pace: Pace, on_news: Callable[[], None]
) -> Reflector[Pod]:
    keep = partial(
        objects.pod,
        role_label=common.role_label,
        models_annotation=common.models_annotation,
        carry=tuple(common.carry_labels),
    )
    return Reflector(api, pod_collection(namespace, selector), keep, pace=pace, on_news=on_news)


def _of_pods(pods: Iterable[Pod], rule: Rule) -> list[Worker]:
    judged = [judge(pod, rule) for pod in pods]
    return [worker for found in judged if not isinstance(found, str) for worker in found]


def _flaw(pool: InferencePool) -> str | None:
    """Why an InferencePool cannot be used."""
    if not pool.selector:
        return "its selector matches every pod of the namespace; that cannot be meant"
    return None if pool.ports else "it names no target port"
