"""What prefill replies teach: the same prompt again, and the beginnings of longer ones, which must always be true."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from extproc.inference import InferenceRequest, parse
from extproc.paths import Treatment
from extproc.prompt import PromptSettings, read_prompt, text_of
from extproc.routing.token_chain import TokenChain
from extproc.tokens.cache import Pieces
from extproc.tokens.identity import NO_PART, prompt_key
from extproc.tokens.ids import PIECE_BYTES, unpack
from extproc.tokens.learned import PROOFS, Beginning, Memory, Shape, common
from extproc.tokens.local import LocalTokenizer
from extproc.tokens.settings import ModelTokenizer
from tests.unit import tokens_world as world

PROMPTS = PromptSettings()


class Taught:
    """A memory that is taught by an engine with a real tokenizer, as replies would do it."""

    def __init__(self, folder: Path) -> None:
        self.engine = LocalTokenizer(ModelTokenizer(folder=str(folder)), Pieces(1 << 24))
        self.now_s = 0.0
        self.memory = Memory(1 << 26, keep_s=3600.0, block_bytes=PROMPTS.block_bytes, clock=lambda: self.now_s)
        self.told = 0
        self.wrong = 0
        self.refuted = 0

    def begins_like(self, request: InferenceRequest) -> Beginning | None:
        """As the source asks it."""
        if b'"reasoning' in request.body or b"think>" in request.body:
            return None
        hashes = read_prompt(request, PROMPTS, model="m").chain.hashes
        inside, larger = request.treatment is Treatment.COMPLETIONS, b'"tool' in request.body
        return self.memory.beginning(hashes, text_of(request, PROMPTS), goes_on_inside=inside, larger=larger)

    def serve(self, request: InferenceRequest) -> tuple[array[int], array[int]]:
        """One prompt, first asked about and then taught: what was told of it, and its true ids."""
        prompt = read_prompt(request, PROMPTS, model="m")
        text = text_of(request, PROMPTS)
        shape = Shape(request.treatment, "m", b'"tool' in request.body)
        found = self.begins_like(request)
        tokens = 0 if found is None else self.memory.relied_upon(shape, found)
        told = array("I") if found is None else found.earlier.chain.token_ids[:tokens]
        true = self.engine.ids(request)
        if told:
            self.told += 1
            self.wrong += told != true[: len(told)]
        if found is not None:
            held = self.memory.proved(shape, found, common(found.earlier.chain.token_ids, true))
            self.refuted += not held
        rest = bytes(text[len(prompt.chain.hashes) * PROMPTS.block_bytes :])
        self.memory.learn(prompt_key(request, "m"), "m", TokenChain(true[:]), prompt.chain.hashes, rest)
        return told, true


def chat(messages: list[dict[str, Any]], **more: Any) -> InferenceRequest:
    return parse(json.dumps({"model": "m", "messages": messages, **more}, ensure_ascii=False).encode(), Treatment.CHAT)


def completion(prompt: str) -> InferenceRequest:
    return parse(json.dumps({"model": "m", "prompt": prompt}, ensure_ascii=False).encode(), Treatment.COMPLETIONS)


def conversation(turns: int, system: str = "You are helpful. " * 40, word: str = "question") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"role": "system", "content": system}]
    for turn in range(turns):
        found.append({"role": "user", "content": f"{word} {turn}: what is the capital of France? " * 9})
        found.append({"role": "assistant", "content": f"answer {turn}. " * 20})
    return found


_TEXTS = st.text(
    st.one_of(st.sampled_from("abc xyz .\n\t'\"\\/<>|{}日本🚂é\u00a0"), st.characters(exclude_categories=["Cs"])), max_size=400
)
_BLOCKS = st.builds(lambda text, size: ((text or "-") * size)[:size], _TEXTS, st.integers(1, 1500))


@pytest.mark.parametrize("family", ["chatml", "llama3"])
@given(
    texts=st.lists(_BLOCKS, min_size=4, max_size=14),
    cuts=st.lists(st.integers(1, 14), min_size=3, max_size=9),
    other=_BLOCKS,
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_what_is_told_of_a_chat_is_always_its_beginning(
    tmp_path_factory: pytest.TempPathFactory, family: str, texts: list[str], cuts: list[int], other: str
) -> None:
    """With templates that add at the end: turns that go on, branch, and share only their system prompt; any text."""
    taught = Taught(_folder(tmp_path_factory, family))
    for number in range(PROOFS):  # proved by plain conversations first, so that the texts below are told something
        for turns in (1, 2, 3):
            taught.serve(chat(conversation(turns, word=f"word{number}")[:-1]))
    said = [
        {"role": ("system", "user", "assistant")[min(index, 1 + index % 2)], "content": text}
        for index, text in enumerate(texts)
    ]
    for cut in cuts:
        taught.serve(chat(said[:cut]))
        taught.serve(chat([*said[:cut], {"role": "user", "content": other}]))
        taught.serve(chat([*said[: cut - 1], {"role": "user", "content": said[min(cut, len(said)) - 1]["content"] + other}]))
    assert taught.wrong == 0 and taught.told > 2


@given(parts=st.lists(_BLOCKS, min_size=2, max_size=10), others=st.lists(_BLOCKS, min_size=1, max_size=4))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_what_is_told_of_a_text_is_always_its_beginning(
    tmp_path_factory: pytest.TempPathFactory, parts: list[str], others: list[str]
) -> None:
    """Completions that go on in the middle of a word, too."""
    taught = Taught(_folder(tmp_path_factory, "chatml"))
    plain = " ".join(world.CORPUS) * 5
    for end in range(1000, 3000, 100):
        taught.serve(completion(plain[:end]))
    for index in range(len(parts)):
        for other in ("", *others):
            taught.serve(completion("".join(parts[: index + 1]) + other))
            taught.serve(completion(plain[: 900 + 37 * index] + other))
    assert taught.wrong == 0 and taught.told > 10


_folders: dict[str, Path] = {}


def _folder(factory: pytest.TempPathFactory, family: str) -> Path:
    if family not in _folders:
        _folders[family] = world.family(factory.mktemp(family), family)
    return _folders[family]


@pytest.mark.parametrize("family", ["chatml", "llama3", "qwen"])
def test_the_next_turn_of_a_conversation_is_known_but_for_a_few_tokens(tmp_path: Path, family: str) -> None:
    taught = Taught(world.family(tmp_path, family))
    told, true, before = array("I"), array("I"), array("I")
    for turns in range(1, 8):
        before = true
        told, true = taught.serve(chat(conversation(turns)[:-1]))
    assert taught.told >= 3 and taught.wrong == 0
    assert len(before) - 24 <= len(told) < len(before) < len(true)


def test_conversations_with_the_same_system_prompt_share_it(tmp_path: Path) -> None:
    taught = Taught(world.family(tmp_path, "chatml"))
    system = "You are a helpful assistant; answer in one short sentence, please. " * 100
    told = array("I")
    for number in range(8):
        told, _ = taught.serve(chat(conversation(1, system, word=f"number {number * 7}")[:-1]))
    alone = taught.engine.ids(chat([{"role": "system", "content": system}], add_generation_prompt=False))
    assert taught.wrong == 0 and len(told) > 0.5 * len(alone)


def test_nothing_is_told_before_it_has_proved_true(tmp_path: Path) -> None:
    taught = Taught(world.family(tmp_path, "chatml"))
    for turns in range(1, 2 + PROOFS):
        told, _ = taught.serve(chat(conversation(turns)[:-1]))
        assert not told
    told, _ = taught.serve(chat(conversation(5)[:-1]))
    assert told


def test_a_template_that_changes_what_came_before_tells_nothing(tmp_path: Path) -> None:
    """Mistral's: the system prompt and the tools stand before the last question, wherever that is."""
    taught = Taught(world.family(tmp_path, "mistral"))
    for turns in range(1, 12):
        told, _ = taught.serve(chat(conversation(turns)[:-1]))
        assert not told
    assert taught.refuted > 0


def test_thoughts_that_are_dropped_with_the_next_turn_are_no_beginning(tmp_path: Path) -> None:
    taught = Taught(world.family(tmp_path, "qwen"))
    for turns in range(1, 7):
        taught.serve(chat(conversation(turns)[:-1]))
    thoughtful = conversation(3)
    for message in thoughtful:
        if message["role"] == "assistant":
            message["reasoning_content"] = "let me think " * 30
    taught.serve(chat(thoughtful))
    told, _ = taught.serve(chat([*thoughtful, {"role": "user", "content": "and now? " * 50}]))
    assert not told and taught.wrong == 0


def test_a_beginning_that_proves_wrong_ends_it_for_its_shape(tmp_path: Path) -> None:
    taught = Taught(world.family(tmp_path, "chatml"))
    for turns in range(1, 7):
        taught.serve(chat(conversation(turns)[:-1]))
    assert taught.told
    request = chat(conversation(7)[:-1])
    found = taught.begins_like(request)
    shape = Shape(Treatment.CHAT, "m", False)
    assert found is not None and taught.memory.relied_upon(shape, found)
    assert not taught.memory.proved(shape, found, common_tokens=10)
    assert taught.memory.relied_upon(shape, found) == 0
    assert taught.memory.relied_upon(Shape(Treatment.CHAT, "m", True), found) == 0
    taught.now_s += 3599.0
    for _ in range(PROOFS):
        taught.memory.proved(shape, found, found.earlier.chain.tokens)
    assert taught.memory.relied_upon(shape, found) == 0
    taught.now_s += 2.0
    assert taught.memory.relied_upon(shape, found) > 0


def test_the_same_prompt_is_known_until_its_time_is_over(tmp_path: Path) -> None:
    taught = Taught(world.family(tmp_path, "chatml"))
    request = chat(conversation(2)[:-1])
    _, true = taught.serve(request)
    key = prompt_key(request, "m")
    seen = taught.memory.seen(key)
    assert seen is not None and seen.token_ids == true
    taught.now_s = 3601.0
    assert taught.memory.seen(key) is None and len(taught.memory) == 0 and taught.memory.bytes == 0


def test_it_keeps_within_its_bytes_and_forgets_a_model() -> None:
    memory = Memory(200_000, keep_s=1e9, block_bytes=256, clock=lambda: 0.0)
    for number in range(300):
        blocks = array("Q", range(number * 10, number * 10 + 10))
        memory.learn(number.to_bytes(16, "big"), f"m{number % 2}", TokenChain(array("I", range(100))), blocks, b"x")
        assert memory.bytes <= 200_000
    assert 0 < len(memory) < 300 and memory.seen((0).to_bytes(16, "big")) is None
    assert memory.seen((299).to_bytes(16, "big")) is not None
    left = len(memory)
    assert memory.forget("m1") == pytest.approx(left / 2, abs=1)
    assert memory.forget("m0") + memory.forget("m1") == left - left // 2 or len(memory) == 0
    assert len(memory) == 0 and memory.bytes == 0 and not memory._ends


@pytest.mark.parametrize("name", sorted(NO_PART))
def test_how_an_answer_is_sampled_is_no_part_of_a_prompt(name: str) -> None:
    one = parse(b'{"model":"m","messages":[{"role":"user","content":"x"}]}', Treatment.CHAT)
    other = parse(b'{"model":"m","%s":1,"messages":[{"role":"user","content":"x"}]}' % name.encode(), Treatment.CHAT)
    assert prompt_key(one, "m") == prompt_key(other, "m")


@pytest.mark.parametrize(
    "more",
    [
        {"tools": []},
        {"tool_choice": "none"},
        {"cache_salt": "a"},
        {"chat_template_kwargs": {}},
        {"continue_final_message": False},
        {"response_format": {"type": "text"}},
        {"a_field_of_tomorrow": 1},
    ],
)
def test_everything_else_is(more: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "x"}]
    assert prompt_key(chat(messages), "m") != prompt_key(chat(messages, **more), "m")
    assert prompt_key(chat(messages), "m") != prompt_key(chat(messages), "other")


def test_fields_cannot_run_into_each_other() -> None:
    one = parse(b'{"model":"m","a":"x","bc":"y"}', Treatment.CHAT)
    other = parse(b'{"model":"m","ab":"x","c":"y"}', Treatment.CHAT)
    assert prompt_key(one, "m") != prompt_key(other, "m")


@given(ids=st.lists(st.integers(0, 2**32 - 1), max_size=30), times=st.sampled_from([1, 3, 400, 1500]))
@settings(deadline=None, max_examples=60)
def test_a_list_of_ids_is_read_in_pieces_as_it_is_whole(ids: list[int], times: int) -> None:
    turns = 0

    def turn() -> None:
        nonlocal turns
        turns += 1

    listed = msgspec.json.encode(ids * times)
    assert unpack(listed, turn) == array("I", ids * times)
    assert turns >= len(listed) // (PIECE_BYTES + 12) - 1


@pytest.mark.parametrize("text", [b"", b"null", b"[1,", b"[-1]", b"[4294967296]", b'["1"]', b"[1.5]", b"{}"])
def test_what_is_no_list_of_ids_is_none(text: bytes) -> None:
    assert unpack(text) is None
    assert unpack(b"[" + b"1," * 40_000 + text.strip(b"[]") + b",]") is None


@given(one=st.lists(st.integers(0, 9), max_size=3000), same=st.integers(0, 3000))
@settings(deadline=None)
def test_common_beginnings_are_counted_to_the_token(one: list[int], same: int) -> None:
    same = min(same, len(one))
    assert common(array("I", one), array("I", [*one[:same], 10, 11])) == same
    assert common(array("I", one), array("I", one[:same])) == same
