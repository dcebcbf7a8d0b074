"""A client of the two endpoints, streaming and not, with the answer in one shape whichever way it came."""

from __future__ import annotations

import json
import urllib.request
from dataclasses import dataclass, field
from typing import Any, Literal

MODEL = "tiny"
TIMEOUT_S = 30.0
"""A decode that stalls on a starved core takes longer than this and fails the test."""

Endpoint = Literal["chat", "completions"]

_PATHS: dict[Endpoint, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


@dataclass(frozen=True)
class Answer:
    """What was generated. Two answers are equal when a user could not tell them apart."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = field(compare=False)
    kv_transfer_params: dict[str, Any] | None = field(compare=False, repr=False)
    headers: dict[str, str] = field(compare=False, repr=False)


def ask(
    url: str,
    endpoint: Endpoint,
    prompt: str | list[int],
    *,
    stream: bool = False,
    max_tokens: int = 20,
    timeout_s: float = TIMEOUT_S,
    headers: dict[str, str] | None = None,
    **extra: Any,
) -> Answer:
    """One request at temperature 0. Raises HTTPError for anything but 200, AssertionError for a stream that is not whole."""
    content = {"messages": [{"role": "user", "content": prompt}]} if endpoint == "chat" else {"prompt": prompt}
    body = {"model": MODEL, **content, "max_tokens": max_tokens, "temperature": 0, "stream": stream, **extra}
    if stream:
        body["stream_options"] = {"include_usage": True}
    request = urllib.request.Request(
        url + _PATHS[endpoint],
        json.dumps(body).encode(),
        {"content-type": "application/json", **(headers or {})},
    )
    with urllib.request.urlopen(request, timeout=timeout_s) as reply:
        reply_headers = {name.lower(): value for name, value in reply.headers.items()}
        raw = reply.read().decode()
    return _answer(_events(raw) if stream else [json.loads(raw)], endpoint, reply_headers)


def _events(raw: str) -> list[dict[str, Any]]:
    data = [line.removeprefix("data: ") for line in raw.splitlines() if line]
    assert data[-1] == "[DONE]", raw
    events = [json.loads(text) for text in data[:-1]]
    assert len(events) > 2, "a streamed answer comes in more than one piece"
    return events


def _answer(events: list[dict[str, Any]], endpoint: Endpoint, headers: dict[str, str]) -> Answer:
    text, finish_reason = "", ""
    usage: dict[str, Any] = {}
    for event in events:
        assert "error" not in event, event
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            part = choice.get("delta") or choice.get("message") or {}
            text += choice["text"] if endpoint == "completions" else part.get("content") or ""
            finish_reason = choice["finish_reason"] or finish_reason
    return Answer(
        text=text,
        finish_reason=finish_reason,
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        kv_transfer_params=events[-1].get("kv_transfer_params"),
        headers=headers,
    )
