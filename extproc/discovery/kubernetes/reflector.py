"""One list-and-watch: what the API server has of a collection, as it changes, and what was last known while the server is away.

The rules are those of "Kubernetes API Concepts": list, watch from the list's version on, go on after an end from the last
version seen (bookmarks keep it young), list again when the server has forgotten that version. Nothing that goes wrong empties
what is known: a list replaces it when its last page is there.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Final, Generic, NoReturn, Protocol, TypeVar

import msgspec

from extproc.discovery.kubernetes.api import Api, ApiError, Collection, Event, GoneError, said_by, status_of
from extproc.discovery.kubernetes.objects import Named

MAX_OBJECTS: Final = 5_000
"""Of one collection."""
PAGE: Final = 100
"""Objects of a page, to begin with."""

_SMALLER = 8
"""A page that is too large is asked for again with so many times fewer objects."""
_PAGINGS = 3
"""Lists that may lose their continue token on the way, before one is asked for whole."""
_FIRST_BACKOFF_S = 0.5
_SHORT_S = 1.0
"""A watch that ends sooner, without an event, has failed."""
_FAILURES_BEFORE_LIST = 3
"""Watches that fail in a row although the server answers: the version may be what it cannot serve."""

_AT_ONCE = 20
"""Objects that are read before others get their turn: requests do not wait for a list."""


class _Kept(Protocol):
    @property
    def name(self) -> str:
        """Of the object."""


T = TypeVar("T", bound=_Kept)

_named = msgspec.json.Decoder(Named)


class _Versioned(msgspec.Struct, rename="camel"):
    resource_version: str = ""


class _Bookmark(msgspec.Struct):
    metadata: _Versioned


_bookmarks = msgspec.json.Decoder(_Bookmark)


class Pace(msgspec.Struct, frozen=True):
    """How it takes its time."""

    watch_s: float
    max_backoff_s: float

    def watch_for_s(self) -> int:
        """Length of the next watch: not the same for all, or all would come at once."""
        return max(1, round(self.watch_s * random.uniform(0.75, 1.25)))  # noqa: S311 (nothing secret)

    def backoff_s(self, failures: int) -> float:
        """Pause after so many failures in a row."""
        most = min(self.max_backoff_s, _FIRST_BACKOFF_S * 2.0 ** min(failures - 1, 16))
        return most * random.uniform(0.5, 1.0)  # noqa: S311 (nothing secret)


class Reflector(Generic[T]):
    """``items`` is what the server has of ``what``, or had when it was last there; ``run`` must be running."""

    def __init__(
        self,
        api: Api,
        what: Collection,
        keep: Callable[[msgspec.Raw], T],
        *,
        pace: Pace,
        on_news: Callable[[], None],
    ) -> None:
        """``keep`` makes of an object's JSON what is kept of it; msgspec.MsgspecError: it is left out. ``on_news`` is called
        when ``items``, ``synced`` or ``fault`` has changed."""
        self.items: dict[str, T] = {}
        """By name."""
        self.synced = False
        """It was listed once."""
        self.fault: str | None = None
        """Why what is known may be old."""
        self.unreadable = 0
        """Objects that could not be read and were left out, so far."""
        self._api = api
        self._what = what
        self._keep = keep
        self._pace = pace
        self._on_news = on_news
        self._version: str | None = None
        self._page = PAGE
        self._failures = 0

    async def run(self) -> NoReturn:
        """Until cancelled."""
        while True:
            try:
                if self._version is None:
                    await self._list()
                await self._watch()
            except GoneError:
                # To be expected after a pause; a server that says so again and again is left in peace meanwhile.
                self._version = None
                self._failures += 1
                if self._failures > 1:
                    await asyncio.sleep(self._pace.backoff_s(self._failures))
            except ApiError as error:
                await self._failed(error)

    async def _failed(self, error: ApiError) -> None:
        self._failures += 1
        if error.outcome != "unreachable" and self._failures % _FAILURES_BEFORE_LIST == 0:
            self._version = None
        if error.outcome == "too_large":
            self._version = None  # the same event would come again; a list may go past it
        if self.fault != str(error):
            self.fault = str(error)
            self._on_news()
        await asyncio.sleep(max(error.retry_after_s, self._pace.backoff_s(self._failures)))

    def _well(self) -> None:
        """The server answers."""
        if self.fault is not None:
            self.fault = None
            self._on_news()

    # -- list --------------------------------------------------------------------------------------------------------------

    async def _list(self) -> None:
        """Raises ApiError."""
        for paging in range(_PAGINGS + 1):
            try:
                found, version = await self._pages(self._page if paging < _PAGINGS else 0)
            except GoneError:
                if paging == _PAGINGS:
                    raise
                continue  # the continue token was too old: from the first page again
            break
        self._version = version
        changed = not self.synced or found != self.items
        self.items, self.synced = found, True
        if changed:
            self._on_news()

    async def _pages(self, limit: int) -> tuple[dict[str, T], str]:
        """Raises ApiError."""
        found: dict[str, T] = {}
        token: str | None = None
        seen = 0
        while True:
            try:
                page = await self._api.page(self._what, limit=limit, token=token)
            except ApiError as error:
                if error.outcome != "too_large" or limit == 1:
                    raise
                self._page = limit = max(1, (limit or PAGE) // _SMALLER)
                continue
            items = page.items or []
            for index, raw in enumerate(items, 1):
                self._take(found, raw)
                if index % _AT_ONCE == 0:
                    await asyncio.sleep(0)
            seen += len(items) or 1  # nor may there be empty pages without end
            if seen > MAX_OBJECTS:
                raise ApiError("too_large", f"more than {MAX_OBJECTS} {self._what} match; a narrower selector is needed")
            token = page.metadata.continue_
            if not token:
                if not page.metadata.resource_version:
                    raise ApiError("error", f"a list of {self._what} has no version")
                return found, page.metadata.resource_version

    # -- watch -------------------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Returns when the server ends it. Raises ApiError."""
        assert self._version is not None
        began_s, heard = time.monotonic(), False
        async with self._api.watch(self._what, since=self._version, for_s=self._pace.watch_for_s()) as batches:
            self._well()
            async for events in batches:
                self._apply(events)
                self._failures, heard = 0, True
        if heard or time.monotonic() - began_s >= _SHORT_S:
            self._failures = 0
        else:  # a server that hangs up at once is not asked again at once
            self._failures += 1
            await asyncio.sleep(self._pace.backoff_s(self._failures))

    def _apply(self, events: list[Event]) -> None:
        """Raises ApiError."""
        changed = False
        try:
            for event in events:
                if event.type == "ERROR":
                    raise said_by(status_of(event), self._what)
                version = _version(event)
                if event.type in ("ADDED", "MODIFIED"):
                    changed |= self._take(self.items, event.object)
                elif event.type == "DELETED":
                    changed |= self._drop(event.object)
                self._version = version or self._version
            if len(self.items) > MAX_OBJECTS:
                raise ApiError("too_large", f"more than {MAX_OBJECTS} {self._what} match; a narrower selector is needed")
        finally:
            if changed:
                self._on_news()

    def _take(self, into: dict[str, T], raw: msgspec.Raw) -> bool:
        """Whether that changes anything."""
        try:
            kept = self._keep(raw)
        except msgspec.MsgspecError:
            # One object that is not what its kind should be must not hide the others.
            self._left_out()
            return False
        if into.get(kept.name) == kept:
            return False
        into[kept.name] = kept
        return True

    def _drop(self, raw: msgspec.Raw) -> bool:
        """Whether that changes anything."""
        try:
            return self.items.pop(_name(raw), None) is not None
        except msgspec.MsgspecError:
            self._left_out()
            return False

    def _left_out(self) -> None:
        self.unreadable += 1
        self._api.count("object", "unreadable")


def _name(raw: msgspec.Raw) -> str:
    """Raises msgspec.MsgspecError."""
    return _named.decode(raw).metadata.name


def _version(event: Event) -> str:
    try:
        return _bookmarks.decode(event.object).metadata.resource_version
    except msgspec.MsgspecError:
        return ""
