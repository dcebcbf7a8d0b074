"""`baton worker` as a process: it passes signals on, waits for the drain, has the engine's status, leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from workers.ready import answers, free_ports

_TIMEOUT_S = 30.0
_TINY = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_size": 64,
    "vocab_size": 400,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
}

# An engine in short: it says when it is up, and on SIGTERM drains for as long as it is told.
_ENGINE = """
import signal, subprocess, sys, time
def end(*_):
    print("draining", flush=True)
    time.sleep(float(sys.argv[1]))
    print("drained", flush=True)
    sys.exit(int(sys.argv[2]))
signal.signal(signal.SIGTERM, end)
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("up", helper.pid, flush=True)
while True:
    time.sleep(0.1)
"""
_RUN = """
import os, sys
from workers import foreground
sys.exit(foreground.run(sys.argv[2:], env=os.environ, grace_s=float(sys.argv[1]), say=lambda text: print(text, flush=True)))
"""


class Running:
    """A process whose output can be waited for."""

    def __init__(self, argv: list[str], log: Path, env: dict[str, str] | None = None) -> None:
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **(env or {})}
            )

    def text(self) -> str:
        return self.log.read_text()

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + _TIMEOUT_S
        while text not in self.text():
            assert self.process.poll() is None or text in self.text(), self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.05)

    def family(self) -> list[psutil.Process]:
        mine = psutil.Process(self.process.pid)
        return [mine, *mine.children(recursive=True)]

    def ended(self) -> int:
        return self.process.wait(_TIMEOUT_S)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[Running]]:
    running: list[Running] = []
    yield running
    for each in running:
        if each.process.poll() is None:
            for member in each.family():
                member.kill()
            each.process.wait(_TIMEOUT_S)


def start(started: list[Running], tmp_path: Path, grace_s: float, drain_s: float, status: int) -> Running:
    engine = [sys.executable, "-c", _ENGINE, str(drain_s), str(status)]
    running = Running([sys.executable, "-c", _RUN, str(grace_s), *engine], tmp_path / "log")
    started.append(running)
    running.wait_for("up")
    return running


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_and_the_drain_is_waited_for(started: list[Running], tmp_path: Path, number: int) -> None:
    running = start(started, tmp_path, grace_s=20, drain_s=0.5, status=7)
    family = running.family()
    running.process.send_signal(number)
    assert running.ended() == 7, "the engine's own status"
    assert "drained" in running.text()
    assert psutil.wait_procs(family, timeout=5)[1] == [], "its helper in a session of its own too"


def test_an_engine_that_does_not_end_in_its_time_is_killed(started: list[Running], tmp_path: Path) -> None:
    running = start(started, tmp_path, grace_s=0.3, drain_s=600, status=0)
    family = running.family()
    running.process.terminate()
    assert running.ended() == 128 + signal.SIGKILL
    assert psutil.wait_procs(family, timeout=5)[1] == []


def test_a_second_signal_does_not_wait(started: list[Running], tmp_path: Path) -> None:
    running = start(started, tmp_path, grace_s=600, drain_s=600, status=0)
    family = running.family()
    running.process.terminate()
    running.wait_for("draining")
    running.process.terminate()
    assert running.ended() == 128 + signal.SIGKILL
    assert psutil.wait_procs(family, timeout=5)[1] == []


def test_an_engine_that_ends_by_itself_ends_the_launcher_with_its_status(started: list[Running], tmp_path: Path) -> None:
    running = Running([sys.executable, "-c", _RUN, "5", sys.executable, "-c", "raise SystemExit(3)"], tmp_path / "log")
    started.append(running)
    assert running.ended() == 3


def test_a_program_that_is_not_there_is_said_and_has_the_shells_status(started: list[Running], tmp_path: Path) -> None:
    running = Running([sys.executable, "-c", _RUN, "5", "no-such-engine"], tmp_path / "log")
    started.append(running)
    assert running.ended() == 127
    assert "cannot start no-such-engine" in running.text()


def test_when_the_launcher_is_killed_the_engine_ends_too(started: list[Running], tmp_path: Path) -> None:
    running = start(started, tmp_path, grace_s=5, drain_s=0, status=0)
    family = running.family()
    running.process.kill()
    running.ended()
    assert psutil.wait_procs(family, timeout=10)[1] == []


def test_a_simulated_worker_serves_and_ends_on_sigterm(started: list[Running], tmp_path: Path) -> None:
    port, side_channel, events, replay = free_ports(4)
    (tmp_path / "key").write_text("s3cret\n")
    argv = [sys.executable, "-m", "extproc", "worker", "--engine", "sim", "--profile", "cpu-demo", "--host", "127.0.0.1"]
    argv += ["--side-channel-port", str(side_channel), "--kv-events-port", str(events), "--kv-events-replay-port", str(replay)]
    argv += ["--hf-token-file", str(tmp_path / "key"), "--", "--speed", "0"]
    # Role and port by the environment, as a container gives them.
    running = Running(argv, tmp_path / "log", {"BATON_ROLE": "prefill", "BATON_WORKER_PORT": str(port)})
    started.append(running)
    running.wait_for("ready after")
    assert answers(f"http://127.0.0.1:{port}/health")
    body = json.dumps({"model": "smollm2", "prompt": "Hello", "max_tokens": 3}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as reply:
        assert json.load(reply)["usage"]["completion_tokens"] == 3
    family = running.family()
    running.process.terminate()
    assert running.ended() == 0
    assert psutil.wait_procs(family, timeout=5)[1] == []
    text = running.text()
    assert "prefill worker from profile cpu-demo: smollm2 on http://127.0.0.1" in text
    assert "s3cret" not in text
    assert 'HF_TOKEN="$HF_TOKEN"' in text


def refused(*arguments: str) -> str:
    """What a command says that ends before anything is started."""
    done = subprocess.run(
        [sys.executable, "-m", "extproc", "worker", *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2, done
    assert done.stdout == ""
    return done.stderr


def test_what_cannot_be_started_is_said_in_a_sentence_and_nothing_is_run() -> None:
    assert "--role: prefill or decode?" in refused()
    assert "which model? This profile names none: --model" in refused("--role", "decode")
    assert "there is no such model folder" in refused("--role", "decode", "--model", "/no/such/folder")
    assert "--device-ids: numbers" in refused("--role", "decode", "--model", "a/b", "--device-ids", "x")
    assert "no profile 'x'" in refused("--role", "decode", "--profile", "x")


def test_a_dry_run_prints_the_command_alone_and_notes_beside_it() -> None:
    argv = [sys.executable, "-m", "extproc", "worker", "--role", "prefill", "--model", "/elsewhere/m", "--dry-run"]
    argv += ["--side-channel-host", "127.0.0.1", "--", "--disable-log-requests"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("VLLM_NIXL_SIDE_CHANNEL_HOST=127.0.0.1 \\\n")
    assert "vllm serve /elsewhere/m \\\n" in done.stdout
    assert "--disable-log-requests is left out" in done.stderr


def test_a_node_that_cannot_run_the_worker_is_told_before_the_engine_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        (tmp_path / "config.json").write_text(json.dumps(_TINY))
        port = str(taken.getsockname()[1])
        said = refused("--role", "prefill", "--host", "127.0.0.1", "--port", port, "--model", str(tmp_path))
    assert "--no-preflight starts it all the same" in said
    assert f"port {port}" in said
