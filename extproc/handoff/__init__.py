"""How KV blocks pass from a prefill worker to a decode worker: one file a KV connector, behind this small interface.

A connector says what the prefill leg is asked for, reads what it answered, and says what the decode leg is told. It does no
I/O and keeps no state.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Protocol

import msgspec

from extproc.paths import Treatment


class HandoffError(Exception):
    """The prefill worker's reply cannot be handed over; the message says what is wrong with it."""


class Flow(Enum):
    """Who calls whom, and when."""

    SEQUENTIAL = "sequential"
    """The prefill leg first; the decode leg when its reply is here."""
    CONCURRENT = "concurrent"
    """Both legs at once: the decode worker waits for the blocks."""
    DELEGATED = "delegated"
    """Only the decode leg: what receives it makes the prefill call itself."""


class Pair(msgspec.Struct, frozen=True):
    """The two workers of one request, and the id that this attempt has on the engines."""

    prefill: str
    """``ip:port``."""
    decode: str
    """``ip:port``."""
    request_id: str
    """Ours and unique: a new one for every attempt."""


class Handoff(msgspec.Struct, frozen=True, kw_only=True):
    """One prefill's KV blocks, ready for one decode request. Single use."""

    connector: str
    prefill: str
    """``ip:port`` of the prefill worker."""
    params: bytes | None = None
    """``kv_transfer_params`` for the decode leg, as JSON. From a reply they are its bytes, unchanged. None: none are needed."""
    headers: Mapping[str, str] = {}
    """What the decode leg carries beside the transfer header."""
    engine_id: str | None = None
    request_id: str | None = None
    """The engine's own id of the prefill request."""
    blocks: int | None = None
    """KV blocks over all cache groups."""
    tokens: int | None = None
    """Prompt tokens in those blocks."""
    cached_tokens: int | None = None
    """Of those, what the prefill worker had in its cache."""
    releasable: bool = False
    """Whether a decode worker that turns the request down gives the blocks back."""

    def header(self) -> str:
        """The value of ``x-kv-transfer``: what was handed over, as an RFC 9651 item with parameters; never the block ids.

        What the connector does not know is left out.
        """
        parts = [self.connector]
        for key, text in (("prefill", self.prefill), ("engine", self.engine_id), ("request", self.request_id)):
            if text is not None:
                parts.append(f"{key}={_quoted(text)}")
        for key, number in (("blocks", self.blocks), ("tokens", self.tokens)):
            if number is not None:
                parts.append(f"{key}={number}")
        return ";".join(parts)


def _quoted(text: str) -> str:
    """A structured-field string: printable ASCII, quotes and backslashes escaped, what else there is replaced."""
    if not (text.isascii() and text.isprintable()):
        text = "".join(char if " " <= char <= "~" else "?" for char in text)
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


class Connector(Protocol):
    """One KV connector of the engine."""

    name: str
    """As it stands in ``x-kv-transfer`` and in metrics."""
    flow: Flow
    apis: frozenset[Treatment]
    """What it can hand over; everything else goes whole."""
    bound: bool
    """Whether the prefill leg already names the decode worker, so that no other can take its place."""

    def prefill_params(self, pair: Pair) -> bytes:
        """``kv_transfer_params`` of the prefill leg, as JSON. Not asked where the flow is DELEGATED."""
        ...

    def accept(self, reply: bytes, pair: Pair) -> Handoff:
        """Read the prefill worker's JSON reply. Raises HandoffError if the decode leg could not use it."""
        ...

    def announce(self, pair: Pair) -> Handoff:
        """What the decode leg is told without a reply. Not asked where the flow is SEQUENTIAL."""
        ...
