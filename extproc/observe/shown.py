"""Text that others chose, made fit to be shown: bounded, and without characters that a terminal would obey."""

from __future__ import annotations

from typing import Final

MOST_CHARS: Final = 1_000
"""Of any one value of a log line."""


def shown(text: str, limit: int = MOST_CHARS) -> str:
    """``text``, but no longer than ``limit`` characters, and with every unprintable one escaped."""
    if len(text) <= limit and text.isprintable():
        return text
    cut = text[:limit]
    clean = cut if cut.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in cut)
    return f"{clean[:limit]}…" if len(text) > limit or len(clean) > limit else clean
