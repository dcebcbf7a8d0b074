"""`/live` and `baton top` show what `/metrics` counts and what the engines do, and nothing of what clients say."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import pytest
import pytest_asyncio

from extproc.live_document import Live, WorkerNow
from tests.cases.sims import SimStack
from workers.sim.main import SimOptions

MODEL = "sim-llama-70b"
SECRET = "zebra"


@pytest_asyncio.fixture(loop_scope="session")
async def live() -> AsyncIterator[SimStack]:
    options = SimOptions(speed=1.0, handshake_s=0.0, mean_answer_tokens=0)
    settings: dict[str, Any] = {
        "policies": [{"name": "default", "mode": "disaggregate", "slo": {"ttft_s": 2.0, "itl_s": 0.05}}],
        "scrape": {"interval_s": 0.2},
    }
    async with SimStack(prefill=2, decode=2, options=options, settings=settings) as stack:
        yield stack


async def ask(stack: SimStack, number: int, tokens: int) -> str:
    body: dict[str, Any] = {"model": MODEL, "prompt": f"{SECRET} {number} " * 40, "stream": True, "max_tokens": tokens}
    body["stream_options"] = {"include_usage": True}  # or Envoy does not know how many tokens there were
    async with stack.http.post("/v1/completions", json=body) as response:
        text = await response.text()
        assert response.status == 200, text
        return text


async def look(stack: SimStack) -> Live:
    """A document that was made after this was called."""
    await asyncio.sleep(0.6)
    async with aiohttp.ClientSession() as session, session.get(stack.admin + "/live") as response:
        return msgspec.json.decode(await response.read(), type=Live)


async def top(stack: SimStack, *options: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "extproc",
        "top",
        "--admin",
        stack.admin,
        *options,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(60):
        out, err = await process.communicate()
    return process.returncode or 0, out.decode(), err.decode()


def of(found: Live, address: str) -> WorkerNow:
    return next(each for each in found.workers if each.address == address)


def sample(metrics: dict[str, float], name: str, **labels: str) -> float:
    """The samples of that name and those labels, added up."""
    return sum(
        value
        for key, value in metrics.items()
        if key.partition("{")[0] == name and all(f'{label}="{wanted}"' in key for label, wanted in labels.items())
    )


async def test_handoffs_of_every_pair_are_those_that_the_metrics_count(live: SimStack) -> None:
    answers = await asyncio.gather(*(ask(live, number, 4) for number in range(24)))
    await asyncio.sleep(1.1)  # the second in which the last one came is over
    found, metrics = await look(live), await live.metrics()
    assert len(answers) == 24
    assert sum(each.count for each in found.pairs) == 24
    for pair in found.pairs:
        assert pair.count == sample(metrics, "baton_handoffs_total", prefill=pair.prefill, decode=pair.decode)
    assert round(found.rates.handoffs_per_s * found.window_s) == 24
    assert round(found.rates.requests_per_s * found.window_s) == 24
    assert (found.rates.errors_per_s, found.rates.refused_per_s, found.rates.whole_per_s) == (0, 0, 0)
    assert found.times.ttft is not None and found.times.itl is not None
    assert found.times.ttft.samples == 24, "as Envoy's access log says"
    assert 0 < (found.times.itl.p50_s or 0) < 0.2
    assert [each.policy for each in found.targets] == ["default"]


async def test_while_streams_are_open_every_worker_has_what_the_metrics_and_the_engine_say(live: SimStack) -> None:
    streams = [asyncio.create_task(ask(live, number, 400)) for number in range(6)]
    try:
        async with asyncio.timeout(30):
            while sum(each.decode_requests for each in (await look(live)).workers) < 6:
                pass
            while sum(each.running or 0 for each in (await look(live)).workers) < 6:
                pass
        found, metrics = await look(live), await live.metrics()
        for sim in live.decode:
            worker = of(found, sim.address)
            assert worker.decode_requests == sample(metrics, "baton_endpoint_in_flight", role="decode", endpoint=sim.address)
            assert worker.decode_tokens == sample(metrics, "baton_endpoint_tokens", role="decode", endpoint=sim.address)
            assert worker.running == worker.decode_requests
            assert worker.kv_usage is not None and worker.kv_usage > 0
            assert worker.report_age_s is not None and worker.report_age_s < 5
            assert worker.other_requests == 0, "all of them are ours"
        status, frame, _ = await top(live, "--once")
        assert status == 0
        for sim in live.decode:
            line = next(each for each in frame.splitlines() if each.startswith("decode") and sim.address in each)
            requests = int(re.search(r"(\d+) req", line)[1])  # type: ignore[index]
            assert requests == of(found, sim.address).decode_requests
    finally:
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)


async def test_nothing_of_a_prompt_or_an_answer_can_be_seen(live: SimStack) -> None:
    answer = await ask(live, 1, 40)
    words = {each for line in answer.splitlines() if line.startswith("data: {") for each in _words(line)}
    assert len(words) > 5
    shown = (await top(live, "--once"))[1] + (await top(live, "--json"))[1]
    async with aiohttp.ClientSession() as session:
        for path in ("/live", "/", "/page.js", "/debug/decisions", "/metrics", "/healthz"):
            async with session.get(live.admin + path) as response:
                shown += await response.text()
    assert SECRET not in shown
    assert [each for each in words if len(each) > 4 and re.search(rf"\b{re.escape(each)}\b", shown)] == []
    assert len((await look(live)).decisions) == 1, "the decision itself is there"


def _words(line: str) -> list[str]:
    choices = json.loads(line.removeprefix("data: "))["choices"]  # the last chunk has the usage alone
    return [word for choice in choices for word in choice["text"].split()]


async def test_a_worker_that_dies_and_a_filter_that_ends_are_said(live: SimStack) -> None:
    await ask(live, 1, 4)
    dead = live.decode[0]
    await dead.worker.stop()
    async with asyncio.timeout(20):
        while of(await look(live), dead.address).state != "down":
            pass
    status, frame, _ = await top(live, "--once")
    line = next(each for each in frame.splitlines() if dead.address in each and each.startswith("decode"))
    assert status == 0
    assert "down" in line
    await asyncio.to_thread(live.filter.stop)
    status, frame, complaint = await top(live, "--once")
    assert (status, frame) == (1, "")
    assert f"{live.admin}: the admin port of the filter cannot be asked" in complaint


@pytest.mark.parametrize("path", ["/live", "/"])
async def test_many_viewers_at_once_are_all_answered(live: SimStack, path: str) -> None:
    async def view(session: aiohttp.ClientSession) -> int:
        async with session.get(live.admin + path) as response:
            await response.read()
            return response.status

    async with aiohttp.ClientSession() as session:
        assert set(await asyncio.gather(*(view(session) for _ in range(200)))) == {200}
