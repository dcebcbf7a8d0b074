"""Names that nobody can guess: random, from a supply fetched for many at once, since each fetch is a call of the system."""

from __future__ import annotations

import os
from typing import Final

_ID_BYTES: Final = 16
_FETCHED: Final = 256
"""Names that one call of the system is good for."""


class Ids:
    """Makes them. Not for several threads."""

    def __init__(self) -> None:
        self._supply = ""
        self._process = 0

    def fresh(self) -> str:
        """32 hexadecimal digits, 128 random bits. A process that was forked off makes others than its parent."""
        process = os.getpid()
        if not self._supply or process != self._process:
            self._supply, self._process = os.urandom(_ID_BYTES * _FETCHED).hex(), process
        taken, self._supply = self._supply[: 2 * _ID_BYTES], self._supply[2 * _ID_BYTES :]
        return taken


ids: Final = Ids()
"""The one of this process."""
