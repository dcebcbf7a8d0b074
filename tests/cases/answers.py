"""What an answer says, whichever of the APIs gave it, streamed or not: texts, whether it is complete, token counts, error."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Answer:
    """An answer, or as much of it as came."""

    texts: dict[int, str] = field(default_factory=dict)
    """One a choice."""
    complete: bool = False
    """It ended as its API says an answer ends."""
    error: dict[str, Any] | None = None
    """In the body, or in an event of the stream."""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    tells_token_ids: bool = False

    @property
    def text(self) -> str:
        return self.texts.get(0, "")

    def add(self, index: int, text: str | None) -> None:
        self.texts[index] = self.texts.get(index, "") + (text or "")


def read(path: str, content_type: str, body: bytes) -> Answer:
    """An answer with status 200."""
    if content_type.startswith("text/event-stream"):
        return _stream(path, body)
    answer = Answer()
    try:
        value = json.loads(body)
    except ValueError:
        return answer
    answer.complete = True
    if not isinstance(value, dict):
        return answer
    answer.error = value.get("error")
    if path == "/v1/responses":
        _response(answer, value)
    elif path == "/v1/messages":
        for block in value.get("content", ()):
            answer.add(0, block.get("text"))
        _usage(answer, value.get("usage"))
    else:
        for choice in value.get("choices", ()):
            text = choice["message"]["content"] if "message" in choice else choice.get("text")
            answer.add(choice["index"], text)
            answer.tells_token_ids |= choice.get("prompt_token_ids") is not None
        answer.tells_token_ids |= value.get("prompt_token_ids") is not None
        _usage(answer, value.get("usage"))
    return answer


def _stream(path: str, body: bytes) -> Answer:
    answer = Answer()
    ended: dict[int, bool] = {}
    for block in body.split(b"\n\n")[:-1]:  # what follows the last blank line is half an event, or nothing
        data = b"\n".join(line[5:].strip() for line in block.split(b"\n") if line.startswith(b"data:"))
        if data == b"[DONE]":
            answer.complete = answer.error is None and all(ended.values())
            continue
        event = json.loads(data)
        kind = event.get("type", "")
        if event.get("error") or kind == "error":
            answer.error = event.get("error") or event
        elif path == "/v1/responses":
            if kind == "response.output_text.delta":
                answer.add(0, event["delta"])
            elif kind == "response.completed":
                answer.complete = answer.error is None
                _usage(answer, event["response"]["usage"])
        elif path == "/v1/messages":
            if kind == "content_block_delta":
                answer.add(0, event["delta"].get("text"))
            elif kind == "message_delta":
                _usage(answer, event["usage"])
            elif kind == "message_stop":
                answer.complete = answer.error is None
        else:
            for choice in event.get("choices", ()):
                text = choice["delta"].get("content") if "delta" in choice else choice.get("text")
                answer.add(choice["index"], text)
                ended[choice["index"]] = bool(choice.get("finish_reason")) or ended.get(choice["index"], False)
                answer.tells_token_ids |= choice.get("prompt_token_ids") is not None
            answer.tells_token_ids |= event.get("prompt_token_ids") is not None
            _usage(answer, event.get("usage"))
    return answer


def _response(answer: Answer, value: dict[str, Any]) -> None:
    for item in value.get("output", ()):
        for part in item.get("content") or ():
            answer.add(0, part.get("text"))
    _usage(answer, value.get("usage"))


def _usage(answer: Answer, usage: dict[str, Any] | None) -> None:
    if not usage:
        return
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    cached = usage.get("cache_read_input_tokens", details.get("cached_tokens"))
    if cached is not None:
        answer.cached_tokens = cached
    prompt = usage.get("prompt_tokens", usage.get("input_tokens"))
    # Anthropic counts cached tokens apart.
    answer.prompt_tokens = prompt + usage["cache_read_input_tokens"] if "cache_read_input_tokens" in usage else prompt
    answer.completion_tokens = usage.get("completion_tokens", usage.get("output_tokens"))
