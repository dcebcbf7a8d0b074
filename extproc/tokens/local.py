"""Request -> token ids, with the model's own tokenizer and chat template. Runs in worker threads."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

from extproc.inference import InferenceRequest
from extproc.paths import Treatment
from extproc.tokens.cache import Pieces
from extproc.tokens.conversation import READ, CannotError, conversation
from extproc.tokens.identity import NO_PART
from extproc.tokens.settings import ModelTokenizer
from extproc.tokens.template import Template
from extproc.tokens.tokenizer import FolderError, Tokenizer, templates

_COMPLETION_FIELDS = frozenset(("model", "prompt", "add_special_tokens", "cache_salt", "vllm_xargs", "truncation_side"))
_COMPLETION_FIELDS_TOO = frozenset(("response_format", "structured_outputs", "kv_transfer_params"))
"""Of the answer."""

_SAYS_NOTHING = b"null"


class LocalTokenizer:
    """Of one model."""

    def __init__(self, settings: ModelTokenizer, pieces: Pieces) -> None:
        """Reads the folder, which takes a second for a large vocabulary. Raises FolderError, ImportError."""
        folder = Path(settings.folder)
        self._settings = settings
        self._tokenizer = Tokenizer(folder, pieces)
        texts = templates(folder, self._tokenizer.config)
        if settings.chat_template is not None:
            try:
                texts = {"default": Path(settings.chat_template).read_text(encoding="utf-8")}
            except (OSError, UnicodeDecodeError) as error:
                raise FolderError(f"{settings.chat_template}: {error}") from None
        try:
            self._templates = {
                name: Template(text, content_format=settings.content_format)
                for name, text in texts.items()
                if name in ("default", "tool_use")
            }
        except ValueError as error:
            raise FolderError(f"{folder}: {error}") from None

    def ids(self, request: InferenceRequest) -> array[int]:
        """The engine's token ids for this prompt. Raises CannotError."""
        if request.treatment is Treatment.CHAT:
            ids = self._chat(request)
        elif request.treatment is Treatment.COMPLETIONS:
            ids = self._completion(request)
        else:
            raise CannotError("api")
        if not ids:
            raise CannotError("invalid")
        if len(ids) > self._settings.max_tokens:
            raise CannotError("too_long")
        return ids

    def _completion(self, request: InferenceRequest) -> array[int]:
        fields = _read(request, _COMPLETION_FIELDS | _COMPLETION_FIELDS_TOO)
        prompt = fields.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1:
            prompt = prompt[0]
        if not isinstance(prompt, str):
            raise CannotError("invalid")
        return self._tokenizer.ids(prompt, special=_flag(fields, default=True))

    def _chat(self, request: InferenceRequest) -> array[int]:
        fields = _read(request, READ)
        template = self._templates.get("tool_use") if fields.get("tools") is not None else None
        template = template or self._templates.get("default")
        if template is None:
            raise CannotError("no_template")
        chat = conversation(
            fields,
            as_parts=template.as_parts,
            knows_developers=template.knows_developers,
            defaults=self._settings.template_kwargs,
            tools_without_choice=self._settings.tools_without_choice,
        )
        text = template.render(chat, self._tokenizer.special_tokens)
        return self._tokenizer.ids(text, special=_flag(fields, default=False))


def _flag(fields: dict[str, Any], *, default: bool) -> bool:
    value = fields.get("add_special_tokens", default)
    if not isinstance(value, bool):
        raise CannotError("invalid")
    return value


def _read(request: InferenceRequest, known: frozenset[str]) -> dict[str, Any]:
    """The fields that have a part in the prompt, decoded as the engine does it. Raises CannotError for others."""
    fields: dict[str, Any] = {}
    for name, raw in request.fields.items():
        if name in NO_PART:
            continue
        value = bytes(raw)
        if value == _SAYS_NOTHING:
            continue
        if name not in known:
            raise CannotError("unknown_field")
        if name in _NOT_READ:
            continue
        try:
            fields[name] = json.loads(value)
        except (ValueError, RecursionError):
            raise CannotError("invalid") from None
    return fields


_NOT_READ = frozenset(("model", "response_format", "structured_outputs", "vllm_xargs", "cache_salt", "truncation_side"))
