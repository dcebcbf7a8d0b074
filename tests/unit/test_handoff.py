"""Reading a prefill worker's reply: nothing that a decode engine dies of goes on."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.config import Handoff as Settings
from extproc.config import LmcachePeer, PushPeer
from extproc.handoff import Handoff, HandoffError, Pair
from extproc.handoff.choose import connector
from extproc.handoff.llmd_sidecar import LlmdSidecar
from extproc.handoff.lmcache import LmcachePd
from extproc.handoff.nixl_pull import NixlPull
from extproc.handoff.nixl_push import NixlPush
from extproc.paths import Treatment

# As vLLM 0.32 sends it.
PARAMS = {
    "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "5c2f", "remote_request_id": "cmpl-x-0-1a2b3c4d", "remote_host": "127.0.0.1",
    "remote_port": 5600, "tp_size": 1, "dcp_size": 1, "pp_size": 1, "remote_num_tokens": 334,
    "remote_blocks_expiry_time": None, "transfer_mode": "pull", "remote_prefill_cached_tokens": 0,
}  # fmt: skip


PAIR = Pair("10.0.0.1:8100", "10.0.0.2:8200", "attempt-1")


def accept(params: object) -> Handoff:
    return NixlPull().accept(json.dumps({"id": "x", "kv_transfer_params": params}).encode(), PAIR)


def test_params_go_on_byte_for_byte_with_keys_that_we_do_not_know() -> None:
    raw = b'{ "new_key":[1.50,"\\u00e9"],' + json.dumps(PARAMS)[1:].encode()
    assert NixlPull().accept(b'{"kv_transfer_params" : ' + raw + b"}", PAIR).params == raw


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
    assert re.fullmatch(r'nixl(;[a-z]+=("(\\.|[^"\\])*"|[0-9]+)){5}', header)


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
        NixlPull().accept(reply, PAIR)


# --- the other connectors ---

PUSH = NixlPush({"10.0.0.1:8100": PushPeer(engine_id="engine-1", host="10.0.0.1", port=5601, tp_size=2)})


def test_push_tells_the_decode_worker_where_to_register_under_the_id_of_both_legs() -> None:
    handoff = PUSH.announce(PAIR)
    assert handoff.params is not None and json.loads(handoff.params) == {
        "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "engine-1", "remote_host": "10.0.0.1",
        "remote_port": 5601, "remote_request_id": "attempt-1", "tp_size": 2, "pp_size": 1, "transfer_mode": "push",
    }  # fmt: skip
    assert handoff.headers == {"x-request-id": "attempt-1"}
    assert handoff.header() == 'nixl-push;prefill="10.0.0.1:8100";engine="engine-1";request="attempt-1"'
    assert not handoff.releasable
    assert json.loads(PUSH.prefill_params(PAIR))["do_remote_decode"] is True
    assert Treatment.RESPONSES not in PUSH.apis  # it takes no x-request-id


def test_push_needs_a_reply_all_the_same() -> None:
    assert PUSH.accept(json.dumps({"kv_transfer_params": PARAMS}).encode(), PAIR).tokens == 334
    with pytest.raises(HandoffError):
        PUSH.accept(b"{}", PAIR)


LMCACHE = LmcachePd({"10.0.0.2:8200": LmcachePeer(host="10.0.0.2", init_ports=[7300], alloc_ports=[7400])})


def test_lmcache_names_the_receiver_on_the_prefill_leg_and_nothing_on_the_decode_leg() -> None:
    assert json.loads(LMCACHE.prefill_params(PAIR)) == {
        "disagg_spec": {
            "req_id": "attempt-1",
            "receiver_host": "10.0.0.2",
            "receiver_init_port": [7300],
            "receiver_alloc_port": [7400],
        }
    }
    # No params are normal here: they are no sign of a failure.
    for reply in (b"{}", b'{"kv_transfer_params":null}', b'{"kv_transfer_params":{"num_lmcache_cached_tokens":3}}'):
        handoff = LMCACHE.accept(reply, PAIR)
        assert handoff.params is None and not handoff.releasable
        assert handoff.header() == 'lmcache;prefill="10.0.0.1:8100";request="attempt-1"'
    with pytest.raises(HandoffError):
        LMCACHE.accept(b"<html>", PAIR)
    assert LMCACHE.bound


def test_the_sidecar_is_told_the_prefill_worker_in_its_header() -> None:
    handoff = LlmdSidecar().announce(PAIR)
    assert handoff.headers == {"x-prefiller-host-port": "10.0.0.1:8100"}
    assert handoff.params is None
    assert handoff.header() == 'llmd-sidecar;prefill="10.0.0.1:8100"'


@pytest.mark.parametrize(
    ("name", "kind"),
    [("nixl_pull", NixlPull), ("nixl_push", NixlPush), ("lmcache", LmcachePd), ("llmd_sidecar", LlmdSidecar)],
)
def test_the_configuration_chooses(name: Any, kind: type) -> None:
    assert isinstance(connector(Settings(connector=name)), kind)
