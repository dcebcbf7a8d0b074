"""Reading a prefill worker's reply: nothing that a decode engine dies of goes on."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.handoff import Handoff, HandoffError
from extproc.handoff.nixl_pull import NixlPull

# As vLLM 0.32 sends it.
PARAMS = {
    "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "5c2f", "remote_request_id": "cmpl-x-0-1a2b3c4d", "remote_host": "127.0.0.1",
    "remote_port": 5600, "tp_size": 1, "dcp_size": 1, "pp_size": 1, "remote_num_tokens": 334,
    "remote_blocks_expiry_time": None, "transfer_mode": "pull", "remote_prefill_cached_tokens": 0,
}  # fmt: skip


def accept(params: object) -> Handoff:
    return NixlPull().accept(json.dumps({"id": "x", "kv_transfer_params": params}).encode(), prefill="10.0.0.1:8100")


def test_params_go_on_byte_for_byte_with_keys_that_we_do_not_know() -> None:
    raw = b'{ "new_key":[1.50,"\\u00e9"],' + json.dumps(PARAMS)[1:].encode()
    assert NixlPull().accept(b'{"kv_transfer_params" : ' + raw + b"}", prefill="p:1").params == raw


def test_blocks_are_counted_over_all_cache_groups() -> None:
    assert accept({**PARAMS, "remote_block_ids": [[1, 2], [7], []]}).blocks == 3
    assert accept({**PARAMS, "remote_block_ids": [1, 2, 3, 4]}).blocks == 4


def test_the_header_says_what_was_handed_over_and_no_block_ids() -> None:
    assert accept(PARAMS).header() == (
        'nixl;prefill="10.0.0.1:8100";engine="5c2f";request="cmpl-x-0-1a2b3c4d";blocks=3;tokens=334'
    )
    assert "tokens" not in accept({key: value for key, value in PARAMS.items() if key != "remote_num_tokens"}).header()


@given(st.text())
def test_the_header_is_one_line_of_printable_ascii_whatever_the_engine_says(name: str) -> None:
    header = accept({**PARAMS, "remote_engine_id": name}).header()
    assert all(" " <= char <= "~" for char in header)
    assert header.count('"') - header.count('\\"') >= 6


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (None, "holds no kv_transfer_params"),
        ([], "Expected `object`"),
        ({}, "missing required field"),
        *(({k: v for k, v in PARAMS.items() if k != key}, f"missing required field `{key}`") for key in (
            "do_remote_prefill", "remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host",
            "remote_port", "tp_size",
        )),
        *(({**PARAMS, key: None}, f"$.{key}") for key in ("remote_block_ids", "remote_request_id", "remote_host")),
        ({**PARAMS, "remote_block_ids": []}, "remote_block_ids is empty"),
        ({**PARAMS, "remote_block_ids": [[]]}, "remote_block_ids is empty"),
        ({**PARAMS, "remote_block_ids": ["DUMMY"]}, "$.remote_block_ids"),
        ({**PARAMS, "do_remote_prefill": False}, "do_remote_prefill is not true"),
    ],
)  # fmt: skip
def test_a_reply_that_a_decode_engine_cannot_use_is_refused_by_name(params: object, message: str) -> None:
    with pytest.raises(HandoffError, match=message.replace("$", r"\$").replace("`", ".")):
        accept(params)


@pytest.mark.parametrize("reply", [b"", b"<html>", b"[]", b'data: {"id":1}\n\n', b"\xff" * 10])
def test_a_reply_that_is_no_json_object_is_refused(reply: bytes) -> None:
    with pytest.raises(HandoffError):
        NixlPull().accept(reply, prefill="p:1")
