"""Endpoints that stand in the configuration: they never change."""

from __future__ import annotations

import asyncio

from extproc.routing.endpoint_spec import EndpointSet


class Static:
    """A source that always says the same."""

    kind = "static"
    name = "configuration"

    def __init__(self, endpoints: EndpointSet) -> None:
        self._endpoints = endpoints

    async def look(self) -> EndpointSet:
        """What stands in the configuration."""
        return self._endpoints

    async def pause(self) -> None:
        """Forever."""
        await asyncio.Event().wait()
