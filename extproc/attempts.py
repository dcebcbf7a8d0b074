"""Get one handoff for a request: prefill workers tried in turn, within one deadline.

What counts as a reason to try another worker is a table here; how one call is made is in :mod:`extproc.prefill`.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from extproc.config import Prefill
from extproc.dispatcher import Dispatcher
from extproc.errors import ApiError, RelayedError
from extproc.handoff import Connector, Handoff, HandoffError, Pair
from extproc.headers import RANK_HEADER
from extproc.ids import ids
from extproc.inference import InferenceRequest, token_ids_of
from extproc.next_turn.read import Read, take
from extproc.next_turn.store import NextTurns, Turn
from extproc.observe.logs import Logger
from extproc.observe.metrics import Metrics
from extproc.observe.pulse import Pulse
from extproc.prefill import BusyError, PrefillClient
from extproc.routing.picker import NoEndpointError
from extproc.routing.pool import Endpoint
from extproc.routing.ticket import Ticket
from extproc.tokens.source import Wanted
from extproc.waiting import first_of

if TYPE_CHECKING:  # it imports the library, which is not even looked for where tracing is off
    from extproc.observe.tracing import RequestTrace

# Failures of one worker, which another may not share.
_ANOTHER_MAY_DO = frozenset(("prefill_failed", "prefill_unreachable", "prefill_timeout", "handoff_invalid"))


_ENOUGH_SHARE = 0.5
_ENOUGH_S, _TIMES_EXPECTED = 5.0, 10.0
"""When a worker that did not answer in time is held to have failed: it had so much of the time that the configuration gives it,
or so many seconds and so many times what was expected of it. Less is what a client's own deadline leaves, or the queue."""

_NO_TIME_S = 0.002
"""Timers of event loops are this exact."""

LAST_CHANCE_S = 0.02
"""How long a prefill call goes on when nobody waits for it any more: enough to read a reply that has come already. The blocks
of one that is not read stay pinned until their lease ends."""


_TURNS_OF_A_REPLY = 8

_ID_CHARS = 64
_NOT_PLAIN = re.compile(r"[^A-Za-z0-9._-]")
"""The engines' own messages separate ids by colons and the like."""


class Ask(msgspec.Struct, frozen=True):
    """What is to be prefilled."""

    request: InferenceRequest
    body: bytes
    """As the client sent it."""
    path: str
    headers: Mapping[str, str]
    """Client headers that the prefill leg carries."""
    model: str
    decode: str
    """``ip:port`` of the decode worker that was picked."""
    request_id: str
    """For the log."""
    deadline_s: float
    """On the monotonic clock."""
    retries: int
    """How many other workers are tried after a failure."""
    text_bytes: int = 0
    """Bytes of text in the prompt, to learn from how many of them make a token."""
    trace: RequestTrace | None = None
    """Gets a span for each call."""
    tokens: Wanted | None = None
    """What is known of its token ids; to be compared with those of the reply."""
    turn: Turn | None = None
    """Blocks of the turn before that it continues, for its first prefill worker to read."""


class RequestOverError(Exception):
    """The request ended before its prefill did."""


class Prefilled(msgspec.Struct, frozen=True):
    """A handoff, how old it may be, and what came with it."""

    handoff: Handoff
    since_s: float
    """On the monotonic clock: the lease did not begin before this."""
    prompt_token_ids: bytes | None
    told_ids: bool = False
    """The token ids are those that it was given: they say nothing of how the engine tokenises."""


class Prefiller:
    """Finds a prefill worker and calls it, and another one if that fails."""

    def __init__(
        self,
        *,
        client: PrefillClient,
        dispatcher: Dispatcher,
        connector: Connector,
        settings: Prefill,
        pulse: Pulse,
        metrics: Metrics,
        log: Logger,
        on_unused: Callable[[Handoff], None],
        next_turns: NextTurns | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``on_unused`` is told of a handoff that came too late for its request. ``next_turns``: keeps the turns of asks."""
        self._client = client
        self._dispatcher = dispatcher
        self._connector = connector
        self._settings = settings
        self._pulse = pulse
        self._metrics = metrics
        self._log = log
        self._on_unused = on_unused
        self._next_turns = next_turns
        self._clock = clock
        self._leftovers: set[asyncio.Task[None]] = set()
        self.in_flight = 0
        """Calls."""
        metrics.prefills_in_flight.set_function(lambda: self.in_flight)

    async def obtain(
        self, ask: Ask, ticket: Ticket, on_pick: Callable[[Endpoint], None], over: asyncio.Future[Any]
    ) -> Prefilled:
        """A fresh handoff, from the ticket's worker or another one. ``on_pick`` is told of every worker that is tried.

        It stops trying the moment ``over`` is done: the request is over then. Raises RequestOverError, ApiError with the last
        worker's failure, RelayedError, NoEndpointError.
        """
        tried: list[str] = []
        failure: ApiError | None = None
        while True:
            endpoint = ticket.prefill
            if endpoint is None or ticket.prefill_claim is None or ticket.prefill_claim.leg is None:
                try:
                    endpoint = self._dispatcher.prefill_again(ticket, tried)
                except NoEndpointError:
                    if failure is not None:
                        raise failure from None
                    raise
            if failure is not None:
                self._metrics.fallbacks.labels("retry").inc()
            on_pick(endpoint)
            pair = Pair(endpoint.address, ask.decode, leg_id(ask.request_id))
            read = self._taken(ask, ticket, pair)
            try:
                return await self.attempt(ask, ticket, pair, over, read)
            except RelayedError:
                if read is None:
                    raise
                # Perhaps it is what was to be read that is refused. If not, it will say so again.
            except ApiError as error:
                self._log.warning(
                    "prefill_failed",
                    request_id=ask.request_id,
                    prefill=endpoint.address,
                    code=error.code,
                    reason=error.message,
                )
                late = self._clock() >= ask.deadline_s - _NO_TIME_S
                if read is not None and error.code in _ANOTHER_MAY_DO and not late:
                    continue  # it could not read the turn before: now it computes all of it, or another does
                if error.code not in _ANOTHER_MAY_DO or len(tried) >= ask.retries or late:
                    raise
                failure = error.with_traceback(None)  # which refers to this frame
                tried.append(endpoint.address)

    async def attempt(
        self, ask: Ask, ticket: Ticket, pair: Pair, over: asyncio.Future[Any] | None = None, read: Read | None = None
    ) -> Prefilled:
        """One call to one worker, measured, and reported to the ledger. ``read``: what it is given to read.

        Raises RequestOverError, ApiError, RelayedError.
        """
        started = self._clock()
        self.in_flight += 1
        outcome = "cancelled"
        code: str | None = None
        blame = False
        handoff: Handoff | None = None
        span, context = (None, "") if ask.trace is None else ask.trace.prefill(pair.prefill, pair.request_id)
        try:
            prefilled = await self._call(ask, pair, context, over, read, ticket.prefill_rank)
            outcome = "ok"
            handoff = prefilled.handoff
            if read is not None:
                read.went_well(handoff.cached_tokens)
            self._dispatcher.prefilled(
                ticket, tokens=handoff.tokens, cached_tokens=handoff.cached_tokens, engine_id=handoff.engine_id
            )
            return prefilled
        except RelayedError as error:
            outcome, code = "refused", str(error.status)
            raise
        except ApiError as error:
            outcome, code = "failed", error.code
            blame = error.code in _ANOTHER_MAY_DO and not isinstance(error, BusyError)
            if error.code == "prefill_timeout":
                blame = self._had_its_time(self._clock() - started, ticket)
            blame = blame and read is None  # what it could not read may be the reason
            raise
        finally:
            if read is not None and outcome != "ok":
                read.failed(outcome)
            if ask.trace is not None and span is not None:
                tokens, cached_tokens = (None, None) if handoff is None else (handoff.tokens, handoff.cached_tokens)
                ask.trace.prefilled(span, code, outcome=outcome, prompt_tokens=tokens, cached_tokens=cached_tokens)
            if outcome != "ok":
                self._dispatcher.prefill_failed(ticket, blame=blame)
            self.in_flight -= 1
            self._metrics.prefill_seconds.observe(self._clock() - started, outcome)

    def _had_its_time(self, had_s: float, ticket: Ticket) -> bool:
        settings = self._settings
        if had_s >= _ENOUGH_SHARE * min(settings.attempt_timeout_s or settings.timeout_s, settings.timeout_s):
            return True
        if ticket.decision is None:
            return False
        terms = ticket.decision.terms
        return had_s >= max(_ENOUGH_S, _TIMES_EXPECTED * (terms.queue_prefill_s + terms.prefill_s))

    def _taken(self, ask: Ask, ticket: Ticket, pair: Pair) -> Read | None:
        """The turn before, where this prefill shall read it. It is used once: no other attempt gets it."""
        if self._next_turns is None or ask.turn is None or ticket.job.next_turn is None:
            return None
        read = take(self._next_turns, ask.turn, ask.request, ticket, pair.prefill)
        if read is None:
            ticket.job.next_turn = None  # what was expected of it is void
        return read

    async def _call(
        self, ask: Ask, pair: Pair, context: str, over: asyncio.Future[Any] | None, read: Read | None, rank: int | None
    ) -> Prefilled:
        sent_s = self._clock()
        left_s = ask.deadline_s - sent_s
        if left_s <= 0:
            raise ApiError("prefill_timeout", "the deadline of the request has passed")
        headers = {**ask.headers, "x-request-id": pair.request_id}
        if context:
            headers["traceparent"] = context
        if rank is not None:
            headers[RANK_HEADER] = str(rank)
        tokenise_once = self._settings.tokenise_once
        params = self._connector.prefill_params(pair) if read is None else read.params
        body = ask.request.prefill_body(
            params, return_token_ids=tokenise_once, prompt_token_ids=None if read is None else read.prompt_token_ids
        )
        timeout_s = min(left_s, self._settings.attempt_timeout_s or left_s)
        if read is not None:
            timeout_s = min(timeout_s, read.turns.timeout_s)
        call = self._client.call(pair.prefill, ask.path, body, headers)
        try:
            reply = await _reply(call, timeout_s, over)
        except BaseException:
            self._drop(call, pair, late=over is not None)
            raise
        finally:
            del call  # as in _reply
        since_s = max(sent_s, self._pulse.not_before())
        try:
            handoff = self._connector.accept(reply, pair)
        except HandoffError as error:
            raise ApiError("handoff_invalid", f"the prefill worker's answer cannot be handed over: {error}") from None
        token_ids = token_ids_of(reply, ask.request.treatment) if tokenise_once else None
        return Prefilled(handoff, since_s, token_ids, told_ids=read is not None)

    def _drop(self, call: asyncio.Future[bytes], pair: Pair, *, late: bool) -> None:
        """Nobody waits for this call any more. With ``late``, a reply that has come all the same gives its blocks back."""
        if call.done():
            self._dropped(call, pair, late=late)
        elif late:
            leftover = asyncio.ensure_future(self._drop_late(call, pair))
            self._leftovers.add(leftover)
            leftover.add_done_callback(self._leftovers.discard)
        else:
            call.cancel()

    async def _drop_late(self, call: asyncio.Future[bytes], pair: Pair) -> None:
        await last_chance(call)
        if call.done():
            self._dropped(call, pair, late=True)
        else:
            call.cancel()

    def _dropped(self, call: asyncio.Future[bytes], pair: Pair, *, late: bool) -> None:
        if call.cancelled() or call.exception() is not None or not late:
            return
        with suppress(HandoffError):
            self._on_unused(self._connector.accept(call.result(), pair))


def leg_id(request_id: str) -> str:
    """The ``x-request-id`` of one prefill call, of which the engine makes its own id.

    Unique, however often we try and whatever a client sends; it begins with the request's, by which the logs are joined.
    """
    plain = request_id[:_ID_CHARS]
    if not (plain.isascii() and plain.replace("-", "").isalnum()):  # most are UUIDs
        plain = _NOT_PLAIN.sub("_", plain)
    return f"{plain}-{ids.fresh()}"


async def last_chance(call: asyncio.Future[Any]) -> None:
    """Let ``call`` finish if what it waits for has come already; return soon in any case."""
    await first_of(call, timeout_s=LAST_CHANCE_S)
    # After a standstill the loop runs its timers before it looks at its sockets: give it the turns that a reply needs.
    for _ in range(_TURNS_OF_A_REPLY):
        if call.done():
            return
        await asyncio.sleep(0)


async def _reply(call: asyncio.Future[bytes], timeout_s: float, over: asyncio.Future[Any] | None) -> bytes:
    """The reply of ``call``, also when it is here but the process stood still, so that the time is up before it is read.

    Raises RequestOverError, ApiError (``prefill_timeout``, and those of the call), RelayedError.
    """
    try:
        if over is None:
            await first_of(call, timeout_s=timeout_s)
        else:
            await first_of(call, over, timeout_s=timeout_s)
            if over.done():
                raise RequestOverError
        if not call.done():
            await last_chance(call)
        if call.done():
            return call.result()
        raise ApiError("prefill_timeout", f"the prefill worker did not answer within {timeout_s:.3g} s")
    finally:
        del call  # its error would refer to itself through this frame, and stay until the garbage collector comes
