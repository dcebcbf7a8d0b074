"""Headers that stand in a file, such as a key, as the file has them now."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, Mapping

from extproc.tls.files import Followed


class HeaderFile(Mapping[str, str]):
    """The headers that ``read`` makes of a file; another reading takes the place of all of them at once."""

    def __init__(self, field: str, file: str | None, read: Callable[[str | None], Mapping[str, str]]) -> None:
        """``field`` of the configuration. ``read`` raises OSError or ValueError, and so does this; None: there is no file."""
        self._file = file
        self._read = read
        self.followed = [] if file is None else [Followed(field, [file], self._load, secret=[file])]
        """Its file."""
        self._now: Mapping[str, str] = {}
        self._load()

    def _load(self) -> None:
        self._now = self._read(self._file)

    def __getitem__(self, name: str) -> str:
        return self._now[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._now)

    def __len__(self) -> int:
        return len(self._now)

    def items(self) -> ItemsView[str, str]:
        """Those of one moment, whoever reads the file again meanwhile."""
        return self._now.items()
