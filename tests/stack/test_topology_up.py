"""compose.yaml brought up as processes: the same commands, environments, health checks and order, and a chat request served."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import psutil
import pytest
import pytest_asyncio

from tests.stack.topology import Topology, chat, topology

PROMPT = "The river under the bridge carries seven old ships. " * 200


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Topology]:
    with topology(
        tmp_path_factory.mktemp("topology"), "--profile", "sim", "--scale", "decode-sim=2", env={"SIM_MODEL": "sim"}
    ) as found:
        await found.until_up(90)
        yield found
        await asyncio.to_thread(found.child.stop)


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


async def test_at_the_end_an_open_answer_is_finished_first_and_then_nothing_is_left(running: Topology) -> None:
    guards = psutil.Process(running.child.pids()[0]).children(recursive=True)
    assert len(guards) > 10
    question = {"model": "sim", "prompt": "A river, a bridge.", "max_tokens": 150, "ignore_eos": True, "stream": True}
    front = running.url("envoy")
    async with aiohttp.ClientSession() as http, http.post(f"{front}/v1/completions", json=question) as response:
        assert response.status == 200
        first = await response.content.readline()
        assert first.startswith(b"data: ")
        await asyncio.to_thread(running.child.begin_stop)
        rest = await response.content.read()
    assert rest.rstrip().endswith(b"data: [DONE]"), "the answer was cut"
    async with asyncio.timeout(60):
        while running.child.poll() is None:
            await asyncio.sleep(0.1)
    assert running.child.poll() == 0, running.output
    assert "0 requests are open" in (running.run_dir / "envoy.pre_stop-0.log").read_text()
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
