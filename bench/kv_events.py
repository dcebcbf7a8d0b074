"""What following KV events costs: events a second over real sockets, memory, and the time of a lookup.

``python -m bench.kv_events``; ``--blocks 5000 --seconds 2`` for a quick look. Publishers are a process of their own. Each
sends, at the rate asked for, batches as an engine under load does: half the events store a block of 16 tokens, half remove one,
and every tenth batch stores a prompt of 128 blocks. The decode-only loop reads the same batches from a list and does nothing.
Times are processor time, so that other processes do not count; the process that follows does nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import io
import multiprocessing
import multiprocessing.connection
import random
import time
from array import array
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import psutil
import uvloop
import zmq
from rich.console import Console
from rich.table import Table

from extproc import memory
from extproc.observe.kv_events.decode import Decoder
from extproc.observe.kv_events.settings import KvEvents
from extproc.observe.kv_events.subscriber import Subscriber
from extproc.observe.logs import make_logger
from extproc.observe.metrics import Metrics
from extproc.routing.endpoint_spec import EndpointSet, EndpointSpec
from extproc.routing.holdings import Holdings
from extproc.routing.pool import Pool
from extproc.routing.token_chain import TokenChain
from workers.ready import free_ports

_BLOCK = 16
_BATCHES_PER_S = 50
_LONG_EVERY, _LONG_BLOCKS = 10, 128
_KEPT_BATCHES = 200
"""A worker's batches come again after so many, with other numbers."""
_PROMPT_TOKENS = 131_072
_WARM_S = 1.0
_LATE_S = 15.0


def _batches(worker: int, events: int, count: int) -> list[tuple[bytes, int]]:
    """Payloads of one worker, and how many events each has."""
    draw = random.Random(worker)  # noqa: S311
    encode = msgspec.msgpack.Encoder().encode
    stored: list[int] = []
    made = []
    for number in range(count):
        batch: list[dict[str, Any]] = []
        for _ in range(events // 2):
            name = draw.getrandbits(64)
            batch.append(_stored([name], stored[-1] if stored else None, [draw.randrange(150_000) for _ in range(_BLOCK)]))
            stored.append(name)
            if len(stored) > events * 10:
                batch.append({"type": "BlockRemoved", "block_hashes": [stored.pop(0)], "medium": "GPU", "group_idx": 0})
        if number % _LONG_EVERY == 0:
            names = [draw.getrandbits(64) for _ in range(_LONG_BLOCKS)]
            batch.append(_stored(names, None, [draw.randrange(150_000) for _ in range(_BLOCK * _LONG_BLOCKS)]))
            stored += names
        made.append((encode([time.time(), batch, 0]), len(batch)))
    return made


def _stored(names: list[int], parent: int | None, tokens: list[int]) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": names,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": _BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * len(names),
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


def _publish(ports: list[int], rate: int, seconds: float, pipe: multiprocessing.connection.Connection) -> None:
    """All publishers, at the rate asked for, until the time is over."""
    context = zmq.Context()
    sockets = []
    for port in ports:
        socket = context.socket(zmq.PUB)
        socket.setsockopt(zmq.SNDHWM, 100_000)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(f"tcp://127.0.0.1:{port}")
        sockets.append(socket)
    payloads = [_batches(worker, rate // _BATCHES_PER_S, _KEPT_BATCHES) for worker in range(len(ports))]
    pipe.send("ready")
    pipe.recv()
    sent, began_s, number = 0, time.monotonic(), 0
    while time.monotonic() - began_s < seconds:
        for socket, batches in zip(sockets, payloads, strict=True):
            payload, events = batches[number % _KEPT_BATCHES]
            socket.send_multipart((b"", number.to_bytes(8, "big"), payload))
            sent += events
        number += 1
        time.sleep(max(0.0, began_s + number / _BATCHES_PER_S - time.monotonic()))
    pipe.send((sent, number * len(ports), time.monotonic() - began_s))
    pipe.recv()
    for socket in sockets:
        socket.close(0)
    context.term()


class _Followed(NamedTuple):
    sent: int
    read: int
    lost_batches: int
    busy_s: float
    wall_s: float
    """For so long the engines would have published."""
    longest_turn_ms: float
    blocks: int


async def _follow(workers: int, rate: int, seconds: float) -> _Followed:
    ports = free_ports(workers)
    endpoints = tuple(
        EndpointSpec(address=f"127.0.0.1:{20_000 + at}", labels={"kv-events": str(port)}) for at, port in enumerate(ports)
    )
    pool = Pool(EndpointSet(decode=endpoints))
    for endpoint in pool.endpoints:
        pool.set_live(endpoint, True)
    subscriber = Subscriber(
        KvEvents(enabled=True, max_blocks=4_000_000),
        pool,
        Holdings(4_000_000),
        metrics=Metrics(),
        log=make_logger("error", io.StringIO()),
    )
    ours, theirs = multiprocessing.Pipe()
    publisher = multiprocessing.get_context("spawn").Process(target=_publish, args=(ports, rate, seconds, theirs), daemon=True)
    publisher.start()
    await asyncio.to_thread(ours.recv)
    task = asyncio.create_task(subscriber.run())
    await asyncio.sleep(_WARM_S)  # connections are made
    memory.keep_freed()  # both as the filter does
    memory.collect_rarely()
    busy_s, wall_s = time.process_time(), time.monotonic()
    ours.send("go")
    sent, batches, _ = await asyncio.to_thread(ours.recv)
    counts = [subscriber.counts(each.address) for each in endpoints]
    until_s = time.monotonic() + _LATE_S  # on a machine that has other things to do
    while sum(each.live for each in counts if each is not None) < batches and time.monotonic() < until_s:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    busy_s, wall_s = time.process_time() - busy_s, sent / (rate * workers)
    ours.send("end")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    publisher.join(10)
    read = sum(each.events for each in counts if each is not None)
    taken = sum(each.live for each in counts if each is not None)
    return _Followed(sent, read, batches - taken, busy_s, wall_s, subscriber.longest_turn_s * 1e3, subscriber.holdings.blocks)


def _run_follow(workers: int, rate: int, seconds: float) -> _Followed:
    return uvloop.run(_follow(workers, rate, seconds))


def _decode_us(rate: int) -> float:
    """Processor time of decoding one event and nothing else."""
    batches = _batches(1, rate // _BATCHES_PER_S, _KEPT_BATCHES)
    decoder = Decoder()
    began_s = time.process_time()
    events = sum(len(decoder.decode(payload).events) for payload, _ in batches)
    return (time.process_time() - began_s) / events * 1e6


class _Filled(NamedTuple):
    blocks: int
    grown_bytes: int
    fill_s: float
    lookups: dict[int, tuple[float, float]]
    clear_ms: float
    tidy_ms: float


def _fill(workers: int, blocks: int) -> _Filled:
    """Every worker full of blocks of its own, then a prompt that all of them hold."""
    holdings = Holdings(workers * blocks + 10_000)
    gc.collect()
    before = psutil.Process().memory_info().rss
    draw = random.Random(1)  # noqa: S311
    began_s = time.process_time()
    for start in range(0, blocks, 64):
        count = min(64, blocks - start)
        for worker in range(workers):
            names = [draw.getrandbits(64) for _ in range(count)]
            tokens = [worker, start] * (count * _BLOCK // 2)
            holdings.source(f"w{worker}").stored(names, None, tokens, _BLOCK)
    fill_s = time.process_time() - began_s
    grown = psutil.Process().memory_info().rss - before
    held = holdings.blocks
    prompt = [draw.randrange(150_000) for _ in range(_PROMPT_TOKENS)]
    lookups = {}
    for size in (16, 128):
        sets: list[set[int]] = []
        chain = TokenChain(array("I", prompt))
        keys = chain.keys(size)
        names = [draw.getrandbits(64) for _ in range(len(keys))]
        for worker in range(workers):
            # A third hold all of it, the others less and less.
            end = len(keys) if worker % 3 == 0 else len(keys) * worker // workers
            holdings.source(f"{size}-{worker}").stored(names[:end], None, prompt[: end * size], size)
            sets.append(set(keys[:end]))

        def naive(keys: array[int] = keys, sets: list[set[int]] = sets) -> list[int]:
            return [next((at for at, key in enumerate(keys) if key not in held), len(keys)) for held in sets]

        lookups[size] = (_timed_ms(lambda chain=chain: holdings.lookup(chain)), _timed_ms(naive))  # type: ignore[misc]
    began_s = time.process_time()
    holdings.drop("w0")
    clear_ms = (time.process_time() - began_s) * 1e3
    tidy_ms = 0.0
    while holdings.untidy:
        began_s = time.process_time()
        holdings.tidy()
        tidy_ms = max(tidy_ms, (time.process_time() - began_s) * 1e3)
    return _Filled(held, grown, fill_s, lookups, clear_ms, tidy_ms)


def _timed_ms(call: Callable[[], object]) -> float:
    times = []
    for _ in range(15):
        began_s = time.process_time()
        call()
        times.append((time.process_time() - began_s) * 1e3)
    return sorted(times)[len(times) // 2]


def _apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """In a new process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def main() -> None:
    """Measure, and print a table."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--workers", type=int, default=64)
    options.add_argument("--rate", type=int, default=2000, help="events a second of each")
    options.add_argument("--seconds", type=float, default=8.0)
    options.add_argument("--blocks", type=int, default=50_000, help="of each, for the memory")
    given = options.parse_args()
    console = Console()
    console.print(f"{given.workers} publishers send {given.rate} events/s each for {given.seconds:g} s ...")
    followed: _Followed = _run_follow(given.workers, given.rate, given.seconds)
    decode_us: float = _apart(_decode_us, given.rate)
    console.print(f"{given.workers} workers x {given.blocks:,} blocks ...")
    filled: _Filled = _apart(_fill, given.workers, given.blocks)
    table = Table(title=f"KV events: {given.workers} workers")
    for name in ("", "Baton", "beside it", "ratio"):
        table.add_column(name, justify="left" if not name else "right")
    own_us = followed.busy_s / max(followed.read, 1) * 1e6
    table.add_row("events sent", f"{followed.sent:,}", "", "")
    table.add_row("events read, of those sent", f"{followed.read / max(followed.sent, 1):.4f}", "", "")
    table.add_row("batches lost", str(followed.lost_batches), "", "")
    table.add_row(
        f"share of a core, at {given.workers * given.rate:,} events/s", f"{followed.busy_s / followed.wall_s:.1%}", "", ""
    )
    table.add_row("per event, µs (beside it: decoding only)", f"{own_us:.2f}", f"{decode_us:.2f}", f"{own_us / decode_us:.1f}")
    table.add_row("longest turn of the event loop, ms", f"{followed.longest_turn_ms:.2f}", "", "")
    table.add_row("different blocks held", f"{filled.blocks:,}", "", "")
    table.add_row("memory, MB", f"{filled.grown_bytes / 1e6:.0f}", "", "")
    table.add_row("bytes a block", f"{filled.grown_bytes / filled.blocks:.0f}", "", "")
    table.add_row("to enter a block, µs", f"{filled.fill_s / filled.blocks * 1e6:.2f}", "", "")
    for size, (own_ms, naive_ms) in filled.lookups.items():
        name = f"lookup of {_PROMPT_TOKENS:,} tokens in blocks of {size}, ms (beside it: a set a worker)"
        table.add_row(name, f"{own_ms:.2f}", f"{naive_ms:.2f}", f"{own_ms / naive_ms:.2f}")
    table.add_row("to forget a full worker, ms", f"{filled.clear_ms:.2f}", "", "")
    table.add_row("longest piece of tidying behind it, ms", f"{filled.tidy_ms:.2f}", "", "")
    console.print(table)


if __name__ == "__main__":
    main()
