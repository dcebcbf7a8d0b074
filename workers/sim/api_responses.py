"""``/v1/responses``: how its answers and its own kind of event stream look."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any

from aiohttp import web

from workers.sim import prompts
from workers.sim.errors import ApiError
from workers.sim.prompts import Prepared
from workers.sim.serving import Result, cached_tokens, encode
from workers.sim.text import Step

if TYPE_CHECKING:
    from workers.sim.worker import Worker


class ResponsesShape:
    """See serving.Shape."""

    def __init__(self, worker: Worker, prepared: Prepared, request_id: str) -> None:
        self._worker = worker
        self._prepared = prepared
        self._id = request_id
        self._created = int(time.time())
        self._item_id = f"msg_{uuid.uuid4().hex[:16]}"
        self._number = 0
        self._open = False

    def opening(self) -> bytes:
        """The response as it starts, twice."""
        response = self._response([], "in_progress", None)
        return self._event("response.created", response=response) + self._event("response.in_progress", response=response)

    def begin(self, _: list[Result]) -> bytes:
        """Nothing comes before the first text."""
        return b""

    def delta(self, _: Result, steps: list[Step]) -> bytes:
        """One event a token that has text."""
        data = b""
        for step in steps:
            if not step.text:
                continue
            if not self._open:
                data += self._opened()
            data += self._event(
                "response.output_text.delta",
                content_index=0,
                output_index=0,
                item_id=self._item_id,
                delta=step.text,
                logprobs=[],
            )
        return data

    def end(self, results: list[Result]) -> bytes:
        """The item is done, the response is."""
        data, text = b"", results[0].text
        place = {"item_id": self._item_id, "output_index": 0}
        if self._open:
            part = self._part(text)
            data += self._event("response.output_text.done", **place, content_index=0, text=text, logprobs=[])
            data += self._event("response.content_part.done", **place, content_index=0, part=part)
            item = self._item([part], "completed")
            data += self._event("response.output_item.done", output_index=0, item=item)
        return data + self._event("response.completed", response=self.whole(results))

    def failure(self, error: ApiError) -> bytes:
        """The error as an event."""
        return self._event("error", code=str(error.status), message=error.message, param=None)

    def whole(self, results: list[Result]) -> dict[str, Any]:
        """The answer without a stream."""
        result = results[0]
        prompt, completion = len(result.prompt), len(result.token_ids)
        usage = {
            "input_tokens": prompt,
            "input_tokens_details": {
                "cached_tokens": cached_tokens(self._worker, results, always=True),
                "cache_write_tokens": 0,
                "input_tokens_per_turn": [],
                "cached_tokens_per_turn": [],
            },
            "output_tokens": completion,
            "output_tokens_details": {
                "reasoning_tokens": 0,
                "tool_output_tokens": 0,
                "output_tokens_per_turn": [],
                "tool_output_tokens_per_turn": [],
            },
            "total_tokens": prompt + completion,
        }
        status = "incomplete" if result.finish_reason == "length" else "completed"
        output = [self._item([self._part(result.text)], status)] if result.text else []
        return self._response(output, status, usage, result.sequence.kv_result)

    def _opened(self) -> bytes:
        self._open = True
        added = self._event("response.output_item.added", output_index=0, item=self._item([], "in_progress"))
        part = {**self._part(""), "logprobs": []}
        place = {"output_index": 0, "item_id": self._item_id, "content_index": 0}
        return added + self._event("response.content_part.added", **place, part=part)

    def _event(self, kind: str, **values: Any) -> bytes:
        payload = {"type": kind, "sequence_number": self._number, **values}
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + encode(payload) + b"\n\n"

    @staticmethod
    def _part(text: str) -> dict[str, Any]:
        return {"annotations": [], "text": text, "type": "output_text", "logprobs": None}

    def _item(self, content: list[dict[str, Any]], status: str) -> dict[str, Any]:
        return {
            "id": self._item_id,
            "content": content,
            "role": "assistant",
            "status": status,
            "type": "message",
            "phase": None,
        }

    def _response(
        self,
        output: list[dict[str, Any]],
        status: str,
        usage: dict[str, Any] | None,
        kv_result: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        body = self._prepared.fields
        tools = body.get("tools") or []
        return {
            "id": self._id,
            "created_at": self._created,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.get("instructions"),
            "metadata": body.get("metadata"),
            "model": self._prepared.model,
            "object": "response",
            "output": output,
            "parallel_tool_calls": body.get("parallel_tool_calls", True),
            "temperature": 1.0 if body.get("temperature") is None else body["temperature"],
            "tool_choice": body.get("tool_choice", "auto") if tools else "none",
            "tools": tools,
            "top_p": 1.0 if body.get("top_p") is None else body["top_p"],
            "background": bool(body.get("background")),
            "max_output_tokens": self._prepared.rules[0].max_tokens,
            "max_tool_calls": body.get("max_tool_calls"),
            "previous_response_id": body.get("previous_response_id"),
            "prompt": None,
            "reasoning": body.get("reasoning"),
            "service_tier": body.get("service_tier") or "auto",
            "status": status,
            "text": body.get("text"),
            "top_logprobs": None,
            "truncation": body.get("truncation") or "disabled",
            "usage": usage,
            "user": body.get("user"),
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "kv_transfer_params": kv_result,
            "ec_transfer_params": None,
            "input_messages": None,
            "output_messages": None,
        }


def handler(worker: Worker) -> Any:
    """The endpoint of one worker. Its id comes from the body, not from a header."""

    async def responses(request: web.Request) -> web.StreamResponse:
        return await worker.serving.handle(
            request,
            prompts.responses_fields,
            lambda body: prompts.prepare_responses(body, worker.model),
            lambda prepared, request_id: ResponsesShape(worker, prepared, request_id),
            prefix="resp_",
            use_header=False,
        )

    return responses
