"""``/v1/messages``, Anthropic's API: how its answers and its event stream look."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiohttp import web

from workers.sim import fields as checks
from workers.sim import prompts, template
from workers.sim.errors import ApiError, PlainError
from workers.sim.prompts import Prepared
from workers.sim.serving import Result, cached_tokens, encode
from workers.sim.text import Step

if TYPE_CHECKING:
    from workers.sim.worker import Worker


def _event(kind: str, **values: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + encode({"type": kind, **values}) + b"\n\n"


def _stop(result: Result) -> tuple[str, str | None]:
    if result.finish_reason == "length":
        return "max_tokens", None
    if isinstance(result.stop_reason, str):
        return "stop_sequence", result.stop_reason
    return "end_turn", None


class MessagesShape:
    """See serving.Shape."""

    def __init__(self, worker: Worker, prepared: Prepared, request_id: str) -> None:
        self._worker = worker
        self._prepared = prepared
        self._id = request_id
        self._open = False

    def opening(self) -> bytes:
        """Nothing before the first token."""
        return b""

    def begin(self, results: list[Result]) -> bytes:
        """The message as it starts."""
        message: dict[str, Any] = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": self._prepared.model,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": len(results[0].prompt), "output_tokens": 0},
        }
        return _event("message_start", message=message)

    def delta(self, _: Result, steps: list[Step]) -> bytes:
        """One event a token that has text."""
        data = b""
        for step in steps:
            if not step.text:
                continue
            if not self._open:
                self._open = True
                data += _event("content_block_start", content_block={"type": "text", "text": ""}, index=0)
            data += _event("content_block_delta", delta={"type": "text_delta", "text": step.text}, index=0)
        return data

    def end(self, results: list[Result]) -> bytes:
        """The block is done, the message is."""
        data = _event("content_block_stop", index=0) if self._open else b""
        reason, sequence = _stop(results[0])
        data += _event("message_delta", delta={"stop_reason": reason, "stop_sequence": sequence}, usage=self._usage(results))
        return data + _event("message_stop")

    def failure(self, error: ApiError) -> bytes:
        """The error as an event."""
        return _event("error", error={"type": "internal_error", "message": error.message})

    def whole(self, results: list[Result]) -> dict[str, Any]:
        """The answer without a stream; what is null is left out."""
        result = results[0]
        reason, sequence = _stop(result)
        answer = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "content": [{"type": "text", "text": result.text}],
            "model": self._prepared.model,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": self._usage(results),
            "kv_transfer_params": result.sequence.kv_result,
        }
        params = answer["kv_transfer_params"]
        if isinstance(params, dict):
            answer["kv_transfer_params"] = {key: value for key, value in params.items() if value is not None}
        return {key: value for key, value in answer.items() if value is not None}

    def _usage(self, results: list[Result]) -> dict[str, int]:
        result = results[0]
        counts = {"input_tokens": len(result.prompt), "output_tokens": len(result.token_ids)}
        cached = cached_tokens(self._worker, results)
        if cached is not None:
            counts["input_tokens"] -= cached
            counts["cache_read_input_tokens"] = cached
        return counts


def handler(worker: Worker) -> Any:
    """The endpoint of one worker. It runs as a chat request, and has a chat request's id."""

    async def messages(request: web.Request) -> web.StreamResponse:
        return await worker.serving.handle(
            request,
            prompts.messages_fields,
            lambda body: prompts.prepare_messages(body, worker.model),
            lambda prepared, request_id: MessagesShape(worker, prepared, request_id),
            prefix="chatcmpl-",
            error_body=ApiError.anthropic_body,
        )

    return messages


def count_tokens(worker: Worker) -> Any:
    """``/v1/messages/count_tokens``."""

    async def count(request: web.Request) -> web.Response:
        try:
            value = checks.decode_body(await request.read(), request.headers.get("content-type", ""))
            body = checks.checked(value, prompts.MESSAGES, ("model", "messages"))
        except PlainError as error:
            return web.json_response({"detail": error.detail}, status=error.status)
        except ApiError as error:
            return web.json_response(error.body(), status=error.status)
        try:
            prompts.model_of(body["model"], worker.model)
        except ApiError as error:
            return web.json_response(error.anthropic_body(), status=error.status)
        chat = prompts.messages_as_chat(body)
        tokens = len(template.render(chat["messages"], chat))
        return web.json_response({"input_tokens": tokens, "context_management": {"original_input_tokens": tokens}})

    return count
