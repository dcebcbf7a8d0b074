"""Request bodies: JSON to checked fields, with the conversions and the error texts that vLLM's (pydantic's) validation has.

A table a request type says which check each field gets; unknown fields pass. No I/O here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from workers.sim.errors import ApiError, PlainError

_MAX_REPORTED = 10
_MAX_SHOWN_CHARS = 200

_decode = msgspec.json.Decoder().decode


class Problems:
    """What is wrong with a body."""

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []

    def add(self, kind: str, loc: str, message: str, value: object, ctx: dict[str, Any] | None = None) -> None:
        """One finding, written as pydantic writes it."""
        entry: dict[str, Any] = {"type": kind, "loc": loc, "msg": message, "input": shown(value)}
        if ctx is not None:
            entry["ctx"] = ctx
        self.found.append(entry)

    def raise_if_any(self) -> None:
        """Raise ApiError if something was found."""
        if not self.found:
            return
        count = len(self.found)
        lines = [f"{count} validation error{'s' if count > 1 else ''}:"]
        lines += [f"  {entry}" for entry in self.found[:_MAX_REPORTED]]
        if count > _MAX_REPORTED:
            lines.append(f"  ...and {count - _MAX_REPORTED} more errors")
        raise ApiError("\n".join(lines), kind="Bad Request", param=self.found[0]["loc"])


Check = Callable[[Any, str, Problems], Any]


def shown(value: object) -> str:
    """A bounded view of a refused value."""
    if isinstance(value, dict | list):
        return f"<{type(value).__name__} of {len(value)} items>"
    text = str(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else text[:_MAX_SHOWN_CHARS] + "...[truncated]"


def decode_body(body: bytes, content_type: str) -> Any:
    """The JSON value of a body. Raises ApiError or PlainError."""
    if content_type.split(";", maxsplit=1)[0].strip().lower() != "application/json":
        message = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
        raise ApiError(message, kind="Bad Request")
    try:
        return _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _decode_slowly(body)


def _decode_slowly(body: bytes) -> Any:
    """With the standard library: it takes NaN, and its error texts are those that clients see."""
    problems = Problems()
    try:
        if not body:
            return None
        return json.loads(body)
    except json.JSONDecodeError as error:
        problems.add("json_invalid", f"body.{error.pos}", "JSON decode error", {}, {"error": error.msg})
    except (RecursionError, UnicodeDecodeError, ValueError):
        raise PlainError("There was an error parsing the body", 400) from None
    problems.raise_if_any()
    raise AssertionError


def checked(value: Any, table: Mapping[str, Check], required: tuple[str, ...] = (), *, loc: str = "body") -> dict[str, Any]:
    """The fields of a body, or of the object at ``loc`` in it, converted. Raises ApiError."""
    problems = Problems()
    if value is None:
        problems.add("missing", loc, "Field required", None)
    elif not isinstance(value, dict):
        message = "Input should be a valid dictionary or object to extract fields from"
        problems.add("model_attributes_type", loc, message, value)
    problems.raise_if_any()
    fields = dict(value)
    for key in required:
        if key not in fields:
            problems.add("missing", f"{loc}.{key}", "Field required", value)
    for key, check in table.items():
        if key in fields:
            fields[key] = check(fields[key], f"{loc}.{key}", problems)
    problems.raise_if_any()
    return fields


def optional(check: Check) -> Check:
    """The same, or null."""
    return lambda value, loc, problems: None if value is None else check(value, loc, problems)


def integer(minimum: int | None = None, maximum: int | None = None) -> Check:
    """A whole number, also as a string or a float without a fraction."""

    def check(value: Any, loc: str, problems: Problems) -> Any:
        number: int | None = None
        if isinstance(value, bool | int):
            number = int(value)
        elif isinstance(value, float):
            if value.is_integer():
                number = int(value)
            else:
                kind = "int_from_float" if value == value and abs(value) != float("inf") else "finite_number"
                text = (
                    "Input should be a valid integer, got a number with a fractional part"
                    if kind == "int_from_float"
                    else "Input should be a finite number"
                )
                problems.add(kind, loc, text, value)
        elif isinstance(value, str):
            try:
                number = int(value.strip())
            except ValueError:
                problems.add("int_parsing", loc, "Input should be a valid integer, unable to parse string as an integer", value)
        else:
            problems.add("int_type", loc, "Input should be a valid integer", value)
        if number is None:
            return None
        if minimum is not None and number < minimum:
            text = f"Input should be greater than or equal to {minimum}"
            problems.add("greater_than_equal", loc, text, value, {"ge": minimum})
        if maximum is not None and number > maximum:
            problems.add("less_than_equal", loc, f"Input should be less than or equal to {maximum}", value, {"le": maximum})
        return number

    return check


def number(value: Any, loc: str, problems: Problems) -> Any:
    """A number, also as a string."""
    if isinstance(value, bool | int | float):
        return float(value)
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            problems.add("float_parsing", loc, "Input should be a valid number, unable to parse string as a number", value)
            return None
    problems.add("float_type", loc, "Input should be a valid number", value)
    return None


_TRUE = frozenset(("true", "t", "yes", "y", "on", "1"))
_FALSE = frozenset(("false", "f", "no", "n", "off", "0"))


def boolean(value: Any, loc: str, problems: Problems) -> Any:
    """True or false, also as 0, 1 and the words for it."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float) and value in (0, 1):
        return bool(value)
    if isinstance(value, str) and value.lower() in _TRUE | _FALSE:
        return value.lower() in _TRUE
    if isinstance(value, str | int | float):
        problems.add("bool_parsing", loc, "Input should be a valid boolean, unable to interpret input", value)
    else:
        problems.add("bool_type", loc, "Input should be a valid boolean", value)
    return None


def string(value: Any, loc: str, problems: Problems) -> Any:
    """A text."""
    if not isinstance(value, str):
        problems.add("string_type", loc, "Input should be a valid string", value)
    return value


def mapping(value: Any, loc: str, problems: Problems) -> Any:
    """An object. A copy: the engine takes keys out of kv_transfer_params."""
    if not isinstance(value, dict):
        problems.add("dict_type", loc, "Input should be a valid dictionary", value)
        return value
    return dict(value)


def listing(item: Check | None = None, *, nonempty: bool = False) -> Check:
    """A list, each item checked."""

    def check(value: Any, loc: str, problems: Problems) -> Any:
        if not isinstance(value, list):
            problems.add("list_type", loc, "Input should be a valid list", value)
            return value
        if nonempty and not value:
            text = "List should have at least 1 item after validation, not 0"
            problems.add("too_short", loc, text, value, {"field_type": "List", "min_length": 1, "actual_length": 0})
        if item is None:
            return value
        return [item(entry, f"{loc}.{index}", problems) for index, entry in enumerate(value)]

    return check


def one_of(*words: str) -> Check:
    """One of these words."""
    quoted = [f"'{word}'" for word in words]
    expected = " or ".join((", ".join(quoted[:-1]), quoted[-1])) if len(quoted) > 1 else quoted[0]

    def check(value: Any, loc: str, problems: Problems) -> Any:
        if value not in words:
            problems.add("literal_error", loc, f"Input should be {expected}", value, {"expected": expected})
        return value

    return check


def stop_strings(value: Any, loc: str, problems: Problems) -> Any:
    """A text, or up to four."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        problems.add("string_type", loc, "Input should be a valid string", value)
        problems.add("list_type", loc, "Input should be a valid list", value)
        return []
    if len(value) > 4:
        problems.add("string_type", loc, "Input should be a valid string", value)
        text = f"List should have at most 4 items after validation, not {len(value)}"
        problems.add("too_long", loc, text, value, {"field_type": "List", "max_length": 4, "actual_length": len(value)})
    return [string(entry, f"{loc}.{index}", problems) for index, entry in enumerate(value)]


def prompt(value: Any, loc: str, problems: Problems) -> Any:
    """A text, token ids, or a list of either: always returned as a list of prompts."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        if value and all(type(entry) is int and entry >= 0 for entry in value):
            return [value]
        if all(isinstance(entry, str) for entry in value):
            return list(value)
        if all(isinstance(entry, list) and all(type(t) is int and t >= 0 for t in entry) for entry in value):
            return list(value)
        for index, entry in enumerate(value):
            if not isinstance(entry, list):
                integer(0)(entry, f"{loc}.{index}", problems)
            problems_before = len(problems.found)
            listing(integer(0))(entry, f"{loc}.{index}", problems)
            if len(problems.found) > problems_before + _MAX_REPORTED:
                break
        problems.add("string_type", loc, "Input should be a valid string", value)
        for index, entry in enumerate(value):
            string(entry, f"{loc}.{index}", problems)
        return []
    problems.add("list_type", loc, "Input should be a valid list", value)
    problems.add("list_type", loc, "Input should be a valid list", value)
    problems.add("string_type", loc, "Input should be a valid string", value)
    problems.add("list_type", loc, "Input should be a valid list", value)
    return []


def extra_arguments(value: Any, loc: str, problems: Problems) -> Any:
    """``vllm_xargs``: texts, numbers, or lists of them."""
    if not isinstance(value, dict):
        problems.add("dict_type", loc, "Input should be a valid dictionary", value)
        return value
    for key, entry in value.items():
        if isinstance(entry, dict) or entry is None:
            problems.add("string_type", f"{loc}.{key}", "Input should be a valid string", entry)
            problems.add("int_type", f"{loc}.{key}", "Input should be a valid integer", entry)
            problems.add("float_type", f"{loc}.{key}", "Input should be a valid number", entry)
            problems.add("list_type", f"{loc}.{key}", "Input should be a valid list", entry)
    return value


def stream_options(value: Any, loc: str, problems: Problems) -> Any:
    """``stream_options``."""
    if not isinstance(value, dict):
        text = "Input should be a valid dictionary or object to extract fields from"
        problems.add("model_attributes_type", loc, text, value)
        return value
    for key in ("include_usage", "continuous_usage_stats"):
        if value.get(key) is not None:
            value = {**value, key: boolean(value[key], f"{loc}.{key}", problems)}
    return value


def response_format(value: Any, loc: str, problems: Problems) -> Any:
    """``response_format``: one of four kinds."""
    if not isinstance(value, dict):
        text = "Input should be a valid dictionary or object to extract fields from"
        problems.add("model_attributes_type", loc, text, value)
    elif value.get("type") not in ("text", "json_object", "json_schema", "structural_tag"):
        one_of("text", "json_object", "json_schema")(value.get("type"), f"{loc}.type", problems)
        for fields in (("format",), ("structures", "triggers")):
            one_of("structural_tag")(value.get("type"), f"{loc}.type", problems)
            for key in fields:
                if key not in value:
                    problems.add("missing", f"{loc}.{key}", "Field required", value)
    return value


_INT64 = (-(1 << 63), (1 << 63) - 1)

SAMPLING: dict[str, Check] = {
    "model": optional(string),
    "frequency_penalty": optional(number),
    "presence_penalty": optional(number),
    "temperature": optional(number),
    "top_p": optional(number),
    "top_k": optional(integer()),
    "min_p": optional(number),
    "repetition_penalty": optional(number),
    "logit_bias": optional(mapping),
    "seed": optional(integer(*_INT64)),
    "stop": optional(stop_strings),
    "stop_token_ids": optional(listing(integer())),
    "include_stop_str_in_output": boolean,
    "ignore_eos": boolean,
    "min_tokens": integer(),
    "stream": optional(boolean),
    "stream_options": optional(stream_options),
    "use_beam_search": boolean,
    "truncate_prompt_tokens": optional(integer(-1, _INT64[1])),
    "truncation_side": optional(one_of("left", "right")),
    "allowed_token_ids": optional(listing(integer())),
    "bad_words": listing(string),
    "prompt_logprobs": optional(integer()),
    "user": optional(string),
    "priority": integer(*_INT64),
    "request_id": string,
    "session_id": optional(string),
    "return_token_ids": optional(boolean),
    "cache_salt": optional(string),
    "kv_transfer_params": optional(mapping),
    "ec_transfer_params": optional(mapping),
    "vllm_xargs": optional(extra_arguments),
    "stream_interval": optional(integer(1)),
    "structured_outputs": optional(mapping),
    "response_format": optional(response_format),
}

COMPLETION: dict[str, Check] = {
    **SAMPLING,
    "prompt": optional(prompt),
    "max_tokens": optional(integer()),
    "n": integer(),
    "echo": optional(boolean),
    "logprobs": optional(integer()),
    "suffix": optional(string),
    "add_special_tokens": boolean,
}

CHAT: dict[str, Check] = {
    **SAMPLING,
    "messages": listing(mapping),
    "max_tokens": optional(integer()),
    "max_completion_tokens": optional(integer()),
    "n": optional(integer()),
    "logprobs": optional(boolean),
    "top_logprobs": optional(integer()),
    "tools": optional(listing(mapping)),
    "reasoning_effort": optional(one_of("none", "minimal", "low", "medium", "high", "xhigh", "max")),
    "documents": optional(listing(mapping)),
    "chat_template": optional(string),
    "chat_template_kwargs": optional(mapping),
    "echo": boolean,
    "add_generation_prompt": boolean,
    "continue_final_message": boolean,
    "add_special_tokens": boolean,
    "return_prompt_text": optional(boolean),
}
