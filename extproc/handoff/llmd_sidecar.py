"""llm-d's routing sidecar: the decode worker's pod makes the prefill call itself.

The decode leg carries ``x-prefiller-host-port``; the sidecar in front of the engine calls that worker, takes the params from
its reply and gives them to the engine. Baton only chooses the pair, and holds nothing.
"""

from __future__ import annotations

from extproc.handoff import Flow, Handoff, Pair
from extproc.headers import PREFILLER_HEADER
from extproc.paths import Treatment


class LlmdSidecar:
    """See the module."""

    name = "llmd-sidecar"
    flow = Flow.DELEGATED
    apis = frozenset(how for how in Treatment if how.apart)
    bound = False

    def prefill_params(self, pair: Pair) -> bytes:
        """See Connector."""
        raise AssertionError(f"the sidecar of {pair.decode} makes the prefill call")

    def accept(self, reply: bytes, pair: Pair) -> Handoff:
        """See Connector."""
        raise AssertionError(f"the sidecar of {pair.decode} makes the prefill call: {len(reply)} bytes")

    def announce(self, pair: Pair) -> Handoff:
        """See Connector."""
        return Handoff(connector=self.name, prefill=pair.prefill, headers={PREFILLER_HEADER: pair.prefill})
