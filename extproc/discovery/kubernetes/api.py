"""The API server over HTTP: one page of a list, one watch. Bounded in time and bytes; what goes wrong is told to people.

Concepts are those of "Kubernetes API Concepts" (efficient detection of changes, chunked lists, bookmarks, 410 Gone).
"""

from __future__ import annotations

import asyncio
import math
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import aiohttp
import msgspec

from extproc import __version__, bounded
from extproc.discovery.kubernetes.access import Access
from extproc.discovery.kubernetes.objects import Meta

MAX_PAGE_BYTES: Final = 16 << 20
"""One page of a list, as JSON."""
MAX_LINE_BYTES: Final = 4 << 20
"""One event of a watch. etcd takes no object over 1.5 MB, and as JSON it may grow a little."""
MAX_RETRY_AFTER_S: Final = 60.0
"""A longer wish of the server is not followed."""

_CONNECT_S = 5.0
_MAX_STATUS_BYTES = 64 << 10
_MAX_SHOWN = 300
_KEEPALIVE = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
"""A peer that is silently gone is noticed in 30 s, also while no event is due."""


class Collection(msgspec.Struct, frozen=True):
    """What is listed and watched."""

    group: str
    """``""`` is the core group."""
    version: str
    resource: str
    namespace: str
    labels: str | None = None
    """Label selector."""
    fields: str | None = None
    """Field selector."""

    @property
    def path(self) -> str:
        """On the server."""
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        return f"{root}/namespaces/{self.namespace}/{self.resource}"

    def query(self) -> dict[str, str]:
        """Its selectors."""
        return {
            **({"labelSelector": self.labels} if self.labels is not None else {}),
            **({"fieldSelector": self.fields} if self.fields is not None else {}),
        }

    def __str__(self) -> str:
        return f"{self.resource}{f'.{self.group}' if self.group else ''} in namespace {self.namespace}"


class ApiError(Exception):
    """The server did not do it. ``outcome`` is a word for metrics; ``retry_after_s``: what it asked for."""

    def __init__(self, outcome: str, why: str, *, retry_after_s: float = 0.0) -> None:
        super().__init__(why)
        self.outcome = outcome
        self.retry_after_s = retry_after_s


class GoneError(ApiError):
    """What was asked for is no longer in the server's history (410): list again."""

    def __init__(self, why: str) -> None:
        super().__init__("gone", why)


class Page(msgspec.Struct):
    """Of a list."""

    metadata: Meta
    items: list[msgspec.Raw] | None = None


class Event(msgspec.Struct):
    """Of a watch."""

    type: str
    object: msgspec.Raw


class Status(msgspec.Struct):
    """How the server says what went wrong."""

    code: int = 0
    reason: str = ""
    message: str = ""
    details: dict[str, Any] | None = None


OUTCOMES: Final = ("ok", "gone", "unauthorized", "forbidden", "not_found", "throttled", "error", "unreachable", "too_large")
"""What can come of a request."""

_WORDS = {401: "unauthorized", 403: "forbidden", 404: "not_found", 410: "gone", 429: "throttled"}

_pages = msgspec.json.Decoder(Page)
_events = msgspec.json.Decoder(Event)
_statuses = msgspec.json.Decoder(Status)


class Api:
    """One client: ``async with``."""

    def __init__(
        self, access: Access, *, request_timeout_s: float, on_request: Callable[[str, str], None] = lambda _verb, _outcome: None
    ) -> None:
        """``on_request(verb, outcome)`` is called for each request when its answer begins, and again if that goes wrong; with
        the verb `object`, for each one that could not be read."""
        self._access = access
        self._request_timeout_s = request_timeout_s
        self.count = on_request
        """Counts what became of a request, or of an object in an answer."""
        self._tls: tuple[object, ssl.SSLContext | bool] | None = None

    async def __aenter__(self) -> Api:
        # What is kept open between requests is worth little: there are a few an hour.
        connector = aiohttp.TCPConnector(force_close=True, limit=4, socket_factory=_socket)
        self._session = aiohttp.ClientSession(connector=connector, trust_env=False, auto_decompress=False)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def page(self, what: Collection, *, limit: int, token: str | None) -> Page:
        """One page of a list; ``token`` says where the last one ended. ``limit`` 0: all of it. Raises ApiError."""
        query = what.query()
        if limit:
            query["limit"] = str(limit)
        if token is not None:
            query["continue"] = token
        within = aiohttp.ClientTimeout(total=self._request_timeout_s, connect=_CONNECT_S)
        async with self._request("list", what, query, within) as response:
            try:
                raw = await bounded.read(response, MAX_PAGE_BYTES)
            except bounded.TooLargeError:
                raise ApiError("too_large", f"a page of {what} is over {MAX_PAGE_BYTES} bytes") from None
            try:
                return _pages.decode(raw)
            except msgspec.MsgspecError as error:
                raise ApiError("error", f"a list of {what} is none: {error}") from None

    @asynccontextmanager
    async def watch(self, what: Collection, *, since: str, for_s: int) -> AsyncIterator[AsyncIterator[list[Event]]]:
        """Events after the version ``since``, as they come, for about ``for_s``. Raises ApiError, also while they are read."""
        query = {
            **what.query(),
            "watch": "1",
            "resourceVersion": since,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(for_s),
        }
        # The server ends it after for_s: with a silence that outlasts this, it is not there any more.
        within = aiohttp.ClientTimeout(total=for_s + 2 * _CONNECT_S, connect=_CONNECT_S)
        async with self._request("watch", what, query, within) as response:
            yield self._events(response, what)

    async def _events(self, response: aiohttp.ClientResponse, what: Collection) -> AsyncIterator[list[Event]]:
        rest = bytearray()
        async for piece in response.content.iter_any():
            searched = len(rest)
            rest += piece
            if rest.find(b"\n", searched) >= 0:
                *lines, last = rest.split(b"\n")
                rest = last
                yield [_event(line, what) for line in lines if line.strip()]
            if len(rest) > MAX_LINE_BYTES:
                raise ApiError("too_large", f"an event of the watch of {what} is over {MAX_LINE_BYTES} bytes")
        # What is left is the beginning of an event that will come again.

    @asynccontextmanager
    async def _request(
        self, verb: str, what: Collection, query: Mapping[str, str], within: aiohttp.ClientTimeout
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Raises ApiError, also for what goes wrong while the answer is read."""
        try:
            # The credentials are read for each request: a token that was exchanged counts from then on.
            headers = {
                "accept": "application/json",
                "accept-encoding": "identity",
                "user-agent": f"baton/{__version__}",
                **await asyncio.to_thread(self._access.headers),
            }
            tls = await asyncio.to_thread(self._tls_now)
            async with asyncio.timeout(self._request_timeout_s):  # to the head: that of a watch comes before any event
                response = await self._session.get(
                    f"{self._access.server}{what.path}",
                    params=query,
                    headers=headers,
                    timeout=within,
                    ssl=tls,
                    server_hostname=self._access.server_name,
                    allow_redirects=False,  # a token is for this server
                )
            async with response:
                if response.status != 200:
                    raise await _refusal(response, verb, what)
                self.count(verb, "ok")
                yield response
        except ApiError as error:
            self.count(verb, error.outcome)
            raise
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self.count(verb, "unreachable")
            why = str(error) or type(error).__name__
            raise ApiError("unreachable", f"{verb} of {what} at {self._access.server}: {why}") from error

    def _tls_now(self) -> ssl.SSLContext | bool:
        """Raises OSError."""
        versions = self._access.versions()
        if self._tls is None or self._tls[0] != versions:
            self._tls = versions, self._access.tls()
        return self._tls[1]


def status_of(event: Event) -> Status:
    """What an event ``ERROR`` says."""
    try:
        return _statuses.decode(event.object)
    except msgspec.MsgspecError:
        return Status(message="it does not say why")


def said_by(status: Status, what: Collection) -> ApiError:
    """The error that an event ``ERROR`` of a watch stands for."""
    why = f"watch of {what}: {_shown(status.message) or status.reason or status.code}"
    if status.code == 410 or status.reason in ("Expired", "Gone"):
        return GoneError(why)
    wait_s = (status.details or {}).get("retryAfterSeconds")
    return ApiError(
        _WORDS.get(status.code, "error"), why, retry_after_s=_bounded_s(wait_s) if isinstance(wait_s, int | float) else 0.0
    )


async def _refusal(response: aiohttp.ClientResponse, verb: str, what: Collection) -> ApiError:
    """The error that an answer other than 200 stands for."""
    try:
        said = _shown(_statuses.decode(await bounded.read(response, _MAX_STATUS_BYTES)).message)
    except (bounded.TooLargeError, msgspec.MsgspecError):
        said = ""
    code = response.status
    if code == 410:
        return GoneError(f"{verb} of {what}: {said or 'it is too long ago'}")
    hint = {
        401: "the API server does not know the token or certificate",
        403: f"RBAC must allow the verbs list and watch on {what} (`baton kubernetes rbac` prints what is needed)",
        404: "the API server has no such resource: is the CustomResourceDefinition installed, in this version?",
    }.get(code)
    why = f"{verb} of {what}: {code}{f': {hint}' if hint else ''}{f': {said}' if said else ''}"
    return ApiError(_WORDS.get(code, "error"), why, retry_after_s=_seconds(response.headers.get("retry-after", "")))


def _event(line: bytes | bytearray, what: Collection) -> Event:
    try:
        return _events.decode(line)
    except msgspec.MsgspecError as error:
        raise ApiError("error", f"an event of the watch of {what} is none: {error}") from None


def _shown(text: str) -> str:
    """What a server says, for a log: one line of bounded length."""
    return " ".join(text[: 2 * _MAX_SHOWN].split())[:_MAX_SHOWN]


def _seconds(text: str) -> float:
    """`Retry-After` in seconds; a date is not followed."""
    return _bounded_s(float(text)) if text.isascii() and text.isdecimal() and len(text) < 10 else 0.0


def _bounded_s(value: float) -> float:
    return min(max(0.0, float(value)), MAX_RETRY_AFTER_S) if math.isfinite(value) else 0.0


def _socket(info: tuple[Any, ...]) -> socket.socket:
    family, kind, protocol, *_ = info
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made
