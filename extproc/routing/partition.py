"""Workers in pools: each is in one, and only workers of one pool make handoffs. Pure.

The pool of a worker is one more of its labels, :data:`POOL_LABEL`. So whatever goes by labels goes by pools: who may be chosen,
who meets whom before clients need them to, and what is explained.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

import msgspec

POOL_LABEL: Final = "baton.pool"
"""Only this module gives it; one that an operator gives is overwritten."""

DEFAULT_POOL: Final = "default"
"""Workers that no pool takes are in this one, and requests that no policy and no model sends elsewhere."""

UNDECIDED: Final = "?"
"""Pool of a worker that may belong to one by its models, which it has yet to tell: it gets no requests until then."""


class Selector(msgspec.Struct, frozen=True, kw_only=True):
    """Which workers are in a pool."""

    name: str
    labels: Mapping[str, str] = {}
    """All of these; none: those go that serve one of ``models``."""
    models: Sequence[str] = ()
    """Names, or ``prefix*``."""


class Partition:
    """The pools, in their order: a worker is in the first that takes it."""

    def __init__(self, selectors: Sequence[Selector]) -> None:
        self._selectors = tuple(selectors)
        self.names = (DEFAULT_POOL, *(each.name for each in selectors))
        """All pools, the default one first."""

    def pool_of(self, labels: Mapping[str, str], models: Collection[str] | None) -> str:
        """The pool of a worker. ``models``: what it serves; None: nobody knows yet."""
        for selector in self._selectors:
            if selector.labels:
                if selector.labels.items() <= labels.items():
                    return selector.name
            elif models is None:
                return UNDECIDED
            elif any(fits(selector.models, model) for model in models):
                return selector.name
        return DEFAULT_POOL


def fits(patterns: Sequence[str], model: str) -> bool:
    """Whether one of ``patterns`` is this name, or a prefix of it with ``*`` at its end."""
    return any(model.startswith(each[:-1]) if each.endswith("*") else model == each for each in patterns)
