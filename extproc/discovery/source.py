"""What a source of endpoints is."""

from __future__ import annotations

from typing import Protocol

from extproc.routing.endpoint_spec import EndpointSet


class SourceError(Exception):
    """A source could not be read; the message says which one and why. What it said before stays in force."""


class Source(Protocol):
    """Something that knows endpoints, and that may know others later."""

    @property
    def kind(self) -> str:
        """``static``, ``file`` or ``dns``: the label of its metrics."""

    @property
    def name(self) -> str:
        """Which one it is, for people: the path, or the name that is looked up."""

    async def look(self) -> EndpointSet:
        """What it says now. Raises SourceError."""

    async def pause(self) -> None:
        """Return when it is worth looking again."""
