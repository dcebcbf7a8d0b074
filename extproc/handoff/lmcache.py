"""LMCache's own prefill/decode protocol: the prefill worker sends the KV cache to the decode worker's LMCache.

The prefill leg names the receiver (``disagg_spec``); the reply needs no params: null is normal here, and no sign of a failure.
The decode leg is the client's request as it is: its worker finds the cache under the prompt's tokens (LMCache 0.5).

vLLM with NIXL *and* LMCache in a MultiConnector is not this: there NIXL hands over, and the connector is ``nixl_pull``.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from extproc.config import LmcachePeer
from extproc.handoff import Flow, Handoff, HandoffError, Pair
from extproc.paths import Treatment


class LmcachePd:
    """``peers``: address of a decode worker -> where its LMCache receives."""

    name = "lmcache"
    flow = Flow.SEQUENTIAL
    apis = frozenset(how for how in Treatment if how.apart)
    bound = True

    def __init__(self, peers: Mapping[str, LmcachePeer]) -> None:
        self._peers = peers

    def prefill_params(self, pair: Pair) -> bytes:
        """Tell the prefill worker's LMCache where to send."""
        peer = self._peers[pair.decode]
        spec = {
            "req_id": pair.request_id,
            "receiver_host": peer.host,
            "receiver_init_port": peer.init_ports,
            "receiver_alloc_port": peer.alloc_ports,
        }
        return msgspec.json.encode({"disagg_spec": spec})

    def accept(self, reply: bytes, pair: Pair) -> Handoff:
        """See Connector."""
        try:
            msgspec.json.decode(reply, type=dict[str, msgspec.Raw])
        except (msgspec.DecodeError, RecursionError) as error:
            raise HandoffError(f"the reply is not a JSON object: {error}") from None
        return Handoff(connector=self.name, prefill=pair.prefill, request_id=pair.request_id)

    def announce(self, pair: Pair) -> Handoff:
        """See Connector."""
        raise AssertionError(f"nothing can be announced before the prefill on {pair.prefill}")
