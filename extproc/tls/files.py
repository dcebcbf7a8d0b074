"""Files with certificates and keys, which change while we run: by a rename, by switching a symbolic link, or in place.

Their state is asked for, not watched: that works on every file system, mounts of secrets included.
"""

from __future__ import annotations

import asyncio
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from extproc.observe.logs import Logger

POLL_S: Final = 1.0
"""How often, and so how late a change may be seen."""

RELOADED: Final = "reloaded"
FAILED: Final = "failed"

_State = tuple[tuple[int, int, int, int] | None, ...]


def open_to_others(path: str) -> str | None:
    """Why a file with a secret is not as it should be: others may read it. None: they may not, or it is not there."""
    try:
        mode = Path(path).stat().st_mode
    except OSError:
        return None
    if mode & stat.S_IROTH:
        return f"{path} can be read by every user of this machine (mode {stat.S_IMODE(mode):03o}): chmod 600 or 640"
    return None


def read_bounded(path: str, limit_bytes: int) -> bytes:
    """The content. Raises OSError with the path, also beyond ``limit_bytes``."""
    with Path(path).open("rb") as file:
        raw = file.read(limit_bytes + 1)
    if len(raw) > limit_bytes:
        raise OSError(f"{path}: over {limit_bytes} bytes")
    return raw


class Followed:
    """Files that belong together, such as a certificate and its key. ``load`` is called when any of them has changed."""

    def __init__(self, name: str, paths: Sequence[str], load: Callable[[], None], *, secret: Sequence[str] = ()) -> None:
        """``load`` raises OSError or ValueError where the files cannot be used; what it had made before then stays.

        ``secret``: those that nobody else should read.
        """
        self.name = name
        self.paths = tuple(paths)
        self.load = load
        self.secret = tuple(secret)
        self.fault: str | None = None
        """Why what the files say now is not used."""
        self._loaded = self.state()

    def state(self) -> _State:
        """What changes when a file does."""
        return tuple(_state(path) for path in self.paths)

    def look(self) -> str | None:
        """Load what has changed: :data:`RELOADED`, or :data:`FAILED`, once for each faulty state. None: nothing has changed."""
        now = self.state()
        if now == self._loaded:
            return None
        self._loaded = now  # a faulty state is tried once, not every second
        try:
            self.load()
        except (OSError, ValueError) as error:
            self.fault = str(error)
            return FAILED
        self.fault = None
        return RELOADED


class FileFollower:
    """Looks at all of them, on a steady beat."""

    def __init__(
        self, followed: Sequence[Followed], log: Logger, on_outcome: Callable[[str, str], None], *, poll_s: float = POLL_S
    ) -> None:
        """``on_outcome(name, outcome)`` is called for every change, to be counted."""
        self._followed: tuple[Followed, ...] = ()
        self._log = log
        self._on_outcome = on_outcome
        self._poll_s = poll_s
        self.follow(*followed)

    def follow(self, *more: Followed) -> None:
        """These, too. Before :meth:`run`."""
        self._followed += more
        for each in more:
            self._warn(each)

    async def run(self) -> None:
        """Until cancelled."""
        while self._followed:
            await asyncio.sleep(self._poll_s)
            for each in self._followed:
                outcome = await asyncio.to_thread(each.look)
                if outcome is None:
                    continue
                self._on_outcome(each.name, outcome)
                if outcome == FAILED:
                    self._log.error("secrets_not_reloaded", name=each.name, why=each.fault, what="those from before are used")
                else:
                    self._log.info("secrets_reloaded", name=each.name)
                self._warn(each)
        await asyncio.Event().wait()

    def status(self) -> dict[str, str]:
        """Name -> what is wrong with it now."""
        return {each.name: each.fault for each in self._followed if each.fault is not None}

    def _warn(self, each: Followed) -> None:
        for path in each.secret:
            why = open_to_others(path)
            if why is not None:
                self._log.warning("secret_open_to_others", name=each.name, why=why)


def _state(path: str) -> tuple[int, int, int, int] | None:
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
