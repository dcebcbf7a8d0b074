"""Clients of streams, in a process of their own: what came when, and nothing else while it comes.

``python -m bench.overhead.stream_client PORT BODIES FIRST_NUMBER STREAMS TOKENS SPREAD_S [NAME:VALUE ...]``

It prints ``ready``, and begins at a line on its standard input. When all streams have ended it prints ``done``, and then what
they came to, as JSON. It is read by :mod:`bench.overhead.streams`.
"""

from __future__ import annotations

import asyncio
import sys
import time
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import cast

import httptools
import msgspec
import uvloop

from bench.overhead.stream_worker import sent_ns
from bench.overhead.wrk import PATH, read_bodies
from workers.goodput import percentile

_TIMEOUT_S = 60.0


class Report(msgspec.Struct, frozen=True):
    """All streams together. Seconds."""

    streams: int
    tokens: int
    seconds: float
    """From the first byte sent to the last one received."""
    itl_p50_s: float
    itl_p99_s: float
    delay_p50_s: float
    """From the worker's sending of a token to its arrival here."""
    delay_p99_s: float
    ttft_p50_s: float
    """From the request to the first token, which the worker sends one period after the request."""
    faults: list[str]


class Stream(asyncio.Protocol):
    """One request, and its answer."""

    def __init__(self, request: bytes, done: asyncio.Future[None]) -> None:
        self._request = request
        self._done = done
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self.began_ns = 0
        self.times_ns = array("q")
        self.pieces: list[bytes] = []
        self.status = 0
        self.complete = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: send it all."""
        self._transport = cast(asyncio.Transport, transport)
        self.began_ns = time.monotonic_ns()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """asyncio."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._end()

    def connection_lost(self, _: Exception | None) -> None:
        """asyncio."""
        self._end()

    def on_body(self, body: bytes) -> None:
        """httptools: only remembered."""
        self.times_ns.append(time.monotonic_ns())
        self.pieces.append(body)

    def on_message_complete(self) -> None:
        """httptools."""
        self.complete = True
        self._end()

    def _end(self) -> None:
        if not self._done.done():
            self.status = self._parser.get_status_code() if self.pieces else 0
            self._done.set_result(None)
        if self._transport is not None:
            self._transport.close()


async def load(port: int, requests: Sequence[bytes], spread_s: float) -> list[Stream]:
    """Send all, evenly over ``spread_s``, and wait for their ends."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()

    async def one(number: int) -> Stream:
        done: asyncio.Future[None] = loop.create_future()
        await asyncio.sleep(began_s + spread_s * number / len(requests) - loop.time())
        _, stream = await loop.create_connection(lambda: Stream(requests[number], done), "127.0.0.1", port)
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await done
        except TimeoutError:
            stream._end()
        return stream

    return list(await asyncio.gather(*(one(number) for number in range(len(requests)))))


def report(streams: Sequence[Stream], tokens: int) -> Report:
    """What the streams, of ``tokens`` each, came to."""
    gaps_s, delays_s, first_s = array("d"), array("d"), array("d")
    came = 0
    faults: dict[str, int] = {}
    for stream in streams:
        arrivals_ns, sent = arrivals(stream)
        came += len(arrivals_ns)
        gaps_s.extend((later - earlier) / 1e9 for earlier, later in pairwise(arrivals_ns))
        delays_s.extend((arrived - left) / 1e9 for arrived, left in zip(arrivals_ns, sent, strict=True))
        if arrivals_ns:
            first_s.append((arrivals_ns[0] - stream.began_ns) / 1e9)
        fault = _fault(stream, len(arrivals_ns), tokens)
        if fault:
            faults[fault] = faults.get(fault, 0) + 1
    began_ns = min(stream.began_ns for stream in streams)
    ended_ns = max((stream.times_ns[-1] for stream in streams if stream.times_ns), default=began_ns)
    return Report(
        streams=len(streams),
        tokens=came,
        seconds=(ended_ns - began_ns) / 1e9,
        itl_p50_s=percentile(gaps_s, 0.5),
        itl_p99_s=percentile(gaps_s, 0.99),
        delay_p50_s=percentile(delays_s, 0.5),
        delay_p99_s=percentile(delays_s, 0.99),
        ttft_p50_s=percentile(first_s, 0.5),
        faults=[f"{number} streams: {fault}" for fault, number in faults.items()],
    )


def arrivals(stream: Stream) -> tuple[list[int], list[int]]:
    """When each token's event was complete here, and when it was sent; in ns."""
    ends = list(accumulate(map(len, stream.pieces)))
    arrived, sent = [], []
    for end, left_ns in sent_ns(b"".join(stream.pieces)):
        arrived.append(stream.times_ns[bisect_left(ends, end)])
        sent.append(left_ns)
    return arrived, sent


def _fault(stream: Stream, came: int, tokens: int) -> str:
    if stream.status != 200:
        return f"status {stream.status}" if stream.status else "no answer"
    if not stream.complete:
        return "cut off"
    return "" if came == tokens else f"{came} tokens, not {tokens}"


def requests(file: Path, first_number: int, count: int, port: int, headers: Sequence[str]) -> list[bytes]:
    """Whole HTTP requests. Raises OSError."""
    found = read_bodies(file)
    lines = [
        f"POST {PATH} HTTP/1.1",
        f"host: 127.0.0.1:{port}",
        "user-agent: bench",
        "accept: */*",
        "content-type: application/json",
        "authorization: Bearer none",
        *headers,
    ]
    start = "\r\n".join(lines).encode()
    made = []
    for number in range(first_number, first_number + count):
        body = found[number % len(found)].numbered(number % 10**12)
        made.append(b"%b\r\ncontent-length: %d\r\n\r\n%b" % (start, len(body), body))
    return made


def main(arguments: Sequence[str]) -> None:
    """See the module. Raises ValueError, OSError."""
    port, file, first, count, tokens, spread_s, *headers = arguments
    made = requests(Path(file), int(first), int(count), int(port), headers)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    if not sys.stdin.readline():
        return
    streams = uvloop.run(load(int(port), made, float(spread_s)))
    sys.stdout.write("done\n")
    sys.stdout.flush()
    sys.stdout.write(msgspec.json.encode(report(streams, int(tokens))).decode() + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
