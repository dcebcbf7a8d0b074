"""The admin port gives the page away to nobody else's pages, and the page builds nothing from text that it was sent."""

from __future__ import annotations

import re
from importlib import resources

import aiohttp
import pytest

from tests.page.world import World

PAGE = resources.files("extproc") / "page"

FORBIDDEN = (
    "innerHTML",
    "outerHTML",
    "insertAdjacentHTML",
    "document.write",
    "eval(",
    "new Function",
    'setAttribute("style"',
    "DOMParser",
)


@pytest.mark.parametrize(
    "path", ["/", "/page.js", "/page.css", "/icon.svg", "/live", "/metrics", "/healthz", "/debug/decisions", "/no-such"]
)
async def test_every_answer_of_the_admin_port_forbids_what_the_page_does_not_need(path: str) -> None:
    async with World(1, 1).served() as address, aiohttp.ClientSession() as session, session.get(address + path) as answer:
        assert answer.status == (404 if path == "/no-such" else 200)
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"
        assert "access-control-allow-origin" not in answer.headers


async def test_live_is_never_kept_by_a_cache() -> None:
    async with World(1, 1).served() as address, aiohttp.ClientSession() as session, session.get(address + "/live") as answer:
        assert answer.headers["cache-control"] == "no-store"
        assert answer.content_type == "application/json"


def test_the_script_has_no_way_to_turn_text_into_markup_or_code() -> None:
    script = (PAGE / "page.js").read_text()
    assert [word for word in FORBIDDEN if word in script] == []


def test_the_page_needs_nothing_from_elsewhere_and_has_nothing_inline() -> None:
    html = (PAGE / "index.html").read_text()
    assert re.findall(r"(?:src|href)=\"(?!page\.|icon\.svg|#)[^\"]*\"", html) == []
    assert re.findall(r"<style|\sstyle=|\son[a-z]+=|<script>(?!</)", html) == []
    css = (PAGE / "page.css").read_text()
    assert re.findall(r"url\(|@import|https?:", css) == []
    script = (PAGE / "page.js").read_text()
    assert re.findall(r"https?://[^\s\"`$]+", script.replace("http://www.w3.org/2000/svg", "")) == []
