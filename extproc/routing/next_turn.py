"""What reading the turn before from its decode worker is worth to a prefill worker: one more place to load from. Pure.

Tokens that are read are not computed. Reading costs their bytes over what is known of the way from the one to the other, a
handshake if the two have not met that way, and what a failure a while ago is charged. A prefill worker that computes them in
less time has what it had.
"""

from __future__ import annotations

from collections.abc import Iterable

from extproc.routing.cost import Costs
from extproc.routing.hits import Below, Hits
from extproc.routing.job import Job, Offer
from extproc.routing.pool import Endpoint

LEAST_TOKENS = 64
"""vLLM reads nothing where it would save fewer (0.32: `kv_recompute_threshold`)."""


def with_offer(costs: Costs, prefills: Iterable[Endpoint], job: Job, offer: Offer, hits: Hits, now_s: float) -> Hits:
    """``hits``, and what ``offer`` adds to those of ``prefills``, which the prompt may go to."""
    tokens, below = dict(hits.tokens), dict(hits.below)
    known = min(offer.tokens, job.tokens - 1)
    for endpoint in prefills:
        address = endpoint.address
        if address == offer.decode or address in offer.not_for:
            continue
        more = known - tokens.get(address, 0)
        if more < LEAST_TOKENS:
            continue
        before = below.get(address, Below())
        read_s = _read_s(costs, job, offer.decode, endpoint, more, now_s)
        rate = costs.prefill_rate(endpoint)
        held = tokens.get(address, 0)
        saved_s = rate.seconds(max(job.tokens - held, 1), held) - rate.seconds(max(job.tokens - known, 1), known)
        if read_s < saved_s:
            tokens[address] = known
            below[address] = before._replace(load_s=before.load_s + read_s, decode=more)
    return hits._replace(tokens=tokens, below=below)


def _read_s(costs: Costs, job: Job, giver: str, taker: Endpoint, tokens: int, now_s: float) -> float:
    """Until ``taker`` has so many tokens from ``giver``."""
    rate, handshake_s, penalty_s = costs.back.between(giver, taker.address, now_s)
    size_bytes = tokens * costs.kv_bytes_per_token(job)
    moved_s = size_bytes / costs.settings.transfer_bytes_per_s if rate is None else rate.seconds(size_bytes)
    return moved_s + handshake_s + penalty_s
