"""Whole HTTP requests for the requests of a trace."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from workers.trace_text import prompt_text
from workers.traces import Request


def http_request(
    request: Request, *, model: str, host: str, headers: Mapping[str, str] | None = None, path: str = "/v1/completions"
) -> bytes:
    """The whole HTTP request: a streamed completion of exactly the trace's number of tokens, on a connection of its own."""
    fields = {
        "model": model,
        "prompt": prompt_text(request),
        "max_tokens": request.output_tokens,
        "ignore_eos": True,
        "stream": True,
    }
    body = msgspec.json.encode(fields)
    lines = [
        f"POST {path} HTTP/1.1",
        f"host: {host}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        *(f"{name}: {value}" for name, value in (headers or {}).items()),
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
