"""What one request carries through the filter: its stream, its phases, what it holds, and what its log line says.

What is decided on the way is the business of :mod:`extproc.filter` (any request) and :mod:`extproc.apart` (a prompt that two
workers serve).
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from extproc import served, wire
from extproc.attempts import Prefiller
from extproc.cache_directory import CacheDirectory
from extproc.config import Config
from extproc.dispatcher import Dispatcher
from extproc.handoff import Connector
from extproc.headers import RANK_HEADER
from extproc.held import Held
from extproc.intake import Intake
from extproc.next_turn.reading import Reading
from extproc.next_turn.store import NextTurns
from extproc.observe.engines import Engines
from extproc.observe.logs import Logger
from extproc.observe.metrics import Metrics
from extproc.observe.observer import Observer
from extproc.observe.own_time import DECIDE, QUEUE, OwnTime
from extproc.observe.promises import Promise
from extproc.observe.recompute import Sent
from extproc.observe.request_log import RequestLog
from extproc.observe.served_by import By
from extproc.observe.tags import NONE, OTHER, Mode, Tags
from extproc.paths import Treatment
from extproc.pools.choice import pool_of
from extproc.pools.routes import RouteHeaders
from extproc.prompt import BytesPerToken
from extproc.recent import Recent
from extproc.release import Releaser
from extproc.routing.job import Aims, Job
from extproc.routing.pool import Endpoint, Pool
from extproc.routing.prefix import Chain
from extproc.routing.ticket import Ticket
from extproc.tokens.source import TokenSource
from extproc.waiting import first_of
from extproc.warm_up import WarmUp

if TYPE_CHECKING:  # it imports the library, which is not even looked for where tracing is off
    from extproc.observe.tracing import RequestTrace, Tracing

T = TypeVar("T")

AT_ONCE = Aims(policy="other", held=False)
"""Of what is no prompt."""


class Phase(Enum):
    """Where a request is."""

    HEADERS = "headers"
    BODY = "body"
    QUEUE = "queue"
    PREFILL = "prefill"
    ANSWER = "answer"


_RESPONSE = (wire.ResponseHeaders, wire.ResponseBody, wire.ResponseTrailers)

PHASES: dict[Phase, tuple[type[Any], ...]] = {
    # An answer and no request: a filter before this one has answered it, and the mesh shows us the answer.
    Phase.HEADERS: (wire.RequestHeaders, *_RESPONSE),
    # A response before the request is through is an answer of Envoy's own (413, 504): the request is over.
    Phase.BODY: (wire.RequestBody, wire.RequestTrailers, *_RESPONSE),
    Phase.QUEUE: _RESPONSE,
    Phase.PREFILL: _RESPONSE,
    Phase.ANSWER: (wire.RequestTrailers, *_RESPONSE),
}


class ProtocolError(Exception):
    """Envoy sent what may not come in this phase."""


class OverError(Exception):
    """The request ended before its worker was chosen: the client left, or Envoy answered it."""

    def __init__(self, event: wire.Event | None) -> None:
        super().__init__("the request is over")
        self.event = event


class Record(msgspec.Struct):
    """What the log line of a request says."""

    request_id: str = ""
    method: str = ""
    path: str = ""
    treatment: Treatment | None = None
    outcome: str = ""
    status: int | None = None
    """Of an answer that the filter gave itself."""
    whole_reason: str | None = None
    prefill: str | None = None
    decode: str | None = None
    policy: str | None = None
    pool: str | None = None
    """Of its workers, where there are pools."""
    queued_ms: float | None = None
    prefill_ms: float | None = None
    blocks: int | None = None
    tokens: int | None = None
    """Of the prompt, as the prefill worker counted them."""
    cached_tokens: int | None = None
    """Of the prompt, expected in the cache of the worker that computes it."""
    reported_cached_tokens: int | None = None
    """Of the prompt, that the prefill worker had."""
    body_bytes: int = 0


class Parts(msgspec.Struct, frozen=True):
    """What the requests of one process share."""

    config: Config
    pool: Pool
    dispatcher: Dispatcher
    intake: Intake
    bytes_per_token: BytesPerToken
    connector: Connector
    prefiller: Prefiller
    releaser: Releaser
    warm_up: WarmUp
    engines: Engines
    metrics: Metrics
    observer: Observer
    log: Logger
    recent: Recent = msgspec.field(default_factory=Recent)
    """What the live page shows of the last seconds."""
    request_log: RequestLog | None = None
    """What takes the lines of requests; None: the log."""
    credentials: Mapping[str, str] | None = None
    """What requests carry in place of their clients' credentials; None: they keep those."""
    tracing: Tracing | None = None
    tokens: TokenSource | None = None
    """What knows the token ids of prompts, where that is wanted."""
    next_turns: NextTurns | None = None
    """Blocks that decode workers keep for the next turn, where they are used."""
    directory: CacheDirectory | None = None
    """What knows what cache servers hold, where there is one to ask."""
    routes: RouteHeaders = RouteHeaders()
    """What Envoy's routes go by."""
    clock: Callable[[], float] = time.monotonic

    def served_elsewhere(self, request_id: str, chosen: str, served: str) -> None:
        """Envoy took another worker than it was told to."""
        self.metrics.served_elsewhere.inc()
        self.log.error("served_elsewhere", request_id=request_id, chosen=chosen, served=served)

    def unknown_to_envoy(self, request_id: str, chosen: str, pool: str | None) -> None:
        """Envoy answered in the worker's place, because it is not in the cluster that the route led to."""
        self.metrics.unknown_to_envoy.inc()
        self.log.error("unknown_to_envoy", request_id=request_id, chosen=chosen, pool=pool)


class Journey:
    """One request. ``held`` gives back in the end whatever is hung on it."""

    def __init__(self, parts: Parts, stream: wire.Stream) -> None:
        self.parts = parts
        self.stream = stream
        self.held = held = Held()
        self.record = Record()
        self.observed = parts.observer.begin()
        held.callback(parts.observer.end, self.observed)
        self.job: Job | None = None
        """What the router is asked for, once the request is read."""
        self.ticket: Ticket | None = None
        self.only: frozenset[str] | None = None
        """``ip:port`` of the decode workers among which the gateway lets one be chosen; None: among all."""
        self.alternatives: list[str] = []
        """Decode workers that Envoy may take instead."""
        self.on_answer: Callable[[wire.ResponseHeaders], object] | None = None
        """Told the start of the answer, where Envoy was asked to show it."""
        self.reading: Reading | None = None
        """What reads the body of the answer; None: nobody does."""
        self.answer_streamed = False
        """It is a stream of events."""
        self.served_by: By = "unknown"
        self._sent: Sent | None = None
        """What its decode worker is expected to compute, or to receive."""
        self.own = OwnTime()
        self.trace: RequestTrace | None = None
        """Where the request is traced."""
        self.onward: dict[str, str] = {}
        """Headers of tracing that the request carries to its workers; none where tracing is off."""
        self.tenant = NONE
        """As a label."""
        self.labels: Tags | None = None
        """How it was served; None until it was sent on or answered."""
        self.estimated = False
        """Whether the length of its prompt is accounted for when Envoy has told it."""
        self.answer_status: int | None = None
        """Of the decode worker, where it is known."""
        self.answer_headers: dict[str, str] = {}
        """What the answer gets beside the worker's own headers."""

    def enter(self, phase: int) -> None:
        """A phase of :mod:`extproc.observe.own_time` begins."""
        self.own.enter(phase)
        if self.trace is not None:
            self.trace.enter(phase)

    async def expect(self, phase: Phase, wanted: type[T]) -> T:
        """The one event that carries the request on. Raises OverError, ProtocolError."""
        event = await self.receive(phase)
        if not isinstance(event, wanted):
            raise OverError(event)
        return event

    async def receive(self, phase: Phase) -> wire.Event | None:
        """The next event; None at the end of the stream. Raises ProtocolError."""
        event = await self.stream.receive()
        if event is not None and not isinstance(event, PHASES[phase]):
            raise ProtocolError(f"{type(event).__name__} in phase {phase.value}")
        return event

    async def to_the_end(self, work: asyncio.Future[Any] | None = None) -> None:
        """Wave through what Envoy may still send. With ``work``, return when that is done, if the request lasts so long."""
        following: wire.Event | None = None
        while following is not None or work is None or await self.over_within(work):
            event, following = following or await self.receive(Phase.ANSWER), None
            if event is None:
                return
            if isinstance(event, wire.ResponseHeaders):
                self.answer_streamed = event.streamed
                if self.on_answer is not None:
                    self.on_answer(event)
            if isinstance(event, wire.ResponseHeaders) and self._reads(event):
                await self.stream.edit_answer(event, self.answer_headers, self._edit())
            elif isinstance(event, wire.ResponseHeaders) and self.answer_headers:
                await self.stream.send(wire.answer_reply(event, self.answer_headers))
            else:
                following = await self.stream.pass_answer(event)

    def _reads(self, answer: wire.ResponseHeaders) -> bool:
        """Whether the body of the answer has to come through here."""
        return self.reading is not None and self.reading.begins(answer, shown=self.can_read_answer)

    @property
    def can_read_answer(self) -> bool:
        """Whether Envoy shows the body of the answer, or does so when it is asked to: a gateway that is not ours need not."""
        return self.stream.shows_answer or (not self.parts.config.epp.enabled and self.stream.may_edit_answer)

    def _edit(self) -> wire.Edit:
        """Does not refer to the journey: that would be a cycle."""
        reading, record = self.reading, self.record
        assert reading is not None
        return lambda piece, last: reading.feed(piece, last=last, decode=record.decode)

    async def over_within(self, work: asyncio.Future[Any] | None, timeout_s: float | None = None) -> bool:
        """Wait for ``work``, but no longer than the request lasts: whether something stirred on the stream first."""
        stirred = self.stream.stirred()
        if work is None:
            await first_of(stirred, timeout_s=timeout_s)
        else:
            await first_of(stirred, work, timeout_s=timeout_s)
        return stirred.done()

    async def place(self, job: Job, instead_of: str | None = None) -> Ticket:
        """Workers for a prompt, counted on them until the request ends. It may have to wait for them.

        ``instead_of``: the error of a handoff that it was to have. Raises ApiError, OverError.
        """
        self.enter(DECIDE)
        promise = self.observed.note.promise = Promise(job.aims.ttft_slo_s, job.aims.itl_slo_s)
        dispatcher = self.parts.dispatcher
        warm = self.parts.warm_up.admit(job)
        if warm is not None:
            try:
                if await self.over_within(warm):
                    raise OverError(await self.receive(Phase.QUEUE))
                warm.result()
            finally:
                warm.cancel()
        ticket = self.ticket = dispatcher.submit(job)
        self.held.callback(dispatcher.finish, ticket)
        settled = dispatcher.settled(ticket)
        self.enter(QUEUE)
        if settled is not None and await self.over_within(settled):
            raise OverError(await self.receive(Phase.QUEUE))
        dispatcher.note(ticket, self.record.request_id, instead_of)
        decision = ticket.decision
        assert decision is not None
        if instead_of is None:
            promise.expect(decision)
        if ticket.waiting is not None:
            self.own.add(QUEUE, self.parts.clock() - ticket.waiting.came_s - decision.queued_s)
        self.record.decode, self.record.policy = decision.decode, decision.policy
        self.record.pool = pool_of(job.aims.decode_labels)
        self.record.cached_tokens = decision.cached_tokens
        if self.trace is not None:
            self.trace.decision = decision
        if ticket.waiting is not None:
            self.record.queued_ms = round(decision.queued_s * 1e3, 1)
        self.on_answer = self.answered
        return ticket

    def tags(self, mode: Mode) -> Tags:
        """How the request is served, for statistics and logs."""
        policy = NONE if self.job is None else self.job.aims.policy
        self.labels = Tags(self._model_label(), policy, mode, self.tenant)
        return self.labels

    @property
    def may_be_unseen(self) -> bool:
        """Nothing in a good answer would be of use here, and what became of the request will be told."""
        ticket, parts = self.ticket, self.parts
        if ticket is None or self.trace is not None or self.answer_headers:
            return False
        return parts.config.unseen_answers and parts.observer.access_log.reliable and parts.dispatcher.routine(ticket)

    def marks(self, mode: Mode) -> dict[str, str]:
        """The same, and the request's name, for Envoy to note."""
        return self.parts.observer.marks(self.observed, self.tags(mode))

    @property
    def computed(self) -> bool:
        """Whether an engine computed the prompt of the request, as far as the filter can know."""
        if self.record.treatment is None or not self.record.treatment.apart:
            return False
        # A decode worker that turns a prompt down has computed nothing; with a handoff, the prefill worker had.
        turned_down = self.answer_status is not None and self.answer_status >= 400
        return self.record.outcome == "handoff" or (self.record.outcome == "whole" and not turned_down)

    def whole_to(self, decode: str) -> None:
        """What goes to a decode worker alone, which computes all of it."""
        tokens = 1 if self.job is None else self.job.tokens
        if self.record.treatment is not None and self.record.treatment.apart:
            self.estimated = self.parts.observer.access_log.estimate(self.observed.note, tokens)
        self.sent_to(decode, int(tokens * _ESTIMATE_SLACK), handoff=False)

    def sent_to(self, decode: str, tokens: int, *, handoff: bool) -> None:
        """Its decode worker computes so many tokens, or receives them, until the request ends."""
        sent = self._sent = self.parts.engines.recompute.sent(decode, tokens, handoff=handoff)
        self.held.callback(sent.end, self.parts.clock)

    def moved_to(self, decode: str | None) -> None:
        """Another decode worker has it than it was sent to; None: none of the pool."""
        sent, self.record.decode = self._sent, decode
        if sent is None:
            return
        tokens, sent.tokens = int(sent.tokens), 0.0
        sent.end(self.parts.clock)
        if decode is not None:
            self.sent_to(decode, tokens, handoff=sent.handoff)

    def destination(self, decode: Endpoint) -> str:
        """Where Envoy is told to send what is not handed over: others may follow, since nothing is lost if it is sent twice."""
        epp = self.parts.config.epp
        if not epp.fallback_endpoints or not epp.enabled or self.ticket is None:
            return decode.address
        self.alternatives = self.parts.dispatcher.alternatives(self.ticket, epp.fallback_endpoints)
        return ",".join((decode.address, *self.alternatives))

    def _model_label(self) -> str:
        model = None if self.job is None else self.job.model
        if model is None:
            return NONE
        decode = None if self.ticket is None else self.ticket.decode
        known = self.parts.pool.models() if decode is None else decode.models or ()
        return model if model in known else OTHER

    def other_answered(self, answer: wire.ResponseHeaders) -> None:
        """The start of the answer to what is no prompt, whose errors say nothing of a worker."""
        self.answer_status = answer.status
        self.served_by = served.note(self, answer.served)

    def answered(self, answer: wire.ResponseHeaders) -> By:
        """The start of the answer says how the decode worker is, and whether it is the one that was chosen."""
        ticket = self.ticket
        if ticket is None or ticket.decode is None:
            return "unknown"
        chosen = ticket.decode.address
        self.answer_status = answer.status
        if self.trace is not None:
            self.trace.answered(answer.status)
        self.parts.recent.answered(answer.status)
        by = self.served_by = served.note(self, answer.served)
        config = self.parts.config
        # An Envoy that is not ours may never say who served.
        if answer.status == 503 and answer.served is None and config.envoy.pin == "exact" and not config.epp.enabled:
            self.parts.unknown_to_envoy(self.record.request_id, chosen, self.record.pool)
        # An error of the client's is none of the worker's. A 500 may be a handoff that it could not read.
        self.parts.dispatcher.answered(ticket, ok=answer.status < 500, pair_fault=answer.status == 500)
        return by

    def route(self, decode: Endpoint) -> Mapping[str, str]:
        """The headers by which Envoy chooses the route to this worker; none where it has but one."""
        return self.parts.routes.of(None if self.job is None else self.job.model, decode.labels)

    def rank(self) -> dict[str, str]:
        """The header by which its decode leg names one of its worker's engines, where it has to."""
        rank = None if self.ticket is None else self.ticket.decode_rank
        return {} if rank is None else {RANK_HEADER: str(rank)}

    def place_other(self, size_bytes: int = 0, *, model: str | None = None, aims: Aims = AT_ONCE) -> Endpoint:
        """A decode worker for what is no prompt, at once; ``model``: only one that serves it. Raises ApiError."""
        now_s = self.parts.clock()
        job = self.job = Job(
            model=model,
            chain=_NO_CHAIN,
            tokens=max(size_bytes // 4, 1),
            aims=aims,
            arrived_s=now_s,
            deadline_s=now_s,
            handoff=False,
            only=self.only,
        )
        ticket = self.ticket = self.parts.dispatcher.submit(job)
        self.held.callback(self.parts.dispatcher.finish, ticket)
        assert ticket.decode is not None
        self.record.decode = ticket.decode.address
        self.record.pool = pool_of(ticket.decode.labels)
        self.whole_to(ticket.decode.address)
        self.on_answer = self.other_answered
        return ticket.decode


_ESTIMATE_SLACK = 1.5
"""Times the estimate of a prompt's tokens: so many it may have."""

_NO_CHAIN = Chain(array("Q"), 1.0)
