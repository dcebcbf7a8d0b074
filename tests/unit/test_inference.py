"""Body editing: what each leg gets for any body that a client may send."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.errors import ApiError
from extproc.inference import TRANSFER_KEYS, parse, token_ids_of
from extproc.paths import Treatment

PARAMS = b'{"do_remote_prefill" : true}'
ASK = b'{"do_remote_decode":true}'

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=("Cs",))),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters(exclude_categories=("Cs",))), inner),
    max_leaves=12,
)
request_keys = st.sampled_from(
    [
        *TRANSFER_KEYS, "model", "messages", "prompt", "tools", "stream", "stream_options", "max_tokens",
        "max_completion_tokens", "min_tokens", "n", "stop", "ignore_eos", "logprobs", "top_logprobs", "vllm_xargs",
        "sampling_params", "cache_salt", "tool_choice", "response_format", "chat_template_kwargs",
        "max_output_tokens", "stop_sequences", "store", "system", "input",
    ]
) | st.text(st.characters(exclude_categories=("Cs",)))  # fmt: skip
bodies = st.dictionaries(request_keys, values, max_size=10)
spelling = st.builds(
    lambda indent, ascii_only, colon, comma: {
        "indent": indent, "ensure_ascii": ascii_only, "separators": (comma, colon),
    },
    st.sampled_from([None, 1, 3]),
    st.booleans(),
    st.sampled_from([":", " : ", ":\n"]),
    st.sampled_from([",", " ,\t"]),
)  # fmt: skip
treatments = st.sampled_from([how for how in Treatment if how.apart])


def spelt_values(body: dict[str, object], style: dict[str, object]) -> dict[str, bytes]:
    """The bytes of each top-level value as the client spelt them."""
    return {key: json.dumps(value, **style).encode() for key, value in body.items()}  # type: ignore[arg-type]


@given(bodies, spelling, treatments)
def test_decode_body_is_the_clients_bytes_and_our_params(
    body: dict[str, object], style: dict[str, object], how: Treatment
) -> None:
    style = {**style, "indent": None}  # nested indentation depends on the depth; the next test has it
    spelt = spelt_values(body, style)
    sent = b"{" + b" ,\n".join(json.dumps(key).encode() + b" :\t" + value for key, value in spelt.items()) + b"}"
    decoded = parse(sent, how).decode_body(PARAMS)
    fields = parse_raw(decoded)
    assert fields.pop("kv_transfer_params") == PARAMS
    for key in TRANSFER_KEYS:
        spelt.pop(key, None)
    for key in ("vllm_xargs", "sampling_params"):  # may have lost an inner key; other tests say which
        fields.pop(key, None)
        spelt.pop(key, None)
    assert fields == spelt
    assert list(fields) == list(spelt)


@given(bodies, spelling, treatments)
def test_any_spelling_of_an_object_means_the_same_on_the_decode_leg(
    body: dict[str, object], style: dict[str, object], how: Treatment
) -> None:
    sent = json.dumps(body, **style).encode()  # type: ignore[arg-type]
    received = json.loads(parse(sent, how).decode_body(PARAMS))
    assert received.pop("kv_transfer_params") == {"do_remote_prefill": True}
    expected = {key: value for key, value in body.items() if key not in TRANSFER_KEYS}
    assert without_nested(received) == without_nested(expected)


@given(bodies, treatments)
def test_a_prefill_body_never_holds_what_the_engine_refuses(body: dict[str, object], how: Treatment) -> None:
    prefill = json.loads(parse(json.dumps(body).encode(), how).prefill_body(ASK))
    assert prefill["stream"] is False
    assert prefill["kv_transfer_params"] == {"do_remote_decode": True}
    caps = {
        Treatment.CHAT: ("max_tokens", "max_completion_tokens"),
        Treatment.COMPLETIONS: ("max_tokens",),
        Treatment.RESPONSES: ("max_output_tokens",),
        Treatment.MESSAGES: ("max_tokens",),
    }[how]
    assert [prefill[key] for key in caps if key in prefill] == [1]
    if how is Treatment.MESSAGES:
        assert "stop_sequences" not in prefill
        return
    assert prefill["ignore_eos"] is True
    assert prefill["store"] is False if how is Treatment.RESPONSES else prefill["n"] == 1
    assert not {"stream_options", "min_tokens", "stop", "stop_token_ids", "logprobs", "top_logprobs"} & set(prefill)
    for key in ("model", "messages", "prompt", "tools", "tool_choice", "response_format", "cache_salt"):
        assert prefill.get(key) == body.get(key)


@given(st.sampled_from([("vllm_xargs",), ("sampling_params", "extra_args")]), st.sampled_from(TRANSFER_KEYS), values, values)
def test_transfer_keys_hidden_in_what_the_engine_merges_are_removed(
    path: tuple[str, ...], key: str, hidden: object, other: object
) -> None:
    tree: object = {key: hidden, "mine": other}
    for name in reversed(path):
        tree = {name: tree, "beside": other}
    request = parse(json.dumps(tree).encode(), Treatment.WHOLE)
    assert request.removed == (".".join((*path, key)),)
    received = json.loads(request.clean_body() or b"")
    inner = received
    for name in path:
        assert inner["beside"] == other
        inner = inner[name]
    assert inner == {"mine": other}


def without_nested(body: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in body.items() if key not in ("vllm_xargs", "sampling_params")}


def parse_raw(body: bytes) -> dict[str, bytes]:
    """Top-level key -> the bytes of its value, by another parser than the one under test."""
    text = body.decode()
    decoder = json.JSONDecoder()
    fields: dict[str, bytes] = {}
    at = 1
    while text[at] != "}":
        key, at = decoder.raw_decode(text, at)
        assert text[at] == ":"
        _, end = decoder.raw_decode(text, at + 1)
        fields[key] = text[at + 1 : end].encode()
        at = end + 1 if text[end] == "," else end
    return fields


def test_a_body_without_transfer_keys_goes_on_as_it_is() -> None:
    assert parse(b'{ "model" : "m" }', Treatment.WHOLE).clean_body() is None


@pytest.mark.parametrize(
    ("sent", "cap"),
    [
        ('{"max_completion_tokens":9,"max_tokens":5}', {"max_completion_tokens": 1}),
        ('{"max_completion_tokens":9}', {"max_completion_tokens": 1}),
        ('{"max_completion_tokens":null,"max_tokens":5}', {"max_tokens": 1}),
        ('{"max_tokens":5}', {"max_tokens": 1}),
        ("{}", {"max_tokens": 1}),
    ],
)
def test_the_cap_that_a_chat_client_uses_is_one_and_the_other_is_gone(sent: str, cap: dict[str, int]) -> None:
    prefill = json.loads(parse(sent.encode(), Treatment.CHAT).prefill_body(ASK))
    assert {key: value for key, value in prefill.items() if key.startswith("max_")} == cap


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        ('"n":1', None), ('"n":null', None), ('"n":2', "n"), ('"n":"2"', "n"), ('"n":1.0', "n"), ('"n" : 1', None),
        ('"best_of":1', None), ('"best_of":2', "best_of"),
        ('"prompt":"x"', None), ('"prompt":[1,2]', None), ('"prompt":["x"]', "prompt_list"),
        ('"prompt":[[1]]', "prompt_list"), ('"prompt":{}', "prompt_list"), ('"prompt":[1,"x"]', "prompt_list"),
        ('"use_beam_search":false', None), ('"use_beam_search":true', "beam_search"), ('"use_beam_search":1', "beam_search"),
        ('"prompt_logprobs":null', None), ('"prompt_logprobs":0', "prompt_logprobs"),
        ('"echo":false', None), ('"echo":true', "echo"),
        ('"prompt_embeds":"AAAA"', "prompt_embeds"),
        ('"max_tokens":2', None), ('"max_tokens":1', "one_token"),
    ],
)  # fmt: skip
def test_what_one_handoff_cannot_serve_goes_whole(field: str, reason: str | None) -> None:
    assert parse(f"{{{field}}}".encode(), Treatment.COMPLETIONS).whole_reason() == reason


@pytest.mark.parametrize(
    ("body", "code", "where"),
    [
        (b"", "empty_body", "needs a JSON body"),
        (b"[1]", "not_an_object", "must be a JSON object"),
        (b"null", "not_an_object", "must be a JSON object"),
        (b'{"a":1,"b":2,"a":3}', "duplicate_key", "'a' stands twice"),
        (b'{"a": 1, "a": 3}', "duplicate_key", "'a' stands twice"),
        (b'{"a":1,"\\u0061":3}', "duplicate_key", "'a' stands twice"),
        (b'{"a":1,}', "invalid_json", "byte 7"),
        (b'{"a":"\xc3\x28"}', "invalid_json", "byte 6"),
        (b'{"a":Infinity}', "invalid_json", "byte 5"),
        (b'{"a":"\\ud800"}', "invalid_json", "JSON"),
        (b'\xef\xbb\xbf{"a":1}', "invalid_json", "byte 0"),
        (b'{"a":' + b'{"b":' * 20_000 + b"1" + b"}" * 20_001, "invalid_json", "too deeply"),
    ],
)
def test_a_bad_body_says_what_is_wrong_and_where(body: bytes, code: str, where: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse(body, Treatment.CHAT)
    assert (caught.value.code, caught.value.status) == (code, 400)
    assert re.search(re.escape(where), caught.value.message)


def test_a_key_twice_inside_a_value_is_the_engines_business() -> None:
    assert list(parse(b'{ "a" : {"b":1,"b":2} }', Treatment.CHAT).fields) == ["a"]


@pytest.mark.parametrize(
    ("how", "body", "reason"),
    [
        (Treatment.RESPONSES, '{"previous_response_id":"r"}', "previous_response"),
        (Treatment.RESPONSES, '{"background":true}', "background"),
        (Treatment.RESPONSES, '{"max_output_tokens":1}', "one_token"),
        (Treatment.RESPONSES, '{"tools":[{"type":"function","name":"f"}]}', None),
        (Treatment.RESPONSES, '{"tools":[{"type":"function"},{"type":"code_interpreter"}]}', "server_tools"),
        (Treatment.RESPONSES, '{"tools":"x"}', "server_tools"),
        (Treatment.RESPONSES, '{"tools":null,"prompt":{"id":"p"}}', None),
        (Treatment.MESSAGES, '{"max_tokens":1}', "one_token"),
        (Treatment.MESSAGES, '{"max_tokens":2,"tools":[{"name":"f","input_schema":{}}]}', None),
        (Treatment.CHAT, '{"tools":[{"type":"custom"}],"max_tokens":1,"max_completion_tokens":5}', "one_token"),
        (Treatment.CHAT, '{"max_completion_tokens":1}', "one_token"),
        (Treatment.COMPLETIONS, '{"max_completion_tokens":1}', None),
    ],
)
def test_each_api_has_its_own_reasons_to_go_whole(how: Treatment, body: str, reason: str | None) -> None:
    assert parse(body.encode(), how).whole_reason() == reason


IDS = b"[1,2, 3]"


def test_token_ids_go_where_each_api_takes_them() -> None:
    chat = parse(b'{"messages":[]}', Treatment.CHAT)
    assert b'"return_token_ids":true' in chat.prefill_body(ASK, return_token_ids=True)
    assert chat.decode_body(b'{"a" : 1} ', IDS) == b'{"messages":[],"kv_transfer_params":{"a" : 1,"prompt_token_ids":[1,2, 3]}}'
    text = parse(b'{"model":"m","prompt":"hello","n":1}', Treatment.COMPLETIONS)
    assert text.decode_body(PARAMS, IDS) == b'{"model":"m","prompt":[1,2, 3],"n":1,"kv_transfer_params":' + PARAMS + b"}"
    assert b"return_token_ids" not in parse(b"{}", Treatment.RESPONSES).prefill_body(ASK, return_token_ids=True)


@pytest.mark.parametrize(
    ("how", "reply", "ids"),
    [
        (Treatment.CHAT, b'{"prompt_token_ids":[1,2, 3],"choices":[{"message":{}}]}', IDS),
        (Treatment.COMPLETIONS, b'{"choices":[{"text":"x","prompt_token_ids":[1,2, 3]}]}', IDS),
        (Treatment.COMPLETIONS, b'{"choices":[]}', None),
        (Treatment.CHAT, b'{"choices":[{"prompt_token_ids":[1]}]}', None),
        (Treatment.CHAT, b'{"prompt_token_ids":[]}', None),
        (Treatment.CHAT, b'{"prompt_token_ids":null}', None),
        (Treatment.RESPONSES, b'{"prompt_token_ids":[1]}', None),
    ],
)
def test_token_ids_are_found_where_each_api_puts_them(how: Treatment, reply: bytes, ids: bytes | None) -> None:
    assert token_ids_of(reply, how) == ids


@pytest.mark.parametrize("body", [b"{}", b'{"model":""}', b'{"model":null}', b'{"model":7}', b'{"model":["m"]}'])
def test_a_body_without_a_model_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse(body, Treatment.CHAT).model()
    assert (caught.value.code, caught.value.status, caught.value.param) == ("model_missing", 400, "model")


@pytest.mark.parametrize(
    ("treatment", "body", "expected"),
    [
        (Treatment.CHAT, b'{"model":"m","stream":true,"stream_options":{"include_usage":true,"x":1}}', True),
        (Treatment.COMPLETIONS, b'{"model":"m","stream":true,"stream_options":{"include_usage":false}}', False),
        (Treatment.COMPLETIONS, b'{"model":"m","stream":true,"stream_options":null}', False),
        (Treatment.COMPLETIONS, b'{"model":"m","stream":true,"stream_options":{"include_usage":"yes"}}', False),
        (Treatment.COMPLETIONS, b'{"model":"m","stream":true,"stream_options":[1]}', False),
        (Treatment.CHAT, b'{"model":"m","stream":true}', False),
        (Treatment.CHAT, b'{"model":"m","stream":false,"stream_options":{"include_usage":true}}', False),
        (Treatment.MESSAGES, b'{"model":"m","stream":true}', True),
        (Treatment.MESSAGES, b'{"model":"m"}', False),
    ],
)
def test_a_stream_states_its_tokens_where_the_client_wants_it_or_the_api_does(
    treatment: Treatment, body: bytes, expected: bool
) -> None:
    assert parse(body, treatment).states_usage() is expected
