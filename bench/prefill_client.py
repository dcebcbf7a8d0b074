"""What a prefill call costs this process: ours against aiohttp's client, on one server, in one run.

``python -m bench.prefill_client``. The server is a process of its own that answers at once. A round makes the same calls with
each client in turn; shown is the median round, in microseconds of processor time of a call (user and system), and its p50 in
wall time. The server's time is not in it.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import aiohttp
import uvloop
from rich.console import Console
from rich.table import Table

from extproc import bounded
from extproc.config import Prefill
from extproc.prefill import PrefillClient

_HEADERS = {"x-request-id": "0" * 32, "authorization": "Bearer 0123456789abcdef"}
_REPLY = b'{"kv_transfer_params":{"remote_block_ids":[[%s]]}}' % b",".join(b"%d" % block for block in range(250))
_PATH = "/v1/completions"
_WARM_CALLS = 50

Post = Callable[[bytes], Awaitable[bytes]]


class Sample(NamedTuple):
    """Of one round."""

    cpu_us: float
    p50_us: float


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="for example:  python -m bench.prefill_client --sizes 4 128 1024 --at-once 1 64 --rounds 9",
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[4, 128], metavar="KB", help="of the request's body (4 128)")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 16], metavar="N", help="calls in flight (1 16)")
    parser.add_argument("--calls", type=int, default=1000, help="of each client in a round (1000)")
    parser.add_argument("--rounds", type=int, default=5, help="(5)")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if min(*arguments.sizes, *arguments.at_once, arguments.calls, arguments.rounds) < 1:
        parser.error("all numbers are 1 or more")
    if arguments.serve:
        uvloop.run(_serve())
        return
    with subprocess.Popen([sys.executable, "-m", __spec__.name, "--serve"], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            address = f"127.0.0.1:{int(server.stdout.readline())}"
            uvloop.run(_measure(address, arguments.sizes, arguments.at_once, arguments.calls, arguments.rounds))
        finally:
            server.terminate()


class _Answering(asyncio.Protocol):
    """Reads a request by its length, and answers. No more, so that the client is what takes the time."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._head = b""
        self._left = 0

    def data_received(self, data: bytes) -> None:
        if not self._left:
            self._head += data
            head, end, body = self._head.partition(b"\r\n\r\n")
            if not end:
                return
            self._head = b""
            self._left = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            data = body
        self._left -= len(data)
        if not self._left:
            answer = b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-length: %d\r\ncontent-type: application/json\r\n\r\n%s"
            self._transport.write(answer % (len(_REPLY), _REPLY))  # type: ignore[attr-defined]


async def _serve() -> None:
    server = await asyncio.get_running_loop().create_server(_Answering, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)  # noqa: T201
    await asyncio.Event().wait()


async def _measure(address: str, sizes: list[int], at_once: list[int], calls: int, rounds: int) -> None:
    console = Console()
    table = Table("body", "at once", "aiohttp CPU µs", "ours", "aiohttp p50 µs", "ours", "CPU ratio", box=None)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0)
    session = aiohttp.ClientSession(
        connector=connector,
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("User-Agent", "Accept-Encoding"),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=2.0),
    )

    async def theirs(body: bytes) -> bytes:
        headers = {**_HEADERS, "content-type": "application/json"}
        async with session.post(
            f"http://{address}{_PATH}", data=io.BytesIO(body), headers=headers, allow_redirects=False
        ) as got:
            return await bounded.read(got, 16 << 20)

    async with session, PrefillClient(Prefill()) as client:

        async def ours(body: bytes) -> bytes:
            return await client.run(address, _PATH, body, _HEADERS)

        for size_kb in sizes:
            for count in at_once:
                body = b"x" * (size_kb << 10)
                found: dict[Post, list[Sample]] = {theirs: [], ours: []}
                for each in found:
                    await _round(each, body, count, _WARM_CALLS)
                for index in range(rounds):
                    with console.status(f"{size_kb} KB, {count} at once: round {index + 1} of {rounds}"):
                        for each, samples in found.items():
                            samples.append(await _round(each, body, count, calls))
                before, after = (_median(samples) for samples in found.values())
                times = (f"{each:.0f}" for each in (before.cpu_us, after.cpu_us, before.p50_us, after.p50_us))
                table.add_row(f"{size_kb} KB", str(count), *times, f"{before.cpu_us / after.cpu_us:.1f}")
    console.print(table)


async def _round(post: Post, body: bytes, at_once: int, calls: int) -> Sample:
    times_s: list[float] = []

    async def one_after_another(count: int) -> None:
        for _ in range(count):
            began_s = time.perf_counter()
            if await post(body) != _REPLY:
                raise SystemExit("the server gave another answer than it was told to")
            times_s.append(time.perf_counter() - began_s)

    cpu_s = time.process_time()
    await asyncio.gather(*(one_after_another(-(-calls // at_once)) for _ in range(at_once)))
    return Sample((time.process_time() - cpu_s) / len(times_s) * 1e6, statistics.median(times_s) * 1e6)


def _median(samples: list[Sample]) -> Sample:
    return Sample(statistics.median(each.cpu_us for each in samples), statistics.median(each.p50_us for each in samples))


if __name__ == "__main__":
    main()
