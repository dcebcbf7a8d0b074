"""One gRPC call (as in :mod:`extproc.transport.call`): its messages both ways, and its end."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any, Final

from extproc.transport.call import CallGoneError
from extproc.transport.http2.connection import Head, Stream
from extproc.transport.http2.errors import CANCEL
from extproc.transport.http2.hpack import Field
from extproc.transport.inbox import PREFIX, Inbox
from extproc.transport.status import ANSWER_HEADERS, OK_TRAILERS, Status, answer_headers, trailers

if TYPE_CHECKING:
    from extproc.transport.link import Link

_TIMEOUT: Final = re.compile(r"([0-9]{1,8})([HMSmun])").fullmatch
_UNIT_S: Final = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}


LeanHandler = Callable[["LeanCall"], Coroutine[Any, Any, None]]
"""Serves one call. When it returns, the call ends with OK; when it raises, with INTERNAL."""


def timeout_s(text: str) -> float:
    """The header ``grpc-timeout`` in seconds. Raises ValueError."""
    match = _TIMEOUT(text)
    if match is None:
        raise ValueError(f"grpc-timeout: {text!r}")
    return int(match[1]) * _UNIT_S[match[2]]


class LeanCall(Inbox):
    """One call. Not for more than one reader at a time; any number may send.

    A peer that resets the call, or whose connection breaks, does not cancel the handler: ``receive`` says None, and ``send``
    raises :class:`CallGoneError`.
    """

    __slots__ = (
        "_deadline",
        "_drained",
        "_ended",
        "_gone",
        "_link",
        "_loop",
        "_over",
        "_reader",
        "_started",
        "_stirred",
        "_task",
        "head",
        "timeout_s",
    )

    def __init__(self, link: Link, stream: Stream, head: Head, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(link.connection, stream, link.max_message_bytes, link.window_bytes)
        self.head = head
        """The headers of the request."""
        self._link = link
        self._loop = loop
        self._ended = False
        """No more messages come."""
        self._over = False
        """Nothing more can be sent."""
        self._gone = False
        """What is not sent yet never will be."""
        self._started = False
        """The headers of the answer are out."""
        self._reader: asyncio.Future[None] | None = None
        self._stirred: asyncio.Future[None] | None = None
        self._drained: list[asyncio.Future[None]] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self.timeout_s: float | None = None
        """What the peer gives the call, from its beginning."""
        self._task: asyncio.Task[None] | None = None
        """What is cancelled when the peer is gone."""

    # -- for the handler ---------------------------------------------------------------------------------------------------

    def header(self, name: str) -> str | None:
        """A header of the request by its name in lower case; a repeated one is joined with commas."""
        return self.head.names.get(name)

    @property
    def peer(self) -> str:
        """Who calls: ``unix:`` or ``ip:port``."""
        return self._link.peer

    @property
    def over(self) -> bool:
        """The call has its status, or nobody is there any more."""
        return self._over

    @property
    def gone_early(self) -> bool:
        """The peer was gone before the call had its status."""
        return self._gone

    @property
    def started(self) -> bool:
        """The headers of the answer have been sent."""
        return self._started

    def pending(self) -> bool:
        """Whether :meth:`receive` would return at once."""
        return self._ended or bool(self.messages)

    async def receive(self) -> bytes | None:
        """The next message. None: no more come, because the peer has ended its side, reset the call, or is gone."""
        while not self.messages:
            if self._ended:
                return None
            reader = self._reader = self._loop.create_future()
            try:
                await reader
            finally:
                self._reader = None
        message = self.take()
        if self._link.connection.sender.out:
            self._link.flush()
        return message

    def stirred(self) -> asyncio.Future[None]:
        """Done when a message or the end is there; it stays there. Whoever has one need not wait for it, and may cancel it."""
        future = self._stirred
        if future is None or (future.done() and (future.cancelled() or not self.pending())):
            future = self._stirred = self._loop.create_future()
            if self.pending():
                future.set_result(None)
        return future

    async def send(self, message: bytes) -> None:
        """Send a message. Waits while the peer's windows or the socket take no more; it is sent whole even if the wait is cut.

        Raises CallGoneError.
        """
        if self._over:
            raise CallGoneError("the call is over")
        link = self._link
        sender = link.connection.sender
        if not self._started:
            self._started = True
            sender.headers(self._stream, ANSWER_HEADERS)
        size_bytes = len(message)
        sent = sender.data(self._stream, PREFIX.pack(0, size_bytes), message)
        link.flush(size_bytes)
        if not sent:
            await self._until_drained()

    def start(self, metadata: Iterable[Field]) -> None:
        """Send the headers of the answer with ``metadata``, in front of the first message. Raises CallGoneError."""
        if self._over or self._started:
            raise CallGoneError("the call is over")
        self._started = True
        self._link.connection.sender.headers(self._stream, answer_headers(metadata))
        self._link.flush()

    async def abort(self, code: int, text: str) -> None:
        """End the call with a status. There is nothing to receive after it, and :meth:`send` raises CallGone."""
        self.finish(code, text)

    # -- for who runs the handler ------------------------------------------------------------------------------------------

    def finish(self, code: int = Status.OK, text: str = "", metadata: tuple[Field, ...] = ()) -> None:
        """End the call with a status; nothing if it has one, or nobody is there."""
        if self._over:
            return
        plain = code == Status.OK and self._started and not metadata
        block = OK_TRAILERS if plain else trailers(code, text, metadata, alone=not self._started)
        self._end_with(block)

    def answer(self, block: bytes) -> None:
        """The whole answer, where there is no handler for the request."""
        if not self._over:
            self._end_with(block)

    def cut(self) -> None:
        """End the call without a status."""
        if not self._over:
            self._link.connection.reset(self._stream, CANCEL)
            self._link.flush()
            self.gone(CANCEL)

    def cancels(self, task: asyncio.Task[None]) -> None:
        """Cancel a task when the peer is gone, or too late."""
        self._task = task

    def expire_after(self, timeout_s: float) -> None:
        """The time that the peer gives the call."""
        self.timeout_s = timeout_s
        self._deadline = self._loop.call_later(timeout_s, self._expire)

    def released(self) -> None:
        """The handler has returned."""
        self._task = None
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    # -- for the stream ----------------------------------------------------------------------------------------------------

    def arrived(self) -> None:
        """See Inbox."""
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
        if self._stirred is not None and not self._stirred.done():
            self._stirred.set_result(None)

    def refuse(self, status: Status, text: str) -> None:
        """See Inbox."""
        self.finish(status, text)
        self._stop_task()

    def ended(self) -> None:
        """See Sink."""
        if self.cut_off and not self._over:
            self.refuse(Status.INTERNAL, "the last message is cut off")
        self._ended = True
        self.arrived()

    def gone(self, _code: int) -> None:
        """See Sink. Messages that nobody has taken are dropped: nobody waits for what they ask."""
        self._over = self._ended = self._gone = True
        self.shut()
        self.arrived()
        self.drained()
        self._stop_task()

    def drained(self) -> None:
        """See Sink."""
        waiting, self._drained = self._drained, None
        for future in waiting or ():
            if not future.done():
                future.set_result(None)

    # -- inside ------------------------------------------------------------------------------------------------------------

    def _end_with(self, block: bytes) -> None:
        self._over = self._ended = True
        self.shut()
        self._link.connection.end(self._stream, block)
        self._link.flush()
        self.arrived()

    async def _until_drained(self) -> None:
        future: asyncio.Future[None] = self._loop.create_future()
        if self._drained is None:
            self._drained = []
        self._drained.append(future)
        await future
        if self._gone:
            raise CallGoneError("the call is over")

    def _expire(self) -> None:
        self._deadline = None
        self.finish(Status.DEADLINE_EXCEEDED, "deadline exceeded")
        self._stop_task()

    def _stop_task(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
