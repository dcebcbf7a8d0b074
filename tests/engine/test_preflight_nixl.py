"""``baton preflight`` on both ends: one process serves, another reads it with real NIXL over the loopback."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import IO, Any

import pytest

TOKEN = "between-the-two"
TIMEOUT_S = 120.0


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def command(*options: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "extproc", "preflight", "--device", "cpu", "--ucx-tls", "tcp,self", *options)


@pytest.fixture
def server() -> Iterator[tuple[int, subprocess.Popen[str]]]:
    port = free_port()
    process = subprocess.Popen(
        command("--serve", "--listen", f"127.0.0.1:{port}", "--for", "100", "--buffer-mb", "64"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "BATON_PREFLIGHT_TOKEN": TOKEN},
    )
    try:
        assert process.stderr is not None
        wait_for(process.stderr, "waiting for a reader")
        yield port, process
    finally:
        process.kill()
        process.communicate()


def wait_for(stream: IO[str], words: str) -> None:
    said = ""
    for line in stream:
        said += line
        if words in line:
            return
    raise AssertionError(f"{words!r} was never said:\n{said}")


def read(port: int, *options: str, token: str = TOKEN) -> tuple[int, Any]:
    done = subprocess.run(
        command("--peer", f"127.0.0.1:{port}", "--seconds", "40", "--buffer-mb", "32", "--json", *options),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**os.environ, "BATON_PREFLIGHT_TOKEN": token},
        check=False,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def finding(report: Any, name: str) -> Any:
    return next(each for each in report["findings"] if each["id"] == name)


def test_blocks_are_read_and_both_sides_say_how_fast(server: tuple[int, subprocess.Popen[str]]) -> None:
    """A stranger is turned away first; then 32 MiB come over in blocks, are what they should be, and are timed."""
    port, process = server
    status, refused = read(port, token="guessed")
    assert status == 2
    assert "wrong token" in finding(refused, "peer.measured")["found"]
    assert refused["measurement"] is None

    side_channel = free_port()
    status, report = read(port, "--side-channel-host", "127.0.0.1", "--side-channel-port", str(side_channel))
    measured = report["measurement"]
    assert status == 0, report
    assert measured["tool"] == "nixl"
    assert measured["memory"] == "dram"
    assert measured["block_bytes"] == 64 << 10
    assert measured["samples"][0]["size_bytes"] == 1 << 20
    assert measured["samples"][0]["descriptors"] == 16
    assert all(sample["transfers"] >= 1 and sample["median_s"] > 0 for sample in measured["samples"])
    assert 0 < measured["latency_s"] < measured["samples"][-1]["median_s"]
    assert report["route"] == {"name": "TCP", "bytes_per_s": measured["bytes_per_s"], "source": "measured with nixl"}
    assert finding(report, "peer.reaches_us")["severity"] == "ok"
    assert finding(report, "pair.pid_namespace")["found"] == "both are in one process namespace"
    assert finding(report, "pair.versions")["severity"] == "ok"

    stdout, stderr = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, stdout
    shown = re.search(r"measured ([\d.e+-]+) GB/s", stderr)
    assert shown is not None, stderr
    assert float(shown[1]) == pytest.approx(measured["bytes_per_s"] / 1e9, rel=0.01)
    assert TOKEN not in stdout + stderr


def test_nobody_is_left_who_serves_when_the_command_is_killed(server: tuple[int, subprocess.Popen[str]]) -> None:
    """Not even SIGKILL, which the command cannot answer, leaves its measuring process behind."""
    port, process = server
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        # Calling it would not do: so many strangers end it as well. A port can be had when nobody listens on it.
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return
        time.sleep(0.1)
    raise AssertionError(f"port {port} is still served 20 s after the command was killed")
