"""`baton top` fits its terminal, shows what needs somebody, and cannot be made to speak to the terminal by what it shows."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import io
import json
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from typing import Any

import msgspec
import pytest
from rich.console import Console

from extproc import live_document as doc
from extproc.top import draw
from tests.page.world import World
from workers.ready import free_ports


def frame(found: doc.Live, width: int, height: int | None, **more: Any) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height or 25, force_terminal=True, color_system=None)
    console.print(draw(found, width, height, **more))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined, no-any-return]


async def a_document(prefill: int, decode: int, prompts: int = 5) -> doc.Live:
    world = World(prefill, decode)
    for endpoint in world.pool.endpoints:
        world.report(endpoint)
    for _ in range(prompts):
        world.prompt()
    return world.live.document()


@pytest.mark.parametrize("height", [20, 24, 50, 120])
@pytest.mark.parametrize("width", [60, 80, 120, 200])
async def test_a_frame_is_never_larger_than_the_terminal(width: int, height: int) -> None:
    lines = frame(await a_document(100, 100, prompts=30), width, height)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "more are not shown" in text
    assert "last decisions" in text


async def test_without_a_terminal_every_worker_and_decision_is_there() -> None:
    found = await a_document(30, 30, prompts=20)
    text = "\n".join(frame(found, 160, None))
    assert all(each.address in text for each in found.workers)
    assert text.count("→") + text.count(" alone") == len(found.decisions)


async def test_a_worker_that_is_down_is_shown_before_the_busy_ones() -> None:
    found = await a_document(100, 100)
    found.workers[57].state = "down"
    text = "\n".join(frame(found, 120, 24))
    assert f"{found.workers[57].address}" in text
    assert "down" in text


async def test_pools_have_a_column_where_there_are_any_and_it_fits() -> None:
    found = await a_document(2, 2)
    assert not any("pool" in line for line in frame(found, 80, None))
    found.workers[1].pool = "gold"
    lines = frame(found, 80, None)
    (row,) = (line for line in lines if line.startswith("gold"))
    assert found.workers[1].address in row and max(map(len, lines)) <= 80


async def test_a_filter_that_went_away_is_said_over_what_it_said_last() -> None:
    text = "\n".join(frame(await a_document(1, 1), 120, 40, fault="connection refused", age_s=12.0))
    assert "no answer for 12 s: connection refused" in text
    assert "10.0.0.1:8100" in text


async def test_no_worker_and_no_decision_say_what_to_do() -> None:
    found = await a_document(1, 1, prompts=0)
    found.workers = []
    text = "\n".join(frame(found, 120, 40))
    assert "baton check" in text
    assert "No prompt was placed yet" in text


async def test_text_from_elsewhere_cannot_command_the_terminal_or_rich() -> None:
    found = await a_document(1, 1, prompts=1)
    found.workers[0].address = "\x1b[2J\x07[red]x"
    found.decisions[0].policy = "\x1b]0;title\x07[bold]p"
    found.filter.ready, found.filter.why = False, "[link=x]\x9b2J"
    text = "\n".join(frame(found, 200, None))
    assert not any(char in text for char in "\x1b\x07\x9b")
    assert "[red]x" in text
    assert "[bold]p" in text
    assert "[link=x]" in text


def top(*options: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "extproc", "top", *options],
        capture_output=True,
        timeout=60,
        env={**os.environ, "TERM": "xterm"},
    )


def test_a_filter_that_cannot_be_reached_is_an_error_with_its_address() -> None:
    (port,) = free_ports(1)
    for option in ("--once", "--json"):
        ran = top("--admin", f"127.0.0.1:{port}", option)
        assert ran.returncode == 1
        assert f"baton: 127.0.0.1:{port}: the admin port of the filter cannot be asked" in ran.stderr.decode()
        assert ran.stdout == b""


async def test_once_and_json_print_what_the_filter_says() -> None:
    world = World(2, 3)
    world.prompt()
    async with world.served() as address:
        once = await asyncio.to_thread(top, "--admin", address, "--once")
        raw = await asyncio.to_thread(top, "--admin", address, "--json")
    assert (once.returncode, raw.returncode) == (0, 0), once.stderr.decode()
    assert all(each.address in once.stdout.decode() for each in world.pool.endpoints)
    assert len(json.loads(raw.stdout)["workers"]) == 5
    assert msgspec.json.decode(raw.stdout, type=doc.Live).decisions[0].request_id == "request-000001"


async def test_an_answer_of_another_version_is_refused() -> None:
    world = World(1, 1)
    found = world.live.document()
    found.version = 99
    world.live.document = lambda: found  # type: ignore[method-assign]
    async with world.served() as address:
        ran = await asyncio.to_thread(top, "--admin", address, "--once")
    assert ran.returncode == 1
    assert "version 99" in ran.stderr.decode()


class Terminal:
    """`baton top` on a terminal of its own."""

    def __init__(self, address: str, rows: int, columns: int) -> None:
        self.pid, self.file = pty.fork()
        if self.pid == 0:
            # Without LINES and COLUMNS, which readline sets in pytest's own environment.
            env = {"TERM": "xterm-256color", "PATH": os.environ["PATH"], "LANG": "C.UTF-8"}
            os.execve(sys.executable, [sys.executable, "-m", "extproc", "top", "--admin", address], env)
        self.resize(rows, columns)
        self.seen = b""

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.file, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def until(self, wanted: bytes) -> None:
        """Read until it has shown that."""
        end_s = time.monotonic() + 30
        while wanted not in self.seen:
            ready, _, _ = select.select([self.file], [], [], max(0.0, end_s - time.monotonic()))
            assert ready, self.seen[-2000:].decode(errors="replace")
            self.seen += os.read(self.file, 65536)

    def press(self, keys: bytes) -> int:
        """The exit status that comes of it."""
        os.write(self.file, keys)
        with contextlib.suppress(OSError):  # the terminal is gone with its program
            while part := os.read(self.file, 65536):
                self.seen += part
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.mark.parametrize("key", [b"q", b"\x03"], ids=["q", "Ctrl-C"])
async def test_on_a_terminal_it_follows_the_pool_and_its_size_until_told_to_end(key: bytes) -> None:
    world = World(2, 2)
    async with world.served() as address:
        terminal = await asyncio.to_thread(Terminal, address, 40, 120)
        await asyncio.to_thread(terminal.until, b"10.0.1.2:8200")
        world.pool.set_live(world["10.0.1.2:8200"], False)
        await asyncio.to_thread(terminal.until, b"down")
        terminal.seen = b""
        terminal.resize(9, 70)
        await asyncio.to_thread(terminal.until, b"more are not shown")
        assert await asyncio.to_thread(terminal.press, key) == 0
    assert terminal.seen.endswith(b"\x1b[?25h\x1b[?1049l"), "the cursor and the shell's screen are back"
