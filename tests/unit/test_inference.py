"""Body editing: what each leg gets for any body that a client may send."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.errors import ApiError
from extproc.inference import TRANSFER_KEYS, parse
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
treatments = st.sampled_from([Treatment.CHAT, Treatment.COMPLETIONS])


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
    assert prefill["stream"] is False and prefill["n"] == 1 and prefill["ignore_eos"] is True
    assert prefill["kv_transfer_params"] == {"do_remote_decode": True}
    caps = [key for key in ("max_tokens", "max_completion_tokens") if key in prefill]
    if how is Treatment.CHAT:
        assert [prefill[key] for key in caps] == [1]
    else:
        assert prefill["max_tokens"] == 1
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
        ('"max_tokens":2', None), ('"max_tokens":1', "one_token"), ('"max_completion_tokens":1', "one_token"),
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
