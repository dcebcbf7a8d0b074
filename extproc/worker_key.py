"""The key that workers want (`--api-key` of vLLM), for what the filter asks of them by itself.

A client's request carries the client's own credentials to both workers. What no client asked for has none: the list of models,
the first handoff of a pair, and the release of blocks. A worker that wants a key would turn them down unread.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

_MAX_BYTES = 16 << 10


def headers(key_file: str | None) -> Mapping[str, str]:
    """Headers of such a request; none without a file, or with an empty one. Raises OSError with the file's name."""
    if key_file is None:
        return {}
    with Path(key_file).open("rb") as file:
        raw = file.read(_MAX_BYTES + 1)
    try:
        key = raw.decode("ascii").strip()
    except UnicodeDecodeError:
        key = "\n"
    if len(raw) > _MAX_BYTES or not key.isprintable() or " " in key:
        raise OSError(f"{key_file}: one key, printable and without spaces, is wanted there")
    return {"authorization": f"Bearer {key}"} if key else {}
