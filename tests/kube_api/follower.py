"""Discovery as the filter runs it, for tests to look at."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from extproc.discovery.guarded import Guarded, Networks
from extproc.discovery.kubernetes.access import Access
from extproc.discovery.kubernetes.settings import KubernetesWorkers
from extproc.discovery.kubernetes.sources import sources_of
from extproc.discovery.merge import Discovery
from extproc.observe.logs import make_logger
from extproc.routing.endpoint_spec import EndpointSet


class Follower:
    """Discovery by these settings, as the filter runs it."""

    def __init__(self, settings: KubernetesWorkers, access: Access) -> None:
        self.sets: list[EndpointSet] = []
        self.outcomes: list[str] = []
        self.requests: list[tuple[str, str]] = []
        sources = sources_of(settings, access, on_request=lambda verb, outcome: self.requests.append((verb, outcome)))
        self.discovery = Discovery(
            [Guarded(source, Networks([]), lambda _kind, _address, _why: None) for source in sources],
            on_change=self.sets.append,
            on_outcome=lambda _kind, outcome: self.outcomes.append(outcome),
            log=make_logger("error"),
        )

    @property
    def addresses(self) -> set[str]:
        return {spec.address for role in ("prefill", "decode", "both") for spec in getattr(self.discovery.current, role)}

    @property
    def error(self) -> str | None:
        return next((str(each["error"]) for each in self.discovery.status() if each["error"] is not None), None)

    async def until(self, *addresses: str) -> None:
        await until(lambda: self.addresses == {f"{address}:8000" for address in addresses}, lambda: str(self.addresses))


async def until(condition: Callable[[], bool], what: Callable[[], str] = lambda: "") -> None:
    try:
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"it never came to that: {what()}") from None


@asynccontextmanager
async def discovery(settings: KubernetesWorkers, access: Access) -> AsyncIterator[Follower]:
    """Running."""
    follower = Follower(settings, access)
    task = asyncio.create_task(follower.discovery.run())
    try:
        yield follower
    finally:
        if task.done():
            task.result()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
