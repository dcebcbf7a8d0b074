"""An inference request: the JSON body, parsed once, and the bodies of both legs made from it.

Only the top level is taken apart. The bytes of every value (``messages``, ``prompt``, ``tools`` …) stay what the client sent,
because key order and spelling inside them decide the token ids, and both legs must see the same tokens. No I/O here.

Facts about vLLM are those of 0.32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from extproc.errors import ApiError
from extproc.paths import Treatment

Fields = dict[str, msgspec.Raw]

_decoder = msgspec.json.Decoder(Fields)
_encode = msgspec.json.Encoder().encode

TRANSFER_KEYS = ("kv_transfer_params", "ec_transfer_params")
"""What a client must never send to an engine: one such body ends a decode engine (KeyError in the NIXL scheduler)."""

_NESTED_TRANSFER_PATHS = (("vllm_xargs",), ("sampling_params", "extra_args"))
"""Objects that the engine merges into the place where it looks for the transfer keys (extra_args of its sampling params)."""

_NULL = b"null"


class InferenceRequest(msgspec.Struct, frozen=True):
    """A client's request, without what a client may not send."""

    treatment: Treatment
    fields: Fields
    """Top-level key -> the JSON bytes of its value, in the client's order. A key that came twice has its last value."""
    removed: tuple[str, ...]
    """Keys that were taken out, as dotted paths."""

    def clean_body(self) -> bytes | None:
        """The body for a worker that does it all; None if the client's bytes can go on as they are."""
        return _encode(self.fields) if self.removed else None

    def decode_body(self, kv_transfer_params: bytes) -> bytes:
        """What the client sent, and the handoff."""
        return _encode({**self.fields, "kv_transfer_params": msgspec.Raw(kv_transfer_params)})

    def prefill_body(self, kv_transfer_params: bytes) -> bytes:
        """The same prompt, asked for one token and its KV blocks."""
        fields = {key: value for key, value in self.fields.items() if key not in PREFILL_DROPS}
        if self.treatment is Treatment.CHAT:
            # vLLM takes max_completion_tokens before max_tokens; a second spelling left in would win or contradict.
            cap = "max_completion_tokens" if _given(fields, "max_completion_tokens") else "max_tokens"
            fields.pop("max_completion_tokens", None)
            fields.pop("max_tokens", None)
        else:
            cap = "max_tokens"
        for key, value in {cap: b"1", **PREFILL_SETS}.items():
            fields[key] = msgspec.Raw(value)
        fields["kv_transfer_params"] = msgspec.Raw(kv_transfer_params)
        return _encode(fields)

    def whole_reason(self) -> str | None:
        """Why this request cannot be handed over, or None if it can."""
        for key, applies, reason in WHOLE_RULES:
            value = self.fields.get(key)
            if value is not None and applies(memoryview(value)):
                return reason
        return None


# Each with the failure that it prevents.
PREFILL_DROPS = frozenset(
    (
        "stream_options",  # refused where stream is false
        "stream_interval",
        "min_tokens",  # refused where it is above max_tokens, which is 1
        "stop",  # a stop string as first token ends the prefill early
        "stop_token_ids",
        "logprobs",  # the first token is thrown away, and so would these be
        "top_logprobs",  # refused without logprobs
        "logprob_token_ids",
        "structured_outputs",  # the grammar would be compiled for a token nobody reads
        "thinking_token_budget",
    )
)

PREFILL_SETS: Mapping[str, bytes] = {
    "stream": b"false",  # a streamed answer carries no kv_transfer_params and leaves its blocks pinned
    "n": b"1",
    "ignore_eos": b"true",  # an EOS as first token must still yield a handoff
}


def _one(value: memoryview) -> bool:
    return bytes(value) in (b"1", _NULL)


def _present(value: memoryview) -> bool:
    return bytes(value) != _NULL


def _on(value: memoryview) -> bool:
    return bytes(value) not in (_NULL, b"false")


def _list_of_prompts(value: memoryview) -> bool:
    """A text or one list of token ids is one prompt; everything else is several, or the engine's to refuse."""
    first = bytes(value[:1])
    if first != b"[":
        return first != b'"'
    try:
        msgspec.json.decode(value, type=list[int])
    except msgspec.DecodeError:
        return True
    return False


# The engine converts types freely ("2" counts as 2), so what is not plainly harmless goes whole.
WHOLE_RULES: tuple[tuple[str, Callable[[memoryview], bool], str], ...] = (
    ("n", lambda value: not _one(value), "n"),  # the first completion frees the blocks under its siblings
    ("best_of", lambda value: not _one(value), "best_of"),
    ("prompt", _list_of_prompts, "prompt_list"),  # one handoff would be used for every prompt
    ("use_beam_search", _on, "beam_search"),  # its requests carry no params
    ("prompt_logprobs", _present, "prompt_logprobs"),  # they need the prefill's logits
    ("echo", _on, "echo"),
    ("prompt_embeds", _present, "prompt_embeds"),
    ("max_completion_tokens", lambda value: bytes(value) == b"1", "one_token"),  # nothing is left to decode
    ("max_tokens", lambda value: bytes(value) == b"1", "one_token"),
)


def _given(fields: Fields, key: str) -> bool:
    value = fields.get(key)
    return value is not None and bytes(value) != _NULL


def parse(body: bytes, treatment: Treatment) -> InferenceRequest:
    """JSON object -> InferenceRequest, transfer keys taken out. Raises ApiError (400) for what is not a JSON object."""
    if not body:
        raise ApiError("empty_body", "the request needs a JSON body")
    try:
        body.decode()  # the JSON decoder looks at the structure only
        fields = _decoder.decode(body)
        removed = _remove_transfer_keys(fields)
    except UnicodeDecodeError as error:
        raise ApiError("invalid_json", f"the body is not UTF-8: byte {error.start}: {error.reason}") from None
    except msgspec.ValidationError:
        raise ApiError("not_an_object", "the body must be a JSON object") from None
    except msgspec.DecodeError as error:
        raise ApiError("invalid_json", f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise ApiError("invalid_json", "the body is nested too deeply") from None
    return InferenceRequest(treatment, fields, tuple(removed))


def _remove_transfer_keys(fields: Fields) -> list[str]:
    removed = [key for key in TRANSFER_KEYS if fields.pop(key, None) is not None]
    for path in _NESTED_TRANSFER_PATHS:
        removed += [".".join((*path, key)) for key in _remove_nested(fields, path)]
    return removed


def _remove_nested(fields: Fields, path: tuple[str, ...]) -> list[str]:
    """Take the transfer keys out of the object at ``path`` below ``fields``, in place; the names of those found."""
    value = fields.get(path[0])
    if value is None or bytes(value)[:1] != b"{":
        return []
    inner = _decoder.decode(value)
    if len(path) > 1:
        removed = _remove_nested(inner, path[1:])
    else:
        removed = [key for key in TRANSFER_KEYS if inner.pop(key, None) is not None]
    if removed:
        fields[path[0]] = msgspec.Raw(_encode(inner))
    return removed
