"""Where the token ids of a request come from, in which order, and that no request waits for them for long."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import re
import subprocess
import sys
import threading
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from extproc.config import Config, ConfigError, Prefill, Workers
from extproc.inference import InferenceRequest, parse
from extproc.observe.logs import make_logger
from extproc.observe.metrics import TOKEN_REASONS, Metrics
from extproc.paths import Treatment
from extproc.prompt import PromptSettings, read_prompt
from extproc.routing.endpoint_spec import EndpointSet, EndpointSpec
from extproc.routing.pool import Pool
from extproc.routing.token_chain import Placed, TokenChain
from extproc.tokens.adapters import parent_of
from extproc.tokens.settings import ModelTokenizer, TokenSettings
from extproc.tokens.source import TokenSource, Wanted
from extproc.tokens.tokenizer import FolderError
from tests.stack.fake_worker import FakeWorker
from tests.unit import tokens_world as world
from workers.ready import free_ports

PROMPTS = PromptSettings()
ADAPTER = b'{"id":"adapter","parent":"m"}'


class Running:
    """An open source, and what it counted."""

    def __init__(self, settings: TokenSettings, workers: list[str], **more: Any) -> None:
        self.now_s = 0.0
        self.metrics = Metrics()
        self.pool = Pool(EndpointSet(prefill=tuple(EndpointSpec(address=each) for each in workers)))
        for endpoint in self.pool.endpoints:
            self.pool.set_live(endpoint, True)
            self.pool.set_models(endpoint, {"m": b'{"id":"m","parent":null}', "adapter": ADAPTER})
        self.source = TokenSource(
            settings,
            pool=self.pool,
            prompts=PROMPTS,
            metrics=self.metrics,
            log=make_logger("critical", io.StringIO()),
            own_headers={"authorization": "Bearer key"},
            clock=lambda: self.now_s,
            **more,
        )

    async def find(self, request: InferenceRequest, model: str = "m") -> Wanted:
        return await self.source.find(request, model, read_prompt(request, PROMPTS, model=model).chain.hashes)

    async def replied(self, wanted: Wanted, ids: list[int]) -> None:
        self.source.replied(wanted, msgspec.json.encode(ids))
        await self.settled()

    async def settled(self) -> None:
        """What was begun is done."""
        while self.source._learning_bytes or self.source._under_way:
            await asyncio.sleep(0.001)

    def missing(self, reason: str) -> float:
        return self.metrics.token_chain_missing.value(reason)

    def came(self, source: str) -> float:
        return self.metrics.token_chains.value(source)


@asynccontextmanager
async def running(settings: TokenSettings, workers: list[str] | None = None, **more: Any) -> AsyncIterator[Running]:
    made = Running(settings, workers or [], **more)
    await made.source.open()
    try:
        yield made
    finally:
        await made.source.close()


def chat(text: str = "Hello there", **more: Any) -> InferenceRequest:
    return parse(json.dumps({"model": "m", "messages": [{"role": "user", "content": text}], **more}).encode(), Treatment.CHAT)


def completion(prompt: Any, **more: Any) -> InferenceRequest:
    return parse(json.dumps({"model": "m", "prompt": prompt, **more}).encode(), Treatment.COMPLETIONS)


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return world.family(tmp_path_factory.mktemp("chatml"), "chatml")


def tokenizer(folder: Path, **more: Any) -> TokenSettings:
    return TokenSettings(models={"m": ModelTokenizer(folder=str(folder))}, timeout_ms=5000.0, **more)


# -- what the client sent -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 9, 200_000])
async def test_ids_that_a_client_sends_are_the_ids(count: int) -> None:
    async with running(TokenSettings(timeout_ms=5000.0), block_sizes=lambda: (16,)) as made:
        for prompt in (list(range(count)), [list(range(count))]):
            found = await made.find(completion(prompt, cache_salt="salt"))
            assert found.chain is not None and found.chain.token_ids == array("I", range(count)) and found.whole
            assert found.chain.cache_salt == "salt" and found.chain.lora is None
            assert found.chain._keys.keys() == {16}, "the keys are made before the decision asks for them"
        assert made.came("ids") == 2


async def test_an_adapter_makes_the_same_ids_another_prompt(chatml: Path) -> None:
    """Its name is in the chain, and the tokenizer is that of the model below it."""
    async with running(tokenizer(chatml), ["10.0.0.1:1"]) as made:
        base, adapted = await made.find(chat()), await made.find(chat(), "adapter")
        assert base.chain is not None and adapted.chain is not None
        assert adapted.chain.token_ids == base.chain.token_ids and adapted.source == "tokenizer"
        assert (base.chain.lora, adapted.chain.lora) == (None, "adapter")
        assert base.chain.keys(4) != adapted.chain.keys(4)


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (completion(["a", "b"]), "invalid"),
        (completion([[1], [2]]), "invalid"),
        (completion([-1]), "invalid"),
        (completion([1, 2], truncate_prompt_tokens=1), "unknown_field"),
        (completion("x", prompt_embeds="AAAA"), "unknown_field"),
        (chat(cache_salt=7), "invalid"),
        (chat([{"type": "image_url", "image_url": {"url": "data:,x"}}]), "multimodal"),  # type: ignore[arg-type]
        (chat(a_field_of_tomorrow=1), "unknown_field"),
    ],
)
async def test_a_prompt_that_cannot_be_known_has_no_ids_and_a_reason(
    chatml: Path, request_: InferenceRequest, reason: str
) -> None:
    async with running(tokenizer(chatml)) as made:
        found = await made.find(request_)
        assert found.chain is None and found.source == "none"
        assert made.missing(reason) == 1 == made.came("none")


@pytest.mark.parametrize("text", ['{"type": "image_url", "input_audio": 1}', "'image_url'", 'an image, a _file, "type"'])
async def test_a_text_that_speaks_of_media_is_text(chatml: Path, text: str) -> None:
    async with running(tokenizer(chatml)) as made:
        parts: Any = [{"type": "text", "text": text}]
        assert (await made.find(chat(text))).source == (await made.find(chat(parts))).source == "tokenizer"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "x"}},
        {"image_url": "x"},
        {"type": "input_audio", "input_audio": {"data": "x", "format": "wav"}},
        {"type": "video_url", "video_url": {"url": "x"}},
        {"type": "image_embeds", "image_embeds": "x"},
        {"type": "prompt_embeds", "data": "x"},
        {"type": "file", "file": {"file_id": "x"}},
        {"type": "image", "source": {"type": "base64", "data": "x"}},
        {"type": "input_image", "image_url": "x"},
        {"type": "document", "source": {}},
    ],
)
async def test_what_is_not_all_text_is_never_learned(part: dict[str, Any]) -> None:
    """The same address may show another picture, and its tokens say nothing of it."""
    async with running(TokenSettings()) as made:
        for _ in range(2):
            parts: Any = [{"type": "text", "text": "What is this?"}, part]
            found = await made.find(chat(parts))
            assert found.chain is None
            await made.replied(found, [1, 2, 3])


def test_every_reason_is_known_to_the_metric() -> None:
    """Each that the code gives, so that all of them are shown with 0 from the start."""
    calls = [re.findall(r"CannotError\(([^)]*)\)", path.read_text()) for path in Path("extproc/tokens").glob("*.py")]
    given = {reason for call in itertools.chain(*calls) for reason in re.findall(r'"(\w+)"', call)}
    assert given | {"no_source"} == set(TOKEN_REASONS)


# -- learned ------------------------------------------------------------------------------------------------------------------


async def test_a_reply_teaches_the_prompt_for_next_time() -> None:
    async with running(TokenSettings()) as made:
        first = await made.find(chat(temperature=0.1))
        assert first.chain is None and made.missing("no_source") == 1
        await made.replied(first, [5, 6, 7])
        again = await made.find(chat(temperature=0.9, max_tokens=3))
        assert again.chain is not None and list(again.chain.token_ids) == [5, 6, 7] and again.source == "learned"
        assert (await made.find(chat("Something else"))).chain is None
        assert (await made.find(chat(cache_salt="s"))).chain is None, "another salt is another prompt"
        assert made.metrics.token_lessons.value("kept") == 1


async def test_a_long_reply_is_read_beside_the_event_loop() -> None:
    async with running(TokenSettings()) as made:
        wanted = await made.find(chat("word " * 5000))
        threads: list[str] = []
        made.source._block_sizes = lambda: threads.append(threading.current_thread().name) or (16,)  # type: ignore[func-returns-value]
        made.source.replied(wanted, msgspec.json.encode(list(range(100_000))))
        assert (await made.find(chat("word " * 5000))).chain is None, "it was not read at once"
        await made.settled()
        found = await made.find(chat("word " * 5000))
        assert found.chain is not None and found.chain.tokens == 100_000


async def test_what_was_learned_and_is_other_now_is_forgotten() -> None:
    """As when the workers were started again with another template."""
    async with running(TokenSettings()) as made:
        for text in ("one", "two"):
            await made.replied(await made.find(chat(text)), [1, 2, 3])
        known = await made.find(chat("one"))
        assert known.source == "learned"
        await made.replied(known, [1, 2, 4])
        assert made.metrics.token_chains_compared.value("learned", "other") == 1
        assert (await made.find(chat("two"))).chain is None
        made.now_s += 601.0
        again = await made.find(chat("one"))
        assert again.chain is not None and list(again.chain.token_ids) == [1, 2, 4]


async def test_replies_without_ids_and_unreadable_ones_teach_nothing() -> None:
    async with running(TokenSettings()) as made:
        wanted = await made.find(chat())
        made.source.replied(wanted, None)
        made.source.replied(wanted, b'["x"]')
        assert (await made.find(chat())).chain is None
        assert made.metrics.token_lessons.value("unreadable") == 1


async def test_the_beginning_of_the_next_turn_is_told_as_a_beginning(chatml: Path) -> None:
    engine = TokenSettings(
        models={"m": ModelTokenizer(folder=str(chatml))}, timeout_ms=5000.0, learn=False, learn_prefixes=False
    )
    async with running(engine) as truth, running(TokenSettings()) as made:
        said: list[dict[str, str]] = [{"role": "system", "content": "Be helpful. " * 50}]
        found, true = None, None
        for turn in range(8):
            said.append({"role": "user", "content": f"question {turn} " * 30})
            body = json.dumps({"model": "m", "messages": said}).encode()
            true = (await truth.find(parse(body, Treatment.CHAT))).chain
            assert true is not None
            found = await made.find(parse(body, Treatment.CHAT))
            await made.replied(found, list(true.token_ids))
            said.append({"role": "assistant", "content": f"answer {turn} " * 10})
        assert found is not None and found.chain is not None and true is not None
        assert found.source == "learned_prefix" and not found.whole
        assert found.chain.token_ids == true.token_ids[: found.chain.tokens] and found.chain.tokens > true.tokens / 2
        assert made.metrics.token_chains_compared.value("learned_prefix", "other") == 0
        assert made.metrics.token_beginnings.value("held") >= 4


# -- the tokenizer ------------------------------------------------------------------------------------------------------------


async def test_the_tokenizer_is_distrusted_when_the_engine_has_other_ids(chatml: Path) -> None:
    async with running(tokenizer(chatml)) as made:
        found = await made.find(chat())
        assert found.source == "tokenizer" and found.chain is not None
        await made.replied(found, list(found.chain.token_ids))
        assert made.metrics.token_chains_compared.value("tokenizer", "same") == 1
        other = await made.find(chat("another"))
        await made.replied(other, [1, 2, 3])
        assert made.metrics.token_chains_compared.value("tokenizer", "other") == 1
        assert made.source.status()["distrusted"] == ["tokenizer/m"]
        assert (await made.find(chat("a third"))).chain is None and made.missing("distrusted") == 1
        made.now_s += 601.0
        assert (await made.find(chat("a third"))).source == "tokenizer"


async def test_no_request_waits_longer_than_its_bound_and_the_next_one_profits(
    chatml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    settings = TokenSettings(models={"m": ModelTokenizer(folder=str(chatml))}, timeout_ms=20.0, max_waiting=2)
    async with running(settings) as made:
        own = made.source._tokenizers["m"]
        ids = own.ids

        def slow(request: InferenceRequest) -> array[int]:
            assert gate.wait(30)
            return ids(request)

        monkeypatch.setattr(own, "ids", slow)
        first, second = await asyncio.gather(made.find(chat("one")), made.find(chat("two")))
        assert first.chain is None and second.chain is None and made.missing("timeout") == 2
        assert (await made.find(chat("three"))).chain is None and made.missing("busy") == 1
        gate.set()
        await made.settled()
        assert (await made.find(chat("one"))).source == "tokenizer"


async def test_all_that_is_tried_for_a_request_shares_one_bound(chatml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt is looked through by a thread, and then tokenised by one: the second has what the first left."""
    left_s: list[float] = []
    wait = asyncio.wait

    async def noted(work: Any, *, timeout: float) -> Any:
        left_s.append(timeout)
        return await wait(work, timeout=timeout)

    async with running(tokenizer(chatml)) as made:
        monkeypatch.setattr(asyncio, "wait", noted)
        assert (await made.find(chat("word " * 60_000))).source == "tokenizer"
    assert len(left_s) == 2 and left_s[1] < left_s[0] <= 5.0


async def test_no_worker_is_asked_when_the_tokenizer_took_all_the_time(chatml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    worker = FakeWorker("w", free_ports(1)[0], says(200, {"token_ids": [1]}))
    settings = TokenSettings(models={"m": ModelTokenizer(folder=str(chatml))}, ask_workers="render", timeout_ms=20.0)
    async with worker, running(settings, [worker.address]) as made:
        monkeypatch.setattr(made.source._tokenizers["m"], "ids", lambda _request: gate.wait(30) and array("I", [1]))
        assert (await made.find(chat())).chain is None
        assert made.missing("timeout") == 1 and not worker.received
        gate.set()
        await made.settled()


async def test_the_event_loop_goes_on_while_a_long_prompt_is_tokenised(chatml: Path) -> None:
    async with running(tokenizer(chatml)) as made:
        turns = 0

        async def tick() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        ticking = asyncio.ensure_future(tick())
        found = await made.find(chat(" ".join(f"word{number}" for number in range(60_000))))
        ticking.cancel()
        assert found.source == "tokenizer" and turns > 50


async def test_a_folder_that_is_not_there_is_refused_at_the_start_by_its_model(tmp_path: Path) -> None:
    made = Running(tokenizer(tmp_path / "nowhere"), [])
    with pytest.raises(FolderError, match=r"tokens\.models\.m: .*nowhere"):
        await made.source.open()


# -- workers that are asked ---------------------------------------------------------------------------------------------------


Answering = Callable[[web.Request, bytes], Any]


@asynccontextmanager
async def asked(mode: str, answer: Answering, **more: Any) -> AsyncIterator[tuple[Running, FakeWorker]]:
    worker = FakeWorker("w", free_ports(1)[0], answer)
    settings = TokenSettings(ask_workers=mode, timeout_ms=more.pop("timeout_ms", 5000.0), **more)  # type: ignore[arg-type]
    async with worker, running(settings, [worker.address]) as made:
        yield made, worker


def says(status: int, body: object) -> Answering:
    async def answer(_: web.Request, __: bytes) -> web.Response:
        return web.json_response(body, status=status)

    return answer


async def test_a_worker_is_asked_once_for_a_prompt() -> None:
    async with asked("tokenize", says(200, {"tokens": [1, 2, 3], "count": 3, "max_model_len": 9})) as (made, worker):
        request = chat(temperature=0, max_tokens=5, reasoning_effort="low", documents=[{"text": "d"}], stream=True)
        found = await made.find(request)
        assert found.source == "worker" and found.chain is not None and list(found.chain.token_ids) == [1, 2, 3]
        assert worker.last.path == "/tokenize" and worker.last.headers["authorization"] == "Bearer key"
        assert json.loads(worker.last.body) == {
            "model": "m",
            "messages": [{"role": "user", "content": "Hello there"}],
            "chat_template_kwargs": {"enable_thinking": True, "reasoning_effort": "low", "documents": [{"text": "d"}]},
        }
        assert (await made.find(request)).source == "learned" and len(worker.received) == 1


async def test_render_endpoints_are_given_the_whole_request_and_say_where_media_stand() -> None:
    features = {
        "mm_hashes": {"image": ["h1", "h0"]},
        "mm_placeholders": {"image": [{"offset": 9, "length": 2}, {"offset": 1, "length": 3}]},
    }
    reply = {"token_ids": list(range(16)), "features": features, "sampling_params": {}}
    async with asked("render", says(200, reply)) as (made, worker):
        found = await made.find(chat([{"type": "image_url", "image_url": {"url": "x"}}], tool_choice="none"))  # type: ignore[arg-type]
        assert found.chain is not None and found.chain.items == (Placed("h0", 1, 3), Placed("h1", 9, 2))
        assert worker.last.path == "/v1/chat/completions/render"
        sent = json.loads(worker.last.body)
        assert sent["mm_payload"] == "none" and sent["tool_choice"] == "none"
        assert (await made.find(chat([{"type": "image_url", "image_url": {"url": "x"}}]))).source == "worker"  # type: ignore[arg-type]
        assert len(worker.received) == 2, "another picture may be behind the same address"
        for body, treatment, path in (
            ({"model": "m", "messages": [], "system": "s"}, Treatment.MESSAGES, "/v1/messages/render"),
            ({"model": "m", "input": "hello"}, Treatment.RESPONSES, "/v1/responses/render"),
        ):
            await made.find(parse(json.dumps(body).encode(), treatment))
            if treatment is Treatment.RESPONSES:
                assert worker.last.path == path
        worker.answer = says(200, [reply])
        assert (await made.find(completion("text"))).source == "worker" and worker.last.path == "/v1/completions/render"


@pytest.mark.parametrize(
    ("status", "body", "asks"),
    [(403, {}, 1), (404, {}, 1), (500, {}, 3), (200, {"other": 1}, 1), (200, [], 3)],
)
async def test_a_worker_that_fails_is_left_alone_for_a_while(status: int, body: object, asks: int) -> None:
    async with asked("tokenize", says(status, body)) as (made, worker):
        for number in range(5):
            assert (await made.find(chat(str(number)))).chain is None
        asks = 1 if status == 200 else asks
        assert len(worker.received) == asks
        assert made.missing("ask_failed") == asks and made.missing("left_alone") == 5 - asks
        made.now_s += 61.0
        worker.answer = says(200, {"tokens": [1]})
        assert (await made.find(chat("again"))).source == "worker"
        assert made.source.status()["workers_left_alone"] == 0


async def test_a_worker_that_answers_in_ten_thousand_brackets_is_left_alone() -> None:
    async def answer(_: web.Request, __: bytes) -> web.Response:
        return web.Response(body=b'{"more": ' + b"[" * 10_000 + b"]" * 10_000 + b"}")

    async with asked("tokenize", answer) as (made, worker):
        for number in range(2):
            assert (await made.find(chat(str(number)))).chain is None
        assert len(worker.received) == 1 and made.missing("left_alone") == 1


async def test_a_prompt_that_the_worker_refuses_is_no_failure_of_the_worker() -> None:
    async with asked("tokenize", says(400, {"error": "no"})) as (made, worker):
        for number in range(5):
            await made.find(chat(str(number)))
        assert len(worker.received) == 5 and made.missing("refused") == 5


async def test_a_slow_worker_holds_up_no_request_and_serves_the_next() -> None:
    gate = asyncio.Event()

    async def answer(_: web.Request, __: bytes) -> web.Response:
        await gate.wait()
        return web.json_response({"tokens": [4, 5]})

    async with asked("tokenize", answer, timeout_ms=20.0) as (made, _):
        assert (await made.find(chat())).chain is None and made.missing("timeout") == 1
        gate.set()
        await made.settled()
        assert (await made.find(chat())).source == "learned"


async def test_without_a_live_worker_nobody_is_asked() -> None:
    async with running(TokenSettings(ask_workers="tokenize")) as made:
        assert (await made.find(chat())).chain is None and made.missing("no_worker") == 1


@pytest.mark.parametrize(
    "more",
    [
        {"tools": [{"type": "function"}], "tool_choice": "none"},
        {"a_field_of_tomorrow": 1},
        {"messages": [{"role": "assistant", "content": "x", "reasoning_content": "hm"}]},
    ],
)
async def test_tokenize_is_not_asked_what_it_would_answer_in_another_way(more: dict[str, Any]) -> None:
    async with asked("tokenize", says(200, {"tokens": [1]})) as (made, worker):
        assert (await made.find(chat(**more))).chain is None and made.missing("unknown_field") == 1
        assert not worker.received


async def test_the_tokenizer_goes_before_workers_and_workers_stand_in_for_it(chatml: Path) -> None:
    worker = FakeWorker("w", free_ports(1)[0], says(200, {"token_ids": [1]}))
    async with worker, running(tokenizer(chatml, ask_workers="render"), [worker.address]) as made:
        assert (await made.find(chat())).source == "tokenizer" and not worker.received
        assert (await made.find(chat(a_field_of_tomorrow=1))).source == "worker"


def test_libraries_that_only_tokenizers_need_are_not_loaded_without_one() -> None:
    """The filter's image does not have them."""
    code = "import sys, extproc.server; print(sorted({'tokenizers', 'jinja2', 'transformers'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


# -- configuration ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        (TokenSettings(timeout_ms=0), r"tokens\.timeout_ms"),
        (TokenSettings(timeout_ms=20_000), r"tokens\.timeout_ms"),
        (TokenSettings(threads=17), r"tokens\.threads"),
        (TokenSettings(learn=False), r"tokens\.learn_prefixes"),
        (TokenSettings(learn=False, learn_prefixes=False), r"tokens\.learn"),
        (TokenSettings(models={"m": ModelTokenizer(folder="x", max_tokens=0)}), r"tokens\.models\.m\.max_tokens"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings: TokenSettings, fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        Config(workers=Workers(prefill=["10.0.0.1:1"], decode=["10.0.0.2:1"]), tokens=settings)


def test_learning_needs_replies_with_token_ids() -> None:
    with pytest.raises(ConfigError, match="tokenise_once"):
        Config(
            workers=Workers(prefill=["10.0.0.1:1"], decode=["10.0.0.2:1"]),
            prefill=Prefill(tokenise_once=False),
            tokens=TokenSettings(),
        )


@pytest.mark.parametrize("tokens", [0, 15, 16, 100, 163, 200, 500])
def test_the_beginning_of_a_chain_has_the_keys_of_its_own_ids(tokens: int) -> None:
    """Made from the keys of the whole, it is what it would be by itself: salt, adapter and media included."""
    ids, items = array("I", range(200)), [Placed("one", 3, 9), Placed("two", 90, 40)]
    whole = TokenChain(ids[:], lora="a", cache_salt="s", items=items)
    whole.keys(16)
    begun = whole.beginning(tokens)
    inside = [item for item in items if item.first_token < tokens]
    alone = TokenChain(ids[:tokens], lora="a", cache_salt="s", items=inside)
    for size in (16, 5):
        assert begun.keys(size) == alone.keys(size) == whole.keys(size)[: min(tokens, 200) // size]


def test_a_card_that_is_nested_too_deeply_says_nothing_of_a_model() -> None:
    pool = Pool(EndpointSet((EndpointSpec(address="10.0.0.1:80"),)))
    pool.set_models(pool.endpoints[0], {"m": b'{"id": "m", "of": ' + b"[" * 10_000 + b"]" * 10_000 + b"}"})
    assert parent_of(pool, "m") is None
