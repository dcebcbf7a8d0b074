"""The simulated engines' tokenizer for the bench's prompts, as a Hugging Face folder: what routers that need token ids read."""

from __future__ import annotations

from pathlib import Path

import msgspec

from workers.sim import tokens
from workers.trace_text import WORDS

_PIECE = "[ A-Za-z0-9][a-z0-9]{0,3}|[\\s\\S]"
_BOS = "<bos>"


def write_tokenizer(folder: Path) -> Path:
    """Write it; returns the folder. Only the bench's own words have ids: all others are one unknown token."""
    folder.mkdir(parents=True, exist_ok=True)
    added = {
        "id": tokens.BOS,
        "content": _BOS,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    begin = {"SpecialToken": {"id": _BOS, "type_id": 0}}
    sequence = {"Sequence": {"id": "A", "type_id": 0}}
    tree = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [added],
        "normalizer": None,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": _PIECE}, "behavior": "Isolated", "invert": False},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [begin, sequence],
            "pair": [begin, sequence, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {_BOS: {"id": _BOS, "ids": [tokens.BOS], "tokens": [_BOS]}},
        },
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {_BOS: tokens.BOS, "<unk>": tokens.EOS} | {word: tokens.piece_id(word.encode()) for word in WORDS},
            "unk_token": "<unk>",
        },
    }
    (folder / "tokenizer.json").write_bytes(msgspec.json.encode(tree))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": _BOS, "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_bytes(msgspec.json.encode(config))
    (folder / "config.json").write_bytes(msgspec.json.encode({"model_type": "llama"}))
    return folder
