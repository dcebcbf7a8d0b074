"""Servicers that were written for grpc.aio, served as they are.

Generated code hands over method handlers, which read and write messages through a context. Here they get one that has the
parts of ``grpc.aio.ServicerContext`` that do not need grpc's own core.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import inspect
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
import grpc.aio

from extproc.transport.call import CallGoneError
from extproc.transport.http2.connection import Head
from extproc.transport.http2.hpack import Field
from extproc.transport.lean_call import LeanCall
from extproc.transport.status import Status

MethodHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Metadata: TypeAlias = tuple[tuple[str, str | bytes], ...]

_NOT_METADATA = frozenset(("content-type", "te", "grpc-timeout", "grpc-encoding", "grpc-accept-encoding"))


@dataclass(slots=True)
class Details:
    """What a generic handler is asked with; as grpc.HandlerCallDetails."""

    method: str
    invocation_metadata: Metadata


def metadata(head: Head) -> Metadata:
    """The headers of a call that are its caller's own. A name that ends in ``-bin`` has bytes."""
    return tuple(_read_metadata(name, value) for name, value in head.fields if name not in _NOT_METADATA)


def _read_metadata(name: str, value: str) -> tuple[str, str | bytes]:
    if name.endswith("-bin"):
        try:
            return name, base64.b64decode(value + "=" * (-len(value) % 4))
        except (binascii.Error, ValueError):
            return name, b""
    return name, value


def _fields(items: Iterable[tuple[str, str | bytes]]) -> tuple[Field, ...]:
    return tuple(
        (name.lower().encode(), value.encode() if isinstance(value, str) else base64.b64encode(value).rstrip(b"="))
        for name, value in items
    )


def adapt(handler: MethodHandler) -> Callable[[LeanCall], Coroutine[Any, Any, None]]:
    """A handler of generated code as one of :class:`~extproc.transport.lean_server.LeanServer`."""
    behaviour: Any = (
        (handler.stream_stream if handler.response_streaming else handler.stream_unary)
        if handler.request_streaming
        else (handler.unary_stream if handler.response_streaming else handler.unary_unary)
    )

    async def serve(call: LeanCall) -> None:
        task = asyncio.current_task()
        assert task is not None
        if call.over:
            return
        call.cancels(task)
        context = Context(call, handler)
        try:
            await _serve(handler, behaviour, context)
            context.succeeded()
        except (grpc.aio.BaseError, CallGoneError):
            pass  # the context has said it to the peer, or nobody is there
        except Exception:
            context.failed()
            raise
        finally:
            context.close()

    return serve


async def _serve(handler: MethodHandler, behaviour: Any, context: Context) -> None:
    if handler.request_streaming:
        given: Any = context.requests()
    else:
        given = await context.read()
        if given is grpc.aio.EOF:
            await context.abort(grpc.StatusCode.INTERNAL, "no request came")
    answer = behaviour(given, context)
    if inspect.isasyncgen(answer):
        async for message in answer:
            await context.write(message)
        return
    if inspect.isawaitable(answer):
        answer = await answer
    if not handler.response_streaming and not context.done():
        await context.write(answer)


class Context:
    """What a servicer sees of its call; see ``grpc.aio.ServicerContext``."""

    def __init__(self, call: LeanCall, handler: MethodHandler) -> None:
        self._call = call
        self._parse: Callable[[bytes], Any] = handler.request_deserializer or bytes
        self._format: Callable[[Any], bytes] = handler.response_serializer or bytes
        self._code: grpc.StatusCode | None = None
        self._details = ""
        self._trailing: Metadata = ()
        self._done = False
        self._callbacks: list[Callable[[Any], None]] = []
        timeout = call.timeout_s
        self._deadline_s = None if timeout is None else time.monotonic() + timeout

    async def read(self) -> Any:
        """The next message, or ``grpc.aio.EOF``. Raises grpc.aio.UsageError when the peer is gone."""
        message = await self._call.receive()
        if message is None:
            if self._call.gone_early:
                raise grpc.aio.UsageError("the call is no more")
            return grpc.aio.EOF
        return self._parse(message)

    async def requests(self) -> AsyncIterator[Any]:
        """All messages, one after the other."""
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message

    async def write(self, message: Any) -> None:
        """Send a message. Raises grpc.aio.UsageError when the peer is gone."""
        try:
            await self._call.send(self._format(message))
        except CallGoneError:
            raise grpc.aio.UsageError("the call is no more") from None

    async def send_initial_metadata(self, initial_metadata: Iterable[tuple[str, str | bytes]]) -> None:
        """The headers of the answer, before its first message. Raises grpc.aio.UsageError when it is too late."""
        try:
            self._call.start(_fields(initial_metadata))
        except CallGoneError:
            raise grpc.aio.UsageError("the headers have been sent, or the call is no more") from None

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        """End the call. Always raises grpc.aio.AbortError, which the servicer is not to catch."""
        if code is grpc.StatusCode.OK:
            code, details = grpc.StatusCode.UNKNOWN, "aborted with OK"
        self._code, self._details = code, details
        if trailing_metadata:
            self._trailing = tuple(trailing_metadata)
        self._finish(_number(code), details)
        raise grpc.aio.AbortError("aborted")

    def set_code(self, code: grpc.StatusCode) -> None:
        """The status with which the call will end."""
        self._code = code

    def set_details(self, details: str) -> None:
        """The text of the status."""
        self._details = details

    def set_trailing_metadata(self, trailing_metadata: Iterable[tuple[str, str | bytes]]) -> None:
        """Sent with the status."""
        self._trailing = tuple(trailing_metadata)

    def code(self) -> Any:
        """What was set."""
        return self._code

    def details(self) -> str:
        """What was set."""
        return self._details

    def trailing_metadata(self) -> Any:
        """What was set."""
        return self._trailing

    def invocation_metadata(self) -> Metadata:
        """The caller's headers."""
        return metadata(self._call.head)

    def peer(self) -> str:
        """Who calls."""
        return self._call.peer

    def time_remaining(self) -> float | None:
        """Seconds that the caller still gives; None: any."""
        return None if self._deadline_s is None else max(self._deadline_s - time.monotonic(), 0.0)

    def cancelled(self) -> bool:
        """The peer is gone."""
        return self._call.gone_early

    def done(self) -> bool:
        """The call has its status, or nobody is there."""
        return self._done or self._call.over

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Called with this context when the call has ended."""
        if self._done:
            callback(self)
        else:
            self._callbacks.append(callback)

    # -- for who runs the servicer -----------------------------------------------------------------------------------------

    def succeeded(self) -> None:
        """The servicer has returned."""
        self._finish(Status.OK if self._code is None else _number(self._code), self._details)

    def failed(self) -> None:
        """The servicer has raised: the peer learns what it set before, and nothing of the exception."""
        code = Status.UNKNOWN if self._code in (None, grpc.StatusCode.OK) else _number(self._code)
        self._finish(code, self._details or "internal error")

    def close(self) -> None:
        """The call has ended, one way or another."""
        self._done = True
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)

    def _finish(self, code: int, details: str) -> None:
        self._call.finish(code, details, _fields(self._trailing))


def _number(code: grpc.StatusCode | None) -> int:
    return Status.UNKNOWN if code is None else int(code.value[0])
