"""What counts as the same beginning of a prompt, and how long a prompt is taken to be."""

from __future__ import annotations

import base64
import json
import random
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.inference import parse
from extproc.paths import Treatment
from extproc.prompt import IDENTITY, BytesPerToken, Prompt, PromptSettings, read_prompt

SETTINGS = PromptSettings(block_tokens=4, image_tokens=100)
LONG = "All that is gold does not glitter, not all those who wander are lost. "


def read(treatment: Treatment, body: dict, *, model: str = "m", settings: PromptSettings = SETTINGS, **how) -> Prompt:
    return read_prompt(parse(json.dumps(body).encode(), treatment), settings, model=model, **how)


def shared(one: Prompt, other: Prompt) -> int:
    """Leading blocks that both have."""
    pairs = zip(one.chain.hashes, other.chain.hashes, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one.chain.hashes), len(other.chain.hashes)))


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict:
    return {"role": "assistant", "content": text}


SYSTEM = {"role": "system", "content": LONG}

TURNS = {
    Treatment.CHAT: lambda turns: {"messages": [SYSTEM, *turns]},
    Treatment.RESPONSES: lambda turns: {"instructions": LONG, "input": turns},
    Treatment.MESSAGES: lambda turns: {"system": LONG, "messages": turns},
}


@pytest.mark.parametrize("with_tools", [False, True])
@pytest.mark.parametrize("treatment", list(TURNS))
def test_the_next_turn_of_a_conversation_has_the_whole_chain_of_the_one_before(treatment, with_tools) -> None:
    tools = {"tools": [{"type": "function", "function": {"name": LONG}}]} if with_tools else {}
    first = read(treatment, {**tools, **TURNS[treatment]([user(LONG)])})
    second = read(treatment, {**tools, **TURNS[treatment]([user(LONG), assistant("yes"), user("why?")])})
    assert len(first.chain.hashes) > 8
    assert shared(first, second) == len(first.chain.hashes)
    assert second.tokens > first.tokens


@pytest.mark.parametrize("treatment", list(TURNS))
def test_another_question_shares_the_system_prompt_and_the_tools(treatment) -> None:
    tools = {"tools": [{"type": "function", "function": {"name": LONG}}]}
    one = read(treatment, {**tools, **TURNS[treatment]([user("A" * 99)])})
    other = read(treatment, {**tools, **TURNS[treatment]([user("B" * 99)])})
    assert 2 * len(LONG) // 16 <= shared(one, other) < len(one.chain.hashes)


@pytest.mark.parametrize("treatment", list(TURNS))
def test_other_tools_share_the_system_prompt_at_most(treatment) -> None:
    def with_tool(name: str) -> Prompt:
        return read(treatment, {"tools": [{"type": "function", "name": name}], **TURNS[treatment]([user(LONG)])})

    common = shared(with_tool("A" * 50), with_tool("B" * 50))
    assert len(LONG) // 16 <= common <= (len(LONG) + 100) // 16


def test_without_a_system_message_the_tools_come_first() -> None:
    tools = {"tools": [{"type": "function", "function": {"name": LONG}}]}
    one, other = (read(Treatment.CHAT, {**tools, "messages": [user(text * 99)]}) for text in "AB")
    assert shared(one, other) >= len(LONG) // 16


def test_tools_and_documents_count_as_tokens() -> None:
    bare = read(Treatment.CHAT, {"messages": [user("hi")]})
    full = read(Treatment.CHAT, {"messages": [user("hi")], "tools": [{"n": LONG}], "documents": [{"text": LONG}]})
    assert full.tokens - bare.tokens >= 2 * len(LONG) / 4


@pytest.mark.parametrize("key", IDENTITY)
@pytest.mark.parametrize("treatment", [Treatment.CHAT, Treatment.COMPLETIONS])
def test_a_field_that_changes_the_cache_from_the_first_token_on_changes_every_block(treatment, key) -> None:
    body = {"messages": [user(LONG)], "prompt": LONG}
    bare = read(treatment, body)
    assert shared(bare, read(treatment, {**body, key: "other"})) == 0
    assert shared(bare, read(treatment, {**body, key: None})) == len(bare.chain.hashes), "null says nothing"


def test_another_model_or_adapter_shares_nothing() -> None:
    body = {"prompt": LONG}
    assert shared(read(Treatment.COMPLETIONS, body), read(Treatment.COMPLETIONS, body, model="m-adapter")) == 0


@pytest.mark.parametrize("key", ["temperature", "max_tokens", "add_generation_prompt", "tool_choice", "user", "seed"])
def test_a_field_that_does_not_change_the_cache_changes_nothing(key) -> None:
    body = {"messages": [user(LONG)]}
    bare = read(Treatment.CHAT, body)
    assert read(Treatment.CHAT, {key: 1, **body}).chain == bare.chain


def test_values_cannot_move_from_one_field_of_the_identity_to_another() -> None:
    one = read(Treatment.COMPLETIONS, {"prompt": LONG, "cache_salt": "ab", "chat_template": "c"})
    other = read(Treatment.COMPLETIONS, {"prompt": LONG, "cache_salt": "a", "chat_template": "bc"})
    assert shared(one, other) == 0


def test_a_text_prompt_is_counted_by_its_bytes() -> None:
    prompt = read(Treatment.COMPLETIONS, {"prompt": "x" * 1000}, bytes_per_token=5.0)
    assert (prompt.tokens, prompt.exact, prompt.size_bytes, prompt.text_bytes) == (200, False, 1000, 1000)
    assert len(prompt.chain.hashes) == 1000 // 16
    assert prompt.chain.block_tokens == pytest.approx(16 / 5)


def test_the_chain_does_not_depend_on_the_estimate() -> None:
    one, other = (read(Treatment.COMPLETIONS, {"prompt": LONG}, bytes_per_token=n) for n in (3.0, 5.0))
    assert one.chain.hashes == other.chain.hashes


def test_token_ids_are_counted_exactly() -> None:
    ids = list(range(1000, 1041))
    prompt = read(Treatment.COMPLETIONS, {"prompt": ids}, bytes_per_token=7.0)
    assert (prompt.tokens, prompt.exact, prompt.text_bytes) == (41, True, 0)
    assert (len(prompt.chain.hashes), prompt.chain.block_tokens) == (10, 4)
    longer = read(Treatment.COMPLETIONS, {"prompt": [*ids, 1, 2, 3]})
    assert shared(prompt, longer) == 10
    assert len(longer.chain.hashes) == 11


def test_spaces_between_token_ids_do_not_matter() -> None:
    tight = parse(b'{"prompt":[1,2,3,4]}', Treatment.COMPLETIONS)
    loose = parse(b'{"prompt": [ 1 , 2 ,\n3, 4 ] }', Treatment.COMPLETIONS)
    chains = [read_prompt(request, SETTINGS, model="m").chain for request in (tight, loose)]
    assert chains[0] == chains[1]
    assert len(chains[0].hashes) == 1


@pytest.mark.parametrize("prompt", [LONG, list(range(40))])
def test_a_list_of_one_prompt_is_that_prompt(prompt) -> None:
    one, listed = (read(Treatment.COMPLETIONS, {"prompt": value}) for value in (prompt, [prompt]))
    assert one.chain == listed.chain
    assert one.tokens == listed.tokens


@pytest.mark.parametrize(
    "value",
    [None, 7, True, {}, {"a": 1}, [], [[]], ["a", "b"], [[1], [2]], [1, "a"], [-1], [2**32], [2**70], [1.5], [None], "", 1e99],
)
def test_what_is_no_prompt_raises_nothing(value) -> None:
    for treatment, key in product(Treatment, ("prompt", "messages", "input", "system", "instructions", "tools")):
        prompt = read(treatment, {key: value})
        assert prompt.tokens <= 6, "at most its bytes as text"


@pytest.mark.parametrize("value", [None, 7, {"a": 1}, [], ["a" * 99, "b" * 99], [[1] * 99, [2] * 99], [-1] * 99, [2**32] * 99])
def test_what_is_no_single_prompt_has_an_empty_chain(value) -> None:
    prompt = read(Treatment.COMPLETIONS, {"prompt": value})
    assert not prompt.chain.hashes
    assert prompt.tokens == 0


@pytest.mark.parametrize("value", [7, "text", {"role": "user"}, None])
def test_messages_that_are_no_list_have_an_empty_chain(value) -> None:
    assert not read(Treatment.CHAT, {"messages": value, "tools": [{"name": LONG}]}).chain.hashes


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
_keys = st.sampled_from(["prompt", "messages", "input", "system", "instructions", "tools", "documents", *IDENTITY])


@given(st.dictionaries(_keys, _json, max_size=6), st.sampled_from(list(Treatment)))
def test_no_body_makes_it_raise(body, treatment) -> None:
    prompt = read(treatment, body)
    assert prompt.tokens >= 0
    assert len(prompt.chain.hashes) <= prompt.size_bytes


def test_a_chain_ends_at_the_limit_and_the_tokens_do_not() -> None:
    settings = PromptSettings(block_tokens=4, max_tokens=40)
    text = read(Treatment.COMPLETIONS, {"prompt": "x" * 4000}, settings=settings)
    assert (len(text.chain.hashes), text.tokens) == (10, 1000)
    ids = read(Treatment.COMPLETIONS, {"prompt": [7] * 4000}, settings=settings)
    assert (len(ids.chain.hashes), ids.tokens) == (10, 4000)


def _image(seed: int, size_bytes: int = 300_000) -> str:
    return base64.b64encode(random.Random(seed).randbytes(size_bytes)).decode()


def _seen(data: str, question: str = "What is this?") -> dict:
    url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    return {"messages": [{"role": "user", "content": [url, {"type": "text", "text": question * 10}]}]}


def test_an_image_in_the_body_counts_as_its_tokens_and_not_as_text() -> None:
    prompt = read(Treatment.CHAT, _seen(_image(1)))
    assert 100 < prompt.tokens < 200
    assert prompt.size_bytes > 400_000
    assert prompt.text_bytes == 0, "nothing is learned from it"


def test_the_same_image_is_shared_and_another_is_not() -> None:
    one, same = read(Treatment.CHAT, _seen(_image(1), "A")), read(Treatment.CHAT, _seen(_image(1), "B"))
    other = read(Treatment.CHAT, _seen(_image(2), "A"))
    assert shared(one, same) >= 25, "the blocks of the image"
    assert shared(one, other) < 10, "what stands before the image"


@pytest.mark.parametrize("spelling", ['{"data": "%s", "format": "wav"}', '{"media_type":"image/png","data":"%s"}'])
def test_bare_base64_counts_as_media_too(spelling) -> None:
    body = ('{"messages":[{"role":"user","content":[' + spelling % _image(3) + "]}]}").encode()
    assert read_prompt(parse(body, Treatment.MESSAGES), SETTINGS, model="m").tokens < 200


def test_text_that_looks_like_media_stays_text() -> None:
    text = '{"data": "' + "no base64, but words. " * 2000
    prompt = read(Treatment.COMPLETIONS, {"prompt": text})
    assert prompt.text_bytes == prompt.size_bytes
    assert prompt.tokens == round(prompt.size_bytes / 4)


def test_a_cache_mark_that_moves_on_does_not_change_what_is_before_it() -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    first = {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG, **mark}]}]}
    second = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": LONG}]},
            {"role": "assistant", "content": "yes"},
            {"role": "user", "content": [{**mark, "type": "text", "text": LONG}]},
        ]
    }
    one, other = read(Treatment.MESSAGES, first), read(Treatment.MESSAGES, second)
    assert shared(one, other) == len(one.chain.hashes)


def test_bytes_per_token_starts_at_four_and_follows_what_the_engine_counts() -> None:
    learned = BytesPerToken()
    assert learned.of("m") == 4.0
    for _ in range(200):
        learned.note("m", 3000, 1000)
    assert learned.of("m") == pytest.approx(3.0, abs=0.05)
    for _ in range(200):
        learned.note("m", 6000, 1000)
    assert learned.of("m") == pytest.approx(6.0, abs=0.1), "old counts fade"
    assert learned.of("other") == 4.0


def test_bytes_per_token_stays_within_its_bounds_and_leaves_out_what_says_nothing() -> None:
    learned = BytesPerToken()
    for _ in range(500):
        learned.note("high", 10**9, 100)
        learned.note("low", 1, 10**6)
        learned.note("short", 10_000, 3)
        learned.note("exact", 0, 1000)
    assert [learned.of(name) for name in ("high", "low", "short", "exact")] == [8.0, 1.0, 4.0, 4.0]


def test_the_model_not_seen_for_longest_is_forgotten() -> None:
    learned = BytesPerToken(max_models=2)
    for name in ("a", "b", "a", "c"):
        learned.note(name, 100_000, 50_000)
    assert learned.of("b") == 4.0
    assert learned.of("a") < 3
    assert learned.of("c") < 3
