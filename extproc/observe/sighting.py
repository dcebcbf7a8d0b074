"""What the process that watches streams reports of one answer to the filter: numbers only."""

from __future__ import annotations

import msgspec

from extproc.observe.quantiles import Counts


class Sighting(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One answer that was watched to its end."""

    key: str
    """By which the filter knows the request."""
    whole: bool
    """The answer came to its end; else its client left, or its worker broke it off."""
    failed: bool = False
    """The engine reported an error in the stream."""
    finish_reason: str | None = None
    """One of :data:`extproc.observe.events.FINISH_REASONS`, or ``other``."""
    tokens: int = 0
    """As the answer states it, else the number of events with a token."""
    events: int = 0
    """Events with a token. Fewer than tokens where the engine sends several at once."""
    prompt_tokens: int | None = None
    """As the answer states it."""
    gaps: Counts = {}
    """The times between tokens, in the buckets of :mod:`extproc.observe.quantiles`."""
    gaps_s: float = 0.0
    """Their sum."""
    longest_s: float = 0.0
    """The longest one."""
    oversized: int = 0
    """Events that were too long to be read."""
