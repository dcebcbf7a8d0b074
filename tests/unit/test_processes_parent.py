"""The parent of several processes, with small programs in their place."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import textwrap
from pathlib import Path

import pytest

from extproc.observe.log_writer import LogWriter
from extproc.observe.logs import make_logger
from extproc.processes import parent
from extproc.processes.parent import Parent

_BEGIN = """
import json, os, signal, socket, sys, time
member = json.loads(sys.argv[sys.argv.index("--member") + 1])
parent = socket.socket(fileno=member["lifeline"])
def serve(status=0):
    parent.send(b"s")
    while (said := parent.recv(1)) not in (b"d", b""):
        pass
    print(json.dumps({"event": "drained", "index": member["index"], "said": said.decode()}), file=sys.stderr)
    sys.exit(status)
"""


class Run:
    """A parent in a task of its own, and its log."""

    def __init__(self, folder: Path, program: str, count: int = 2) -> None:
        self._folder = folder
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        self._text = b""
        self.writer = LogWriter(self._write)
        argv = (sys.executable, "-c", _BEGIN + textwrap.dedent(program))
        self.parent = Parent(argv, count, make_logger(sink=self.writer), self.writer)

    async def __aenter__(self) -> Run:
        self.task = asyncio.create_task(self.parent.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        for slot in self.parent._slots:
            if slot.process is not None:
                slot.process.kill()
        self.parent._stopping.set()
        await asyncio.wait((self.task,), timeout=5)
        self.writer.close()
        os.close(self._read)
        os.close(self._write)

    @property
    def lines(self) -> list[dict[str, object]]:
        try:
            while chunk := os.read(self._read, 1 << 16):
                self._text += chunk
        except BlockingIOError:
            pass
        return [json.loads(line) for line in self._text[: self._text.rfind(b"\n") + 1].splitlines()]

    async def until(self, event: str, count: int = 1) -> list[dict[str, object]]:
        async with asyncio.timeout(20):
            while len(found := [line for line in self.lines if line["event"] == event]) < count:
                await asyncio.sleep(0.02)
        return found


async def test_it_starts_all_tells_them_to_drain_and_ends_well(tmp_path: Path) -> None:
    async with Run(tmp_path, "serve()", count=3) as run:
        served = await run.until("process_serves", 3)
        assert sorted(line["process"] for line in served) == [0, 1, 2]
        os.kill(os.getpid(), signal.SIGTERM)
        assert await run.task == 0
        assert {(line["index"], line["said"]) for line in await run.until("drained", 3)} == {(0, "d"), (1, "d"), (2, "d")}


async def test_a_second_signal_is_passed_on_as_an_order_to_end_now(tmp_path: Path) -> None:
    program = """
        parent.send(b"s")
        said = b""
        while b"c" not in said:
            said += parent.recv(1)
        sys.exit(0)
    """
    async with Run(tmp_path, program) as run:
        await run.until("process_serves", 2)
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0.1)
        assert not run.task.done()
        os.kill(os.getpid(), signal.SIGTERM)
        assert await run.task == 0


async def test_one_that_dies_is_started_again_and_knows_how_often(tmp_path: Path) -> None:
    program = """
        if member["index"] == 1 and member["restarts"] < 2:
            parent.send(b"s")
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        serve()
    """
    async with Run(tmp_path, program) as run:
        ended = await run.until("process_ended", 2)
        assert [(line["process"], line["how"]) for line in ended] == [(1, "was ended by SIGKILL")] * 2
        assert ended[1]["again_in_s"] > ended[0]["again_in_s"]
        started = await run.until("process_started", 4)
        assert [line["restarts"] for line in started if line["process"] == 1] == [0, 1, 2]
        assert [line["restarts"] for line in started if line["process"] == 0] == [0], "the other one was left alone"
        os.kill(os.getpid(), signal.SIGTERM)
        assert await run.task == 0


async def test_one_that_cannot_even_begin_ends_all_and_the_status_says_so(tmp_path: Path) -> None:
    """A port that is taken, a fault in the configuration: no later attempt would go better."""
    program = """
        if member["index"] == 1:
            print(json.dumps({"event": "no", "why": "listen: busy"}), file=sys.stderr)
            sys.exit(3)
        serve()
    """
    async with Run(tmp_path, program) as run:
        async with asyncio.timeout(20):
            assert await run.task == 3
        [given_up] = await run.until("processes_given_up")
        assert given_up["why"] == "the process ended with exit status 3 before it could serve"
        assert [line["why"] for line in run.lines if line["event"] == "no"] == ["listen: busy"]


async def test_when_none_can_serve_any_more_it_gives_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parent, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(parent, "LONGEST_PAUSE_S", 0.02)
    program = """
        if member["restarts"]:
            sys.exit(5)
        parent.send(b"s")
        time.sleep(0.3)
        sys.exit(5)
    """
    async with Run(tmp_path, program) as run:
        async with asyncio.timeout(30):
            assert await run.task == 5
        [given_up] = await run.until("processes_given_up")
        assert "no process serves" in given_up["why"]


async def test_while_another_serves_it_tries_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parent, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(parent, "LONGEST_PAUSE_S", 0.02)
    program = """
        if member["index"] == 0:
            serve()
        if not member["restarts"]:
            parent.send(b"s")
            time.sleep(0.1)
        sys.exit(5)
    """
    async with Run(tmp_path, program) as run:
        await run.until("process_ended", parent.MOST_FAILURES + 3)
        assert not run.task.done()
        os.kill(os.getpid(), signal.SIGTERM)
        await run.task


async def test_lines_of_several_processes_do_not_run_into_each_other(tmp_path: Path) -> None:
    program = """
        parent.send(b"s")
        for number in range(300):
            line = json.dumps({"event": "long", "index": member["index"], "number": number, "text": "x" * 9000})
            for at in range(0, len(line), 1000):
                os.write(2, line[at:at + 1000].encode())
            os.write(2, b"\\n")
        os.write(2, b'{"event": "last words"}')
        os.kill(os.getpid(), signal.SIGKILL) if member["restarts"] == 0 and member["index"] == 0 else serve()
    """
    async with Run(tmp_path, program) as run:
        found = await run.until("long", 900)  # the one that is killed says its words twice
        for index in (0, 1):
            own = [line["number"] for line in found if line["index"] == index][:300]
            assert own == list(range(300)), "all of them, whole and in order"
        assert await run.until("last words"), "a line without an end, too"
        os.kill(os.getpid(), signal.SIGTERM)
        await run.task


async def test_something_that_a_process_started_does_not_delay_its_next_start(tmp_path: Path) -> None:
    program = """
        import subprocess
        if member["restarts"] == 0:
            subprocess.Popen(["sleep", "3"], stdin=subprocess.DEVNULL)  # it has the log open
            parent.send(b"s")
            os.kill(os.getpid(), signal.SIGKILL)
        serve()
    """
    async with Run(tmp_path, program, count=1) as run:
        async with asyncio.timeout(2.5):
            started = await run.until("process_started", 2)
        assert [line["restarts"] for line in started] == [0, 1]
        await run.until("process_serves", 1)
        os.kill(os.getpid(), signal.SIGTERM)
        await run.task
