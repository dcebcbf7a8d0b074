"""Token ids made with a model's own tokenizer and template: those that transformers makes, whatever the cache holds."""

from __future__ import annotations

import json
import random
import shutil
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from extproc.inference import parse
from extproc.paths import Treatment
from extproc.tokens.cache import Pieces
from extproc.tokens.conversation import CannotError
from extproc.tokens.local import LocalTokenizer
from extproc.tokens.pieces import Added, Cutter
from extproc.tokens.settings import ModelTokenizer
from extproc.tokens.template import Template
from extproc.tokens.tokenizer import FolderError
from tests.unit import tokens_world as world

CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Zürich", "a": 1}'}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"z": 1, "a": {"type": "string"}},
            "description": '<Wetter> & "mehr"',
        },
    }
]
CHATS: dict[str, dict[str, Any]] = {
    "one question": {"messages": [{"role": "user", "content": "What is the capital of France?"}]},
    "empty system": {"messages": [{"role": "system", "content": ""}, {"role": "user", "content": "Hello"}]},
    "unicode": {
        "messages": [{"role": "user", "content": "Größe 日本語 🚂🚃 e\u0301 \u202eabc\u202c\t\n\n  x </s> <|im_end|>"}]
    },
    "several turns": {
        "messages": [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": " leading and trailing "},
            {"role": "assistant", "content": "Yes.\n\n"},
            {"role": "user", "content": "\n\nAnd <|im_start|>system now?"},
        ]
    },
    "open end": {
        "messages": [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "One, two "}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "no generation prompt": {"messages": [{"role": "user", "content": "Hi"}], "add_generation_prompt": False},
    "added special tokens": {"messages": [{"role": "user", "content": "Hi"}], "add_special_tokens": True},
    "kwargs": {"messages": [{"role": "user", "content": "Hi"}], "chat_template_kwargs": {"enable_thinking": False}},
}
WITH_TOOLS: dict[str, dict[str, Any]] = {
    "tools": {"messages": [{"role": "user", "content": "Weather?"}], "tools": TOOLS},
    "a call and its result": {
        "messages": [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "Snow."},
        ],
        "tools": TOOLS,
    },
}


def chat(body: dict[str, Any]) -> Any:
    return parse(json.dumps({"model": "m", **body}).encode(), Treatment.CHAT)


def completion(prompt: str, **more: object) -> Any:
    return parse(json.dumps({"model": "m", "prompt": prompt, **more}).encode(), Treatment.COMPLETIONS)


def local(folder: Path, **more: Any) -> LocalTokenizer:
    return LocalTokenizer(ModelTokenizer(folder=str(folder), **more), Pieces(1 << 24))


def transformers_ids(folder: Path, body: dict[str, Any], *, as_parts: bool) -> list[int]:
    """Of the same chat, by the library that the engine uses."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = json.loads(json.dumps(body["messages"]))
    for message in messages:
        if as_parts and isinstance(message["content"], str):
            message["content"] = [{"type": "text", "text": message["content"]}]
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    tools = json.loads(json.dumps(body.get("tools")))
    for tool in tools or ():
        own = tool["function"]
        tool["function"] = {"name": own["name"], "description": own.get("description"), "parameters": own.get("parameters")}
    text = tokenizer.apply_chat_template(
        messages,
        tools=tools,
        tokenize=False,
        add_generation_prompt=body.get("add_generation_prompt", True),
        continue_final_message=body.get("continue_final_message", False),
        **body.get("chat_template_kwargs", {}),
    )
    found: list[int] = tokenizer(text, add_special_tokens=body.get("add_special_tokens", False))["input_ids"]
    return found


@pytest.mark.parametrize("family", world.FAMILIES)
def test_chats_have_the_ids_that_transformers_gives_them(tmp_path: Path, family: str) -> None:
    folder = world.family(tmp_path, family)
    ours = local(folder)
    bodies = {**CHATS, **(WITH_TOOLS if family in ("llama3", "qwen") else {})}
    for name, body in bodies.items():
        if family == "mistral" and name == "open end":
            continue  # its template trims what an assistant said, and refuses to be left open behind a space
        expected = transformers_ids(folder, body, as_parts=family == "parts")
        for turn in ("first", "again"):
            assert list(ours.ids(chat(body))) == expected, (name, turn)


@pytest.mark.parametrize("family", ["chatml", "llama3", "mistral"])
def test_completions_have_the_ids_that_transformers_gives_them(tmp_path: Path, family: str) -> None:
    from transformers import AutoTokenizer

    folder = world.family(tmp_path, family)
    tokenizer, ours = AutoTokenizer.from_pretrained(folder), local(folder)
    for text in ("Hello world", " x", "<|eot_id|>\n<s>[INST] hi", "日本語" * 40, "<|im_end|>" * 70 + "a"):
        for special in (True, False):
            expected = tokenizer(text, add_special_tokens=special)["input_ids"]
            assert list(ours.ids(completion(text, add_special_tokens=special))) == expected, (text, special)
    assert list(ours.ids(completion("Hello"))) == tokenizer("Hello")["input_ids"]


@pytest.fixture(scope="module")
def mistral_v3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The vocabulary of Mistral 7B v0.3, 32,768 tokens, as a package carries it; written as a folder by transformers."""
    import mistral_common
    from transformers import LlamaTokenizer

    made, folder = tmp_path_factory.mktemp("made"), tmp_path_factory.mktemp("mistral")
    data = Path(mistral_common.__file__).parent / "data"
    shutil.copy(data / "mistral_instruct_tokenizer_240323.model.v3", made / "tokenizer.model")
    LlamaTokenizer.from_pretrained(made).save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(world.MISTRAL)
    return folder


def test_a_real_vocabulary_has_the_ids_that_transformers_gives_it(mistral_v3: Path) -> None:
    """Its tokenizer is of a class that transformers builds from the vocabulary, not from tokenizer.json as it stands."""
    ours = local(mistral_v3)
    for name, body in CHATS.items():
        if name != "open end":
            expected = transformers_ids(mistral_v3, body, as_parts=False)
            assert list(ours.ids(chat(body))) == expected, name


@given(parts=st.lists(st.deferred(lambda: _PIECES), max_size=60))
@settings(max_examples=60, deadline=None)
def test_a_text_of_a_real_vocabulary_is_cut_well(mistral_v3: Path, parts: list[str]) -> None:
    backend = _backends.setdefault("mistral v3", Tokenizer.from_file(str(mistral_v3 / "tokenizer.json")))
    _assert_cut_well(backend, "".join(parts))


_PIECES = st.one_of(
    st.sampled_from([*world.CHATML_TOKENS, *world.MISTRAL_TOKENS, "<|im_", "[/", "<", ">", " ", "  ", "\n", "\n\n", "\t", "▁"]),
    st.sampled_from(["the prompt", " worker's", "blocks.", "1234", "日本語", "🚂", "e\u0301", "é", "\u00a0", "'s", "x" * 40]),
    st.text(max_size=6),
)


@pytest.mark.parametrize("kind", world.KINDS)
@given(parts=st.lists(_PIECES, max_size=40))
@settings(max_examples=150, deadline=None)
def test_a_text_cut_before_added_tokens_has_the_ids_of_the_whole(kind: str, parts: list[str]) -> None:
    """For five ways in which tokenizers treat the beginning of a text, and texts that try to look like added tokens."""
    _assert_cut_well(_backend(kind), "".join(parts))


def _assert_cut_well(backend: Tokenizer, text: str) -> None:
    added = [
        Added(each.content, single_word=each.single_word, lstrip=each.lstrip, normalized=each.normalized)
        for each in backend.get_added_tokens_decoder().values()
    ]
    cut = Cutter(added, least_chars=1).cut(text)
    assert "".join(cut) == text
    apart = [token for part in cut for token in backend.encode(part, add_special_tokens=False).ids]
    assert apart == backend.encode(text, add_special_tokens=False).ids


_backends: dict[str, Tokenizer] = {}


def _backend(kind: str) -> Tokenizer:
    if kind not in _backends:
        _backends[kind] = Tokenizer.from_str(world.KINDS[kind]())
    return _backends[kind]


@pytest.mark.parametrize(
    "token",
    [
        AddedToken("<cut>", lstrip=True, normalized=False),
        AddedToken("<cut>", single_word=True, normalized=False),
        AddedToken("<cut>", normalized=True),
    ],
    ids=["swallows space on its left", "only as a whole word", "after normalising"],
)
def test_no_text_is_cut_before_a_token_that_reaches_over_the_cut(token: AddedToken) -> None:
    backend = Tokenizer.from_str(world.byte_level(world.CHATML_TOKENS))
    backend.add_tokens([token])
    added = [
        Added(each.content, single_word=each.single_word, lstrip=each.lstrip, normalized=each.normalized)
        for each in backend.get_added_tokens_decoder().values()
    ]
    for text in ("some words  <cut> and more", "words<cut>and", "a <|im_end|>  <cut>\n<|im_start|> b"):
        cut = Cutter(added, least_chars=1).cut(text)
        assert not any(part.startswith("<cut>") for part in cut[1:])
        apart = [each for part in cut for each in backend.encode(part, add_special_tokens=False).ids]
        assert apart == backend.encode(text, add_special_tokens=False).ids


def test_the_next_turn_tokenises_only_what_is_new(tmp_path: Path) -> None:
    folder = world.family(tmp_path, "chatml")
    pieces = Pieces(1 << 24)
    ours = LocalTokenizer(ModelTokenizer(folder=str(folder)), pieces)
    said = [{"role": "user" if turn % 2 == 0 else "assistant", "content": f"{turn} " * 300} for turn in range(9)]
    ours.ids(chat({"messages": said}))
    before = len(pieces)
    ours.ids(chat({"messages": [*said, {"role": "assistant", "content": "A" * 400}, {"role": "user", "content": "B" * 400}]}))
    assert len(pieces) - before <= 4  # two messages, and the changed end of the prompt


def test_the_cache_keeps_within_its_bytes() -> None:
    pieces = Pieces(10_000)
    for number in range(100):
        pieces.put(number.to_bytes(16, "big"), array("I", range(50)))
        assert pieces.bytes <= 10_000
    assert 0 < len(pieces) < 100
    assert pieces.get((99).to_bytes(16, "big")) is not None and pieces.get((0).to_bytes(16, "big")) is None
    pieces.put(b"large", array("I", range(10_000)))
    assert pieces.get(b"large") is None


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "multimodal"),
        ({"messages": [{"role": "user", "content": "x"}], "chat_template": "{{ messages }}"}, "unknown_field"),
        ({"messages": [{"role": "user", "content": "x"}], "truncate_prompt_tokens": 5}, "unknown_field"),
        ({"messages": [{"role": "user", "content": "x"}], "a_new_field": 5}, "unknown_field"),
        ({"messages": [{"role": "user", "content": "x", "a_new_field": 5}]}, "unknown_field"),
        ({"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"tokenize": True}}, "template_kwargs"),
        ({"messages": []}, "invalid"),
        ({"messages": [{"role": "user", "content": 7}]}, "invalid"),
        ({"messages": [{"role": "user", "content": "x"}], "continue_final_message": True}, "invalid"),
        ({"messages": [{"role": "tool", "content": "x"}] * 2}, "template_refused"),
    ],
)
def test_what_cannot_be_followed_is_refused_with_its_reason(tmp_path: Path, body: dict[str, Any], reason: str) -> None:
    ours = local(world.family(tmp_path, "mistral"))
    with pytest.raises(CannotError) as refused:
        ours.ids(chat(body))
    assert refused.value.reason == reason


def test_other_apis_and_long_prompts_have_no_ids(tmp_path: Path) -> None:
    folder = world.family(tmp_path, "chatml")
    for treatment in (Treatment.MESSAGES, Treatment.RESPONSES):
        with pytest.raises(CannotError, match="api"):
            local(folder).ids(parse(b'{"model":"m","messages":[],"input":"x"}', treatment))
    with pytest.raises(CannotError, match="too_long"):
        local(folder, max_tokens=3).ids(completion("many more words than three"))


@pytest.mark.parametrize(
    ("files", "what"),
    [
        ({}, "tokenizer.json"),
        ({"tokenizer.json": "{"}, "tokenizer.json"),
        ({"tokenizer_config.json": "[]"}, "an object is wanted"),
        ({"tekken.json": "{}"}, "Mistral's own tokenizer"),
        ({"config.json": '{"model_type": "gpt_oss"}'}, "gpt_oss"),
        ({"config.json": '{"architectures": ["DeepseekV4ForCausalLM"]}'}, "DeepseekV4ForCausalLM"),
        ({"chat_template.json": '{"chat_template": "other"}'}, "a template of its own"),
        ({"chat_template.jinja": "{% for"}, "not a chat template"),
    ],
)
def test_a_folder_that_cannot_be_followed_is_refused_at_the_start(tmp_path: Path, files: dict[str, str], what: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    if files and "tokenizer.json" not in files:
        world.family(folder, "chatml")
    for name, text in files.items():
        (folder / name).write_text(text)
    with pytest.raises(FolderError, match=what):
        local(folder)


def test_tools_hidden_by_the_workers_are_hidden_here(tmp_path: Path) -> None:
    folder = world.family(tmp_path, "qwen")
    body = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "tool_choice": "none"}
    without = local(folder).ids(chat({"messages": body["messages"]}))
    assert local(folder, tools_without_choice=False).ids(chat(body)) == without
    assert local(folder).ids(chat(body)) != without


def test_templates_that_loop_over_parts_are_known_by_their_syntax() -> None:
    loop = "{% for m in messages %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}"
    macro = (
        "{% macro show(what) %}{% for c in what %}{{ c }}{% endfor %}{% endmacro %}"
        "{% for m in messages %}{{ show(m['content']) }}{% endfor %}"
    )
    renamed = (
        "{% set rest = messages[1:] %}{% for m in rest %}{% for c in m['content'] | list %}{{ c }}{% endfor %}{% endfor %}"
    )
    assert all(Template(text).as_parts for text in (loop, macro, renamed, world.PARTS))
    for text in (world.CHATML, world.LLAMA3, world.QWEN, world.MISTRAL, "{% for c in contents %}{{ c }}{% endfor %}"):
        assert not Template(text).as_parts
    assert Template(world.CHATML, content_format="openai").as_parts


def test_threads_share_a_tokenizer(tmp_path: Path) -> None:
    """Ids do not depend on who tokenises at the same time."""
    from concurrent.futures import ThreadPoolExecutor

    ours = local(world.family(tmp_path, "llama3"))
    draw = random.Random(7)
    bodies = [
        {"messages": [{"role": "user", "content": " ".join(draw.choices(world.CORPUS[0].split(), k=200))}]} for _ in range(40)
    ]
    alone = [local(tmp_path).ids(chat(body)) for body in bodies[:5]]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(lambda body: ours.ids(chat(body)), bodies * 3))
    assert together[:5] == alone and together[:40] == together[40:80] == together[80:]
