"""One streamed answer of the OpenAI kind, from its bytes and when they came: tokens' times, usage, end or error. No I/O.

What is a token's arrival: a piece of text of any kind (content, reasoning, a tool's arguments), not the opening with the role,
and not the usage. An engine may put several tokens in a piece; the usage at the end tells how many tokens there were in all.
"""

from __future__ import annotations

from array import array

import msgspec


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """What the engine counted."""

    prompt_tokens: int = 0
    completion_tokens: int | None = None
    """Absent where the server leaves it out."""
    prompt_tokens_details: _Details | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that were in its cache; None: it does not say."""
        return None if self.prompt_tokens_details is None else self.prompt_tokens_details.cached_tokens


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def has_text(self) -> bool:
        if self.text:
            return True
        delta = self.delta
        return delta is not None and bool(delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: Usage | None = None
    error: msgspec.Raw = msgspec.Raw(b"")


class _Error(msgspec.Struct):
    message: str = ""
    code: str | int | None = None
    type: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _Error | str | None = None
    message: str = ""
    code: str | int | None = None
    detail: msgspec.Raw = msgspec.Raw(b"")


_event = msgspec.json.Decoder(_Event)
_error = msgspec.json.Decoder(_Error)
_error_body = msgspec.json.Decoder(_ErrorBody)
_MESSAGE_CHARS = 200


class Answer:
    """What has come of one answer so far."""

    def __init__(self) -> None:
        self._rest = b""
        self.times_s = array("d")
        """When each piece with text came."""
        self.usage: Usage | None = None
        self.finish_reason: str | None = None
        self.finish_s: float | None = None
        """When the engine said that it has ended."""
        self.done = False
        """The stream ended as it should."""
        self.fault: tuple[str, str] | None = None
        """Code and message of an error inside of the stream."""

    def feed(self, data: bytes, now_s: float) -> None:
        """More of the body, which came at ``now_s``."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                self._take(line[5:].strip(), now_s)

    def _take(self, payload: bytes, now_s: float) -> None:
        if payload == b"[DONE]":
            self.done = True
            return
        try:
            event = _event.decode(payload)
        except msgspec.MsgspecError as error:
            self.fault = self.fault or ("not-json", f"an event of the stream cannot be read: {error}")
            return
        if len(event.error) and bytes(event.error) != b"null":
            self.fault = self.fault or _fault_of(event.error)
            return
        if event.usage is not None:
            self.usage = event.usage
        for choice in event.choices:
            if choice.has_text:
                self.times_s.append(now_s)
            if choice.finish_reason is not None:
                self.finish_reason = choice.finish_reason
                self.finish_s = now_s


def error_of(body: bytes) -> tuple[str, str]:
    """Code and message of an answer that is an error; the code is empty where it has none."""
    try:
        read = _error_body.decode(body)
    except msgspec.MsgspecError:
        return "", body.decode(errors="replace").strip()[:_MESSAGE_CHARS]
    inner = read.error
    if isinstance(inner, _Error):
        return _code(inner), inner.message[:_MESSAGE_CHARS]
    message = inner or read.message or bytes(read.detail).decode(errors="replace")
    return str(read.code or ""), message[:_MESSAGE_CHARS]


def _fault_of(raw: msgspec.Raw) -> tuple[str, str]:
    try:
        inner = _error.decode(raw)
    except msgspec.MsgspecError:
        return "", bytes(raw).decode(errors="replace")[:_MESSAGE_CHARS]
    return _code(inner), inner.message[:_MESSAGE_CHARS]


def _code(error: _Error) -> str:
    return str(error.code if error.code is not None else error.type or "")
