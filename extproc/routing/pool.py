"""The workers, which of them are live, and what is in flight on each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum


class Role(Enum):
    """What a worker does."""

    PREFILL = "prefill"
    DECODE = "decode"


class Endpoint:
    """One worker in one role."""

    __slots__ = ("address", "in_flight", "live", "models", "role")

    def __init__(self, address: str, role: Role) -> None:
        self.models: dict[str, bytes] | None = None
        """Name of a model that it serves -> the JSON by which it describes it; None while nobody knows."""
        self.address = address
        """``ip:port``."""
        self.role = role
        self.live = False
        """Unknown counts as not live: the first probe decides."""
        self.in_flight = 0
        """Requests on it that came through this filter, counted from the decision."""

    def serves(self, model: str | None) -> bool:
        """Whether it may get a request for ``model``. What is not known is not held against it."""
        return model is None or self.models is None or model in self.models

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Count one request on this endpoint for as long as the block runs; every way out gives it back."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1


class Pool:
    """All endpoints, in the order of the configuration."""

    def __init__(self, prefill: Iterable[str], decode: Iterable[str]) -> None:
        self.endpoints: tuple[Endpoint, ...] = (
            *(Endpoint(address, Role.PREFILL) for address in prefill),
            *(Endpoint(address, Role.DECODE) for address in decode),
        )

    def live(self, role: Role) -> list[Endpoint]:
        """The endpoints of a role that may get a request now."""
        return [endpoint for endpoint in self.endpoints if endpoint.role is role and endpoint.live]

    def models(self) -> dict[str, bytes]:
        """Every model of the live endpoints, with the JSON by which its first worker describes it."""
        merged: dict[str, bytes] = {}
        for endpoint in self.endpoints:
            if endpoint.live:
                for name, card in (endpoint.models or {}).items():
                    merged.setdefault(name, card)
        return merged

    def ready(self) -> bool:
        """Both roles have a live worker."""
        return all(self.live(role) for role in Role)
