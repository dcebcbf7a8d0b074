"""Weigh the choices among a few workers: every pair, and every decode worker alone.

What it says is what :class:`~extproc.routing.cost.Costs` says of one choice. Here it is one piece of arithmetic without calls,
in which what depends on one worker alone is worked out once: this is done for every prompt, and was most of its decision.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from extproc.routing.cost import Costs
from extproc.routing.decision import Candidate, Terms
from extproc.routing.hits import NOTHING_BELOW, Below
from extproc.routing.job import Job, Objective
from extproc.routing.pool import Endpoint

PrefillSide: TypeAlias = tuple[Endpoint, int, float, float, float]
"""A prefill worker, in the eyes of one prompt: prompt tokens in its caches, seconds until it is through with what it has,
seconds of computing, and of loading. A plain tuple, because making one of names takes five times as long."""

DecodeSide: TypeAlias = tuple[Endpoint, int, float, float, float]
"""A decode worker: prompt tokens in its caches, sequences on it (ours and others'), seconds until it has room, seconds that the
answer takes longer than alone."""


class Weighed:
    """What was weighed to decide whether a prompt is handed over."""

    __slots__ = ("apart", "decodes", "now_s", "prefills", "whole")

    def __init__(
        self,
        now_s: float,
        decodes: list[Endpoint],
        prefills: list[PrefillSide],
        apart: list[Candidate],
        whole: list[Candidate],
    ) -> None:
        self.now_s = now_s
        """When that was: later it does not hold."""
        self.decodes = decodes
        self.prefills = prefills
        """Those with the least to do first."""
        self.apart = apart
        """Handoffs, the best first."""
        self.whole = whole
        """Decode workers that would do it all, the best first."""


def decode_sides(costs: Costs, job: Job, decodes: list[Endpoint], held: dict[str, int], now_s: float) -> list[DecodeSide]:
    """``held``: prompt tokens that workers hold, by address."""
    prompt_tokens, answer_tokens, most = job.tokens, costs.answer_tokens(job), costs.settings.worker_max_seqs
    found = []
    for each in decodes:
        leg, rate = each.decode, costs.decode_rate(each)
        sequences: float = len(leg.claims) if not leg.external_requests else costs.sequences(each, now_s)
        over = sequences + 1 - (each.max_seqs or most)
        queue_s = over * rate.itl_s(sequences, leg.tokens) * answer_tokens / max(sequences, 1) if over > 0 else 0.0
        generation_s = answer_tokens * rate.longer_s(sequences, leg.tokens, prompt_tokens)
        found.append((each, held.get(each.address, 0), sequences, queue_s, generation_s))
    return found


def prefill_sides(
    costs: Costs,
    job: Job,
    prefills: list[Endpoint],
    held: dict[str, int],
    now_s: float,
    below: Mapping[str, Below] = NOTHING_BELOW,
) -> list[PrefillSide]:
    """``held``: prompt tokens that workers hold, by address; ``below``: what of it has to be loaded."""
    prompt_tokens, found = job.tokens, []
    for each in prefills:
        cached, leg = held.get(each.address, 0), each.prefill
        if leg.external_requests:
            backlog_s = costs.backlog_s(each, now_s)
        elif leg.claims:
            backlog_s = abs(leg.busy_until_s - now_s)
        else:
            backlog_s = max(leg.busy_until_s - now_s, 0.0)
        load_s = below[each.address].load_s if each.address in below else 0.0
        work_s = costs.prefill_rate(each).seconds(max(prompt_tokens - cached, 1), cached)
        found.append((each, cached, backlog_s, work_s, load_s))
    return found


def pairs(
    costs: Costs,
    job: Job,
    prefills: list[PrefillSide],
    decodes: list[DecodeSide],
    now_s: float,
    below: Mapping[str, Below] = NOTHING_BELOW,
) -> list[Candidate]:
    """A handoff from each of ``prefills`` to each of ``decodes``, but none of a worker to itself.

    What a decode worker has ``below`` its GPU's memory is transferred all the same: a handoff is all that its engine has not at
    hand (vLLM 0.32: the NIXL connector answers first, for all tokens that are not in the GPU's cache).
    """
    settings, objective, prompt_tokens = costs.settings, job.aims.objective, job.tokens
    overhead_s, handshake_s, known = settings.handoff_overhead_s, settings.handshake_s, costs.pairs.known
    busy = len([1 for _, _, backlog_s, _, _ in prefills if backlog_s > 0])
    hold = settings.hold * (busy / max(len(prefills), 1))
    to = []
    bytes_per_token = costs.kv_bytes_per_token(job)
    for side in decodes:
        at_hand = side[1] - below[side[0].address].tokens if side[0].address in below else side[1]
        missing_bytes = max(prompt_tokens - at_hand, 0) * bytes_per_token
        to.append((side, missing_bytes, costs.transfer_rate(side[0]).seconds(missing_bytes)))
    found = []
    for prefill, cached, backlog_s, prefill_s, load_s in prefills:
        for (decode, cached_decode, _, queue_s, generation_s), missing_bytes, transfer_s in to:
            if prefill is decode:
                continue  # to itself nothing is handed over: that is the other kind of choice
            pair = known((prefill.address, decode.address))
            if pair is None:
                meet_s, penalty_s = handshake_s, 0.0
            else:
                meet_s, penalty_s = 0.0 if pair.met else handshake_s, max(0.0, pair.until_s - now_s)
                if pair.transfers is not None:
                    transfer_s = pair.transfers.seconds(missing_bytes)  # of this pair alone
            ttft_s = backlog_s + prefill_s + load_s + (transfer_s + meet_s + overhead_s + penalty_s) + queue_s
            hold_s = 0.0
            if objective is Objective.TTFT:
                cost = ttft_s
            elif objective is Objective.THROUGHPUT:
                cost = prefill_s + transfer_s + generation_s + 0.01 * ttft_s
            else:
                hold_s = hold * prefill_s
                cost = ttft_s + hold_s + generation_s
            terms = Terms(
                queue_prefill_s=backlog_s,
                prefill_s=prefill_s,
                load_s=load_s,
                transfer_s=transfer_s,
                handshake_s=meet_s,
                overhead_s=overhead_s,
                penalty_s=penalty_s,
                queue_decode_s=queue_s,
                generation_s=generation_s,
                hold_s=hold_s,
            )
            found.append(
                Candidate(
                    prefill=prefill.address,
                    decode=decode.address,
                    cost=cost,
                    terms=terms,
                    cached_prefill_tokens=cached,
                    cached_decode_tokens=cached_decode,
                )
            )
    return found


def wholes(
    costs: Costs, job: Job, decodes: list[DecodeSide], now_s: float, below: Mapping[str, Below] = NOTHING_BELOW
) -> list[Candidate]:
    """Each of ``decodes`` does it all. Whether it may is not asked here."""
    objective, prompt_tokens = job.aims.objective, job.tokens
    found = []
    for decode, cached, sequences, queue_s, generation_s in decodes:
        backlog_s = costs.backlog_s(decode, now_s)
        prefill_s = costs.prefill_rate(decode).seconds(max(prompt_tokens - cached, 1), cached)
        load_s = below[decode.address].load_s if decode.address in below else 0.0
        stall_s = prefill_s * sequences
        ttft_s = backlog_s + prefill_s + load_s + queue_s
        if objective is Objective.TTFT:
            cost = ttft_s
        elif objective is Objective.THROUGHPUT:
            cost = prefill_s + stall_s + generation_s + 0.01 * ttft_s
        else:
            cost = ttft_s + stall_s + generation_s
        terms = Terms(
            queue_prefill_s=backlog_s,
            prefill_s=prefill_s,
            load_s=load_s,
            queue_decode_s=queue_s,
            generation_s=generation_s,
            stall_s=stall_s,
        )
        found.append(Candidate(prefill=None, decode=decode.address, cost=cost, terms=terms, cached_decode_tokens=cached))
    return found
