"""A running ``baton up`` with two vLLM workers on CPU, and what tests do to it from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import psutil

from extproc.config import load
from tests.engine.kv_proof import BLOCK_SIZE_TOKENS
from workers.ready import free_ports

UP_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class System:
    """A running ``baton up``."""

    process: subprocess.Popen[str]
    log: Path
    front_url: str
    prefill_url: str
    decode_url: str

    def output(self) -> str:
        return self.log.read_text()

    def processes(self) -> list[psutil.Process]:
        """It and everything below it."""
        up = psutil.Process(self.process.pid)
        return [up, *up.children(recursive=True)]

    def server(self, worker_url: str) -> psutil.Process:
        """The process that serves a worker's HTTP; its engine is below it."""
        port = worker_url.rpartition(":")[2]
        servers = [
            process
            for process in self.processes()
            if "vllm.entrypoints.openai.api_server" in process.cmdline()
            and process.cmdline()[process.cmdline().index("--port") + 1] == port
            and "guard.py" not in " ".join(process.cmdline()[:4])
        ]
        assert len(servers) == 1
        return servers[0]

    def scheduler(self, worker_url: str) -> psutil.Process:
        """The process of an engine that decides what is computed next; its HTTP server runs on when this stands still."""
        return self._named("VLLM::EngineCor", worker_url)  # the kernel keeps 15 characters

    def computer(self, worker_url: str) -> psutil.Process:
        """The process of an engine that computes; the scheduler waits for it and still hears of clients that leave."""
        return self._named("VLLM::Worker", worker_url)

    def _named(self, name: str, worker_url: str) -> psutil.Process:
        below = self.server(worker_url).children(recursive=True)
        (process,) = [process for process in below if process.name().startswith(name)]
        return process


def start_system(model: Path, run_dir: Path) -> System:
    """Start ``baton up`` and wait until it says that it is up."""
    port = free_ports(1)[0]
    command = [sys.executable, "-m", "extproc", "up", "--model", str(model), "--port", str(port)]
    command += ["--run-dir", str(run_dir), "--block-size", str(BLOCK_SIZE_TOKENS)]
    log = run_dir / "up.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            # Serves /reset_prefix_cache on the workers, without which a warm cache could stand in for a transfer.
            env={**os.environ, "VLLM_SERVER_DEV_MODE": "1"},
        )
    deadline = time.monotonic() + UP_TIMEOUT_S
    while "\nUp." not in log.read_text():
        if process.poll() is not None or time.monotonic() > deadline:
            process.terminate()
            process.wait(60)
            raise AssertionError(f"baton up did not come up:\n{log.read_text()}")
        time.sleep(0.2)
    config = load(run_dir / "baton.yaml")
    return System(
        process=process,
        log=log,
        front_url=f"http://127.0.0.1:{port}",
        prefill_url=f"http://{config.workers.prefill[0]}",
        decode_url=f"http://{config.workers.decode[0]}",
    )


def assert_ends(system: System, before: list[psutil.Process], *, status: int) -> None:
    """It ends with this status and nothing of it is left."""
    assert system.process.wait(60) == status, system.output()
    assert psutil.wait_procs(before, timeout=1)[1] == []


def forget_prefixes(*worker_urls: str) -> None:
    """Empty the prefix caches of workers; blocks that still wait for their lease or their reader hold it up for a moment."""
    for url in worker_urls:
        request = urllib.request.Request(f"{url}/reset_prefix_cache", method="POST")
        deadline = time.monotonic() + 20.0
        while True:
            with urllib.request.urlopen(request, timeout=60) as reply:
                if json.load(reply)["success"]:
                    break
            assert time.monotonic() < deadline, f"{url} holds on to blocks: a handoff was not completed"
            time.sleep(0.1)
