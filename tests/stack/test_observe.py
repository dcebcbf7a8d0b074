"""What is told of a request's times and of its end is what its client saw and what the engine did, and costs no request."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any

import aiohttp
import psutil
import pytest
import pytest_asyncio
from aiohttp import web

from extproc.stack import filter_command
from tests.cases.sims import SimStack
from tests.stack.fake_worker import begun_until
from tests.stack.harness import Stack
from tests.stack.test_errors import PROMPT
from tests.stack.test_legs import post
from tests.stack.test_streams import connect, request_bytes, until
from workers.ready import free_ports
from workers.sim.faults import Fault
from workers.sim.main import SimOptions

MODEL = "sim-llama-70b"
POLICIES = [
    {"name": "watched", "match": {"headers": {"x-class": {"exact": "watched"}}}, "observe": {"sample": 1.0}},
    {"name": "asked", "match": {"headers": {"x-class": {"exact": "asked"}}}, "allow_overrides": ["observe"]},
    {"name": "whole", "match": {"headers": {"x-class": {"exact": "whole"}}}, "mode": "aggregate"},
    {"name": "full", "match": {"headers": {"x-class": {"exact": "full"}}}, "limits": {"max_in_flight": 1}},
    {"name": "default", "mode": "disaggregate", "dispatch": "immediate"},
]


class Observed(SimStack):
    """Engines that take their time, and a filter that watches what a policy wants watched."""

    async def __aenter__(self) -> Observed:
        await super().__aenter__()
        async with asyncio.timeout(20):
            while not (await self.health())["stream_watch"]["running"]:
                await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)  # the process has started; now it listens
        return self

    async def health(self) -> dict[str, Any]:
        return await self.json("/healthz")

    async def json(self, path: str) -> dict[str, Any]:
        async with aiohttp.ClientSession() as session, session.get(self.admin + path) as response:
            return dict(await response.json())

    async def envoy_metrics(self) -> dict[str, float]:
        async with aiohttp.ClientSession() as session, session.get(self.envoy_admin + "/stats/prometheus") as response:
            text = await response.text()
        lines = (line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in lines}

    async def settled(self) -> dict[str, float]:
        """The metrics, once every line of the log has come that is due."""
        async with asyncio.timeout(10):
            while True:
                if (await self.metrics())["baton_streams"] == 0 and (await self.health())["access_log"]["awaited"] == 0:
                    return await self.metrics()
                await asyncio.sleep(0.05)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def observed() -> AsyncIterator[Observed]:
    options = SimOptions(speed=0.5, handshake_s=0.0, mean_answer_tokens=0)
    settings: dict[str, Any] = {"observe": {"sample": 0.0}, "policies": POLICIES, "envoy": {"debug_headers": False}}
    async with Observed(prefill=1, decode=1, options=options, settings=settings) as stack:
        yield stack


def labels(name: str, policy: str = "default", mode: str = "disaggregate", model: str = MODEL, **more: str) -> str:
    """A sample as Baton's metrics name it."""
    found = {"mode": mode, "model": model, "policy": policy, **more}
    return name + "{" + ",".join(f'{key}="{found[key]}"' for key in sorted(found)) + "}"


async def ask(stack: Observed, tokens: int, usage: bool = True, **headers: str) -> tuple[float, list[float]]:
    """(time to the first byte of the body, times at which events came) as this client saw them."""
    body: dict[str, Any] = {
        "model": MODEL,
        "prompt": f"Say something. {os.urandom(8).hex()}",
        "stream": True,
        "max_tokens": tokens,
    }
    if usage:
        body["stream_options"] = {"include_usage": True}
    sent = time.perf_counter()
    came: list[float] = []
    async with stack.http.post("/v1/completions", json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        async for chunk, _ in response.content.iter_chunks():
            if chunk:
                came += [time.perf_counter()] * chunk.count(b"data: ")
    return came[0] - sent, came


def engine_time_per_token(stack: Observed) -> tuple[float, float]:
    """(requests, sum over them of the mean time between their tokens), as the decode engine keeps it."""
    counts, total = stack.decode[0].worker.metrics._histograms["request_time_per_output_token_seconds"].cumulated()
    return counts[-1][1], total


async def seen_by_a_client(stack: Observed, count: int, tokens: int, *headers: str) -> tuple[list[float], list[float]]:
    """TTFT of each of ``count`` requests, one after the other: as a client in its own process saw it, and as it is told."""
    arguments = (stack.base.rpartition(":")[2], str(count), str(tokens), MODEL, *headers)
    command = (sys.executable, "-m", "tests.stack.blunt_client", *arguments)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    out, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0
    client = {name: float(seconds) for name, seconds in (line.split() for line in out.decode().splitlines())}
    await stack.settled()
    told = {
        each["request_id"]: each["ttft_ms"] / 1e3 for each in (await stack.json("/debug/times"))["ended"] if each["ttft_ms"]
    }
    assert len(client) == count
    return list(client.values()), [told[name] for name in client]


def median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


async def test_ttft_is_what_the_client_saw_and_itl_what_the_engine_did(observed: Observed) -> None:
    await ask(observed, 5)  # everything is connected
    before, engine_before = await observed.settled(), engine_time_per_token(observed)
    client, told = await seen_by_a_client(observed, 5, 31)
    after, engine_after = await observed.settled(), engine_time_per_token(observed)

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    # The middle one: a machine that is busy with something else may wake a client late now and then.
    assert median(abs(one - other) for one, other in zip(client, told, strict=True)) < 0.005
    assert grown(labels("baton_client_ttft_seconds_count")) == 5
    assert grown(labels("baton_client_ttft_seconds_sum")) == pytest.approx(sum(told))
    itl_s = grown(labels("baton_client_mean_itl_seconds_sum")) / grown(labels("baton_client_mean_itl_seconds_count"))
    assert engine_after[0] - engine_before[0] == 5
    assert itl_s == pytest.approx((engine_after[1] - engine_before[1]) / 5, abs=0.001)
    assert itl_s > 0.015, "the engine takes its time, or this proves nothing"
    assert grown(labels("baton_client_requests_total", outcome="ok")) == 5
    shown = await observed.json("/debug/times")
    assert shown["ttft"]["samples"] >= 6
    assert shown["mean_itl"]["p50_s"] == pytest.approx(itl_s, rel=0.2)


async def test_envoys_own_statistics_say_the_same(observed: Observed) -> None:
    _, told = await seen_by_a_client(observed, 3, 11, "x-class: whole")
    count = 'envoy_baton_ttft_ms_count{model="sim-llama-70b",policy="whole",mode="aggregate"}'
    async with asyncio.timeout(15):  # Envoy merges its histograms every five seconds
        while (found := await observed.envoy_metrics()).get(count) != 3:
            await asyncio.sleep(0.2)
    mean_ms = found[count.replace("_count", "_sum")] / 3
    assert mean_ms / 1e3 == pytest.approx(sum(told) / 3, rel=0.1), "its histograms are right to a few percent"
    tokens = 'envoy_baton_completion_tokens{model="sim-llama-70b",policy="whole",mode="aggregate"}'
    assert found[tokens] == 33
    assert found['envoy_baton_requests{model="sim-llama-70b",policy="whole",mode="aggregate",code="200"}'] == 3


async def test_tokens_are_exact_where_the_answer_states_them(observed: Observed) -> None:
    before = await observed.settled()
    await ask(observed, 17)
    await ask(observed, 9, usage=False)
    after = await observed.settled()
    name = f'baton_tokens_total{{kind="completion",model="{MODEL}",tenant="-"}}'
    assert after[name] - before.get(name, 0) == 17
    count = labels("baton_client_mean_itl_seconds_count")
    assert after[count] - before.get(count, 0) == 1, "without its tokens, an answer has no mean"
    count = labels("baton_client_ttft_seconds_count")
    assert after[count] - before.get(count, 0) == 2


STRANGE = (
    b"data: 1",
    b"data: null",
    b'data: "x"',
    b"data: {",
    b'data: {"usage":{"completion_tokens":"7"}}',
    b'data: {"choices":[{"text":"\\"completion_tokens\\":99"}]}',
    b'data: {"usage":{"completion_tokens":99999999999999999999999}}',
    b"",
)


@pytest.mark.parametrize("event", STRANGE, ids=[event.decode()[:24] or "nothing" for event in STRANGE])
async def test_whatever_a_worker_streams_passes_and_envoy_lives(stack: Stack, event: bytes) -> None:
    async def strange(request: web.Request, _: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(event + b"\n\n")
        await asyncio.sleep(0.05)
        await response.write(b'data: {"choices":[],"usage":{"prompt_tokens": 3,"completion_tokens": 4}}\n\n')
        return response

    for worker in stack.decode:
        worker.answer = strange
    name = f"strange-{os.urandom(4).hex()}"
    body = b'{"model":"m","prompt":"a","stream":true,"stream_options":{"include_usage":true}}'
    status, answer, _ = await post(stack, "/v1/completions", body, **{"x-request-id": name})
    assert (status, answer[: len(event)]) == (200, event)
    async with asyncio.timeout(20), aiohttp.ClientSession() as session:
        while True:
            async with session.get(stack.admin + "/debug/times") as response:
                found = [each for each in (await response.json())["ended"] if each["request_id"] == name]
            if found:
                break
            await asyncio.sleep(0.1)
    assert (found[0]["outcome"], found[0]["prompt_tokens"], found[0]["completion_tokens"]) == ("ok", 3, 4)
    assert stack.envoy.poll() is None


async def watched(stack: Observed, many: int) -> list[dict[str, Any]]:
    async with asyncio.timeout(10):
        while len(found := (await stack.json("/debug/times"))["watched"]) < many:
            await asyncio.sleep(0.05)
    return list(found)


async def opened(stack: Observed) -> float:
    """Streams that Envoy opened to the process that watches."""
    return (await stack.envoy_metrics())['envoy_http_ext_proc_watch_streams_started{envoy_http_conn_manager_prefix="front"}']


async def test_a_watched_stream_tells_every_gap_and_no_other_stream_is_shown_to_anybody(observed: Observed) -> None:
    count, engine_before = await opened(observed), engine_time_per_token(observed)
    earlier = len((await observed.json("/debug/times"))["watched"])
    _, came = await ask(observed, 41, usage=False, **{"x-class": "watched", "x-request-id": "a-watched-one"})
    [newest, *_] = await watched(observed, earlier + 1)
    engine_after = engine_time_per_token(observed)
    assert newest["request_id"] == "a-watched-one"
    assert (newest["outcome"], newest["tokens"], newest["events"]) == ("whole", 41, 41)
    assert (newest["finish_reason"], newest["policy"]) == ("length", "watched")
    metrics = await observed.settled()
    mode = newest["mode"]
    gaps = metrics[labels("baton_client_itl_seconds_count", "watched", mode)]
    assert gaps == 40
    mean_s = metrics[labels("baton_client_itl_seconds_sum", "watched", mode)] / gaps
    assert mean_s == pytest.approx(engine_after[1] - engine_before[1], abs=0.001)
    seen = sorted(after - before for before, after in itertools.pairwise(came[:41]))
    assert newest["itl_p50_ms"] / 1e3 == pytest.approx(seen[len(seen) // 2], abs=0.005)
    assert newest["itl_max_ms"] >= newest["itl_p99_ms"] * 0.97 >= newest["itl_p50_ms"] * 0.94
    assert await opened(observed) == count + 1
    for _ in range(3):
        await ask(observed, 3)
    assert await opened(observed) == count + 1


async def test_a_client_may_ask_to_be_watched_only_where_the_policy_lets_it(observed: Observed) -> None:
    count = await opened(observed)
    await ask(observed, 3, **{"x-baton-observe": "true"})
    assert await opened(observed) == count
    await ask(observed, 3, **{"x-class": "asked", "x-baton-observe": "true"})
    assert await opened(observed) == count + 1


async def test_a_refused_request_has_a_line_and_bounded_labels(observed: Observed) -> None:
    before = await observed.settled()
    body = b'{"model":"a name of the client\'s choosing","prompt":"a","stream":true}'
    assert (await post(observed, "/v1/completions", body))[0] == 404
    prompt = b'{"model":"sim-llama-70b","prompt":"a","max_tokens":40,"stream":true}'
    first = asyncio.create_task(post(observed, "/v1/completions", prompt, **{"x-class": "full"}))
    await until(lambda: observed.decode[0].worker.engine.state()["running"] or first.done())
    assert (await post(observed, "/v1/completions", prompt, **{"x-class": "full"}))[0] == 429
    assert (await first)[0] == 200
    after = await observed.settled()

    def grown(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    assert grown(labels("baton_client_requests_total", mode="none", model="other", outcome="refused")) == 1
    assert grown(labels("baton_client_requests_total", "full", mode="none", outcome="refused")) == 1
    everything = (await observed.envoy_metrics()).keys() | after.keys()
    assert not [name for name in everything if "choosing" in name]
    tags = {match[1] for name in everything if (match := re.search(r'policy="([^"]*)"', name))}
    assert tags <= {"watched", "asked", "whole", "full", "default", "other", "-", ""}


async def test_a_client_that_leaves_mid_stream_is_told_from_a_worker_that_does(observed: Observed) -> None:
    before = await observed.settled()
    body = json.dumps({"model": MODEL, "prompt": "a", "stream": True, "max_tokens": 400}).encode()
    reader, writer = await connect(observed)
    writer.write(request_bytes(body))
    await reader.readuntil(b"data: {")
    writer.close()
    await until(lambda: not observed.decode[0].worker.engine.state()["running"])
    observed.decode[0].worker.faults.add(Fault(kind="reset", phase="decode", count=1, after_chunks=3), time.monotonic())
    with pytest.raises(aiohttp.ClientError):
        await ask(observed, 20)
    after = await observed.settled()
    for outcome in ("client_gone", "upstream_reset"):
        name = labels("baton_client_requests_total", outcome=outcome)
        assert after[name] - before.get(name, 0) == 1, outcome
    [reset, gone, *_] = (await observed.json("/debug/times"))["ended"]
    assert (gone["flags"], gone["outcome"], reset["outcome"]) == ("DC", "client_gone", "upstream_reset")
    assert gone["worker"] == reset["worker"] == observed.decode[0].address
    generation = labels("baton_client_generation_seconds_count")
    assert after.get(generation) == before.get(generation), "an answer that was cut has no time of generation"


async def test_a_watched_stream_that_is_cut_is_told_as_one(observed: Observed) -> None:
    earlier = len((await observed.json("/debug/times"))["watched"])
    body = json.dumps({"model": MODEL, "prompt": "a", "stream": True, "max_tokens": 400}).encode()
    reader, writer = await connect(observed)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-class: watched\r\ncontent-type: application/json\r\n"
    writer.write(head + f"content-length: {len(body)}\r\n\r\n".encode() + body)
    for _ in range(5):
        await reader.readuntil(b"data: {")
    writer.close()
    [newest, *_] = await watched(observed, earlier + 1)
    assert newest["outcome"] == "cut"
    assert newest["events"] >= 4


async def test_the_end_of_the_process_that_watches_ends_no_stream_and_it_comes_back(observed: Observed) -> None:
    stream = asyncio.create_task(ask(observed, 60, **{"x-class": "watched"}))
    await asyncio.sleep(0.4)
    [process] = [
        child
        for pid in observed.filter.pids()
        for child in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        if "extproc.observe.stream_watch" in child.cmdline()
    ][:1]
    process.kill()
    _, came = await stream
    assert len(came) == 62, "the client got every token, the counts and the end"
    async with asyncio.timeout(15):
        while not (health := await observed.health())["stream_watch"]["running"]:
            await ask(observed, 2, **{"x-class": "watched"})
    assert health["stream_watch"]["restarts"] == 1, [
        line for line in observed.log_lines() if line["event"] == "stream_watch_ended"
    ]
    assert health["ready"]


async def test_without_the_access_log_requests_go_on_and_the_filter_says_what_is_missing() -> None:
    async with Stack(settings={"envoy": {"access_log": False}}) as stack:
        status, _, _ = await post(stack, "/v1/completions", PROMPT)
        assert status == 200
        async with aiohttp.ClientSession() as session, session.get(stack.admin + "/healthz") as response:
            said = (await response.json())["access_log"]
        assert said["state"] == "off"
        assert "TTFT" in said["without_it"]


async def test_prometheus_reaches_envoys_statistics_and_nothing_else_of_its_admin_port() -> None:
    [port] = free_ports(1)
    async with Stack(settings={"envoy": {"stats_listen": f"127.0.0.1:{port}"}}) as stack:
        assert (await post(stack, "/v1/completions", PROMPT))[0] == 200
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
            async with session.get("/stats/prometheus?usedonly") as response:
                assert response.status == 200
                assert "envoy_baton_requests{" in await response.text()
            for method, path in (
                ("GET", "/stats"),
                ("GET", "/config_dump"),
                ("POST", "/quitquitquit"),
                ("POST", "/stats/prometheus"),
            ):
                async with session.request(method, path) as response:
                    assert response.status == 404, path
        assert stack.envoy.poll() is None


async def hang(request: web.Request, _: bytes) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    await response.write(b"data: x\n\n")
    await asyncio.sleep(60)
    return response


async def test_a_killed_envoy_takes_its_lines_with_it_and_they_are_counted() -> None:
    async with Stack(settings={"drain": {"delay_s": 0, "timeout_s": 1.0}}) as stack:
        assert (await post(stack, "/v1/completions", PROMPT))[0] == 200
        async with asyncio.timeout(20):
            while (await stack.metrics())["baton_access_log_lines_total"] < 1:
                await asyncio.sleep(0.05)
        for worker in stack.decode:
            worker.answer = hang
        task = asyncio.create_task(post(stack, "/v1/completions", PROMPT))
        await until(lambda: stack.decode_received[1:])
        for pid in stack.envoy.pids():
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(aiohttp.ClientError):
            await task
        async with asyncio.timeout(20):
            while not (metrics := await stack.metrics())["baton_access_log_lost_total"]:
                await asyncio.sleep(0.2)
        assert metrics["baton_access_log_lost_total"] == 1
        assert metrics["baton_access_log_streams"] == 0
        assert metrics["baton_streams"] == 0


async def test_a_filter_that_comes_back_gets_the_lines_of_what_it_serves_then() -> None:
    async with Stack() as stack:
        assert (await post(stack, "/v1/completions", PROMPT))[0] == 200
        async with asyncio.timeout(20):
            while (await stack.metrics())["baton_access_log_lines_total"] < 1:
                await asyncio.sleep(0.05)
        for pid in stack.filter.pids():
            os.kill(pid, signal.SIGKILL)
        await asyncio.to_thread(stack.filter.stop)
        stack.filter = stack._child(stack._parts, "filter-again", *filter_command(stack.directory / "baton.yaml"))
        await stack._wait(stack.filter, f"{stack.admin}/healthz", (200,))
        async with asyncio.timeout(20):
            while (await post(stack, "/v1/completions", PROMPT))[0] != 200:
                await asyncio.sleep(0.1)
        async with asyncio.timeout(10):
            while not (metrics := await stack.metrics()).get(labels("baton_client_requests_total", model="m", outcome="ok")):
                await asyncio.sleep(0.05)
        assert metrics["baton_access_log_streams"] == 1
        assert metrics["baton_access_log_lost_total"] == 0


async def test_a_filter_that_drains_hears_of_its_last_requests() -> None:
    gate = asyncio.Event()
    async with Stack(settings={"drain": {"delay_s": 0.2, "timeout_s": 10.0}}) as stack:
        assert (await post(stack, "/v1/completions", PROMPT))[0] == 200
        async with asyncio.timeout(20):
            while (await stack.metrics())["baton_access_log_lines_total"] < 1:
                await asyncio.sleep(0.05)
        stack.reset()
        for worker in stack.decode:
            worker.answer = begun_until(gate)
        task = asyncio.create_task(post(stack, "/v1/completions", PROMPT))
        await until(lambda: stack.decode_received)
        stack.signal_filter(signal.SIGTERM)
        await asyncio.sleep(0.5)
        gate.set()
        assert (await task)[0] == 200
        ended = time.monotonic()
        assert await until(lambda: stack.filter.poll() is not None, 15) - ended < 5
        [line] = await stack.logged("access_log_closed")
        assert (line["lines"], line["lost"]) == (2, 0)
