"""Which models are adapters of others: the workers' own lists say it (`parent` of a card of `/v1/models`). Event loop only."""

from __future__ import annotations

from functools import lru_cache

import msgspec

from extproc.routing.pool import Pool


class _Card(msgspec.Struct, frozen=True):
    parent: str | None = None


_decoder = msgspec.json.Decoder(_Card)


@lru_cache(maxsize=1024)
def _parent(card: bytes) -> str | None:
    try:
        return _decoder.decode(card).parent
    except (msgspec.MsgspecError, RecursionError):
        return None


def parent_of(pool: Pool, model: str) -> str | None:
    """The model below an adapter; None for what is none, or is not known to be one."""
    for endpoint in pool.endpoints:
        card = (endpoint.models or {}).get(model)
        if card is not None:
            return _parent(card)
    return None
