"""The filter's side of the watching of streams: the process that does it, how many are watched at once, and what it reports."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from typing import Any, Final

import msgspec

from extproc.config import Tls
from extproc.observe.logs import Logger
from extproc.observe.sighting import Sighting
from extproc.transport.choose import Kind

_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 30.0
_STOP_S: Final = 3.0
_LINE_BYTES: Final = 64 << 10

_decode = msgspec.json.Decoder(Sighting).decode


class Watcher:
    """Runs the process, starts it again if it dies, and hands on what it says."""

    def __init__(
        self,
        listen: str,
        *,
        max_streams: int,
        transport: Kind,
        told: Callable[[Sighting], None],
        log: Logger,
        tls: Tls | None = None,
    ) -> None:
        """``tls``: what Envoy is to meet there, with its mode given; None: plaintext."""
        self._listen = listen
        self._tls = tls
        self._transport = transport
        self._max_streams = max_streams
        self._told = told
        self._log = log
        self.running = False
        self.restarts = 0
        self.refused = 0
        """Streams that were drawn, and not watched because so many were already, or because the process is away."""
        self._open: set[str] = set()
        self._most = max_streams
        self.elsewhere = False
        """Another process of the same filter runs it, and passes on what it says."""

    def share(self, processes: int, *, here: bool) -> None:
        """So many use it, of which only one runs it."""
        self._most = max(1, self._max_streams // processes)
        self.elsewhere = self.running = not here

    def take(self, key: str) -> bool:
        """Whether one more stream can be watched; whoever gets it calls :meth:`leave` when it is over."""
        if not self.running or len(self._open) >= self._most:
            self.refused += 1
            return False
        self._open.add(key)
        return True

    def leave(self, key: str) -> None:
        """The request is over. Idempotent."""
        self._open.discard(key)

    @property
    def open_streams(self) -> int:
        """Streams that are watched."""
        return len(self._open)

    async def run(self) -> None:
        """Keep the process running until cancelled."""
        pause_s = _FIRST_PAUSE_S
        loop = asyncio.get_running_loop()
        while True:
            started_s = loop.time()
            code = await self._once()
            self.restarts += 1
            if loop.time() - started_s > 10 * _LONGEST_PAUSE_S:
                pause_s = _FIRST_PAUSE_S
            self._log.warning("stream_watch_ended", status=code, again_in_s=pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _once(self) -> int:
        """One life of the process; its exit status."""
        # Not the event loop's own way: uvloop forks, which a process with gRPC's threads may not survive on the child's side.
        process = await asyncio.to_thread(self._start)
        assert process.stdin is not None and process.stdout is not None
        reader = asyncio.StreamReader(limit=_LINE_BYTES)
        pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), process.stdout
        )
        self.running = True
        try:
            while line := await reader.readline():
                self._hear(line)
        finally:
            self.running = False
            pipe.close()
            process.stdin.close()
            status = await asyncio.to_thread(_end, process)
        return status

    def _start(self) -> subprocess.Popen[bytes]:
        module: tuple[str, ...] = ("-m", "extproc.observe.stream_watch", self._listen, str(self._max_streams), self._transport)
        if self._tls is not None:
            module = (*module, msgspec.json.encode(self._tls).decode())
        return subprocess.Popen(
            (sys.executable, *module),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # it ends with its standard input, not with a signal that is meant for the filter
        )

    def _hear(self, line: bytes) -> None:
        try:
            self._told(_decode(line))
        except msgspec.DecodeError as error:
            self._log.error("stream_watch_garbled", error=str(error))

    def status(self) -> dict[str, Any]:
        """For `/healthz`."""
        return {"running": self.running, "watched": len(self._open), "restarts": self.restarts, "not_watched": self.refused}


def _end(process: subprocess.Popen[bytes]) -> int:
    """Wait for it to end by itself, or else end it."""
    try:
        return process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
