"""Which pool a request goes to, and the aims that keep its two workers in there. Pure; it needs nothing but the configuration.

First its policy, which may name a pool, or several with weights; then the model that serves it; else the default pool. So it
can be said of any request beforehand, also while a pool has no workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from extproc.models import draw
from extproc.pools.settings import PoolRule
from extproc.routing.job import Aims
from extproc.routing.partition import DEFAULT_POOL, POOL_LABEL, fits


class PoolChoice:
    """Made once for a configuration that has pools."""

    def __init__(self, rules: Sequence[PoolRule]) -> None:
        self._by_model = tuple((rule.name, tuple(rule.models)) for rule in rules if rule.models)

    def pool(self, shares: Mapping[str, float], policy: str, model: str | None, key: str) -> str:
        """Of a request under ``policy``, which names these pools (with weights). The same ``key`` stays in the same one."""
        if shares:
            return next(iter(shares)) if len(shares) == 1 else draw(policy, shares, key)
        if model is not None:
            for name, patterns in self._by_model:
                if fits(patterns, model):
                    return name
        return DEFAULT_POOL


def within(aims: Aims, pool: str) -> Aims:
    """``aims`` with workers of this pool only."""
    return msgspec.structs.replace(
        aims,
        prefill_labels={**aims.prefill_labels, POOL_LABEL: pool},
        decode_labels={**aims.decode_labels, POOL_LABEL: pool},
    )


def pool_of(labels: Mapping[str, str]) -> str | None:
    """The pool that labels say, of a worker or of aims; None where there are no pools."""
    return labels.get(POOL_LABEL)
