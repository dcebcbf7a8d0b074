"""Run one prefill call: client, deadline, limits, cancellation, error mapping.

The call goes to the worker, or to Envoy's loopback listener with the worker's address in the destination header. Cancelling
the task that awaits it closes the connection at once, which makes the engine drop the prefill.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Mapping

import aiohttp

from extproc import bounded
from extproc.config import Address, Prefill
from extproc.errors import ApiError, RelayedError
from extproc.headers import DESTINATION_HEADER, ORIGIN_HEADER

# uvicorn, the engine's server, closes a connection after 5 s of silence; a call sent just then would break.
_KEEPALIVE_S = 4.0


class PrefillClient:
    """Calls prefill workers. Use as an async context manager."""

    def __init__(self, settings: Prefill) -> None:
        self._settings = settings
        self._via = None if settings.via == "direct" else Address.parse(settings.via)
        self._in_flight = 0

    async def __aenter__(self) -> PrefillClient:
        if self._via is not None and self._via.path:
            connector: aiohttp.BaseConnector = aiohttp.UnixConnector(self._via.path, limit=0, keepalive_timeout=_KEEPALIVE_S)
        else:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S)
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._settings.connect_timeout_s),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept-Encoding"),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    def call(self, worker: str, path: str, body: bytes, headers: Mapping[str, str]) -> asyncio.Future[bytes]:
        """Start :meth:`run`; cancelling what is returned closes the connection at once."""
        return asyncio.ensure_future(self.run(worker, path, body, headers))

    async def run(self, worker: str, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
        """POST ``body`` to ``path`` of ``worker`` (``ip:port``); the body of its 200 answer.

        It waits as long as the caller does. Raises ApiError (429, 502, 504 of Envoy), or RelayedError for the worker's own 4xx
        about the request.
        """
        if self._in_flight >= self._settings.max_concurrent:
            raise ApiError("too_many_requests", f"{self._in_flight} prefill calls are in flight already")
        self._in_flight += 1
        try:
            return await self._call(worker, path, body, headers)
        except bounded.TooLargeError as error:
            raise ApiError("prefill_failed", f"the prefill worker's answer is {error}") from None
        except aiohttp.ConnectionTimeoutError:  # first: aiohttp's timeouts are both ClientErrors and TimeoutErrors
            raise _unreachable() from None
        except (aiohttp.ClientError, OSError) as error:
            raise ApiError("prefill_unreachable", f"the prefill worker cannot be reached: {type(error).__name__}") from error
        finally:
            self._in_flight -= 1

    async def _call(self, worker: str, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
        base = f"http://{worker}" if self._via is None or self._via.path else f"http://{self._via}"
        pin = {} if self._via is None else {DESTINATION_HEADER: worker}
        async with self._session.post(
            base + path,
            data=io.BytesIO(body),  # written in pieces: a large body must not hold up the event loop
            headers={**headers, "content-type": "application/json", **pin},
            allow_redirects=False,
        ) as response:
            reply = await bounded.read(response, self._settings.max_reply_bytes)
            if response.status == 200:
                return reply
            if response.headers.get(ORIGIN_HEADER):
                raise _ENVOY_FAULTS.get(response.status, _unreachable)()
            if 400 <= response.status < 500 and response.status != 429:
                raise RelayedError(response.status, response.headers.get("content-type", "application/json"), reply)
            raise ApiError("prefill_failed", f"the prefill worker answered {response.status}")


def _unreachable() -> ApiError:
    return ApiError("prefill_unreachable", "the prefill worker cannot be reached")


def _timeout() -> ApiError:
    return ApiError("prefill_timeout", "the prefill worker did not answer in time")


_ENVOY_FAULTS = {504: _timeout}
