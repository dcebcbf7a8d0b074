"""The sampling parameters of a request, checked as vLLM checks them, and when its answer ends. No I/O here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from workers.sim.errors import ApiError, invalid
from workers.sim.text import Stop


def check_salt(fields: Mapping[str, Any]) -> None:
    """``cache_salt``."""
    salt = fields.get("cache_salt")
    if salt is None:
        return
    if not isinstance(salt, str) or not salt:
        raise invalid("Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt")
    if len(salt) > 128 or any(char in salt for char in "@/\\\0"):
        raise invalid(
            "Parameter 'cache_salt' must be at most 128 characters and must not contain '@', '/', '\\\\', or NUL.", "cache_salt"
        )


def check_stream_options(fields: Mapping[str, Any]) -> None:
    """``stream_options`` need ``stream``."""
    if fields.get("stream_options") and not fields.get("stream"):
        raise invalid("Stream options can only be defined when `stream=True`.", "stream_options")


def check_response_format(fields: Mapping[str, Any]) -> None:
    """``response_format``."""
    wanted = fields.get("response_format")
    if isinstance(wanted, dict) and wanted.get("type") == "json_schema" and wanted.get("json_schema") is None:
        raise invalid(
            "When response_format type is 'json_schema', the 'json_schema' field must be provided.", "response_format"
        )


def check_logprobs(fields: Mapping[str, Any], counts: tuple[str, ...]) -> None:
    """Types and ranges of the logprob counts, and prompt_logprobs with a stream."""
    for key in counts:
        value = fields.get(key)
        if value is not None and not isinstance(value, int | float):
            raise invalid(f"`{key}` must be an integer.", key, value)
    prompt_logprobs = fields.get("prompt_logprobs")
    if prompt_logprobs is not None:
        if fields.get("stream") and (prompt_logprobs > 0 or prompt_logprobs == -1):
            raise invalid("`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs")
        if prompt_logprobs < 0 and prompt_logprobs != -1:
            raise invalid("`prompt_logprobs` must be a positive value or -1.", "prompt_logprobs", prompt_logprobs)
    for key in counts:
        value = fields.get(key)
        if key != "prompt_logprobs" and value is not None and value < 0 and value != -1:
            raise invalid(f"`{key}` must be a positive value or -1.", key, value)


def check_length(prompt_tokens: int, max_model_len: int) -> None:
    """A prompt must fit the context."""
    if prompt_tokens > max_model_len:
        raise invalid(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains {prompt_tokens} "
            "input tokens, which exceeds this limit even without any output tokens. Please reduce the length of the input "
            "prompt.",
            "input_tokens",
            prompt_tokens,
        )


def truncated(prompt: list[int], fields: Mapping[str, Any], max_model_len: int) -> list[int]:
    """``truncate_prompt_tokens``: from the left unless the request says otherwise."""
    limit = fields.get("truncate_prompt_tokens")
    if limit is None:
        return prompt
    limit = max_model_len - 1 if limit < 0 else limit
    if limit >= len(prompt):
        return prompt
    if not limit:
        return []
    return prompt[:limit] if fields.get("truncation_side") == "right" else prompt[-limit:]


def answer_rules(fields: Mapping[str, Any], *, max_tokens: int | None, room: int) -> Stop:
    """When the answer ends. ``room`` is what the context leaves. Raises ApiError."""
    _check_ranges(fields)
    limit = room if max_tokens is None else min(max_tokens, room)
    if limit < 1:
        raise invalid(f"max_tokens must be at least 1, got {limit}.", "max_tokens", limit)
    min_tokens = fields.get("min_tokens") or 0
    if min_tokens < 0:
        raise invalid(f"min_tokens must be greater than or equal to 0, got {min_tokens}.")
    if min_tokens > limit:
        raise invalid(f"min_tokens must be less than or equal to max_tokens={limit}, got {min_tokens}.")
    stop = [text for text in fields.get("stop") or () if text]
    return Stop(
        max_tokens=limit,
        min_tokens=min_tokens,
        ignore_eos=bool(fields.get("ignore_eos")),
        strings=tuple(stop),
        token_ids=frozenset(fields.get("stop_token_ids") or ()),
        keep_string=bool(fields.get("include_stop_str_in_output")),
    )


def check_n(fields: Mapping[str, Any]) -> int:
    """``n``."""
    n = 1 if fields.get("n") is None else int(fields["n"])
    if n < 1:
        raise invalid(f"n must be at least 1, got {n}.")
    if n > 16384:
        raise ApiError(
            f"n must be at most 16384, got {n}. To increase this limit, set the VLLM_MAX_N_SEQUENCES environment variable."
        )
    return n


def _check_ranges(fields: Mapping[str, Any]) -> None:
    for key in ("presence_penalty", "frequency_penalty"):
        value = fields.get(key)
        if value is not None and not -2.0 <= value <= 2.0:
            raise invalid(f"{key} must be in [-2, 2], got {value}.")
    penalty = fields.get("repetition_penalty")
    if penalty is not None and not math.isfinite(penalty):
        raise invalid(f"repetition_penalty must be a finite number, got {penalty}.")
    if penalty is not None and penalty <= 0:
        raise invalid(f"repetition_penalty must be greater than zero, got {penalty}.")
    temperature = fields.get("temperature")
    if temperature is not None:
        if not math.isfinite(temperature):
            raise invalid(f"temperature must be a finite number, got {temperature}.", "temperature", temperature)
        if temperature < 0:
            raise invalid(f"temperature must be non-negative, got {temperature}.", "temperature", temperature)
        if temperature > 2:
            raise invalid(f"temperature must be in [0, 2], got {temperature}.", "temperature", temperature)
    top_p = fields.get("top_p")
    if top_p is not None and not 0 < top_p <= 1:
        raise invalid(f"top_p must be in (0, 1], got {top_p}.", "top_p", top_p)
    top_k = fields.get("top_k")
    if top_k is not None and top_k < -1:
        raise invalid(f"top_k must be 0 (disable), or at least 1, got {top_k}.")
    min_p = fields.get("min_p")
    if min_p is not None and not 0 <= min_p <= 1:
        raise invalid(f"min_p must be in [0, 1], got {min_p}.")
