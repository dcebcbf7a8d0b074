"""CPU of the gRPC servers for one ext_proc stream: three messages each way, then the peer resets it, as Envoy does.

One client of ready-made frames drives both servers in turn, so that what differs is the server. The handler answers every
message with a fixed one: what is measured is the transport alone.

    python -m bench.transport
    python -m bench.transport --rounds 5 --streams 16 --body-kb 128
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import resource
import statistics
import tempfile
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import cast

import uvloop
from rich.console import Console

from extproc.transport.call import Call
from extproc.transport.choose import Kind, make_server
from extproc.transport.http2 import frames
from extproc.transport.http2.hpack import encode

PATH = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
KINDS: tuple[Kind, ...] = ("grpc", "lean")
_HEADERS_BYTES, _ANSWER_BYTES = 1_200, 300
_HEADERS = encode(
    (
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", PATH.encode()),
        (b":authority", b"extproc"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
        (b"x-envoy-internal", b"true"),
        (b"x-forwarded-for", b"127.0.0.1"),
    )
)


def _serve(kind: Kind, address: str, reply_bytes: int, pipe: Pipe) -> None:
    """A process of its own: tells its CPU seconds whenever it is asked, until it is told None."""

    reply = b"r" * reply_bytes

    async def handle(call: Call) -> None:
        while await call.receive() is not None:
            await call.send(reply)

    async def main() -> None:
        server = make_server(kind, max_message_bytes=64 << 20, max_streams=10_000)
        server.serve(PATH, handle)
        server.add_insecure_port(address)
        await server.start()
        asked = asyncio.Event()
        asyncio.get_running_loop().add_reader(pipe.fileno(), asked.set)
        pipe.send(None)
        while True:
            await asked.wait()
            asked.clear()
            if pipe.recv() is None:
                break
            used = resource.getrusage(resource.RUSAGE_SELF)
            pipe.send(used.ru_utime + used.ru_stime)
        await server.stop(None)

    uvloop.run(main())


def _message(stream: int, size_bytes: int) -> bytes:
    text = b"\x00" + size_bytes.to_bytes(4, "big") + b"m" * size_bytes
    pieces = [text[start : start + frames.MIN_FRAME_BYTES] for start in range(0, len(text), frames.MIN_FRAME_BYTES)]
    return b"".join(frames.frame(frames.DATA, 0, stream, piece) for piece in pieces)


class _Client(asyncio.Protocol):
    """Keeps so many streams open until all are done."""

    def __init__(self, requests: int, at_once: int, body_bytes: int, reply_bytes: int) -> None:
        self._reply_bytes, self._came = reply_bytes + 5, dict[int, int]()
        self._left, self._at_once, self._sizes = requests, at_once, (_HEADERS_BYTES, body_bytes, _ANSWER_BYTES)
        self._next, self._replies, self._rest = 1, dict[int, int](), b""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        window = {frames.INITIAL_WINDOW_SIZE: 16 << 20}
        transport.write(frames.PREFACE + frames.settings(window) + frames.window_update(0, 1 << 30))
        for _ in range(min(self._at_once, self._left)):
            self._open()

    def _open(self) -> None:
        stream, self._next, self._left = self._next, self._next + 2, self._left - 1
        self._replies[stream] = 0
        start = frames.frame(frames.HEADERS, frames.END_HEADERS, stream, _HEADERS)
        self._transport.write(start + _message(stream, self._sizes[0]))

    def data_received(self, data: bytes) -> None:
        data, position, answers = self._rest + data, 0, list[bytes]()
        while len(data) - position >= frames.HEAD_BYTES:
            high, low, kind, flags, stream = frames.HEAD.unpack_from(data, position)
            end = position + frames.HEAD_BYTES + (high << 16 | low)
            if end > len(data):
                break
            position = end
            if kind == frames.DATA and self._whole(stream, high << 16 | low):
                answers.append(self._replied(stream))
            elif kind == frames.PING and not flags & frames.ACK:
                answers.append(frames.frame(frames.PING, frames.ACK, 0, data[end - 8 : end]))
            elif kind == frames.SETTINGS and not flags & frames.ACK:
                answers.append(frames.SETTINGS_ACK)
        self._rest = data[position:]
        if answers:
            self._transport.write(b"".join(answers))

    def _whole(self, stream: int, size_bytes: int) -> bool:
        """More of a reply came; whether it was the last of it."""
        self._came[stream] = self._came.get(stream, 0) + size_bytes
        if self._came[stream] < self._reply_bytes:
            return False
        del self._came[stream]
        return True

    def _replied(self, stream: int) -> bytes:
        count = self._replies[stream] = self._replies[stream] + 1
        if count < len(self._sizes):
            return _message(stream, self._sizes[count])
        del self._replies[stream]
        if self._left:
            self._open()
        elif not self._replies and not self.done.done():
            self.done.set_result(None)
        return frames.rst_stream(stream, 0)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(exc or ConnectionError("the server closed the connection"))


async def _drive(path: str, requests: int, at_once: int, body_bytes: int, reply_bytes: int) -> float:
    """Seconds that it took."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    transport, client = await loop.create_unix_connection(lambda: _Client(requests, at_once, body_bytes, reply_bytes), path)
    await asyncio.wait_for(client.done, 120)
    transport.close()
    return loop.time() - began_s


class _Server:
    """One of the servers in its process."""

    def __init__(self, kind: Kind, directory: Path, reply_bytes: int) -> None:
        self.path, self.reply_bytes = str(directory / f"{kind}.sock"), reply_bytes
        self.pipe, other = multiprocessing.Pipe()
        arguments = (kind, f"unix:{self.path}", reply_bytes, other)
        self.process = multiprocessing.get_context("spawn").Process(target=_serve, args=arguments)
        self.process.start()
        self.pipe.recv()

    def cpu_s(self) -> float:
        self.pipe.send("")
        return float(self.pipe.recv())

    def measure(self, requests: int, at_once: int, body_bytes: int) -> tuple[float, float]:
        """µs of CPU and of wall time for one stream."""
        before_s = self.cpu_s()
        took_s = uvloop.run(_drive(self.path, requests, at_once, body_bytes, self.reply_bytes))
        return (self.cpu_s() - before_s) / requests * 1e6, took_s / requests * 1e6

    def stop(self) -> None:
        self.pipe.send(None)
        self.process.join()


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=3_000, help="streams of one measurement")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each server, in turn")
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 16, 64], help="open at the same time")
    parser.add_argument("--body-kb", type=int, default=4, help="size of the second message")
    parser.add_argument("--reply-bytes", type=int, default=400, help="size of each reply")
    parser.add_argument("--kind", choices=KINDS, nargs="*", default=list(KINDS), help="servers")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        servers = {kind: _Server(kind, Path(directory), options.reply_bytes) for kind in options.kind}
        console = Console(highlight=False)
        console.print(f"body of {options.body_kb} KB, {options.requests} streams, medians of {options.rounds} rounds")
        console.print("streams at once   server   CPU µs a stream   wall µs a stream")
        for at_once in options.streams:
            found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in servers}
            for _ in range(options.rounds):
                for kind, server in servers.items():
                    found[kind].append(server.measure(options.requests, at_once, options.body_kb * 1024))
            for kind, values in found.items():
                cpu_us, wall_us = (statistics.median(column) for column in zip(*values, strict=True))
                console.print(f"{at_once:15}   {kind:6}   {cpu_us:15.0f}   {wall_us:16.0f}")
        for server in servers.values():
            server.stop()


if __name__ == "__main__":
    main()
