"""The one error of planning."""

from __future__ import annotations

from collections.abc import Iterable


class PlanError(ValueError):
    """What was asked for cannot be planned; the message says what is wrong and where."""


def unknown(what: str, name: str, known: Iterable[str]) -> PlanError:
    """The error for a name that nobody knows, with the list of those that are known."""
    return PlanError(f"{what} {name!r} is not known; known are {', '.join(sorted(known))}")
