"""The side that is read: one client that knows the token, within the time, and no more memory than was allowed."""

from __future__ import annotations

import hmac
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from workers.preflight.measure import perftest
from workers.preflight.measure.memory import buffer, pattern, resolve
from workers.preflight.measure.messages import (
    BLOCK_MAX_BYTES,
    BLOCK_MIN_BYTES,
    BLOCKS_MAX,
    BUFFER_MAX_BYTES,
    HELLO_TIMEOUT_S,
    PROTOCOL,
    Again,
    Done,
    Hello,
    Line,
    MeasureError,
    Offer,
    Ready,
    Refusal,
    Result,
    Task,
)
from workers.preflight.measure.nixl_link import Link
from workers.preflight.runner import SystemRunner

_STRANGERS_MAX = 10
_ANSWER_TIMEOUT_S = 5.0
_DIAL_TIMEOUT_S = 3.0


def serve(task: Task, say: Callable[[str], None]) -> Result | None:
    """Wait for a reader and serve it. None: nobody came in time. Raises MeasureError."""
    deadline = time.monotonic() + task.seconds
    task = msgspec.structs.replace(task, memory=resolve(task.memory, say))
    with _listener(task.host, task.port) as listener:
        say(f"waiting for a reader on {task.host}:{listener.getsockname()[1]}, for {task.seconds:.0f} s")
        strangers = 0
        while (left_s := deadline - time.monotonic()) > 0:
            listener.settimeout(left_s)
            try:
                connection, address = listener.accept()
            except TimeoutError:
                return None
            with connection:
                line = Line(connection, str(address[0]))
                try:
                    hello = _admitted(line, task)
                except MeasureError as error:
                    strangers += 1
                    say(f"turned away: {error}")
                    if strangers >= _STRANGERS_MAX:
                        raise MeasureError(f"{strangers} callers without the token or with a wrong request; stopped") from None
                    continue
                say(
                    f"{line.peer} reads {hello.buffer_bytes >> 20} MiB in blocks of {hello.block_bytes >> 10} KiB "
                    f"with {hello.tool}"
                )
                return _serve_one(line, hello, task, deadline)
    return None


@contextmanager
def _listener(host: str, port: int) -> Iterator[socket.socket]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(found[0], socket.SOCK_STREAM)
    except OSError as error:
        raise MeasureError(f"cannot listen on {host}:{port}: {error}") from None
    with listener:
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(found[4])
            listener.listen(4)
        except OSError as error:
            raise MeasureError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
        yield listener


def _admitted(line: Line, task: Task) -> Hello:
    """Its hello, if it knows the token and asks for no more than it may. Raises MeasureError."""
    hello = line.receive(Hello, HELLO_TIMEOUT_S)
    if not hmac.compare_digest(hello.token.encode(), task.token.encode()):
        why = "wrong token"
    elif hello.protocol != PROTOCOL:
        why = f"this side speaks protocol {PROTOCOL}, the reader {hello.protocol}: use one version of baton"
    elif not BLOCK_MIN_BYTES <= hello.block_bytes <= BLOCK_MAX_BYTES or hello.block_bytes % 4:
        why = f"blocks have {BLOCK_MIN_BYTES} to {BLOCK_MAX_BYTES} bytes, a multiple of 4; not {hello.block_bytes}"
    elif not hello.block_bytes <= hello.buffer_bytes <= min(task.buffer_bytes, BUFFER_MAX_BYTES):
        why = f"at most {task.buffer_bytes >> 20} MiB are served here (--buffer-mb), at least one block"
    elif hello.buffer_bytes // hello.block_bytes > BLOCKS_MAX:
        why = f"at most {BLOCKS_MAX} blocks"
    elif hello.tool == "ucx_perftest" and not perftest.installed():
        why = "ucx_perftest is not installed here"
    elif hello.tool not in ("nixl", "ucx_perftest"):
        why = f"{hello.tool!r} is not known"
    else:
        return hello
    line.send(Refusal(error=why), _ANSWER_TIMEOUT_S)
    raise MeasureError(f"{line.peer}: {why}")


def _serve_one(line: Line, hello: Hello, task: Task, deadline: float) -> Result:
    reached = None
    if hello.side_channel_port is not None:
        # Only ever to the address that the call comes from: this is no port scanner for others.
        reached = SystemRunner().dial(line.peer, hello.side_channel_port, timeout_s=_DIAL_TIMEOUT_S).outcome
    if hello.tool == "ucx_perftest":
        done = _by_perftest(line, task, reached, deadline)
    else:
        done = _by_nixl(line, hello, task, reached, deadline)
    return Result(
        peer=line.peer,
        tool=hello.tool,
        memory=task.memory,
        block_bytes=hello.block_bytes,
        bytes_per_s=done.bytes_per_s,
        identity=hello.identity,
        reached_side_channel=reached,
    )


def _by_nixl(line: Line, hello: Hello, task: Task, reached: str | None, deadline: float) -> Done:
    blocks = hello.buffer_bytes // hello.block_bytes
    seed = secrets.randbits(31)
    memory = buffer(task.memory, blocks * hello.block_bytes)
    memory.fill(pattern(memory.size_bytes, seed))
    try:
        link = Link(memory)
    except MeasureError as error:
        line.send(Refusal(error=str(error)), _ANSWER_TIMEOUT_S)
        raise
    try:
        line.send(
            Offer(
                tool="nixl",
                memory=memory.memory,
                blocks=blocks,
                address=memory.address,
                device_id=memory.device_id,
                metadata=link.metadata(),
                agent=link.name,
                seed=seed,
                reached_side_channel=reached,
                identity=task.identity,
            ),
            _ANSWER_TIMEOUT_S,
        )
        return line.receive(Done, max(1.0, deadline - time.monotonic()))
    finally:
        link.close()


def _by_perftest(line: Line, task: Task, reached: str | None, deadline: float) -> Done:
    port = task.port + 1
    offer = Offer(
        tool="ucx_perftest", memory=task.memory, perftest_port=port, reached_side_channel=reached, identity=task.identity
    )
    line.send(offer, _ANSWER_TIMEOUT_S)
    while True:
        message = line.receive(Again | Done, max(1.0, deadline - time.monotonic()))  # type: ignore[arg-type]
        if isinstance(message, Done):
            return message
        left_s = max(1.0, deadline - time.monotonic())
        process = perftest.start_server(port, seconds=left_s)
        try:
            line.send(Ready(), _ANSWER_TIMEOUT_S)
            process.wait(left_s + _ANSWER_TIMEOUT_S)
        finally:
            perftest.stop(process)
