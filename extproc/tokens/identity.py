"""What makes two requests the same prompt: every field but those that surely have no part in it. Pure.

Facts about vLLM are those of 0.32.
"""

from __future__ import annotations

import xxhash

from extproc.inference import InferenceRequest

NO_PART: frozenset[str] = frozenset(
    (
        # how it is sampled
        *("temperature", "top_p", "top_k", "min_p", "seed", "n", "best_of", "frequency_penalty", "presence_penalty"),
        *("repetition_penalty", "length_penalty", "logit_bias", "logprobs", "top_logprobs", "prompt_logprobs"),
        *("logprob_token_ids", "allowed_token_ids", "bad_words", "watermarking", "repetition_detection", "use_beam_search"),
        # where it ends
        *("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "stop", "stop_token_ids"),
        *("stop_sequences", "ignore_eos", "include_stop_str_in_output", "thinking_token_budget"),
        # how it is answered
        *("stream", "stream_options", "stream_interval", "return_token_ids", "return_tokens_as_token_ids"),
        *("skip_special_tokens", "spaces_between_special_tokens", "return_prompt_text", "return_token_offsets"),
        *("include_reasoning", "include", "store", "background", "service_tier", "echo"),
        # who asks
        *("user", "metadata", "priority", "request_id", "session_id", "safety_identifier", "prompt_cache_key"),
    )
)
"""Fields that no engine looks at when it makes a prompt. What is not known counts as a part of it."""


def prompt_key(request: InferenceRequest, model: str) -> bytes:
    """16 bytes, equal for requests whose prompts have the same token ids and the same salt. ``model`` is the engine's name."""
    digest = xxhash.xxh3_128()
    for name, value in (("", request.treatment.value.encode()), ("", model.encode(errors="surrogatepass"))):
        _add(digest, name, value)
    for name, raw in sorted(request.fields.items()):
        if name not in NO_PART and name != "model":
            _add(digest, name, memoryview(raw))
    return digest.digest()


def _add(digest: xxhash.xxh3_128, name: str, value: bytes | memoryview) -> None:
    key = name.encode(errors="surrogatepass")
    digest.update(len(key).to_bytes(4, "little") + len(value).to_bytes(8, "little") + key)
    digest.update(value)
