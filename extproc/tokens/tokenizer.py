"""One model's tokenizer, from its Hugging Face folder, with a cache of pieces. Needs `tokenizers`; runs in worker threads.

Facts about transformers are those of release 5 (``tokenization_utils_tokenizers.py``): what it adds to tokenizer.json.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import xxhash

from extproc.tokens.cache import Pieces
from extproc.tokens.conversation import CannotError
from extproc.tokens.pieces import Added, Cutter

NAMED: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Special tokens that templates know by name."""

_OTHERS: Final = frozenset(
    (
        *(
            "MoonshotKimiaForCausalLM",
            "KimiK3ForConditionalGeneration",
            "InklingForCausalLM",
            "InklingForConditionalGeneration",
        ),
        *("DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM", "DeepseekV4ForConditionalGeneration", "DeepseekV41ForCausalLM"),
        "GptOssForCausalLM",
    )
)
"""Architectures whose prompts vLLM makes with code of its own, not with a template (``config/model.py``)."""

_MAX_FILE_BYTES: Final = 256 << 20


class FolderError(ValueError):
    """The folder cannot be used; the message says which file and why."""


class Tokenizer:
    """Safe for several threads."""

    def __init__(self, folder: Path, pieces: Pieces) -> None:
        """``pieces`` may be shared by several tokenizers. Raises FolderError, and ImportError without `tokenizers`."""
        import tokenizers

        # Threads of its own would take the cores of other programs on this machine. Ours say how many there are.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        path = folder / "tokenizer.json"
        text = _read(path)
        try:
            backend = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises nothing narrower
            raise FolderError(f"{path}: {error}") from None
        self.config = _config(folder)
        self._refuse_others(folder)
        backend.no_truncation()
        backend.no_padding()
        self.special_tokens = {name: _spelling(self.config[name]) for name in NAMED if self.config.get(name) not in (None, "")}
        self._add_missing(backend)
        self._backend = backend
        added = [
            Added(each.content, single_word=each.single_word, lstrip=each.lstrip, normalized=each.normalized)
            for each in backend.get_added_tokens_decoder().values()
        ]
        self._cutter = Cutter(added)
        self._pieces = pieces
        self._name = xxhash.xxh3_128_digest(text.encode() + json.dumps(self.config, sort_keys=True).encode())
        self._before, self._behind = self._around(backend)

    def ids(self, text: str, *, special: bool) -> array[int]:
        """The token ids of ``text``; ``special``: with what the tokenizer puts around every text. Raises CannotError."""
        parts = self._cutter.cut(text)
        keys = [xxhash.xxh3_128_digest(self._name + bytes((not index,)) + _bytes(part)) for index, part in enumerate(parts)]
        known: list[array[int] | None] = [self._pieces.get(key) for key in keys]
        missing = [index for index, ids in enumerate(known) if ids is None]
        if missing:
            # The batch, unlike a single text, is done without holding the interpreter.
            for index, encoded in zip(
                missing,
                self._backend.encode_batch_fast([parts[index] for index in missing], add_special_tokens=False),
                strict=True,
            ):
                ids = known[index] = array("I", encoded.ids)
                self._pieces.put(keys[index], ids)
        found = array("I", self._before) if special else array("I")
        for piece in known:
            assert piece is not None
            found += piece
        if special:
            found.extend(self._behind)
        return found

    def _refuse_others(self, folder: Path) -> None:
        if any((folder / name).exists() for name in ("tekken.json", "params.json")) or any(folder.glob("tokenizer.model.v*")):
            raise FolderError(f"{folder}: the workers use Mistral's own tokenizer for it, which is not followed here")
        path = folder / "config.json"
        if not path.exists():
            return
        config = _json(path)
        own = _OTHERS.intersection(config.get("architectures") or ())
        if own or config.get("model_type") == "gpt_oss":
            raise FolderError(f"{path}: prompts of {min(own, default='gpt_oss')} are not made with a chat template")

    def _add_missing(self, backend: Any) -> None:
        """Tokens that only the configuration names, as transformers adds them."""
        import tokenizers

        have = {each.content for each in backend.get_added_tokens_decoder().values()}
        listed = self.config.get("added_tokens_decoder") or {}
        for _, each in sorted(listed.items(), key=lambda item: int(item[0])):
            if each["content"] not in have:
                flags = {name: bool(each.get(name)) for name in ("single_word", "lstrip", "rstrip", "normalized", "special")}
                backend.add_tokens([tokenizers.AddedToken(each["content"], **flags)])
                have.add(each["content"])
        extra = self.config.get("extra_special_tokens") or self.config.get("additional_special_tokens") or []
        extra = list(extra.values()) if isinstance(extra, dict) else extra
        for spelling in (*self.special_tokens.values(), *map(_spelling, extra)):
            if spelling not in have:
                backend.add_special_tokens([tokenizers.AddedToken(spelling, special=True, normalized=False)])
                have.add(spelling)

    def _around(self, backend: Any) -> tuple[list[int], list[int]]:
        """What stands before and behind every text that gets special tokens."""
        # `add_bos_token` and `add_eos_token` of the configuration count for nothing where there is a tokenizer.json.
        if backend.post_processor is None:
            return [], []
        sample = "a"
        bare: list[int] = backend.encode(sample, add_special_tokens=False).ids
        whole: list[int] = backend.encode(sample, add_special_tokens=True).ids
        for at in range(len(whole) - len(bare) + 1):
            if whole[at : at + len(bare)] == bare:
                return whole[:at], whole[at + len(bare) :]
        raise FolderError("tokenizer.json: its post_processor changes more than the ends of a text")


def templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The chat templates of a folder by name; the one of a model that has only one is ``default``. Raises FolderError."""
    found: dict[str, str] = {}
    listed = config.get("chat_template")
    if isinstance(listed, str):
        found["default"] = listed
    elif isinstance(listed, list):
        found |= {each["name"]: each["template"] for each in listed}
    single = folder / "chat_template.jinja"
    if single.exists():
        found["default"] = _read(single)
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = _read(path)
    processor = folder / "chat_template.json"
    if processor.exists() and _json(processor).get("chat_template") != found.get("default"):
        raise FolderError(f"{processor}: a processor has a template of its own, which the workers use for some prompts")
    return found


def _bytes(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise CannotError("invalid") from None  # half a surrogate pair, of which tokenizers make nothing


def _spelling(token: Any) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    return _json(path) if path.exists() else {}


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(_read(path))
    except json.JSONDecodeError as error:
        raise FolderError(f"{path}: {error}") from None
    if not isinstance(value, dict):
        raise FolderError(f"{path}: an object is wanted there")
    return value


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise FolderError(f"{path}: over {_MAX_FILE_BYTES} bytes")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FolderError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
