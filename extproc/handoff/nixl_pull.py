"""NIXL, pull: the decode worker reads the blocks from the prefill worker (vLLM's NixlConnector).

The prefill leg asks for it with ``do_remote_decode``; its reply names the blocks. A decode engine that gets params without
one of the keys checked here dies or hangs (vLLM 0.32: ``KeyError`` in the NIXL scheduler), so the reply is checked before
it goes on. Keys that we do not know go on untouched: the set grows with every release.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from extproc.handoff import Flow, Handoff, HandoffError, Pair
from extproc.handoff.remote_hosts import RemoteHosts, host_fault
from extproc.paths import Treatment


class _Reply(msgspec.Struct, frozen=True):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


class Params(msgspec.Struct, frozen=True):
    """The keys without which a decode engine cannot read."""

    do_remote_prefill: bool
    remote_block_ids: list[int | list[int]]
    """One list a KV cache group; a flat list before hybrid caches."""
    remote_engine_id: str
    remote_request_id: str
    remote_host: str
    remote_port: int
    tp_size: int
    remote_num_tokens: int | None = None
    remote_prefill_cached_tokens: int | None = None


_reply_decoder = msgspec.json.Decoder(_Reply)
_params_decoder = msgspec.json.Decoder(Params)


def read_params(reply: bytes) -> tuple[bytes, Params]:
    """The ``kv_transfer_params`` of a reply, as they came and as they read. Raises HandoffError."""
    try:
        raw = bytes(_reply_decoder.decode(reply).kv_transfer_params)
    except (msgspec.DecodeError, RecursionError) as error:
        raise HandoffError(f"the reply is not a JSON object: {error}") from None
    if raw == b"null":
        raise HandoffError("the reply holds no kv_transfer_params: is the worker started with a NixlConnector?")
    try:
        params = _params_decoder.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise HandoffError(f"kv_transfer_params: {error}") from None
    if not params.do_remote_prefill:
        raise HandoffError("kv_transfer_params: do_remote_prefill is not true")
    fault = host_fault(params.remote_host, params.remote_port)
    if fault is not None:
        raise HandoffError(f"kv_transfer_params: {fault}")
    return raw, params


class NixlPull:
    """See the module."""

    name = "nixl"
    flow = Flow.SEQUENTIAL
    apis = frozenset(how for how in Treatment if how.apart)
    bound = False

    def __init__(self, remote_hosts: Sequence[str] = ()) -> None:
        """``remote_hosts``: of the configuration. Raises ValueError."""
        self._hosts = RemoteHosts(remote_hosts)

    def prefill_params(self, pair: Pair) -> bytes:  # noqa: ARG002
        """Ask the prefill worker to keep its blocks for a remote decode."""
        return b'{"do_remote_decode":true,"do_remote_prefill":false}'

    def accept(self, reply: bytes, pair: Pair) -> Handoff:
        """See Connector."""
        raw, params = read_params(reply)
        fault = self._hosts.fault(params.remote_host, pair.prefill)
        if fault is not None:
            raise HandoffError(f"kv_transfer_params: {fault}")
        blocks = sum(len(group) if isinstance(group, list) else 1 for group in params.remote_block_ids)
        if not blocks:
            raise HandoffError("kv_transfer_params: remote_block_ids is empty")
        return Handoff(
            connector=self.name,
            prefill=pair.prefill,
            params=raw,
            engine_id=params.remote_engine_id,
            request_id=params.remote_request_id,
            blocks=blocks,
            tokens=params.remote_num_tokens,
            cached_tokens=params.remote_prefill_cached_tokens,
            releasable=True,
        )

    def announce(self, pair: Pair) -> Handoff:
        """See Connector."""
        raise AssertionError(f"nothing can be announced before the prefill on {pair.prefill}")
