"""Measuring between two nodes: who is served, what is refused, and how it ends. The transfers themselves: tests/engine."""

from __future__ import annotations

import contextlib
import itertools
import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from workers.preflight import Model
from workers.preflight.measure import perftest, run, server, timing
from workers.preflight.measure.messages import Hello, MeasureError, Result, Task
from workers.preflight.measure.nixl_link import scattered

MIB = 1 << 20

PERFTEST_OUTPUT = """\
+--------------+--------------+------------------------------+---------------------+-----------------------+
|              |              |        latency (usec)        |   bandwidth (MB/s)  |  message rate (msg/s) |
|     Test     | # iterations | 50.0%ile | average | overall |  average |  overall |  average  |  overall  |
+--------------+--------------+----------+---------+---------+----------+----------+-----------+-----------+
                        2000   1093.723  1176.592  1541.206       53.12      40.55         850         649
"""


class Serving:
    """A server in a thread; ``outcome`` is its result or its error."""

    def __init__(self, task: Task) -> None:
        self._said: queue.Queue[str] = queue.Queue()
        self.outcome: Result | MeasureError | None = None
        self._task = task
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        self.port = int(self.says("waiting").partition(" on ")[2].partition(",")[0].rpartition(":")[2])

    def _serve(self) -> None:
        try:
            self.outcome = server.serve(self._task, self._said.put)
        except MeasureError as error:
            self.outcome = error

    def says(self, words: str) -> str:
        while words not in (said := self._said.get(timeout=20)):
            pass
        return said

    def end(self) -> Result | MeasureError | None:
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self.outcome


@contextmanager
def serving(*, seconds: float = 30.0) -> Iterator[Serving]:
    task = Task(kind="serve", host="127.0.0.1", port=0, token="right", seconds=seconds, block_bytes=0, buffer_bytes=8 * MIB)
    one = Serving(task)
    yield one
    for guess in range(10 if seconds > 1 else 0):  # so many strangers end it
        with contextlib.suppress(OSError):
            answer_to(one.port, hello(token=str(guess)))
    one.end()


def hello(**changes: object) -> bytes:
    values = {"token": "right", "tool": "nixl", "block_bytes": 65536, "buffer_bytes": MIB, **changes}
    return msgspec.json.encode(msgspec.convert(values, Hello)) + b"\n"


def answer_to(port: int, said: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.settimeout(20)
        connection.sendall(said)
        return connection.recv(4096)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"token": "wrong"}, "wrong token"),
        ({"protocol": 99}, "protocol"),
        ({"block_bytes": 512}, "blocks have"),
        ({"buffer_bytes": 9 * MIB}, "at most 8 MiB"),
        ({"buffer_bytes": 1024}, "at most 8 MiB"),
        ({"tool": "rsync"}, "not known"),
    ],
)
def test_a_reader_that_may_not_is_told_why_and_the_server_goes_on_waiting(changes: dict[str, object], why: str) -> None:
    with serving() as one:
        assert why.encode() in answer_to(one.port, hello(**changes))
        one.says("turned away")
        assert b"wrong token" in answer_to(one.port, hello(token="again"))


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", b'{"token":"right","surprise":1}\n', b"x" * (300 << 10)])
def test_what_is_no_hello_is_turned_away(said: bytes) -> None:
    with serving() as one:
        with pytest.raises(ConnectionError):
            if answer_to(one.port, said) == b"":
                raise ConnectionResetError
        one.says("turned away")


def test_nobody_guesses_tokens_for_long() -> None:
    with serving() as one:
        for guess in range(10):
            assert b"wrong token" in answer_to(one.port, hello(token=str(guess)))
        outcome = one.end()
    assert isinstance(outcome, MeasureError)
    assert "10 callers" in str(outcome)


def test_a_server_that_nobody_calls_ends_in_time_without_a_result() -> None:
    with serving(seconds=0.2) as one:
        pass
    assert one.outcome is None


def task_to(port: int, *, seconds: float = 5.0, tool: str = "auto") -> Task:
    return Task(
        kind="read",
        host="127.0.0.1",
        port=port,
        token="right",
        seconds=seconds,
        block_bytes=65536,
        buffer_bytes=MIB,
        tool=tool,
    )


def test_where_nobody_serves_the_reader_is_told_what_to_start() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(MeasureError, match=r"nobody listens there; start `baton preflight --serve`"):
            run.run(task_to(unused.getsockname()[1]), env={}, say=lambda _: None)


def test_a_server_that_never_answers_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(MeasureError, match="no answer within"):
        run.run(task_to(silent.getsockname()[1], seconds=1.0), env={}, say=lambda _: None)


def test_a_server_of_something_else_is_no_crash() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer() -> None:
            connection, _ = other.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"SSH-2.0-OpenSSH_9.6\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(MeasureError, match="not what baton preflight of this version says"):
            run.run(task_to(other.getsockname()[1]), env={}, say=lambda _: None)
        thread.join()


def test_the_token_is_in_no_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, ...]] = []
    start = run.subprocess.Popen

    def noted(argv: tuple[str, ...], **options: object) -> object:
        seen.append(argv)
        return start(argv, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(run.subprocess, "Popen", noted)
    with pytest.raises(MeasureError):
        run.run(task_to(1), env={}, say=lambda _: None)
    assert seen
    assert not any("right" in argument for argv in seen for argument in argv)


def test_ucx_perftest_measures_where_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the program: with an address it prints what the real one printed, without one it waits to be ended."""
    program = tmp_path / "ucx_perftest"
    program.write_text(f"#!/bin/sh\ncase $1 in -p) sleep 2;; *) cat <<'END'\n{PERFTEST_OUTPUT}END\nesac\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with serving() as one:
        found = run.run(task_to(one.port, seconds=30, tool="ucx_perftest"), env={}, say=lambda _: None)
    assert found is not None
    assert found.tool == "ucx_perftest"
    assert found.latency_s == pytest.approx(1093.723e-6)
    assert [sample.size_bytes for sample in found.samples] == [1 * MIB, 16 * MIB]
    assert isinstance(one.outcome, Result)
    assert one.outcome.bytes_per_s == pytest.approx(found.bytes_per_s)


def test_the_output_of_ucx_perftest_is_read() -> None:
    assert perftest.parse(PERFTEST_OUTPUT) == (pytest.approx(1093.723e-6), pytest.approx(40.55 * MIB))
    with pytest.raises(MeasureError, match="nothing that can be read"):
        perftest.parse("Waiting for connection...\n")


def test_transfers_grow_from_a_block_to_the_whole_buffer() -> None:
    assert list(timing.steps(64 << 10, 4096)) == [16, 128, 1024, 4096]
    assert list(timing.steps(2 * MIB, 3)) == [1, 3]


@pytest.mark.parametrize(("blocks", "total"), [(1, 1), (16, 16), (1000, 4096), (7919, 7919)])
def test_blocks_are_read_once_each_and_not_in_a_row(blocks: int, total: int) -> None:
    order = [int(each) for each in scattered(blocks, total)]
    assert len(set(order)) == blocks
    assert all(0 <= each < total for each in order)
    if total > 100:
        assert not any(b == a + 1 for a, b in itertools.pairwise(order))


@pytest.mark.parametrize(
    ("heads", "parallel", "wanted"),
    [(8, 1, 524_288), (8, 4, 131_072), (8, 16, 65_536), (1, 8, 524_288)],
)
def test_a_descriptor_is_a_block_of_a_layer_on_one_gpu(heads: int, parallel: int, wanted: int) -> None:
    model = Model(name="m", kv_bytes_per_token=131_072, layers=32, kv_heads=heads)
    assert run.block_bytes(model, block_size_tokens=128, tensor_parallel=parallel) == wanted
    assert run.block_bytes(None, block_size_tokens=128, tensor_parallel=parallel) == 64 << 10
