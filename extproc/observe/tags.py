"""How a request is served, in words that Envoy's statistics and logs carry as labels. Every value is from a small set."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

Mode = Literal["disaggregate", "aggregate", "other", "none"]
"""Prefilled and decoded by two workers, or by one; no prompt, and passed on; answered by the filter, or not yet decided."""

NONE: Final = "none"
"""The request names none, or nobody has read it yet."""

OTHER: Final = "other"
"""A name that no live worker serves: a client chose it, so it is no label."""


class Tags(msgspec.Struct, frozen=True):
    """Labels of one request."""

    model: str = NONE
    """A name that live workers serve, or :data:`OTHER`, or :data:`NONE`."""
    policy: str = NONE
    """Name of a rule, ``default``, ``other`` (no prompt), or :data:`NONE`."""
    mode: Mode = "none"

    def as_dict(self) -> dict[str, str]:
        """For Envoy's dynamic metadata."""
        return {"model": self.model, "policy": self.policy, "mode": self.mode}


UNKNOWN: Final = Tags()
"""Of a request that nobody has read yet."""
