"""From a checked request to what the engine gets: token ids and rules, endpoint by endpoint. Pure, so that the right answer of
any request can be computed without an engine (:func:`expected_answer`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from workers.sim import fields as checks
from workers.sim import sampling, template, text, tokens
from workers.sim.errors import ApiError, invalid, unknown_model
from workers.sim.text import MEAN_ANSWER_TOKENS, Stop

COMPLETION_MAX_TOKENS = 16
"""max_tokens of a completion that does not say."""


@dataclass(frozen=True)
class Model:
    """What is served."""

    names: tuple[str, ...] = ("sim-llama-70b",)
    adapters: Mapping[str, str] = field(default_factory=dict)
    """LoRA adapters: name -> path."""
    max_model_len: int = 32_768
    mean_answer_tokens: int = MEAN_ANSWER_TOKENS


@dataclass(frozen=True)
class Prepared:
    """A request, ready for the engine."""

    fields: dict[str, Any]
    model: str
    adapter: str
    prompts: list[list[int]]
    rules: list[Stop]
    """One a prompt."""
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    echo: bool = False
    echo_only: bool = False
    """Nothing is generated: max_tokens 0 with echo."""
    logprobs: int | None = None
    return_token_ids: bool = False
    kv_params: dict[str, Any] | None = None

    @property
    def sequences(self) -> int:
        """How many answers."""
        return len(self.prompts) * self.n


def model_of(wanted: object, model: Model) -> tuple[str, str]:
    """The served name and the adapter ("" for none). Raises ApiError (404)."""
    if not wanted:
        return model.names[0], ""
    if wanted in model.adapters:
        return str(wanted), str(wanted)
    if wanted in model.names:
        return model.names[0], ""
    raise unknown_model(wanted, model.names)


def _stream_flags(body: Mapping[str, Any]) -> dict[str, bool]:
    options = body.get("stream_options") or {}
    usage = bool(options.get("include_usage"))
    return {
        "stream": bool(body.get("stream")),
        "include_usage": usage,
        "continuous_usage": usage and bool(options.get("continuous_usage_stats")),
    }


def _check_ids(ids: list[int], parameter: str | None = None) -> None:
    if ids and max(ids) >= tokens.VOCAB_SIZE:
        raise invalid(f"Token id {max(ids)} is out of vocabulary", parameter)


# -- completions -----------------------------------------------------------------------------------------------------------


def completion_fields(body: Any) -> dict[str, Any]:
    """A body of /v1/completions, checked. Raises ApiError."""
    if isinstance(body, dict):
        sampling.check_salt(body)
        if body.get("max_tokens", 0) is None:
            body = {**body, "max_tokens": COMPLETION_MAX_TOKENS}
        sampling.check_response_format(body)
        sampling.check_logprobs(body, ("prompt_logprobs", "logprobs"))
        sampling.check_stream_options(body)
        if body.get("prompt") in (None, "") and not body.get("prompt_embeds"):
            raise invalid("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    return checks.checked(body, checks.COMPLETION)


def prepare_completion(body: dict[str, Any], model: Model) -> Prepared:
    """Checked fields of /v1/completions to prompts. Raises ApiError."""
    name, adapter = model_of(body.get("model"), model)
    if body.get("use_beam_search") and body.get("stream"):
        raise ApiError("Streaming is not currently supported with beam search")
    if body.get("suffix"):
        raise ApiError("suffix is not currently supported")
    n = sampling.check_n(body)
    prompts = []
    for entry in body.get("prompt") or ():
        ids = entry if isinstance(entry, list) else tokens.encode(entry)
        if isinstance(entry, str) and body.get("add_special_tokens", True):
            ids = [tokens.BOS, *ids]
        ids = sampling.truncated(ids, body, model.max_model_len)
        _check_ids(ids)
        if not ids:
            raise invalid("The decoder prompt cannot be empty")
        sampling.check_length(len(ids), model.max_model_len)
        prompts.append(ids)
    if not prompts:
        raise invalid("The decoder prompt cannot be empty")
    wanted = body.get("max_tokens", COMPLETION_MAX_TOKENS)
    echo = bool(body.get("echo"))
    echo_only = echo and wanted == 0
    rules = [
        sampling.answer_rules(body, max_tokens=1 if echo_only else wanted, room=model.max_model_len - len(ids))
        for ids in prompts
    ]
    return Prepared(
        fields=body,
        model=name,
        adapter=adapter,
        prompts=prompts,
        rules=rules,
        n=n,
        **_stream_flags(body),
        echo=echo,
        echo_only=echo_only,
        logprobs=body.get("logprobs"),
        return_token_ids=bool(body.get("return_token_ids")),
        kv_params=body.get("kv_transfer_params"),
    )


# -- chat ------------------------------------------------------------------------------------------------------------------


def chat_fields(body: Any) -> dict[str, Any]:
    """A body of /v1/chat/completions, checked. Raises ApiError."""
    if isinstance(body, dict):
        body = dict(body)
        if "messages" in body and body["messages"] is None:
            raise ApiError("'NoneType' object is not iterable")
        sampling.check_salt(body)
        sampling.check_response_format(body)
        sampling.check_stream_options(body)
        sampling.check_logprobs(body, ("prompt_logprobs", "top_logprobs"))
        top = body.get("top_logprobs")
        if top is not None and (top == -1 or top > 0) and not body.get("logprobs"):
            raise invalid("when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs")
        _check_tools(body)
        if body.get("continue_final_message") and body.get("add_generation_prompt"):
            raise ApiError("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
    checked = checks.checked(body, checks.CHAT, ("messages",))
    for index, message in enumerate(checked["messages"]):
        if "role" not in message:
            problems = checks.Problems()
            problems.add("missing", f"body.messages.{index}.role", "Field required", message)
            problems.raise_if_any()
    return checked


def _check_tools(body: dict[str, Any]) -> None:
    """``tools`` and ``tool_choice``, which defaults to "auto" where there are tools."""
    tools, choice = body.get("tools"), body.get("tool_choice")
    if tools == []:
        raise invalid(
            "`tools` must not be an empty array. Either provide at least one tool or omit the field entirely.", "tools"
        )
    if "tool_choice" not in body and tools:
        body["tool_choice"] = "auto"
        return
    if choice in (None, "none"):
        return
    if tools is None:
        raise invalid("When using `tool_choice`, `tools` must be set.", "tool_choice")
    if isinstance(choice, dict):
        function = choice.get("function")
        usage = 'Correct usage: `{"type": "function", "function": {"name": "my_function"}}`'
        if not isinstance(function, dict):
            raise invalid(f"Invalid value for `function`: `{function}` in `tool_choice`! {usage}", "tool_choice.function")
        if "name" not in function:
            message = f"Expected field `name` in `function` in `tool_choice`! {usage}"
            raise invalid(message, "tool_choice.function.name")
        names = [t["function"].get("name") for t in tools if isinstance(t, dict) and isinstance(t.get("function"), dict)]
        if function["name"] not in names:
            raise invalid("The tool specified in `tool_choice` does not match any of the specified `tools`", "tool_choice")
    elif choice not in ("auto", "required"):
        raise invalid(
            f'Invalid value for `tool_choice`: {choice}! Only named tools, "none", "auto" or "required" are supported.',
            "tool_choice",
        )


def prepare_chat(body: dict[str, Any], model: Model) -> Prepared:
    """Checked fields of /v1/chat/completions to a prompt. Raises ApiError."""
    name, adapter = model_of(body.get("model"), model)
    n = sampling.check_n(body)
    ids = _forwarded_ids(body)
    if ids is None:
        ids = template.render(body["messages"], body)
        ids = sampling.truncated(ids, body, model.max_model_len)
    if not ids:
        raise invalid("The decoder prompt cannot be empty")
    sampling.check_length(len(ids), model.max_model_len)
    given = body.get("max_completion_tokens")
    wanted = given if given is not None else body.get("max_tokens")
    rules = sampling.answer_rules(body, max_tokens=wanted, room=model.max_model_len - len(ids))
    return Prepared(
        fields=body,
        model=name,
        adapter=adapter,
        prompts=[ids],
        rules=[rules],
        n=n,
        **_stream_flags(body),
        echo=bool(body.get("echo")),
        logprobs=(body.get("top_logprobs") or 0) if body.get("logprobs") else None,
        return_token_ids=bool(body.get("return_token_ids")),
        kv_params=body.get("kv_transfer_params"),
    )


def batch_fields(body: Any) -> dict[str, Any]:
    """A body of /v1/chat/completions/batch, checked: messages is a list of conversations. Raises ApiError."""
    if isinstance(body, dict) and (body.get("n") or 1) != 1:
        raise invalid("Batch chat completions do not support `n > 1`. Please set `n` to 1.", "n", body["n"])
    table = {**checks.CHAT, "messages": checks.listing(checks.listing(checks.mapping, nonempty=True), nonempty=True)}
    return checks.checked(body, table, ("messages",))


def prepare_batch(body: dict[str, Any], model: Model) -> Prepared:
    """Checked fields of /v1/chat/completions/batch to one prompt a conversation. Raises ApiError."""
    single = [prepare_chat({**body, "messages": messages, "stream": False}, model) for messages in body["messages"]]
    prompts, rules = [each.prompts[0] for each in single], [each.rules[0] for each in single]
    return replace(single[0], prompts=prompts, rules=rules)


def _forwarded_ids(body: dict[str, Any]) -> list[int] | None:
    """Token ids that the prefill leg computed, for reuse. The key never reaches the engine."""
    params = body.get("kv_transfer_params")
    if not params:
        return None
    ids = params.pop("prompt_token_ids", None)
    if ids is None or body.get("echo") or template.has_media(body["messages"]):
        return None
    parameter = "kv_transfer_params.prompt_token_ids"
    if not isinstance(ids, list) or not ids or any(type(t) is not int or t < 0 for t in ids):
        message = "`kv_transfer_params['prompt_token_ids']` must be a non-empty list of non-negative integers."
        raise invalid(message, parameter)
    _check_ids(ids, parameter)
    return ids


# -- responses -------------------------------------------------------------------------------------------------------------

_RESPONSES_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("seed", "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output"),
)

RESPONSES: dict[str, checks.Check] = {
    **{key: checks.SAMPLING[key] for key in _RESPONSES_SAMPLING},
    "model": checks.optional(checks.string),
    "background": checks.optional(checks.boolean),
    "instructions": checks.optional(checks.string),
    "max_output_tokens": checks.optional(checks.integer()),
    "max_tool_calls": checks.optional(checks.integer()),
    "previous_response_id": checks.optional(checks.string),
    "store": checks.optional(checks.boolean),
    "stream": checks.optional(checks.boolean),
    "tools": checks.listing(checks.mapping),
    "truncation": checks.optional(checks.one_of("auto", "disabled")),
    "reasoning": checks.optional(checks.mapping),
    "text": checks.optional(checks.mapping),
    "request_id": checks.string,
    "cache_salt": checks.optional(checks.string),
    "metadata": checks.optional(checks.mapping),
    "chat_template_kwargs": checks.optional(checks.mapping),
    "kv_transfer_params": checks.optional(checks.mapping),
    "ec_transfer_params": checks.optional(checks.mapping),
    "vllm_xargs": checks.optional(checks.extra_arguments),
}


def _text_or_blocks(value: Any, loc: str, problems: checks.Problems) -> Any:
    if isinstance(value, str | list):
        return value
    problems.add("string_type", loc, "Input should be a valid string", value)
    problems.add("list_type", loc, "Input should be a valid list", value)
    return value


def responses_fields(body: Any) -> dict[str, Any]:
    """A body of /v1/responses, checked. Raises ApiError."""
    if isinstance(body, dict):
        sampling.check_salt(body)
        if body.get("background") and body.get("store", True) is False:
            raise invalid("background can only be used when `store` is true", "background")
    return checks.checked(body, {**RESPONSES, "input": _text_or_blocks}, ("input",))


def responses_messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The conversation that a responses request means."""
    messages: list[dict[str, Any]] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
    if isinstance(body["input"], str):
        return [*messages, {"role": "user", "content": body["input"]}]
    for item in body["input"]:
        if not isinstance(item, dict):
            raise invalid(f"Unsupported input item: {item}", "input")
        kind = item.get("type", "message")
        if kind == "message":
            messages.append({"role": item.get("role", "user"), "content": item.get("content")})
        elif kind == "function_call":
            call = {"id": item.get("call_id"), "type": "function", "function": {k: item.get(k) for k in ("name", "arguments")}}
            messages.append({"role": "assistant", "tool_calls": [call]})
        elif kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
        elif kind == "reasoning":
            messages.append({"role": "assistant", "reasoning": item.get("content") or item.get("summary")})
        else:
            raise invalid(f"Unsupported input item type: {kind}", "input")
    return messages


def prepare_responses(body: dict[str, Any], model: Model) -> Prepared:
    """Checked fields of /v1/responses to a prompt. Raises ApiError."""
    name, adapter = model_of(body.get("model"), model)
    if previous := body.get("previous_response_id"):
        # Nothing is stored, as in a vLLM that was not told to.
        message = f"Response with id '{previous}' not found."
        raise ApiError(message, status=404, kind="invalid_request_error", param="response_id")
    settings = {key: body[key] for key in ("tools", "tool_choice", "chat_template_kwargs") if body.get(key)}
    if isinstance(body.get("reasoning"), dict):
        settings["reasoning_effort"] = body["reasoning"].get("effort")
    if isinstance(body.get("text"), dict):
        settings["response_format"] = body["text"].get("format")
    chat: dict[str, Any] = {"messages": responses_messages(body), "kv_transfer_params": body.get("kv_transfer_params")}
    ids = _forwarded_ids(chat) or template.render(chat["messages"], settings)
    if len(ids) >= model.max_model_len:
        raise ApiError(
            f"The engine prompt length {len(ids)} exceeds the max_model_len {model.max_model_len}. Please reduce prompt.",
            kind="invalid_request_error",
            param="input",
        )
    known = {key: body[key] for key in _RESPONSES_SAMPLING if key in body}
    rules = sampling.answer_rules(known, max_tokens=body.get("max_output_tokens"), room=model.max_model_len - len(ids))
    return Prepared(
        fields=body,
        model=name,
        adapter=adapter,
        prompts=[ids],
        rules=[rules],
        stream=bool(body.get("stream")),
        kv_params=chat["kv_transfer_params"],
    )


# -- messages --------------------------------------------------------------------------------------------------------------


def _message(value: Any, loc: str, problems: checks.Problems) -> Any:
    if not isinstance(value, dict):
        text = "Input should be a valid dictionary or object to extract fields from"
        problems.add("model_attributes_type", loc, text, value)
        return value
    for key in ("role", "content"):
        if key not in value:
            problems.add("missing", f"{loc}.{key}", "Field required", value)
    if "role" in value:
        checks.one_of("user", "assistant", "system")(value["role"], f"{loc}.role", problems)
    if "content" in value:
        _text_or_blocks(value["content"], f"{loc}.content", problems)
    return value


def _served_model(value: Any, loc: str, problems: checks.Problems) -> Any:
    if value == "":
        ctx = {"error": ValueError("Model is required")}
        problems.add("value_error", loc, "Value error, Model is required", value, ctx)
        return value
    return checks.string(value, loc, problems)


def _positive(value: Any, loc: str, problems: checks.Problems) -> Any:
    number = checks.integer()(value, loc, problems)
    if number is not None and number <= 0:
        ctx = {"error": ValueError("max_tokens must be positive")}
        problems.add("value_error", loc, "Value error, max_tokens must be positive", value, ctx)
    return number


MESSAGES: dict[str, checks.Check] = {
    "model": _served_model,
    "messages": checks.listing(_message),
    "max_tokens": _positive,
    "system": checks.optional(_text_or_blocks),
    "metadata": checks.optional(checks.mapping),
    "stop_sequences": checks.optional(checks.listing(checks.string)),
    "stream": checks.optional(checks.boolean),
    "temperature": checks.optional(checks.number),
    "tool_choice": checks.optional(checks.mapping),
    "tools": checks.optional(checks.listing(checks.mapping)),
    "top_k": checks.optional(checks.integer()),
    "top_p": checks.optional(checks.number),
    "thinking": checks.optional(checks.mapping),
    "cache_salt": checks.optional(checks.string),
    "chat_template_kwargs": checks.optional(checks.mapping),
    "kv_transfer_params": checks.optional(checks.mapping),
    "ec_transfer_params": checks.optional(checks.mapping),
    "vllm_xargs": checks.optional(checks.extra_arguments),
}


def messages_fields(body: Any) -> dict[str, Any]:
    """A body of /v1/messages, checked. Raises ApiError."""
    fields = checks.checked(body, MESSAGES, ("model", "messages", "max_tokens"))
    thinking, params = fields.get("thinking") or {}, fields.get("kv_transfer_params") or {}
    budget = thinking.get("budget_tokens")
    # A prefill leg has max_tokens 1; the check is left to the decode leg.
    if isinstance(budget, int) and budget >= fields["max_tokens"] and not params.get("do_remote_decode"):
        text = "thinking.budget_tokens must be less than max_tokens"
        problems = checks.Problems()
        problems.add("value_error", "body", f"Value error, {text}", body, {"error": ValueError(text)})
        problems.raise_if_any()
    return fields


def messages_as_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """The chat request that a messages request means."""
    messages: list[dict[str, Any]] = []
    if system := body.get("system"):
        messages.append({"role": "system", "content": system if isinstance(system, str) else _block_text(system)})
    for message in body["messages"]:
        content = message["content"]
        if isinstance(content, str):
            messages.append({"role": message["role"], "content": content})
        else:
            _convert_blocks(message["role"], content, messages)
    chat: dict[str, Any] = {
        "messages": messages,
        "model": body["model"],
        "max_tokens": body.get("max_tokens"),
        "stop": body.get("stop_sequences"),
    }
    for key in ("temperature", "top_p", "top_k", "cache_salt", "chat_template_kwargs", "kv_transfer_params", "stream"):
        chat[key] = body.get(key)
    thinking = body.get("thinking") or {}
    effort = (body.get("output_config") or {}).get("effort") if isinstance(body.get("output_config"), dict) else None
    chat["reasoning_effort"] = "none" if thinking.get("type") == "disabled" else effort
    if tools := body.get("tools"):
        chat["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": tool.get("name"),
                    "description": tool.get("description"),
                    "parameters": tool.get("input_schema"),
                },
            }
            for tool in tools
        ]
        choice = body.get("tool_choice") or {"type": "auto"}
        chat["tool_choice"] = {"auto": "auto", "any": "required", "none": "none"}.get(choice.get("type", "auto")) or {
            "type": "function",
            "function": {"name": choice.get("name")},
        }
    return chat


def _block_text(blocks: Any) -> str:
    if not isinstance(blocks, list):
        return ""
    return "".join(str(block.get("text", "")) for block in blocks if isinstance(block, dict) and block.get("type") == "text")


def _convert_blocks(role: str, blocks: list[Any], messages: list[dict[str, Any]]) -> None:
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            parts.append({"type": "text", "text": block.get("text", "")})
        elif kind == "image":
            parts.append({"type": "image_url", "image_url": block.get("source")})
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking", "")))
        elif kind == "tool_use":
            arguments = json.dumps(block.get("input") or {})
            calls.append(
                {"id": block.get("id"), "type": "function", "function": {"name": block.get("name"), "arguments": arguments}}
            )
        elif kind == "tool_result":
            content = block.get("content")
            result = content if isinstance(content, str) else _block_text(content)
            messages.append({"role": "tool", "tool_call_id": block.get("tool_use_id") or "", "content": result})
    if not parts and not calls and not thoughts:
        return
    message: dict[str, Any] = {"role": role}
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    if parts:
        message["content"] = parts
    messages.append(message)


def prepare_messages(body: dict[str, Any], model: Model) -> Prepared:
    """Checked fields of /v1/messages to a prompt. Raises ApiError."""
    chat = messages_as_chat(body)
    sampling.check_salt(chat)
    prepared = prepare_chat(chat, model)
    return Prepared(
        fields=body,
        model=prepared.model,
        adapter=prepared.adapter,
        prompts=prepared.prompts,
        rules=prepared.rules,
        stream=bool(body.get("stream")),
        include_usage=True,
        continuous_usage=True,
        kv_params=prepared.kv_params,
    )


# -- generate --------------------------------------------------------------------------------------------------------------

GENERATE: dict[str, checks.Check] = {
    "request_id": checks.string,
    "token_ids": checks.listing(checks.integer(), nonempty=True),
    "sampling_params": checks.mapping,
    "model": checks.optional(checks.string),
    "stream": checks.optional(checks.boolean),
    "stream_options": checks.optional(checks.stream_options),
    "cache_salt": checks.optional(checks.string),
    "output_mode": checks.one_of("tokens", "text"),
    "kv_transfer_params": checks.optional(checks.mapping),
    "ec_transfer_params": checks.optional(checks.mapping),
}


def generate_fields(body: Any) -> dict[str, Any]:
    """A body of /inference/v1/generate, checked. Raises ApiError."""
    if isinstance(body, dict):
        sampling.check_salt(body)
    fields = checks.checked(body, GENERATE, ("token_ids", "sampling_params"))
    table = {**checks.COMPLETION, "extra_args": checks.optional(checks.mapping)}
    fields["sampling_params"] = checks.checked(fields["sampling_params"], table, loc="body.sampling_params")
    return fields


def prepare_generate(body: dict[str, Any], model: Model) -> Prepared:
    """Checked fields of /inference/v1/generate to a prompt. Raises ApiError."""
    name, adapter = model_of(body.get("model"), model)
    params, ids = body["sampling_params"], body["token_ids"]
    if any(t < 0 for t in ids):
        raise invalid("token_ids must not contain negative values", "token_ids")
    _check_ids(ids)
    sampling.check_length(len(ids), model.max_model_len)
    room = model.max_model_len - len(ids)
    rules = sampling.answer_rules(params, max_tokens=params.get("max_tokens"), room=room)
    smuggled = (params.get("extra_args") or {}).get("kv_transfer_params")
    if not isinstance(smuggled, dict):
        smuggled = None
    return Prepared(
        fields=body,
        model=name,
        adapter=adapter,
        prompts=[ids],
        rules=[rules],
        n=sampling.check_n(params),
        **_stream_flags(body),
        logprobs=params.get("logprobs"),
        kv_params=body.get("kv_transfer_params") or smuggled,
    )


# -- the right answer ------------------------------------------------------------------------------------------------------

Check = Callable[[Any], dict[str, Any]]
Prepare = Callable[[dict[str, Any], Model], Prepared]

ENDPOINTS: dict[str, tuple[Check, Prepare]] = {
    "/v1/completions": (completion_fields, prepare_completion),
    "/v1/chat/completions": (chat_fields, prepare_chat),
    "/v1/chat/completions/batch": (batch_fields, prepare_batch),
    "/v1/responses": (responses_fields, prepare_responses),
    "/v1/messages": (messages_fields, prepare_messages),
    "/inference/v1/generate": (generate_fields, prepare_generate),
}
"""Endpoints that generate: how their bodies are checked and made into prompts."""


def expected_answers(endpoint: str, body: Mapping[str, Any] | bytes, model: Model | None = None) -> list[str]:
    """The right text of every choice that this request gets, without an engine. Raises ApiError if it is refused."""
    model = model or Model()
    check, prepare = ENDPOINTS[endpoint]
    value = checks.decode_body(body, "application/json") if isinstance(body, bytes) else json.loads(json.dumps(body))
    prepared = prepare(check(value), model)
    answers = []
    for ids, rules in zip(prepared.prompts, prepared.rules, strict=True):
        state = text.prompt_state(ids, prepared.adapter)
        steps = text.answer_steps(state, rules, mean_tokens=model.mean_answer_tokens)
        answer = "" if prepared.echo_only else "".join(step.text for step in steps)
        if prepared.echo and endpoint == "/v1/completions" and not prepared.return_token_ids:
            answer = tokens.decode(ids) + answer
        answers += [answer] * prepared.n
    return answers


def expected_answer(endpoint: str, body: Mapping[str, Any] | bytes, model: Model | None = None) -> str:
    """The right text of the first choice."""
    return expected_answers(endpoint, body, model)[0]
