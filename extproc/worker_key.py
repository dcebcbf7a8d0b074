"""The key that workers want (`--api-key` of vLLM), for what the filter asks of them by itself.

A client's request carries the client's own credentials to both workers, or this key with `workers.replace_credentials`.
What no client asked for has none: the list of models, the first handoff of a pair, and the release of blocks. A worker that
wants a key would turn them down unread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from extproc.tls.files import Followed, read_bounded

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


class WorkerKey(Mapping[str, str]):
    """The same headers, as the file has them now."""

    def __init__(self, key_file: str | None) -> None:
        """Raises OSError with the file's name."""
        self._file = key_file
        self.followed = (
            [] if key_file is None else [Followed("workers.api_key_file", [key_file], self._load, secret=[key_file])]
        )
        """Its file."""
        self._now: Mapping[str, str] = {}
        self._load()

    def _load(self) -> None:
        self._now = headers(self._file)

    def __getitem__(self, name: str) -> str:
        return self._now[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._now)

    def __len__(self) -> int:
        return len(self._now)
