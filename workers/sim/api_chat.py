"""``/v1/chat/completions``: how its answers look."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from aiohttp import web

from workers.sim import prompts, tokens
from workers.sim.openai_stream import OpenAiStream
from workers.sim.prompts import Prepared
from workers.sim.serving import Result, event, prompt_logprobs, usage
from workers.sim.text import Step

if TYPE_CHECKING:
    from workers.sim.worker import Worker


class ChatShape(OpenAiStream):
    """See serving.Shape."""

    def __init__(self, worker: Worker, prepared: Prepared, request_id: str) -> None:
        self._id = request_id
        self._created = int(time.time())
        head = {"id": request_id, "object": "chat.completion.chunk", "created": self._created, "model": prepared.model}
        super().__init__(worker, prepared, head)
        body = prepared.fields
        self._last = body["messages"][-1] if body.get("messages") else {}
        self._role = "assistant" if body.get("add_generation_prompt", True) else str(self._last.get("role"))

    def _echoed(self) -> str:
        """What ``echo`` puts before the answer: the last message, if it is of the same role."""
        content = self._last.get("content")
        same = self._prepared.echo and self._last.get("role") == self._role
        return content if same and isinstance(content, str) else ""

    def begin(self, results: list[Result]) -> bytes:
        """The role, once a choice."""
        prepared = self._prepared
        events = []
        for result in results:
            choice = {"index": result.index, "delta": {"role": self._role, "content": ""}, "logprobs": None}
            chunk: dict[str, Any] = {
                **self._head,
                "choices": [{**choice, "finish_reason": None}],
                "prompt_token_ids": result.prompt if prepared.return_token_ids else None,
                "prompt_text": self._prompt_text(result),
            }
            if prepared.continuous_usage:
                chunk["usage"] = _counts(result, 0)
            events.append(event(chunk))
        for result in results if self._echoed() else ():
            choice = {"index": result.index, "delta": {"content": self._echoed()}, "logprobs": None}
            events.append(event({**self._head, "choices": [{**choice, "finish_reason": None}]}))
        return b"".join(events)

    def delta(self, result: Result, steps: list[Step]) -> bytes:
        """One event a token."""
        prepared = self._prepared
        sent = len(result.token_ids) - len(steps)
        events = []
        for number, step in enumerate(steps, start=sent + 1):
            choice: dict[str, Any] = {
                "index": result.index,
                "delta": {"content": step.text},
                "logprobs": self._logprobs([step.token_id]) if prepared.logprobs is not None else None,
                "finish_reason": step.finish_reason,
            }
            if step.finish_reason is not None:
                choice["stop_reason"] = step.stop_reason
            choice["token_ids"] = [step.token_id] if prepared.return_token_ids else None
            chunk: dict[str, Any] = {**self._head, "choices": [choice]}
            if step.finish_reason is not None and not prepared.include_usage:
                chunk["system_fingerprint"] = self._worker.fingerprint
            if prepared.continuous_usage:
                chunk["usage"] = _counts(result, number)
            events.append(event(chunk))
        return b"".join(events)

    def whole(self, results: list[Result]) -> dict[str, Any]:
        """The answer without a stream."""
        prepared = self._prepared
        choices = [
            {
                "index": result.index,
                "message": {
                    "role": self._role,
                    "content": self._echoed() + result.text,
                    "refusal": None,
                    "annotations": None,
                    "audio": None,
                    "function_call": None,
                    "reasoning": None,
                },
                "logprobs": self._logprobs(result.token_ids) if prepared.logprobs is not None else None,
                "finish_reason": result.finish_reason,
                "stop_reason": result.stop_reason,
                "token_ids": result.token_ids if prepared.return_token_ids else None,
                "routed_experts": None,
            }
            for result in results
        ]
        return {
            "id": self._id,
            "object": "chat.completion",
            "created": self._created,
            "model": prepared.model,
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": self._worker.fingerprint,
            "usage": usage(self._worker, results),
            "prompt_logprobs": prompt_logprobs(results[0]),
            "prompt_token_ids": results[0].prompt if prepared.return_token_ids else None,
            "prompt_text": self._prompt_text(results[0]),
            "kv_transfer_params": results[0].sequence.kv_result,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def _prompt_text(self, result: Result) -> str | None:
        if not self._prepared.fields.get("return_prompt_text"):
            return None
        return tokens.decode(result.prompt, show_special=True)

    def _logprobs(self, ids: list[int]) -> dict[str, Any]:
        """A greedy model that is certain: every token has log probability 0."""
        top = bool(self._prepared.logprobs)
        content = []
        for string in tokens.token_strings(ids):
            entry = {"token": string, "logprob": 0.0, "bytes": list(string.encode())}
            content.append({**entry, "top_logprobs": [entry] if top else []})
        return {"content": content}


def _counts(result: Result, completion: int) -> dict[str, int]:
    prompt = len(result.prompt)
    return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}


def handler(worker: Worker, *, batch: bool = False) -> Any:
    """The endpoint of one worker; ``batch``: the one that takes several conversations."""
    check = prompts.batch_fields if batch else prompts.chat_fields
    prepare = prompts.prepare_batch if batch else prompts.prepare_chat

    async def chat(request: web.Request) -> web.StreamResponse:
        return await worker.serving.handle(
            request,
            check,
            lambda body: prepare(body, worker.model),
            lambda prepared, request_id: ChatShape(worker, prepared, request_id),
            prefix="chatcmpl-",
        )

    return chat
