"""``/tokenize`` and ``/detokenize``, and the frame of all endpoints that answer without the engine's loop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from aiohttp import web

from workers.sim import fields as checks
from workers.sim import prompts, template, tokens
from workers.sim.errors import ApiError, PlainError, invalid

if TYPE_CHECKING:
    from workers.sim.worker import Worker

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
Work = Callable[["Worker", Any], dict[str, Any]]


def tokenize(worker: Worker, value: Any) -> dict[str, Any]:
    """A text or a conversation to token ids."""
    if isinstance(value, dict) and "messages" not in value and not isinstance(value.get("prompt"), str):
        problems = checks.Problems()
        if "prompt" in value:
            checks.string(value["prompt"], "body.prompt", problems)
        else:
            problems.add("missing", "body.prompt", "Field required", value)
        problems.add("missing", "body.messages", "Field required", value)
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


def served(worker: Worker, work: Work) -> Callable[[web.Request], Awaitable[web.Response]]:
    """An endpoint from a function of the body."""

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


def add_routes(app: web.Application, worker: Worker) -> None:
    """The routes of one worker."""
    app.router.add_post("/tokenize", served(worker, tokenize))
    app.router.add_post("/detokenize", served(worker, detokenize))
