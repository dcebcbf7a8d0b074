"""The prompts of a trace as text: each hash id is always the same text, so prompts share a prefix exactly as far as their ids.

A word is a space and three letters. To the simulated engine a word is a token, and so a prompt has four characters a token, as
English text has with a real vocabulary: routers that estimate tokens from characters, or keep text in a tree, meet what they
would meet in service. To a real tokenizer a word is one to three tokens; how many, its engine's ``usage`` tells.
"""

from __future__ import annotations

import hashlib
import string
from array import array
from functools import lru_cache

from workers.traces import BLOCK_TOKENS, Request

_VOCABULARY = 1 << 10
"""Few enough that the tokenizer's table stays in the processor's cache, and more than enough to tell blocks apart."""
_LETTERS = string.ascii_lowercase
WORDS = [f" {_LETTERS[i // 676]}{_LETTERS[i // 26 % 26]}{_LETTERS[i % 26]}" for i in range(_VOCABULARY)]
WORD_CHARS = 4


@lru_cache(maxsize=1 << 16)
def block_text(hash_id: int) -> str:
    """The text of one block: 512 words."""
    numbers = array("H", hashlib.shake_128(b"block %d" % hash_id).digest(2 * BLOCK_TOKENS))
    return "".join([WORDS[number % _VOCABULARY] for number in numbers])


def prompt_text(request: Request, *, tokens_per_word: float = 1.0) -> str:
    """The prompt of a request; its last block may be partial.

    ``tokens_per_word`` of the engine's tokenizer, at least 1: each block then has fewer words, and as many tokens as before,
    nearly.
    """
    if tokens_per_word < 1:
        raise ValueError(f"tokens_per_word: at least 1, not {tokens_per_word}: a block has no more words than tokens")
    block_chars = WORD_CHARS * round(BLOCK_TOKENS / tokens_per_word)
    whole, rest_tokens = divmod(request.input_tokens, BLOCK_TOKENS)
    blocks = [block_text(hash_id)[:block_chars] for hash_id in request.hash_ids[:whole]]
    if rest_tokens:
        words = max(1, round(rest_tokens / tokens_per_word))
        blocks.append(block_text(request.hash_ids[whole])[: WORD_CHARS * words])
    return "".join(blocks)
