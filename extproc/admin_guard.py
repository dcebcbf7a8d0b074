"""Who may call the admin port, as far as a browser tells: the port itself asks nobody who they are.

A page of somebody else, open in the browser of somebody who reaches this port, can send requests to it. It can read no answer
(see :mod:`extproc.pages`), unless it has made its own name point here (DNS rebinding): then the port is called by that name.
"""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

# Nobody on the internet can own a name below these (RFC 6761; ICANN has set `internal` aside; the others are no top level
# domains, but what a cluster's own name server answers for).
_PRIVATE: Final = (".localhost", ".svc", ".cluster.local", ".internal", ".test")

_SAFE: Final = frozenset(("GET", "HEAD"))


def host_fault(host: str, allowed: Sequence[str] = ()) -> str | None:
    """Why a `Host` header (`name`, `name:port`, `[v6]:port`) is not one of ours; None: it may be."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        name = ""
    name = name.rstrip(".")
    if not name:
        return "the request names no host"
    try:
        ip_address(name)
    except ValueError:
        if "." not in name or name.endswith(_PRIVATE) or name in allowed:
            return None
        return f"the admin port is not called {name[:128]!r} (admin_hosts names what it is called)"
    return None


def guard(allowed: Sequence[str] = ()) -> Middleware:
    """A middleware that refuses what only a browser on somebody else's page would send."""
    names = frozenset(name.lower().rstrip(".") for name in allowed)

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        hosts = request.headers.getall("Host", [])
        fault = "the request has several hosts" if len(hosts) > 1 else host_fault(hosts[0] if hosts else "", tuple(names))
        if fault is not None:
            return _refused(421, "wrong_host", fault)
        if request.method not in _SAFE and (fault := _foreign(request, hosts[0])) is not None:
            return _refused(403, "foreign_origin", fault)
        return await handler(request)

    return check


def _foreign(request: web.Request, host: str) -> str | None:
    """Why this request was made by a page of somebody else; None: it was not, or not by a page."""
    site = request.headers.get("Sec-Fetch-Site")
    if site is not None and site not in ("same-origin", "none"):
        return f"a page of another site may not ask this ({site[:32]!r})"
    origin = request.headers.get("Origin")
    if origin is not None and origin.partition("://")[2].lower() != host.lower():
        return "a page of another origin may not ask this"
    return None


def _refused(status: int, code: str, message: str) -> web.Response:
    body = msgspec.json.encode({"error": {"message": message, "code": code}})
    return web.Response(body=body, status=status, content_type="application/json")
