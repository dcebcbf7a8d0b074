"""Endpoints in a file that is watched, however it is replaced: by a rename, by switching a symbolic link, or in place."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from extproc.discovery.listing import endpoint_set
from extproc.discovery.source import SourceError
from extproc.routing.endpoint_spec import EndpointSet, EndpointSpec
from workers.yaml_lines import FaultError, decode

POLL_S: Final = 0.5
"""How often the file's state is asked for. Asking works on every file system, network mounts included; being told does not."""

MAX_FILE_BYTES: Final = 8 << 20

_State = tuple[int, int, int, int, int]
_ABSENT: _State = (0, 0, 0, 0, 0)


class Listing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of the file: the same three lists as in the configuration."""

    prefill: Sequence[str | EndpointSpec] = ()
    decode: Sequence[str | EndpointSpec] = ()
    both: Sequence[str | EndpointSpec] = ()

    def __post_init__(self) -> None:
        """Raise ListingError where a worker cannot be used."""
        self.endpoints()

    def endpoints(self) -> EndpointSet:
        """The three lists as one set."""
        return endpoint_set(self.prefill, self.decode, self.both)


def read_listing(text: str, *, source: str) -> EndpointSet:
    """YAML or JSON text -> EndpointSet. Raises SourceError with ``source``, the line, the field and why."""
    try:
        return decode(text, Listing, source=source).endpoints()
    except FaultError as error:
        raise SourceError(str(error)) from error


class WatchedFile:
    """A source that is a file. Its state (inode, size, times) is polled, and the file read when that has changed."""

    kind = "file"

    def __init__(self, path: Path, *, poll_s: float = POLL_S) -> None:
        self._path = path
        self._poll_s = poll_s
        self._seen: _State | None = None

    @property
    def name(self) -> str:
        """The path."""
        return str(self._path)

    async def look(self) -> EndpointSet:
        """What the file says. Raises SourceError: not there, too large, not YAML, not a list of workers."""
        # Reading a long YAML file takes a good part of a second.
        return await asyncio.to_thread(self._read)

    async def pause(self) -> None:
        """Until the file is another one than was read last, and was left alone for one poll."""
        before = self._seen
        while True:
            await asyncio.sleep(self._poll_s)
            now = await asyncio.to_thread(self._state)
            # A file that still changes is being written in place: it is read when the writer is done.
            if now == before and now != self._seen:
                return
            before = now

    def _state(self) -> _State:
        try:
            return _state(self._path.stat())
        except OSError:
            return _ABSENT

    def _read(self) -> EndpointSet:
        self._seen = _ABSENT
        try:
            with self._path.open("rb") as file:
                state = _state(os.fstat(file.fileno()))
                raw = file.read(MAX_FILE_BYTES + 1)
                # Taken before the reading, so that a change during it is a change for the next poll.
                self._seen = state
        except OSError as error:
            raise SourceError(f"{self._path}: {error.strerror or error}") from error
        if len(raw) > MAX_FILE_BYTES:
            raise SourceError(f"{self._path}: larger than {MAX_FILE_BYTES} bytes")
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            line = raw.count(b"\n", 0, error.start) + 1
            raise SourceError(f"{self._path}:{line}: not UTF-8") from error
        return read_listing(text, source=str(self._path))


def _state(found: os.stat_result) -> _State:
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
