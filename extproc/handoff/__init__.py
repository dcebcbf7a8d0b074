"""How KV blocks pass from a prefill worker to a decode worker: one file a KV connector, behind this small interface.

A connector says what the prefill leg is asked for, and reads what it answered. It does no I/O and keeps no state.
"""

from __future__ import annotations

from typing import Protocol

import msgspec


class HandoffError(Exception):
    """The prefill worker's reply cannot be handed over; the message says what is wrong with it."""


class Handoff(msgspec.Struct, frozen=True):
    """One prefill's KV blocks, ready for one decode request. Single use."""

    connector: str
    params: bytes
    """``kv_transfer_params`` for the decode leg: the JSON bytes of the prefill's reply, unchanged."""
    prefill: str
    """``ip:port`` of the prefill worker."""
    engine_id: str
    request_id: str
    """The engine's own id of the prefill request."""
    blocks: int
    """KV blocks over all cache groups."""
    tokens: int | None
    """Prompt tokens in those blocks; None where the engine does not say."""

    def header(self) -> str:
        """The value of ``x-kv-transfer``: what was handed over, as an RFC 9651 item with parameters; never the block ids."""
        fields = [
            self.connector,
            f"prefill={_quoted(self.prefill)}",
            f"engine={_quoted(self.engine_id)}",
            f"request={_quoted(self.request_id)}",
            f"blocks={self.blocks}",
        ]
        if self.tokens is not None:
            fields.append(f"tokens={self.tokens}")
        return ";".join(fields)


def _quoted(text: str) -> str:
    """A structured-field string: printable ASCII, quotes and backslashes escaped, what else there is replaced."""
    ascii_text = "".join(char if " " <= char <= "~" else "?" for char in text)
    return '"' + ascii_text.replace("\\", "\\\\").replace('"', '\\"') + '"'


class Connector(Protocol):
    """One KV connector of the engine."""

    name: str

    def prefill_params(self) -> bytes:
        """``kv_transfer_params`` of the prefill leg, as JSON."""
        ...

    def accept(self, reply: bytes, *, prefill: str) -> Handoff:
        """Read the prefill worker's JSON reply. Raises HandoffError if the decode leg could not use it."""
        ...
