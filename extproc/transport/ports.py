"""The addresses that a server listens at."""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path

_BACKLOG = 1024
_PROBE_TIMEOUT_S = 1.0


class Port:
    """A bound socket, and its file if it has one."""

    def __init__(self, bound: socket.socket, path: str | None) -> None:
        self.socket = bound
        self._path = path
        self._file = None if path is None else _identity(path)

    @property
    def number(self) -> int:
        """The TCP port; 1 for a Unix socket, as grpc has it."""
        return 1 if self._path is not None else int(self.socket.getsockname()[1])

    def remove_file(self) -> None:
        """Unless another process has put its own there."""
        if self._path is not None and self._file is not None and _identity(self._path) == self._file:
            Path(self._path).unlink(missing_ok=True)


def bind(address: str) -> Port:
    """``unix:PATH``, ``HOST:PORT`` or ``[IPv6]:PORT``. Raises RuntimeError if it cannot be used, or somebody listens there."""
    try:
        if address.startswith("unix:"):
            path = address.removeprefix("unix:")
            path = path.removeprefix("//") if path.startswith("///") else path
            return Port(_bind_unix(path), path)
        return Port(_bind_tcp(address), None)
    except (OSError, ValueError) as error:
        raise RuntimeError(f"cannot listen at {address}: {error}") from error


def _bind_unix(path: str) -> socket.socket:
    if not path:
        raise ValueError("no path")
    if _is_socket(path):
        if _answers(path):
            raise OSError(errno.EADDRINUSE, "somebody listens there")
        Path(path).unlink(missing_ok=True)  # left behind by a process that is gone
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    return _listen(bound, path)


def _bind_tcp(address: str) -> socket.socket:
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdecimal() or int(port) > 65_535:
        raise ValueError("it is neither unix:PATH nor HOST:PORT")
    host = host.removeprefix("[").removesuffix("]")
    family, kind, protocol, _, where = socket.getaddrinfo(
        host or None, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    bound = socket.socket(family, kind, protocol)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # A peer's machine that is switched off says nothing: the kernel finds out.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return _listen(bound, where)


def _listen(bound: socket.socket, where: object) -> socket.socket:
    try:
        bound.setblocking(False)
        bound.bind(where)  # type: ignore[arg-type]
        bound.listen(_BACKLOG)
    except BaseException:
        bound.close()
        raise
    return bound


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.stat(path).st_mode)  # noqa: PTH116
    except FileNotFoundError:
        return False


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_TIMEOUT_S)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True  # a full queue, for example: somebody is there
        return True


def _identity(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)  # noqa: PTH116
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns  # a number is given to another file soon
