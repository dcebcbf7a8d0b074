"""What one request carries through the filter: its stream, its phases, what it holds, and what its log line says.

What is decided on the way is the business of :mod:`extproc.filter` (any request) and :mod:`extproc.apart` (a prompt that two
workers serve).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import ExitStack
from enum import Enum
from typing import Any, TypeVar

import msgspec

from extproc import wire
from extproc.attempts import Prefiller
from extproc.config import Config
from extproc.errors import ApiError
from extproc.handoff import Connector
from extproc.observe.logs import Logger
from extproc.observe.metrics import Metrics
from extproc.paths import Treatment
from extproc.release import Releaser
from extproc.routing.picker import NoEndpointError, RoundRobin
from extproc.routing.pool import Endpoint, Pool, Role

T = TypeVar("T")


class Phase(Enum):
    """Where a request is."""

    HEADERS = "headers"
    BODY = "body"
    PREFILL = "prefill"
    ANSWER = "answer"


_RESPONSE = (wire.ResponseHeaders, wire.ResponseBody, wire.ResponseTrailers)

PHASES: dict[Phase, tuple[type[Any], ...]] = {
    Phase.HEADERS: (wire.RequestHeaders,),
    # A response before the request is through is an answer of Envoy's own (413, 504): the request is over.
    Phase.BODY: (wire.RequestBody, *_RESPONSE),
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
    prefill_ms: float | None = None
    blocks: int | None = None
    tokens: int | None = None
    body_bytes: int = 0


class Parts(msgspec.Struct, frozen=True):
    """What the requests of one process share."""

    config: Config
    pool: Pool
    picker: RoundRobin
    connector: Connector
    prefiller: Prefiller
    releaser: Releaser
    metrics: Metrics
    log: Logger
    clock: Callable[[], float] = time.monotonic
    loose_ends: set[asyncio.Task[None]] = msgspec.field(default_factory=set)
    """Tasks that outlive their request, to which nothing else refers."""


class Journey:
    """One request. ``held`` gives back on exit whatever is hung on it."""

    def __init__(self, parts: Parts, stream: wire.Stream, held: ExitStack) -> None:
        self.parts = parts
        self.stream = stream
        self.held = held
        self.record = Record()
        self.on_answer: Callable[[int], None] | None = None
        """Told the status of the answer, where Envoy was asked to show it."""

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
        while work is None or await self.over_within(work):
            event = await self.receive(Phase.ANSWER)
            if event is None:
                return
            if isinstance(event, wire.ResponseHeaders) and self.on_answer is not None:
                self.on_answer(event.status)
            await self.stream.send(wire.go_on(event))

    async def over_within(self, work: asyncio.Future[Any] | None, timeout_s: float | None = None) -> bool:
        """Wait for ``work``, but no longer than the request lasts: whether something stirred on the stream first."""
        watch = asyncio.ensure_future(self.stream.stirs())
        try:
            await asyncio.wait((watch, *((work,) if work else ())), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            return watch.done()
        finally:
            watch.cancel()

    def pick(self, role: Role, *, model: str | None, held: ExitStack | None = None) -> Endpoint:
        """A worker for this request, counted on it until ``held`` (by default the whole request) ends. Raises ApiError."""
        try:
            endpoint = self.parts.picker.pick(self.parts.pool, role, model=model)
        except NoEndpointError as error:
            raise no_endpoint(error) from None
        setattr(self.record, role.value, endpoint.address)
        (held or self.held).enter_context(endpoint.busy())
        return endpoint


def no_endpoint(error: NoEndpointError) -> ApiError:
    """What the client is told when no worker can take its request."""
    if error.model is not None:
        return ApiError("model_not_found", f"The model {error.model!r} does not exist.", param="model")
    return ApiError(f"no_{error.role.value}_worker", str(error))
