"""The prompt is tokenised on the prefill worker only, and both workers work on the same tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.engine.front import Front, front
from tests.engine.kv_proof import assert_kv_moved, block_bytes, kv_use, kv_use_since
from tests.engine.openai_api import MODEL, Endpoint, Prompt, ask, body_of, post
from tests.engine.relay import Relay, relay
from tests.engine.system import System, forget_prefixes

UNICODE = "Größe: 3 µm — “naïve” 日本語のテキスト 🚂🚃 \u202eenizagam\u202c e\u0301 \x7f\t\n\\u0041 </s> <|im_end|>"
TOOLS = [
    {
        "type": "function",
        "function": {
            # Neither sorted nor evenly spaced: the order of the keys decides the tokens.
            "name": "wetter_für",
            "parameters": {
                "type": "object",
                "required": ["ort"],
                "properties": {"ort": {"type": "string", "description": "Ort, z. B. „Zürich“"}, "a": {"type": "number"}},
            },
            "description": "Sagt das Wetter voraus 🌦",
        },
    }
]
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "You answer in one short sentence. " + UNICODE},
    {"role": "user", "content": "What is the weather in Zürich?"},
    {"role": "assistant", "content": "Snow, up to 1½ m."},
    {"role": "user", "content": "And “tomorrow”, <|im_start|>system\nHa!"},
]


@dataclass(frozen=True)
class Case:
    endpoint: Endpoint
    prompt: Prompt
    extra: dict[str, Any]


CASES = {
    "chat with tools and a system message": Case("chat", CHAT, {"tools": TOOLS, "tool_choice": "none"}),
    "chat, unicode": Case("chat", UNICODE * 4, {}),
    "chat, an answer that is begun": Case(
        "chat",
        [*CHAT, {"role": "assistant", "content": "Tomorrow it"}],
        {"add_generation_prompt": False, "continue_final_message": True},
    ),
    "completions, unicode": Case("completions", UNICODE * 4, {}),
    "completions, token ids": Case("completions", [7, 8, 9] * 30, {}),
}
EVERY_CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


@dataclass(frozen=True)
class Recorded:
    """A front whose two workers are watched."""

    front: Front
    prefill: Relay
    decode: Relay

    def legs(self) -> tuple[Any, Any]:
        """What one request made the filter send to each worker."""
        (prefill,), (decode,) = self.prefill.legs(), self.decode.legs()
        return prefill, decode

    def forget(self) -> None:
        for worker in (self.prefill, self.decode):
            worker.exchanges.clear()
            worker.rewrite = None


def recorded(system: System, parts: ExitStack, **prefill: Any) -> Recorded:
    relays = [parts.enter_context(relay(url)) for url in (system.prefill_url, system.decode_url)]
    running = front(*([one.address] for one in relays), {"prefill": prefill} if prefill else None)
    return Recorded(parts.enter_context(running), *relays)


@pytest.fixture(scope="module")
def once(system: System) -> Iterator[Recorded]:
    with ExitStack() as parts:
        yield recorded(system, parts)  # the default


@pytest.fixture(scope="module")
def twice(system: System) -> Iterator[Recorded]:
    with ExitStack() as parts:
        yield recorded(system, parts, tokenise_once=False)


def tokens_of(worker_url: str, case: Case) -> list[int]:
    """The prompt's tokens, from the engine's own tokeniser."""
    if case.endpoint == "completions" and not isinstance(case.prompt, str):
        return case.prompt  # type: ignore[return-value]
    body = body_of(case.endpoint, case.prompt, **case.extra)
    kept = ("messages", "prompt", "tools", "add_generation_prompt", "continue_final_message")
    raw, _ = post(f"{worker_url}/tokenize", json.dumps({"model": MODEL, **{k: body[k] for k in kept if k in body}}).encode())
    return json.loads(raw)["tokens"]


def transfer_of(body: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in body["kv_transfer_params"].items() if key != "prompt_token_ids"}


@EVERY_CASE
def test_both_workers_see_the_tokens_of_the_prefill(system: System, tiny_model: Path, once: Recorded, case: Case) -> None:
    expected = ask(system.prefill_url, case.endpoint, case.prompt, **case.extra, return_token_ids=True)
    tokens = tokens_of(system.prefill_url, case)
    assert len(tokens) == expected.prompt_tokens > 50
    forget_prefixes(system.prefill_url, system.decode_url)
    once.forget()
    before = kv_use(system.decode_url)

    answer = ask(once.front.url, case.endpoint, case.prompt, **case.extra, return_token_ids=True)

    prefill, decode = once.legs()
    if case.endpoint == "chat":
        assert prefill.answer["prompt_token_ids"] == tokens
        assert decode.body["kv_transfer_params"]["prompt_token_ids"] == tokens
        assert decode.body["messages"] == body_of("chat", case.prompt)["messages"]
        assert answer.raw[0]["prompt_token_ids"] == tokens
    else:
        assert prefill.answer["choices"][0]["prompt_token_ids"] == tokens
        assert decode.body["prompt"] == tokens
        assert "prompt_token_ids" not in decode.body["kv_transfer_params"]
        assert answer.raw[0]["choices"][0]["prompt_token_ids"] == tokens
    assert transfer_of(decode.body) == prefill.answer["kv_transfer_params"]
    assert answer == expected
    assert answer.raw[0]["choices"][0]["token_ids"] == expected.raw[0]["choices"][0]["token_ids"]
    use = kv_use_since(system.decode_url, before, prompt_tokens=len(tokens))
    assert_kv_moved(use, prompt_tokens=len(tokens), block_size_bytes=block_bytes(tiny_model))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_decode_worker_does_not_tokenise_a_chat(system: System, once: Recorded, stream: bool) -> None:
    """Its copy of the messages is exchanged on the way, and the answer is that to the true ones all the same."""
    case = CASES["chat with tools and a system message"]
    expected = ask(system.prefill_url, "chat", case.prompt, **case.extra)
    assert ask(system.prefill_url, "chat", "Something else", **case.extra).text != expected.text
    forget_prefixes(system.prefill_url, system.decode_url)
    once.forget()

    def exchange(body: bytes) -> bytes:
        return json.dumps({**json.loads(body), "messages": [{"role": "user", "content": "Something else"}]}).encode()

    once.decode.rewrite = exchange
    answer = ask(once.front.url, "chat", case.prompt, **case.extra, stream=stream)
    assert answer == expected


@EVERY_CASE
def test_without_it_each_worker_tokenises_and_the_answer_is_the_same(
    system: System, tiny_model: Path, twice: Recorded, case: Case
) -> None:
    expected = ask(system.prefill_url, case.endpoint, case.prompt, **case.extra)
    forget_prefixes(system.prefill_url, system.decode_url)
    twice.forget()
    before = kv_use(system.decode_url)

    answer = ask(twice.front.url, case.endpoint, case.prompt, **case.extra)

    prefill, decode = twice.legs()
    assert "return_token_ids" not in prefill.body
    sent = body_of(case.endpoint, case.prompt, **case.extra)
    assert decode.body == {**sent, "kv_transfer_params": prefill.answer["kv_transfer_params"]}
    assert answer == expected
    use = kv_use_since(system.decode_url, before, prompt_tokens=expected.prompt_tokens)
    assert_kv_moved(use, prompt_tokens=expected.prompt_tokens, block_size_bytes=block_bytes(tiny_model))
