"""What an earlier cache server has left on the disk tier, and keeping the tier within its size across restarts.

LMCache finds the chunks of an earlier run again, but neither counts nor evicts them: without this, a tier of N GiB would grow
by up to N GiB with every restart.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

CHUNKS = "*.data"
"""The files of LMCache's tier, one a chunk, all in one folder."""

KEPT_SHARE = 0.5
"""Of the tier, for what earlier runs left: the other half is what the new run may fill and evict."""


@dataclass(frozen=True)
class Leftovers:
    """What :func:`trim` found and did, in bytes."""

    kept_bytes: int
    removed_bytes: int


def used_bytes(folder: Path) -> int:
    """What is on the tier; 0 where there is no folder yet. Raises OSError if it cannot be read."""
    return sum(size for _, size, _ in _chunks(folder))


def room_bytes(folder: Path) -> int:
    """What the tier could grow to: free space of its disk and what it holds already. Raises OSError."""
    existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.is_dir())
    return shutil.disk_usage(existing).free + used_bytes(folder)


def trim(folder: Path, tier_bytes: int) -> Leftovers:
    """Remove chunks, those not written for longest first, until the rest takes :data:`KEPT_SHARE` of the tier at the most.

    No cache server may be running on the folder. Raises OSError.
    """
    most_bytes = int(tier_bytes * KEPT_SHARE)
    kept_bytes = removed_bytes = 0
    for _, size, chunk in sorted(_chunks(folder), reverse=True):
        if kept_bytes + size <= most_bytes:
            kept_bytes += size
        else:
            chunk.unlink(missing_ok=True)
            removed_bytes += size
    return Leftovers(kept_bytes, removed_bytes)


def _chunks(folder: Path) -> list[tuple[float, int, Path]]:
    """When each was written, its size in bytes, and its path."""
    found = []
    for chunk in folder.glob(CHUNKS):
        status = chunk.stat()
        found.append((status.st_mtime, status.st_size, chunk))
    return found
