"""Decode workers that stream: a token each so many milliseconds, in chunks shaped like vLLM's, each with the time it was sent.

``python -m bench.overhead.stream_worker --token-ms 20 PORT...``, all in one process. A clock that ticks each millisecond sends
what is due, so that the times from token to token are even and a stream costs next to nothing here.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import time
from collections.abc import Iterator
from typing import cast

import httptools
import msgspec
import uvloop

from bench.overhead.bodies import MODEL
from bench.overhead.workers import DECODE_ANSWER, METRICS_ANSWER, MODELS_ANSWER

_TICK_S = 0.001
_ID = "chatcmpl-7f6e5d4c3b2a19080716253443526170"
_MARK = "@"
"""Before the time in a chunk's text."""
_HEAD = (
    b"HTTP/1.1 200 OK\r\ndate: Mon, 30 Nov 2026 06:00:00 GMT\r\nserver: uvicorn\r\n"
    b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
_LAST = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


class _Wanted(msgspec.Struct):
    stream: bool = False
    max_tokens: int | None = None
    max_completion_tokens: int | None = None


def chunk(**delta: object) -> bytes:
    """One event, in HTTP's chunked coding."""
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, "token_ids": None}
    tree = {"id": _ID, "object": "chat.completion.chunk", "created": 1790000000, "model": MODEL, "choices": [choice]}
    event = b"data: " + msgspec.json.encode(tree) + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(event), event)


_FIRST = chunk(role="assistant", content="")
_TOKEN_HEAD, _, _TOKEN_TAIL = chunk(content=f" {_MARK}{0:016d}").partition(b"%016d" % 0)


class Clock:
    """Sends one token of each running stream every ``token_ms``, at the phase at which the stream began."""

    def __init__(self, token_ms: int) -> None:
        self._token_ms = token_ms
        self._due: list[dict[Connection, int]] = [{} for _ in range(token_ms)]
        """By phase: streams, and how many tokens each has left."""
        self._running = 0
        self._ticking = False
        self._at_ms = 0

    def begin(self, connection: Connection, tokens: int) -> None:
        """The stream's first token comes one period from now."""
        now_ms = time.monotonic_ns() // 1_000_000
        if not self._ticking:
            self._ticking = True
            self._at_ms = now_ms
            asyncio.get_running_loop().call_later(_TICK_S, self._tick)
        self._due[now_ms % self._token_ms][connection] = tokens
        self._running += 1

    def drop(self, connection: Connection) -> None:
        """The client has left."""
        for due in self._due:
            if due.pop(connection, None) is not None:
                self._running -= 1

    def _tick(self) -> None:
        now_ms = time.monotonic_ns() // 1_000_000
        while self._at_ms < now_ms:
            self._at_ms += 1
            due = self._due[self._at_ms % self._token_ms]
            for connection, left in list(due.items()):
                if left:
                    due[connection] = left - 1
                    connection.write(b"%b%016d%b" % (_TOKEN_HEAD, time.monotonic_ns(), _TOKEN_TAIL))
                else:
                    del due[connection]
                    self._running -= 1
                    connection.write(_LAST)
        if self._running:
            asyncio.get_running_loop().call_later(_TICK_S, self._tick)
        else:
            self._ticking = False


class Connection(asyncio.Protocol):
    """One client's connection."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._path = b""
        self._body: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """asyncio."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            assert self._transport is not None
            self._transport.close()

    def connection_lost(self, _: Exception | None) -> None:
        """asyncio."""
        self._transport = None
        self._clock.drop(self)

    def on_url(self, url: bytes) -> None:
        """httptools."""
        self._path += url

    def on_body(self, body: bytes) -> None:
        """httptools."""
        self._body.append(body)

    def on_message_complete(self) -> None:
        """httptools: answer."""
        path, body = self._path.partition(b"?")[0], b"".join(self._body)
        self._path, self._body = b"", []
        if path == b"/metrics":
            self._answer(METRICS_ANSWER, b"text/plain; version=0.0.4; charset=utf-8")
        elif path == b"/v1/models":
            self._answer(MODELS_ANSWER)
        elif path == b"/health":
            self._answer("", b"text/plain")
        else:
            self._chat(body)

    def _chat(self, body: bytes) -> None:
        try:
            wanted = msgspec.json.decode(body, type=_Wanted) if body else _Wanted()
        except msgspec.MsgspecError:
            wanted = _Wanted()
        if not wanted.stream:
            self._answer(DECODE_ANSWER)
            return
        self.write(_HEAD + _FIRST)
        self._clock.begin(self, wanted.max_completion_tokens or wanted.max_tokens or 16)

    def _answer(self, text: str, content_type: bytes = b"application/json") -> None:
        body = text.encode()
        self.write(b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (content_type, len(body), body))

    def write(self, data: bytes) -> None:
        """To the client, if it is still there."""
        if self._transport is not None:
            self._transport.write(data)


async def serve(ports: list[int], token_ms: int) -> None:
    """Until SIGTERM."""
    loop = asyncio.get_running_loop()
    end = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end.set)
    clock = Clock(token_ms)
    for port in ports:
        await loop.create_server(lambda: Connection(clock), "127.0.0.1", port, backlog=4096)
    await end.wait()


def sent_ns(text: bytes) -> Iterator[tuple[int, int]]:
    """Of an answer's bytes: for each token, where its event ends, and when it was sent (``time.monotonic_ns``)."""
    mark = _MARK.encode()
    at = text.find(mark)
    while at >= 0:
        digits = text[at + 1 : at + 17]
        end = text.find(b"\n\n", at)
        if len(digits) == 16 and digits.isdigit() and end >= 0:
            yield end + 2, int(digits)
        at = text.find(mark, at + 17)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.overhead.stream_worker", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--token-ms", type=int, default=20, help="time from token to token (default: 20)")
    parser.add_argument("ports", type=int, nargs="+", metavar="PORT")
    given = parser.parse_args()
    uvloop.run(serve(given.ports, given.token_ms))


if __name__ == "__main__":
    main()
