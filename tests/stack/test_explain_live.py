"""`baton explain` with the real Envoy and filter: what it says is what then happens; a snapshot says the same."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest_asyncio

from tests.stack.harness import Stack
from tests.stack.test_legs import post

PATH = "/v1/completions"
TEXT = "a word that nobody may find again " * 300
LONG = json.dumps({"model": "m", "prompt": TEXT}).encode()
STREAMED = json.dumps({"model": "m", "prompt": TEXT, "stream": True}).encode()

POLICIES = [
    {"name": "told", "match": {"headers": {"x-tell": {"present": True}}}, "mode": "disaggregate", "explain": True},
    {"name": "alone", "match": {"headers": {"x-alone": {"present": True}}}, "mode": "aggregate", "explain": True},
    {"name": "turns", "mode": "disaggregate", "objective": "round-robin", "dispatch": "immediate"},
]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def told() -> AsyncIterator[Stack]:
    async with Stack(prefill=2, decode=2, settings={"policies": POLICIES}) as stack:
        yield stack


async def ask(stack: Stack, method: str, path: str, body: bytes | None = None) -> tuple[int, Any]:
    data = None if body is None else io.BytesIO(body)
    async with aiohttp.ClientSession() as session, session.request(method, stack.admin + path, data=data) as response:
        return response.status, await response.json()


async def baton(*argv: str | Path) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "extproc", "explain", *map(str, argv)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    shown, error = await process.communicate()
    return process.returncode or 0, shown.decode(), error.decode()


def parameters(header: str) -> dict[str, str]:
    mode, *rest = header.split(";")
    return {"mode": mode, **{name: value.strip('"') for name, _, value in (each.partition("=") for each in rest)}}


async def test_the_decision_comes_with_the_answer_where_the_policy_wants_it(told: Stack) -> None:
    for body in (LONG, STREAMED):
        for header, mode in (("x_tell", "disaggregate"), ("x_alone", "aggregate")):
            told.reset()
            status, answer, headers = await post(told, PATH, body, **{header.replace("_", "-"): "1"})
            assert status == 200
            assert answer.endswith(b"data: [DONE]\n\n") == (body is STREAMED)
            said = parameters(headers["x-baton-decision"])
            [served] = [worker for worker in told.decode if worker.received]
            assert (said["mode"], said["decode"]) == (mode, served.address)
            prefilled = [worker.address for worker in told.prefill if worker.received]
            assert prefilled == ([said["prefill"]] if mode == "disaggregate" else [])
            assert said["policy"] == ("told" if mode == "disaggregate" else "alone")
    _, _, headers = await post(told, PATH, LONG)
    assert "x-baton-decision" not in headers


async def test_what_is_explained_is_what_then_happens_and_a_snapshot_says_the_same(told: Stack, tmp_path: Path) -> None:
    request, config, then = tmp_path / "request.json", told.directory / "baton.yaml", tmp_path / "then.json"
    request.write_bytes(LONG)
    for headers in ({}, {"x-tell": "1"}, {"x-alone": "1"}):
        told.reset()
        options = [word for name, value in headers.items() for word in ("--header", f"{name}={value}")]
        code, _, error = await baton("--save-snapshot", then, "--admin", told.admin)
        assert (code, error.strip()) == (0, f"wrote {then}")
        code, live, _ = await baton(request, *options, "--admin", told.admin, "--json")
        assert code == 0
        code, stored, _ = await baton(request, *options, "--snapshot", then, "--config", config, "--json")
        assert code == 0
        first, second = (json.loads(text) for text in (live, stored))
        for report in (first, second):
            # Reports of the workers grow older between the two questions; nothing that is decided does.
            assert report["decision"]["outcome"] == "placed"
        chosen = [
            {key: report["decision"]["decision"][key] for key in ("prefill", "decode", "reason")} for report in (first, second)
        ]
        assert chosen[0] == chosen[1]
        assert [each["why"] for each in first["decision"]["candidates"]] == [
            each["why"] for each in second["decision"]["candidates"]
        ]
        assert not told.decode_received and not any(worker.received for worker in told.prefill), "nothing was sent"

        status, _, _ = await post(told, PATH, LONG, **headers)
        assert status == 200
        [served] = [worker for worker in told.decode if worker.received]
        assert chosen[0]["decode"] == served.address
        assert [worker.address for worker in told.prefill if worker.received] == [
            address for address in [chosen[0]["prefill"]] if address is not None
        ]


async def test_asking_takes_no_turn_and_counts_nothing(told: Stack) -> None:
    question = json.dumps({"path": PATH, "body": json.loads(LONG)}).encode()
    async with asyncio.timeout(20):  # the end of the last answer comes to the filter a moment after it came to the client
        while (before := await ask(told, "GET", "/debug/snapshot?index=1"))[1]["in_flight"]:
            await asyncio.sleep(0.02)
    answers = [await ask(told, "POST", "/debug/explain", question) for _ in range(4)]
    after = await ask(told, "GET", "/debug/snapshot?index=1")
    assert [status for status, _ in answers] == [200] * 4
    assert len({answer["decision"]["decision"]["decode"] for _, answer in answers}) == 1, "round robin did not go on"
    for key in ("turn", "in_flight", "queue", "sessions", "pairs", "random", "index"):
        assert before[1][key] == after[1][key]
    metrics = await told.metrics()
    assert not [name for name in metrics if "explain" in name]


async def test_the_table_names_the_policy_the_choice_and_the_reasons(told: Stack, tmp_path: Path) -> None:
    (tmp_path / "request.json").write_bytes(LONG)
    code, shown, _ = await baton(tmp_path / "request.json", "--admin", told.admin, "--header", "x-tell=1")
    assert code == 0
    assert "be placed now: prefill on 127.0.0.1:" in shown
    assert "told: header x-tell is there" in shown
    assert "the policy always hands over" in shown


async def test_decisions_are_kept_with_their_request_and_without_their_prompt(told: Stack) -> None:
    await post(told, PATH, LONG, **{"x-tell": "1", "x-request-id": "the-first"})
    await post(told, PATH, LONG, **{"x-tell": "1", "x-request-id": "the-second"})
    status, last = await ask(told, "GET", "/debug/decisions?last=2")
    assert status == 200
    assert [each["request_id"] for each in last] == ["the-second", "the-first"]
    assert last[0]["decision"]["policy"] == "told" and last[0]["time"] >= last[1]["time"]
    assert last[0]["decision"]["candidates"][0]["terms"]["prefill_s"] > 0
    for path in ("/debug/decisions", "/debug/snapshot?index=1"):
        assert "nobody may find" not in json.dumps((await ask(told, "GET", path))[1])
    assert "nobody may find" not in told.filter.log.read_text()


async def test_bad_questions_are_answered_with_what_is_wrong(told: Stack) -> None:
    for method, path, body, code in (
        ("GET", "/debug/decisions?last=0", None, "bad_query"),
        ("GET", "/debug/decisions?last=201", None, "bad_query"),
        ("GET", "/debug/decisions?last=many", None, "bad_query"),
        ("GET", "/debug/snapshot?index=all", None, "bad_query"),
        ("POST", "/debug/explain", b"", "bad_question"),
        ("POST", "/debug/explain", b'{"path": "/v1/completions"}', "bad_question"),
        ("POST", "/debug/explain", b'{"body": {"prompt": "x"}}', "model_missing"),
        ("POST", "/debug/explain", b'{"body": [1]}', "not_an_object"),
        ("POST", "/debug/explain", b'{"body": {"model": "m"}, "path": "/v1/embeddings"}', "not_found"),
    ):
        status, answer = await ask(told, method, path, body)
        assert (status, answer["error"]["code"]) == (400, code), (method, path, body)


async def test_a_question_may_be_as_large_as_a_request(told: Stack) -> None:
    large = json.dumps({"body": {"model": "m", "prompt": "word " * 1_000_000}}).encode()
    status, answer = await ask(told, "POST", "/debug/explain", large)
    assert status == 200 and answer["prompt"]["tokens"] > 600_000


async def test_a_question_over_the_limit_is_not_read() -> None:
    async with Stack(settings={"limits": {"max_body_bytes": 10_000}}) as stack:
        large = json.dumps({"body": {"model": "m", "prompt": "x" * 70_000}}).encode()
        assert (await ask(stack, "POST", "/debug/explain", large))[0] == 200
        huge = json.dumps({"body": {"model": "m", "prompt": "x" * 200_000}}).encode()
        status, answer = await ask(stack, "POST", "/debug/explain", huge)
        assert (status, answer["error"]["code"]) == (413, "request_too_large")
