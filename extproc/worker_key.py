"""The key that workers want (`--api-key` of vLLM), for what the filter asks of them by itself.

A client's request carries the client's own credentials to both workers, or this key with `workers.replace_credentials`.
What no client asked for has none: the list of models, the first handoff of a pair, and the release of blocks. A worker that
wants a key would turn them down unread.
"""

from __future__ import annotations

from collections.abc import Mapping

from extproc.tls.files import read_bounded
from extproc.tls.header_file import HeaderFile

_MAX_BYTES = 16 << 10


def headers(key_file: str | None) -> Mapping[str, str]:
    """Headers of such a request; none without a file, or with an empty one. Raises OSError with the file's name."""
    if key_file is None:
        return {}
    raw = read_bounded(key_file, _MAX_BYTES)
    try:
        key = raw.decode("ascii").strip()
    except UnicodeDecodeError:
        key = "\n"
    if not key.isprintable() or " " in key:
        raise OSError(f"{key_file}: one key, printable and without spaces, is wanted there")
    return {"authorization": f"Bearer {key}"} if key else {}


class WorkerKey(HeaderFile):
    """The same headers, as the file has them now."""

    def __init__(self, key_file: str | None) -> None:
        """Raises OSError with the file's name."""
        super().__init__("workers.api_key_file", key_file, headers)
