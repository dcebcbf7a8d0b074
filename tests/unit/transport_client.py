"""A gRPC client of bare frames on a real socket, for what no library would send."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import hpack

from extproc.transport.http2 import frames
from extproc.transport.http2.hpack import Field, encode
from tests.unit.transport_peer import REQUEST, Sent, data

PATH = "/x.Y/Z"


def framed(message: bytes, flag: int = 0) -> bytes:
    """A message with gRPC's prefix."""
    return bytes((flag,)) + len(message).to_bytes(4, "big") + message


class Client:
    """One connection. What comes is read when a test asks for it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.decoder = hpack.Decoder()
        self.next = 1

    @classmethod
    async def connect(cls, path: Path | str, settings: dict[int, int] | None = None) -> Client:
        client = cls(*await asyncio.open_unix_connection(str(path)))
        client.send(frames.PREFACE + frames.settings({frames.INITIAL_WINDOW_SIZE: 1 << 20, **(settings or {})}))
        client.send(frames.window_update(0, 1 << 24))
        return client

    def send(self, text: bytes) -> None:
        self.writer.write(text)

    def call(self, *messages: bytes, path: str = PATH, end: bool = False, more: tuple[Field, ...] = ()) -> int:
        """Begin a call. Its stream."""
        stream, self.next = self.next, self.next + 2
        fields = tuple((name, path.encode() if name == b":path" else value) for name, value in REQUEST)
        flags = frames.END_HEADERS | (frames.END_STREAM if end and not messages else 0)
        text = frames.frame(frames.HEADERS, flags, stream, encode((*fields, *more)))
        self.send(text + b"".join(data(stream, framed(each)) for each in messages))
        if end and messages:
            self.send(data(stream, end=True))
        return stream

    def message(self, stream: int, message: bytes, *, end: bool = False) -> None:
        """One in one frame."""
        self.send(data(stream, framed(message), end=end))

    def reset(self, stream: int) -> None:
        self.send(frames.rst_stream(stream, 8))

    async def frame(self) -> Sent:
        """The next frame that is neither SETTINGS nor a window of the connection. Raises IncompleteReadError at the end."""
        while True:
            high, low, kind, flags, stream = frames.HEAD.unpack(await self.reader.readexactly(frames.HEAD_BYTES))
            payload = await self.reader.readexactly(high << 16 | low)
            if kind != frames.SETTINGS and (kind != frames.WINDOW_UPDATE or stream):
                return Sent(kind, flags, stream, payload)

    def fields(self, sent: Sent) -> dict[str, str]:
        assert sent.kind == frames.HEADERS
        return dict(self.decoder.decode(sent.payload))

    async def answer(self, stream: int) -> tuple[list[bytes], dict[str, str]]:
        """All messages of an answer, and the headers that end it, those in front of the messages among them."""
        text, fields = b"", dict[str, str]()
        while True:
            sent = await self.frame()
            assert sent.stream == stream, f"another stream: {sent}"
            if sent.kind == frames.DATA:
                text += sent.payload
            elif sent.kind == frames.HEADERS:
                fields |= self.fields(sent)
                if sent.flags & frames.END_STREAM:
                    break
        messages = []
        while text:
            size = int.from_bytes(text[1:5], "big")
            messages.append(text[5 : 5 + size])
            text = text[5 + size :]
        return messages, fields

    async def ended(self) -> list[Sent]:
        """What comes until the server closes the connection."""
        found = []
        try:
            while True:
                found.append(await self.frame())
        except (asyncio.IncompleteReadError, ConnectionError):
            return found

    async def close(self) -> None:
        self.writer.close()
        with suppress(ConnectionError):
            await self.writer.wait_closed()
