"""`baton bench` against servers that do what servers do: it waits for nobody, and every bad end is counted and named."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from typer.testing import CliRunner

from extproc import cli, pictures
from extproc.loadgen import bench, report
from extproc.loadgen.account import Report
from extproc.loadgen.arrivals import parse_gaps
from extproc.loadgen.errors import BenchError
from extproc.loadgen.headers import parse_drawn
from extproc.loadgen.run import Plan, Runner
from extproc.loadgen.sample import Sample
from extproc.loadgen.target import Target
from extproc.plan import lengths
from extproc.plan.workload import Workload
from tests.certificates import Authority
from workers.traces import Request

Answer = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]
WORKLOAD = Workload(inputs=lengths.parse("20", ""), outputs=lengths.parse("4", ""))


class Server:
    """Answers as it is told, and knows what it was asked."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.app = web.Application()
        self.app.router.add_get("/v1/models", self._models)
        self.app.router.add_post("/v1/{path:.*}", self._take)

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "the-model"}]})

    async def _take(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if not body.get("stream"):  # asked how it counts: two tokens a word, five around
            text = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
            return web.json_response({"usage": {"prompt_tokens": 2 * len(text.split()) + 5, "completion_tokens": 1}})
        self.asked.append(body)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        return await self._answer(request, body)


async def stream(request: web.Request, *events: str, end: str = "data: [DONE]\n\n") -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream", "x-worker": "w1"})
    await response.prepare(request)
    for event in events:
        await response.write(f"data: {event}\n\n".encode())
    if end:
        await response.write(end.encode())
    return response


def texts(count: int) -> list[str]:
    usage = {"prompt_tokens": 20, "completion_tokens": count}
    return [
        *[json.dumps({"choices": [{"text": "a", "delta": {"content": "a"}}]})] * count,
        json.dumps({"choices": [], "usage": usage}),
    ]


async def good(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return await stream(request, *texts(body["max_tokens"]))


@asynccontextmanager
async def serving(answer: Answer, tls: ssl.SSLContext | None = None) -> AsyncIterator[tuple[Server, str]]:
    server = Server(answer)
    runner = web.AppRunner(server.app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
    await site.start()
    try:
        yield server, f"http{'s' if tls else ''}://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def options(base: str, count: int, **more: Any) -> bench.Options:
    load = bench.Load(gaps=parse_gaps("constant"), rate_per_s=200, limit=count, workload=WORKLOAD)
    return replace(bench.Options(target=Target(base=base), load=load, model="m", tokens_per_word=1.0), **more)


async def found(answer: Answer, count: int = 1, **more: Any) -> tuple[Report, list[Sample], Server]:
    async with serving(answer) as (server, base):
        return *(await bench.run(options(base, count, **more))), server


async def test_it_sends_whether_or_not_anything_was_answered() -> None:
    all_there = asyncio.Event()
    count = 150  # more than any pool of connections has by default

    async def after_all(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if len(server.asked) == count:
            all_there.set()
        await all_there.wait()
        return await good(request, body)

    async with serving(after_all) as (server, base):
        done, _ = await bench.run(options(base, count, timeout_s=30))
    assert (done.all.served, done.peak_in_flight) == (count, count)


async def test_the_wait_for_a_late_send_is_part_of_the_time_to_the_first_token() -> None:
    """A request that was due before the run began: whoever asked then has waited since."""
    async with serving(good) as (_, base), Target(base=base).session(timeout_s=9) as http:
        requests = [Request(at_s, 20, 2, (1,)) for at_s in (-0.5, 0.0)]
        body = json.dumps({"max_tokens": 2, "stream": True}).encode()
        plan = Plan(url=f"{base}/v1/completions", requests=requests, body=lambda _: body, headers={}, drawn=[{}, {}])
        done = await Runner(plan).run(http)
    late = done.samples[0]
    assert late.sent_s is not None and late.ttft_s is not None
    assert late.sent_s - late.due_s > 0.3 and late.ttft_s > 0.3
    assert done.own.send_late_max_s > 0.3 and done.own.warnings


async def test_tokens_headers_and_the_key_are_those_that_were_asked_for() -> None:
    async with serving(good) as (server, base):
        asked = options(
            base,
            30,
            headers={"x-baton-policy": "fast"},
            drawn=[parse_drawn("x-tenant=a,b")],
            answer_header="x-worker",
            target=Target(base=base, key={"authorization": "Bearer geheim"}),
        )
        done, samples = await bench.run(asked)
    assert (done.all.served, done.tokens.output, done.tokens.prompt) == (30, 120, 600)
    assert all(each["authorization"] == "Bearer geheim" and each["x-baton-policy"] == "fast" for each in server.headers)
    for value, some in done.groups["x-tenant"].items():
        assert some.requests == sum(each["x-tenant"] == value for each in server.headers) > 0
    assert done.groups["x-worker"]["w1"].requests == 30
    assert "geheim" not in repr(asked) + repr(done) + repr(samples)


async def test_the_engine_is_asked_how_it_counts_before_prompts_are_made() -> None:
    said: list[str] = []
    async with serving(good) as (server, base):
        load = bench.Load(
            gaps=parse_gaps("constant"),
            rate_per_s=200,
            limit=3,
            workload=Workload(inputs=lengths.parse("1000", ""), outputs=lengths.parse("4", "")),
        )
        await bench.run(options(base, 3, model=None, tokens_per_word=None, load=load, api="completions"), say=said.append)
    assert said[0] == "two requests asked how the-model counts: 2.00 tokens a word, 5 around a prompt"
    assert {asked["model"] for asked in server.asked} == {"the-model"}
    assert all(2 * len(asked["prompt"].split()) + 5 == pytest.approx(1_000, abs=4) for asked in server.asked)


async def test_a_certificate_is_believed_only_if_its_authority_is(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with serving(good, authority.issue("bench", ["127.0.0.1"]).server()) as (server, base):
        for trusted in (Target(base=base, ca_file=authority.ca), Target(base=base, verify=False)):
            done, _ = await bench.run(options(base, 2, target=trusted))
            assert done.all.served == 2, done.failures
        done, _ = await bench.run(options(base, 2))
        assert [(each.kind, each.code) for each in done.failures] == [("connection", "ClientConnectorCertificateError")]
        with pytest.raises(BenchError, match="certificate"):
            await bench.run(options(base, 2, model=None))
        with pytest.raises(BenchError, match="absent"):
            await bench.run(options(base, 2, target=Target(base=base, ca_file=tmp_path / "absent.pem")))
    assert len(server.asked) == 4


async def _status(_: web.Request, __: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"error": {"message": "no", "code": "bad"}}, status=400)


async def _full(_: web.Request, __: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"error": {"message": "no", "code": "full"}}, status=429)


async def _cut(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
    return await stream(request, texts(1)[0], end="")


async def _reset(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
    response = await stream(request, texts(1)[0], end="")
    assert request.transport is not None
    request.transport.abort()
    return response


async def _gone(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def _empty(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
    return await stream(request)


async def _inside(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
    return await stream(request, texts(1)[0], json.dumps({"error": {"message": "no", "code": 500}}))


async def _never(_: web.Request, __: dict[str, Any]) -> web.StreamResponse:
    await asyncio.sleep(60)
    return web.Response()


async def _elsewhere(_: web.Request, __: dict[str, Any]) -> web.StreamResponse:
    return web.Response(status=307, headers={"location": "http://127.0.0.1:9/"})


@pytest.mark.parametrize(
    ("answer", "kind", "status", "code"),
    [
        (_status, "error", 400, "bad"),
        (_full, "refused", 429, "full"),
        (_elsewhere, "error", 307, ""),  # a key must not follow it
        (_cut, "broken", 200, "cut"),
        (_reset, "broken", 200, "ClientPayloadError"),
        (_inside, "broken", 200, "500"),
        (_empty, "broken", 200, "empty"),
        (_gone, "connection", None, "ServerDisconnectedError"),
        (_never, "timeout", None, "timeout"),
    ],
)
async def test_every_bad_end_has_a_name_and_none_is_good(answer: Answer, kind: str, status: int | None, code: str) -> None:
    done, _, _ = await found(answer, 2, timeout_s=0.5 if answer is _never else 20)
    (failure,) = done.failures
    assert (failure.kind, failure.status, failure.code, failure.count) == (kind, status, code, 2)
    assert (done.all.served, done.all.good) == (0, 0)


async def test_nobody_there_is_a_failure_of_every_request() -> None:
    done, _ = await bench.run(options("http://127.0.0.1:1", 3))
    assert [(each.kind, each.count) for each in done.failures] == [("connection", 3)]


async def test_what_may_not_be_sent_counts_as_failed_and_is_not_sent() -> None:
    left = asyncio.Event()

    async def slow(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await left.wait()
        return await good(request, body)

    async with serving(slow) as (server, base):
        at_once = bench.Load(gaps=parse_gaps("constant"), rate_per_s=1e6, limit=10, workload=WORKLOAD)
        running = asyncio.create_task(bench.run(options(base, 10, max_in_flight=4, load=at_once)))
        async with asyncio.timeout(20):
            while len(server.asked) < 4:
                await asyncio.sleep(0.01)
        left.set()
        done, _ = await running
    assert (len(server.asked), done.all.requests, done.all.served) == (4, 10, 4)
    assert [(each.kind, each.code, each.count) for each in done.failures] == [("unsent", "max-in-flight", 6)]


async def test_an_interrupted_run_reports_what_there_is() -> None:
    async with serving(_never) as (server, base), Target(base=base).session(timeout_s=60) as http:
        requests = [Request(0.01 * n if n < 5 else 1e6, 20, 2, (1,)) for n in range(9)]
        plan = Plan(
            url=f"{base}/v1/completions", requests=requests, body=lambda _: b'{"stream": 1}', headers={}, drawn=[{}] * 9
        )
        runner = Runner(plan)
        running = asyncio.create_task(runner.run(http))
        async with asyncio.timeout(20):
            while len(server.asked) < 5:
                await asyncio.sleep(0.01)
        runner.interrupt()
        done = await running
    assert done.interrupted
    assert [sample.kind.value for sample in done.samples] == ["cancelled"] * 5


@contextmanager
def beside(answer: Answer) -> Iterator[tuple[Server, str]]:
    """The server in a thread of its own, for the command."""
    ready, loop = threading.Event(), asyncio.new_event_loop()
    there: list[tuple[Server, str]] = []
    stop = asyncio.Event()

    async def main() -> None:
        async with serving(answer) as (server, base):
            there.append((server, base))
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
    thread.start()
    ready.wait(20)
    try:
        yield there[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(20)
        loop.close()


def command(*arguments: object) -> Any:
    return CliRunner().invoke(cli.app, ["bench", *map(str, arguments)])


def test_the_command_says_by_its_status_how_it_went(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_KEY", "geheim")
    count = 0

    async def every_fifth_fails(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        nonlocal count
        count += 1
        return await (_full if count % 5 == 0 else good)(request, body)

    with beside(every_fifth_fails) as (server, base):
        few = (base, "--rate", 200, "--requests", 10, "--isl", 20, "--osl", 4)
        save, svg = tmp_path / "requests.jsonl", tmp_path / "run.svg"
        failed = command(*few, "--json", "--api-key-env", "THE_KEY", "--save", save, "--picture", svg)
        assert failed.exit_code == 3 and "2 of 10 requests were not served" in failed.stderr
        document = json.loads(failed.stdout)
        assert (document["all"]["served"], document["tokens"]["output"], document["model"]) == (8, 32, "the-model")
        assert [each["code"] for each in document["failures"]] == ["full"]
        lines = [json.loads(line) for line in save.read_text().splitlines()]
        assert len(lines) == 10 and sum(line["kind"] == "served" for line in lines) == 8
        assert svg.read_text().startswith("<?xml")
        assert server.headers[0]["authorization"] == "Bearer geheim"
        assert "geheim" not in failed.stdout + failed.stderr + save.read_text() + svg.read_text()
        assert command(*few, "--max-failed", 0.2).exit_code == 0
        missed = command(*few, "--max-failed", 0.2, "--require-goodput", 0.9)
        assert missed.exit_code == 4 and "80.0% of the requests, 90.0% are wanted" in missed.stderr
        assert "goodput  80.0% of the requests" in missed.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["ftp://x"], "address ftp://x"),
        (["127.0.0.1:1"], "127.0.0.1:1/v1/models"),
        (["x", "--api", "images"], "api: 'images'"),
        (["x", "--rate", "0"], "rate: more than 0"),
        (["x", "--isl", "normal:5"], "--isl"),
        (["x", "--stages", "3"], "stages: '3'"),
        (["x", "--trace", "/nowhere/trace.jsonl"], "/nowhere/trace.jsonl"),
        (["x", "--picture", "run.gif"], "run.gif"),
        (["x", "--picture", "/nowhere/run.svg"], "/nowhere/run.svg: No such file or directory"),
        (["x", "--save", "/nowhere/run.jsonl"], "--save /nowhere/run.jsonl: there is no such folder"),
        (["x", "--api-key-env", "NO_SUCH_VARIABLE"], "NO_SUCH_VARIABLE"),
        (["x", "--header", "nothing"], "header"),
        (["x", "--body", "{"], "body"),
    ],
)
def test_what_cannot_begin_is_said_in_a_sentence(arguments: list[str], said: str) -> None:
    told = command(*arguments)
    assert told.exit_code == 1 and said in told.stderr and "Traceback" not in told.stderr


async def test_a_picture_of_the_same_run_is_the_same_bytes(tmp_path: Path) -> None:
    from extproc.loadgen.picture import draw

    done, samples, _ = await found(good, 20)
    for name in ("a.svg", "b.svg"):
        draw(tmp_path / name, done, samples)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    nothing, none, _ = await found(_status, 2)
    draw(tmp_path / "none.svg", nothing, none)  # nobody was served: an empty picture, not an error
    with pytest.raises(pictures.PictureError):
        draw(tmp_path / "a.gif", done, samples)


async def test_each_request_is_a_line_for_programs() -> None:
    _, samples, _ = await found(good, 2)
    first, second = map(json.loads, report.lines(samples))
    assert (first["kind"], first["output_tokens"], first["asked_output_tokens"], len(first["gaps_s"])) == ("served", 4, 4, 3)
    assert second["due_s"] == pytest.approx(1 / 200)
