"""``/v1/embeddings``, ``/v1/score`` and ``/v1/rerank``: what a router passes to one worker, answered from the text alone."""

from __future__ import annotations

import base64
import hashlib
import struct
import time
import uuid
from typing import TYPE_CHECKING, Any

from aiohttp import web

from workers.sim import fields as checks
from workers.sim import prompts, sampling, tokens
from workers.sim.api_tokens import served
from workers.sim.errors import ApiError

if TYPE_CHECKING:
    from workers.sim.worker import Worker

DIMENSIONS = 64

_EMBEDDINGS: dict[str, checks.Check] = {
    "model": checks.optional(checks.string),
    "input": checks.prompt,
    "encoding_format": checks.optional(checks.one_of("float", "base64", "bytes", "bytes_only")),
    "dimensions": checks.optional(checks.integer()),
    "truncate_prompt_tokens": checks.optional(checks.integer(-1)),
    "user": checks.optional(checks.string),
}

_RERANK: dict[str, checks.Check] = {
    "model": checks.optional(checks.string),
    "query": checks.string,
    "documents": checks.listing(checks.string),
    "top_n": checks.integer(0),
}
_PAIRS = (("queries", "documents"), ("text_1", "text_2"), ("data_1", "data_2"), ("queries", "items"))


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
    return {
        "id": f"embd-{uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": name,
        "data": data,
        "usage": _usage(total),
    }


def embedding(token_ids: list[int]) -> list[float]:
    """The vector of a text."""
    digest = hashlib.blake2b(repr(token_ids).encode(), digest_size=DIMENSIONS).digest()
    raw = [byte - 127.5 for byte in digest]
    norm = sum(x * x for x in raw) ** 0.5
    return [x / norm for x in raw]


def _texts(value: Any, loc: str, problems: checks.Problems) -> Any:
    if isinstance(value, str):
        return [value]
    return checks.listing(checks.string)(value, loc, problems)


def _similarity(first: str, second: str) -> float:
    one, other = embedding(tokens.encode(first)), embedding(tokens.encode(second))
    return (1 + sum(a * b for a, b in zip(one, other, strict=True))) / 2


def score(worker: Worker, value: Any) -> dict[str, Any]:
    """How alike texts are: one with each of many, or pair by pair."""
    names = next((pair for pair in _PAIRS if isinstance(value, dict) and all(key in value for key in pair)), _PAIRS[0])
    body = checks.checked(value, {"model": checks.optional(checks.string), **dict.fromkeys(names, _texts)}, names)
    name, _ = prompts.model_of(body.get("model"), worker.model)
    first, second = (body[key] for key in names)
    if len(first) == 1:
        first *= len(second)
    if len(first) != len(second):
        raise ApiError("Input lengths must be either 1:1, 1:N or N:N")
    total = sum(len(tokens.encode(text)) for text in (*first, *second))
    scores = [_similarity(a, b) for a, b in zip(first, second, strict=True)]
    return {
        "id": f"score-{uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": name,
        "data": [{"index": index, "object": "score", "score": one} for index, one in enumerate(scores)],
        "usage": _usage(total),
    }


def rerank(worker: Worker, value: Any) -> dict[str, Any]:
    """Documents by how alike they are to a query."""
    body = checks.checked(value, _RERANK, ("query", "documents"))
    name, _ = prompts.model_of(body.get("model"), worker.model)
    results: list[dict[str, Any]] = [
        {"index": index, "document": {"text": text, "multi_modal": None}, "relevance_score": _similarity(body["query"], text)}
        for index, text in enumerate(body["documents"])
    ]
    results.sort(key=lambda result: -result["relevance_score"])
    total = sum(len(tokens.encode(text)) for text in (body["query"], *body["documents"]))
    return {
        "id": f"rerank-{uuid.uuid4().hex}",
        "model": name,
        "usage": {"prompt_tokens": total, "total_tokens": total},
        "results": results[: body.get("top_n") or len(results)],
    }


def _usage(total: int) -> dict[str, Any]:
    usage = {"prompt_tokens": total, "total_tokens": total, "completion_tokens": 0, "prompt_tokens_details": None}
    return {**usage, "completion_tokens_details": None}


def add_routes(app: web.Application, worker: Worker) -> None:
    """The routes of one worker."""
    app.router.add_post("/v1/embeddings", served(worker, embeddings))
    for path in ("/score", "/v1/score"):
        app.router.add_post(path, served(worker, score))
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        app.router.add_post(path, served(worker, rerank))
