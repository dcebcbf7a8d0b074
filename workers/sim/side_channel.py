"""The wire between workers, in place of NIXL: length-prefixed msgpack over TCP, at the address that a handoff names.

A decode worker reads blocks, releases handoffs and sends heartbeats; each answer says which engine gave it. One connection a
pair of workers, requests answered in any order.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import msgspec

from workers.sim.listening import close_listener

_MAX_FRAME_BYTES = 1 << 30
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode

Handler = Callable[[str, list[Any]], Any]
"""Operation and arguments -> result. Raises ChannelError for what it does not know."""


class ChannelError(Exception):
    """The other side is unreachable, went away, or could not do what it was asked."""


async def _read_frame(reader: asyncio.StreamReader) -> list[Any]:
    size = int.from_bytes(await reader.readexactly(4), "big")
    if size > _MAX_FRAME_BYTES:
        raise ChannelError(f"a frame of {size} bytes")
    frame = _decode(await reader.readexactly(size))
    if not isinstance(frame, list) or len(frame) < 2:
        raise ChannelError("not a frame of ours")
    return frame


def _write_frame(writer: asyncio.StreamWriter, frame: list[Any]) -> None:
    data = _encode(frame)
    writer.write(len(data).to_bytes(4, "big") + data)


class ChannelServer:
    """Answers the other workers. Can be closed (dead) and opened again on the same port."""

    def __init__(self, handler: Handler, host: str, port: int) -> None:
        self._handler = handler
        self.host = host
        self.port = port
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def open(self) -> None:
        """Listen. Port 0 picks one, and keeps it."""
        if self._server is None:
            self._server = await asyncio.start_server(self._serve, self.host, self.port)
            self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stop listening and drop every connection."""
        server, self._server = self._server, None
        if server is not None:
            await close_listener(server)
        for writer in tuple(self._writers):
            writer.transport.abort()
        # One turn for the connections' tasks to see it.
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                number, operation, *arguments = await _read_frame(reader)
                if self._server is None:
                    return  # accepted while it was being closed
                try:
                    result = self._handler(operation, arguments)
                except (ChannelError, ValueError, TypeError) as error:
                    _write_frame(writer, [number, False, str(error)])
                else:
                    _write_frame(writer, [number, True, result])
                await writer.drain()
        except (OSError, EOFError, ChannelError, msgspec.DecodeError, ValueError):
            pass
        finally:
            self._writers.discard(writer)
            writer.transport.abort()


class _Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._number = 0
        self._task = asyncio.create_task(self._receive(reader))

    @property
    def alive(self) -> bool:
        return not self._task.done()

    def close(self) -> None:
        self._task.cancel()
        self._writer.transport.abort()

    async def call(self, operation: str, *arguments: Any) -> Any:
        if not self.alive:
            raise ChannelError("the connection was lost")
        self._number += 1
        number = self._number
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending[number] = future
        try:
            _write_frame(self._writer, [number, operation, *arguments])
            return await future
        finally:
            self._pending.pop(number, None)

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                number, good, result = await _read_frame(reader)
                future = self._pending.get(number)
                if future is None or future.done():
                    continue
                if good:
                    future.set_result(result)
                else:
                    future.set_exception(ChannelError(str(result)))
        except (OSError, EOFError, ChannelError, msgspec.DecodeError, ValueError):
            pass
        finally:
            self._writer.transport.abort()
            for future in self._pending.values():
                if not future.done():
                    future.set_exception(ChannelError("the connection was lost"))


class ChannelClient:
    """Connections to the side channels of other workers."""

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._connections: dict[tuple[str, int], _Connection] = {}
        self._connecting: dict[tuple[str, int], asyncio.Task[_Connection]] = {}

    async def call(self, host: str, port: int, operation: str, *arguments: Any) -> Any:
        """One request. Raises ChannelError."""
        try:
            async with asyncio.timeout(self._timeout_s):
                connection = await self._connection(host, port)
                return await connection.call(operation, *arguments)
        except (OSError, TimeoutError, ValueError, OverflowError) as error:
            raise ChannelError(f"{host}:{port}: {error or type(error).__name__}") from None

    async def close(self) -> None:
        """Drop all connections."""
        for task in tuple(self._connecting.values()):
            task.cancel()
        await asyncio.gather(*self._connecting.values(), return_exceptions=True)
        connections, self._connections = list(self._connections.values()), {}
        for connection in connections:
            connection.close()
            with contextlib.suppress(asyncio.CancelledError):
                await connection._task

    async def _connection(self, host: str, port: int) -> _Connection:
        key = (host, port)
        connection = self._connections.get(key)
        if connection is not None and connection.alive:
            return connection
        pending = self._connecting.get(key)
        if pending is None:
            pending = asyncio.create_task(self._connect(key))
            # Those who wait for it may all have given up before it fails.
            pending.add_done_callback(lambda task: task.cancelled() or task.exception())
            self._connecting[key] = pending
        return await asyncio.shield(pending)

    async def _connect(self, key: tuple[str, int]) -> _Connection:
        try:
            async with asyncio.timeout(self._timeout_s):
                reader, writer = await asyncio.open_connection(*key)
            self._connections[key] = _Connection(reader, writer)
            return self._connections[key]
        finally:
            self._connecting.pop(key, None)
