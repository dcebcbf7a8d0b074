"""An inference request: the JSON body, parsed once, and the bodies of both legs made from it.

Only the top level is taken apart. The bytes of every value (``messages``, ``prompt``, ``tools`` …) stay what the client sent,
because key order and spelling inside them decide the token ids, and both legs must see the same tokens. No I/O here.

Facts about vLLM are those of 0.32.
"""

from __future__ import annotations

import json
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


class Leg(msgspec.Struct, frozen=True):
    """How an API asks for a prefill: one token, at once, without an early end."""

    caps: tuple[str, ...]
    """Names of the token cap. Where there are several, the engine takes the first that is given."""
    sets: Mapping[str, bytes]
    drops: frozenset[str]


# Each with the failure that it prevents.
_STREAM = {"stream": b"false"}  # a streamed answer carries no kv_transfer_params and leaves its blocks pinned
_ONE_CHOICE = {"n": b"1"}  # the reply names the blocks of one choice; those of the others would leak
_NO_EOS = {"ignore_eos": b"true"}  # an EOS as first token must still yield a handoff
_NOT_STORED = {"store": b"false"}  # a stored response would pin a text that nobody asked for
_NO_STOPS = ("stop", "stop_token_ids")  # a stop as first token ends the prefill early
_REFUSED = (
    "stream_options",  # refused where stream is false
    "stream_interval",
    "min_tokens",  # refused where it is above max_tokens, which is 1
)
_WASTED = (
    "logprobs",  # the first token is thrown away, and so would these be
    "top_logprobs",  # refused without logprobs
    "logprob_token_ids",
    "structured_outputs",  # the grammar would be compiled for a token nobody reads
    "thinking_token_budget",
)

LEGS: Mapping[Treatment, Leg] = {
    Treatment.CHAT: Leg(
        caps=("max_completion_tokens", "max_tokens"),
        sets={**_STREAM, **_ONE_CHOICE, **_NO_EOS},
        drops=frozenset((*_NO_STOPS, *_REFUSED, *_WASTED)),
    ),
    Treatment.COMPLETIONS: Leg(
        caps=("max_tokens",),
        sets={**_STREAM, **_ONE_CHOICE, **_NO_EOS},
        drops=frozenset((*_NO_STOPS, *_REFUSED, *_WASTED)),
    ),
    Treatment.RESPONSES: Leg(
        caps=("max_output_tokens",),
        sets={**_STREAM, **_NO_EOS, **_NOT_STORED},
        # The engine's ids are ours: `request_id` would name its request.
        drops=frozenset((*_NO_STOPS, *_REFUSED, *_WASTED, "include", "background", "request_id")),
    ),
    Treatment.MESSAGES: Leg(
        # This API has no ignore_eos. An EOS as first token ends the prefill, but vLLM hands over all the same.
        caps=("max_tokens",),
        sets=_STREAM,
        drops=frozenset(("stop_sequences",)),
    ),
}

_SETS = {api: {key: msgspec.Raw(value) for key, value in leg.sets.items()} for api, leg in LEGS.items()}
_ONE = msgspec.Raw(b"1")

_TOKEN_IDS_BACK = (Treatment.CHAT, Treatment.COMPLETIONS)
"""APIs whose prefill returns the prompt's token ids, and whose decode takes them."""


class _StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


_USAGE_WANTED = _StreamOptions(include_usage=True)

# Made once: to make one takes longer than what it then decodes.
_stream_options_decoder = msgspec.json.Decoder(_StreamOptions | None)
_text_decoder = msgspec.json.Decoder(str)
_number_decoder = msgspec.json.Decoder(int)
_numbers_decoder = msgspec.json.Decoder(list[int])


class InferenceRequest(msgspec.Struct, frozen=True):
    """A client's request, without what a client may not send."""

    treatment: Treatment
    fields: Fields
    """Top-level key -> the JSON bytes of its value, in the client's order."""
    removed: tuple[str, ...]
    """Keys that were taken out, as dotted paths."""
    body: bytes
    """What the client sent."""
    renamed: bool = False
    """The model is not the one that the client named."""

    def clean_body(self) -> bytes | None:
        """The body for a worker that does it all; None if the client's bytes can go on as they are."""
        return _encode(self.fields) if self.removed or self.renamed else None

    def decode_body(
        self, kv_transfer_params: bytes | None, prompt_token_ids: bytes | None = None, *, return_token_ids: bool = False
    ) -> bytes | None:
        """What the client sent, and the handoff; None if the client's bytes can go on as they are.

        ``prompt_token_ids`` (a JSON list, from :func:`token_ids_of`) saves the decode worker the tokenising.
        ``return_token_ids``: ask for token ids, where the API has them.
        """
        if kv_transfer_params is None:
            return self.clean_body()
        fields = dict(self.fields)
        if return_token_ids and self.treatment in _TOKEN_IDS_BACK:
            fields["return_token_ids"] = msgspec.Raw(b"true")
        if prompt_token_ids is not None:
            if self.treatment is Treatment.COMPLETIONS:
                fields["prompt"] = msgspec.Raw(prompt_token_ids)
            else:
                inner = kv_transfer_params.rstrip()
                kv_transfer_params = inner[:-1] + b',"prompt_token_ids":' + prompt_token_ids + b"}"
        fields["kv_transfer_params"] = msgspec.Raw(kv_transfer_params)
        return _encode(fields)

    def prefill_body(
        self, kv_transfer_params: bytes, *, return_token_ids: bool = False, prompt_token_ids: bytes | None = None
    ) -> bytes:
        """The same prompt, asked for one token and its KV blocks. ``prompt_token_ids``: a JSON list in place of the prompt of
        the completions API; the chat API takes it with ``kv_transfer_params``."""
        leg = LEGS[self.treatment]
        fields = {key: value for key, value in self.fields.items() if key not in leg.drops}
        cap = next((name for name in leg.caps if self._given(name)), leg.caps[-1])
        for name in leg.caps:
            fields.pop(name, None)  # a second spelling left in would win or contradict
        fields[cap] = _ONE
        fields.update(_SETS[self.treatment])
        if return_token_ids and self.treatment in _TOKEN_IDS_BACK:
            fields["return_token_ids"] = msgspec.Raw(b"true")
        if prompt_token_ids is not None and self.treatment is Treatment.COMPLETIONS:
            fields["prompt"] = msgspec.Raw(prompt_token_ids)
        fields["kv_transfer_params"] = msgspec.Raw(kv_transfer_params)
        return _encode(fields)

    @property
    def tells_token_ids(self) -> bool:
        """Whether its API can be asked for token ids."""
        return self.treatment in _TOKEN_IDS_BACK

    @property
    def takes_rank(self) -> bool:
        """Whether its API can be sent to one of several data-parallel engines (`X-data-parallel-rank`)."""
        return self.treatment is not Treatment.RESPONSES

    def asks_token_ids(self) -> bool:
        """Whether the client wants token ids; what is neither yes nor no in JSON may be one of them to the engine."""
        return bytes(self.fields.get("return_token_ids", b"false")) not in (b"false", _NULL)

    def whole_reason(self) -> str | None:
        """Why this request cannot be handed over, or None if it can."""
        fields = self.fields
        for key, rule in _RULES[self.treatment]:
            if key in fields and rule.applies(memoryview(fields[key])):
                return rule.reason
        return None

    def model(self) -> str:
        """The model's name. Raises ApiError (400) if there is none."""
        value = self.fields.get("model")
        try:
            name = _text_decoder.decode(value) if value is not None else ""
        except msgspec.DecodeError:
            raise ApiError("model_missing", "model must be a string", param="model") from None
        if not name:
            raise ApiError("model_missing", "the body names no model", param="model")
        return name

    def names_model(self) -> str | None:
        """The same; None if there is none, or something that is no name."""
        try:
            return self.model()
        except ApiError:
            return None

    def with_model(self, name: str) -> InferenceRequest:
        """The same request for the model ``name``, on every leg. Raises ApiError (400) if it names no model."""
        if name == self.model():
            return self
        # The key stays where it stands.
        fields = {**self.fields, "model": msgspec.Raw(_encode(name))}
        return InferenceRequest(self.treatment, fields, self.removed, self.body, renamed=True)

    def with_priority(self, priority: int) -> InferenceRequest:
        """The same request with this priority in the engine's scheduler, where its API has one."""
        if self.treatment is Treatment.MESSAGES:
            return self
        fields = {**self.fields, "priority": msgspec.Raw(_encode(priority))}
        return InferenceRequest(self.treatment, fields, self.removed, self.body, renamed=True)

    def answer_tokens(self) -> int | None:
        """The request's own cap on the answer; None if it gives none that can be read."""
        for name in LEGS[self.treatment].caps:
            if self._given(name):
                try:
                    return max(1, _number_decoder.decode(self.fields[name]))
                except msgspec.DecodeError:
                    return None
        return None

    def streamed(self) -> bool:
        """Whether the client wants the answer token by token."""
        return bytes(self.fields.get("stream", b"")) == b"true"

    def at_once(self) -> bool:
        """Whether the answer surely comes in one piece: an engine takes more for true than JSON does."""
        return bytes(self.fields.get("stream", b"false")) in (b"false", _NULL)

    def states_usage(self) -> bool:
        """Whether the answer is a stream that says at its end how many tokens it has, as far as the request decides it."""
        if not self.streamed():
            return False
        if self.treatment not in _TOKEN_IDS_BACK:
            return True  # the other APIs always say it
        try:
            return _stream_options_decoder.decode(self.fields.get("stream_options", _NULL)) == _USAGE_WANTED
        except msgspec.MsgspecError:
            return False

    def _given(self, key: str) -> bool:
        value = self.fields.get(key)
        return value is not None and bytes(value) != _NULL


class WholeRule(msgspec.Struct, frozen=True):
    """When a key's value makes a request one that a single worker must serve."""

    reason: str
    applies: Callable[[memoryview], bool]
    apis: tuple[Treatment, ...]


def _not_one(value: memoryview) -> bool:
    return bytes(value) not in (b"1", _NULL)


def _one(value: memoryview) -> bool:
    return bytes(value) == b"1"


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
        _numbers_decoder.decode(value)
    except msgspec.DecodeError:
        return True
    return False


class _Tool(msgspec.Struct, frozen=True):
    type: str = ""


_tools_decoder = msgspec.json.Decoder(list[_Tool] | None)


def _server_tools(value: memoryview) -> bool:
    """Anything but functions that the client runs: the engine would then loop, each turn with the same handoff."""
    try:
        return any(tool.type != "function" for tool in _tools_decoder.decode(value) or ())
    except msgspec.DecodeError:
        return True


_OPENAI = (Treatment.CHAT, Treatment.COMPLETIONS)
_TEXT = (Treatment.COMPLETIONS,)
_RESPONSES = (Treatment.RESPONSES,)
_CAPPED = (Treatment.CHAT, Treatment.COMPLETIONS, Treatment.MESSAGES)

# The engine converts types freely ("2" counts as 2), so what is not plainly harmless goes whole.
WHOLE_RULES: tuple[tuple[str, WholeRule], ...] = (
    ("n", WholeRule("n", _not_one, _OPENAI)),  # the first completion frees the blocks under its siblings
    ("best_of", WholeRule("best_of", _not_one, _OPENAI)),
    ("prompt", WholeRule("prompt_list", _list_of_prompts, _TEXT)),  # one handoff would be used for every prompt
    ("use_beam_search", WholeRule("beam_search", _on, _OPENAI)),  # its requests carry no params
    ("prompt_logprobs", WholeRule("prompt_logprobs", _present, _OPENAI)),  # they need the prefill's logits
    ("echo", WholeRule("echo", _on, _OPENAI)),
    ("prompt_embeds", WholeRule("prompt_embeds", _present, _OPENAI)),
    ("previous_response_id", WholeRule("previous_response", _present, _RESPONSES)),  # kept by one worker only
    ("background", WholeRule("background", _on, _RESPONSES)),
    ("tools", WholeRule("server_tools", _server_tools, _RESPONSES)),
    ("max_completion_tokens", WholeRule("one_token", _one, (Treatment.CHAT,))),  # nothing is left to decode
    ("max_tokens", WholeRule("one_token", _one, _CAPPED)),
    ("max_output_tokens", WholeRule("one_token", _one, _RESPONSES)),
)

_RULES = {api: tuple((key, rule) for key, rule in WHOLE_RULES if api in rule.apis) for api in Treatment}


def parse(body: bytes, treatment: Treatment) -> InferenceRequest:
    """JSON object -> InferenceRequest, transfer keys taken out. Raises ApiError (400) for what is not a JSON object."""
    if not body:
        raise ApiError("empty_body", "the request needs a JSON body")
    try:
        if not body.isascii():
            body.decode()  # the JSON decoder looks at the structure only
        fields = _decoder.decode(body)
        _refuse_duplicates(body, fields)
        removed = _remove_transfer_keys(fields)
    except UnicodeDecodeError as error:
        raise ApiError("invalid_json", f"the body is not UTF-8: byte {error.start}: {error.reason}") from None
    except msgspec.ValidationError:
        raise ApiError("not_an_object", "the body must be a JSON object") from None
    except (msgspec.DecodeError, json.JSONDecodeError) as error:
        raise ApiError("invalid_json", f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise ApiError("invalid_json", "the body is nested too deeply") from None
    return InferenceRequest(treatment, fields, tuple(removed), body)


_DUPLICATES_CHECKED_BYTES = 256 << 10
"""A larger body of an unusual style is not parsed twice; of a key that stands twice in it, the last counts on both legs."""

_pairs_decoder = json.JSONDecoder(object_pairs_hook=list)


def _refuse_duplicates(body: bytes, fields: Fields) -> None:
    """A key that stands twice means different things to different parsers. Raises ApiError.

    The decoder keeps the last one in silence, and looking for a second one costs a second parse. So first the lengths are
    added up: where keys, values and the punctuation of one of the two usual styles account for every byte, there is none.
    """
    rest = len(body) - _spelt_bytes(fields) - sum([len(memoryview(value)) for value in fields.values()])
    compact, spaced = 2 * len(fields) + 1, 4 * len(fields)  # {"a":1,"b":2} and {"a": 1, "b": 2}
    if rest == compact or (rest == spaced and body.startswith(b"{" + _encode(next(iter(fields))) + b": ")):
        return
    if len(body) > _DUPLICATES_CHECKED_BYTES:
        return
    keys = [key for key, _ in _pairs_decoder.decode(body.decode())]
    twice = next((key for key in keys if keys.count(key) > 1), None) if len(keys) > len(fields) else None
    if twice is not None:
        raise ApiError("duplicate_key", f"{twice!r} stands twice in the body", param=twice)


def _spelt_bytes(fields: Fields) -> int:
    """Of all keys, with their quotes, in the shortest spelling."""
    keys = "".join(fields)
    if keys.isascii() and keys.isprintable() and '"' not in keys and "\\" not in keys:
        return len(keys) + 2 * len(fields)
    return sum(len(_encode(key)) for key in fields)


def _remove_transfer_keys(fields: Fields) -> list[str]:
    removed = [key for key in TRANSFER_KEYS if fields.pop(key, None) is not None]
    for path in _NESTED_TRANSFER_PATHS:
        removed += [".".join((*path, key)) for key in _remove_nested(fields, path)]
    return removed


def _remove_nested(fields: Fields, path: tuple[str, ...]) -> list[str]:
    """Take the transfer keys out of the object at ``path`` below ``fields``, in place; the names of those found."""
    value = fields.get(path[0])
    if value is None or bytes(memoryview(value)[:1]) != b"{":
        return []
    inner = _decoder.decode(value)
    if len(path) > 1:
        removed = _remove_nested(inner, path[1:])
    else:
        removed = [key for key in TRANSFER_KEYS if inner.pop(key, None) is not None]
    if removed:
        fields[path[0]] = msgspec.Raw(_encode(inner))
    return removed


class _Choice(msgspec.Struct, frozen=True):
    prompt_token_ids: msgspec.Raw = msgspec.Raw(_NULL)


class _Reply(msgspec.Struct, frozen=True):
    prompt_token_ids: msgspec.Raw = msgspec.Raw(_NULL)
    choices: list[_Choice] = []


_reply_decoder = msgspec.json.Decoder(_Reply)


def token_ids_of(reply: bytes, treatment: Treatment) -> bytes | None:
    """The prompt's token ids in a prefill's reply, as a JSON list; None if the engine sent none."""
    if treatment not in _TOKEN_IDS_BACK:
        return None
    try:
        decoded = _reply_decoder.decode(reply)
    except msgspec.DecodeError:
        return None
    # Chat has them at the top, completions in the choice.
    found = decoded.prompt_token_ids
    if treatment is Treatment.COMPLETIONS:
        found = decoded.choices[0].prompt_token_ids if decoded.choices else msgspec.Raw(_NULL)
    value = bytes(found)
    return value if value.startswith(b"[") and value != b"[]" else None
