"""Run one prefill call: client, limits, cancellation, error mapping.

The call goes to the worker, or to Envoy's loopback listener with the worker's address in the destination header. Cancelling
it closes the connection at once, which makes the engine drop the prefill.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from extproc.config import Address, Prefill
from extproc.errors import ApiError, RelayedError
from extproc.headers import DESTINATION_HEADER, ORIGIN_HEADER, POOL_HEADER
from extproc.http1 import request
from extproc.http1.connection import Answer, Limits, Target
from extproc.http1.errors import ConnectError, HttpError, RefusedError, TooLargeError
from extproc.http1.pool import Exchange, Pool, Settings
from extproc.tls.workers import PLAIN, WorkerLink

# uvicorn, the engine's server, closes a connection after 5 s of silence; a call sent just then would break.
_KEEPALIVE_S = 4.0

_MOST_WAYS = 4096
"""How many heads are kept; a fleet that changes would add to them for ever."""


class BusyError(ApiError):
    """The worker turned the prompt away because it has enough to do. Another may take it, and it is no failure of this one."""


class _Way(NamedTuple):
    """To one path of one worker."""

    target: Target
    start: bytes
    """The part of the head that never changes."""


class PrefillClient:
    """Calls prefill workers. Use as an async context manager."""

    def __init__(
        self, settings: Prefill, link: WorkerLink = PLAIN, pool_of: Callable[[str], str | None] = lambda _worker: None
    ) -> None:
        """``link`` holds for workers, not for Envoy's listener, which is on this machine. ``pool_of``: the pool of a worker, by
        which that listener chooses its cluster; None: there are no pools."""
        self._settings = settings
        self._link = link
        self._via = None if settings.via == "direct" else Address.parse(settings.via)
        self._pool_of = pool_of
        # What a request carries besides; a client's header of the same name does not count.
        self._own = frozenset(
            ("accept", "content-type") if self._via is None else ("accept", "content-type", DESTINATION_HEADER, POOL_HEADER)
        )
        self._ways: dict[tuple[str, str, str | None], _Way] = {}
        self.in_flight = 0
        """Calls."""

    async def __aenter__(self) -> PrefillClient:
        self.pool = Pool(
            Settings(connect_s=self._settings.connect_timeout_s, idle_s=_KEEPALIVE_S),
            Limits(body_bytes=self._settings.max_reply_bytes),
            mark=ORIGIN_HEADER.encode(),
            tls=self._link if self._via is None and self._link.context is not None else None,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.pool.close()

    async def run(self, worker: str, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
        """As :meth:`call`. It waits as long as the caller does."""
        return await self.call(worker, path, body, headers)

    def call(self, worker: str, path: str, body: bytes, headers: Mapping[str, str]) -> asyncio.Future[bytes]:
        """POST ``body`` to ``path`` of ``worker`` (``ip:port``); the body of its 200 answer.

        The request is written before this returns, if a connection is idle. There is no deadline: who awaits it has one.
        ``cancel()`` of what is returned closes the connection before it returns. It raises ApiError (429, 502, 504 of Envoy;
        500 for headers that cannot be sent), or RelayedError for the worker's own 4xx about the request.
        """
        call = _Call(self)
        try:
            if self.in_flight > self._settings.max_concurrent:
                raise ApiError("too_many_requests", f"{self.in_flight - 1} prefill calls are in flight already")
            pool = None if self._via is None else self._pool_of(worker)
            way = self._ways.get((worker, path, pool)) or self._way(worker, path, pool)
            head = request.finish(way.start, headers, self._own, len(body))
            call.under_way(self.pool.send(way.target, head, body, call))
        except ApiError as error:
            call.end_with(error)
        except HttpError as error:
            call.failed(error)
        except BaseException:
            call.cancel()
            raise
        return call

    def _way(self, worker: str, path: str, pool: str | None) -> _Way:
        fields = {"accept": "*/*", "content-type": "application/json"}
        if self._via is not None:
            fields[DESTINATION_HEADER] = worker
        if pool is not None:
            fields[POOL_HEADER] = pool
        try:
            address = self._via or Address.parse(worker)
        except ValueError as error:
            raise RefusedError(str(error)) from None
        target = Target(host=address.host.strip("[]"), port=address.port, path=address.path)
        host = str(address) if address.host else worker
        if len(self._ways) >= _MOST_WAYS:
            self._ways.clear()
        way = self._ways[worker, path, pool] = _Way(target, request.start(path, host, fields))
        return way


class _Call(asyncio.Future[bytes]):
    """A call that is in flight, from when it is made until it ends, whichever way."""

    def __init__(self, client: PrefillClient) -> None:
        super().__init__()
        self._client = client
        self._exchange: Exchange | None = None
        client.in_flight += 1

    def under_way(self, exchange: Exchange) -> None:
        """What is to be cancelled with it."""
        if not self.done():
            self._exchange = exchange

    def answered(self, answer: Answer) -> None:
        """See :class:`extproc.http1.connection.Reply`."""
        fault = None if answer.status == 200 else _fault(answer)
        if fault is not None:
            self.end_with(fault)
        elif self._end():
            self.set_result(answer.body)

    def failed(self, error: HttpError) -> None:
        """See :class:`extproc.http1.connection.Reply`."""
        if isinstance(error, TooLargeError):
            self.end_with(ApiError("prefill_failed", f"the prefill worker's answer is {error}"))
        elif isinstance(error, RefusedError):
            self.end_with(ApiError("internal_error", f"the prefill request cannot be sent: {error}"))
        elif isinstance(error, ConnectError):
            self.end_with(ApiError("prefill_unreachable", f"the prefill worker cannot be reached: {error}"))
        else:
            self.end_with(ApiError("prefill_unreachable", f"the prefill worker gave no answer that can be used: {error}"))

    def end_with(self, error: ApiError | RelayedError) -> None:
        """It failed."""
        if self._end():
            self.set_exception(error)

    def cancel(self, msg: Any | None = None) -> bool:
        """Close the connection, now."""
        exchange = self._exchange
        if not self._end():
            return False
        if exchange is not None:
            exchange.cancel()
        return super().cancel(msg)

    def _end(self) -> bool:
        """Count it out. False if that was done already."""
        if self.done():
            return False
        self._exchange = None
        self._client.in_flight -= 1
        return True


def _fault(answer: Answer) -> ApiError | RelayedError:
    """What an answer other than 200 means."""
    if answer.marked:  # of Envoy's loopback listener itself
        return _timeout() if answer.status == 504 else ApiError("prefill_unreachable", "the prefill worker cannot be reached")
    if 400 <= answer.status < 500 and answer.status != 429:
        content_type = b"application/json" if answer.content_type is None else answer.content_type
        return RelayedError(answer.status, content_type.decode("utf-8", "replace"), answer.body)
    kind = BusyError if answer.status == 429 else ApiError
    return kind("prefill_failed", f"the prefill worker answered {answer.status}")


def _timeout() -> ApiError:
    return ApiError("prefill_timeout", "the prefill worker did not answer in time")
