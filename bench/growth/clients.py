"""Clients that cost next to nothing: one connection a request, its status, and how long it took."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import cast

import httptools

_WORDS = ("river", "bridge", "seven", "old", "ships", "carry", "barrels", "of", "salt", "along", "the", "coast", "at", "night")
_CONNECTING = 256
"""At once: more would only wait in the kernel's queue."""
BROKEN = "no answer"


def request(size_bytes: int, draw: random.Random, *, start: str = "") -> bytes:
    """A completion whose body has ``size_bytes``, unlike any other of the same ``draw``."""
    head = json.dumps({"model": "m", "max_tokens": 16, "prompt": f"{start} {draw.getrandbits(64):x} "})[:-2]
    words = " ".join(draw.choices(_WORDS, k=max(size_bytes // 3, 1)))
    body = (head + words[: max(size_bytes - len(head) - 2, 0)] + '"}').encode()
    return (
        b"POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
    ) + body


class _Client(asyncio.Protocol):
    """Leaves when it has the whole answer."""

    def __init__(self, data: bytes, done: asyncio.Future[str]) -> None:
        self._data, self._done = data, done
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._data)
        self._data = b""

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        self._end(str(self._parser.get_status_code()))
        assert self._transport is not None
        self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(BROKEN if exc is None else f"{BROKEN} ({type(exc).__name__})")

    def _end(self, status: str) -> None:
        if not self._done.done():
            self._done.set_result(status)


class Clients:
    """Send to one port of this machine."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._connecting = asyncio.Semaphore(_CONNECTING)

    async def ask(self, data: bytes) -> str:
        """One request; the status of its answer, or what became of the connection."""
        done = asyncio.get_running_loop().create_future()
        async with self._connecting:
            try:
                await asyncio.get_running_loop().create_connection(lambda: _Client(data, done), "127.0.0.1", self._port)
            except OSError as error:
                return f"not connected ({type(error).__name__})"
        return str(await done)

    async def one_by_one(self, make: Callable[[], bytes], times: int) -> list[float]:
        """Seconds that each took. Raises RuntimeError if one is not answered 200."""
        took_s = []
        for _ in range(times):
            data = make()
            began_s = time.perf_counter()
            if (status := await self.ask(data)) != "200":
                raise RuntimeError(f"answered {status}")
            took_s.append(time.perf_counter() - began_s)
        return took_s

    def all_at_once(self, make: Callable[[], bytes], many: int) -> list[asyncio.Task[str]]:
        """Send ``many``."""
        return [asyncio.create_task(self.ask(make())) for _ in range(many)]


async def statuses(tasks: list[asyncio.Task[str]]) -> Counter[str]:
    """Wait for all of them."""
    return Counter(await asyncio.gather(*tasks))
