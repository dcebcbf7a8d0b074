"""``/inference/v1/generate``, token ids in and out: how its answers look. 403 unless the worker was told to serve it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from aiohttp import web

from workers.sim import prompts
from workers.sim.errors import ApiError
from workers.sim.prompts import Prepared
from workers.sim.serving import DONE, Result, event, usage
from workers.sim.text import Step

if TYPE_CHECKING:
    from workers.sim.worker import Worker

DISABLED = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
PATHS = (
    "/inference/v1/generate",
    "/inference/v1/abort_requests",
    "/v1/completions/render",
    "/v1/chat/completions/render",
    "/v1/messages/render",
    "/v1/responses/render",
    "/v1/completions/derender",
    "/v1/chat/completions/derender",
)
"""Endpoints of the same switch; the simulated engine serves the first only."""


class GenerateShape:
    """See serving.Shape."""

    def __init__(self, worker: Worker, prepared: Prepared, request_id: str) -> None:
        self._worker = worker
        self._prepared = prepared
        self._id = request_id
        self._mode = prepared.fields.get("output_mode", "tokens")
        self._told = False

    def opening(self) -> bytes:
        """Nothing before the first token."""
        return b""

    def begin(self, _: list[Result]) -> bytes:
        """Nothing before the first token."""
        return b""

    def _choice(
        self, index: int, ids: list[int], text: str, reason: str | None, stop_reason: str | int | None
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "finish_reason": reason,
            "stop_reason": stop_reason,
            "token_ids": ids,
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": None,
        }
        if self._mode == "text":
            choice["text"] = text
        choice["logprobs"] = self._logprobs(ids)
        return choice

    def _logprobs(self, ids: list[int]) -> dict[str, Any] | None:
        if self._prepared.logprobs is None:
            return None
        entries = [{"token_id": token_id, "logprob": 0.0, "rank": 1} for token_id in ids]
        return {"content": [{**entry, "top_logprobs": [entry]} for entry in entries]}

    def delta(self, result: Result, steps: list[Step]) -> bytes:
        """One event a token."""
        data = b""
        sent = len(result.token_ids) - len(steps)
        for number, step in enumerate(steps, start=sent + 1):
            choice = self._choice(result.index, [step.token_id], step.text, step.finish_reason, step.stop_reason)
            chunk: dict[str, Any] = {"request_id": self._id, "usage": None}
            if self._prepared.fields.get("return_token_ids") and not self._told:
                self._told = True
                chunk["prompt_token_ids"] = result.prompt
            if self._prepared.continuous_usage:
                count = len(result.prompt)
                chunk["usage"] = {"prompt_tokens": count, "total_tokens": count + number, "completion_tokens": number}
            data += event({**chunk, "output_mode": self._mode, "choices": [choice]})
        return data

    def end(self, results: list[Result]) -> bytes:
        """Usage if asked for, and the end."""
        if not self._prepared.include_usage:
            return DONE
        counts = usage(self._worker, results, streamed=True)
        return event({"request_id": self._id, "usage": counts, "output_mode": self._mode, "choices": []}) + DONE

    def failure(self, error: ApiError) -> bytes:
        """The error as an event, and the end."""
        return event(error.body()) + DONE

    def whole(self, results: list[Result]) -> dict[str, Any]:
        """The answer without a stream."""
        return {
            "request_id": self._id,
            "model": self._prepared.model,
            "created": int(time.time()),
            "usage": usage(self._worker, results),
            "prompt_logprobs": None,
            "prompt_token_id_logprobs": None,
            "prompt_token_ids": results[0].prompt if self._prepared.fields.get("return_token_ids") else None,
            "mm_placeholders": None,
            "metrics": None,
            "kv_transfer_params": results[0].sequence.kv_result,
            "ec_transfer_params": None,
            "output_mode": self._mode,
            "choices": [self._choice(r.index, r.token_ids, r.text, r.finish_reason, r.stop_reason) for r in results],
        }


def add_routes(app: web.Application, worker: Worker) -> None:
    """The endpoint of one worker, or the refusals."""

    async def generate(request: web.Request) -> web.StreamResponse:
        return await worker.serving.handle(
            request,
            prompts.generate_fields,
            lambda body: prompts.prepare_generate(body, worker.model),
            lambda prepared, request_id: GenerateShape(worker, prepared, request_id),
            prefix="generate-tokens-",
            releases=False,
        )

    async def disabled(_: web.Request) -> web.Response:
        return web.json_response(ApiError(DISABLED, status=403, kind="PermissionDeniedError").body(), status=403)

    if worker.options.enable_scale_out:
        app.router.add_post(PATHS[0], generate)
    else:
        for path in PATHS:
            app.router.add_post(path, disabled)
