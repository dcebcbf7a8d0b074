"""What a source of endpoints is."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from extproc.routing.endpoint_spec import EndpointSet


class SourceError(Exception):
    """A source could not be read; the message says which one and why. What it said before stays in force.

    ``said``: what it says all the same, where only a part of it is out of reach.
    """

    def __init__(self, why: str, *, said: EndpointSet | None = None) -> None:
        super().__init__(why)
        self.said = said


class Source(Protocol):
    """Something that knows endpoints, and that may know others later."""

    @property
    def kind(self) -> str:
        """``static``, ``file``, ``dns`` or ``kubernetes``: the label of its metrics."""

    @property
    def name(self) -> str:
        """Which one it is, for people: the path, or the name that is looked up."""

    async def look(self) -> EndpointSet:
        """What it says now. Raises SourceError."""

    async def pause(self) -> None:
        """Return when it is worth looking again."""


@runtime_checkable
class Running(Source, Protocol):
    """A source that is told of changes, and must run beside being looked at."""

    async def run(self) -> None:
        """Until cancelled."""
