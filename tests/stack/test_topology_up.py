"""compose.yaml brought up as processes: the same commands, environments, health checks and order, and a chat request served."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import pytest_asyncio

from workers.process import Child

ROOT = Path(__file__).parents[2]
PROMPT = "The river under the bridge carries seven old ships. " * 200


class Topology:
    """``baton up --topology`` as a process, and where its services are."""

    def __init__(self, child: Child, run_dir: Path) -> None:
        self.child = child
        self.run_dir = run_dir

    @property
    def output(self) -> str:
        return self.child.log.read_text()

    def url(self, service: str) -> str:
        found = re.search(rf"^{service}: (http://\S+) ", self.output, re.MULTILINE)
        assert found is not None, self.output
        return found[1]

    async def until_up(self, timeout_s: float) -> None:
        async with asyncio.timeout(timeout_s):
            while "\nUp. Ctrl-C ends it all." not in self.output:
                assert self.child.poll() is None, self.output
                await asyncio.sleep(0.1)

    def requests(self) -> list[dict[str, Any]]:
        """The filter's log lines about requests."""
        lines = (self.run_dir / "filter.log").read_text().splitlines()
        return [entry for entry in (json.loads(line) for line in lines if line.startswith("{")) if "request_id" in entry]


@contextmanager
def topology(run_dir: Path, *arguments: str, file: Path = ROOT / "compose.yaml") -> Iterator[Topology]:
    argv = [sys.executable, "-m", "extproc", "up", "--topology", str(file), "--run-dir", str(run_dir), *arguments]
    run_dir.mkdir(parents=True, exist_ok=True)
    with Child("topology", argv, log=run_dir / "output", grace_s=60) as child:
        yield Topology(child, run_dir)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Topology]:
    with topology(tmp_path_factory.mktemp("topology"), "--profile", "sim", "--scale", "decode-sim=2") as found:
        await found.until_up(90)
        yield found
        await asyncio.to_thread(found.child.stop)


async def chat(url: str, model: str, prompt: str, max_tokens: int = 8) -> dict[str, Any]:
    """The answer to a prompt that is handed over, however short."""
    body = {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens, "temperature": 0}
    timeout = aiohttp.ClientTimeout(total=90)
    headers = {"x-baton-mode": "disaggregate"}
    async with (
        aiohttp.ClientSession(timeout=timeout, headers=headers) as http,
        http.post(f"{url}/v1/chat/completions", json=body) as response,
    ):
        answer = await response.json()
        assert response.status == 200, answer
        return dict(answer)


async def test_a_chat_request_is_prefilled_by_a_prefill_worker_and_answered_by_a_decode_worker(running: Topology) -> None:
    answer = await chat(running.url("envoy"), "sim", PROMPT)
    assert answer["choices"][0]["message"]["content"]
    async with asyncio.timeout(10):
        while not (requests := [entry for entry in running.requests() if entry.get("prefill")]):
            await asyncio.sleep(0.1)
    address = running.url("envoy").split("/")[2].split(":")[0].rpartition(".")[0]
    assert re.fullmatch(rf"{re.escape(address)}\.\d+:8100", requests[-1]["prefill"]), requests[-1]
    assert re.fullmatch(rf"{re.escape(address)}\.\d+:8100", requests[-1]["decode"]), requests[-1]
    assert requests[-1]["prefill"] != requests[-1]["decode"]


async def test_the_filter_finds_as_many_workers_as_there_are_by_their_names(running: Topology) -> None:
    async with aiohttp.ClientSession() as http, http.get(f"{running.url('filter')}/healthz") as response:
        status = await response.json()
    assert response.status == 200
    assert len(status["live"]["prefill"]) == 1
    assert len(status["live"]["decode"]) == 2, "not every instance of decode-sim was found"


def test_each_began_after_what_it_needs_was_ready_and_grafana_is_named_as_left_out(running: Topology) -> None:
    said = running.output
    assert "left out: grafana (Grafana is not run as a process)" in said
    order = ["prefill-sim is ready", "starting filter,", "filter is ready", "starting envoy,", "envoy is ready"]
    places = [said.index(words) for words in order]
    assert places == sorted(places)
    assert said.index("decode-sim-2 is ready") < said.index("starting filter,")
    assert said.index("envoy-config is done") < said.index("starting envoy,")


async def test_what_it_began_ends_with_it(running: Topology) -> None:
    guards = psutil.Process(running.child.pids()[0]).children(recursive=True)
    assert len(guards) > 10
    await asyncio.to_thread(running.child.begin_stop)
    async with asyncio.timeout(60):
        while running.child.poll() is None:
            await asyncio.sleep(0.1)
    assert running.child.poll() == 0, running.output
    assert not [process for process in guards if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


# --- what cannot be run -----------------------------------------------------------------------------------------------

BROKEN = """
services:
  first:
    image: anything:1
    entrypoint: [{program}]
    command: {command}
    healthcheck: {{test: [CMD, "false"], interval: 1s, retries: 1, start_interval: 1s}}
  second:
    image: anything:1
    entrypoint: [sleep, "60"]
    depends_on:
      first: {{condition: {condition}}}
    profiles: [all]
"""


@pytest.mark.parametrize(
    ("program", "command", "condition", "said"),
    [
        ("no-such-program", "[]", "service_started", "services.first: the program no-such-program is not installed here"),
        ("sleep", '["60"]', "service_healthy", "first is unhealthy: /"),
        ("bash", '[-c, "exit 3"]', "service_completed_successfully", "first ended with exit status 3"),
    ],
)
async def test_what_does_not_come_up_ends_all_of_it_and_says_which_and_why(
    tmp_path: Path, program: str, command: str, condition: str, said: str
) -> None:
    file = tmp_path / "compose.yaml"
    file.write_text(BROKEN.format(program=program, command=command, condition=condition))
    with topology(tmp_path / "run", "--profile", "all", file=file) as found:
        async with asyncio.timeout(30):
            while found.child.poll() is None:
                await asyncio.sleep(0.1)
        assert found.child.poll() == 1, found.output
        assert f"baton up: {said}" in found.output
        assert "starting second" not in found.output or condition == "service_started"
