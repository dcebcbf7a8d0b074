"""The side that reads: first transfer, latency of one block, and bandwidth of several sizes."""

from __future__ import annotations

import importlib.util
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from workers.preflight import numbers
from workers.preflight.findings import Sample
from workers.preflight.measure import perftest, timing
from workers.preflight.measure.memory import buffer, resolve
from workers.preflight.measure.messages import Again, Done, Hello, Line, MeasureError, Offer, Ready, Result, Task
from workers.preflight.measure.nixl_link import Reader

_CONNECT_TIMEOUT_S = 5.0
_ANSWER_TIMEOUT_S = 30.0
"""The other side allocates, fills and registers its buffer meanwhile."""
_PERFTEST_BYTES = (1 << 20, 16 << 20)


def read(task: Task, say: Callable[[str], None]) -> Result:
    """Measure. Raises MeasureError."""
    deadline = time.monotonic() + task.seconds
    tool = _tool(task.tool)
    task = msgspec.structs.replace(task, memory=resolve(task.memory, say))
    where = f"{task.host}:{task.port}"
    with _side_channel(task) as open_port, _connected(task, where) as connection:
        line = Line(connection, where)
        line.send(
            Hello(
                token=task.token,
                tool=tool,
                block_bytes=task.block_bytes,
                buffer_bytes=task.buffer_bytes,
                side_channel_port=open_port,
                identity=task.identity,
            ),
            _CONNECT_TIMEOUT_S,
        )
        offer = line.receive(Offer, min(_ANSWER_TIMEOUT_S, max(1.0, deadline - time.monotonic())))
        if tool == "nixl":
            first_s, latency_s, samples = _by_nixl(task, offer, deadline, say)
        else:
            first_s, latency_s, samples = _by_perftest(task, offer, line, deadline, say)
        result = Result(
            peer=where,
            tool=tool,
            memory=offer.memory if offer.memory == task.memory else f"{offer.memory} to {task.memory}",
            block_bytes=task.block_bytes,
            first_transfer_s=first_s,
            latency_s=latency_s,
            samples=samples,
            bytes_per_s=samples[-1].size_bytes / samples[-1].median_s,
            identity=offer.identity,
            reached_side_channel=offer.reached_side_channel,
        )
        line.send(Done(bytes_per_s=result.bytes_per_s), _CONNECT_TIMEOUT_S)
        return result


def _tool(asked: str) -> str:
    has_nixl = importlib.util.find_spec("nixl") is not None
    if asked != "ucx_perftest" and has_nixl:
        return "nixl"
    if asked == "nixl":
        raise MeasureError("the Python package nixl is not installed here")
    if not perftest.installed():
        missing = "ucx_perftest is not" if has_nixl else "neither the Python package nixl nor ucx_perftest is"
        raise MeasureError(f"{missing} installed here: nothing to measure with")
    return "ucx_perftest"


@contextmanager
def _connected(task: Task, where: str) -> Iterator[socket.socket]:
    try:
        connection = socket.create_connection((task.host, task.port), timeout=_CONNECT_TIMEOUT_S)
    except ConnectionRefusedError:
        raise MeasureError(f"{where}: nobody listens there; start `baton preflight --serve` on that node first") from None
    except OSError as error:
        why = f"no answer within {_CONNECT_TIMEOUT_S:g} s" if isinstance(error, TimeoutError) else error.strerror or str(error)
        raise MeasureError(f"{where}: {why}") from None
    with connection:
        yield connection


@contextmanager
def _side_channel(task: Task) -> Iterator[int | None]:
    """Listen on the side-channel port meanwhile, if it is free: the other side tries to reach it."""
    if task.side_channel_port is None:
        yield None
        return
    with socket.socket(socket.AF_INET6 if ":" in task.side_channel_host else socket.AF_INET) as listener:
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((task.side_channel_host, task.side_channel_port))
            listener.listen(1)
            port: int | None = task.side_channel_port
        except OSError:
            port = None  # taken, or no address of ours: a finding of its own
        yield port


def _by_nixl(task: Task, offer: Offer, deadline: float, say: Callable[[str], None]) -> tuple[float, float, tuple[Sample, ...]]:
    block, total = task.block_bytes, offer.blocks
    if not 0 < total * block <= task.buffer_bytes:
        raise MeasureError(f"the other side offers {total} blocks of {block} bytes, which is not what it was asked for")
    memory = buffer(task.memory, total * block)
    reader = Reader(memory)
    try:
        reader.connect(offer.metadata)

        def transfer(blocks: int) -> float:
            left_s = deadline - time.monotonic()
            remote = (offer.address, offer.device_id, offer.memory)
            return reader.read(blocks=blocks, total=total, block_bytes=block, remote=remote, timeout_s=max(0.1, left_s))

        say("first transfer")
        first_s = transfer(1)
        reader.check(blocks=1, total=total, block_bytes=block, seed=offer.seed)
        say("latency of one block")
        times: list[float] = []
        until = time.monotonic() + timing.LATENCY_S
        while len(times) < timing.LATENCY_TRANSFERS and (not times or time.monotonic() < until):
            times.append(transfer(1))
        samples: list[Sample] = []
        for blocks in timing.steps(block, total):
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not timing.affordable(blocks, block, samples[-1] if samples else None, left_s):
                say(f"{numbers.size(blocks * block)} and more are left out: they would take too long")
                break
            say(f"{numbers.size(blocks * block)} at once")
            samples.append(
                timing.sample(
                    lambda blocks=blocks: transfer(blocks),  # type: ignore[misc]
                    size_bytes=blocks * block,
                    descriptors=blocks,
                    left_s=left_s,
                )
            )
        reader.check(blocks=samples[-1].descriptors, total=total, block_bytes=block, seed=offer.seed)
        return first_s, statistics.median(times), tuple(samples)
    finally:
        reader.close()


def _by_perftest(
    task: Task, offer: Offer, line: Line, deadline: float, say: Callable[[str], None]
) -> tuple[float, float, tuple[Sample, ...]]:
    if offer.perftest_port is None:
        raise MeasureError(f"{line.peer}: it names no port for ucx_perftest")
    port = offer.perftest_port

    def run(size_bytes: int, times: int) -> tuple[float, float]:
        line.send(Again(), _CONNECT_TIMEOUT_S)
        line.receive(Ready, _ANSWER_TIMEOUT_S)
        left_s = max(1.0, deadline - time.monotonic())
        return perftest.get(task.host, port, size_bytes=size_bytes, times=times, memory=task.memory, timeout_s=left_s)

    say("latency of one block")
    start = time.monotonic()
    latency_s, _ = run(task.block_bytes, 50)
    first_s = time.monotonic() - start
    samples = []
    for size_bytes in _PERFTEST_BYTES:
        say(f"{numbers.size(size_bytes)} at once")
        median_s, bytes_per_s = run(size_bytes, 10)
        samples.append(
            Sample(
                size_bytes=size_bytes,
                descriptors=1,
                median_s=median_s,
                best_bytes_per_s=max(bytes_per_s, size_bytes / median_s),
                transfers=10,
            )
        )
    return first_s, latency_s, tuple(samples)
