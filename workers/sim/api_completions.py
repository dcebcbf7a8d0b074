"""``/v1/completions``: how its answers look."""

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


class CompletionShape(OpenAiStream):
    """See serving.Shape."""

    def __init__(self, worker: Worker, prepared: Prepared, request_id: str) -> None:
        head = {"id": request_id, "object": "text_completion", "created": int(time.time()), "model": prepared.model}
        super().__init__(worker, prepared, head)
        self._offsets: dict[int, int] = {}

    def begin(self, _: list[Result]) -> bytes:
        """Nothing comes before the first token."""
        return b""

    def delta(self, result: Result, steps: list[Step]) -> bytes:
        """One event a token."""
        prepared = self._prepared
        sent = len(result.token_ids) - len(steps)
        events = []
        for number, step in enumerate(steps, start=sent + 1):
            text, prompt_ids, ids = step.text, None, [step.token_id]
            if number == 1 and prepared.echo:
                shown = "" if prepared.return_token_ids else tokens.decode(result.prompt)
                text = shown if prepared.echo_only else shown + text
                prompt_ids = result.prompt
                ids = result.prompt if prepared.echo_only else [*result.prompt, *ids]
            elif number == 1 and prepared.return_token_ids:
                prompt_ids = result.prompt
            choice = {
                "index": result.index,
                "text": text,
                "logprobs": self._logprobs(result.index, ids) if prepared.logprobs is not None else None,
                "finish_reason": step.finish_reason,
                "stop_reason": step.stop_reason,
                "prompt_token_ids": prompt_ids,
                "token_ids": [step.token_id] if prepared.return_token_ids else None,
            }
            chunk: dict[str, Any] = {**self._head, "choices": [choice]}
            if prepared.continuous_usage:
                count = len(result.prompt)
                chunk["usage"] = {"prompt_tokens": count, "total_tokens": count + number, "completion_tokens": number}
            if step.finish_reason is not None and not prepared.include_usage:
                chunk["system_fingerprint"] = self._worker.fingerprint
            events.append(event(chunk))
        return b"".join(events)

    def whole(self, results: list[Result]) -> dict[str, Any]:
        """The answer without a stream. Of several prompts, only the first one's handoff is told, as in vLLM."""
        prepared = self._prepared
        choices = []
        for result in results:
            text, ids = result.text, result.token_ids
            if prepared.echo:
                shown = "" if prepared.return_token_ids else tokens.decode(result.prompt)
                text = shown if prepared.echo_only else shown + text
                ids = result.prompt if prepared.echo_only else [*result.prompt, *ids]
            choices.append(
                {
                    "index": result.index,
                    "text": text,
                    "logprobs": self._logprobs(result.index, ids) if prepared.logprobs is not None else None,
                    "finish_reason": result.finish_reason,
                    "stop_reason": result.stop_reason,
                    "token_ids": result.token_ids if prepared.return_token_ids else None,
                    "prompt_logprobs": prompt_logprobs(result),
                    "prompt_token_ids": result.prompt if prepared.return_token_ids else None,
                    "routed_experts": None,
                }
            )
        return {
            **self._head,
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": self._worker.fingerprint,
            "usage": usage(self._worker, results),
            "kv_transfer_params": results[0].sequence.kv_result,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def _logprobs(self, index: int, ids: list[int]) -> dict[str, Any]:
        """A greedy model that is certain: every token has log probability 0."""
        strings = tokens.token_strings(ids)
        offsets, offset = [], self._offsets.get(index, 0)
        for string in strings:
            offsets.append(offset)
            offset += len(string)
        self._offsets[index] = offset
        return {
            "text_offset": offsets,
            "token_logprobs": [0.0] * len(ids),
            "tokens": strings,
            "top_logprobs": [{string: 0.0} for string in strings],
        }


def handler(worker: Worker) -> Any:
    """The endpoint of one worker."""

    async def completions(request: web.Request) -> web.StreamResponse:
        return await worker.serving.handle(
            request,
            prompts.completion_fields,
            lambda body: prompts.prepare_completion(body, worker.model),
            lambda prepared, request_id: CompletionShape(worker, prepared, request_id),
            prefix="cmpl-",
        )

    return completions
