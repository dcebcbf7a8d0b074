"""A prompt that two workers serve: get its handoff, and let Envoy send the decode leg. One function a flow.

Whatever happens on the way, blocks that no decode worker will fetch are given back, and a handoff is used once, while its lease
lasts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack

from extproc import wire
from extproc.attempts import LAST_CHANCE_S, Ask, Prefilled, RequestOverError, leg_id
from extproc.config import BODY_HEADROOM_BYTES
from extproc.errors import ApiError
from extproc.handoff import Flow, Handoff, Pair
from extproc.headers import KV_TRANSFER_HEADER, UNSEEN_KEY
from extproc.journey import Journey, OverError, Phase
from extproc.next_turn.reading import Reading
from extproc.observe.own_time import PREFILL_CALL, REPLY
from extproc.paths import Treatment
from extproc.routing.picker import NoEndpointError
from extproc.routing.pool import Endpoint
from extproc.routing.ticket import Ticket
from extproc.unseen import Unseen

_STALE_AT_MOST = 3
"""Handoffs too old in a row, after which something is wrong with the clock, the lease or the machine."""

_PERHAPS_NEVER_SENT_S = 0.25
"""A stream that ends so soon after the dispatch, and without an answer, may have ended before Envoy read our reply."""

_STANDSTILL_S = 0.3
"""A handoff is read within a fraction of this, unless the whole process stood still."""


async def serve(journey: Journey, ask: Ask, ticket: Ticket) -> None:
    """Hand ``ask`` over from one worker of its ticket to the other. Raises ApiError, RelayedError, OverError."""
    journey.enter(PREFILL_CALL)
    await _FLOWS[journey.parts.connector.flow](journey, ask, ticket)


async def _one_after_the_other(journey: Journey, ask: Ask, ticket: Ticket) -> None:
    """Flow.SEQUENTIAL: prefill, and when its reply is here, decode."""
    prefilled = await _fresh(journey, ask, ticket)
    # From here on the blocks are given back, unless Envoy has been told to fetch them.
    with ExitStack() as undelivered:
        undelivered.callback(journey.parts.releaser.release, prefilled.handoff)
        if journey.parts.clock() - prefilled.since_s > _STANDSTILL_S and await journey.over_within(None, LAST_CHANCE_S):
            # The client left while the process stood still: the reply would go into a stream that is no more.
            raise OverError(await journey.receive(Phase.PREFILL))
        decode = still_live(journey, ticket)
        unseen = journey.may_be_unseen and not _names_blocks(journey, ask)
        await _dispatch(journey, ask, prefilled.handoff, decode, prefilled.prompt_token_ids, may_be_unseen=unseen)
        undelivered.pop_all()


async def _both_at_once(journey: Journey, ask: Ask, ticket: Ticket) -> None:
    """Flow.CONCURRENT: the decode worker waits for blocks, so it must not outlive the failure of its prefill."""
    pair = _pair(journey, ticket)
    assert ticket.decode is not None
    await _dispatch(journey, ask, journey.parts.connector.announce(pair), ticket.decode)
    task = asyncio.ensure_future(journey.own.of(journey.parts.prefiller.attempt(ask, ticket, pair)))
    try:
        await journey.to_the_end(task)
        if task.done():
            handoff = task.result().handoff
            journey.record.tokens, journey.record.reported_cached_tokens = handoff.tokens, handoff.cached_tokens
    finally:
        task.cancel()


async def _by_delegation(journey: Journey, ask: Ask, ticket: Ticket) -> None:
    """Flow.DELEGATED: only the pair is chosen. The prefill counts until the answer begins: nobody tells when it is done."""
    pair = _pair(journey, ticket)
    assert ticket.decode is not None
    await _dispatch(journey, ask, journey.parts.connector.announce(pair), ticket.decode)
    noted = journey.on_answer

    def begun(answer: wire.ResponseHeaders) -> None:
        journey.parts.dispatcher.prefill_failed(ticket, blame=False)
        if noted is not None:
            noted(answer)

    journey.on_answer = begun


def _pair(journey: Journey, ticket: Ticket) -> Pair:
    assert ticket.prefill is not None and ticket.decode is not None
    journey.record.prefill = ticket.prefill.address
    return Pair(ticket.prefill.address, ticket.decode.address, leg_id(journey.record.request_id))


_FLOWS: dict[Flow, Callable[[Journey, Ask, Ticket], Awaitable[None]]] = {
    Flow.SEQUENTIAL: _one_after_the_other,
    Flow.CONCURRENT: _both_at_once,
    Flow.DELEGATED: _by_delegation,
}


async def _dispatch(
    journey: Journey,
    ask: Ask,
    handoff: Handoff,
    decode: Endpoint,
    prompt_token_ids: bytes | None = None,
    *,
    may_be_unseen: bool = False,
) -> None:
    """Let Envoy send the decode leg. ``may_be_unseen``: the filter need not be shown a good answer."""
    journey.enter(REPLY)
    asks_ids = _read_answer(journey, ask)
    body = ask.request.decode_body(handoff.params, prompt_token_ids, return_token_ids=asks_ids)
    if body is not None and len(body) > journey.parts.config.limits.max_body_bytes + BODY_HEADROOM_BYTES:
        # Envoy would find it too large. Token ids can take more room than the prompt, and are not needed.
        body = ask.request.decode_body(handoff.params, return_token_ids=asks_ids)
    tags = journey.marks("disaggregate")
    unseen = None
    if may_be_unseen and journey.ticket is not None:
        tags[UNSEEN_KEY] = "1"
        journey.parts.dispatcher.unseen(journey.ticket)
        unseen = Unseen(journey.parts, handoff, decode.address, journey.record.request_id)
        journey.observed.note.on_line = unseen.told
    route = journey.route(decode)
    mutation = wire.Mutation(
        set_headers={**handoff.headers, **journey.onward, **journey.rank(), KV_TRANSFER_HEADER: handoff.header(), **route},
        body=body,
        destination=decode.address,
        tags=tags,
        clear_route_cache=bool(route),
    )
    await journey.stream.pass_body(mutation, ask.body)
    delivery = _Delivery(journey, handoff, unseen)
    journey.on_answer = delivery.on_answer
    journey.held.callback(delivery.on_end)
    record, metrics = journey.record, journey.parts.metrics
    record.outcome = "handoff"
    record.blocks, record.tokens, record.reported_cached_tokens = handoff.blocks, handoff.tokens, handoff.cached_tokens
    if handoff.tokens is not None:
        journey.sent_to(decode.address, handoff.tokens, handoff=True)
    metrics.handoffs.inc(handoff.connector, handoff.prefill, decode.address)
    journey.parts.recent.handed_over(handoff.prefill, decode.address)
    if handoff.blocks is not None:
        metrics.handoff_blocks.observe(handoff.blocks)


def _names_blocks(journey: Journey, ask: Ask) -> bool:
    """Whether the answer may name blocks that its decode worker keeps: of streams only those of the Responses API do."""
    request = ask.request
    return journey.parts.next_turns is not None and (not request.streamed() or request.treatment is Treatment.RESPONSES)


def _read_answer(journey: Journey, ask: Ask) -> bool:
    """Have the answer read for blocks that are kept, where that is wanted; whether token ids are to be asked for with it."""
    turns, request = journey.parts.next_turns, ask.request
    if turns is None:
        return False
    if not _names_blocks(journey, ask):
        turns.note("streamed")
        return False
    asks_ids = request.tells_token_ids and request.at_once() and journey.can_read_answer
    journey.reading = Reading(
        turns,
        ask.tokens,
        treatment=request.treatment,
        model=ask.model,
        streamed=not request.at_once(),
        hide_ids=asks_ids and not request.asks_token_ids(),
        sent_s=journey.parts.clock(),
    )
    return asks_ids


class _Delivery:
    """A handoff that is with Envoy."""

    __slots__ = ("_answered", "_dispatched_s", "_handoff", "_journey", "_unseen")

    def __init__(self, journey: Journey, handoff: Handoff, unseen: Unseen | None) -> None:
        self._journey = journey
        self._handoff = handoff
        self._unseen = unseen
        self._dispatched_s = journey.parts.clock()
        self._answered = False

    def on_answer(self, answer: wire.ResponseHeaders) -> None:
        """An answer that is an error is one from a worker that did not take the request on, or from Envoy, which reached none.

        Some errors make the decode worker give the blocks back by itself. Then the prefill worker is told twice, which it notes
        (`vllm:nixl_num_notifications_after_expiry`) and survives; the others would leave them pinned until their lease ends.
        """
        self._answered = True
        if self._unseen is not None:
            self._unseen.answered = True
        by = self._journey.answered(answer)
        releaser, metrics = self._journey.parts.releaser, self._journey.parts.metrics
        if answer.status >= 400:
            releaser.release(self._handoff)
        elif by == "stranger" or (by == "pool" and self._journey.parts.connector.bound):
            # Nobody who could have fetched them got the request. But whoever did may be trying to: it gets the time that a
            # transfer takes, since blocks that are freed under one would be another prompt's.
            metrics.handoffs_lost.inc()
            releaser.release_later(self._handoff)

    def on_end(self) -> None:
        """A client that leaves as our reply goes out: Envoy may have dropped the request before it read it. Nothing tells."""
        if self._answered or self._journey.parts.clock() - self._dispatched_s >= _PERHAPS_NEVER_SENT_S:
            return
        if self._unseen is not None:
            self._unseen.ended_early()
        else:
            self._journey.parts.releaser.release_later(self._handoff)


async def _fresh(journey: Journey, ask: Ask, ticket: Ticket) -> Prefilled:
    """A handoff young enough to be used: a decode worker that reads after the lease gets other prompts' blocks."""
    parts, record = journey.parts, journey.record
    max_age_s = parts.config.handoff.lease_s * parts.config.handoff.max_age_share
    started = parts.clock()
    try:
        for _ in range(_STALE_AT_MOST):
            try:
                prefilled = await _while_there(journey, ask, ticket)
            except NoEndpointError as error:
                raise parts.dispatcher.as_api_error(error) from None
            age_s = parts.clock() - prefilled.since_s
            parts.metrics.handoff_age_seconds.observe(age_s)
            if parts.tokens is not None and ask.tokens is not None and not prefilled.told_ids:
                parts.tokens.replied(ask.tokens, prefilled.prompt_token_ids)
            if prefilled.handoff.tokens is not None:
                parts.bytes_per_token.note(ask.model, ask.text_bytes, prefilled.handoff.tokens)
            if age_s <= max_age_s:
                return prefilled
            parts.metrics.fallbacks.labels("stale").inc()
            parts.log.warning("handoff_stale", request_id=record.request_id, age_s=round(age_s, 3))
            parts.releaser.release(prefilled.handoff)
        raise ApiError("handoff_stale", f"{_STALE_AT_MOST} handoffs in a row were over {max_age_s:g} s old")
    finally:
        record.prefill_ms = round((parts.clock() - started) * 1e3, 1)


async def _while_there(journey: Journey, ask: Ask, ticket: Ticket) -> Prefilled:
    """Get a handoff, and stop trying the moment something stirs on the stream: the request is over then."""

    def note(prefill: Endpoint) -> None:
        journey.record.prefill = prefill.address

    try:
        return await journey.parts.prefiller.obtain(ask, ticket, note, journey.stream.stirred())
    except RequestOverError:
        raise OverError(await journey.receive(Phase.PREFILL)) from None


def still_live(journey: Journey, ticket: Ticket) -> Endpoint:
    """The decode worker that was chosen, or another one if that has gone in the meantime. Raises ApiError."""
    decode = ticket.decode
    assert decode is not None
    if decode.live:
        return decode
    if journey.parts.connector.bound:
        raise ApiError("no_decode_worker", "the decode worker of this handoff is no longer live")
    journey.parts.metrics.fallbacks.labels("decode").inc()
    decode = journey.parts.dispatcher.decode_again(ticket)
    journey.record.decode = decode.address
    return decode
