"""Tokenizer, chat template and answers of the simulated engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.sim import template, text, tokens
from workers.sim.prompts import Model, expected_answer, expected_answers
from workers.sim.text import Stop, answer_steps, expected_text, prompt_state

MESSAGES = [{"role": "user", "content": "What is the weather in Paris?"}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@given(st.text())
def test_any_text_comes_back_from_its_tokens(value: str) -> None:
    assert tokens.decode(tokens.encode(value)) == value


def test_english_takes_about_one_token_for_three_characters() -> None:
    sentence = "The quick brown fox jumps over the lazy dog, and nobody has ever asked it why it does so. " * 10
    assert 2.5 < len(sentence) / len(tokens.encode(sentence)) < 3.5


def test_token_ids_are_those_of_the_pieces() -> None:
    assert tokens.encode("a") == [16 + ord("a")]
    assert tokens.encode("é") == [16 + 0xC3, 16 + 0xA9]
    assert tokens.piece_bytes(tokens.encode(" the")[0]) == b" the"
    assert max(tokens.encode("zzzz zzzz")) < tokens.VOCAB_SIZE


@pytest.mark.parametrize(
    "dropped",
    [
        {"tools": [TOOL]},
        {"tools": [TOOL], "tool_choice": "required"},
        {"response_format": {"type": "json_object"}},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "low"},
        {"documents": [{"title": "a", "text": "b"}]},
        {"add_generation_prompt": False},
        {"chat_template": "{{ messages }}"},
        {"continue_final_message": True},
    ],
)
def test_a_leg_that_drops_a_field_of_the_prompt_has_other_tokens(dropped: Mapping[str, Any]) -> None:
    assert template.render(MESSAGES, dropped) != template.render(MESSAGES, {})


def test_the_key_order_of_tools_counts() -> None:
    swapped = {"function": TOOL["function"], "type": "function"}
    assert template.render(MESSAGES, {"tools": [TOOL]}) != template.render(MESSAGES, {"tools": [swapped]})


def test_other_images_are_other_tokens() -> None:
    def image(url: str) -> list[int]:
        return template.render([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}], {})

    assert image("http://a/1.png") != image("http://a/2.png")
    assert template.has_media([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])
    assert not template.has_media([{"role": "user", "content": [{"type": "text", "text": "x"}]}])


def test_an_answer_depends_on_every_token_of_the_prompt() -> None:
    answers = {expected_text(prompt, 8) for prompt in ([1, 2, 3], [1, 2, 4], [2, 2, 3], [1, 2], [1, 2, 3, 3])}
    assert len(answers) == 5


def test_an_answer_to_a_longer_cap_starts_with_the_one_to_a_shorter() -> None:
    assert expected_text([1, 2, 3], 100, ignore_eos=True).startswith(expected_text([1, 2, 3], 50, ignore_eos=True))


def test_an_adapter_is_another_model() -> None:
    assert expected_text([1, 2, 3], 8) != expected_text([1, 2, 3], 8, adapter="ada")


def test_eos_ends_an_answer_unless_it_is_ignored_or_comes_too_early() -> None:
    state = prompt_state([1, 2, 3])
    natural = answer_steps(state, Stop(10_000), mean_tokens=20)
    assert 11 <= len(natural) <= 31
    assert (natural[-1].token_id, natural[-1].text, natural[-1].finish_reason) == (tokens.EOS, "", "stop")
    assert len(answer_steps(state, Stop(100, ignore_eos=True), mean_tokens=20)) == 100
    assert len(answer_steps(state, Stop(100, min_tokens=50), mean_tokens=20)) == 51
    assert len(answer_steps(state, Stop(100), mean_tokens=0)) == 100
    assert text.Answer(state, Stop(5), eos_first=True).next().finish_reason == "stop"


def test_a_stop_string_is_cut_off_and_named() -> None:
    whole = expected_text([1, 2, 3], 20, ignore_eos=True)
    stop = whole[9:14]  # across two tokens
    steps = answer_steps(prompt_state([1, 2, 3]), Stop(20, ignore_eos=True, strings=(stop,)))
    assert "".join(step.text for step in steps) == whole[: whole.index(stop)]
    assert (steps[-1].finish_reason, steps[-1].stop_reason) == ("stop", stop)
    kept = expected_text([1, 2, 3], 20, ignore_eos=True, stop=[stop], keep_stop_string=True)
    assert kept == whole[: whole.index(stop) + len(stop)]


def test_text_that_may_become_a_stop_string_is_held_back_and_comes_in_the_end() -> None:
    whole = expected_text([1, 2, 3], 20, ignore_eos=True)
    steps = answer_steps(prompt_state([1, 2, 3]), Stop(20, ignore_eos=True, strings=("never said",)))
    assert steps[0].text == "" and "".join(step.text for step in steps) == whole


def test_a_stop_token_ends_the_answer() -> None:
    third = answer_steps(prompt_state([1, 2, 3]), Stop(3, ignore_eos=True))[2]
    steps = answer_steps(prompt_state([1, 2, 3]), Stop(20, ignore_eos=True, token_ids=frozenset((third.token_id,))))
    assert len(steps) == 3 and steps[-1].finish_reason == "stop" and steps[-1].stop_reason == third.token_id


def test_a_text_prompt_and_its_token_ids_have_one_answer() -> None:
    ids = [tokens.BOS, *tokens.encode("hello there")]
    by_text = expected_answer("/v1/completions", {"prompt": "hello there", "max_tokens": 9})
    assert by_text == expected_answer("/v1/completions", {"prompt": ids, "max_tokens": 9}) == expected_text(ids, 9)


def test_the_same_conversation_has_one_answer_on_every_endpoint() -> None:
    chat = expected_answer("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 7})
    said = MESSAGES[0]["content"]
    assert chat == expected_answer("/v1/responses", {"input": said, "max_output_tokens": 7})
    assert chat == expected_answer("/v1/messages", {"model": Model().names[0], "messages": MESSAGES, "max_tokens": 7})
    body = {"token_ids": template.render(MESSAGES, {}), "sampling_params": {"max_tokens": 7}}
    assert chat == expected_answer("/inference/v1/generate", body)


def test_every_choice_has_its_expected_answer() -> None:
    body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 4, "echo": True}
    first, again, second, _ = expected_answers("/v1/completions", body)
    assert first == again and first.startswith("a ") and second.startswith("b ")
