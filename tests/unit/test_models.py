"""Names of models: aliases, canaries that keep a conversation on one side, and what a client is told about an unknown name."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from extproc.config import ConfigError, parse
from extproc.errors import ApiError
from extproc.inference import parse as parse_request
from extproc.models import Models, Names, Target, unknown_model_message
from extproc.paths import Treatment

WORKERS = "workers: {prefill: ['10.0.0.1:8100'], decode: ['10.0.0.2:8200']}\n"


def names(**aliases: str | list[Target]) -> Names:
    return Names(Models(aliases=aliases))


def canary(**weights: float) -> list[Target]:
    return [Target(model=model, weight=weight) for model, weight in weights.items()]


def sides(found: Names, name: str = "chat", keys: int = 4000) -> dict[str, str]:
    return {f"session-{key}": found.resolve(name, f"session-{key}") for key in range(keys)}


def test_an_alias_is_its_target_and_other_names_are_themselves() -> None:
    found = names(chat="llama")
    assert found.resolve("chat", "any") == "llama"
    assert found.resolve("llama", "any") == "llama"
    assert found.resolve("unknown", "any") == "unknown"


def test_conversations_are_shared_by_weight() -> None:
    count = Counter(sides(names(chat=canary(old=9, new=1))).values())
    assert 0.07 < count["new"] / 4000 < 0.13


def test_a_conversation_stays_on_its_side_in_every_process() -> None:
    found = sides(names(chat=canary(old=1, new=1)))
    assert sides(names(chat=canary(old=1, new=1))) == found
    assert sides(names(chat=canary(new=1, old=1))) == found, "the order of the targets is no part of it"
    # By value, so that a change of the hash does not go unseen: replicas of two versions would disagree.
    assert [found[f"session-{key}"] for key in range(6)] == PINNED


PINNED = ["old", "old", "old", "new", "new", "new"]


def test_a_change_of_weight_moves_only_the_conversations_that_it_must() -> None:
    before = sides(names(chat=canary(old=9, new=1)))
    after = sides(names(chat=canary(old=8, new=2)))
    moved = {key for key in before if before[key] != after[key]}
    assert {after[key] for key in moved} == {"new"}, "nobody goes back"
    assert 0.07 < len(moved) / 4000 < 0.13


def test_two_aliases_do_not_draw_the_same_lots() -> None:
    both = names(one=canary(old=1, new=1), two=canary(old=1, new=1))
    assert sides(both, "one") != sides(both, "two")


def test_a_weight_of_zero_takes_a_target_out() -> None:
    assert set(sides(names(chat=canary(old=1, new=0))).values()) == {"old"}


def test_a_served_model_can_be_its_own_canary() -> None:
    assert set(sides(names(old=canary(old=1, new=1)), "old").values()) == {"old", "new"}


def test_the_list_of_models_has_a_card_for_each_alias_of_a_served_model() -> None:
    served = {
        "old": b'{"id":"old","object":"model","max_model_len":8192}',
        "new": b'{"id":"new","object":"model","max_model_len":4096}',
        "base": b'{"id":"base"}',
    }
    found = names(chat=canary(old=1, new=9), plain="old", base=canary(base=1, new=1), gone="nowhere").cards(served)
    assert list(found) == ["old", "new", "base", "chat", "plain"]
    assert {name: found[name] for name in served} == served
    assert msgspec.json.decode(found["chat"]) == {"id": "chat", "object": "model", "max_model_len": 4096}
    assert msgspec.json.decode(found["plain"]) == {"id": "plain", "object": "model", "max_model_len": 8192}


def test_a_canary_whose_heavier_side_is_not_served_has_the_card_of_the_other() -> None:
    found = names(chat=canary(old=1, new=9)).cards({"old": b'{"id":"old","n":1}'})
    assert msgspec.json.decode(found["chat"]) == {"id": "chat", "n": 1}


UNKNOWN = {
    "a typing error": (
        "lama",
        ["qwen", "llama"],
        "the model 'lama' does not exist here; did you mean 'llama'? Known: llama, qwen",
    ),
    "nothing like it": ("gpt-9", ["qwen", "llama"], "the model 'gpt-9' does not exist here. Known: llama, qwen"),
    "nothing is known": ("gpt-9", [], "the model 'gpt-9' does not exist here; no worker says what it serves"),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_an_unknown_model_is_answered_with_the_known_ones(case: str) -> None:
    name, known, message = UNKNOWN[case]
    assert unknown_model_message(name, known) == message


def test_the_message_is_bounded_whatever_the_client_and_the_workers_say() -> None:
    message = unknown_model_message("x" * 1_000_000, ["y" * 10_000, *(f"model-{number:03}" for number in range(500))])
    assert message.endswith("model-000, " + ", ".join(f"model-{n:03}" for n in range(1, 20)) + ", and 481 more")
    assert len(message) < 1000


REFUSED = {
    "no target": ("models:\n  aliases:\n    a: []", "baton.yaml:4: models.aliases.a: 0 models"),
    "a target that is an alias": (
        "models:\n  aliases:\n    b: c\n    vendor/a-1.5: b",
        "baton.yaml:5: models.aliases['vendor/a-1.5']: b is an alias itself",
    ),
    "itself": ("models: {aliases: {a: a}}", "baton.yaml:2: models.aliases.a: it stands for itself"),
    "a target twice": ("models: {aliases: {a: [{model: b}, {model: b}]}}", "models.aliases.a: b stands there twice"),
    "an empty name": ("models: {aliases: {a: ''}}", "models.aliases.a: a name has 1 to 256 characters"),
    "nobody gets anything": ("models: {aliases: {a: [{model: b, weight: 0}]}}", "models.aliases.a: all weights are 0"),
    "less than nothing": (
        "models:\n  aliases:\n    a:\n    - model: b\n      weight: -1",
        "baton.yaml:6: models.aliases.a[0].weight: -1 is not from 0",
    ),
    "an unknown key": ("models: {alias: {a: b}}", "models.alias: unknown field; did you mean aliases?"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_aliases_that_cannot_work_are_refused_with_line_and_field(case: str) -> None:
    text, message = REFUSED[case]
    with pytest.raises(ConfigError) as caught:
        parse(WORKERS + text, source="baton.yaml")
    assert message in str(caught.value)
    assert str(caught.value).startswith("baton.yaml:")


BODY = b'{"model": "chat", "prompt": "one two",  "max_tokens": 5}'


def test_both_legs_and_the_whole_request_name_the_target_and_nothing_else_changes() -> None:
    request = parse_request(BODY, Treatment.COMPLETIONS)
    assert request.clean_body() is None
    renamed = request.with_model("llama")
    expected = {"model": "llama", "prompt": "one two", "max_tokens": 5}
    for body in (renamed.clean_body(), renamed.decode_body(None)):
        assert body is not None
        assert list(msgspec.json.decode(body).items()) == list(expected.items()), "the keys stay in their places"
    decode = renamed.decode_body(b'{"a":1}')
    assert decode is not None
    assert msgspec.json.decode(decode) == {**expected, "kv_transfer_params": {"a": 1}}
    assert msgspec.json.decode(renamed.prefill_body(b"{}"))["model"] == "llama"
    assert renamed.model() == "llama"
    assert request.model() == "chat", "the client's own request is as it was"


def test_a_name_that_does_not_change_leaves_the_clients_bytes_alone() -> None:
    request = parse_request(BODY, Treatment.COMPLETIONS)
    assert request.with_model("chat") is request


def test_what_was_taken_out_of_the_body_stays_out_under_another_name() -> None:
    request = parse_request(b'{"model":"chat","kv_transfer_params":{}}', Treatment.COMPLETIONS).with_model("llama")
    assert request.clean_body() == b'{"model":"llama"}'
    assert request.removed == ("kv_transfer_params",)


def test_a_request_without_a_model_cannot_be_renamed() -> None:
    with pytest.raises(ApiError) as caught:
        parse_request(b'{"prompt":"x"}', Treatment.COMPLETIONS).with_model("llama")
    assert caught.value.code == "model_missing"
