"""What is kept, within one number of bytes: pieces of texts with their token ids. Shared by threads."""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from typing import Final

_ENTRY_BYTES: Final = 220
"""What an entry takes beside its ids: key, array, place in the dict."""


class Pieces:
    """Text (by its hash) -> token ids. The least recently used go first."""

    def __init__(self, max_bytes: int) -> None:
        self._max = max_bytes
        self._lock = threading.Lock()
        self._ids: OrderedDict[bytes, array[int]] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._ids)

    def get(self, key: bytes) -> array[int] | None:
        """Not to be changed."""
        with self._lock:
            found = self._ids.get(key)
            if found is not None:
                self._ids.move_to_end(key)
            return found

    def put(self, key: bytes, ids: array[int]) -> None:
        """Keep them, if they are not more than all that may be kept."""
        size = _ENTRY_BYTES + len(ids) * ids.itemsize
        if size > self._max:
            return
        with self._lock:
            before = self._ids.pop(key, None)
            if before is not None:
                self.bytes -= _ENTRY_BYTES + len(before) * before.itemsize
            self._ids[key] = ids
            self.bytes += size
            while self.bytes > self._max:
                _, gone = self._ids.popitem(last=False)
                self.bytes -= _ENTRY_BYTES + len(gone) * gone.itemsize
