"""Read an HTTP answer whole, but only as long as it is small enough."""

from __future__ import annotations

import aiohttp


class TooLargeError(Exception):
    """The answer is larger than it may be."""


async def read(response: aiohttp.ClientResponse, limit_bytes: int) -> bytes:
    """The body of ``response``. Raises TooLargeError, and closes the connection, beyond ``limit_bytes``."""
    pieces: list[bytes] = []
    size = 0
    async for piece in response.content.iter_any():
        size += len(piece)
        if size > limit_bytes:
            response.close()
            raise TooLargeError(f"over {limit_bytes} bytes")
        pieces.append(piece)
    return b"".join(pieces)
