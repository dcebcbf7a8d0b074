"""What the configuration says of token ids. Pure: no I/O."""

from __future__ import annotations

from typing import Literal

import msgspec


class ModelTokenizer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The tokenizer and the chat template of one model, as its workers have them."""

    folder: str
    """Hugging Face folder with `tokenizer.json`, `tokenizer_config.json` and, where it has one, `chat_template.jinja`. No
    weights are needed."""
    chat_template: str | None = None
    """File with another chat template, as with the workers' `--chat-template`."""
    content_format: Literal["auto", "string", "openai"] = "auto"
    """How a message made of parts is shown to the template, as with the workers' `--chat-template-content-format`."""
    template_kwargs: dict[str, object] = {}
    """What the template gets where a request does not say it, as with the workers' `--default-chat-template-kwargs`."""
    tools_without_choice: bool = True
    """Tools are rendered with `tool_choice: none` too. false: the workers run with `--exclude-tools-when-tool-choice-none`."""
    max_tokens: int = 1_000_000
    """Longer prompts get no token ids: `max_model_len` of the workers, if it is known."""


class TokenSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Token ids of prompts, to compare with what workers say they hold. See [tokens](tokens.md)."""

    learn: bool = True
    """Keep the token ids that prefill replies bring (`prefill.tokenise_once`), for the same prompt again."""
    learn_prefixes: bool = True
    """Use them for the beginning of longer prompts too, where that has proved true for the model."""
    models: dict[str, ModelTokenizer] = {}
    """Tokenizers by the name of the model, as the workers call it. An adapter uses that of the model below it."""
    ask_workers: Literal["off", "tokenize", "render"] = "off"
    """Ask a prefill worker where nothing else knows: `tokenize` (`/tokenize`, which is always there; chat and completions), or
    `render` (the render endpoints of all four APIs, with which the workers must be started: `--enable-scale-out`)."""
    timeout_ms: float = 30.0
    """A request waits so long for its token ids at the most; then it goes on without, and the next one finds them."""
    threads: int = 1
    """That tokenise. The tokenizer runs beside the event loop, not in it."""
    max_waiting: int = 64
    """Prompts that may wait for a thread or for workers' answers; more go on without."""
    cache_bytes: int = 256 << 20
    """All that a process keeps: learned ids, and pieces of texts with theirs. The least recently used go first."""
    keep_s: float = 3600.0
    """Learned ids are used for so long: a template may write the date."""


def faults(settings: TokenSettings) -> str | None:
    """Why these settings cannot be meant, with the field named; None: they can."""
    for name in ("timeout_ms", "threads", "max_waiting", "cache_bytes", "keep_s"):
        value = getattr(settings, name)
        if not 0 < value < 1e12:
            return f"{name}: {value:g} is not a positive number"
    if settings.timeout_ms > 10_000:
        return f"timeout_ms: {settings.timeout_ms:g} is over 10 s, for which no request should wait"
    if settings.threads > 16:
        return f"threads: {settings.threads} are more than 16"
    if settings.learn_prefixes and not settings.learn:
        return "learn_prefixes: needs learn, from which it knows them"
    for model, each in settings.models.items():
        if each.max_tokens < 1:
            return f"models.{model}.max_tokens: {each.max_tokens} is not a positive number"
    if not (settings.learn or settings.models or settings.ask_workers != "off"):
        return "learn: nothing is left that could know token ids"
    return None
