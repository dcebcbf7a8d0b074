"""Clients that send what no library would: HTTP/1.1 as bytes, and HTTP/2 without its checks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import h2.config
import h2.connection
import h2.events
import httptools


class _Answer:
    """Of the parser: whether the final answer is there."""

    def __init__(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.whole = False

    def on_message_complete(self) -> None:
        self.whole = self.parser.get_status_code() >= 200 or self.parser.get_status_code() == 101


async def http1(port: int, request: bytes, timeout_s: float = 20.0) -> bytes:
    """The answer, on a connection of its own; nothing, if it is closed without one."""
    answer, read = _Answer(), b""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(timeout_s):
            writer.write(request)
            await writer.drain()
            while not answer.whole and (piece := await reader.read(65536)):
                read += piece
                answer.parser.feed_data(piece)
            return read
    except ConnectionError:
        return read
    except httptools.HttpParserUpgrade:
        return read
    except TimeoutError:
        raise AssertionError(f"no answer to {request[:200]!r}") from None
    finally:
        writer.close()


async def http2(
    port: int,
    headers: Sequence[tuple[str, str]],
    body: bytes,
    trailers: Sequence[tuple[str, str]] = (),
    timeout_s: float = 20.0,
) -> int | None:
    """The status of the answer; None: the stream was reset, or the connection closed."""
    config = h2.config.H2Configuration(
        client_side=True, validate_outbound_headers=False, normalize_outbound_headers=False, header_encoding="utf-8"
    )
    connection = h2.connection.H2Connection(config)
    connection.initiate_connection()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    status: int | None = None
    try:
        async with asyncio.timeout(timeout_s):
            connection.send_headers(1, list(headers))
            connection.send_data(1, body, end_stream=not trailers)
            if trailers:
                connection.send_headers(1, list(trailers), end_stream=True)
            writer.write(connection.data_to_send())
            while data := await reader.read(65536):
                for event in connection.receive_data(data):
                    if isinstance(event, h2.events.ResponseReceived):
                        status = int(dict(event.headers)[":status"])
                    elif isinstance(event, h2.events.DataReceived):
                        connection.acknowledge_received_data(event.flow_controlled_length, 1)
                    elif isinstance(event, h2.events.StreamEnded | h2.events.StreamReset | h2.events.ConnectionTerminated):
                        return status
                writer.write(connection.data_to_send())
            return status
    except ConnectionError:
        return status
    except TimeoutError:
        raise AssertionError(f"no answer to {headers!r}, {trailers!r}") from None
    finally:
        writer.close()
