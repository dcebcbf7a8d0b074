"""Files below a root: what cannot be read is empty, as it is on a node that does not have it."""

from __future__ import annotations

from pathlib import Path

_FILE_MAX_BYTES = 4 << 20


_DIGITS_MAX = 20
"""2^64 has as many: what is longer is no number that a kernel writes."""


def whole(text: str, base: int = 10) -> int | None:
    """The whole number that the text is, if it is one."""
    try:
        return int(text, base) if len(text) <= _DIGITS_MAX else None
    except ValueError:
        return None


class Tree:
    """``/``, or a recorded copy of parts of it."""

    def __init__(self, root: Path) -> None:
        """Paths are given without a slash in front."""
        self._root = root

    def text(self, path: str) -> str:
        """The file without white space around it; empty if there is none."""
        try:
            with (self._root / path).open("rb") as file:
                return file.read(_FILE_MAX_BYTES).decode(errors="replace").strip()
        except (OSError, ValueError):
            return ""

    def number(self, path: str) -> int | None:
        """The whole number that the file holds."""
        return whole(self.text(path))

    def names(self, path: str, prefix: str = "") -> list[str]:
        """Names in a folder that begin so, in order."""
        try:
            return sorted(entry.name for entry in (self._root / path).iterdir() if entry.name.startswith(prefix))
        except (OSError, ValueError):
            return []

    def link(self, path: str) -> str:
        """What a symbolic link says; empty if it is none."""
        try:
            return str((self._root / path).readlink())
        except (OSError, ValueError):
            return ""

    def exists(self, path: str) -> bool:
        """There is such a file or folder."""
        return (self._root / path).exists()
