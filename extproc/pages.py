"""The live page: its files, and what a browser is told about everything on the admin port.

The port asks nobody who they are, so a page of somebody else must not get at it: nothing is shown inside other pages, nothing
runs but the page's own script, and no other origin may read an answer.
"""

from __future__ import annotations

from importlib import resources

from aiohttp import web

from extproc.live import Live

_FILES = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

_HEADERS = {
    "content-security-policy": _POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


def routes(live: Live) -> list[web.RouteDef]:
    """The page and its data. Raises OSError if the files of the package cannot be read."""

    async def show_live(_: web.Request) -> web.Response:
        return web.Response(body=live.render(), content_type="application/json", headers={"cache-control": "no-store"})

    return [web.get("/live", show_live), *(_file(path, name, kind) for path, (name, kind) in _FILES.items())]


def _file(path: str, name: str, kind: str) -> web.RouteDef:
    body = (resources.files("extproc") / "page" / name).read_bytes()

    async def show(_: web.Request) -> web.Response:
        # A new version of the filter has another page: ask every time, it is a few kilobytes.
        return web.Response(body=body, content_type=kind, charset="utf-8", headers={"cache-control": "no-cache"})

    return web.get(path, show)


async def secure(_: web.Request, response: web.StreamResponse) -> None:
    """Signal of the application: puts the headers on every answer."""
    for name, value in _HEADERS.items():
        response.headers.setdefault(name, value)
