"""The datagram socket between processes: sends without ever waiting, and hands on what comes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from enum import Enum
from pathlib import Path

from extproc.processes.member import Member

_LARGEST_BYTES = 256 << 10


class Sent(Enum):
    """What became of a datagram."""

    YES = "yes"
    FULL = "full"
    """The sibling has not read the last ones yet (``net.unix.max_dgram_qlen``, 10 by custom)."""
    AWAY = "away"
    """Nobody has the socket open."""


class Post:
    """The socket of one process, from :meth:`open` to :meth:`close`."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._socket: socket.socket | None = None

    def open(self, receive: Callable[[bytes], None]) -> None:
        """Begin to receive. The event loop must be running. Raises OSError."""
        path = Path(self._member.socket_of(self._member.index))
        path.unlink(missing_ok=True)  # of a former life of this process
        made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        made.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            made.setsockopt(socket.SOL_SOCKET, option, 1 << 20)
        made.bind(str(path))
        self._socket = made
        asyncio.get_running_loop().add_reader(made.fileno(), self._read, made, receive)

    def send(self, index: int, data: bytes) -> Sent:
        """To one of the siblings."""
        if self._socket is None:
            return Sent.AWAY
        try:
            self._socket.sendto(data, self._member.socket_of(index))
        except BlockingIOError:
            return Sent.FULL
        except (ConnectionRefusedError, FileNotFoundError):
            return Sent.AWAY
        except OSError:
            return Sent.FULL  # ENOBUFS: the kernel has no memory for it at the moment
        return Sent.YES

    def close(self) -> None:
        """Receive no more; siblings see that at once."""
        made, self._socket = self._socket, None
        if made is not None:
            asyncio.get_running_loop().remove_reader(made.fileno())
            made.close()
            with contextlib.suppress(OSError):
                Path(self._member.socket_of(self._member.index)).unlink()

    @staticmethod
    def _read(made: socket.socket, receive: Callable[[bytes], None]) -> None:
        # One at a time: mostly there is no more, and to find that out costs as much as to be called again.
        with contextlib.suppress(BlockingIOError):
            receive(made.recv(_LARGEST_BYTES))
