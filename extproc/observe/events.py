"""Reads a stream of server-sent events as it passes, for its tokens and its end. It parses no JSON and keeps no text.

A quote inside a JSON string is written with a backslash, so what is looked for here cannot stand in what a model said.
"""

from __future__ import annotations

import re
from typing import Final

_MAX_TAIL_BYTES = 64 << 10
"""A longer event is not read to its end."""

_TOKENS = re.compile(rb'"(?:completion|output)_tokens":\s*([0-9]{1,12})')
_PROMPT_TOKENS = re.compile(rb'"(?:prompt|input)_tokens":\s*([0-9]{1,12})')
_FINISH = re.compile(rb'"(?:finish|stop)_reason":\s*"([a-z_]{1,32})"')
# Chunks of the OpenAI APIs without a token of their own: the counts at the end, and the role at the start.
_NO_TOKEN = re.compile(rb'"choices":\s*\[\s*\]|"delta":\s*\{"role":\s*"assistant"(?:,\s*"content":\s*"")?[,}]')
# Anthropic's and the responses API's events have names, and those with tokens say so.
_DELTA = re.compile(rb"^event:\s*(?:content_block_delta|[a-z_.]{1,64}\.delta)$", re.MULTILINE)
_ROLE_WITH_MORE = re.compile(rb'"(?:content|reasoning|reasoning_content)":\s*"[^"]|"tool_calls":\s*\[\s*\{')

FINISH_REASONS: Final = frozenset(
    ("stop", "length", "tool_calls", "content_filter", "abort", "error", "end_turn", "max_tokens", "stop_sequence", "tool_use")
)
"""Others are shown as ``other``."""


class EventReader:
    """One answer."""

    def __init__(self) -> None:
        self.tokens = 0
        """Events that carry a token, or several where the engine sends several at once."""
        self.stated_tokens: int | None = None
        """What the answer itself says of its tokens, where it does; the last word counts."""
        self.prompt_tokens: int | None = None
        """Likewise of the prompt."""
        self.finish_reason: str | None = None
        self.done = False
        """The API's own end was there."""
        self.failed = False
        """The engine reported an error instead of going on."""
        self.oversized = 0
        """Events that were too long to be read."""
        self._tail = b""

    def feed(self, chunk: bytes) -> int:
        """A piece of the answer, wherever it may be cut. How many tokens it completed."""
        if b"\r" in chunk:
            chunk = chunk.replace(b"\r\n", b"\n")
        events = (self._tail + chunk if self._tail else chunk).split(b"\n\n")
        self._tail = events.pop()
        if len(self._tail) > _MAX_TAIL_BYTES:
            self._tail = b""
            self.oversized += 1
        found = sum(1 for event in events if self._read(event))
        self.tokens += found
        return found

    def _read(self, event: bytes) -> bool:
        """Whether it has a token."""
        if b"_tokens" in event:
            self._read_usage(event)
        if b"_reason" in event and (finish := _FINISH.search(event)):
            word = finish[1].decode()
            self.finish_reason = word if word in FINISH_REASONS else "other"
        if event.startswith((b"data: {", b"data:{")):
            if event[5:16].lstrip().startswith(b'{"error"'):
                self.failed = True
                return False
            return not _NO_TOKEN.search(event) or bool(_ROLE_WITH_MORE.search(event))
        if event.startswith(b"event:"):
            self.done = self.done or b"message_stop" in event[:64] or b"response.completed" in event[:64]
            self.failed = self.failed or event.startswith(b"event: error")
            return bool(_DELTA.search(event[:128]))
        self.done = self.done or event.startswith(b"data: [DONE]")
        return False

    def _read_usage(self, event: bytes) -> None:
        if tokens := _TOKENS.search(event):
            self.stated_tokens = int(tokens[1])
        if prompt := _PROMPT_TOKENS.search(event):
            self.prompt_tokens = int(prompt[1])
