"""How a request is served, in words that Envoy's statistics and logs carry as labels. Every value is from a small set."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

Mode = Literal["disaggregate", "aggregate", "none"]
"""Prefilled and decoded by two workers, or by one; no prompt, or not placed (yet)."""

NONE: Final = "-"
"""There is none, or nobody has read it yet."""

OTHER: Final = "other"
"""A name that no live worker serves: a client chose it, so it is no label."""


class Tags(msgspec.Struct, frozen=True):
    """Labels of one request."""

    model: str = NONE
    """A name that live workers serve, or :data:`OTHER`, or :data:`NONE`."""
    policy: str = NONE
    """Name of a rule, ``default``, ``other`` (no prompt), or :data:`NONE`."""
    mode: Mode = "none"
    tenant: str = NONE
    """One of the first tenants that came, or :data:`OTHER`, or :data:`NONE`."""

    def as_dict(self) -> dict[str, str]:
        """For Envoy's dynamic metadata."""
        return {"model": self.model, "policy": self.policy, "mode": self.mode, "tenant": self.tenant}


UNKNOWN: Final = Tags()
"""Of a request that nobody has read yet."""
