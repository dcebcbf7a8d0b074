"""Every file of tests/cases through the real Envoy and the real filter, between strict engines: what both legs get, byte for
byte, what the client gets, and that the engines have nothing to complain about."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from yarl import URL

from tests.cases import answers, corpus
from tests.cases.corpus import Case
from tests.cases.sims import Received, SimStack
from workers.sim.main import SimOptions
from workers.sim.prompts import ENDPOINTS, Model, expected_answers

OPTIONS = SimOptions(
    served_model_name=("m",),
    lora_modules=("sql-lora=/adapters/sql",),
    speed=0.0,
    num_blocks=40_000,
    max_model_len=600_000,
    handshake_s=0.0,
    mean_answer_tokens=24,
    enable_scale_out=True,
    enable_prompt_tokens_details=True,
)
MODEL = Model(("m",), {"sql-lora": "/adapters/sql"}, OPTIONS.max_model_len, OPTIONS.mean_answer_tokens)
FILES = corpus.files()


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=["buffered", "full_duplex", "full_duplex_both"])
async def sims(request: pytest.FixtureRequest) -> AsyncIterator[SimStack]:
    settings = {"limits": {"max_body_bytes": corpus.LIMIT_BYTES}, "envoy": {"body_mode": request.param}}
    async with SimStack(prefill=1, decode=2, options=OPTIONS, settings=settings) as stack:
        yield stack


class _Reply(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")
    prompt_token_ids: msgspec.Raw = msgspec.Raw(b"")
    choices: list[Any] = []


class _Choice(msgspec.Struct):
    prompt_token_ids: msgspec.Raw = msgspec.Raw(b"")


def handed_over(prefill: Received) -> tuple[bytes, bytes]:
    """Params and token ids of a prefill's reply, as they were written."""
    assert prefill.reply is not None
    reply = msgspec.json.decode(prefill.reply, type=_Reply)
    choices = msgspec.json.decode(prefill.reply, type=dict[str, msgspec.Raw]).get("choices", msgspec.Raw(b"[]"))
    ids = [bytes(choice.prompt_token_ids) for choice in msgspec.json.decode(choices, type=list[_Choice])]
    return bytes(reply.kv_transfer_params), bytes(reply.prompt_token_ids) or next(iter(ids), b"")


def check_headers(wanted: dict[str, str | None], got: dict[str, str]) -> None:
    for name, value in wanted.items():
        if value is not None and value.startswith("!"):
            assert got.get(name) != value[1:], name
        else:
            assert got.get(name) == value, name


async def send(stack: SimStack, case: Case) -> tuple[int, str, bytes]:
    body = case.request_body()
    headers = dict(case.headers)
    if body is not None and case.content_type is not None:
        headers.setdefault("content-type", case.content_type)

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body or b""), 1 << 14):
            yield (body or b"")[start : start + (1 << 14)]

    url = URL(stack.base + case.path, encoded=True)
    data: Any = pieces() if case.chunked else body if len(body or b"") < 1 << 16 else io.BytesIO(body or b"")
    async with stack.http.request(
        case.method, url, data=data, headers=headers, skip_auto_headers=("content-type", "user-agent"), allow_redirects=False
    ) as response:
        return response.status, response.headers.get("content-type", ""), await response.read()


def check_error(case: Case, content_type: str, answer: bytes) -> None:
    assert case.error is not None and content_type == "application/json"
    body = json.loads(answer)
    error = body["error"]
    assert error["code"] == case.error.code and error["message"]
    if case.error.shape == "anthropic":
        assert body["type"] == "error" and set(error) == {"type", "message", "code"}
    else:
        assert set(body) == {"error"} and set(error) == {"message", "type", "param", "code"}


def check_answer(case: Case, path: str, content_type: str, body: bytes, prefill: Received | None, number: int) -> None:
    answer = answers.read(path, content_type, body)
    assert answer.complete and answer.error is None, body
    client = corpus.without_transfer_keys(case.request_body() or b"")
    if case.answer:
        texts = expected_answers(path, client, MODEL)
        assert [answer.texts.get(index, "") for index in range(len(texts))] == texts
    if case.choices is not None:
        assert len(answer.texts) == case.choices
    if not client.get("return_token_ids"):
        assert not answer.tells_token_ids
    if prefill is not None and answer.cached_tokens is not None:
        assert answer.cached_tokens == json.loads(handed_over(prefill)[0])["remote_prefill_cached_tokens"]
    if case.cached is not None:
        assert answer.cached_tokens == case.cached[number]


async def whole_count(stack: SimStack, reason: str) -> float:
    return (await stack.metrics()).get(f'baton_whole_requests_total{{reason="{reason}"}}', 0.0)


@pytest.mark.parametrize("file", FILES, ids=[str(f.relative_to(corpus.FOLDER).with_suffix("")) for f in FILES])
async def test_case(sims: SimStack, file: Path) -> None:
    case = corpus.load(file)
    await sims.forget()
    for number in range(case.times):
        for sim in sims.sims:
            sim.reset()
        before = await whole_count(sims, case.reason) if case.reason else 0.0
        pulled = sims.pulled()
        status, content_type, body = await send(sims, case)
        try:
            await check(sims, case, number, status, content_type, body)
        except AssertionError as error:
            error.add_note(f"{case.why}\nanswer: {status} {body[:1000]!r}")
            raise
        # An answer is right also where the decode worker has computed the whole prompt again (kserve#5987).
        assert (sims.pulled() > pulled) == (case.prefill is not None and case.refused is None)
        if case.reason:
            assert await whole_count(sims, case.reason) == before + 1
    assert await sims.released(2.0), "blocks are pinned still"
    assert sims.violations() == {}
    assert all(task.state()["requests"] == 0 for task in (sim.worker.engine for sim in sims.sims))


async def check(sims: SimStack, case: Case, number: int, status: int, content_type: str, answer: bytes) -> None:
    arrives = case.arrives or case.path
    path = arrives.partition("?")[0]
    prefills = [received for sim in sims.prefill for received in sim.received]
    decodes = [received for sim in sims.decode for received in sim.received]
    if case.error is not None:
        assert status == case.error.status
        check_error(case, content_type, answer)
        assert (prefills, decodes) == ([], [])
        return
    if case.models is not None:
        assert status == 200 and [card["id"] for card in json.loads(answer)["data"]] == case.models
        assert (prefills, decodes) == ([], [])
        return
    if case.refused is not None:
        assert status == case.refused.status
        assert case.refused.says in answer.decode()
        refuser = prefills if case.refused.by == "prefill" else decodes
        assert refuser[-1].reply == answer
        assert len(prefills) + len(decodes) == 1 if case.refused.by == "prefill" or case.whole else 2
        if case.whole is None:
            return
    if case.whole is not None:
        assert prefills == [] and len(decodes) == 1
        assert decodes[0].body == ((case.request_body() or b"") if case.whole == "same" else case.leg(case.whole))
        assert (decodes[0].method, decodes[0].path) == (case.method, arrives)
        prefill = None
    else:
        assert case.prefill is not None and case.decode is not None
        assert len(prefills) == 1
        assert prefills[0].body == case.leg(case.prefill)
        params, ids = handed_over(prefills[0])
        assert len(decodes) == 1
        assert decodes[0].body == case.leg(case.decode, params, ids)
        if sims.config.envoy.body_mode == "buffered":
            assert decodes[0].headers["content-length"] == str(len(decodes[0].body))
        else:
            assert decodes[0].headers["transfer-encoding"] == "chunked"
        assert prefills[0].path == path and decodes[0].path == arrives
        check_headers(case.prefill_headers, prefills[0].headers)
        prefill = prefills[0]
    check_headers(case.decode_headers, decodes[0].headers)
    if case.refused is not None:
        return
    assert status == case.status
    if case.says is not None:
        assert case.says in answer.decode()
    if path in ENDPOINTS and status == 200:
        check_answer(case, path, content_type, answer, prefill, number)


async def test_the_corpus_is_as_large_as_it_should_be() -> None:
    assert len(FILES) >= 150
