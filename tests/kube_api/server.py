"""The server. It keeps resource versions and a history like the real one, and fails on command.

A list is a snapshot with a version; a watch gives every later change, or says 410 where the history no longer reaches back.
Label and field selectors hold for both: an object that no longer matches is DELETED for the watcher.
"""

from __future__ import annotations

import asyncio
import copy
import json
import ssl
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from aiohttp import web

from tests.kube_api.selectors import fields_match, labels_match

Object = dict[str, Any]

KINDS = {"pods": "Pod", "endpointslices": "EndpointSlice", "inferencepools": "InferencePool"}


_BEGINNING = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass
class Asked:
    """One request as it came in."""

    verb: str
    resource: str
    namespace: str
    query: dict[str, str]
    token: str | None
    certificate: str | None


@dataclass
class _Change:
    version: int
    resource: str
    before: Object | None
    after: Object | None


@dataclass(eq=False)
class _Watcher:
    resource: str
    events: asyncio.Queue[bytes | None]
    matches: Callable[[Object], bool]
    request: web.Request
    ended: bool = False


@dataclass
class KubeApi:
    """Use as an async context manager. ``port`` 0: any; after a stop it is the same again."""

    port: int = 0
    tls: ssl.SSLContext | None = None
    tokens: set[str] | None = None
    """Bearer tokens that are known; None: everybody is."""
    window: int = 1_000
    """Changes that the history holds."""
    gone_as: Literal["status", "event"] = "status"
    """How a watch from too long ago is told so."""
    page: int | None = None
    """Most objects of a page, whatever a client asks for."""
    watch_s: float | None = None
    """A watch ends after this, whatever a client asks for."""
    asked: list[Asked] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.version = 1000
        self._oldest = 1000
        self._objects: dict[tuple[str, str, str], Object] = {}
        self._changes: list[_Change] = []
        self._snapshots: dict[str, tuple[list[Object], int]] = {}
        self._watchers: set[_Watcher] = set()
        self._uids = Counter[str]()
        self._failures: list[tuple[str, int, dict[str, str], str]] = []
        self._runner: web.AppRunner | None = None
        self.gate: asyncio.Event | None = None
        """Requests wait for it."""
        self.expire_continue = 0
        """So many continue tokens have expired when they come."""
        self.denied: set[str] = set()
        """Resources, or ``verb resource``, that nobody may have."""
        self.endless = False
        """Lists have another page, an empty one, again and again."""
        self.garbage: bytes | None = None
        """The answer of the next list."""

    async def __aenter__(self) -> KubeApi:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def url(self) -> str:
        return f"{'http' if self.tls is None else 'https'}://127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/{tail:.*}", self._serve)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, ssl_context=self.tls, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Gone, with all connections."""
        if self._runner is not None:
            self.disconnect()
            await self._runner.cleanup()
            self._runner = None

    # -- what happens in the cluster ---------------------------------------------------------------------------------------

    def put(self, resource: str, found: Object) -> Object:
        """Create an object, or change it."""
        found = copy.deepcopy(found)
        meta = found["metadata"]
        meta.setdefault("namespace", "default")
        key = resource, meta["namespace"], meta["name"]
        before = self._objects.get(key)
        self.version += 1
        if before is None:
            self._uids[meta["name"]] += 1
            meta.setdefault("uid", f"uid-{meta['name']}-{self._uids[meta['name']]}")
            meta.setdefault("creationTimestamp", (_BEGINNING + timedelta(seconds=self.version)).strftime("%Y-%m-%dT%H:%M:%SZ"))
        else:
            meta.setdefault("uid", before["metadata"]["uid"])
            meta.setdefault("creationTimestamp", before["metadata"]["creationTimestamp"])
        meta["resourceVersion"] = str(self.version)
        self._objects[key] = found
        self._changed(_Change(self.version, resource, before, found))
        return found

    def edit(self, resource: str, name: str, change: Callable[[Object], None], namespace: str = "default") -> Object:
        """Change an object by a function."""
        found = copy.deepcopy(self._objects[resource, namespace, name])
        change(found)
        return self.put(resource, found)

    def delete(self, resource: str, name: str, namespace: str = "default") -> None:
        before = self._objects.pop((resource, namespace, name))
        self.version += 1
        self._changed(_Change(self.version, resource, before, None))

    def get(self, resource: str, name: str, namespace: str = "default") -> Object:
        return self._objects[resource, namespace, name]

    # -- what goes wrong ---------------------------------------------------------------------------------------------------

    def forget_history(self) -> None:
        """Compaction: what was before is no longer known."""
        self.version += 1
        self._oldest = self.version
        self._changes.clear()
        self._snapshots.clear()

    def bookmark(self) -> None:
        """To every watch that wants them."""
        for watcher in self._watchers:
            if watcher.request.query.get("allowWatchBookmarks") == "true":
                watcher.events.put_nowait(_line("BOOKMARK", _bookmark(watcher.resource, self.version)))

    def error_event(self, code: int, reason: str) -> None:
        """To every watch, which it ends."""
        for watcher in self._watchers:
            watcher.events.put_nowait(_line("ERROR", _status(code, reason, "told to")))
            watcher.events.put_nowait(None)

    def send(self, raw: bytes) -> None:
        """These bytes to every watch."""
        for watcher in self._watchers:
            watcher.events.put_nowait(raw)

    def end_watches(self) -> None:
        """As after `timeoutSeconds`."""
        for watcher in self._watchers:
            watcher.events.put_nowait(None)

    def disconnect(self) -> None:
        """Cut all connections of watches, wherever they are in what they send."""
        for watcher in self._watchers:
            if watcher.request.transport is not None:
                watcher.request.transport.abort()

    def fail(self, status: int, *, times: int = 1, verb: str = "", headers: dict[str, str] | None = None) -> None:
        """The next requests (of ``verb``) are answered so."""
        self._failures += [(verb, status, headers or {}, _REASONS.get(status, "InternalError"))] * times

    @property
    def watching(self) -> int:
        return sum(not watcher.ended for watcher in self._watchers)

    def count(self, verb: str, resource: str = "pods") -> int:
        return sum(each.verb == verb and each.resource == resource for each in self.asked)

    # -- HTTP --------------------------------------------------------------------------------------------------------------

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        parts = request.path.strip("/").split("/")
        try:
            at = parts.index("namespaces")
            namespace, resource = parts[at + 1 : at + 3]
        except ValueError:
            return web.json_response(_status(404, "NotFound", "the server could not find the requested resource"), status=404)
        verb = "watch" if request.query.get("watch") in ("1", "true") else "list"
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        peer = request.get_extra_info("peercert") or {}
        names = {key: value for group in peer.get("subject", ()) for key, value in group}
        certificate = names.get("commonName")
        known = token if scheme == "Bearer" else None
        self.asked.append(Asked(verb, resource, namespace, dict(request.query), known, certificate))
        if self.gate is not None:
            await self.gate.wait()
        if (refusal := self._refusal(verb, resource, namespace, known, certificate)) is not None:
            return refusal
        group = "/".join(parts[1:at])
        try:
            labels, fields = request.query.get("labelSelector", ""), request.query.get("fieldSelector", "")

            def matches(found: Object) -> bool:
                meta = found["metadata"]
                return (
                    meta["namespace"] == namespace
                    and labels_match(meta.get("labels") or {}, labels)
                    and fields_match(found, fields)
                )

            if verb == "list":
                return self._list(request, resource, group, matches)
        except ValueError as error:
            return web.json_response(_status(400, "BadRequest", str(error)), status=400)
        return await self._watch(request, resource, matches)

    def _refusal(
        self, verb: str, resource: str, namespace: str, token: str | None, certificate: str | None
    ) -> web.Response | None:
        for index, (of, code, headers, reason) in enumerate(self._failures):
            if of in ("", verb):
                del self._failures[index]
                return web.json_response(_status(code, reason, "told to"), status=code, headers=headers)
        if self.tokens is not None and token not in self.tokens and certificate is None:
            return web.json_response(_status(401, "Unauthorized", "Unauthorized"), status=401)
        if resource in self.denied or f"{verb} {resource}" in self.denied:
            message = f'{resource} is forbidden: User "system:serviceaccount:default:x" cannot {verb} resource "{resource}"'
            return web.json_response(_status(403, "Forbidden", f'{message} in namespace "{namespace}"'), status=403)
        return None

    def _list(self, request: web.Request, resource: str, group: str, matches: Callable[[Object], bool]) -> web.Response:
        if self.garbage is not None:
            raw, self.garbage = self.garbage, None
            return web.Response(body=raw, content_type="application/json")
        if self.endless:
            return web.json_response({"metadata": {"resourceVersion": "1", "continue": "more"}, "items": []})
        token = request.query.get("continue")
        if token is None:
            found = [each for (of, _, _), each in sorted(self._objects.items()) if of == resource and matches(each)]
            start, version = 0, self.version
        else:
            start, name = int(token.partition("-")[0]), token.partition("-")[2]
            if self.expire_continue or name not in self._snapshots:
                self.expire_continue = max(0, self.expire_continue - 1)
                gone = _status(410, "Expired", "the continue token is too old for a consistent list")
                return web.json_response(gone, status=410)
            found, version = self._snapshots[name]
        limit = int(request.query.get("limit", "0"))
        if self.page is not None:
            limit = min(limit or self.page, self.page)
        end = start + limit if limit else len(found)
        meta: Object = {"resourceVersion": str(version)}
        if end < len(found):
            name = f"{version}x{len(self._snapshots)}"
            self._snapshots[name] = found, version
            meta |= {"continue": f"{end}-{name}", "remainingItemCount": len(found) - end}
        return web.json_response(
            {"kind": f"{KINDS[resource]}List", "apiVersion": group, "metadata": meta, "items": found[start:end]}
        )

    async def _watch(self, request: web.Request, resource: str, matches: Callable[[Object], bool]) -> web.StreamResponse:
        since = int(request.query["resourceVersion"])
        gone = since < self._oldest
        if gone and self.gone_as == "status":
            return web.json_response(_status(410, "Expired", f"too old resource version: {since} ({self._oldest})"), status=410)
        response = web.StreamResponse(headers={"content-type": "application/json"})
        response.enable_chunked_encoding()
        watcher = _Watcher(resource, asyncio.Queue(), matches, request)
        if gone:
            watcher.events.put_nowait(_line("ERROR", _status(410, "Expired", f"too old resource version: {since}")))
            watcher.events.put_nowait(None)
        for change in self._changes:
            if change.version > since:
                self._tell(watcher, change)
        self._watchers.add(watcher)
        wanted_s = float(request.query.get("timeoutSeconds", "300"))
        try:
            await response.prepare(request)
            with suppress(TimeoutError):
                async with asyncio.timeout(wanted_s if self.watch_s is None else self.watch_s):
                    while (line := await watcher.events.get()) is not None:
                        await response.write(line)
            watcher.ended = True
            await response.write_eof()
        except ConnectionError:
            pass
        finally:
            self._watchers.discard(watcher)
        return response

    # -- changes -----------------------------------------------------------------------------------------------------------

    def _changed(self, change: _Change) -> None:
        self._changes.append(change)
        if len(self._changes) > self.window:
            self._oldest = self._changes.pop(0).version
        for watcher in self._watchers:
            self._tell(watcher, change)

    def _tell(self, watcher: _Watcher, change: _Change) -> None:
        for kind, found in _events(watcher, change):
            watcher.events.put_nowait(_line(kind, found))


def _events(watcher: _Watcher, change: _Change) -> Iterator[tuple[str, Object]]:
    if watcher.resource != change.resource:
        return
    before = change.before is not None and watcher.matches(change.before)
    after = change.after is not None and watcher.matches(change.after)
    if after:
        assert change.after is not None
        yield ("MODIFIED" if before else "ADDED"), change.after
    elif before:
        found = copy.deepcopy(change.after or change.before or {})
        found["metadata"]["resourceVersion"] = str(change.version)
        yield "DELETED", found


_REASONS = {403: "Forbidden", 429: "TooManyRequests", 410: "Expired", 500: "InternalError", 503: "ServiceUnavailable"}


def _status(code: int, reason: str, message: str) -> Object:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
    }


def _bookmark(resource: str, version: int) -> Object:
    return {"kind": KINDS[resource], "metadata": {"resourceVersion": str(version), "creationTimestamp": None}, "spec": {}}


def _line(kind: str, found: Object) -> bytes:
    return json.dumps({"type": kind, "object": found}).encode() + b"\n"
