"""``/tokenize`` and ``/detokenize``, and ``/v1/embeddings``: what answers without the engine's loop."""

from __future__ import annotations

import base64
import hashlib
import struct
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from aiohttp import web

from workers.sim import fields as checks
from workers.sim import prompts, sampling, template, tokens
from workers.sim.errors import ApiError, PlainError, invalid

if TYPE_CHECKING:
    from workers.sim.worker import Worker

DIMENSIONS = 64

_TOKENIZE_CHAT = {key: checks.CHAT[key] for key in ("model", "messages", "tools", "chat_template", "chat_template_kwargs")}
_TOKENIZE = {
    **_TOKENIZE_CHAT,
    "prompt": checks.string,
    "add_special_tokens": checks.boolean,
    "add_generation_prompt": checks.boolean,
    "continue_final_message": checks.boolean,
    "return_token_strs": checks.optional(checks.boolean),
}
_DETOKENIZE: dict[str, checks.Check] = {
    "model": checks.optional(checks.string),
    "tokens": checks.listing(checks.integer(0, (1 << 63) - 1)),
}
_EMBEDDINGS: dict[str, checks.Check] = {
    "model": checks.optional(checks.string),
    "input": checks.prompt,
    "encoding_format": checks.optional(checks.one_of("float", "base64", "bytes", "bytes_only")),
    "dimensions": checks.optional(checks.integer()),
    "truncate_prompt_tokens": checks.optional(checks.integer(-1)),
    "user": checks.optional(checks.string),
}

Work = Callable[["Worker", Any], dict[str, Any]]


def tokenize(worker: Worker, value: Any) -> dict[str, Any]:
    """A text or a conversation to token ids."""
    if isinstance(value, dict) and "prompt" not in value and "messages" not in value:
        problems = checks.Problems()
        for key in ("prompt", "messages"):
            problems.add("missing", f"body.{key}", "Field required", value)
        problems.raise_if_any()
    body = checks.checked(value, _TOKENIZE)
    prompts.model_of(body.get("model"), worker.model)
    if "prompt" in body:
        ids = tokens.encode(body["prompt"])
        if body.get("add_special_tokens", True):
            ids = [tokens.BOS, *ids]
    else:
        ids = template.render(body["messages"], body)
    strings = tokens.token_strings(ids) if body.get("return_token_strs") else None
    return {"count": len(ids), "max_model_len": worker.model.max_model_len, "tokens": ids, "token_strs": strings}


def detokenize(worker: Worker, value: Any) -> dict[str, Any]:
    """Token ids to text."""
    body = checks.checked(value, _DETOKENIZE, ("tokens",))
    prompts.model_of(body.get("model"), worker.model)
    ids = body["tokens"]
    if ids and max(ids) >= tokens.VOCAB_SIZE:
        raise invalid(f"Token id {max(ids)} is out of vocabulary")
    return {"prompt": tokens.decode(ids)}


def embeddings(worker: Worker, value: Any) -> dict[str, Any]:
    """A vector of length one for each input, a function of its tokens."""
    body = checks.checked(value, _EMBEDDINGS, ("input",))
    name, _ = prompts.model_of(body.get("model"), worker.model)
    data, total = [], 0
    for index, entry in enumerate(body["input"]):
        ids = entry if isinstance(entry, list) else [tokens.BOS, *tokens.encode(entry)]
        ids = sampling.truncated(ids, body, worker.model.max_model_len)
        sampling.check_length(len(ids), worker.model.max_model_len)
        total += len(ids)
        vector = embedding(ids)
        packed = base64.b64encode(struct.pack(f"<{DIMENSIONS}f", *vector)).decode()
        shown = packed if body.get("encoding_format") == "base64" else vector
        data.append({"index": index, "object": "embedding", "embedding": shown})
    usage = {"prompt_tokens": total, "total_tokens": total, "completion_tokens": 0, "prompt_tokens_details": None}
    return {
        "id": f"embd-{uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": name,
        "data": data,
        "usage": {**usage, "completion_tokens_details": None},
    }


def embedding(token_ids: list[int]) -> list[float]:
    """The vector of a text."""
    digest = hashlib.blake2b(repr(token_ids).encode(), digest_size=DIMENSIONS).digest()
    raw = [byte - 127.5 for byte in digest]
    norm = sum(x * x for x in raw) ** 0.5
    return [x / norm for x in raw]


def add_routes(app: web.Application, worker: Worker) -> None:
    """The routes of one worker."""

    def served(work: Work) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def serve(request: web.Request) -> web.Response:
            try:
                body = await request.read()
                await worker.serving.refused(request, body)
                return web.json_response(work(worker, checks.decode_body(body, request.headers.get("content-type", ""))))
            except PlainError as error:
                return web.json_response({"detail": error.detail}, status=error.status)
            except ApiError as error:
                return web.json_response(error.body(), status=error.status)

        return serve

    app.router.add_post("/tokenize", served(tokenize))
    app.router.add_post("/detokenize", served(detokenize))
    app.router.add_post("/v1/embeddings", served(embeddings))
