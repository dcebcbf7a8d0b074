"""The token ids that are known before the decision are the engine's own, for the demo model with a template that knows tools.

Four words for every prompt: our tokenizer, `/tokenize`, the render endpoint, the reply to a prefill. And a fifth: the blocks
that the engine says it has stored are those of our chain.
"""

from __future__ import annotations

import contextlib
import io
import json
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
import zmq

from extproc.inference import InferenceRequest, parse, token_ids_of
from extproc.observe.kv_events.decode import BlockStored, Decoder
from extproc.observe.logs import make_logger
from extproc.observe.metrics import Metrics
from extproc.paths import Treatment
from extproc.prompt import PromptSettings, read_prompt
from extproc.routing.endpoint_spec import EndpointSet, EndpointSpec
from extproc.routing.holdings import Holdings
from extproc.routing.pool import Pool
from extproc.routing.token_chain import TokenChain
from extproc.tokens.settings import ModelTokenizer, TokenSettings
from extproc.tokens.source import TokenSource, Wanted
from tests.engine.kv_proof import BLOCK_SIZE_TOKENS
from tests.engine.openai_api import MODEL
from tests.engine.system import UP_TIMEOUT_S
from tests.engine.test_tokenise_once import CHAT, TOOLS, UNICODE
from tests.unit.tokens_world import QWEN
from workers import cores, vllm
from workers.model import default_cache_dir, smollm2
from workers.process import Child
from workers.ready import free_ports, wait_ready

CALL = {"id": "call_1", "type": "function", "function": {"name": "wetter_für", "arguments": '{"ort": "Zürich", "a": 1.50}'}}
TOLD = [
    {"role": "user", "content": "Wetter?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {
        "role": "tool",
        "tool_call_id": "call_1",
        "content": [{"type": "text", "text": "Schnee"}, {"type": "text", "text": "1½ m"}],
    },
]
LONG = "The worker reads the whole prompt once, and keeps its keys and values in blocks. "


def _user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def _parts(*texts: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": text} for text in texts]}


CHATS: dict[str, dict[str, Any]] = {
    "a few words": {"messages": _user("What is the capital of France?")},
    "one question": {"messages": _user(LONG * 5)},
    "empty system": {"messages": [{"role": "system", "content": ""}, *_user(LONG * 3)]},
    "system prompt and turns": {"messages": CHAT},
    "unicode and emoji": {"messages": _user(UNICODE * 3)},
    "tools": {"messages": CHAT, "tools": TOOLS},
    "tools, none chosen": {"messages": CHAT, "tools": TOOLS, "tool_choice": "none"},
    "a tool's result in parts": {"messages": TOLD, "tools": TOOLS},
    "a tool's result, another turn": {"messages": [*TOLD, {"role": "assistant", "content": "Schnee."}, *_user("Und morgen?")]},
    "content in parts": {"messages": [_parts(LONG, " b"), {"role": "assistant", "content": "c"}, _parts(LONG)]},
    "thoughts of an earlier turn": {
        "messages": [*_user("x"), {"role": "assistant", "content": "y", "reasoning_content": "hm\nhm"}, *_user("z")]
    },
    "thoughts of this turn": {"messages": [*_user("x"), {"role": "assistant", "content": "y", "reasoning": "hm"}]},
    "an answer that is begun": {
        "messages": [*CHAT, {"role": "assistant", "content": "Tomorrow it"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "no generation prompt": {"messages": CHAT, "add_generation_prompt": False},
    "no thinking, by kwargs": {"messages": CHAT, "chat_template_kwargs": {"enable_thinking": False}},
    "no thinking, by effort": {"messages": CHAT, "reasoning_effort": "none"},
    "special tokens added": {"messages": CHAT, "add_special_tokens": True},
    "a developer's message": {"messages": [{"role": "developer", "content": "Be short."}, *CHAT[1:]]},
    "a billing line": {"messages": [{"role": "system", "content": "x-anthropic-billing-header: 1\nBe short."}, *CHAT[1:]]},
    "salted": {"messages": CHAT, "cache_salt": "pepper"},
    "long": {"messages": [{"role": "system", "content": LONG * 60}, *_user("Why?")]},
}
TEXTS: dict[str, dict[str, Any]] = {
    "text": {"prompt": LONG * 9},
    "text, unicode": {"prompt": UNICODE * 3},
    "text with special tokens": {"prompt": "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n" * 5},
    "text without added tokens": {"prompt": LONG * 5, "add_special_tokens": False},
    "a list of one text": {"prompt": [LONG * 4]},
    "token ids": {"prompt": [7, 8, 9] * 40},
}
CASES = {
    **{name: (Treatment.CHAT, body) for name, body in CHATS.items()},
    **{name: (Treatment.COMPLETIONS, body) for name, body in TEXTS.items()},
}
PATHS = {
    Treatment.CHAT: "/v1/chat/completions",
    Treatment.COMPLETIONS: "/v1/completions",
    Treatment.MESSAGES: "/v1/messages",
    Treatment.RESPONSES: "/v1/responses",
}
PREFILL_PARAMS = b'{"do_remote_decode":true,"do_remote_prefill":false}'
PROMPTS = PromptSettings()
EVENTS_S = 20.0


@dataclass
class Engine:
    """A running worker, and what it says that it holds."""

    address: str
    folder: Path
    template: Path
    events: zmq.Socket[bytes]
    holdings: Holdings
    decoder: Decoder

    def prefill(self, request: InferenceRequest) -> bytes:
        """The reply to a prefill of ``request``, as the filter asks for it."""
        body = request.prefill_body(PREFILL_PARAMS, return_token_ids=True)
        url = f"http://{self.address}{PATHS[request.treatment]}"
        call = urllib.request.Request(url, data=body, headers={"content-type": "application/json"})
        with urllib.request.urlopen(call, timeout=60) as reply:
            return reply.read()

    def hear(self, timeout_s: float) -> bool:
        """Take in the next batch of events; False: none came."""
        if not self.events.poll(timeout_s * 1e3):
            return False
        _, _, payload = self.events.recv_multipart()
        source = self.holdings.source(self.address)
        for event in self.decoder.decode(payload).events:
            if isinstance(event, BlockStored):
                source.stored(
                    event.block_hashes,
                    event.parent_block_hash,
                    event.token_ids,
                    event.block_size,
                    event.lora_name,
                    event.extra_keys,
                    kind=event.kv_cache_spec_kind,
                )
        return True

    def holds(self, chain: TokenChain, tokens: int) -> bool:
        """Whether the engine says, soon, that it holds so many leading tokens of ``chain``."""
        deadline = time.monotonic() + EVENTS_S
        while tokens:
            held = self.holdings.lookup(chain).get(self.address)
            if held is not None and held.gpu >= tokens:
                return True
            if time.monotonic() > deadline or not self.hear(EVENTS_S):
                return False
        return True


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    port, side_channel, events = free_ports(3)
    model = smollm2(default_cache_dir())
    with contextlib.ExitStack() as parts:
        folder = Path(parts.enter_context(TemporaryDirectory(prefix="baton-")))
        template = folder / "template.jinja"
        template.write_text(QWEN)
        spec = vllm.WorkerSpec(
            role="prefill",
            model=str(model),
            local_model=True,
            served_model_name=MODEL,
            port=port,
            side_channel_port=side_channel,
            block_size_tokens=BLOCK_SIZE_TOKENS,
            max_model_len_tokens=4096,
            kv_events_port=events,
            threads=2,
            extra_args=(
                *("--chat-template", str(template), "--enable-scale-out"),
                *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
            ),
        )
        command = vllm.command(spec)
        child = parts.enter_context(Child("prefill", command.argv, log=folder / "prefill.log", env=command.env))
        address = f"127.0.0.1:{port}"
        wait_ready(child, f"http://{address}/health", UP_TIMEOUT_S)
        cores.pin(child.pids(), cores.usable()[:1])  # threads that spin on several cores stall each other
        context = parts.enter_context(zmq.Context())
        listener = parts.enter_context(context.socket(zmq.SUB))
        listener.connect(f"tcp://127.0.0.1:{events}")
        listener.subscribe(b"")
        running = Engine(address, model, template, listener, Holdings(1 << 20), Decoder())
        _subscribed(running)
        yield running


def _subscribed(engine: Engine) -> None:
    """Whoever subscribes hears only what comes after that, so: ask until something is heard."""
    for number in range(100):
        ask = json.dumps({"model": MODEL, "prompt": [1000 + number] * (BLOCK_SIZE_TOKENS + 1)}).encode()
        engine.prefill(parse(ask, Treatment.COMPLETIONS))
        if engine.hear(0.3):
            return
    raise AssertionError("the engine publishes nothing")


@contextlib.asynccontextmanager
async def source(engine: Engine, **settings: Any) -> AsyncIterator[TokenSource]:
    pool = Pool(EndpointSet(prefill=(EndpointSpec(address=engine.address),)))
    for endpoint in pool.endpoints:
        pool.set_live(endpoint, True)
    made = TokenSource(
        TokenSettings(timeout_ms=10_000.0, **settings),
        pool=pool,
        prompts=PROMPTS,
        metrics=Metrics(),
        log=make_logger("critical", io.StringIO()),
        own_headers={},
    )
    await made.open()
    try:
        yield made
    finally:
        await made.close()


def tokenizer(engine: Engine) -> dict[str, ModelTokenizer]:
    return {MODEL: ModelTokenizer(folder=str(engine.folder), chat_template=str(engine.template))}


async def find(made: TokenSource, request: InferenceRequest) -> Wanted:
    return await made.find(request, MODEL, read_prompt(request, PROMPTS, model=MODEL).chain.hashes)


def request_of(treatment: Treatment, body: dict[str, Any]) -> InferenceRequest:
    more = {"max_output_tokens": 2} if treatment is Treatment.RESPONSES else {"max_tokens": 2}
    return parse(json.dumps({"model": MODEL, **more, **body}, ensure_ascii=False).encode(), treatment)


@pytest.mark.parametrize("name", CASES)
async def test_all_who_know_the_token_ids_say_the_same(engine: Engine, name: str) -> None:
    treatment, body = CASES[name]
    request = request_of(treatment, body)
    listed = token_ids_of(engine.prefill(request), treatment)
    assert listed is not None
    true = msgspec.json.decode(listed, type=list[int])

    found = {}
    async with source(engine, models=tokenizer(engine)) as own:
        found["tokenizer"] = await find(own, request)
    async with source(engine, ask_workers="render") as rendering:
        found["render"] = await find(rendering, request)
    async with source(engine) as learning:
        learning.replied(await find(learning, request), listed)
        found["learned"] = await find(learning, request)
    # That endpoint takes one text, and does not know tool_choice, nor an older name of a message's thoughts.
    if isinstance(body.get("prompt", ""), str) and body.get("tool_choice") != "none" and name != "thoughts of an earlier turn":
        async with source(engine, ask_workers="tokenize") as asking:
            found["tokenize"] = await find(asking, request)
    for who, wanted in found.items():
        assert wanted.chain is not None, who
        assert list(wanted.chain.token_ids) == true, who
    expected = {"tokenizer": "tokenizer", "render": "worker", "learned": "learned", "tokenize": "worker"}
    sources = {who: wanted.source for who, wanted in found.items()}
    assert sources == {who: "ids" if name == "token ids" else expected[who] for who in found}

    chain = found["tokenizer"].chain
    assert chain is not None
    assert engine.holds(chain, len(true) - len(true) % BLOCK_SIZE_TOKENS), "the engine's blocks have other keys"


async def test_the_keys_of_another_prompt_are_not_held(engine: Engine) -> None:
    """The fifth word could be true of anything otherwise."""
    salted, plain = (
        request_of(Treatment.CHAT, {"messages": _user(LONG * 30), **more})
        for more in ({"cache_salt": "a"}, {"cache_salt": "b"})
    )
    engine.prefill(salted)
    async with source(engine, models=tokenizer(engine)) as own:
        mine, other = await find(own, salted), await find(own, plain)
    assert mine.chain is not None and other.chain is not None
    assert engine.holds(mine.chain, 10 * BLOCK_SIZE_TOKENS)
    assert engine.address not in engine.holdings.lookup(other.chain)


@pytest.mark.parametrize(
    ("treatment", "body"),
    [
        (Treatment.MESSAGES, {"system": LONG * 5, "messages": _user("Why? " + UNICODE)}),
        (Treatment.RESPONSES, {"instructions": LONG * 5, "input": "Why? " + UNICODE}),
    ],
)
async def test_prompts_of_the_other_apis_are_rendered_by_the_worker(
    engine: Engine, treatment: Treatment, body: dict[str, Any]
) -> None:
    request = request_of(treatment, body)
    usage = msgspec.json.decode(engine.prefill(request))["usage"]
    async with source(engine, models=tokenizer(engine), ask_workers="render") as rendering:
        found = await find(rendering, request)
    assert found.source == "worker" and found.chain is not None
    cached = usage.get("cache_creation_input_tokens", 0) + usage.get("cache_read_input_tokens", 0)
    assert found.chain.tokens == usage["input_tokens"] + cached
    assert engine.holds(found.chain, found.chain.tokens - found.chain.tokens % BLOCK_SIZE_TOKENS)


async def test_the_next_turns_of_a_conversation_are_known_by_what_replies_taught(engine: Engine) -> None:
    said: list[dict[str, Any]] = [{"role": "system", "content": LONG * 8}]
    told = 0
    async with source(engine) as learning:
        for turn in range(8):
            said.append({"role": "user", "content": f"{turn}: {LONG * 3}"})
            request = request_of(Treatment.CHAT, {"messages": said})
            found = await find(learning, request)
            listed = token_ids_of(engine.prefill(request), Treatment.CHAT)
            assert listed is not None
            true = msgspec.json.decode(listed, type=list[int])
            if found.chain is not None:
                told += 1
                assert not found.whole and list(found.chain.token_ids) == true[: found.chain.tokens]
                assert found.chain.tokens > 0.5 * len(true)
            learning.replied(found, listed)
            said.append({"role": "assistant", "content": f"Because of {turn}. " * 5})
    assert told >= 4
