"""Asks the admin port of a running filter, for the commands that show what it says."""

from __future__ import annotations

import io

import aiohttp
import msgspec

_TIMEOUT_S = 30.0
_ANSWER_MAX_BYTES = 256 << 20
"""A snapshot of a thousand workers with its index has about 6 MB."""


class CommandError(Exception):
    """The command cannot do what it was asked for; the message says why."""


async def call(admin: str, method: str, path: str, body: bytes | None, *, timeout_s: float = _TIMEOUT_S) -> bytes:
    """Body of a 200. ``admin``: ``http://host:port``, ``host:port`` or ``unix:/path``. Raises CommandError."""
    unix = admin.startswith("unix:")
    base = "http://filter" if unix else admin.rstrip("/") if "://" in admin else f"http://{admin}"
    try:
        connector = aiohttp.UnixConnector(admin.removeprefix("unix:")) if unix else None
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
            session.request(method, base + path, data=None if body is None else io.BytesIO(body)) as response,
        ):
            answer = await _bounded(response, admin)
    except (aiohttp.ClientError, ValueError, OSError) as error:
        why = f"no answer within {timeout_s:g} s" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
        raise CommandError(f"{admin}: the admin port of the filter cannot be asked: {why}") from None
    if response.status != 200:
        raise CommandError(f"{admin}: {_complaint(answer) or f'it answered {response.status} to {path}'}")
    return answer


async def _bounded(response: aiohttp.ClientResponse, admin: str) -> bytes:
    parts, size = [], 0
    async for part in response.content.iter_any():
        parts.append(part)
        size += len(part)
        if size > _ANSWER_MAX_BYTES:
            raise CommandError(f"{admin}: the answer is over {_ANSWER_MAX_BYTES} bytes")
    return b"".join(parts)


class _Error(msgspec.Struct):
    message: str
    code: str


class _Complaint(msgspec.Struct):
    error: _Error


def _complaint(answer: bytes) -> str | None:
    try:
        error = msgspec.json.decode(answer, type=_Complaint).error
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return f"{error.code}: {error.message}"
