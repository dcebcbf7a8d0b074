"""NIXL, push (experimental): the prefill worker writes the blocks to the decode worker (vLLM's NixlPushConnector).

Both legs go out at once. The decode leg is told where the prefill worker is, and registers there; the prefill worker finds the
registration by the request's id, which both engines derive from ``x-request-id`` (vLLM 0.32 strips the random end of its own).
So both legs carry the same new id, and go to the same endpoint.

Experimental, because in vLLM 0.32 a decode that finds the whole prompt in its own cache registers nowhere, which leaves the
blocks to the lease, and because a decode whose prefill fails waits until it is cut off.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from extproc.config import PushPeer
from extproc.handoff import Flow, Handoff, Pair
from extproc.handoff.nixl_pull import read_params
from extproc.paths import Treatment


class NixlPush:
    """``peers``: address of a prefill worker -> where its side channel is."""

    name = "nixl-push"
    flow = Flow.CONCURRENT
    # The responses API takes its engine id from the body, so the two legs could not be matched.
    apis = frozenset((Treatment.CHAT, Treatment.COMPLETIONS, Treatment.MESSAGES))
    bound = True

    def __init__(self, peers: Mapping[str, PushPeer]) -> None:
        self._peers = peers

    def prefill_params(self, pair: Pair) -> bytes:  # noqa: ARG002
        """Ask the prefill worker to keep its blocks for a remote decode."""
        return b'{"do_remote_decode":true,"do_remote_prefill":false}'

    def accept(self, reply: bytes, pair: Pair) -> Handoff:
        """The reply adds nothing that the decode worker waits for; it must only be one."""
        _, params = read_params(reply)
        return msgspec.structs.replace(self.announce(pair), tokens=params.remote_num_tokens)

    def announce(self, pair: Pair) -> Handoff:
        """See Connector."""
        peer = self._peers[pair.prefill]
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": peer.engine_id,
            "remote_host": peer.host,
            "remote_port": peer.port,
            "remote_request_id": pair.request_id,
            "tp_size": peer.tp_size,
            "pp_size": peer.pp_size,
            "transfer_mode": "push",
        }
        return Handoff(
            connector=self.name,
            prefill=pair.prefill,
            params=msgspec.json.encode(params),
            headers={"x-request-id": pair.request_id},
            engine_id=peer.engine_id,
            request_id=pair.request_id,
        )
