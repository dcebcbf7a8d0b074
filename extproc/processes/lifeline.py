"""The socket between a process and its parent: one byte a message."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

DRAIN = b"d"
"""To the process: finish what you have, and end."""
CUT = b"c"
"""To the process: end now."""
SERVING = b"s"
"""From the process: it takes requests."""


class Lifeline:
    """The process's end. Needs a running event loop."""

    def __init__(self, descriptor: int, *, on_drain: Callable[[], None], on_cut: Callable[[], None]) -> None:
        """``on_drain`` is called when the parent says so, and when it is gone. Raises OSError if there is no such socket."""
        self._socket = socket.socket(fileno=descriptor)
        self._socket.setblocking(False)
        self._socket.set_inheritable(False)  # what this process starts must not keep it open
        self._on_drain = on_drain
        self._on_cut = on_cut
        asyncio.get_running_loop().add_reader(descriptor, self._read)

    def serving(self) -> None:
        """Tell the parent."""
        with contextlib.suppress(OSError):
            self._socket.send(SERVING)

    def close(self) -> None:
        """Hear no more."""
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()

    def _read(self) -> None:
        try:
            said = self._socket.recv(16)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if not said:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
        if not said or DRAIN in said:
            self._on_drain()
        if CUT in said:
            self._on_cut()
