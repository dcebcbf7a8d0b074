"""One prefill that reads the turn before: what it is told, and what becomes of it."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from extproc.inference import InferenceRequest
from extproc.next_turn.store import NextTurns, Turn
from extproc.paths import Treatment
from extproc.routing.ticket import Ticket

_SLACK_TOKENS = 256
"""So many fewer than expected may be found in the prefill worker's cache: of what it held by itself, some may be gone."""


class Read(NamedTuple):
    """It has been taken, for one call."""

    params: bytes
    """``kv_transfer_params`` of the call."""
    prompt_token_ids: bytes
    """The prompt as a JSON list. The engine gets exactly the ids that were compared, so that what it reads is theirs."""
    turns: NextTurns
    turn: Turn
    prefill: str
    """``ip:port``."""
    ticket: Ticket

    def went_well(self, cached_tokens: int | None) -> None:
        """The prefill worker replied, and found so many tokens in its cache or elsewhere."""
        read = cached_tokens is None or cached_tokens >= self.turn.tokens - _SLACK_TOKENS
        self.turns.went_well(self.turn.endpoint.address, self.prefill, read=read)

    def failed(self, outcome: str) -> None:
        """There was no reply that can be used: it `failed`, was `refused` or `cancelled`. No other attempt reads."""
        self.ticket.job.next_turn = None
        self.turns.failed(self.turn, self.prefill, outcome)


def take(turns: NextTurns, turn: Turn, request: InferenceRequest, ticket: Ticket, prefill: str) -> Read | None:
    """``turn`` for a prefill of ``request`` on ``prefill``, where it was weighed for it; None: it computes all of it."""
    endpoint, hits, chain = ticket.prefill, ticket.hits, ticket.job.token_chain
    below = None if hits is None else hits.below.get(prefill)
    if endpoint is None or endpoint.address != prefill or chain is None:
        return None
    if below is None or not below.decode:
        turns.unused(turn, "not_worth")
        return None
    ids = msgspec.json.encode(chain.token_ids.tolist())
    params = turns.take(turn, endpoint, ids if request.treatment is Treatment.CHAT else None)
    return None if params is None else Read(params, ids, turns, turn, prefill, ticket)
