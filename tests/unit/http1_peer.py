"""A server that does on each connection what a test tells it to, byte for byte; and a way to run a test on both event loops."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import uvloop

from extproc.config import Prefill
from extproc.http1.connection import Answer
from extproc.http1.errors import HttpError
from extproc.prefill import PrefillClient

SOON_S = 20.0
"""Nothing here takes long; this is when a test gives up."""


def on_both_loops(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test on asyncio's own event loop and on uvloop. An exception that nobody handled fails it."""

    def run(loop_factory: Callable[[], asyncio.AbstractEventLoop], **arguments: Any) -> None:
        unhandled: list[dict[str, Any]] = []
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.get_loop().set_exception_handler(lambda _, context: unhandled.append(context))
            runner.run(asyncio.wait_for(test(**arguments), SOON_S))
        assert unhandled == []

    functools.update_wrapper(run, test)
    del run.__wrapped__
    given = inspect.signature(test).parameters.values()
    first = inspect.Parameter("loop_factory", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    run.__signature__ = inspect.Signature([first, *given])
    return pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])(
        run
    )


class Request(NamedTuple):
    """As it came."""

    head: bytes
    body: bytes

    @property
    def lines(self) -> list[bytes]:
        return self.head.split(b"\r\n")[:-2]


class Talk:
    """The server's side of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, requests: list[Request]) -> None:
        self.reader, self.writer = reader, writer
        self.ended = asyncio.Event()
        """The client has closed it."""
        self._requests = requests

    async def request(self) -> Request:
        """The next one, whole. Raises IncompleteReadError if there is none."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        request = Request(head, await self.reader.readexactly(length))
        self._requests.append(request)
        return request

    async def say(self, *pieces: bytes) -> None:
        """Each by itself."""
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()
            await asyncio.sleep(0)

    async def until_gone(self) -> bytes:
        """What else comes, until the client has closed."""
        rest = b""
        with suppress(ConnectionError):
            while piece := await self.reader.read(1 << 16):
                rest += piece
        self.ended.set()
        return rest


Script = Callable[[Talk], Awaitable[None]]


def ok(body: bytes = b"{}", *, head: bytes = b"") -> bytes:
    """An answer. ``head``: more headers, each with its line end."""
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n%s\r\n%s" % (len(body), head, body)


def always(*pieces: bytes) -> Script:
    """The same answer to every request, in these pieces."""

    async def script(talk: Talk) -> None:
        while True:
            await talk.request()
            await talk.say(*pieces)

    return script


def once(*pieces: bytes, stay: bool = False) -> Script:
    """One answer; then the connection is closed, by the client's side first if ``stay``."""

    async def script(talk: Talk) -> None:
        await talk.request()
        await talk.say(*pieces)
        if stay:
            await talk.until_gone()

    return script


class Peer:
    """The n-th connection runs the n-th script, and those after the last one run the last. Use as an async context manager."""

    def __init__(self, *scripts: Script, path: Path | None = None) -> None:
        self._scripts = scripts
        self._path = path
        self._tasks: set[asyncio.Task[None]] = set()
        self.talks: list[Talk] = []
        self.requests: list[Request] = []

    async def __aenter__(self) -> Peer:
        if self._path is None:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 22)
        else:
            self._server = await asyncio.start_unix_server(self._serve, str(self._path), limit=1 << 22)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    @property
    def address(self) -> str:
        host, port = self._server.sockets[0].getsockname()
        return f"{host}:{port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        talk = Talk(reader, writer, self.requests)
        self.talks.append(talk)
        try:
            await self._scripts[min(len(self.talks), len(self._scripts)) - 1](talk)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            talk.ended.set()
        finally:
            writer.close()
            with suppress(ConnectionError, asyncio.CancelledError):
                await writer.wait_closed()


def client(**settings: Any) -> PrefillClient:
    """A client; ``settings`` are those of the section ``prefill``."""
    return PrefillClient(Prefill(**settings))


async def idle(subject: PrefillClient) -> int:
    """How many connections are kept, when everything that closes has closed."""
    for _ in range(20):
        await asyncio.sleep(0)
    return subject.pool.idle_connections


class Told:
    """A reply that notes what it is told."""

    def __init__(self) -> None:
        self.answer: Answer | None = None
        self.error: HttpError | None = None
        self.times = 0

    def answered(self, answer: Answer) -> None:
        self.times += 1
        self.answer = answer

    def failed(self, error: HttpError) -> None:
        self.times += 1
        self.error = error
