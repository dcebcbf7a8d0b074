"""A client of the four endpoints that are prefilled and decoded apart, streaming and not, with the answer in one shape
whichever way it came. ``messages`` is Anthropic's API."""

from __future__ import annotations

import json
import urllib.request
from dataclasses import dataclass, field
from typing import Any, Literal

MODEL = "tiny"
TIMEOUT_S = 90.0
"""A decode that stalls because something else had its core takes half a minute."""

Endpoint = Literal["chat", "completions", "responses", "messages"]
Prompt = str | list[int] | list[str] | list[dict[str, Any]]
"""A text, token ids, several texts (completions), or the messages of a chat."""

PATHS: dict[Endpoint, str] = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}


@dataclass(frozen=True)
class Answer:
    """What was generated. Two answers are equal when a user could not tell them apart."""

    texts: tuple[str, ...]
    """One a choice, in the order of their indexes."""
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = field(compare=False)
    kv_transfer_params: dict[str, Any] | None = field(compare=False, repr=False)
    headers: dict[str, str] = field(compare=False, repr=False)
    raw: list[dict[str, Any]] = field(compare=False, repr=False)
    """The body, or the events of the stream."""

    @property
    def text(self) -> str:
        (text,) = self.texts
        return text


def body_of(endpoint: Endpoint, prompt: Prompt, *, stream: bool = False, max_tokens: int = 20, **extra: Any) -> dict[str, Any]:
    """The body of one request at temperature 0."""
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    content = {
        "chat": {"messages": messages, "max_tokens": max_tokens},
        "completions": {"prompt": prompt, "max_tokens": max_tokens},
        "responses": {"input": prompt, "max_output_tokens": max_tokens},
        "messages": {"messages": messages, "max_tokens": max_tokens},
    }[endpoint]
    body = {"model": MODEL, **content, "temperature": 0, "stream": stream}
    if stream and endpoint in ("chat", "completions"):
        body["stream_options"] = {"include_usage": True}
    return {**body, **extra}


def ask(
    url: str,
    endpoint: Endpoint,
    prompt: Prompt,
    *,
    stream: bool = False,
    max_tokens: int = 20,
    timeout_s: float = TIMEOUT_S,
    headers: dict[str, str] | None = None,
    **extra: Any,
) -> Answer:
    """One request. Raises HTTPError for anything but 200, AssertionError for a stream that is not whole."""
    body = body_of(endpoint, prompt, stream=stream, max_tokens=max_tokens, **extra)
    return send(url, endpoint, json.dumps(body).encode(), stream=stream, timeout_s=timeout_s, headers=headers)


def send(
    url: str,
    endpoint: Endpoint,
    body: bytes,
    *,
    stream: bool = False,
    timeout_s: float = TIMEOUT_S,
    headers: dict[str, str] | None = None,
) -> Answer:
    """The same with a body as it is."""
    raw, reply_headers = post(url + PATHS[endpoint], body, timeout_s=timeout_s, headers=headers)
    events = _events(raw, endpoint) if stream else [json.loads(raw)]
    for event in events:
        assert not event.get("error"), event
    return _READERS[endpoint](events, reply_headers)


def post(
    url: str, body: bytes, *, timeout_s: float = TIMEOUT_S, headers: dict[str, str] | None = None
) -> tuple[str, dict[str, str]]:
    """Body and headers of a 200 answer. Raises HTTPError for any other."""
    request = urllib.request.Request(url, body, {"content-type": "application/json", **(headers or {})})
    with urllib.request.urlopen(request, timeout=timeout_s) as reply:
        return reply.read().decode(), {name.lower(): value for name, value in reply.headers.items()}


_LAST_EVENT = {"responses": "response.completed", "messages": "message_stop"}


def _events(raw: str, endpoint: Endpoint) -> list[dict[str, Any]]:
    data = [line.removeprefix("data: ") for line in raw.splitlines() if line.startswith("data: ")]
    if endpoint in ("chat", "completions"):
        assert data.pop() == "[DONE]", raw
    events = [json.loads(text) for text in data]
    if endpoint in _LAST_EVENT:
        assert events[-1]["type"] == _LAST_EVENT[endpoint], raw
    pieces = [event for event in events if event.get("choices") or "delta" in event]
    # An engine puts tokens together that its server had no time to send.
    assert len(pieces) > 1, "a streamed answer comes in more than one piece"
    return events


def _openai(events: list[dict[str, Any]], headers: dict[str, str]) -> Answer:
    texts: dict[int, str] = {}
    finish_reason = ""
    usage: dict[str, Any] = {}
    for event in events:
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            part = choice.get("delta") or choice.get("message") or choice
            texts[choice["index"]] = texts.get(choice["index"], "") + (part.get("content") or part.get("text") or "")
            finish_reason = choice["finish_reason"] or finish_reason
    return Answer(
        texts=tuple(texts[index] for index in sorted(texts)),
        finish_reason=finish_reason,
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        kv_transfer_params=events[-1].get("kv_transfer_params"),
        headers=headers,
        raw=events,
    )


def _responses(events: list[dict[str, Any]], headers: dict[str, str]) -> Answer:
    whole = events[-1].get("response", events[-1])
    text = "".join(part["text"] for item in whole["output"] for part in item["content"])
    if len(events) > 1:
        streamed = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
        assert streamed == text, "the pieces of a stream make its text"
    return Answer(
        texts=(text,),
        finish_reason=(whole["incomplete_details"] or {}).get("reason", whole["status"]),
        prompt_tokens=whole["usage"]["input_tokens"],
        completion_tokens=whole["usage"]["output_tokens"],
        cached_tokens=whole["usage"]["input_tokens_details"]["cached_tokens"],
        kv_transfer_params=whole["kv_transfer_params"],
        headers=headers,
        raw=events,
    )


def _messages(events: list[dict[str, Any]], headers: dict[str, str]) -> Answer:
    if len(events) == 1:
        (end,) = events
        text, stop_reason = "".join(part["text"] for part in end["content"]), end["stop_reason"]
    else:
        end = next(event for event in events if event["type"] == "message_delta")
        text = "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
        stop_reason = end["delta"]["stop_reason"]
    usage = end["usage"]
    cached = usage["cache_read_input_tokens"]
    return Answer(
        texts=(text,),
        finish_reason=stop_reason,
        prompt_tokens=usage["input_tokens"] + usage["cache_creation_input_tokens"] + cached,  # this API counts them apart
        completion_tokens=usage["output_tokens"],
        cached_tokens=cached,
        kv_transfer_params=end.get("kv_transfer_params"),
        headers=headers,
        raw=events,
    )


_READERS = {"chat": _openai, "completions": _openai, "responses": _responses, "messages": _messages}
