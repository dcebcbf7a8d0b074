"""The chat template: messages, tools and everything else that shapes the prompt, to token ids. No I/O here.

All that a client can say about the prompt leaves a trace in it (tools, tool_choice, response_format, reasoning_effort,
documents, chat_template_kwargs, a template of its own): a leg that dropped one of them has other tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from workers.sim import tokens

_encode = msgspec.json.Encoder().encode

_SETTINGS = ("tool_choice", "response_format", "reasoning_effort", "documents", "chat_template", "chat_template_kwargs")
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


def has_media(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a message holds something that is not text."""
    return any(
        isinstance(part, dict) and part.get("type", "text") not in _TEXT_PARTS
        for message in messages
        if isinstance(message.get("content"), list)
        for part in message["content"]
    )


def render(messages: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> list[int]:
    """A conversation as token ids. ``settings`` are the other fields of the request."""
    ids = [tokens.BOS] if settings.get("add_special_tokens", False) else []
    header = {key: settings[key] for key in _SETTINGS if settings.get(key) is not None}
    if settings.get("tools"):
        # The default is not written, as templates leave it out.
        if header.get("tool_choice") == "auto":
            del header["tool_choice"]
        header["tools"] = settings["tools"]
    elif header.get("tool_choice") == "none":
        del header["tool_choice"]
    if header:
        ids += _turn("tools", _plain(header))
    open_ended = bool(settings.get("continue_final_message"))
    for index, message in enumerate(messages):
        ids += _turn(str(message.get("role", "")), _content(message), closed=not open_ended or index < len(messages) - 1)
    if settings.get("add_generation_prompt", True) and not open_ended:
        ids += [tokens.TURN_START, *tokens.encode("assistant\n")]
    return ids


def _turn(role: str, content: list[int], *, closed: bool = True) -> list[int]:
    ids = [tokens.TURN_START, *tokens.encode(role + "\n"), *content]
    return [*ids, tokens.TURN_END, *tokens.encode("\n")] if closed else ids


def _plain(value: object) -> list[int]:
    return tokens.encode(_encode(value).decode())


def _content(message: Mapping[str, Any]) -> list[int]:
    ids: list[int] = []
    if message.get("name"):
        ids += _plain({"name": message["name"]})
    if reasoning := message.get("reasoning") or message.get("reasoning_content"):
        ids += _plain({"reasoning": reasoning})
    content = message.get("content")
    if isinstance(content, str):
        ids += tokens.encode(content)
    elif isinstance(content, list):
        for part in content:
            ids += _part(part)
    for key in ("tool_calls", "tool_call_id"):
        if message.get(key):
            ids += _plain({key: message[key]})
    return ids


def _part(part: object) -> list[int]:
    if isinstance(part, str):
        return tokens.encode(part)
    if isinstance(part, dict) and part.get("type", "text") in _TEXT_PARTS and isinstance(part.get("text"), str):
        return tokens.encode(part["text"])
    # A medium stands for its place and its address: other media, other tokens.
    return [tokens.IMAGE, *_plain(part)]
