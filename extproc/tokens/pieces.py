"""Where a text can be cut so that its parts have the same tokens apart as together.

A tokenizer looks for its added tokens (those that end a message, for example) before it does anything else, and what stands
between two of them is tokenised by itself. So a text may be cut *before* such a token: nothing can merge across it. What
follows it is then not the beginning of a text for the tokenizer either, which some treat in another way.

Not at every token: one that swallows the white space on its left reaches over the cut; one that only counts as a whole word, or
that is looked for after the text was normalised, is not to be found by its spelling.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

_LEAST_CHARS = 256
"""A shorter piece is not worth its place in a cache; it goes with the next."""


class Added(msgspec.Struct, frozen=True):
    """One added token, as tokenizer.json has it."""

    content: str
    single_word: bool = False
    lstrip: bool = False
    normalized: bool = True


class Cutter:
    """Cuts texts for one tokenizer."""

    def __init__(self, added: Iterable[Added], *, least_chars: int = _LEAST_CHARS) -> None:
        """``added``: all added tokens of the tokenizer."""
        known = [each for each in added if not each.normalized and each.content]
        # The first that matches is taken, the longest of those that begin there: as the tokenizer's own search has it.
        spellings = sorted({each.content for each in known}, key=len, reverse=True)
        whole = any(each.single_word for each in known)
        self._pattern = re.compile("|".join(map(re.escape, spellings))) if spellings and not whole else None
        self._no_cut = frozenset(each.content for each in known if each.lstrip)
        self._least = least_chars

    def cut(self, text: str) -> list[str]:
        """``text`` in parts, each but the first beginning with an added token."""
        if self._pattern is None or len(text) < 2 * self._least:
            return [text]
        parts, start = [], 0
        for found in self._pattern.finditer(text):
            at = found.start()
            if at - start >= self._least and found[0] not in self._no_cut:
                parts.append(text[start:at])
                start = at
        parts.append(text[start:])
        return parts
