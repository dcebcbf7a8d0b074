"""The prompts of a trace as text: each hash id is always the same text, of exactly 512 tokens of the simulated engine.

A token is a space and three letters, so a prompt has four characters a token, as English text has with a real
vocabulary: routers that estimate tokens from characters, or keep text in a tree, meet what they would meet in service.
"""

from __future__ import annotations

import hashlib
import string
from array import array
from collections.abc import Mapping
from functools import lru_cache

import msgspec

from workers.traces import BLOCK_TOKENS, Request

_VOCABULARY = 1 << 10
"""Few enough that the tokenizer's table stays in the processor's cache, and more than enough to tell blocks apart."""
_LETTERS = string.ascii_lowercase
WORDS = [f" {_LETTERS[i // 676]}{_LETTERS[i // 26 % 26]}{_LETTERS[i % 26]}" for i in range(_VOCABULARY)]
TOKEN_CHARS = 4


@lru_cache(maxsize=1 << 16)
def block_text(hash_id: int) -> str:
    """The text of one block."""
    numbers = array("H", hashlib.shake_128(b"block %d" % hash_id).digest(2 * BLOCK_TOKENS))
    return "".join([WORDS[number % _VOCABULARY] for number in numbers])


def prompt_text(request: Request) -> str:
    """The prompt of a request; its last block may be partial."""
    return "".join(map(block_text, request.hash_ids))[: TOKEN_CHARS * request.input_tokens]


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
