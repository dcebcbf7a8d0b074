"""What it costs a stream to be observed: ``python -m bench.streams_observed``.

The real Envoy and the real filter, a worker that sends a token every 20 ms on a fixed schedule, and a client that notes when it
comes. Every row adds one thing to the one before it; all rows are of the same run, and the last columns compare with the first
row. A row is measured several times, in turn with the others, and shown by its median.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import aiohttp
import msgspec
import psutil
import uvloop
from rich.console import Console
from rich.table import Table

from extproc.config import Config
from extproc.envoy_yaml import render
from extproc.stack import envoy_command, filter_command, find_envoy
from workers.process import Child
from workers.ready import free_ports

_READY_S = 20.0
_GAP_S = 0.02
_WARM_TOKENS = 20

_OFF: dict[str, Any] = {"envoy": {"stats": False, "stream_tokens": False, "access_log": False}, "observe": {"sample": 0}}
_MODES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("nothing", _OFF),
    ("+ statistics in Envoy", {**_OFF, "envoy": {**_OFF["envoy"], "stats": True}}),
    ("+ tokens, where clients ask", {**_OFF, "envoy": {**_OFF["envoy"], "stats": True, "stream_tokens": True}}),
    ("+ access log to the filter", {"observe": {"sample": 0}}),
    ("+ 1 % of the streams watched", {"observe": {"sample": 0.01}}),
    ("+ all of the streams watched", {"observe": {"sample": 1.0, "max_streams": 1000}}),
)


class Sample(NamedTuple):
    """One run of one row."""

    delays_s: list[float]
    """From a token's time in the worker's schedule to its arrival."""
    gaps_s: list[float]
    cpu_s: dict[str, float]
    """By process."""
    tokens: int


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog="example: python -m bench.streams_observed --rounds 5"
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[20, 100], help="at once (default: 20 100)")
    parser.add_argument("--tokens", type=int, default=200, help="of each stream (default: 200)")
    parser.add_argument("--rounds", type=int, default=3, help="times that each row is measured (default: 3)")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        uvloop.run(_work(arguments.worker))
        return
    found = uvloop.run(_measure(arguments.streams, arguments.tokens, arguments.rounds))
    for streams in arguments.streams:
        _show(streams, {name: found[name, streams] for name, _ in _MODES})


async def _measure(streams: list[int], tokens: int, rounds: int) -> dict[tuple[str, int], list[Sample]]:
    found: dict[tuple[str, int], list[Sample]] = {(name, many): [] for name, _ in _MODES for many in streams}
    progress = Console(stderr=True)
    for turn in range(rounds):
        for name, settings in _MODES:
            async with _gateway(settings) as (port, parts):
                for many in streams:
                    progress.print(f"round {turn + 1} of {rounds}: {name}, {many} streams")
                    found[name, many].append(await _run(port, parts, many, tokens))
    return found


# --- one row --------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _gateway(settings: dict[str, Any]) -> Any:
    """(port for clients, process ids by name) of Envoy and filter before one worker."""
    front, envoy_admin, filter_admin, worker = free_ports(4)
    directory = Path(tempfile.mkdtemp(prefix="baton-"))
    tree: dict[str, Any] = {
        "workers": {"both": [f"127.0.0.1:{worker}"]},
        "listen": f"unix:{directory}/extproc.sock",
        "admin": f"127.0.0.1:{filter_admin}",
        "policies": [{"name": "default", "mode": "aggregate", "dispatch": "immediate"}],
        "warm_up": {"enabled": False},
        "drain": {"delay_s": 0, "timeout_s": 1},
        "log_level": "warning",
        **settings,
    }
    tree["envoy"] = {
        **tree.get("envoy", {}),
        "listen": f"127.0.0.1:{front}",
        "admin": f"127.0.0.1:{envoy_admin}",
        "eds_dir": f"{directory}/eds",
    }
    config = msgspec.convert(tree, Config)
    (directory / "baton.yaml").write_bytes(msgspec.json.encode(config))
    (directory / "envoy.yaml").write_text(render(config))
    commands = {
        "worker": (sys.executable, "-m", "bench.streams_observed", "--worker", str(worker)),
        "filter": filter_command(directory / "baton.yaml"),
        "envoy": envoy_command(find_envoy(), directory / "envoy.yaml"),
    }
    async with AsyncExitStack() as stack:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        children = {}
        for name, command in commands.items():
            child = children[name] = Child(name, command, log=directory / f"{name}.log", grace_s=5.0)
            stack.push_async_callback(asyncio.to_thread, child.stop)
            if name == "filter":
                await _until_ready(child, f"http://127.0.0.1:{filter_admin}/healthz")
        await _until_served(children["envoy"], front)
        yield front, _processes(children)


def _processes(children: dict[str, Child]) -> dict[str, psutil.Process]:
    """Envoy, the filter, and below it the process that watches streams."""
    named: dict[str, psutil.Process] = {}
    for name in ("envoy", "filter"):
        pids = children[name].pids()
        family = [psutil.Process(pid) for pid in pids]
        for process in {*family, *(below for each in family for below in each.children(recursive=True))}:
            named["watch" if "extproc.observe.stream_watch" in process.cmdline() else name] = process
    return named


async def _until_ready(child: Child, url: str) -> None:
    async with asyncio.timeout(_READY_S), aiohttp.ClientSession() as session:
        while True:
            assert child.poll() is None, child.tail()
            try:
                async with session.get(url) as response:
                    health = await response.json()
                    watching = health["stream_watch"].get("watched") is None or health["stream_watch"]["running"]
                    if response.status == 200 and watching:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.05)


async def _until_served(child: Child, port: int) -> None:
    """Until a stream goes through, and a while longer, in which the last process gets ready."""
    async with asyncio.timeout(_READY_S):
        while True:
            assert child.poll() is None, child.tail()
            try:
                await _stream(port, 2)
                break
            except (OSError, asyncio.IncompleteReadError):
                await asyncio.sleep(0.1)
    await asyncio.sleep(1.0)


async def _run(port: int, parts: dict[str, psutil.Process], streams: int, tokens: int) -> Sample:
    await asyncio.gather(*(_stream(port, _WARM_TOKENS) for _ in range(streams)))
    before = {name: _cpu_s(process) for name, process in parts.items()}
    # Spread over one gap, like streams that came at different times.
    came = await asyncio.gather(*(_stream(port, tokens, delay_s=_GAP_S * number / streams) for number in range(streams)))
    await asyncio.sleep(1.0)  # what is told later costs as well
    cpu_s = {name: _cpu_s(process) - before[name] for name, process in parts.items()}
    delays_s = [arrived_s - due_s for each in came for due_s, arrived_s in each]
    gaps_s = [after[1] - first[1] for each in came for first, after in itertools.pairwise(each)]
    return Sample(delays_s, gaps_s, cpu_s, streams * tokens)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def _stream(port: int, tokens: int, delay_s: float = 0.0) -> list[tuple[float, float]]:
    """(when it was due, when it came) of every token of one stream."""
    await asyncio.sleep(delay_s)
    options = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": tokens}
    body = json.dumps({"model": "m", "prompt": "a", **options}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    came: list[tuple[float, float]] = []
    try:
        if b" 200 " not in await reader.readline():
            raise OSError("not served yet")
        while len(came) < tokens:
            line = await reader.readuntil(b"\n\n")
            now_s = time.monotonic()
            due = line.partition(b'"due":')[2].partition(b"}")[0]
            if due:
                came.append((float(due), now_s))
        await reader.read()
    finally:
        writer.close()
    return came


# --- the worker -----------------------------------------------------------------------------------------------------------


class _Answer(asyncio.Protocol):
    """Just enough of a worker: health, its model, and streams on a schedule."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none of asyncio's classes.
        self._transport, self._received = cast(asyncio.Transport, transport), b""

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        if not end or (head.startswith(b"POST") and not body.endswith(b"}")):
            return
        self._received = b""
        if head.startswith(b"POST"):
            self._begin(json.loads(body)["max_tokens"])
            return
        answer = b'{"object":"list","data":[{"id":"m","object":"model"}]}' if b"/v1/models" in head else b"\n"
        self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(answer) + answer)

    def _begin(self, tokens: int) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        self._transport.write(head)
        self._next(time.monotonic() + _GAP_S, 1, tokens)

    def _next(self, due_s: float, number: int, tokens: int) -> None:
        asyncio.get_running_loop().call_later(max(0.0, due_s - time.monotonic()), self._token, due_s, number, tokens)

    def _token(self, due_s: float, number: int, tokens: int) -> None:
        head = (
            '{"id":"cmpl-0123456789abcdef","object":"text_completion","created":1796008241,"model":"m","choices":[{"index":0,'
        )
        text = f'{head}"text":" word","logprobs":null,"finish_reason":null}}],"usage":null,"due":{due_s:.6f}}}'
        self._write(f"data: {text}\n\n".encode())
        if number < tokens:
            self._next(due_s + _GAP_S, number + 1, tokens)
            return
        counts = {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": tokens + 1}
        self._write(f"data: {json.dumps({'choices': [], 'usage': counts})}\n\ndata: [DONE]\n\n".encode())
        self._transport.write(b"0\r\n\r\n")

    def _write(self, data: bytes) -> None:
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))


async def _work(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(_Answer, "127.0.0.1", port)
    await server.serve_forever()


# --- the table ------------------------------------------------------------------------------------------------------------


def _show(streams: int, found: dict[str, list[Sample]]) -> None:
    headings = ("delay p50", "p99", "ITL p99", "p99.9", "Envoy", "filter", "watch", "delay p99", "Envoy")
    table = Table(
        f"{streams} streams",
        *headings,
        box=None,
        pad_edge=False,
        caption="delay and ITL in ms, processes in µs of CPU a token; the last two against the first row",
        caption_justify="left",
    )
    first = next(iter(found.values()))
    for name, samples in found.items():
        cells = [_ms(samples, lambda s: s.delays_s, share) for share in (0.5, 0.99)]
        cells += [_ms(samples, lambda s: s.gaps_s, share) for share in (0.99, 0.999)]
        cpu = [_cpu_us(samples, part) for part in ("envoy", "filter", "watch")]
        ratios = (cells[1] / _ms(first, lambda s: s.delays_s, 0.99), cpu[0] / _cpu_us(first, "envoy"))
        table.add_row(
            name, *(f"{cell:.2f}" for cell in cells), *(f"{each:.1f}" for each in cpu), *(f"{each:.2f}" for each in ratios)
        )
    Console(width=150).print(table, "")


def _ms(samples: list[Sample], of: Any, share: float) -> float:
    """The median over the runs of this quantile."""
    return statistics.median(sorted(of(each))[int(share * (len(of(each)) - 1))] for each in samples) * 1e3


def _cpu_us(samples: list[Sample], part: str) -> float:
    return statistics.median(each.cpu_s.get(part, 0.0) / each.tokens for each in samples) * 1e6


if __name__ == "__main__":
    main()
