"""What the configuration says of the next turn. Pure: no I/O."""

from __future__ import annotations

import msgspec


class NextTurn(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The prefill of a conversation's next turn reads what the decode worker keeps of the last one, instead of computing it.

    For workers of both roles that have vLLM's `bidirectional_kv_xfer`. See [routing](routing.md#the-next-turn).
    """

    enabled: bool = False
    """Read the answers of handed-over requests that are not streamed for the blocks that they name, and use these once."""
    ttl_s: float = 480.0
    """The workers' `decoder_kv_blocks_ttl`: a decode worker keeps its blocks for so long."""
    margin_s: float = 10.0
    """So long before that they are no longer used: a prefill may wait, and the engine itself reads nothing in the last 5 s."""
    timeout_s: float = 10.0
    """A prefill that reads has so long, of the time that any prefill has; then it is made again without. The first one between
    two workers takes longer than others."""
    max_conversations: int = 1000
    """Answers whose blocks are remembered; of more, the oldest is given back."""
    max_bytes: int = 64 << 20
    """Token ids of these, 4 bytes each; of more, the oldest is given back."""


def faults(settings: NextTurn) -> str | None:
    """Why these settings cannot be meant, with the field named; None: they can."""
    for name in ("ttl_s", "margin_s", "timeout_s", "max_conversations", "max_bytes"):
        value = getattr(settings, name)
        if not 0 < value < 1e12:
            return f"{name}: {value:g} is not a positive number"
    if settings.margin_s >= settings.ttl_s:
        return f"margin_s: {settings.margin_s:g} is not below ttl_s, so nothing would ever be used"
    return None
