"""What a full parser refuses is refused here too, although only the top level is taken apart; and what it takes is not changed.

The engine reads bodies with Python's own parser. A body that it refuses must not come as far as a handoff.
"""

from __future__ import annotations

import json
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from extproc.errors import ApiError
from extproc.inference import LEGS, TRANSFER_KEYS, parse
from extproc.paths import Treatment

ASK = b'{"do_remote_decode":true}'
PARAMS = b'{"do_remote_prefill":true}'

_seeds = (
    '{"model":"m","messages":[{"role":"user","content":"a\\n\\u00e9\\"b\\\\"}],"max_tokens":5,"stream":true}',
    '{"model": "m", "prompt": [1, 2, -3.5e+7, 0], "n": 1, "stop": null, "x": {"y": [true, false, {}], "z": []}}',
    '{ "model" : "é😀" , "tools" : [ { "type" : "function" } ] , "kv_transfer_params" : { "a" : "b" } }',
)
_pieces = st.sampled_from(
    [b"", b'"', b"\\", b"\\u", b"\\ud800", b"{", b"}", b"[", b"]", b",", b":", b" ", b"\n", b"\t", b"\0", b"\x1f", b"\x7f",
     b"0", b"01", b"1.", b".5", b"-", b"+1", b"1e", b"1e5", b"1e999", b"NaN", b"Infinity", b"-Infinity", b"nul", b"null",
     b"True", b"'", b"//", b"/**/", b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xef\xbb\xbf", "é".encode(), b"\\x", b"\\/"]
)  # fmt: skip
_changes = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 3), _pieces), max_size=3)


def changed(seed: str, changes: list[tuple[int, int, bytes]]) -> bytes:
    """``seed`` with pieces put into it, each in the place of a few bytes."""
    body = seed.encode()
    for at, length, piece in changes:
        body = body[:at] + piece + body[at + length :]
    return body


def refuse(name: str) -> Any:
    raise ValueError(name)


def accepted(body: bytes) -> Any:
    """What the full parser makes of it; None if it is no JSON object. NaN is JSON to it, and to nobody else."""
    try:
        value = json.loads(body.decode(), parse_constant=refuse)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


@given(st.sampled_from(_seeds), _changes, st.sampled_from([how for how in Treatment if how.apart]))
@example(_seeds[0], [(0, 0, b"\xef\xbb\xbf")], Treatment.CHAT)
@example(_seeds[1], [(40, 0, b"\0")], Treatment.COMPLETIONS)
def test_what_a_full_parser_refuses_is_refused(seed: str, changes: list[tuple[int, int, bytes]], how: Treatment) -> None:
    body = changed(seed, changes)
    expected = accepted(body)
    try:
        request = parse(body, how)
    except ApiError as error:
        assert error.status == 400
        return
    assert expected is not None, f"the engine would refuse {body!r}"
    clean = {key: value for key, value in expected.items() if key not in TRANSFER_KEYS}
    assert json.loads(request.clean_body() or body) == clean
    assert json.loads(request.decode_body(PARAMS) or b"") == {**clean, "kv_transfer_params": {"do_remote_prefill": True}}


@given(st.sampled_from(_seeds), _changes, st.sampled_from([how for how in Treatment if how.apart]))
def test_both_legs_are_what_a_full_parse_and_dump_would_make(
    seed: str, changes: list[tuple[int, int, bytes]], how: Treatment
) -> None:
    """As JSON and in the order of the keys; the other tests hold the bytes of the values."""
    body = changed(seed, changes)
    expected = accepted(body)
    try:
        request = parse(body, how)
    except ApiError:
        return
    assert expected is not None
    leg = LEGS[how]
    clean = {key: value for key, value in expected.items() if key not in TRANSFER_KEYS}
    cap = next((name for name in leg.caps if clean.get(name) is not None), leg.caps[-1])
    prefill = {key: value for key, value in clean.items() if key not in leg.drops and key not in leg.caps}
    for key, raw in {cap: b"1", **leg.sets, "kv_transfer_params": ASK}.items():
        prefill[key] = json.loads(raw)
    made = json.loads(request.prefill_body(ASK))
    assert made == prefill and list(made) == list(prefill)
    decode = json.loads(request.decode_body(PARAMS) or b"")
    assert list(decode) == [*clean, "kv_transfer_params"]
