"""A chat request -> what its chat template is given, as vLLM makes it of the same request. Pure.

It follows vLLM 0.32 (``renderers/chat_utils.py``, ``renderers/online_renderer.py``, the request's own protocol class) for what
is text. Anything else, and anything that is not known here, raises :class:`CannotError` with a reason: no ids are better than
wrong ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

Message = dict[str, Any]

MEDIA: Final = frozenset(
    (
        *("image_url", "input_image", "image_pil", "image_embeds", "audio_url", "input_audio", "audio_embeds"),
        *("video_url", "video_embeds", "prompt_embeds"),
    )
)
"""Parts whose tokens only the engine's processor knows."""

_TEXTS: Final = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
"""Type of a part -> where its text stands."""

_SKIPPED_WITHOUT_TEXT: Final = ("text", "refusal")

_PART_KEYS: Final = frozenset(("type", "text", "refusal", "thinking", "closed"))

_MESSAGE_KEYS: Final = frozenset(
    (
        *("role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content", "task", "tools"),
        # of answers that clients send back as they were, and of which the engine shows nothing to the template
        *("refusal", "annotations", "audio", "function_call"),
    )
)
_CALL_KEYS: Final = frozenset(("id", "type", "function"))
_FUNCTION_KEYS: Final = frozenset(("name", "arguments"))

_OWN_KWARGS: Final = frozenset(
    (
        *("conversation", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize"),
        *("padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
        *("tokenizer_kwargs", "messages"),
    )
)
"""Arguments of the renderer itself, which a client could set through ``chat_template_kwargs``."""

_UNSET = (None, "auto")
"""Values of a request that do not replace a default."""

_BILLING_LINE: Final = "x-anthropic-billing-header"
"""Beginning of a line in system messages that the engine leaves out."""

READ: Final = frozenset(
    (
        *("model", "messages", "tools", "tool_choice", "add_generation_prompt", "continue_final_message"),
        *("add_special_tokens", "chat_template_kwargs", "documents", "reasoning_effort", "cache_salt"),
        *("parallel_tool_calls", "response_format", "structured_outputs", "vllm_xargs", "truncation_side"),
    )
)
"""Fields of a chat that are read here, or have no part in the prompts of models that are rendered by a template."""


class CannotError(Exception):
    """The engine's token ids cannot be known here; ``reason`` is a label."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Conversation(msgspec.Struct, frozen=True):
    """What the template is given."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    documents: list[dict[str, str]] | None
    kwargs: dict[str, Any]
    """Everything else."""
    add_generation_prompt: bool
    continue_final_message: bool


def conversation(
    fields: Mapping[str, Any],
    *,
    as_parts: bool,
    knows_developers: bool,
    defaults: Mapping[str, object],
    tools_without_choice: bool,
) -> Conversation:
    """Of the fields of a chat request, decoded. Raises CannotError.

    ``as_parts``: the template wants every content as a list of parts ("openai"), not as a string. ``knows_developers``: it has
    a role of that name. ``defaults`` of the template's own arguments; ``tools_without_choice``: see the settings.
    """
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise CannotError("invalid")
    spoken = [_message(each, as_parts=as_parts) for each in messages]
    if not knows_developers and any(each["role"] == "developer" for each in spoken):
        spoken = _one_system([_as_system(each) for each in spoken])
    own = fields.get("chat_template_kwargs") or {}
    if not isinstance(own, dict):
        raise CannotError("invalid")
    if not _OWN_KWARGS.isdisjoint(own):
        raise CannotError("template_kwargs")
    kwargs = {**defaults, **{key: value for key, value in own.items() if value not in _UNSET}}
    effort = fields.get("reasoning_effort")
    if effort is not None:
        kwargs["reasoning_effort"] = effort
        if "enable_thinking" not in own:
            kwargs["enable_thinking"] = effort != "none"
    add, goes_on = _flag(fields, "add_generation_prompt", True), _flag(fields, "continue_final_message", False)
    if add and goes_on:
        raise CannotError("invalid")
    documents = fields.get("documents")
    if documents is not None and not (isinstance(documents, list) and all(isinstance(each, dict) for each in documents)):
        raise CannotError("invalid")
    return Conversation(
        messages=spoken,
        tools=_tools(fields, tools_without_choice=tools_without_choice),
        documents=documents,
        kwargs=kwargs,
        add_generation_prompt=add,
        continue_final_message=goes_on,
    )


def _flag(fields: Mapping[str, Any], name: str, default: bool) -> bool:
    value = fields.get(name, default)
    if not isinstance(value, bool):
        raise CannotError("invalid")
    return value


def _message(given: Any, *, as_parts: bool) -> Message:
    if not isinstance(given, dict) or not isinstance(given.get("role"), str):
        raise CannotError("invalid")
    if any(key not in _MESSAGE_KEYS and value is not None for key, value in given.items()):
        raise CannotError("unknown_field")
    role = given["role"]
    content = given.get("content")
    if content is None:
        parts: Iterable[Any] = ()
    elif isinstance(content, str):
        parts = ({"type": "text", "text": content},)
    elif isinstance(content, list):
        parts = content
    else:
        raise CannotError("invalid")
    if role == "system":
        parts = _without_billing(parts)
    texts = [text for part in parts if (text := _text(part, as_parts=as_parts)) is not None]
    spoken: Message = {
        "role": role,
        "content": [{"type": "text", "text": text} for text in texts] if as_parts else "\n".join(texts),
    }
    if role == "assistant":
        calls = _calls(given.get("tool_calls"))
        if calls:
            spoken["tool_calls"] = calls
        reasoning = given.get("reasoning")
        if reasoning is None:
            reasoning = given.get("reasoning_content")
        if reasoning is not None:
            if not isinstance(reasoning, str):
                raise CannotError("invalid")
            spoken["reasoning"] = spoken["reasoning_content"] = reasoning
    elif role == "tool":
        if "tool_call_id" in given:
            spoken["tool_call_id"] = given["tool_call_id"]
        # Templates want a string of a tool, whatever they want of others.
        spoken["content"] = "\n".join(texts)
    for name in ("name", "task"):
        if isinstance(given.get(name), str):
            spoken[name] = given[name]
    if role == "developer":
        spoken["tools"] = given.get("tools")
    return spoken


def _text(part: Any, *, as_parts: bool) -> str | None:
    """Of one part of a content; None: it is left out. In a string, nothing but its text is shown."""
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise CannotError("invalid")
    kind = part.get("type")
    if kind in MEDIA or not MEDIA.isdisjoint(part):
        raise CannotError("multimodal")
    if kind not in _TEXTS or "uuid" in part or (as_parts and not _PART_KEYS.issuperset(part)):
        raise CannotError("unknown_field")
    text = part.get(_TEXTS[kind])
    if text is None and kind in _SKIPPED_WITHOUT_TEXT:
        return None
    if not isinstance(text, str):
        raise CannotError("invalid")
    return text


def _without_billing(parts: Iterable[Any]) -> list[Any]:
    kept: list[Any] = []
    for part in parts:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
        if isinstance(text, str) and text.startswith(_BILLING_LINE) and (isinstance(part, str) or part.get("type") == "text"):
            rest = text.partition("\n")[2]
            if not rest:
                continue
            part = rest if isinstance(part, str) else {**part, "text": rest}
        kept.append(part)
    return kept


def _calls(given: Any) -> list[dict[str, Any]]:
    """Tool calls of an assistant, their arguments as an object, keys in the order in which the engine's own types have them."""
    if given is None:
        return []
    if not isinstance(given, list):
        raise CannotError("invalid")
    calls = []
    for call in given:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or call.get("type", "function") != "function":
            raise CannotError("invalid")
        if not _CALL_KEYS.issuperset(call) or not _FUNCTION_KEYS.issuperset(function):
            raise CannotError("unknown_field")
        if not ("id" in call and "type" in call and "name" in function and "arguments" in function):
            raise CannotError("unknown_field")  # which of the engine's types it is taken for decides the order of the keys
        calls.append(
            {
                "id": call["id"],
                "function": {"arguments": _arguments(function["arguments"]), "name": function["name"]},
                "type": call["type"],
            }
        )
    return calls


def _arguments(given: Any) -> dict[str, Any]:
    if not isinstance(given, str):
        raise CannotError("invalid")
    try:
        parsed = json.loads(given) if given else {}
    except json.JSONDecodeError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _tools(fields: Mapping[str, Any], *, tools_without_choice: bool) -> list[dict[str, Any]] | None:
    given = fields.get("tools")
    if given is None or (fields.get("tool_choice") == "none" and not tools_without_choice):
        return None
    if not isinstance(given, list) or not given:
        raise CannotError("invalid")
    return [_tool(each) for each in given]


def _tool(given: Any) -> dict[str, Any]:
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict) or given.get("type", "function") != "function":
        raise CannotError("invalid")
    if "defer_loading" in given or "defer_loading" in function:
        raise CannotError("unknown_field")
    name, description, parameters = (function.get(key) for key in ("name", "description", "parameters"))
    if not isinstance(name, str) or not isinstance(description, str | None) or not isinstance(parameters, dict | None):
        raise CannotError("invalid")
    shown: dict[str, Any] = {"name": name, "description": description, "parameters": parameters}
    strict = function.get("strict")
    if strict is not None:
        if not isinstance(strict, bool):
            raise CannotError("invalid")
        shown["strict"] = strict
    return {"type": "function", "function": shown}


def _as_system(message: Message) -> Message:
    if message["role"] != "developer":
        return message
    return {**{key: value for key, value in message.items() if key != "tools"}, "role": "system"}


def _one_system(messages: list[Message]) -> list[Message]:
    """All system messages in one at the beginning, unless there is only one and it stands there."""
    systems = [index for index, each in enumerate(messages) if each["role"] == "system"]
    if systems in ([], [0]):
        return messages
    texts = []
    for index in systems:
        content = messages[index]["content"]
        text = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
        if text:
            texts.append(text)
    return [{"role": "system", "content": "\n\n".join(texts)}, *(each for each in messages if each["role"] != "system")]
