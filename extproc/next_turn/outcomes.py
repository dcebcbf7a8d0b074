"""What can become of blocks that decode workers keep: labels of `baton_next_turn_total`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

OUTCOMES: Final[Mapping[str, str]] = {
    # an answer
    "kept": "an answer named blocks, and its token ids: they are remembered",
    "streamed": "an answer was streamed, so it names none; the decode worker keeps them all the same, to their end",
    "not_shown": "a gateway of others does not show the bodies of answers",
    "no_blocks": "an answer named none: the worker has no `bidirectional_kv_xfer`, or the answer did not end by itself",
    "no_ids": "an answer named blocks, and the token ids in them are not known (Messages, Responses, media); given back",
    "unusable": "blocks that cannot be read safely: in several groups, of unknown or different size, fewer than 64 tokens",
    "too_large": "an answer of over 64 MiB, which is cut off",
    # a prompt
    "read": "a prefill worker read them",
    "computed": "a prefill worker was given them, and computed the prompt all the same",
    "failed": "a prefill that was given them failed; it was tried again without",
    "not_worth": "the prefill worker computes the rest in less time than reading takes; given back",
    "went_back": "the decode worker that keeps them does the next turn itself; given back",
    "elsewhere": "another decode worker does all of the next turn; given back",
    "diverged": "a prompt begins like that of an answer that is remembered, and goes on in another way: it gets none",
    "prompt_unknown": "not all token ids of a prompt are known: it gets none",
    # neither
    "expired": "nobody came for them in time",
    "gone": "their worker is gone, or was started again",
    "evicted": "there were more than `max_conversations` or `max_bytes`; given back",
}
