"""All sources together: each is looked at again and again, and what they say is merged into one set."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Final

from extproc.discovery.listing import ROLES
from extproc.discovery.source import Running, Source, SourceError
from extproc.observe.logs import Logger
from extproc.routing.endpoint_spec import EndpointSet, EndpointSpec

CHANGED: Final = "changed"
UNCHANGED: Final = "unchanged"
FAILED: Final = "failed"
OUTCOMES: Final = (CHANGED, UNCHANGED, FAILED)
"""What can come of a look at a source."""


class _State:
    """What is known of one source."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.said: EndpointSet | None = None
        self.error: str | None = None
        self.failing_since_s: float | None = None
        """By the monotonic clock; None: it can be read."""
        self.changed_at: float | None = None
        """Unix time of the last change that was taken."""
        self.looked = asyncio.Event()


class Discovery:
    """Runs the sources, and calls ``on_change`` with the merged set whenever that is another one.

    ``on_outcome(kind, outcome)`` is called after every look, to be counted. A source that cannot be read keeps what it said.
    Where two sources name one worker, the first of them (in the order given) decides its role and its facts.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        on_change: Callable[[EndpointSet], None],
        on_outcome: Callable[[str, str], None],
        log: Logger,
    ) -> None:
        self._states = [_State(source) for source in sources]
        self._on_change = on_change
        self._on_outcome = on_outcome
        self._log = log
        self._current = EndpointSet()

    @property
    def current(self) -> EndpointSet:
        """The merged set."""
        return self._current

    async def run(self) -> None:
        """Follow all sources, until cancelled. Raises what a source or ``on_change`` died of, other than SourceError."""
        async with asyncio.TaskGroup() as tasks:
            for state in self._states:
                if isinstance(state.source, Running):
                    tasks.create_task(state.source.run())
                tasks.create_task(self._follow(state))

    async def first_look(self, timeout_s: float) -> None:
        """Wait until every source was looked at once, well or not, or ``timeout_s`` are over. ``run`` must be running."""
        waits = [asyncio.create_task(state.looked.wait()) for state in self._states]
        _, late = await asyncio.wait(waits, timeout=timeout_s)
        for wait in late:
            wait.cancel()

    def kinds(self) -> list[str]:
        """What kinds of sources there are."""
        return sorted({state.source.kind for state in self._states})

    def failing_s(self, kind: str) -> float:
        """For how long a source of this kind could not be read; 0: all can be."""
        since = [each.failing_since_s for each in self._states if each.source.kind == kind and each.failing_since_s is not None]
        return time.monotonic() - min(since) if since else 0.0

    def status(self) -> list[dict[str, object]]:
        """For people: what each source says, and what is wrong with it."""
        return [
            {
                "source": state.source.kind,
                "name": state.source.name,
                "endpoints": None if state.said is None else sum(len(getattr(state.said, role)) for role in ROLES),
                "changed_at": state.changed_at,
                "error": state.error,
            }
            for state in self._states
        ]

    async def _follow(self, state: _State) -> None:
        while True:
            try:
                said = await state.source.look()
            except SourceError as error:
                self._failed(state, error)
            else:
                self._succeeded(state, said)
            state.looked.set()
            await state.source.pause()

    def _failed(self, state: _State, error: SourceError) -> None:
        if error.said is not None and error.said != state.said:
            self._take(state, error.said)
        why = str(error)
        if why != state.error:  # a name server that is down is one line, not one every five seconds
            kept = 0 if state.said is None else sum(len(getattr(state.said, role)) for role in ROLES)
            self._log.error("discovery_failed", source=state.source.kind, why=why, endpoints_kept=kept)
        state.error = why
        if state.failing_since_s is None:
            state.failing_since_s = time.monotonic()
        self._on_outcome(state.source.kind, FAILED)

    def _succeeded(self, state: _State, said: EndpointSet) -> None:
        if state.error is not None:
            self._log.info("discovery_recovered", source=state.source.kind, name=state.source.name)
        changed = said != state.said
        state.error = state.failing_since_s = None
        self._on_outcome(state.source.kind, CHANGED if changed else UNCHANGED)
        if changed:
            self._take(state, said)

    def _take(self, state: _State, said: EndpointSet) -> None:
        state.said, state.changed_at = said, time.time()
        self._publish()

    def _publish(self) -> None:
        merged, ignored = merge([state.said for state in self._states if state.said is not None])
        for role, address in ignored:
            self._log.warning("discovery_conflict", role=role, address=address, why="another source gives it another role")
        if merged == self._current:
            return
        before, after = _addresses(self._current), _addresses(merged)
        self._current = merged
        self._log.info(
            "endpoints_changed",
            **{role: len(getattr(merged, role)) for role in ROLES},
            added=len(after - before),
            removed=len(before - after),
        )
        self._on_change(merged)


def merge(sets: Sequence[EndpointSet]) -> tuple[EndpointSet, list[tuple[str, str]]]:
    """The sets as one, and what of them was left out: ``(role, address)`` of workers whose role contradicts an earlier set.

    An address has one spec a role, the first one. ``both`` excludes the other two roles, as within one set.
    """
    roles: dict[str, dict[str, EndpointSpec]] = {role: {} for role in ROLES}
    ignored: list[tuple[str, str]] = []
    for given in sets:
        earlier = {role: frozenset(found) for role, found in roles.items()}
        for role in ROLES:
            excluded = earlier["prefill"] | earlier["decode"] if role == "both" else earlier["both"]
            for spec in getattr(given, role):
                if spec.address in excluded:
                    ignored.append((role, spec.address))
                else:
                    roles[role].setdefault(spec.address, spec)
    return EndpointSet(**{role: tuple(found.values()) for role, found in roles.items()}), ignored


def _addresses(endpoints: EndpointSet) -> set[tuple[str, str]]:
    return {(role, spec.address) for role in ROLES for spec in getattr(endpoints, role)}
